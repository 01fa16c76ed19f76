import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import AllocationError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.control.allocation import check_complete, clamp, level, open_allocation
from intune.testing import blank_snapshot

NAMES = ["read", "map", "batch"]


def process_stage(name: str, ready: int, starting: int = 0, leaving: int = 0, **changes: object) -> StageSnapshot:
    info = StageInfo(name, "map", "process", max_concurrency=changes.pop("max_concurrency", None))
    stage = StageSnapshot(info, ready + starting or 1, 0, ready, starting, leaving)
    return replace(stage, **changes)


def snapshot_of(*stages: StageSnapshot) -> Snapshot:
    return replace(blank_snapshot([stage.info for stage in stages]), stages=stages)


def test_open_allocation_has_an_open_entry_for_each_stage() -> None:
    stages = [StageInfo(name, "map") for name in NAMES]
    assert open_allocation(stages, 3) == Allocation({"read": None, "map": None, "batch": None}, slots=3)


def test_a_complete_allocation_is_copied_into_plain_ints() -> None:
    mine = {"read": np.int64(2), "map": None, "batch": 1}
    checked = check_complete(Allocation(mine, np.int32(4), np.int64(9), {"read": "why"}), NAMES)
    mine["read"] = 7
    assert checked == Allocation({"read": 2, "map": None, "batch": 1}, 4, 9, {"read": "why"})
    assert [type(value) for value in (checked.concurrency["read"], checked.slots, checked.in_flight_bytes)] == [int] * 3


COMPLETE = {"read": 1, "map": None, "batch": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "expected an Allocation, got None"),
        ({"read": 1}, "expected an Allocation"),
        (Allocation({"read": 1, "map": 1}, 1), "no entry for stage 'batch'"),
        (Allocation({**COMPLETE, "mop": 1}, 1), "unknown stage 'mop'"),
        (Allocation({**COMPLETE, "map": 0}, 1), "'map' must be an int of at least 1, got 0 .only users pause"),
        (Allocation({**COMPLETE, "map": -2}, 1), "got -2"),
        (Allocation({**COMPLETE, "map": 1.5}, 1), "got 1.5"),
        (Allocation({**COMPLETE, "map": True}, 1), "got True"),
        (Allocation({**COMPLETE, "map": "2"}, 1), "got '2'"),
        (Allocation([1, 2, 3], 1), "concurrency must be a mapping"),
        (Allocation(COMPLETE, 0), "slots must be an int of at least 1, got 0"),
        (Allocation(COMPLETE, None), "slots must be an int of at least 1, got None"),
        (Allocation(COMPLETE, 1, -1), "in_flight_bytes must be an int of at least 0, got -1"),
        (Allocation(COMPLETE, 1, 0.5), "in_flight_bytes must be"),
        (Allocation(COMPLETE, 1, None, {}, -1.0), "expected_rows_per_second must be a number of at least 0, or None"),
        (Allocation(COMPLETE, 1, None, {}, math.nan), "got nan"),
        (Allocation(COMPLETE, 1, None, {}, math.inf), "got inf"),
        (Allocation(COMPLETE, 1, None, {}, True), "got True"),
        (Allocation(COMPLETE, 1, None, {}, "12"), "got '12'"),
        (Allocation(COMPLETE, 1, reasons="because"), "reasons must be a mapping"),
    ],
)
def test_what_is_not_complete_is_refused_with_its_value(given: object, message: str) -> None:
    with pytest.raises(AllocationError, match=message):
        check_complete(given, NAMES)


def test_a_pause_may_be_repeated_but_not_made() -> None:
    paused = Allocation({**COMPLETE, "map": 0}, 1)
    assert check_complete(paused, NAMES, paused=["map"]) == paused
    with pytest.raises(AllocationError, match="'map'"):
        check_complete(paused, NAMES, paused=["read"])


@pytest.mark.parametrize(
    ("wants", "total", "least", "shares"),
    [
        ([5, 5], 10, 1, [5, 5]),
        ([9, 2], 6, 1, [4, 2]),
        ([5, 5, 5], 8, 1, [3, 3, 2]),
        ([5, 0, 5], 3, 1, [2, 0, 1]),
        ([3, 3], 0, 1, [1, 1]),
        ([3, 3], 1, 0, [1, 0]),
        ([3, 3], -4, 0, [0, 0]),
        ([], 3, 1, []),
    ],
)
def test_level_takes_from_those_that_want_most(wants: list[int], total: int, least: int, shares: list[int]) -> None:
    assert level(wants, total, least=least) == shares


