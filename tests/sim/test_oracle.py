"""The oracle: cases whose optimum is known, phases, and what is kept."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from intune.sim import Change, Scenario, SimMachine, SimStage, SimTrainer, play
from intune.sim.oracle import SAFE, Best, Effort, oracle, phases
from intune.tuners import Static

READ = SimStage("read", "source", cpu_seconds=1e-4)
QUICK = Effort(starts=2, descents=1, runs=60, short_steps=40, long_steps=100)
BENT = Scenario("bent", (READ, SimStage("work", cpu_seconds=0.04, coherency=1 / 16)), SimMachine(cpus=8))


def best(scenario: Scenario, effort: Effort = QUICK) -> Best:
    (found,) = oracle(scenario, effort=effort)
    return found


@pytest.mark.slow
class TestKnownOptima:
    @pytest.mark.parametrize("most", [2, 4, 6])
    def test_of_a_stage_that_bends(self, most: int) -> None:
        """The law has its peak at 1 / sqrt(kappa)."""
        kappa = 1 / most**2
        found = best(replace(BENT, stages=(READ, replace(BENT.stages[1], coherency=kappa))))
        assert found.rows_per_second == pytest.approx(25 * most / (1 + kappa * most * (most - 1)), rel=0.04)
        assert found.concurrency["work"] == most or found.slots == most
        assert found.shared_rows_per_second < 0.97 * found.rows_per_second

    def test_where_all_scales_nothing_is_better_than_shared(self) -> None:
        costs = {"decode": 0.1, "cut": 0.01}
        stages = (replace(READ, cpu_seconds=0.02), *(SimStage(name, cpu_seconds=cost) for name, cost in costs.items()))
        found = best(Scenario("plain", stages, SimMachine(cpus=4)))
        assert found.rows_per_second == pytest.approx(4 / 0.13, rel=0.03)
        assert found.rows_per_second <= 1.02 * found.shared_rows_per_second

    def test_where_the_trainer_needs_the_cpus_too(self) -> None:
        stages = (READ, SimStage("work", cpu_seconds=0.04))
        found = best(Scenario("beside", stages, SimMachine(cpus=4), SimTrainer(cpu_seconds=0.02, threads=2)))
        assert found.rows_per_second == pytest.approx(50, rel=0.05)

    def test_memory_stays_within_what_is_safe(self) -> None:
        work = SimStage("work", cpu_seconds=0.05, row_bytes=40e6)
        tight = Scenario("tight", (READ, work), SimMachine(cpus=8, memory_bytes=1e9))
        found = best(tight)
        limits = {name: value for name, value in found.concurrency.items() if value is not None}
        assert play(tight, Static(limits, found.slots), 10).peak_bytes <= SAFE * 1e9
        assert found.rows_per_second > 0


def test_each_phase_has_its_own_and_short_ones_join_the_next() -> None:
    changes = (
        Change(20.0, "cost", 2.0, "work"),
        Change(20.5, "neighbours", 3.0),
        Change(40.0, "cpus", 2),
    )
    found = list(phases(replace(BENT, changes=changes)))
    assert [seconds for seconds, _ in found] == [0.0, 20.5, 40.0]
    assert [[(change.seconds, change.what) for change in part.changes] for _, part in found] == [
        [],
        [(0.0, "cost"), (0.0, "neighbours")],
        [(0.0, "cost"), (0.0, "neighbours"), (0.0, "cpus")],
    ]
    (early,) = phases(replace(BENT, changes=(Change(1.0, "neighbours", 1.0),)))
    assert early[0] == 0.0
    assert len(early[1].changes) == 1


@pytest.mark.slow
def test_a_change_changes_the_optimum() -> None:
    first, second = oracle(replace(BENT, changes=(Change(20.0, "cost", 2.0, "work"),)), effort=QUICK)
    assert (first.seconds, second.seconds) == (0.0, 20.0)
    assert second.rows_per_second == pytest.approx(first.rows_per_second / 2, rel=0.05)


@pytest.mark.slow
def test_results_are_kept_for_the_same_scenario_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "oracles"
    found = oracle(BENT, folder, QUICK)
    assert oracle(BENT, effort=QUICK) == found
    with mock.patch("intune.sim.oracle.play", side_effect=AssertionError("it was to be looked up")):
        assert oracle(BENT, folder, QUICK) == found
        with pytest.raises(AssertionError, match="it was to be looked up"):
            oracle(replace(BENT, seed=1), folder, QUICK)
        with pytest.raises(AssertionError, match="it was to be looked up"):
            oracle(BENT, folder, replace(QUICK, starts=3))
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_what_passes_before_a_source_that_waits_has_begun_does_not_count() -> None:
    """Items take a second to fetch, one at a time while it is found out that it waits, then 64 that end together."""
    machine = SimMachine(cpus=2)
    size = 0.06 * machine.network_bytes_per_second
    read = SimStage("read", "source", wait_seconds=1.0, network_bytes=size, cpu_seconds=0.005, spread=0.3)
    machine = replace(machine, network_stream_bytes_per_second=size)
    (found,) = oracle(Scenario("fetching", (read, SimStage("map", cpu_seconds=0.02)), machine))
    assert found.rows_per_second == pytest.approx(1 / 0.06, rel=0.1)
