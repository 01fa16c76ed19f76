"""What a memory limit cost, in words and figures."""

from dataclasses import replace

import pytest

from intune._values import Allocation, Snapshot, StageInfo, StageSnapshot
from intune.control.shortage import Shortage, shortage, together
from intune.testing import blank_snapshot

GIB = 2**30
READ, WORK, FETCH = StageInfo("read", "source"), StageInfo("work", "map"), StageInfo("fetch", "map", waits=True)


def window(held_back: float, busy: tuple[float, float], wait: float = 1.0, limit: int | None = 2 * GIB) -> Snapshot:
    blank = blank_snapshot([READ, WORK])
    stages = [StageSnapshot(READ, None, 1, busy_seconds=busy[0]), StageSnapshot(WORK, None, 1, busy_seconds=busy[1])]
    return replace(
        blank,
        window_seconds=2.0,
        stages=tuple(stages),
        consumer=replace(blank.consumer, steps=10, wait_share=wait),
        allocation=Allocation({"read": None, "work": None}, slots=8),
        in_flight_bytes_limit=limit,
        held_back_share=held_back,
    )


@pytest.mark.parametrize(
    ("busy", "wait", "gain"),
    [
        ((2.0, 6.0), 1.0, 1.0),  # 4 of 8 slots worked
        ((2.0, 14.0), 1.0, 0.0),
        ((0.0, 4.0), 1.0, 3.0),
        ((0.0, 4.0), 0.5, 1.0),  # the trainer takes at most twice as much
        ((0.0, 4.0), 0.0, 0.0),
    ],
)
def test_more_memory_would_let_all_slots_work_as_far_as_the_trainer_takes_it(
    busy: tuple[float, float], wait: float, gain: float
) -> None:
    found = shortage(window(0.5, busy, wait))
    assert found == Shortage(1.0, int(gain * 2 * GIB), gain)


def test_no_more_is_promised_than_another_limit_lets_through() -> None:
    given = window(0.5, (2.0, 6.0))
    serial = replace(given.stages[1], concurrency=4)  # busy on 3 of the 4 that it may
    found = shortage(replace(given, stages=(given.stages[0], serial)))
    assert found is not None
    assert found.gain == pytest.approx(1 / 3)


def test_while_nothing_may_be_in_flight_it_is_told_by_what_is() -> None:
    found = shortage(replace(window(0.5, (2.0, 6.0), limit=0), in_flight_bytes=GIB))
    assert found == Shortage(1.0, GIB, 1.0)
    nothing = shortage(replace(window(0.5, (2.0, 6.0), limit=0), in_flight_bytes=0))
    assert nothing is not None
    assert nothing.in_words() == "held back 1.0 s by the memory limit"


def test_stages_that_wait_hold_no_slot() -> None:
    given = window(0.5, (2.0, 6.0))
    waiting = StageSnapshot(FETCH, None, 1, busy_seconds=20.0)
    found = shortage(replace(given, stages=(*given.stages, waiting)))
    assert found is not None
    assert found.gain == 1.0


@pytest.mark.parametrize(
    "given", [window(0.0, (1.0, 1.0)), window(0.5, (0.0, 0.0)), window(0.5, (1.0, 1.0), limit=None)]
)
def test_nothing_is_said_where_nothing_was_held_back_or_measured(given: Snapshot) -> None:
    assert shortage(given) is None


def test_words() -> None:
    assert Shortage(14.0, int(2.1 * GIB), 0.3).in_words() == (
        "held back 14.0 s by the memory limit; about 2.1 GiB more would have given about 30% more"
    )
    assert Shortage(14.0, GIB, 0.01).in_words() == "held back 14.0 s by the memory limit"


def test_windows_together_count_by_their_seconds_in_the_whole_run() -> None:
    parts = [Shortage(3.0, 4 * GIB, 0.4), Shortage(1.0, 0, 0.0)]
    assert together(parts, 4.0) == Shortage(4.0, 3 * GIB, pytest.approx(0.3))
    assert together(parts, 12.0) == Shortage(4.0, 3 * GIB, pytest.approx(0.1))
    assert together([], 12.0) == Shortage(0.0, 0, 0.0)


def test_a_moment_of_a_long_run_is_not_said_to_have_cost_it_much() -> None:
    held = together([Shortage(0.25, GIB, 0.72)], 10.0)
    assert held.in_words() == "held back 250 ms by the memory limit"