def test_slots_are_at_most_the_cpus_and_leave_threads_for_waiting_stages() -> None:
    waits = StageSnapshot(StageInfo("fetch", "source", waits=True), None, 0)
    proposal = Allocation({"fetch": None}, slots=32)
    allocation, (event,) = clamp(proposal, snapshot_of(waits), Budget(cpus=16, max_threads=64))
    assert allocation.slots == 16
    assert (event.kind, event.stage) == ("clamped", None)
    assert "from 32 to 16" in event.detail
    assert clamp(proposal, snapshot_of(waits), Budget(cpus=16, max_threads=4))[0].slots == 3


def test_open_stays_open_and_ints_are_held_to_the_stage_and_the_threads() -> None:
    stages = [
        StageSnapshot(StageInfo("read", "source", max_concurrency=3), None, 0),
        StageSnapshot(StageInfo("map", "map"), None, 0),
        StageSnapshot(StageInfo("batch", "batch"), None, 0),
    ]
    proposal = Allocation({"read": 9, "map": 500, "batch": None}, 2, reasons={"read": "mine", "batch": "stays"})
    allocation, events = clamp(proposal, snapshot_of(*stages), Budget(cpus=4, max_threads=64))
    assert allocation.concurrency == {"read": 3, "map": 64, "batch": None}
    assert [(event.kind, event.stage) for event in events] == [("clamped", "read"), ("clamped", "map")]
    assert "lowered from 9 to 3: the stage's max_concurrency is 3" in events[0].detail
    assert "lowered from 500 to 64: the budget has 64 threads" in events[1].detail
    assert allocation.reasons == {"read": events[0].detail, "map": events[1].detail, "batch": "stays"}


def test_an_allocation_within_the_budget_passes_unchanged() -> None:
    proposal = Allocation({"read": 4, "map": None}, 4, 1000, {"read": "why"})
    stages = [StageSnapshot(StageInfo("read", "source"), 1, 0), process_stage("map", 0)]
    assert clamp(proposal, snapshot_of(*stages), Budget(cpus=4, max_processes=4)) == (proposal, [])


def test_waiting_stages_share_the_threads_that_slots_leave() -> None:
    stages = [StageSnapshot(StageInfo(name, "map", waits=True), None, 0) for name in ("a", "b", "c")]
    proposal = Allocation({"a": 30, "b": 3, "c": None}, slots=4)
    allocation, (event,) = clamp(proposal, snapshot_of(*stages), Budget(cpus=8, max_threads=20))
    assert allocation.concurrency == {"a": 12, "b": 3, "c": None}  # 4 slots, 12 + 3, and one at least for c
    assert event.stage == "a"


def test_processes_grow_only_into_room_that_others_have_left() -> None:
    budget = Budget(cpus=8, max_processes=5)
    proposal = Allocation({"a": 1, "b": 4}, slots=8)
    full = snapshot_of(process_stage("a", 4), process_stage("b", 1))
    allocation, (event,) = clamp(proposal, full, budget)
    assert allocation.concurrency == {"a": 1, "b": 1}
    assert "those that are still ending included" in event.detail
    ending = snapshot_of(process_stage("a", 1, leaving=3), process_stage("b", 1))
    assert clamp(proposal, ending, budget)[0].concurrency == {"a": 1, "b": 1}
    partly = snapshot_of(process_stage("a", 1, leaving=1), process_stage("b", 1))
    assert clamp(proposal, partly, budget)[0].concurrency == {"a": 1, "b": 3}
    over = snapshot_of(process_stage("a", 1), process_stage("b", 1, starting=2))
    assert clamp(proposal, over, budget) == (proposal, [])


def test_a_cut_of_the_process_budget_takes_from_the_largest_at_once() -> None:
    snapshot = snapshot_of(process_stage("a", 6), process_stage("b", 2))
    allocation, _ = clamp(Allocation({"a": 6, "b": 2}, 8), snapshot, Budget(cpus=8, max_processes=4))
    assert allocation.concurrency == {"a": 2, "b": 2}


