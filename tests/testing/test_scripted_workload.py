from dataclasses import replace

import pytest

from intune._errors import AllocationError
from intune._values import Allocation, Snapshot, StageInfo
from intune.testing import ScriptedWorkload, blank_snapshot, check_workload

STAGES = (StageInfo("read", "source"), StageInfo("work", "map", "process", max_concurrency=1))
GOOD = Allocation({"read": 2, "work": None}, 4, 100)


def test_snapshots_come_in_turn_and_the_last_one_again() -> None:
    script = [replace(blank_snapshot(STAGES), epoch=epoch) for epoch in (5, 6)]
    workload = ScriptedWorkload(STAGES, script)
    assert [workload.snapshot().epoch for _ in range(4)] == [5, 6, 6, 6]
    assert workload.stages == STAGES


def test_a_function_answers_to_the_allocation_in_force() -> None:
    def script(allocation: Allocation) -> Snapshot:
        return replace(blank_snapshot(STAGES), in_flight_items=10 * allocation.slots)

    workload = ScriptedWorkload(STAGES, script)
    assert workload.snapshot().in_flight_items == 10
    workload.apply(GOOD)
    assert workload.snapshot().in_flight_items == 40


def test_what_is_in_force_is_kept_and_shown() -> None:
    workload = ScriptedWorkload(STAGES)
    assert workload.snapshot().allocation.concurrency == {"read": None, "work": None}
    workload.apply(GOOD)
    workload.apply(replace(GOOD, concurrency={"read": 0, "work": 3}))
    snapshot = workload.snapshot()
    assert [stage.concurrency for stage in snapshot.stages] == [0, 3]
    assert snapshot.allocation == workload.applied[-1]
    assert workload.applied[0] == GOOD


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(GOOD, concurrency={"read": 1}), r"missing for \['work'\], unknown \[\]"),
        (replace(GOOD, concurrency={"read": 1, "work": 1, "x": 1}), r"unknown \['x'\]"),
        (replace(GOOD, concurrency={"read": 1, "work": -1}), "work: -1 is not allowed"),
        (replace(GOOD, slots=0), "slots: 0 is not allowed"),
        (replace(GOOD, in_flight_bytes=-3), "in_flight_bytes: -3"),
    ],
)
def test_apply_refuses_and_changes_nothing(wrong: Allocation, message: str) -> None:
    workload = ScriptedWorkload(STAGES)
    workload.apply(GOOD)
    with pytest.raises(AllocationError, match=message):
        workload.apply(wrong)
    assert workload.applied == [GOOD]
    assert workload.snapshot().allocation == GOOD


@pytest.mark.parametrize(
    ("stages", "script", "message"),
    [
        ((), None, "at least one"),
        (STAGES[:1] * 2, None, "names that differ"),
        (STAGES, [], "the script has no snapshot"),
    ],
)
def test_what_makes_no_workload_is_refused(stages: object, script: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedWorkload(stages, script)  # type: ignore[arg-type]


def test_it_keeps_the_contract_of_workloads() -> None:
    check_workload(ScriptedWorkload(STAGES))


def test_a_blank_snapshot_measured_nothing() -> None:
    snapshot = blank_snapshot(STAGES, GOOD)
    assert snapshot.allocation is GOOD
    assert not snapshot.warm
    assert [(stage.concurrency, stage.wall_seconds_mean) for stage in snapshot.stages] == [(2, None), (None, None)]
