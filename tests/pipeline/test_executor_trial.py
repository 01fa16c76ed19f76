"""Thread or process, decided by measurement: the rule, and what the engine makes of it."""

import time
from collections.abc import Callable
from typing import Any

import pytest

import intune
from intune._compose import build_loader
from intune.pipeline.executors import PROBE_SECONDS, ExecutorTrial, Verdict
from intune.pipeline.options import LoaderOptions
from intune.testing import ManualClock

pytestmark = pytest.mark.timeout(180)


class FixedProbe:
    """Says always the same."""

    def __init__(self, wait: float | None) -> None:
        self.wait = wait

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def mean_wait_seconds(self) -> float | None:
        return self.wait


def judged(wait: float | None, wall: float = 0.02, cpu: float = 0.02, size: int = 0) -> tuple[Verdict, int]:
    """What is decided, and after how many items."""
    trial = ExecutorTrial(FixedProbe(wait))
    for number in range(1, 1000):
        with trial.watch():
            pass
        verdict = trial.add(wall, cpu, size)
        if verdict is not None:
            return verdict, number
    raise AssertionError("nothing was decided")


class TestRule:
    def test_a_function_that_holds_the_lock(self) -> None:
        verdict, items = judged(5 * PROBE_SECONDS)
        assert verdict == ("process", "it holds the interpreter lock 83% of the time")
        assert items == 6  # the first one is left out, five make 0.1 s

    def test_a_function_that_releases_it(self) -> None:
        assert judged(0.1 * PROBE_SECONDS)[0] == ("thread", "it holds the interpreter lock 9% of the time")

    @pytest.mark.parametrize(("megabytes", "executor"), [(4, "process"), (6, "thread")])
    def test_sending_that_costs_as_much_as_the_work(self, megabytes: int, executor: str) -> None:
        """20 ms of work; to send 5 MB there and back takes 5 ms."""
        verdict, _ = judged(1.0, size=megabytes * 10**6)
        assert verdict.executor == executor
        assert executor == "process" or "cost little more than sending" in verdict.reason

    @pytest.mark.parametrize(("wait", "wall"), [(None, 0.02), (1.0, 0.001)])
    def test_without_a_sample_it_stays_a_thread(self, wait: float | None, wall: float) -> None:
        verdict, items = judged(wait, wall)
        assert verdict == ("thread", "its items are too short to be measured")
        assert items == ExecutorTrial.ITEMS

    def test_one_long_item_is_enough(self) -> None:
        assert judged(5 * PROBE_SECONDS, wall=0.5, cpu=0.5)[1] == 1

    def test_company_spoils_the_measurement(self) -> None:
        trial = ExecutorTrial(FixedProbe(1.0))
        trial.disturbed = True
        verdict = trial.add(2.0, 2.0, 0)
        assert verdict is not None
        assert verdict.executor == "thread"


class Works:
    """Takes 20 ms of a clock in this process; in another one, where there is no such clock, none."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __call__(self, value: int) -> int:
        self.clock.advance(0.02, cpu_seconds=0.02)
        return value * 3

    def __reduce__(self) -> Any:
        return _tripled, ()


def _tripled() -> Callable[[int], int]:
    return lambda value: value * 3


def run(function: Any, wait: float, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, **options: Any) -> Any:
    """Values, executors of the stages at the end, and the events of the decision."""
    monkeypatch.setattr("intune._compose.LockProbe", lambda *arguments: FixedProbe(wait))
    pipe = intune.from_iterable(range(300)).map(function, name="work", executor="auto", **options)
    with build_loader(pipe, LoaderOptions(cpus=2), clock=clock) as loader:
        values = list(loader)
        loader.explain()  # closes the window that has the decision
        events = [event for line in loader.journal for event in line["seen"].get("events", ())]
        stages = [stage.executor for stage in loader._engine.stages]
        return values, stages, [event["detail"] for event in events if event["kind"] == "executor"]


def test_a_stage_that_holds_the_lock_moves_to_processes_and_the_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    values, executors, events = run(Works(clock), 5 * PROBE_SECONDS, monkeypatch, clock)
    assert values == [3 * value for value in range(300)]
    assert executors == ["thread", "process"]
    assert events == ["process: it holds the interpreter lock 83% of the time"]


def test_a_stage_that_releases_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    values, executors, events = run(Works(clock), 0.0, monkeypatch, clock)
    assert values == [3 * value for value in range(300)]
    assert executors == ["thread", "thread"]
    assert events == ["thread: it holds the interpreter lock 0% of the time"]


def test_a_function_that_cannot_be_sent_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    def stuck(value: int) -> int:  # its clock has a lock
        clock.advance(0.02, cpu_seconds=0.02)
        return value * 3

    values, executors, events = run(stuck, 5 * PROBE_SECONDS, monkeypatch, clock)
    assert values == [3 * value for value in range(300)]
    assert executors == ["thread", "thread"]
    assert "but it cannot be sent to a process" in events[0]


@pytest.mark.slow
def test_measured_for_real() -> None:
    """Plain Python for 30 ms an item holds the lock; a sleep does not."""

    def spin(value: int) -> int:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return value

    for function, executor in ((spin, "process"), (_sleeps, "thread")):
        with intune.from_iterable(range(20)).map(function, executor="auto").loader(cpus=2) as loader:
            assert list(loader) == list(range(20))
            assert loader._engine.stages[1].executor == executor


def _sleeps(value: int) -> int:
    time.sleep(0.03)
    return value


def test_the_rows_do_not_depend_on_it() -> None:
    pipe = intune.from_iterable(range(500)).map(_drawn, rng=True, executor="auto").shuffle(100, seed=1).batch(10)
    fixed = intune.from_iterable(range(500)).map(_drawn, rng=True).shuffle(100, seed=1).batch(10)
    with pipe.loader(cpus=2) as one, fixed.loader(cpus=1) as other:
        assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]
        assert one.state_dict() == other.state_dict()


def _drawn(value: int, rng: Any) -> float:
    return value + rng.random()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"executor": "auto"}, "flat_map draws lazily"), ({"executor": "fast"}, "must be 'thread', 'process' or 'auto'")],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(intune.PipelineError, match=message):
        intune.from_iterable([1]).flat_map(lambda value: [value], **options)
