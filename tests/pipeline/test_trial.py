"""Whether a stage waits: found out by what its items compute, and only from items that ran alone."""

import pytest

from intune._values import Allocation
from intune.pipeline.stage import Trial
from intune.sim import Scenario, SimMachine, SimStage
from intune.sim.discrete import Simulation

LONG = Trial.SECONDS


def test_one_item_that_computes_settles_that_it_does_not_wait() -> None:
    assert Trial().add(wall=LONG, cpu=LONG, queued=0.0) is False


def test_a_short_first_item_is_left_out() -> None:
    trial = Trial()
    assert trial.add(wall=0.01, cpu=0.0, queued=0.0) is None
    assert not trial.suspected


def test_a_few_short_items_in_a_row_must_look_as_if_they_waited_before_the_next_run_alone() -> None:
    """One of a tenth of a millisecond takes ten times as long where it loses its turn once."""
    trial = Trial()
    seen = []
    for _ in range(1 + Trial.LOOKS):  # the first is left out
        assert trial.add(wall=0.001, cpu=0.0001, queued=0.0, counts=trial.counts) is None
        seen.append(trial.wants_alone)
    assert seen == [False] * Trial.LOOKS + [True]


def test_one_of_these_that_computes_settles_it() -> None:
    trial = Trial()
    for _ in range(Trial.LOOKS):
        trial.add(wall=0.001, cpu=0.0001, queued=0.0)
    assert trial.add(wall=0.0001, cpu=0.0001, queued=0.0) is False


def test_items_that_ran_alone_show_that_it_waits() -> None:
    trial = Trial()
    assert trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=trial.counts) is None
    assert trial.suspected
    assert trial.counts
    assert trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=trial.counts) is True


def test_items_that_were_under_way_when_it_was_suspected_show_nothing() -> None:
    trial = Trial()
    before = trial.counts
    trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=before)
    assert [trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=before) for _ in range(7)] == [None] * 7
    assert trial.wants_alone
    assert trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=trial.counts) is True


def test_but_one_of_them_that_computes_settles_it() -> None:
    trial = Trial()
    trial.add(wall=LONG, cpu=0.0, queued=0.0, counts=False)
    assert trial.add(wall=LONG, cpu=0.9 * LONG, queued=0.0, counts=False) is False


def test_seconds_without_a_cpu_say_nothing() -> None:
    assert Trial().add(wall=LONG, cpu=0.2 * LONG, queued=0.75 * LONG) is False


@pytest.mark.parametrize("seconds", [0.002, 0.01, 0.1])
def test_a_function_that_holds_the_lock_is_not_taken_for_one_that_waits(seconds: float) -> None:
    """Eight at once: each of them spends seven eighths of its time without computing, for want of the lock."""
    stages = (SimStage("read", "source"), SimStage("work", lock_seconds=seconds))
    simulation = Simulation(Scenario("locked", stages, SimMachine(cpus=8)))
    simulation.apply(Allocation({"read": None, "work": None}, 8))
    for _ in range(4):
        simulation.advance(1.0)
        assert simulation.stages[1].waits is not True
    assert simulation.stages[1].waits is False
    simulation.snapshot()
    simulation.advance(2.0)
    assert simulation.snapshot().stages[1].wall_seconds_mean == pytest.approx(8 * seconds, rel=0.1)


def test_one_that_sleeps_is() -> None:
    stages = (SimStage("read", "source"), SimStage("work", wait_seconds=0.05))
    simulation = Simulation(Scenario("sleepy", stages, SimMachine(cpus=8)))
    simulation.advance(2.0)
    assert simulation.stages[1].waits is True


def test_a_source_of_one_block_a_unit_can_be_one_that_waits() -> None:
    """Every second of its tasks finds only that a unit has no more blocks; those say nothing of how items are read."""
    stages = (SimStage("fetch", "source", wait_seconds=0.1, cpu_seconds=0.001), SimStage("work", cpu_seconds=0.01))
    simulation = Simulation(Scenario("fetched", stages, SimMachine(cpus=2)))
    simulation.advance(5.0)
    found = simulation.stages[0].waits
    simulation.close()
    assert found is True
