"""The fluid level of the simulator against the discrete-event level, on the families that are trained on.

Both run the same scenarios under the same static allocations (shared, even, proportional, two random ones), without
changes and with quick starts of processes, until they are steady. Compared are the rate, which of two allocations of a
scenario is the faster one, and the figures that tuners see.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from _rounds import report

from intune._values import Allocation, Budget, Snapshot, Tuner
from intune.sim import TRAINED, Scenario, play, scenario
from intune.sim.fluid import Fluid
from intune.sim.tables import tables
from intune.tuners import Even, Proportional, Shared, Static
from intune.tuners.view import View, view

Floats = npt.NDArray[np.float64]
FIRST, DECISIONS, LEAST = 20, 45, 15
WORTH = 0.03
"""Rates of two allocations that differ by less have no order."""
RELATIVE = ("wall", "cpu", "queue", "busy", "cap", "visits", "used")
ABSOLUTE = ("starved", "memory", "held_back", "lock_wait", "ready_batches")


@dataclass
class Run:
    """What one allocation gave in the discrete-event level: steady means over the last windows.

    Attributes:
        family: Of the scenario.
        scenario: What was run.
        tuner: Whose allocation it was.
        asked: float[S]; the concurrency in force; inf = open.
        slots: Slots in force.
        rate: Source rows a second.
        seconds: Length of a window.
        means: What the windows said on average.
    """

    family: str
    scenario: Scenario
    tuner: str
    asked: Floats
    slots: float
    rate: float
    seconds: float
    means: dict[str, Floats]


class Watched:
    """A tuner whose windows are kept."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self.views: list[View] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What the tuner proposes."""
        self.views.append(view(snapshot, budget))
        return self._tuner.propose(snapshot, budget)


def steady(given: Scenario) -> Scenario:
    """The same without changes, and with processes that are up at once."""
    quick = tuple(
        replace(
            stage, start_seconds=min(stage.start_seconds, 0.02), start_cpu_seconds=min(stage.start_cpu_seconds, 0.02)
        )
        for stage in given.stages
    )
    return replace(given, stages=quick, changes=())


