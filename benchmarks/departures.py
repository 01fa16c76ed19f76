"""Would a departure from the default tuner have been faster? Paired runs of simulated pipelines.

At three late decisions of each run the process forks: one child lets the tuner go on, each of the others departs from
its proposal for three decisions (all stages open, one of the fullest stages with half or twice as much, all with less,
...). All have the same past, and items cost the same in all of them, so that what differs is the departure's doing. One
that gains at all three decisions points to something that the tuner does not understand; the rest is chance. Scenarios
are printed as they are done; ten take a minute or two on two CPUs.
"""

import argparse
import itertools
import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from _rounds import report

from intune._values import Allocation, Budget, Snapshot
from intune.control import Controller, Guard, Journal
from intune.control.controller import intervals
from intune.sim import TRAINED, scenario
from intune.sim.discrete import OutOfMemory, Simulation
from intune.sim.workers import carry_out
from intune.tuners import Model
from intune.tuners._rows import in_force, most_useful, rows_finished

HOLD, HORIZON = 3, 6
"""Decisions for which a departure stays, and after which what went through is compared."""

MOMENTS = (8, 16, 25)
FACTORS = (0.5, 0.75, 1.5, 2.0)
CHANCE_ITEMS = 2.0
"""Items by which what went through is rough: added on both sides."""

LEAST, ON_AVERAGE = 0.02, 0.04
"""Gain at each decision, and on average, from which a departure counts as one that gains."""

Levels = Mapping[str, int | None]


