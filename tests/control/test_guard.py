from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._values import Allocation, Budget, MemoryUse, Snapshot, StageInfo, StageSnapshot
from intune.control.guard import Guard, in_flight_limit
from intune.testing import blank_snapshot

GIB = 2**30
READ = StageInfo("read", "source")
WORK = StageInfo("work", "map", "process")


def seen(
    memory: int | None, in_flight: int | None = 0, *, resident: int | None = None, live: int = 1, **changes: int
) -> Snapshot:
    blank = blank_snapshot([READ, WORK])
    work = StageSnapshot(WORK, live, 0, live, 0, 0, process_resident_bytes=resident)
    return replace(
        blank,
        stages=(blank.stages[0], replace(work, **changes)),
        machine=replace(blank.machine, memory_bytes=memory),
        in_flight_bytes=in_flight,
    )


def proposal(work: int | None = 1, in_flight: int | None = None) -> Allocation:
    return Allocation({"read": None, "work": work}, slots=4, in_flight_bytes=in_flight)


def budget(memory: int | None) -> Budget:
    return Budget(cpus=8, max_processes=16, memory_bytes=memory)


def test_without_a_limit_bytes_are_as_the_tuner_says() -> None:
    for in_flight in (None, 5 * GIB):
        wanted = proposal(in_flight=in_flight)
        assert Guard().check(wanted, seen(3 * GIB), budget(None)) == (wanted, [])


def test_the_budget_is_obeyed_too() -> None:
    allocation, events = Guard().check(proposal(work=40), seen(None), Budget(cpus=2, max_processes=3))
    assert (allocation.concurrency["work"], allocation.slots) == (3, 2)
    assert {event.kind for event in events} == {"clamped"}


@pytest.mark.parametrize(
    ("rest", "granted"),
    [
        (0, 0.9),
        (0.5, 0.4),
        (0.7, 0.2),
        (0.775, 0.125),
        (0.8, 0.125),
        (0.875, 0.125),
        (0.95, 0.05),
        (1.0, 0.0),
        (1.3, 0.0),
    ],
)
def test_items_get_what_nine_tenths_leave_then_the_floor_then_what_is_really_there(rest: float, granted: float) -> None:
    limit = 1_000_000
    assert in_flight_limit(limit, int(rest * limit)) == pytest.approx(granted * limit, abs=2)


@given(limit=st.integers(1, 2**45), rest=st.integers(0, 2**45), more=st.integers(0, 2**45))
def test_the_prediction_never_passes_the_limit_and_falls_as_the_rest_grows(limit: int, rest: int, more: int) -> None:
    granted = in_flight_limit(limit, rest)
    assert granted >= 0
    assert rest + granted <= max(limit, rest)
    assert in_flight_limit(limit, rest + more) <= granted
    if rest <= limit - limit // 8 - 1:
        assert granted >= limit // 8


