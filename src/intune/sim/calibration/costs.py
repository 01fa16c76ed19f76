"""What an item of a stage costs, fitted to what items took at each level. Pure arithmetic.

With n items of its stage at once an item computes for

    cpu (1 + contention (n - 1) + coherency n (n - 1))

CPU seconds, which are measured, and waits for the rest of its wall seconds: for answers, for locks and devices that
only some of the items have at once, for whatever else. How long is the sum of one or more of these, each counted only
if it fits better with it than chance explains: the same always; more by n - 1, by n (n - 1), or by n - p above some p
(so many have what the others queue for).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intune._values import CROWDS
from intune.sim.calibration.levels import PASSING, Level, StageLevels

Floats = NDArray[np.float64]

WORTH = 4.0
"""By how much (squares of deviations) a fit with one more thing in it must be better."""

MOST_TERMS = 3

SURE_SHARE = 0.1
"""Share of wall seconds that are not CPU below which they are taken to be the same whatever n is: more of it where many
are at work is CPUs that are short."""

NEAR = 1.3
"""Factor by which levels may differ that count as the same."""

FURTHEST = 2
"""How many times the largest level a curve is spoken of."""

SLOPES = (0.2, 0.5, 1.0)
"""Exponents (deviations) by which items may take longer beyond the largest level: where levels up to `WIDE` times the
smallest were seen, where fewer, and where one: that an item takes twice as long beside another one is no surprise."""

WIDE = 4.0


@dataclass(frozen=True)
class Cost:
    """What an item costs, in seconds.

    Attributes:
        cpu: Computing, alone.
        contention: Sigma of the Universal Scalability Law.
        coherency: Kappa of it.
        waits: Waiting, by how many are at once: (n, seconds) in rising order.
    """

    cpu: float
    contention: float = 0.0
    coherency: float = 0.0
    waits: tuple[tuple[float, float], ...] = ((1.0, 0.0),)

    def computing(self, at_once: float) -> float:
        """CPU seconds of an item, so many being at work."""
        more = at_once - 1
        return self.cpu * (1 + self.contention * more + self.coherency * at_once * more)

    def waiting(self, at_once: float) -> float:
        """Seconds that it waits then."""
        return float(np.interp(at_once, [n for n, _ in self.waits], [seconds for _, seconds in self.waits]))


def fit(seen: StageLevels) -> Cost:
    """The likeliest cost of a stage that has at least one level."""
    return _fit(seen.wall, seen.cpu, WORTH, 0.0)


def drawn(seen: StageLevels, random: np.random.Generator) -> Cost:
    """A cost that may be the true one as well.

    Levels are as far off as they may be, beyond the largest one items may take longer, and below the smallest one less.
    """
    known = 2 if len(seen.wall) < 2 else 1 if seen.wall[-1].at_once < WIDE * seen.wall[0].at_once else 0
    slope = SLOPES[known] * abs(random.standard_normal())
    wall, cpu = (
        tuple(
            level._replace(seconds=level.seconds * math.exp(level.deviation * random.standard_normal()))
            for level in some
        )
        for some in (seen.wall, seen.cpu)
    )
    few = seen.wall[0].at_once
    cost = _fit(wall, cpu, WORTH / 4, slope)
    share = int(random.integers(2))
    if few <= 1:
        return cost
    # Below the smallest level either nothing changes, or all that is waited for is the others.
    at_few = cost.waiting(few)
    waits = tuple((n, at_few * (n / few) ** share if n < few else seconds) for n, seconds in _with(cost.waits, few))
    return Cost(cost.cpu, cost.contention, cost.coherency, waits)


def _fit(wall: Sequence[Level], cpu: Sequence[Level], worth: float, slope: float) -> Cost:
    at_once, seconds, deviation = _columns(wall)
    at_cpu, cpu_seconds, cpu_deviation = _columns(cpu)
    items = np.array([float(level.items) for level in wall])
    usual = np.interp(at_once, at_cpu, cpu_seconds)
    off_share = max(0.0, 1 - float(items @ np.minimum(usual, seconds)) / max(float(items @ seconds), 1e-12))
    if off_share < SURE_SHARE and not _as_wide(cpu, wall):
        # Nearly all is computing, of which walls tell more then: they are known by crowd.
        computing, _ = _grown(at_once, seconds * (1 - off_share), deviation, (), worth)
    else:
        computing, _ = _grown(at_cpu, cpu_seconds, cpu_deviation, (), worth)
    left = np.maximum(0.0, seconds - _features(at_once, ()) @ computing)
    if off_share < SURE_SHARE:
        waits: tuple[tuple[float, float], ...] = ((1.0, float(items @ left) / float(items.sum())),)
    else:
        places = tuple(float(crowd) for crowd in CROWDS if 1 < crowd < at_once[-1])
        found, chosen = _grown(at_once, left, deviation, places, worth, none_alone=True)
        asked = sorted({1.0, *map(float, CROWDS), *(float(times * at_once[-1]) for times in (1.0, 1.5, FURTHEST))})
        asked = [n for n in asked if n <= FURTHEST * at_once[-1]]
        values = _features(np.array(asked), places) @ found if chosen else np.full(len(asked), found[0])
        waits = tuple(zip(asked, map(float, values), strict=True))
    alone = max(float(computing[0]), 1e-9)
    cost = Cost(alone, float(computing[1]) / alone, float(computing[2]) / alone, waits)
    return _slower(cost, float(at_once[-1]), slope) if slope else cost


def _as_wide(cpu: Sequence[Level], wall: Sequence[Level]) -> bool:
    """Whether CPU seconds, of which windows only know the mean, were seen surely from as few to as many at once."""
    sure = [level.at_once for level in cpu if level.deviation < PASSING] or [cpu[0].at_once]
    return sure[0] <= NEAR * wall[0].at_once and NEAR * sure[-1] >= wall[-1].at_once


def _slower(cost: Cost, largest: float, slope: float) -> Cost:
    """The same up to the largest level, and slower beyond it."""
    times = FURTHEST**slope - 1
    if cost.waiting(largest) > cost.computing(largest):
        waits = tuple((n, s * (1 + times * max(0.0, n - largest) / largest)) for n, s in _with(cost.waits, largest))
        return Cost(cost.cpu, cost.contention, cost.coherency, waits)
    # What computes gets as much slower as it would at twice the level, from the largest one on: a law has no bends.
    more = times / (FURTHEST * largest * (FURTHEST * largest - 1))
    return Cost(cost.cpu, cost.contention, cost.coherency + more, cost.waits)


def _with(waits: tuple[tuple[float, float], ...], bend: float) -> list[tuple[float, float]]:
    """The same waits by how many are at once, with a point where they are to bend, and one far beyond."""
    known = dict(waits)
    at, seconds = [n for n, _ in waits], [each for _, each in waits]
    added = {n: float(np.interp(n, at, seconds)) for n in (1.0, bend, FURTHEST * bend)}
    return sorted({**added, **known}.items())


def _columns(levels: Sequence[Level]) -> tuple[Floats, Floats, Floats]:
    at_once = np.array([level.at_once for level in levels])
    seconds = np.array([max(level.seconds, 1e-12) for level in levels])
    return at_once, seconds, seconds * [level.deviation for level in levels]


def _features(at_once: Floats, places: Sequence[float]) -> Floats:
    more = at_once - 1
    bends = [np.maximum(0.0, at_once - place) for place in places]
    return np.stack([np.ones_like(more), more, at_once * more, *bends], axis=1)


def _grown(
    at_once: Floats,
    seconds: Floats,
    deviation: Floats,
    places: Sequence[float],
    worth: float,
    *,
    none_alone: bool = False,
) -> tuple[Floats, bool]:
    """Coefficients of all features, none below 0, those of no use being 0; and whether any but the first is of use.

    The first one, what there is alone, is always among them; `none_alone`: it may be 0.
    """
    features = _features(at_once, places)
    weighted, target = features / deviation[:, None], seconds / deviation
    chosen = [0]
    found, square = _least_squares(weighted, target, chosen, none_alone)
    while len(chosen) < min(MOST_TERMS, len(seconds)):
        tried = [
            (*_least_squares(weighted, target, [*chosen, each], none_alone), each)
            for each in range(1, features.shape[1])
            if each not in chosen
        ]
        best, less, added = min(tried, key=lambda each: each[1])
        misfit = max(1.0, less / max(1, len(seconds) - len(chosen) - 1))
        if square - less <= worth * misfit:
            break
        found, square, chosen = best, less, [*chosen, added]
    return found, len(chosen) > 1


def _least_squares(features: Floats, target: Floats, chosen: Sequence[int], none_alone: bool) -> tuple[Floats, float]:
    """Coefficients and the sum of squares; infinite where one would have to be below 0.

    Where items take turns the first one is 0, and by chance a little less: `none_alone` leaves it out then.
    """
    found = np.zeros(features.shape[1])
    solved = np.asarray(np.linalg.lstsq(features[:, chosen], target, rcond=None)[0], np.float64)
    if none_alone and len(chosen) > 1 and solved[0] < 0:
        solved = np.asarray(np.linalg.lstsq(features[:, chosen[1:]], target, rcond=None)[0], np.float64)
        solved = np.concatenate([[0.0], solved])
    if solved.min() < 0:
        return found, math.inf
    found[list(chosen)] = solved
    return found, float(((features @ found - target) ** 2).sum())