def departures(snapshot: Snapshot, budget: Budget, proposal: Allocation) -> dict[str, Levels]:
    """By name, the concurrency of the stages that depart; each differs from the proposal and from the others."""
    limit = {stage.name: most_useful(stage.info, budget) for stage in snapshot.stages}
    process = {stage.name for stage in snapshot.stages if stage.info.executor == "process"}
    now = in_force(snapshot)
    have = {name: min(level or limit[name], limit[name]) for name, level in proposal.concurrency.items()}
    wanted: dict[str, dict[str, int]] = {
        "all open": {name: most for name, most in limit.items() if name not in process},
        "as in force": {name: now[name] or limit[name] for name in have},
        "all more": {name: 2 * have[name] for name in have if proposal.concurrency[name] is not None},
        "all less": {name: round(0.6 * level) for name, level in have.items()},
        "equal parts": {stage.name: budget.cpus // len(have) for stage in snapshot.stages if not stage.info.waits},
    }
    fullest = sorted(snapshot.stages, key=lambda stage: -stage.in_hand_mean / have[stage.name])
    for stage, factor in itertools.product([each.name for each in fullest if limit[each.name] > 1][:3], FACTORS):
        level = round(have[stage] * factor)
        if level == have[stage]:
            level += 1 if factor > 1 else -1
        wanted[f"{stage} times {factor:g}"] = {stage: level}
    found: dict[str, Levels] = {}
    for name, levels in wanted.items():
        within = {stage: max(1, min(level, limit[stage])) for stage, level in levels.items()}
        departing = {
            stage: None if level == limit[stage] and stage not in process else level
            for stage, level in within.items()
            if level != have[stage]
        }
        if departing and departing not in found.values():
            found[name] = departing
    return found


@dataclass
class Child:
    """A process that departs: since which decision, what had gone through by then, whom it tells, and what it does."""

    since: int
    items: float
    pipe: int
    levels: Levels


class Departing:
    """The default tuner; at given decisions every departure from it is tried in a process of its own.

    Attributes:
        gains: By departure, the logarithm of what it let through over what went through without, at each decision.
        child: What this process tries; None = it is the one that goes on.
    """

    def __init__(self, moments: frozenset[int]) -> None:
        self._model, self._moments = Model(), moments
        self._decision, self._items = -1, 0.0
        self.gains: dict[str, list[float]] = {}
        self.child: Child | None = None

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What the default tuner says, or what this process departs to."""
        self._decision += 1
        self._items += through(snapshot)
        proposal = self._model.propose(snapshot, budget)
        if self.child is None and self._decision in self._moments:
            self._try(departures(snapshot, budget, proposal))
        if self.child is None or self._decision >= self.child.since + HOLD:
            return proposal
        return replace(proposal, concurrency={**proposal.concurrency, **self.child.levels})

    @property
    def over(self) -> bool:
        """Whether this process has seen enough of what it tries."""
        return self.child is not None and self._decision >= self.child.since + HORIZON

    def tell(self) -> None:
        """Say what went through, and end."""
        assert self.child is not None
        os.write(self.child.pipe, str(self._items - self.child.items).encode())
        os._exit(0)

    def _try(self, choices: Mapping[str, Levels]) -> None:
        follow = self._run({})
        if follow is None:
            return
        for name, levels in choices.items():
            items = self._run(levels)
            if items is None:
                return
            self.gains.setdefault(name, []).append(math.log((items + CHANCE_ITEMS) / (follow + CHANCE_ITEMS)))

    def _run(self, levels: Levels) -> float | None:
        """Fork. Items that went through in the child; None in the child itself."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            self.child = Child(self._decision, self._items, writing, levels)
            return None
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        if not told:
            raise RuntimeError("a process that tried a departure ended without a word")
        return float(told)


def through(snapshot: Snapshot) -> float:
    """Source rows in a window, in blocks of 64: half by the last stage, half by what the training loop took."""
    last = snapshot.stages[-1]
    return ((rows_finished(last) or 0.0) + snapshot.consumer.steps * (last.source_rows_per_item or 0.0)) / 128


def explore(job: tuple[str, int]) -> tuple[str, int, dict[str, list[float]]]:
    """Family, seed, and by departure what it gained at each of the decisions."""
    family, seed = job
    logging.disable(logging.CRITICAL)
    random = np.random.default_rng(seed)
    tuner = Departing(frozenset(moment + int(random.integers(0, 3)) for moment in MOMENTS))
    simulation = Simulation(scenario(family, seed))
    clock = simulation.clock
    controller = Controller(
        simulation, tuner, budget=simulation.budget, guard=Guard(), journal=Journal(None, clock=clock), clock=clock
    )
    try:
        for seconds in itertools.islice(intervals(1.0), MOMENTS[-1] + 2 + HORIZON + 1):
            controller.step()
            if tuner.over:
                break
            simulation.advance(seconds)
    except OutOfMemory:
        pass  # what went through until then counts
    if tuner.child is not None:
        tuner.tell()
    simulation.close()
    return family, seed, tuner.gains


def consistent(gains: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """By departure that gained wherever it was tried, what it gained on average; the best first."""
    found = {
        name: statistics.fmean(each)
        for name, each in gains.items()
        if len(each) == len(MOMENTS) and min(each) > LEAST and statistics.fmean(each) > ON_AVERAGE
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def main() -> None:
    """Explore scenarios and say in how many of them a departure would have gained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(TRAINED), choices=list(TRAINED), metavar="FAMILY")
    parser.add_argument("--scenarios", type=int, default=6, help="of each family (default 6)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.scenarios)
    best: list[float] = []
    for family, seed, gains in carry_out(list(itertools.product(chosen.families, seeds)), explore, chosen.jobs):
        found = consistent(gains)
        best.append(next(iter(found.values()), 0.0))
        named = ", ".join(f"{name} {math.expm1(gain):+.0%}" for name, gain in itertools.islice(found.items(), 3))
        print(f"{family} {seed}: {named or 'none'}", flush=True)
    gaining = [gain for gain in best if gain]
    summary = {
        "scenarios": len(best),
        "with_a_departure_that_gains": len(gaining),
        "median_of_these": statistics.median(map(math.expm1, gaining)) if gaining else None,
        "most": math.expm1(max(best, default=0.0)),
    }
    report("departures", summary, write=chosen.families == list(TRAINED))


if __name__ == "__main__":
    main()