def tuners(given: Scenario) -> dict[str, Tuner]:
    """Whose allocations are compared."""
    found: dict[str, Tuner] = {"shared": Shared(), "even": Even(), "proportional": Proportional()}
    for number in range(2):
        random = np.random.default_rng([given.seed, number, 77])
        most = max(2, given.machine.cpus // 2)
        chosen = {stage.name: int(random.integers(1, most + 1)) for stage in given.stages if random.random() < 0.8}
        found[f"random {number}"] = Static(chosen)
    return found


def seconds_through(given: Scenario) -> float:
    """Seconds that items need from the source to the trainer when nothing is in their way."""
    return sum(s.cpu_seconds + s.lock_seconds + s.serial_seconds + s.wait_seconds for s in given.stages)


def discrete(family: str, given: Scenario, name: str, tuner: Tuner) -> Run | None:
    """Run the discrete-event level; None if it died, gave nothing, or its allocation did not stay for long enough."""
    watched, interval = Watched(tuner), max(1.0, 0.5 * seconds_through(given))
    trace = play(given, watched, DECISIONS, interval_seconds=interval)
    if trace.died is not None:
        return None
    last = trace.intervals[-1]
    same = [(each.concurrency, each.slots) == (last.concurrency, last.slots) for each in trace.intervals]
    first = max(FIRST, len(same) - next((n for n, found in enumerate(reversed(same)) if not found), len(same)) + 1)
    if DECISIONS - first < LEAST:
        return None
    asked = np.array([np.inf if value is None else float(value) for value in last.concurrency.values()])
    taken = sum(each.rows for each in trace.intervals[first:]) / (last.seconds - trace.intervals[first - 1].seconds)
    if not taken:
        return None
    return Run(
        family=family,
        scenario=given,
        tuner=name,
        asked=asked,
        slots=float(last.slots),
        rate=taken * source_rows(given),
        seconds=interval,
        means=averages(watched.views[first + 1 :]),
    )


def source_rows(given: Scenario) -> float:
    """Source rows for each row that the trainer takes."""
    found, last = tables([given]), len(given.stages) - 1
    return float(found.source_rows[0, last] / found.rows_out[0, last])


def averages(views: Sequence[View]) -> dict[str, Floats]:
    """Means over windows, [S] or [1], those an item weighted with items; not a number where nothing was measured."""
    found: dict[str, Floats] = {}
    items = np.array([np.nan_to_num(each.items[0]) for each in views])
    for name in (*RELATIVE, *ABSOLUTE, "rate"):
        values = np.array([getattr(each, name)[0] for each in views])
        weights = items if name in ("wall", "cpu", "queue", "visits") else np.ones_like(values)
        weights = np.where(np.isfinite(values), weights, 0.0)
        total = weights.sum(0)
        found[name] = np.where(total > 0, (np.nan_to_num(values) * weights).sum(0) / np.maximum(total, 1e-12), np.nan)
    found["wait"] = np.mean([each.wait[0] for each in views], axis=0)
    return found


def fluid(runs: Sequence[Run]) -> tuple[Floats, list[dict[str, Floats]]]:
    """What the fluid level says of the same: (rates [n], means of windows)."""
    environments = Fluid([run.scenario for run in runs])
    asked = np.full(environments.shape, np.inf)
    for row, run in enumerate(runs):
        asked[row, : len(run.asked)] = run.asked
    slots, seconds = np.array([run.slots for run in runs]), np.array([run.seconds for run in runs])
    views = [environments.step(asked, slots, seconds) for _ in range(DECISIONS)]
    means = []
    for row, run in enumerate(runs):
        windows = [each.take(np.array([row])) for each in views[FIRST:]]
        cut = averages(windows)
        means.append({name: value[: len(run.asked)] if value.ndim else value for name, value in cut.items()})
    return environments.rate(asked, slots), means


def concordant(runs: Sequence[Run], rates: Floats) -> list[bool]:
    """For pairs of allocations of a scenario with rates that differ: whether the fluid level has them in that order."""
    found = []
    for a, b in combinations(range(len(runs)), 2):
        same = runs[a].scenario.name == runs[b].scenario.name
        if same and abs(runs[a].rate - runs[b].rate) > WORTH * max(runs[a].rate, runs[b].rate):
            found.append(bool((runs[a].rate > runs[b].rate) == (rates[a] > rates[b])))
    return found


def figures(runs: Sequence[Run], means: Sequence[dict[str, Floats]]) -> dict[str, float]:
    """By figure of a window the median difference: relative, or absolute for shares."""
    found = {}
    for name in (*RELATIVE, *ABSOLUTE, "wait"):
        away: list[Any] = []
        for run, mean in zip(runs, means, strict=True):
            there, here = np.atleast_1d(run.means[name]), np.atleast_1d(mean[name])
            # Where nothing waits on either side, that both say so is no achievement.
            least = 1e-6 if name in RELATIVE else 0.01
            both = np.isfinite(there) & np.isfinite(here) & ((np.abs(there) > least) | (np.abs(here) > least))
            scale = np.maximum(np.abs(there[both]), least) if name in RELATIVE else 1.0
            away += (np.abs(here[both] - there[both]) / scale).ravel().tolist()
        label = f"{name} (relative)" if name in RELATIVE else f"{name} (absolute)"
        found[label] = float(np.median(away)) if away else float("nan")
        found[f"{label}, p90"] = float(np.quantile(away, 0.9)) if away else float("nan")
    return found


def summary(runs: Sequence[Run], rates: Floats) -> dict[str, float]:
    """How far rates are apart, and how often the order of two allocations is the same."""
    away = np.abs(rates / np.array([max(run.rate, 1e-9) for run in runs]) - 1)
    order = concordant(runs, rates)
    return {
        "runs": len(runs),
        "median": float(np.median(away)),
        "p90": float(np.quantile(away, 0.9)),
        "pairs": len(order),
        "concordant": float(np.mean(order)) if order else float("nan"),
    }


def decisions_per_second() -> dict[str, float]:
    """How many intervals of one environment the fluid level takes a second of CPU, by the number of environments."""
    names, found = list(TRAINED), {}
    for number in (256, 512, 1024):
        fluid = Fluid([scenario(names[n % len(names)], n) for n in range(number)])
        asked, slots = np.full(fluid.shape, np.inf), np.full(number, 32.0)
        fluid.step(asked, slots)
        began = time.process_time()
        for _ in range(30):
            fluid.step(asked, slots)
        found[str(number)] = 30 * number / (time.process_time() - began)
    return found


def main() -> None:
    """Measure, print a table by family, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="scenarios of each family (default 20)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them (default 0)")
    parser.add_argument("--quick", action="store_true", help="two of each, nothing is written")
    chosen = parser.parse_args()
    seeds = 2 if chosen.quick else chosen.seeds
    runs: list[Run] = []
    for family in TRAINED:
        for seed in range(chosen.first, chosen.first + seeds):
            given = steady(scenario(family, seed))
            found = (discrete(family, given, name, tuner) for name, tuner in tuners(given).items())
            runs += [run for run in found if run is not None]
        print(f"{family}: {sum(run.family == family for run in runs)} runs", flush=True)
    rates, means = fluid(runs)
    compared = {}
    print(f"\n{'family':18}{'runs':>6}{'median':>9}{'p90':>9}{'pairs':>7}{'concordant':>12}")
    for family in (*TRAINED, "all"):
        rows = [n for n, run in enumerate(runs) if family in ("all", run.family)]
        compared[family] = row = summary([runs[n] for n in rows], rates[rows])
        print(
            f"{family:18}{row['runs']:6}{row['median']:9.1%}{row['p90']:9.1%}{row['pairs']:7}{row['concordant']:12.1%}"
        )
    measured = {"first": chosen.first, "seeds": seeds, "rate": compared, "figures": figures(runs, means)}
    measured["decisions_per_second"] = decisions_per_second()
    report("fluid_against_discrete", measured, write=not chosen.quick)


if __name__ == "__main__":
    main()
