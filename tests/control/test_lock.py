"""What tells the interpreter lock from other limits: on figures as they were measured, and on real pipelines."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import intune
from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.control.explain import limit
from intune.control.lock import lock_bound


def stage(name: str, busy: float, cpu: float, queued: float | None = 0.0, **more: object) -> StageSnapshot:
    """A stage with seconds of work, of CPU and in the run queue in a window of 1 s, in items of 0.1 ms of CPU."""
    info = {key: more.pop(key) for key in ("executor", "max_concurrency", "waits", "kind") if key in more}
    mean = more.pop("cpu_seconds_mean", 1e-4)
    assert isinstance(mean, float)
    wall = mean * busy / cpu
    figures = {"items_in": 100, "items_out": 100, "wall_seconds_p50": wall, "wall_seconds_p99": wall, **more}
    return StageSnapshot(
        StageInfo(name, **{"kind": "map", **info}),
        concurrency=None,
        running=1,
        wall_seconds_mean=wall,
        cpu_seconds_mean=mean,
        busy_seconds=busy,
        run_queue_seconds=None if info.get("executor") == "process" else queued,
        **{"wait_share": {"input": 0.9}, **figures},
    )


def window(
    *stages: StageSnapshot,
    wait_ms: float | None,
    used: float | None,
    slots: int = 2,
    cpus: int = 2,
    trainer: float = 1.0,
) -> Snapshot:
    """A window of 1 s of a source that draws one at a time, of these stages, and of batch."""
    source = stage("from_iterable", 0.006, 0.006, kind="source", max_concurrency=1, wait_share={})
    batch = stage("batch", 0.004, 0.004, kind="batch", wait_share={"input": 1.0})
    return Snapshot(
        window_seconds=1.0,
        warm=True,
        stages=(source, *stages, batch),
        consumer=ConsumerSnapshot(120, 7680, 0.008, trainer),
        machine=MachineSnapshot(
            cpus, cpu_seconds_used=used, lock_wait_seconds=None if wait_ms is None else wait_ms / 1000
        ),
        allocation=Allocation({}, slots),
    )


MEASURED = {
    "one stage": (window(stage("work", 0.926, 0.907, 0.15), wait_ms=1.12, used=0.98), ("work",), 2.0),
    "one stage, 8 slots on 2 CPUs": (
        window(stage("work", 0.934, 0.931, 0.03), wait_ms=1.01, used=1.02, slots=8),
        ("work",),
        2.0,
    ),
    "two stages": (
        window(stage("work", 0.461, 0.456, 0.03), stage("more", 0.457, 0.456, 0.1), wait_ms=1.19, used=1.0),
        ("work", "more"),
        2.0,
    ),
    "items of 12 ms": (
        window(stage("work", 1.89, 0.98, cpu_seconds_mean=0.012), wait_ms=10.7, used=1.0),
        ("work",),
        2.0,
    ),
    "blocks beside short work that waits for the lock": (
        window(stage("work", 0.95, 0.9), stage("cast", 0.6, 0.08), wait_ms=5.0, used=1.0),
        ("work",),
        2.0,
    ),
    "a trainer that computes half of the time": (
        window(stage("work", 0.75, 0.72), wait_ms=1.5, used=1.0, trainer=0.4),
        ("work",),
        1 / 0.6,
    ),
    "machine with 16 CPUs": (
        window(stage("work", 0.95, 0.9), wait_ms=1.0, used=1.0, slots=16, cpus=16),
        ("work",),
        10.0,
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_threads_that_take_turns_are_bound_by_the_lock(name: str) -> None:
    snapshot, moved, gain = MEASURED[name]
    bound = lock_bound(snapshot)
    assert bound is not None
    assert bound.stage.name == "work"
    assert bound.move == moved
    assert bound.gain == pytest.approx(gain, rel=0.05)
    found = limit(snapshot)
    assert (found.kind, found.stage) == ("lock", "work")
    assert f'For the next run, executor="process" on stage{"s" if len(moved) > 1 else ""} work' in found.sentence
    assert f"up to {bound.gain:.1f} times as fast" in found.sentence


OTHERWISE = {
    "numpy that lets go of the lock": window(stage("work", 1.76, 0.88, 0.58), wait_ms=0.11, used=0.99),
    "the same with one CPU taken by others": window(stage("work", 1.13, 0.9, 0.49), wait_ms=0.09, used=0.99, slots=8),
    "the same with both CPUs taken by others": window(stage("work", 1.0, 0.4, 0.5), wait_ms=0.33, used=0.45),
    "numpy on both CPUs beside Python": window(
        stage("np", 1.41, 0.96), stage("work", 0.4, 0.4), wait_ms=0.17, used=1.56
    ),
    "numpy and Python with a CPU taken by others": window(
        stage("np", 1.2, 0.5, 0.35), stage("work", 0.33, 0.2, 0.07), wait_ms=0.92, used=0.77
    ),
    "numpy and Python in one function": window(stage("work", 1.65, 0.92, 0.42), wait_ms=0.26, used=1.02),
    "Python in processes": window(stage("work", 1.99, 0.98, executor="process"), wait_ms=0.1, used=1.06),
    "Python in processes, a trainer in Python": window(
        stage("work", 1.2, 0.98, executor="process"), wait_ms=5.0, used=1.9, trainer=0.2
    ),
    "one slot": window(stage("work", 0.94, 0.92), wait_ms=3.3, used=0.99, slots=1),
    "one CPU": window(stage("work", 0.94, 0.92), wait_ms=3.3, used=0.99, slots=2, cpus=1),
    "no probe": window(stage("work", 0.94, 0.92), wait_ms=None, used=0.99),
    "work on the CPU for half of the time": window(stage("work", 0.5, 0.5), wait_ms=1.0, used=0.55),
    "waiting for a disk beside Python": window(stage("work", 0.9, 0.1), wait_ms=5.0, used=0.5),
    "a stage that waits": window(stage("work", 30.0, 0.2, waits=True), wait_ms=0.5, used=0.6),
    "a trainer that computes outside the lock": window(stage("work", 0.4, 0.4), wait_ms=0.5, used=1.4, trainer=0.5),
    "a trainer that computes in one thread": window(stage("work", 0.4, 0.4), wait_ms=0.5, used=1.0, trainer=0.5),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_looks_alike_is_not_bound_by_the_lock(name: str) -> None:
    assert lock_bound(OTHERWISE[name]) is None
    found = limit(OTHERWISE[name])
    assert found.kind != "lock"
    assert found.stage != "from_iterable"


def test_items_that_are_too_small_to_send_are_not_sent() -> None:
    small = stage("work", 0.42, 0.42, cpu_seconds_mean=2.4e-6)
    snapshot = window(small, wait_ms=0.41, used=1.01, trainer=0.9)
    bound = lock_bound(snapshot)
    assert bound is not None
    assert (bound.move, bound.gain, bound.too_small) == ((), 1.0, True)
    said = limit(snapshot).sentence
    assert "Its items take only 2 us, too little to send each to a process" in said
    assert "numpy or Arrow" in said
    assert 'executor="process"' not in said


def test_what_cannot_run_in_a_process_is_named_without_that_advice() -> None:
    source = stage("read", 0.9, 0.9, kind="source")
    bound = lock_bound(window(source, wait_ms=2.0, used=1.0))
    assert bound is not None
    assert (bound.stage.name, bound.move, bound.too_small) == ("read", (), False)
    said = limit(window(source, wait_ms=2.0, used=1.0)).sentence
    assert said.endswith("Work on whole columns in numpy or Arrow needs the lock less.")
    assert "too little" not in said


def test_a_stage_that_may_do_two_at_once_gains_no_more_than_that() -> None:
    bound = lock_bound(window(stage("work", 0.95, 0.95, max_concurrency=2), wait_ms=2.0, used=1.0, slots=16, cpus=16))
    assert bound is not None
    assert bound.gain == pytest.approx(2.0, rel=0.1)


def test_where_little_would_be_gained_nothing_is_moved() -> None:
    """Half stays behind in the source, and the trainer needs most of the time anyway."""
    snapshot = window(
        stage("read", 0.5, 0.5, kind="source"), stage("work", 0.4, 0.4), wait_ms=2.0, used=1.0, trainer=0.12
    )
    bound = lock_bound(snapshot)
    assert bound is not None
    assert (bound.move, bound.gain) == ((), 1.0)


def test_figures_of_the_whole_process_are_not_needed() -> None:
    snapshot = window(stage("work", 0.926, 0.907, 0.15), wait_ms=1.12, used=None)
    assert lock_bound(snapshot) is not None
    assert lock_bound(replace(snapshot, window_seconds=0.0)) is None


# --- real pipelines

WINDOWS = 40
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads need two CPUs to take turns")


def in_python(x: int) -> int:
    return x + 0 * sum(number * number for number in range(2_000))


def in_numpy(x: int) -> float:
    return float(np.sqrt(np.full(200_000, float(x))).sum())


class SlowNumbers:
    """Numbers that take Python 10 ms or so each, so that what goes by between two of them is little."""

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            yield number + 0 * sum(map(in_python, range(100)))


class Numbers:
    """Numbers at once."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def explanations(pipe: intune.Pipeline) -> Iterator[str]:
    """What `explain` says of each window but the first, which begins with warming up."""
    with pipe.loader(cpus=2) as loader:
        last, seen = None, 0
        for _ in loader:
            now = loader.stats().window
            if now is not last and now is not None and any(stage.items_out for stage in now.stages):
                last, seen = now, seen + 1
                if seen > 1:
                    yield loader.explain()


