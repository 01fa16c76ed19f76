"""From windows of a pipeline to a scenario that behaves like it.

All rows of the scenario are *source rows*: so it does not matter what filters and flat maps do to rows, and only one
number turns rates of the simulation into those of the trainer. Where items come faster than can be simulated quickly,
several that follow one another are simulated as one. A shuffle of blocks is simulated as a batch of as many rows as it
gives at once: its windows matter for memory and for the first batches only.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intune._errors import PipelineError
from intune._values import StageSnapshot
from intune.sim.calibration import around
from intune.sim.calibration.costs import Cost, drawn, fit
from intune.sim.calibration.levels import stage_levels
from intune.sim.calibration.seen import Window
from intune.sim.scenario import Change, Executor, Kind, Scenario, SimStage

ITEMS_PER_SECOND = 120.0
"""More items of a stage a second than this are simulated several at once."""

MOST_HANDING = 0.01
"""Seconds that handing an item over can take: more is items that were in hand when a window ended."""

LEAST_LOCK = 0.05
"""Share of CPU time under the interpreter lock below which it counts as none."""


@dataclass(frozen=True)
class Fitted:
    """A scenario, and how it stands for the pipeline.

    Attributes:
        scenario: What can be simulated.
        names: By name of a stage, that in the scenario.
        groups: By name of a stage, the items of which an item in the scenario has the cost.
        rows: Rows that the trainer is given for one row of the scenario.
    """

    scenario: Scenario
    names: Mapping[str, str]
    groups: Mapping[str, float]
    rows: float


def fitted(windows: Sequence[Window], replicas: int = 0) -> tuple[Fitted, ...]:
    """The likeliest scenario, and as many others that may be true as well.

    Raises:
        PipelineError: If some stage finished nothing in any window.
    """
    lock_shares = around.lock_shares(windows)
    few, neighbours, many = around.neighbours(windows)
    stages = [_Stage(windows, place, lock_shares, neighbours) for place in range(len(windows[0].snapshot.stages))]
    if idle := [stage.name for stage in stages if not stage.items or not stage.levels.wall]:
        raise PipelineError(f"stage {idle[0]!r} finished nothing in {len(windows)} windows: let it run for longer")
    chain = _Chain(stages)
    machine = around.machine(windows)
    trainer = around.trainer(windows, chain.grouped[-1], neighbours)
    last = stages[-1]
    rows = last.rows / last.source_rows if last.rows else last.items / last.source_rows
    random = np.random.default_rng(0)
    found = []
    for number in range(1 + replicas):
        costs = [drawn(stage.levels, random) if number else fit(stage.levels) for stage in stages]
        simulated = tuple(
            _simulated(stage, cost, chain, place) for place, (stage, cost) in enumerate(zip(stages, costs, strict=True))
        )
        names = {stage.name: each.name for stage, each in zip(stages, simulated, strict=True)}
        groups = dict(zip(names, chain.cost_of, strict=True))
        others = float(random.uniform(few, many)) if number else neighbours
        changes = (Change(0.0, "neighbours", others),) if others else ()
        scenario = Scenario("calibrated", simulated, machine, trainer, changes)
        found.append(Fitted(scenario, names, groups, rows / chain.unit))
    return tuple(found)


class _Stage:
    """All that windows say of one stage, in items as they are."""

    def __init__(
        self, windows: Sequence[Window], place: int, lock_shares: Mapping[str, float], neighbours: float
    ) -> None:
        seen = [window.snapshot.stages[place] for window in windows]
        self.info = seen[-1].info
        self.name, self.kind = self.info.name, self.info.kind
        self.items = sum(stage.items_out for stage in seen)
        self.rows = sum(stage.rows_out for stage in seen)
        self.source_rows = sum(stage.items_out * (stage.source_rows_per_item or 0.0) for stage in seen) or 1.0
        self.per_second = _fast([s.items_out / w.snapshot.window_seconds for s, w in zip(seen, windows, strict=True)])
        self.spread = _spread(seen)
        self.levels = stage_levels(windows, place, self.spread, neighbours)
        self.bytes = _mean([(stage.item_bytes_mean, stage.items_out) for stage in seen])
        self.resident = _mean([(stage.process_resident_bytes, 1) for stage in seen])
        self.start_seconds = _start_seconds(windows, seen)
        self.lock_share = lock_shares.get(self.name, 0.0)
        self.handing = _handing(windows, seen)
        """Seconds an item for which it is in hand but not worked on: threads take turns to take and book it."""

    @property
    def source_rows_per_item(self) -> float:
        """Source rows that an item which comes out stands for."""
        return self.source_rows / self.items


class _Chain:
    """How many items are simulated as one, and in how many rows."""

    def __init__(self, stages: Sequence[_Stage]) -> None:
        self.grouped: list[float] = []
        """By stage, the items that come out which one simulated item stands for."""
        self.cost_of: list[float] = []
        """By stage, of how many items a simulated one has the cost."""
        self.children: list[int] = []
        self.gathers: list[bool] = []
        for place, stage in enumerate(stages):
            self._add(stage, stages[place - 1] if place else None)
        rows = [group * stage.source_rows_per_item for group, stage in zip(self.grouped, stages, strict=True)]
        self.unit = next((unit for unit in (1, 2, 4, 8, 16, 32) if all(_whole(unit * each) for each in rows)), 64)
        """Rows of the scenario for one source row."""
        self.rows = [max(1, round(self.unit * each)) for each in rows]

    def _add(self, stage: _Stage, before: _Stage | None) -> None:
        usual, children = max(1.0, stage.per_second / ITEMS_PER_SECOND), 1
        ratio = before.source_rows_per_item / stage.source_rows_per_item if before else 1.0
        gathers = stage.kind == "batch" or (stage.kind == "shuffle" and abs(ratio - 1) > 0.01)
        if before is None or gathers:
            group = cost = usual
        else:
            group = self.grouped[-1] * ratio
            cost = self.grouped[-1]
            if stage.kind in ("flat_map", "unbatch"):
                children = max(1, round(group / usual))
                group /= children
                # What a flat_map takes is measured by item that it gives, for unbatch by block that comes in.
                cost = group if stage.kind == "flat_map" else cost / children
        self.grouped.append(group)
        self.cost_of.append(cost)
        self.children.append(children)
        self.gathers.append(gathers)


def _simulated(stage: _Stage, cost: Cost, chain: _Chain, place: int) -> SimStage:
    times, info = chain.cost_of[place], stage.info
    lock = cost.cpu * stage.lock_share if stage.lock_share > LEAST_LOCK else 0.0
    gathers = chain.gathers[place]
    draws = stage.kind in ("flat_map", "unbatch")
    kind: Kind = "source" if not place else "batch" if gathers else "flat_map" if draws else "map"
    executor: Executor = info.executor
    number = sum(chain.gathers[: place + 1])
    # A source or gather that is in hand and not worked on has no thread yet, which the simulation adds by itself.
    handing = 0.0 if info.waits is False and kind not in ("map", "flat_map") else stage.handing
    waits = [seconds + handing for _, seconds in cost.waits]
    longest = max(waits)
    varies = longest > 0 and min(waits) < 0.999 * longest
    by_crowd = zip((n for n, _ in cost.waits), (seconds / longest for seconds in waits), strict=True) if varies else ()
    return SimStage(
        name=("batch" if number == 1 else f"batch_{number}") if gathers else _free(stage.name),
        kind=kind,
        executor=executor,
        wait_seconds=longest * times,
        wait_by_crowd=tuple(by_crowd),
        lock_seconds=lock * times,
        cpu_seconds=(cost.cpu - lock) * times,
        contention=cost.contention,
        coherency=cost.coherency,
        spread=stage.spread,
        rows=chain.rows[place] if not place or gathers else 1,
        children=chain.children[place],
        row_bytes=(stage.bytes or 0.0) / chain.rows[place],
        max_concurrency=info.max_concurrency,
        waits=info.waits,
        start_seconds=stage.start_seconds,
        start_cpu_seconds=0.0,
        resident_bytes=stage.resident or 80e6,
    )


def _free(name: str) -> str:
    """A name that no gather has."""
    return f"{name} (map)" if name.split("_")[0] in ("batch", "shuffle") else name


def _spread(seen: Sequence[StageSnapshot]) -> float:
    """Deviation of the logarithm of an item's cost, from the largest of what was common: p99 against p50."""
    found = []
    for stage in seen:
        items = sum(items for _, items, _ in stage.wall_seconds_by_crowd)
        if items >= 20 and stage.wall_seconds_p50 and stage.wall_seconds_p99:
            normal = statistics.NormalDist().inv_cdf(1 - max(0.01, 0.6 / items))
            found.append(math.log(max(1.0, stage.wall_seconds_p99 / stage.wall_seconds_p50)) / normal)
    return min(1.5, statistics.median(found)) if found else 0.1