def test_an_open_process_stage_that_does_not_fit_becomes_an_int() -> None:
    snapshot = snapshot_of(process_stage("a", 0, max_concurrency=3), process_stage("b", 0))
    allocation, (event,) = clamp(Allocation({"a": None, "b": None}, 8), snapshot, Budget(cpus=8, max_processes=8))
    assert allocation.concurrency == {"a": None, "b": 5}
    assert event.detail.startswith("lowered from open to 5")


def test_uncounted_processes_are_taken_to_be_as_many_as_may_run() -> None:
    a = replace(process_stage("a", 0, concurrency=4), processes_live=None, processes_starting=None)
    b = replace(process_stage("b", 0, concurrency=1), processes_live=None, processes_starting=None)
    proposal = Allocation({"a": 1, "b": 4}, slots=8)
    assert clamp(proposal, snapshot_of(a, b), Budget(cpus=8, max_processes=5))[0].concurrency == {"a": 1, "b": 1}


def test_a_resumed_process_stage_stays_paused_until_there_is_room() -> None:
    budget = Budget(cpus=8, max_processes=4)
    proposal = Allocation({"a": 2, "b": 2}, slots=8)
    full = snapshot_of(process_stage("a", 0, concurrency=0), process_stage("b", 4))
    assert clamp(proposal, full, budget)[0].concurrency == {"a": 0, "b": 2}
    left = snapshot_of(process_stage("a", 0, concurrency=0), process_stage("b", 2))
    assert clamp(proposal, left, budget)[0].concurrency == {"a": 2, "b": 2}


def test_a_pause_is_kept() -> None:
    snapshot = snapshot_of(StageSnapshot(StageInfo("read", "source"), 1, 0), process_stage("map", 2))
    allocation, events = clamp(Allocation({"read": 0, "map": 0}, 1), snapshot, Budget(cpus=1))
    assert (allocation.concurrency, events) == ({"read": 0, "map": 0}, [])


@pytest.mark.slow
@given(st.data())
def test_processes_never_pass_the_budget_however_slowly_they_end(data: st.DataObject) -> None:
    """A model of process stages: starts and ends take as long as they like, budgets and wishes are random."""
    count = data.draw(st.integers(1, 4))
    stages = [process_stage(f"s{place}", 0) for place in range(count)]
    for _ in range(8):
        cpus = data.draw(st.integers(1, 8))
        cut = data.draw(st.integers(count, 10))
        wants = {s.name: data.draw(st.none() | st.integers(1, 12)) for s in stages}
        before = sum(s.processes_live + s.processes_starting + s.processes_leaving for s in stages)
        allocation, _ = clamp(Allocation(wants, cpus), snapshot_of(*stages), Budget(cpus, 64, cut))
        stages = [follow(data, s, allocation) for s in stages]
        held = sum(s.processes_live + s.processes_starting + s.processes_leaving for s in stages)
        assert held <= max(before, cut)
        assert all(value is None or value >= 1 for value in allocation.concurrency.values())
        targets = [target_of(s, allocation) for s in stages]
        assert sum(targets) <= cut


def target_of(stage: StageSnapshot, allocation: Allocation) -> int:
    value = allocation.concurrency[stage.name]
    return min(stage.info.max_concurrency or allocation.slots, allocation.slots) if value is None else value


def follow(data: st.DataObject, stage: StageSnapshot, allocation: Allocation) -> StageSnapshot:
    """What a workload does with an allocation by the next window."""
    target = target_of(stage, allocation)
    live, starting, leaving = stage.processes_live, stage.processes_starting, stage.processes_leaving
    kept = min(live + starting, target)
    leaving = data.draw(st.integers(0, leaving + live + starting - kept))
    ready = data.draw(st.integers(min(live, kept), target))
    return replace(
        stage,
        concurrency=allocation.concurrency[stage.name],
        processes_live=ready,
        processes_starting=target - ready,
        processes_leaving=leaving,
    )


def test_what_was_expected_of_a_proposal_is_not_expected_of_what_is_left_of_it() -> None:
    snapshot = blank_snapshot([StageInfo(name, "map") for name in NAMES])
    proposal = Allocation({"read": 1, "map": None, "batch": 2}, 4, None, {}, np.float32(12.5))  # type: ignore[arg-type]
    checked = check_complete(proposal, NAMES)
    assert type(checked.expected_rows_per_second) is float
    assert clamp(checked, snapshot, Budget(4))[0].expected_rows_per_second == 12.5
    assert clamp(checked, snapshot, Budget(3))[0].expected_rows_per_second is None
