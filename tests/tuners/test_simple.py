"""The tuners that look at no measurement: shared, static, even, random moves."""

from itertools import pairwise

import pytest

from intune._errors import AllocationError
from intune._values import Budget, Snapshot, StageInfo
from intune.testing import blank_snapshot, check_tuner
from intune.tuners import Even, RandomMoves, Shared, Static

STAGES = [StageInfo("read", "source", max_concurrency=2), StageInfo("work", "map"), StageInfo("batch", "batch")]


@pytest.fixture
def snapshot() -> Snapshot:
    return blank_snapshot(STAGES)


@pytest.mark.parametrize("tuner", [Shared(), Static({}), Static({}, slots=3), Even(), RandomMoves(1), RandomMoves(2)])
def test_each_keeps_the_contract_of_tuners(tuner: object) -> None:
    check_tuner(tuner)


def test_shared_leaves_everything_open_on_all_cpus(snapshot: Snapshot) -> None:
    allocation = Shared().propose(snapshot, Budget(cpus=6))
    assert allocation.concurrency == {"read": None, "work": None, "batch": None}
    assert allocation.slots == 6
    assert set(allocation.reasons) == {"read", "work", "batch"}


def test_static_gives_what_was_said_and_leaves_the_rest_open(snapshot: Snapshot) -> None:
    allocation = Static({"work": 5}, slots=3).propose(snapshot, Budget(cpus=6))
    assert allocation.concurrency == {"read": None, "work": 5, "batch": None}
    assert allocation.slots == 3
    assert allocation.reasons["work"] == "set by the user"
    assert Static({"work": 5}, slots=3).propose(snapshot, Budget(cpus=2)).slots == 2
    assert Static({}).propose(snapshot, Budget(cpus=6)).slots == 6


def test_static_keeps_its_numbers_when_the_users_mapping_changes(snapshot: Snapshot) -> None:
    mine = {"work": 5}
    tuner = Static(mine)
    mine["work"] = 1
    assert tuner.propose(snapshot, Budget(cpus=6)).concurrency["work"] == 5


def test_static_refuses_numbers_below_one_and_unknown_stages(snapshot: Snapshot) -> None:
    with pytest.raises(AllocationError, match="'work': concurrency 0, must be at least 1"):
        Static({"work": 0})
    with pytest.raises(AllocationError, match="slots 0, must be at least 1"):
        Static({}, slots=0)
    with pytest.raises(AllocationError, match=r"no stage 'wrok': this workload has \['read'"):
        Static({"wrok": 2}).propose(snapshot, Budget(cpus=6))


@pytest.mark.parametrize(
    ("cpus", "split"),
    [(9, [2, 3, 3]), (3, [1, 1, 1]), (5, [2, 2, 1]), (1, [1, 1, 1]), (2, [1, 1, 1])],
)
def test_even_divides_the_cpus_remainder_first(snapshot: Snapshot, cpus: int, split: list[int]) -> None:
    allocation = Even().propose(snapshot, Budget(cpus=cpus))
    assert list(allocation.concurrency.values()) == split
    assert allocation.slots == cpus
    assert allocation.reasons["read"] == f"{cpus} CPU{'s' if cpus > 1 else ''} over 3 stages"


def test_random_moves_reach_every_kind_of_move(snapshot: Snapshot) -> None:
    stages = [*STAGES, StageInfo("fetch", "map", waits=True)]
    tuner, budget = RandomMoves(0), Budget(cpus=6, max_threads=40, memory_bytes=1000)
    moves = [tuner.propose(blank_snapshot(stages), budget) for _ in range(400)]
    work = [move.concurrency["work"] for move in moves]
    assert set(work) == {None, 1, 2, 3, 4, 5, 6}
    assert {1, 6} in [set(pair) for pair in pairwise(work)]
    assert {move.concurrency["read"] for move in moves} == {None, 1, 2}
    assert 40 in {move.concurrency["fetch"] for move in moves}
    assert {move.slots for move in moves} == {1, 2, 3, 4, 5, 6}
    assert None in {move.in_flight_bytes for move in moves}
    assert all(0 <= (move.in_flight_bytes or 0) <= 1000 for move in moves)


def test_random_moves_are_the_same_for_the_same_seed(snapshot: Snapshot) -> None:
    def moves(seed: int) -> list[object]:
        tuner = RandomMoves(seed)
        return [tuner.propose(snapshot, Budget(cpus=6)) for _ in range(20)]

    assert moves(3) == moves(3)
    assert moves(3) != moves(4)
