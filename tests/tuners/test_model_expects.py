"""What the model says that it expects, and what comes of it in simulated time."""

from dataclasses import replace

import pytest

from intune._values import Allocation, Budget, Snapshot, StageInfo
from intune.control import Guard
from intune.sim import Scenario, SimMachine, SimStage, SimTrainer
from intune.sim.discrete import Simulation
from intune.sim.play import play
from intune.testing import blank_snapshot
from intune.tuners import Model, Static

READ = SimStage("read", "source", cpu_seconds=0.005, rows=64, spread=0.1)
WORK = SimStage("work", cpu_seconds=0.04, spread=0.1)
BATCH = SimStage("batch", "batch", rows=128, cpu_seconds=0.002)

SCENARIOS = {
    "scales": Scenario("scales", (READ, WORK), SimMachine(cpus=8)),
    "bends": Scenario("bends", (READ, replace(WORK, coherency=0.1)), SimMachine(cpus=8)),
    "filters": Scenario("filters", (READ, replace(WORK, kept=0.5), BATCH), SimMachine(cpus=4)),
    "takes little": Scenario("little", (READ, WORK, BATCH), SimMachine(cpus=8), SimTrainer(device_seconds=0.025)),
    "processes": Scenario(
        "processes", (READ, replace(WORK, executor="process", lock_seconds=0.04, cpu_seconds=0.0)), SimMachine(cpus=4)
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_it_expects_once_it_has_settled_is_what_comes(name: str) -> None:
    trace = play(SCENARIOS[name], Model(), 24)
    for line, after in zip(trace.lines[14:-1], trace.lines[15:], strict=True):
        expected, got = line["applied"]["expected_rows_per_second"], after["outcome"]["rows_per_second"]  # type: ignore[index]
        assert expected == pytest.approx(got, rel=0.12)


class Released:
    """Lets a model watch while the stage that bends has all, then lets it decide."""

    def __init__(self, first: dict[str, int], decisions: int) -> None:
        self._first, self._left, self._model = Static(first), decisions, Model(try_every=0)

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        proposal, self._left = self._model.propose(snapshot, budget), self._left - 1
        return self._first.propose(snapshot, budget) if self._left >= 0 else proposal


def test_a_change_is_judged_in_the_journal_with_what_was_expected_of_it() -> None:
    narrow = Scenario("narrow", (READ, WORK), SimMachine(cpus=8))
    trace = play(narrow, Released({"work": 4}, 8), 14)
    judged = [line["judged"] for line in trace.lines if line["judged"]]
    assert [each["tick"] for each in judged] == [8]
    assert judged[0]["concurrency"] == {"work": [4, None]}
    right = (8 / (0.005 + 0.04)) / (4 / 0.04) - 1
    assert judged[0]["expected"] == pytest.approx(right, abs=0.1)
    assert judged[0]["got"] == pytest.approx(right, abs=0.1)


def test_it_says_nothing_while_a_stage_has_no_figures() -> None:
    model, budget = Model(), Budget(4)
    blank = blank_snapshot((StageInfo("read", "source"), StageInfo("work", "map")))
    assert model.propose(blank, budget).expected_rows_per_second is None
    simulation = Simulation(SCENARIOS["scales"])
    simulation.apply(Allocation({"read": None, "work": None}, 8))
    simulation.advance(1.0)
    seen = simulation.snapshot()
    simulation.close()
    fewer = replace(seen, stages=(seen.stages[0], replace(seen.stages[1], items_out=0, wall_seconds_mean=None)))
    assert Model().propose(fewer, budget).expected_rows_per_second is None
    said = Model().propose(seen, budget)
    assert said.expected_rows_per_second is not None
    lowered, events = Guard().check(replace(said, slots=99), seen, budget)
    assert events
    assert lowered.expected_rows_per_second is None
