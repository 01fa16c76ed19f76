"""What was measured, simulated again: which windows count for an allocation, and how sure its rate is."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from intune._values import Allocation, Budget, Snapshot
from intune.sim import Scenario, SimMachine, SimStage, SimTrainer, play
from intune.sim.calibration.fitting import fitted
from intune.sim.calibration.replay import Held, drift, replayed
from intune.sim.calibration.seen import windows

PLAIN = Scenario(
    "plain",
    (SimStage("read", "source", cpu_seconds=0.001, max_concurrency=1), SimStage("work", cpu_seconds=0.04)),
    SimMachine(cpus=4),
)


class Alternating:
    """One limit of `work` after another, each for so many decisions; the source is let have its one, or is open."""

    def __init__(self, limits: Sequence[int | None], each: int) -> None:
        self._turns = itertools.cycle(limit for limit in limits for _ in range(each))

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The next one."""
        limit = next(self._turns)
        return Allocation({"read": 1 if limit else None, "work": limit}, budget.cpus)


def held(limits: Sequence[int | None], each: int, decisions: int) -> Iterator[Held]:
    seen = windows(play(PLAIN, Alternating(limits, each), decisions).lines)
    return iter(replayed(fitted(seen)[0], seen))


def test_each_allocation_is_measured_apart_and_fits() -> None:
    found = {one.concurrency["work"]: one for one in held((1, 2, None), 3, 45)}
    assert {limit: round(one.measured) for limit, one in found.items()} == {
        1: 25,
        2: 50,
        None: pytest.approx(98, abs=3),
    }
    assert all(abs(one.off) < 0.06 for one in found.values())


def test_a_limit_that_is_none_is_left_out() -> None:
    assert {one.concurrency["read"] for one in held((2, None), 3, 20)} == {None}


@pytest.mark.parametrize(("each", "visits"), [(3, 5), (30, 3)])
def test_visits_are_counted_and_long_ones_as_several(each: int, visits: int) -> None:
    found = {one.concurrency["work"]: one.visits for one in held((1, 2), each, 10 * each if each == 3 else 60)}
    assert found[2] == visits


def test_one_visit_is_less_sure_than_many() -> None:
    once = next(one for one in held((1, 2), 3, 7) if one.concurrency["work"] == 2)
    often = next(one for one in held((1, 2), 3, 60) if one.concurrency["work"] == 2)
    assert once.visits == 1
    assert often.deviation < 0.6 * once.deviation


def test_where_nothing_was_held_for_long_what_there_is_counts() -> None:
    found = list(held((1, 2), 2, 30))
    assert {one.concurrency["work"] for one in found} == {1, 2}


def test_a_trainer_that_takes_a_batch_now_and_then_is_no_misfit() -> None:
    """What is finished ahead of it does not count: only what it takes."""
    stages = (
        SimStage("read", "source", cpu_seconds=0.05, rows=20_000),
        SimStage("batch", "batch", cpu_seconds=0.001, rows=2_000),
    )
    slow = Scenario("slow", stages, SimMachine(cpus=2), SimTrainer(device_seconds=0.8))
    seen = windows(play(slow, "shared", 40).lines)
    (one,) = replayed(fitted(seen)[0], seen)
    assert one.measured == pytest.approx(2500, rel=0.1)
    assert abs(one.off) < 0.1


def of(off: float, deviation: float, visits: int = 1) -> Held:
    return Held({"work": 1}, 4, 10.0, 100.0, deviation, visits, 100.0 * math.exp(off))


@pytest.mark.parametrize(("off", "sure"), [(0.5, 0.5 - 1.645 * 0.1), (-0.5, -0.5 + 1.645 * 0.1), (0.1, 0.0)])
def test_what_chance_explains_is_not_sure(off: float, sure: float) -> None:
    assert of(off, 0.1).surely_off == pytest.approx(sure)


def test_times_that_differ_much_are_no_chance() -> None:
    assert drift([of(0.0, 0.05, 4), of(0.0, 0.1, 4), of(0.0, 0.2, 1)]) == 0.0
    assert drift([of(0.0, 0.2, 4), of(0.0, 0.2, 4), of(0.0, 0.1, 4)]) == pytest.approx(0.4)
