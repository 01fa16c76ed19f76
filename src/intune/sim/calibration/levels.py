"""What items of a stage took at each *level*, so many of them at once, however many windows were spent there.

A run that stays at one level for an hour tells no more of the shape of a curve than one that stays for a minute: so all
windows of a level become one point first, with an uncertainty of its own, and curves are fitted to these points.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from intune._values import CROWDS, StageSnapshot
from intune.metrics.counters import Crowds
from intune.sim.calibration import around
from intune.sim.calibration.seen import Window
from intune.tuners._beliefs import lost_share_of

NOISE = 0.02
"""Deviation of a level's mean as a share, however much was seen of it."""

SCATTER = 0.1
"""Deviation of a window's mean as a share, where too few were seen to tell."""

KNOWN = 4
"""Windows of a level from which on their scatter is taken from themselves."""

FAR = 3.0
"""Deviations to which a window that is further off is drawn in: something else happened then."""

SETTLED = 0.8
"""Share of a window's items that must have been begun under its allocation for it to tell of a level surely."""

PASSING = 0.3
"""Deviation of what else is known of a level."""

FULL = 1 - Crowds.GAPS
"""Of a class, the share from which on its items belong to it."""

MINOR = 0.1
"""Share of a window's items below which those of one level do not count."""

COMPUTES = 0.3
"""Share of an item's seconds that is CPU from which on a stage is taken to compute."""

UNEVEN = 2.0
"""99th percentile over median of items' seconds from which some wait for far longer than others."""

DIFFER = 2.0
"""Times as many items at once, on average over a window, that tell many from few."""

LEAST_ITEMS = 5
"""Items of a level below which it was not seen, where another one was."""


class Level(NamedTuple):
    """Items that were worked on beside as many others.

    Attributes:
        at_once: How many were worked on, these included.
        seconds: Mean seconds of one.
        deviation: Of that mean, as a share of it.
        items: How many items.
    """

    at_once: float
    seconds: float
    deviation: float
    items: int


class Sample(NamedTuple):
    """What one window says of a level: how many at once, items, their mean seconds."""

    at_once: float
    items: int
    seconds: float


class StageLevels(NamedTuple):
    """Both curves of a stage, in rising order of levels.

    Attributes:
        wall: Seconds of an item without those in which it wanted a CPU or the interpreter lock and had none.
        cpu: Its CPU seconds, by how many were at work on average.
    """

    wall: tuple[Level, ...]
    cpu: tuple[Level, ...]


def stage_levels(windows: Sequence[Window], place: int, spread: float, neighbours: float) -> StageLevels:
    """The levels of a stage.

    Args:
        windows: What was measured.
        place: Of the stage in the pipeline.
        spread: Deviation of the logarithm of one item's seconds.
        neighbours: Threads of other programs that want CPUs.
    """
    measured = [window for window in windows if _measured(window.snapshot.stages[place])]
    if _queue_unevenly([window.snapshot.stages[place] for window in measured]):
        measured = [_as_one(window, place) for window in measured]
    settled = [window for window in measured if _begun_share(window, place) >= SETTLED]
    passing = [window for window in measured if _begun_share(window, place) < SETTLED]
    wall, cpu = (
        _both(levels(sure, spread), levels(unsure, spread))
        for sure, unsure in (
            (_walls(settled, place, neighbours), _walls(passing, place, neighbours)),
            (_cpus(settled, place), _cpus(passing, place)),
        )
    )
    return StageLevels(wall, cpu)


def _both(settled: Sequence[Level], passing: Sequence[Level]) -> tuple[Level, ...]:
    """Levels that were seen, and less surely those that were seen in passing only, while an allocation was new."""
    known = {_class(each.at_once) for each in settled}
    less_sure = [
        each._replace(deviation=math.hypot(each.deviation, PASSING))
        for each in passing
        if _class(each.at_once) not in known
    ]
    return tuple(sorted((*settled, *less_sure)))


def _class(at_once: float) -> int:
    return bisect.bisect_right(CROWDS, at_once / FULL)


def levels(samples: Iterable[Sample], spread: float) -> tuple[Level, ...]:
    """Windows brought together to a point for each class of `CROWDS`.

    Args:
        samples: One for each window and level.
        spread: Deviation of the logarithm of one item's seconds.
    """
    classes: dict[int, list[Sample]] = {}
    for sample in samples:
        classes.setdefault(_class(sample.at_once), []).append(sample)
    usual = usual_scatter(classes.values())
    found = [level(classes[key], usual, spread) for key in sorted(classes)]
    most = max((each.items for each in found), default=0)
    return tuple(each for each in found if each.items >= min(LEAST_ITEMS, most))


def usual_scatter(groups: Iterable[Sequence[Sample]]) -> float:
    """How much windows of the same scatter, of those groups that have enough of them."""
    known = [_scatter(each) for each in groups if len(each) >= KNOWN]
    return statistics.median(known) if known else SCATTER


