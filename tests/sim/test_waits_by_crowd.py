"""A stage whose items wait for longer the more of them are at work."""

from typing import Any

import pytest

from intune.sim import Scenario, SimMachine, SimStage, play
from intune.sim.tables import tables
from intune.tuners import Static

READ = SimStage("read", "source", cpu_seconds=1e-4)
PAIRS = ((1.0, 0.5), (2.0, 0.5), (4.0, 2.0))


def stage(pairs: Any = PAIRS) -> SimStage:
    return SimStage("work", wait_seconds=0.1, wait_by_crowd=pairs, waits=True)


@pytest.mark.parametrize(("at_once", "seconds"), [(1, 0.05), (1.5, 0.05), (2, 0.05), (3, 0.125), (4, 0.2), (9, 0.2)])
def test_it_is_linear_between_and_the_same_beyond(at_once: float, seconds: float) -> None:
    assert stage().waiting(at_once) == pytest.approx(seconds)


def test_without_it_waits_are_what_they_are() -> None:
    assert SimStage("work", wait_seconds=0.1).waiting(7) == 0.1


@pytest.mark.parametrize(("limit", "rate"), [(1, 20), (2, 40), (3, 24), (4, 20)])
def test_rates_follow_from_it(limit: int, rate: float) -> None:
    drawn = Scenario("waits", (READ, stage()), SimMachine(cpus=2))
    assert play(drawn, Static({"work": limit}), 20).rows_per_second(5) == pytest.approx(rate, rel=0.05)


def test_where_there_is_nothing_to_wait_for_it_takes_no_time() -> None:
    work = SimStage("work", cpu_seconds=0.01, wait_seconds=0.1, wait_by_crowd=((1.0, 0.0), (2.0, 1.0)))
    drawn = Scenario("waits", (READ, work), SimMachine(cpus=2))
    assert play(drawn, Static({"work": 1}), 20).rows_per_second(5) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("pairs", [((1.0, -1.0),), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), (("1", 1.0),)])
def test_what_makes_no_sense_is_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match="stage 'work': wait_by_crowd must be pairs of numbers of at least 0"):
        stage(pairs)


def test_the_fluid_level_refuses_it() -> None:
    with pytest.raises(ValueError, match="stage 'work': wait_by_crowd is not known to the fluid level"):
        tables([Scenario("waits", (READ, stage()))])