def _handing(windows: Sequence[Window], seen: Sequence[StageSnapshot]) -> float:
    """Seconds an item for which it is in hand but not worked on, of windows in which nothing is left from before."""
    found = []
    for window, stage in zip(windows, seen, strict=True):
        seconds = window.snapshot.window_seconds
        items = sum(items for _, items, _ in stage.wall_seconds_by_crowd)
        if items and window.held_seconds >= seconds + (stage.wall_seconds_mean or 0.0):
            found.append((stage.in_hand_mean * seconds - stage.busy_seconds) / items)
    return min(MOST_HANDING, max(0.0, statistics.median(found))) if found else 0.0


def _start_seconds(windows: Sequence[Window], seen: Sequence[StageSnapshot]) -> float:
    """Seconds that a process takes to start."""
    live = [stage.processes_live or 0 for stage in seen]
    born = sum(max(0, after - before) for before, after in itertools.pairwise(live))
    starting = sum(
        window.snapshot.window_seconds for window, stage in zip(windows, seen, strict=True) if stage.processes_starting
    )
    return min(30.0, max(0.05, starting / born)) if born else 0.5


def _whole(rows: float) -> bool:
    return rows >= 1 and abs(rows - round(rows)) <= 0.01 * rows


def _fast(rates: Sequence[float]) -> float:
    return float(np.quantile(rates, 0.9))


def _mean(values: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight > 0]
    return sum(v * w for v, w in known) / sum(w for _, w in known) if known else None