def level(samples: Sequence[Sample], usual: float, spread: float) -> Level:
    """One point of several windows.

    Args:
        samples: The windows.
        usual: Deviation of the logarithm of a window's mean that is usual.
        spread: The same of one item.
    """
    items = np.array([float(each.items) for each in samples])
    seconds = np.array([max(each.seconds, 1e-12) for each in samples])
    middle, scatter = _median(seconds, items), max(usual, _scatter(samples) if len(samples) >= KNOWN else usual)
    near = np.clip(seconds, middle * math.exp(-FAR * scatter), middle * math.exp(FAR * scatter))
    total = float(items.sum())
    effective = total**2 / float(items @ items)
    deviation = math.sqrt(NOISE**2 + scatter**2 / effective + spread**2 / total)
    at_once = float(items @ [each.at_once for each in samples]) / total
    return Level(at_once, float(items @ near) / total, deviation, int(total))


def _scatter(samples: Sequence[Sample]) -> float:
    """Deviation of the logarithm of a window's mean, by how far apart all but the outer fifth are."""
    low, high = np.quantile(np.log([max(each.seconds, 1e-12) for each in samples]), (0.1, 0.9))
    return float(high - low) / (2 * statistics.NormalDist().inv_cdf(0.9))


def _median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _measured(stage: StageSnapshot) -> bool:
    return stage.cpu_seconds_mean is not None and stage.busy_seconds > 0 and bool(stage.wall_seconds_by_crowd)


def _queue_unevenly(stages: Sequence[StageSnapshot]) -> bool:
    """Whether items hardly compute, some wait for far longer than others, and windows tell few at once from many."""
    ratios = [
        stage.wall_seconds_p99 / stage.wall_seconds_p50
        for stage in stages
        if stage.wall_seconds_p99 and stage.wall_seconds_p50
    ]
    if not ratios or statistics.median(ratios) < UNEVEN:
        return False
    items = [sum(count for _, count, _ in stage.wall_seconds_by_crowd) for stage in stages]
    cpu = sum((stage.cpu_seconds_mean or 0.0) * count for stage, count in zip(stages, items, strict=True))
    means = [stage.in_hand_mean for stage in stages]
    waits = cpu < COMPUTES * sum(stage.busy_seconds for stage in stages)
    return waits and max(means) >= DIFFER * max(1.0, min(means))


def _as_one(window: Window, place: int) -> Window:
    """A window whose items were all worked on beside as many: as there were on average, by items and their seconds.

    Of items that queue, those that are passed by others wait for long and meet another crowd than those that pass:
    which crowd an item met says little of what n at once do. On average they are right: n at once take n times what is
    between two that are finished.
    """
    stage = window.snapshot.stages[place]
    items = sum(count for _, count, _ in stage.wall_seconds_by_crowd)
    at_once = max(1.0, stage.busy_seconds / window.snapshot.window_seconds)
    crowd = CROWDS[max(0, _class(at_once) - 1)]
    levels = ((crowd, items, stage.busy_seconds / items),)
    one = replace(stage, wall_seconds_by_crowd=levels, in_hand_mean=at_once)
    stages = (*window.snapshot.stages[:place], one, *window.snapshot.stages[place + 1 :])
    return window._replace(snapshot=replace(window.snapshot, stages=stages))


def _begun_share(window: Window, place: int) -> float:
    """Of the items that a stage finished in a window, the share that was begun under its allocation."""
    wall = window.snapshot.stages[place].wall_seconds_mean or 0.0
    return (window.held_seconds - wall) / window.snapshot.window_seconds


def _walls(windows: Sequence[Window], place: int, neighbours: float) -> list[Sample]:
    return [sample for window in windows for sample in _walls_of(window, place, neighbours)]


def _walls_of(window: Window, place: int, neighbours: float) -> list[Sample]:
    stage = window.snapshot.stages[place]
    lost = lost_share_of(stage) * around.contention(window.snapshot)
    queued = around.queued_share(window.snapshot, neighbours)
    wanting = queued / (1 - queued) * (stage.cpu_seconds_mean or 0.0) / (stage.wall_seconds_mean or math.inf)
    if stage.run_queue_seconds is not None:
        wanting = min(wanting, stage.run_queue_seconds / stage.busy_seconds)
    own = max(0.0, 1 - lost - wanting)
    ends = dict(zip(CROWDS, (*CROWDS[1:], CROWDS[-1] + 1), strict=True))
    least = MINOR * sum(items for _, items, _ in stage.wall_seconds_by_crowd)
    found = []
    for crowd, items, wall in stage.wall_seconds_by_crowd:
        if items < least or (stage.concurrency and crowd > stage.concurrency):
            continue  # on the way from one allocation to the next, or begun under another one
        # A class has a width: where in it they are follows from how many there were on average, if that lies in it.
        inside = FULL * crowd <= stage.in_hand_mean < FULL * ends[crowd]
        middle = math.sqrt(crowd * max(crowd, min(ends[crowd] - 1, stage.concurrency or math.inf)))
        at_once = max(1.0, stage.in_hand_mean if inside else middle)
        found.append(Sample(at_once, items, wall * own))
    return found


def _cpus(windows: Sequence[Window], place: int) -> list[Sample]:
    return [_cpu(window.snapshot.stages[place]) for window in windows]


def _cpu(stage: StageSnapshot) -> Sample:
    items = sum(count for _, count, _ in stage.wall_seconds_by_crowd)
    mean = sum(crowd * count for crowd, count, _ in stage.wall_seconds_by_crowd) / items
    cpu = min(stage.cpu_seconds_mean or 0.0, stage.wall_seconds_mean or math.inf)
    return Sample(max(mean, min(stage.in_hand_mean, float(CROWDS[-1])), 1.0), items, cpu)