@needs_two_cpus
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stages", [1, 2])
def test_explain_names_the_stages_in_python_on_threads(stages: int) -> None:
    pipe = intune.from_iterable(Numbers())
    for number in range(stages):
        pipe = pipe.map(in_python, name=f"work{number}")
    names = "stages work0 and work1" if stages == 2 else "stage work0"
    said = []
    for text in itertools.islice(explanations(pipe.batch(64)), WINDOWS):
        said.append(text)
        assert "Stage from_iterable is the limit" not in text
        if "The interpreter lock is the limit" in text and f'executor="process" on {names} makes it up to' in text:
            return
    pytest.fail("never named: " + "\n".join(said))


@needs_two_cpus
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("function", "executor"), [(in_numpy, "thread"), (in_python, "process")], ids=["numpy", "processes"]
)
def test_explain_blames_neither_the_lock_nor_the_source_for_other_work(function: object, executor: str) -> None:
    pipe = intune.from_iterable(Numbers()).map(function, name="work", executor=executor).batch(64)
    for text in itertools.islice(explanations(pipe), 3):
        assert "lock is the limit" not in text
        assert "Stage from_iterable is the limit" not in text


@needs_two_cpus
@pytest.mark.timeout(120)
def test_explain_names_a_source_that_is_busy_all_the_time() -> None:
    pipe = intune.from_iterable(SlowNumbers()).map(abs).batch(4)
    said = []
    for text in itertools.islice(explanations(pipe), WINDOWS):
        said.append(text)
        if "Stage from_iterable is the limit: it works on one item at a time nearly all the time" in text:
            return
    pytest.fail("never named: " + "\n".join(said))


@pytest.mark.parametrize("others", [0.51, 1.4])
def test_a_stage_that_lets_go_of_the_lock_is_not_said_to_hold_it_nor_to_have_waited_for_it(others: float) -> None:
    holds = stage("work", 3.4, 1.02, cpu_seconds_mean=0.02)
    snapshot = window(holds, stage("np", others, others), wait_ms=17.0, used=1.1 + others, slots=4, cpus=4)
    bound = lock_bound(snapshot)
    assert bound is not None
    assert bound.stage.name == "work"
    assert bound.gain == pytest.approx(4 / (1.1 + others), rel=0.02), "as if all CPUs worked all the time"
    assert bound.processes["work"] == round(bound.gain * 1.02)


def test_it_says_that_threads_do_not_help_and_how_many_processes_do() -> None:
    said = limit(MEASURED["machine with 16 CPUs"][0]).sentence
    assert 'More threads do not help. For the next run, executor="process" on stage work makes it up to' in said
    assert said.endswith("10.0 times as fast, with 9 processes.")
