"""The checkers, tried on tuners and workloads that are broken on purpose."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from intune._values import Allocation, Budget, Event, Snapshot, StageInfo
from intune.testing import ScriptedWorkload, blank_snapshot, check_tuner, check_workload
from intune.testing.scenes import MOODS, Scene, scenes, window
from intune.tuners import Shared, Static


class Broken:
    """Shared, with one thing changed."""

    def __init__(self, change: Callable[[Allocation, Snapshot, Budget], object]) -> None:
        self.change = change

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        return self.change(Shared().propose(snapshot, budget), snapshot, budget)  # type: ignore[return-value]


def with_first(value: object) -> Callable[[Allocation, Snapshot, Budget], object]:
    """The first stage gets this value."""

    def change(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
        return replace(good, concurrency={**good.concurrency, snapshot.stages[0].name: value})

    return change


def without_last(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    return replace(good, concurrency=dict(list(good.concurrency.items())[:-1]))


def only_for_few_stages(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    return good if len(snapshot.stages) < 12 else without_last(good, snapshot, budget)


def divides_by_a_figure(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    sum(1 / (stage.wall_seconds_mean or 1.0) / stage.source_rows_per_item for stage in snapshot.stages)  # type: ignore[operator]
    return good


def needs_a_step(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    assert 1 / snapshot.consumer.steps
    return good


def remembers_slots(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    return replace(good, slots=16)


def cannot_take_vetoes(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    assert not snapshot.events
    return replace(good, in_flight_bytes=2**50)


def changes_what_it_sees(good: Allocation, snapshot: Snapshot, budget: Budget) -> Allocation:
    snapshot.allocation.concurrency[snapshot.stages[0].name] = 77  # type: ignore[index]
    return good


counter = itertools.count(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_last, "no entry for stage"),
        (only_for_few_stages, "no entry for stage"),
        (with_first(0), "got 0 .only users pause"),
        (with_first(-1), "got -1"),
        (with_first(1.5), "got 1.5"),
        (with_first(True), "got True"),
        (lambda good, *_: replace(good, concurrency={**good.concurrency, "x": 1}), "unknown stage 'x'"),
        (lambda good, *_: replace(good, slots=0), "slots must be an int of at least 1"),
        (remembers_slots, "slots is 16, more than the 4 CPUs"),
        (lambda good, *_: replace(good, in_flight_bytes=-1), "in_flight_bytes"),
        (lambda good, *_: replace(good, reasons={"x": "why"}), "reasons name unknown stages"),
        (lambda good, *_: replace(good, expected_rows_per_second=float("nan")), "expected_rows_per_second must be"),
        (lambda *_: None, "expected an Allocation, got None"),
        (divides_by_a_figure, "TypeError|ZeroDivisionError"),
        (needs_a_step, "ZeroDivisionError"),
        (cannot_take_vetoes, "AssertionError"),
        (changes_what_it_sees, "the snapshot was changed"),
        (lambda good, *_: replace(good, in_flight_bytes=next(counter)), "a copy decides differently"),
    ],
)
def test_a_broken_tuner_is_caught_with_the_snapshot(change: Callable[..., object], message: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)({message}).*at Budget\(.*and Snapshot\("):
        check_tuner(Broken(change))


def test_a_tuner_with_state_that_repeats_itself_passes_and_is_not_used_itself() -> None:
    class Counts:
        asked = 0

        def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
            self.asked += 1
            assert self.asked <= 8
            return replace(Shared().propose(snapshot, budget), in_flight_bytes=self.asked)

    tuner = Counts()
    check_tuner(tuner)
    assert tuner.asked == 0


def test_a_tuner_that_repeats_a_pause_passes() -> None:
    check_tuner(Broken(lambda good, snapshot, _: replace(good, concurrency=dict(snapshot.allocation.concurrency))))


def test_a_tuner_for_one_workload_is_checked_on_that_one() -> None:
    stages = [StageInfo("read", "source"), StageInfo("work", "map", "process")]
    check_tuner(Static({"work": 3}), stages=stages)
    with pytest.raises(AssertionError, match="no stage 'work'"):
        check_tuner(Static({"work": 3}))


def every_window() -> list[tuple[Scene, Snapshot]]:
    return [
        (scene, window(scene, number, Allocation({s.name: None for s in scene.stages}, 1), [Event("vetoed")]))
        for scene in scenes()
        for number in range(len(scene.budgets))
    ]


def test_the_scenes_have_what_they_promise() -> None:
    shown = every_window()
    assert {len(scene.stages) for scene, _ in shown} == set(range(1, 13))
    assert {scene.mood for scene, _ in shown} == set(MOODS)
    stages = [stage for _, snapshot in shown for stage in snapshot.stages]
    assert {stage.info.waits for stage in stages} == {True, False, None}
    assert {stage.info.executor for stage in stages} == {"thread", "process"}
    assert {True, False} == {snapshot.warm for _, snapshot in shown}
    assert 0.0 in {stage.wall_seconds_mean for stage in stages}
    assert {None, 2**28} < {scene.budgets[0].memory_bytes for scene, _ in shown}
    for mood in ("measured", "holes"):
        warm = [s for scene, snapshot in shown if scene.mood == mood and snapshot.warm for s in snapshot.stages]
        missing = {stage.source_rows_per_item is None for stage in warm}
        assert missing == ({False} if mood == "measured" else {True, False})


def test_the_scenes_are_the_same_each_time() -> None:
    assert every_window() == every_window()


STAGES = (StageInfo("read", "source"), StageInfo("work", "map", max_concurrency=1))


class Clamps(ScriptedWorkload):
    def apply(self, allocation: Allocation) -> None:
        known = {name: max(0, value or 0) or None for name, value in allocation.concurrency.items() if name != "x"}
        super().apply(replace(allocation, concurrency=known))


class TakesAnything(ScriptedWorkload):
    def apply(self, allocation: Allocation) -> None:
        if allocation.slots >= 1 and set(allocation.concurrency) == {"read", "work"}:
            self._in_force = allocation


class ForgetsWhenRefusing(ScriptedWorkload):
    def apply(self, allocation: Allocation) -> None:
        self._in_force = blank_snapshot(STAGES).allocation
        super().apply(allocation)


class Ignores(ScriptedWorkload):
    def apply(self, allocation: Allocation) -> None:
        before = self._in_force
        super().apply(allocation)
        self._in_force = before


class NoPause(ScriptedWorkload):
    def apply(self, allocation: Allocation) -> None:
        if 0 in allocation.concurrency.values():
            raise ValueError("0 items make no progress")
        super().apply(allocation)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Clamps, AssertionError, "in force after|without AllocationError"),
        (TakesAnything, AssertionError, "apply took an unknown entry without AllocationError"),
        (ForgetsWhenRefusing, AssertionError, "in force after"),
        (Ignores, AssertionError, "in force after"),
        (NoPause, ValueError, "0 items make no progress"),
    ],
)
def test_a_broken_workload_is_caught(kind: type[ScriptedWorkload], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_workload(kind(STAGES))


def broken_figures(**changes: object) -> ScriptedWorkload:
    blank = blank_snapshot(STAGES)
    stage_changes = {
        key: changes.pop(key) for key in ("wait_share", "wall_seconds_mean", "processes_live") if key in changes
    }
    stages = (replace(blank.stages[0], **stage_changes), *blank.stages[1:])
    return ScriptedWorkload(STAGES, [replace(blank, stages=stages, **changes)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wait_share": {"input": 0.7, "slot": 0.5}}, "wait shares of stage read"),
        ({"wait_share": {"input": -0.1}}, "wait shares of stage read"),
        ({"wall_seconds_mean": float("nan")}, "wall_seconds_mean is nan"),
        ({"processes_live": 1}, "processes_live of a stage on threads must be None"),
        ({"window_seconds": -1.0}, "window_seconds is -1.0"),
        ({"in_flight_bytes": -5}, "in_flight_bytes is -5"),
    ],
)
def test_broken_figures_are_caught(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_workload(broken_figures(**changes))


def test_stages_that_differ_from_the_snapshots_are_caught() -> None:
    class Swapped(ScriptedWorkload):
        @property
        def stages(self) -> tuple[StageInfo, ...]:
            return super().stages[::-1]

    with pytest.raises(AssertionError, match=r"the snapshot has the stages \['read', 'work'\]"):
        check_workload(Swapped(STAGES))


def test_what_was_in_force_is_put_back() -> None:
    workload = ScriptedWorkload(STAGES)
    before = Allocation({"read": 5, "work": 1}, 3, 1000)
    workload.apply(before)
    check_workload(workload)
    assert workload.snapshot().allocation == before
    assert len(workload.applied) > 5
