"""The best static allocation of a scenario, by search in simulated time: what tuners are held against.

It is the *safe* oracle: allocations run behind guard and brake as those of a tuner do, and count only if memory stayed
within 95 % of the limit. Where the scenario changes meanwhile, each of its phases has an oracle of its own. Worker
processes start in no time here, so that only what holds in the long run is compared.

Starts are `shared`, what `proportional` and `model` arrive at, and random ones. From the best of them coordinate
descent goes on by levels of concurrency in short runs; the best few of all that was seen meet again in long ones,
`shared` and what `model` arrived at among them, so that the oracle is never below these but for noise. That it is the
optimum is not proven.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from intune._values import Tuner
from intune.sim.play import Trace, play
from intune.sim.scenario import Scenario
from intune.tuners import Model, Proportional, Shared, Static

VERSION = 3
"""Raised whenever results that were kept before are not to be used any more."""

SAFE = 0.95
"""Share of the memory limit that the oracle may use."""

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_PHASE_SECONDS = 3.0
"""A phase that is shorter belongs to the next one."""

FIRST_SECONDS = 24
"""Of a run with all stages open, which shows how fast it goes and how long it takes to begin."""

LAST_SECONDS = 8
"""Of that run, in which it has settled."""

ARRIVED_SECONDS = 25
"""When `model` has arrived at something."""

REMEMBERED_SECONDS = 11
"""For so long the brake remembers what was before processes came up."""

BETTER = 1.005
FINALISTS = 5

Point = tuple[int | None, ...]
"""Concurrency of each stage, then slots; None = open, or all slots."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard is searched.

    Attributes:
        starts: Random starts.
        descents: How many of the starts are gone on from.
        runs: The most short runs of a phase.
        short_steps: Steps of the trainer that a short run has about.
        long_steps: The same of a long run.
    """

    starts: int = 4
    descents: int = 2
    runs: int = 100
    short_steps: int = 40
    long_steps: int = 200


@dataclass(frozen=True, slots=True)
class Best:
    """The best static allocation of one phase.

    Attributes:
        seconds: When the phase begins.
        concurrency: By stage; None = open.
        slots: CPU slots; None = all.
        rows_per_second: What it gives.
        shared_rows_per_second: What leaving everything open gives.
        runs: Runs that it took to find.
    """

    seconds: float
    concurrency: dict[str, int | None]
    slots: int | None
    rows_per_second: float
    shared_rows_per_second: float
    runs: int


def oracle(scenario: Scenario, folder: Path | None = None, effort: Effort | None = None) -> tuple[Best, ...]:
    """The best static allocation of each phase of a scenario, in order of time.

    Args:
        scenario: What is searched in.
        folder: Where results are kept, one file a scenario, and looked for first; None = nowhere. It is made if needed.
        effort: How hard is searched.

    Raises:
        OSError: If the folder cannot be read or written.
    """
    effort = effort or Effort()
    path = folder / f"{scenario.name}-{_digest(scenario, effort)}.json" if folder is not None else None
    if path is not None and path.exists():
        return tuple(Best(**each) for each in json.loads(path.read_text(encoding="utf-8")))
    found = tuple(_Search(part, effort).best(seconds) for seconds, part in phases(scenario))
    if path is not None:
        _keep(path, found)
    return found


def phases(scenario: Scenario) -> Iterator[tuple[float, Scenario]]:
    """When each phase begins, and the scenario as it is from then on."""
    begins = [0.0, *(change.seconds for change in scenario.changes), math.inf]
    for begin, end in itertools.pairwise(begins):
        if end - begin < LEAST_PHASE_SECONDS:
            continue
        changes = tuple(replace(each, seconds=0.0) for each in scenario.changes if each.seconds <= begin)
        yield (begin if begin > LEAST_PHASE_SECONDS else 0.0), replace(scenario, changes=changes)


class _Search:
    """The search in one phase."""

    def __init__(self, scenario: Scenario, effort: Effort) -> None:
        quick = (replace(stage, start_seconds=0.01, start_cpu_seconds=0.0) for stage in scenario.stages)
        self._scenario = replace(scenario, stages=tuple(quick))
        self._effort = effort
        self._names = [stage.name for stage in scenario.stages]
        self._random = np.random.default_rng(scenario.seed)
        quota = [change.value for change in scenario.changes if change.what == "cpus"]
        self._slots = max(1, math.floor(quota[-1])) if quota else scenario.machine.cpus
        self._seen: dict[Point, float] = {}
        self._runs = 0
        steps, begins = self._first_look()
        limited = scenario.machine.memory_bytes is not None
        remembers = limited and any(stage.executor == "process" for stage in scenario.stages)
        self._warm = begins + _seconds(effort.short_steps / 2, steps, REMEMBERED_SECONDS if remembers else 2, 15)
        self._short = _seconds(effort.short_steps, steps, 2, 60)
        self._long = _seconds(effort.long_steps, steps, 8, 200)

    def best(self, seconds: float) -> Best:
        """The best of the phase that begins then."""
        shared: Point = (None,) * (len(self._names) + 1)
        arrived = self._arrived(Model(), ARRIVED_SECONDS)
        # What is needed and no more: the search goes on from there.
        needed = self._arrived(Proportional(keep=0.97, margin=0.0, spare=0.5), self._warm + self._short)
        starts = [shared, arrived, needed]
        starts += [self._drawn() for _ in range(self._effort.starts)]
        starts.sort(key=self._rate, reverse=True)
        for start in starts[: self._effort.descents]:
            self._descend(start)
        ranked = sorted(self._seen, key=lambda point: self._seen[point], reverse=True)
        known = list(dict.fromkeys((shared, arrived)))
        finalists = [*known, *[point for point in ranked if point not in known][:FINALISTS]]
        rates = {point: self._measured(point, self._long) for point in finalists}
        point = max(rates, key=lambda each: rates[each])
        concurrency = dict(zip(self._names, point, strict=False))
        return Best(seconds, concurrency, point[-1], rates[point], rates[shared], self._runs)

    def _descend(self, point: Point) -> None:
        """Change one number at a time while that gives more."""
        moved = True
        while moved:
            moved = False
            for place in range(len(point)):
                for other in self._moves(point, place):
                    if self._runs >= self._effort.runs:
                        return
                    if self._rate(other) > BETTER * self._rate(point):
                        point, moved = other, True

    def _moves(self, point: Point, place: int) -> list[Point]:
        """A level or two up and down, and open."""
        levels: list[int | None] = [*self._levels(place), None]
        now = point[place]
        at = levels.index(now) if now in levels else sum(level < now for level in levels if level and now)
        near = [levels[at + step] for step in (-1, 1, -2, 2) if 0 <= at + step < len(levels)]
        chosen = [*near, *([None] if now is not None and None not in near else [])]
        if now is None:  # from open all the range is near
            chosen = [*levels[-3::-2], 1][:4]
        return [(*point[:place], level, *point[place + 1 :]) for level in chosen]

    def _levels(self, place: int) -> list[int]:
        stage = self._scenario.stages[place] if place < len(self._names) else None
        slotless = stage is not None and stage.waits is not False and (stage.wait_seconds or stage.network_bytes)
        most = self._scenario.machine.max_threads if slotless else self._slots
        if stage is not None and stage.max_concurrency is not None:
            most = min(most, stage.max_concurrency)
        return [level for level in LEVELS if level <= most]

    def _drawn(self) -> Point:
        chosen: list[int | None] = []
        for place in range(len(self._names) + 1):
            levels = self._levels(place)
            take = int(self._random.integers(0, len(levels) + 1))
            chosen.append(levels[take] if take < len(levels) else None)
        return (*chosen[:-1], None)

    def _arrived(self, tuner: Tuner, seconds: int) -> Point:
        """What a tuner has in force after so long."""
        trace = self._played(tuner, seconds)
        if not trace.intervals:
            return (None,) * (len(self._names) + 1)
        last = trace.intervals[-1].concurrency
        return (*(last[name] for name in self._names), None)

    def _rate(self, point: Point) -> float:
        """Rows a second in a short run."""
        if point not in self._seen:
            self._seen[point] = self._measured(point, self._short)
        return self._seen[point]

    def _measured(self, point: Point, seconds: int) -> float:
        """Rows a second; 0 where memory passed what is safe."""
        limits = {name: value for name, value in zip(self._names, point, strict=False) if value is not None}
        trace = self._played(Static(limits, point[-1]), self._warm + seconds)
        limit = self._scenario.machine.memory_bytes
        if limit is not None and trace.peak_bytes > SAFE * limit:
            return 0.0
        return trace.rows_per_second(self._warm)

    def _played(self, tuner: Tuner, seconds: int) -> Trace:
        self._runs += 1
        return play(self._scenario, tuner, seconds)

    def _first_look(self) -> tuple[float, int]:
        """Steps a second with all stages open, and seconds until it goes half as fast.

        A source that waits is first looked at alone, and then many fetches that were begun at once end at once.
        """
        intervals = self._played(Shared(), FIRST_SECONDS).intervals
        last = intervals[-LAST_SECONDS:]
        steps = sum(each.steps for each in last) / len(last) if last else 0.0
        half = (place for place, each in enumerate(intervals) if each.steps and 2 * each.steps >= steps)
        return steps, next(half, 0)


def _seconds(steps: float, per_second: float, least: int, most: int) -> int:
    return min(most, max(least, round(steps / per_second) if per_second else most))


def _digest(scenario: Scenario, effort: Effort) -> str:
    stable = replace(scenario.machine, unmeasured=frozenset())
    lacking = sorted(scenario.machine.unmeasured)
    text = repr((VERSION, replace(scenario, machine=stable), lacking, effort))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep(path: Path, found: tuple[Best, ...]) -> None:
    """Write a result whole or not at all: others may look for it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{name: getattr(each, name) for name in Best.__slots__} for each in found]
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(rows), encoding="utf-8")
    part.replace(path)