def test_memory_that_an_allocator_keeps_does_not_strangle_the_pipeline() -> None:
    """In flight falls, the process does not shrink: the limit must leave room to grow into the kept memory again."""
    limit, measured = 8 * GIB, 7 * GIB
    in_flight = 4 * GIB
    for _ in range(50):
        allocation, _ = Guard().check(proposal(), seen(measured, in_flight), budget(limit))
        in_flight = min(in_flight // 2, allocation.in_flight_bytes)
    assert allocation.in_flight_bytes == limit // 8


def test_the_rest_is_measured_memory_less_items_in_flight() -> None:
    allocation, events = Guard().check(proposal(), seen(6 * GIB, 4 * GIB), budget(10 * GIB))
    assert (allocation.in_flight_bytes, events) == (7 * GIB, [])
    allocation, _ = Guard().check(proposal(), seen(6 * GIB, None), budget(10 * GIB))
    assert allocation.in_flight_bytes == 3 * GIB


def test_without_a_measurement_only_the_floor_is_granted() -> None:
    allocation, _ = Guard().check(proposal(), seen(None), budget(8 * GIB))
    assert allocation.in_flight_bytes == GIB


def test_the_least_of_tuner_and_guard_holds_and_a_cut_is_told() -> None:
    snapshot = seen(6 * GIB, 4 * GIB)
    less, events = Guard().check(proposal(in_flight=GIB), snapshot, budget(10 * GIB))
    assert (less.in_flight_bytes, events) == (GIB, [])
    more, (event,) = Guard().check(proposal(in_flight=9 * GIB), snapshot, budget(10 * GIB))
    assert more.in_flight_bytes == 7 * GIB
    assert (event.kind, event.stage) == ("vetoed", None)
    assert "from 9.0 GiB to 7.0 GiB" in event.detail


def test_the_machines_limit_holds_where_it_is_tighter() -> None:
    snapshot = seen(1 * GIB)
    tight = replace(snapshot, machine=replace(snapshot.machine, memory_limit_bytes=2 * GIB))
    allocation, _ = Guard().check(proposal(), tight, budget(100 * GIB))
    assert allocation.in_flight_bytes == int(0.9 * 2 * GIB) - GIB


def test_processes_are_added_only_as_far_as_their_memory_fits() -> None:
    # 0.775 of 16 GiB is 12.4; 8 are in use, so 4 of 1 GiB each fit.
    snapshot = seen(8 * GIB, resident=GIB, live=2)
    allocation, (event,) = Guard().check(proposal(work=10), snapshot, budget(16 * GIB))
    assert allocation.concurrency["work"] == 6
    assert allocation.in_flight_bytes == int(0.9 * 16 * GIB) - 12 * GIB
    assert (event.kind, event.stage) == ("vetoed", "work")
    assert event.detail.startswith("6 processes instead of 10: 8 more of 1.0 GiB each do not fit")
    assert allocation.reasons["work"] == event.detail


def test_processes_being_started_are_counted_although_not_measured_yet() -> None:
    snapshot = seen(8 * GIB, resident=GIB, live=2, processes_starting=3)
    allocation, _ = Guard().check(proposal(work=10), snapshot, budget(16 * GIB))
    assert allocation.concurrency["work"] == 6


def test_what_processes_will_hold_once_they_have_done_an_item_is_counted() -> None:
    """Four are up, of which three have made nothing yet that they work with."""
    snapshot = seen(5 * GIB, resident=GIB, live=4, process_growth_bytes=3 * GIB)
    allocation, _ = Guard().check(proposal(work=10), snapshot, budget(16 * GIB))
    assert allocation.concurrency["work"] == 8
    assert allocation.in_flight_bytes == int(0.9 * 16 * GIB) - 12 * GIB


def test_an_open_process_stage_is_vetoed_into_an_int() -> None:
    snapshot = seen(12 * GIB, resident=GIB, live=2)
    allocation, (event,) = Guard().check(proposal(work=None), snapshot, budget(16 * GIB))
    assert allocation.concurrency["work"] == 2
    assert event.kind == "vetoed"


def test_processes_that_leave_items_too_little_go_one_a_step_and_one_remains() -> None:
    # 0.9 - 1/16 of 16 GiB is 13.4; what is left of 0.9 is for items.
    fitting, crowded = seen(13 * GIB, resident=2 * GIB, live=4), seen(14 * GIB, resident=2 * GIB, live=4)
    assert Guard().check(proposal(work=4), fitting, budget(16 * GIB))[0].concurrency["work"] == 4
    allocation, (event,) = Guard().check(proposal(work=4), crowded, budget(16 * GIB))
    assert allocation.concurrency["work"] == 3
    assert (event.kind, event.stage) == ("vetoed", "work")
    assert event.detail.startswith("3 processes instead of 4: they hold 8.0 GiB")
    assert allocation.reasons["work"] == event.detail
    assert Guard().check(proposal(work=2), crowded, budget(16 * GIB))[0].concurrency["work"] == 2
    single = seen(14 * GIB, resident=2 * GIB, live=1)
    assert Guard().check(proposal(work=1), single, budget(16 * GIB))[0].concurrency["work"] == 1


def test_the_stage_whose_processes_hold_most_gives_one() -> None:
    snapshot = seen(15 * GIB, resident=GIB, live=3)
    other = replace(snapshot.stages[1], info=StageInfo("other", "map", "process"), process_resident_bytes=2 * GIB)
    both = replace(snapshot, stages=(*snapshot.stages, other))
    wanted = Allocation({"read": None, "work": 3, "other": 3}, slots=4)
    assert Guard().check(wanted, both, budget(16 * GIB))[0].concurrency == {"read": None, "work": 3, "other": 2}


def test_the_least_rest_of_some_time_counts_where_it_is_known() -> None:
    """Of the memory at one moment a part belongs to items that are being made."""
    snapshot = replace(seen(7 * GIB, 2 * GIB), rest_bytes=2 * GIB)
    assert Guard().check(proposal(), snapshot, budget(10 * GIB))[0].in_flight_bytes == 7 * GIB


def test_of_processes_that_run_already_at_least_one_remains() -> None:
    snapshot = seen(25 * GIB // 2, resident=GIB, live=2)
    for target, allowed in ((5, 2), (2, 2), (1, 1)):
        allocation, _ = Guard().check(proposal(work=target), snapshot, budget(16 * GIB))
        assert allocation.concurrency["work"] == allowed
    allocation, _ = Guard().check(
        proposal(work=4), seen(30 * GIB, resident=GIB, live=0, concurrency=1), budget(16 * GIB)
    )
    assert allocation.concurrency["work"] == 1


def test_a_first_process_is_granted_in_any_case_and_that_is_no_veto() -> None:
    short = seen(30 * GIB, resident=GIB, live=0, concurrency=1)
    allocation, events = Guard().check(proposal(work=1), short, budget(16 * GIB))
    assert allocation.concurrency["work"] == 1
    assert [event for event in events if event.stage == "work"] == []
    _, events = Guard().check(proposal(work=2), short, budget(16 * GIB))
    (event,) = [event for event in events if event.stage == "work"]
    assert event.detail.startswith("1 process instead of 2: 2 more of 1.0 GiB each do not fit")


def test_a_resumed_process_stage_without_room_stays_paused() -> None:
    snapshot = seen(30 * GIB, resident=GIB, live=0, concurrency=0)
    allocation, _ = Guard().check(proposal(work=4), snapshot, budget(16 * GIB))
    assert allocation.concurrency["work"] == 0


def test_processes_that_were_never_measured_are_taken_to_hold_half_a_gibibyte() -> None:
    # 0.775 of 16 GiB is 12.4; 10 are in use, so 4 of them fit, the one included that has done nothing yet.
    allocation, (event,) = Guard().check(proposal(work=10), seen(10 * GIB, live=1), budget(16 * GIB))
    assert allocation.concurrency["work"] == 4
    assert event.detail.startswith("4 processes instead of 10: 9 more of 512 MiB each do not fit")
    wide = Guard().check(proposal(work=10), seen(10 * GIB, live=1), budget(64 * GIB))
    assert (wide[0].concurrency["work"], wide[1]) == (10, [])
    starting = seen(10 * GIB, live=0, processes_starting=2)
    assert Guard().check(proposal(work=10), starting, budget(16 * GIB))[0].concurrency["work"] == 4


@pytest.mark.parametrize("concurrency", [0, 1])
def test_a_stage_of_which_no_process_was_measured_gets_one_however_little_there_is(concurrency: int) -> None:
    """Nothing would ever be known of it otherwise."""
    snapshot = seen(15 * GIB, live=0, concurrency=concurrency)
    assert Guard().check(proposal(work=4), snapshot, budget(16 * GIB))[0].concurrency["work"] == 1


def test_growing_stages_share_the_room_the_earlier_first() -> None:
    # 0.775 of 16 GiB is 12.4; 8 are in use, so 4 more processes of 1 GiB fit, whoever gets them.
    snapshot = seen(8 * GIB, resident=GIB, live=2)
    other = replace(snapshot.stages[1], info=StageInfo("other", "map", "process"))
    wanted = Allocation({"read": None, "work": 5, "other": 9}, slots=4)
    both = replace(snapshot, stages=(*snapshot.stages, other))
    allocation, events = Guard().check(wanted, both, budget(16 * GIB))
    assert allocation.concurrency == {"read": None, "work": 5, "other": 3}
    assert [event.stage for event in events] == ["other"]


class TestSeveralLimits:
    """Each with what is used of it: the user's for the tree, and the group's, most of which others use."""

    TREE = MemoryUse(4 * GIB, 1 * GIB, "memory=", chosen=True)
    GROUP = MemoryUse(16 * GIB, 13 * GIB, "group")

    def seen(self, *uses: MemoryUse, in_flight: int = 0, resident: int | None = None, live: int = 1) -> Snapshot:
        snapshot = seen(uses[0].used_bytes, in_flight, resident=resident, live=live)
        return replace(snapshot, machine=replace(snapshot.machine, memory=uses))

    def granted(self, *uses: MemoryUse, memory: int = 4 * GIB, in_flight: int = 0) -> int | None:
        return Guard().check(proposal(), self.seen(*uses, in_flight=in_flight), budget(memory))[0].in_flight_bytes

    def test_bytes_are_what_the_tightest_leaves_of_its_own(self) -> None:
        group = in_flight_limit(16 * GIB, 13 * GIB)
        assert self.granted(self.TREE, self.GROUP) == self.granted(self.GROUP, self.TREE) == group < int(2.6 * GIB)
        roomy = replace(self.GROUP, used_bytes=5 * GIB)
        assert self.granted(self.TREE, roomy) == in_flight_limit(4 * GIB, GIB) == int(3.6 * GIB) - GIB

    def test_not_the_nearest_one_holds_but_the_one_that_grants_least(self) -> None:
        """A large one that is past nine tenths still grants its floor, which is more than a small one has."""
        large, small = MemoryUse(100 * GIB, 90 * GIB, "large"), MemoryUse(2 * GIB, int(1.7 * GIB), "small")
        assert self.granted(large, small, memory=100 * GIB) == in_flight_limit(2 * GIB, int(1.7 * GIB)) == GIB // 4

    def test_items_in_flight_count_in_each(self) -> None:
        uses = replace(self.TREE, used_bytes=3 * GIB), replace(self.GROUP, used_bytes=6 * GIB)
        assert self.granted(*uses, in_flight=2 * GIB) == in_flight_limit(4 * GIB, GIB)

    def test_the_rest_of_each_counts_where_it_is_known(self) -> None:
        uses = replace(self.TREE, rest_bytes=GIB // 2), replace(self.GROUP, rest_bytes=GIB)
        assert self.granted(*uses) == in_flight_limit(4 * GIB, GIB // 2)

    def test_a_change_of_the_budget_is_obeyed_at_once_and_is_for_the_tree(self) -> None:
        assert self.granted(self.TREE, replace(self.GROUP, used_bytes=5 * GIB), memory=2 * GIB) == int(1.8 * GIB) - GIB

    def test_processes_are_added_as_far_as_they_fit_into_the_tightest(self) -> None:
        # 0.775 of 16 GiB is 12.4, of 4 GiB 3.1.
        uses = self.TREE, replace(self.GROUP, used_bytes=11 * GIB)
        snapshot = self.seen(*uses, resident=GIB, live=1)
        allocation, (event,) = Guard().check(proposal(work=6), snapshot, budget(4 * GIB))
        assert allocation.concurrency["work"] == 2
        assert (
            "5 more of 1.0 GiB each do not fit into a limit of 16.0 GiB, of which 12.0 GiB are needed" in event.detail
        )
        assert allocation.in_flight_bytes == min(in_flight_limit(4 * GIB, 2 * GIB), in_flight_limit(16 * GIB, 12 * GIB))
        roomy = self.seen(self.TREE, replace(self.GROUP, used_bytes=GIB), resident=GIB, live=1)
        allocation, (event,) = Guard().check(proposal(work=6), roomy, budget(4 * GIB))
        assert allocation.concurrency["work"] == 3
        assert "a limit of 4.0 GiB" in event.detail

    def test_a_process_goes_where_any_of_them_is_crowded(self) -> None:
        fitting = self.seen(self.TREE, self.GROUP, resident=GIB, live=3)
        crowded = self.seen(self.TREE, replace(self.GROUP, used_bytes=14 * GIB), resident=GIB, live=3)
        assert Guard().check(proposal(work=3), fitting, budget(4 * GIB))[0].concurrency["work"] == 3
        allocation, (event,) = Guard().check(proposal(work=3), crowded, budget(4 * GIB))
        assert allocation.concurrency["work"] == 2
        assert event.detail.endswith("14.0 GiB of 16.0 GiB")

    def test_one_that_is_not_for_processes_does_not_count_them(self) -> None:
        """An address space is full of what was never touched, and each process has its own."""
        space = MemoryUse(10 * GIB, 9 * GIB, "RLIMIT_AS", with_processes=False)
        snapshot = self.seen(replace(self.TREE, limit_bytes=64 * GIB), space, resident=GIB, live=3)
        allocation, events = Guard().check(proposal(work=6), snapshot, budget(64 * GIB))
        assert (allocation.concurrency["work"], events) == (6, [])
        assert allocation.in_flight_bytes == in_flight_limit(10 * GIB, 9 * GIB)
