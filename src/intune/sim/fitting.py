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
from intune._values import CROWDS, StageSnapshot
from intune.sim import around
from intune.sim.costs import Cost, Point, fit
from intune.sim.scenario import Executor, Kind, Scenario, SimStage
from intune.sim.seen import Window
from intune.tuners._beliefs import lost_share_of

ITEMS_PER_SECOND = 300.0
"""More items of a stage a second than this are simulated several at once."""

STREAM = 1e6
"""Bytes a second of one stream of a simulated device: seconds of a turn are written as bytes."""

SETTLED, ENOUGH = 0.8, 6
"""Share of a window's items that must have been begun under its allocation, where so many points are left."""

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
        unit: Rows of the scenario for one source row.
        doubts: What could not be told, a sentence each.
    """

    scenario: Scenario
    names: Mapping[str, str]
    groups: Mapping[str, float]
    rows: float
    unit: int
    doubts: tuple[str, ...]


def fitted(windows: Sequence[Window]) -> Fitted:
    """The likeliest scenario.

    Raises:
        PipelineError: If some stage finished nothing in any window.
    """
    lock_shares = around.lock_shares(windows)
    stages = [_Stage(windows, place, lock_shares) for place in range(len(windows[0].snapshot.stages))]
    if idle := [stage.name for stage in stages if not stage.items or not stage.points]:
        raise PipelineError(f"stage {idle[0]!r} finished nothing in {len(windows)} windows: let it run for longer")
    chain = _Chain(stages)
    device = _Devices()
    simulated = tuple(_simulated(stage, chain, place, device) for place, stage in enumerate(stages))
    machine = around.machine(windows, device.fields)
    last = stages[-1]
    scenario = Scenario(
        "calibrated",
        simulated,
        machine,
        around.trainer(windows, chain.grouped[-1]),
        around.neighbours(windows, machine.cpus),
    )
    names = {stage.name: each.name for stage, each in zip(stages, simulated, strict=True)}
    rows = last.rows / last.source_rows if last.rows else last.items / last.source_rows
    groups = dict(zip(names, chain.cost_of, strict=True))
    return Fitted(scenario, names, groups, rows / chain.unit, chain.unit, tuple(device.doubts))


class _Stage:
    """All that windows say of one stage, in items as they are."""

    def __init__(self, windows: Sequence[Window], place: int, lock_shares: Mapping[str, float]) -> None:
        seen = [window.snapshot.stages[place] for window in windows]
        self.info = seen[-1].info
        self.name, self.kind = self.info.name, self.info.kind
        self.items = sum(stage.items_out for stage in seen)
        self.rows = sum(stage.rows_out for stage in seen)
        self.source_rows = sum(stage.items_out * (stage.source_rows_per_item or 0.0) for stage in seen) or 1.0
        self.per_second = _fast([s.items_out / w.snapshot.window_seconds for s, w in zip(seen, windows, strict=True)])
        self.points = _all_points(windows, place)
        self.spread = _spread(seen)
        self.bytes = _mean([(stage.item_bytes_mean, stage.items_out) for stage in seen])
        self.resident = _mean([(stage.process_resident_bytes, 1) for stage in seen])
        self.start_seconds = _start_seconds(windows, seen)
        self.lock_share = lock_shares.get(self.name, 0.0)
        self.cost = fit(self.points, self.spread) if self.points else Cost(0.0, 0.0, 0.0, 0.0, None)
        worked = sum(point.items for point in self.points)
        in_hand = sum(s.in_hand_mean * w.snapshot.window_seconds for s, w in zip(seen, windows, strict=True))
        booked = sum(stage.busy_seconds for stage in seen)
        self.handing = min(MOST_HANDING, max(0.0, in_hand - booked) / worked) if worked else 0.0
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


class _Devices:
    """Turns that are no computing, as devices of the machine: there are two, a disk and a network."""

    def __init__(self) -> None:
        self.fields: dict[str, float] = {}
        self.doubts: list[str] = []
        self._left = ["disk", "network"]

    def place(self, stage: _Stage, times: float) -> dict[str, float]:
        """The fields of a stage for its turn."""
        turn = stage.cost.turn
        if turn is None:
            return {}
        if turn.places == 1:
            self.doubts.append(
                f"{stage.name}: one item at a time for {turn.seconds * 1e3:.3g} ms, or several for as many times as "
                "long; whether that is a lock or a device cannot be told"
            )
        else:
            self.doubts.append(
                f"{stage.name}: about {turn.places:g} items at a time for {turn.seconds * 1e3:.3g} ms; taken for a "
                "device, it may be a lock that so many may hold"
            )
        if turn.computes:
            return {"serial_seconds": turn.seconds * times}
        if not self._left:
            return {"serial_seconds": turn.seconds * times / turn.places}
        device = self._left.pop(0)
        self.fields[f"{device}_stream_bytes_per_second"] = STREAM
        self.fields[f"{device}_bytes_per_second"] = STREAM * turn.places
        return {f"{device}_bytes": turn.seconds * times * STREAM}


def _simulated(stage: _Stage, chain: _Chain, place: int, devices: _Devices) -> SimStage:
    times, cost, info = chain.cost_of[place], stage.cost, stage.info
    shared = devices.place(stage, times)
    lock = cost.cpu * stage.lock_share if stage.lock_share > LEAST_LOCK else 0.0
    gathers = chain.gathers[place]
    draws = stage.kind in ("flat_map", "unbatch")
    kind: Kind = "source" if not place else "batch" if gathers else "flat_map" if draws else "map"
    executor: Executor = info.executor
    number = sum(chain.gathers[: place + 1])
    return SimStage(
        name=("batch" if number == 1 else f"batch_{number}") if gathers else _free(stage.name),
        kind=kind,
        executor=executor,
        wait_seconds=(cost.wait + stage.handing) * times,
        lock_seconds=lock * times,
        cpu_seconds=max(0.0, (cost.cpu - lock) * times - shared.get("serial_seconds", 0.0)),
        contention=cost.contention,
        coherency=cost.coherency,
        spread=stage.spread,
        rows=chain.rows[place] if not place or gathers else 1,
        children=chain.children[place],
        row_bytes=(stage.bytes or 0.0) / chain.rows[place],
        max_concurrency=info.max_concurrency,
        waits=info.waits if kind in ("map", "flat_map") else None,
        start_seconds=stage.start_seconds,
        start_cpu_seconds=0.0,
        resident_bytes=stage.resident or 80e6,
        **shared,
    )


def _free(name: str) -> str:
    """A name that no gather has."""
    return f"{name} (map)" if name.split("_")[0] in ("batch", "shuffle") else name


def _all_points(windows: Sequence[Window], place: int) -> list[Point]:
    """Points of the windows whose items were all begun under their allocation, if there are enough of those."""
    found = [
        (_points(number, window, place), _begun_share(window, place) >= SETTLED)
        for number, window in enumerate(windows)
    ]
    settled = [point for points, is_settled in found if is_settled for point in points]
    return settled if len(settled) >= ENOUGH else [point for points, _ in found for point in points]


def _begun_share(window: Window, place: int) -> float:
    """Of the items that a stage finished in a window, the share that was begun under its allocation."""
    wall = window.snapshot.stages[place].wall_seconds_mean or 0.0
    return (window.held_seconds - wall) / window.snapshot.window_seconds


def _points(number: int, window: Window, place: int) -> list[Point]:
    snapshot = window.snapshot
    stage = snapshot.stages[place]
    if stage.cpu_seconds_mean is None or not stage.busy_seconds:
        return []
    own = 1 - lost_share_of(stage) * around.contention(snapshot) - (stage.run_queue_seconds or 0.0) / stage.busy_seconds
    ends = dict(zip(CROWDS, (*CROWDS[1:], 2 * CROWDS[-1]), strict=True))
    return [
        Point(
            number,
            min(max(stage.in_hand_mean, crowd), 0.97 * ends[crowd]),  # a class has a width: where in it they are
            items,
            wall * max(0.0, own),
            min(stage.cpu_seconds_mean, stage.wall_seconds_mean or math.inf),
        )
        for crowd, items, wall in stage.wall_seconds_by_crowd
    ]


def _spread(seen: Sequence[StageSnapshot]) -> float:
    """Deviation of the logarithm of an item's cost, from the largest of what was common: p99 against p50."""
    found = []
    for stage in seen:
        items = sum(items for _, items, _ in stage.wall_seconds_by_crowd)
        if items >= 20 and stage.wall_seconds_p50 and stage.wall_seconds_p99:
            normal = statistics.NormalDist().inv_cdf(1 - max(0.01, 0.6 / items))
            found.append(math.log(max(1.0, stage.wall_seconds_p99 / stage.wall_seconds_p50)) / normal)
    return min(1.5, statistics.median(found)) if found else 0.1


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
