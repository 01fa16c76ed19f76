"""What an item of a stage costs, fitted to how long items took beside how many others. Pure arithmetic.

Wall seconds of an item are, beside so many of its stage that n are at work,

    cpu (1 + contention (n - 1) + coherency n (n - 1))  +  wait  +  turn(n)

CPU seconds are measured, so that the first term is a fit of its own. The rest is either the same whatever n is (an
answer is waited for) or a *turn*: something that only so many items of the stage have at once (a lock, a disk) holds
each item for some seconds, and with more items than places they queue. How long an item queues follows from the
law of cycles: n items that each come back after `think` seconds to one of `places` keep it busy, so that a whole cycle
takes n seconds / places. A term counts only if the fit is better with it than chance explains (BIC).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NOISE = 0.03
"""Deviation of a mean as a share, however many items it is of."""

PLACES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0)
NEAR = (0.85, 0.92, 1.08, 1.17)
GRID, WAITS, FINER = 30, 9, 3
SHARP = 4.0
"""How sharply the seconds of a turn bend where queueing begins; items that all cost the same would bend at once."""

FAR, ROUNDS = 3.0, 10
"""Deviations from which on a point is rather something else than chance."""

WORTH = 6.0
"""By how much (BIC) a fit with one more thing in it must be better."""

SURE_SHARE = 0.1
"""Share of wall seconds that are not CPU below which they are taken to be the same whatever n is."""


class Point(NamedTuple):
    """Items of one window that were worked on beside as many others.

    Attributes:
        window: Number of the window.
        at_once: How many were worked on, these included.
        items: How many items.
        wall: Mean wall seconds of one, without those for which it had no CPU or no interpreter lock.
        cpu: Mean CPU seconds of an item of the window, whatever was beside it.
    """

    window: int
    at_once: float
    items: int
    wall: float
    cpu: float


class Turn(NamedTuple):
    """Something that only so many items of a stage have at once.

    Attributes:
        seconds: For how long each has it.
        places: How many.
        computes: Whether it computes meanwhile.
    """

    seconds: float
    places: float
    computes: bool


class Cost(NamedTuple):
    """What an item costs, in seconds.

    Attributes:
        cpu: Computing, alone; that within a turn included.
        contention: Sigma of the Universal Scalability Law.
        coherency: Kappa of it.
        wait: Waiting.
        turn: What it takes turns for; None = nothing.
    """

    cpu: float
    contention: float
    coherency: float
    wait: float
    turn: Turn | None

    def computing(self, at_once: Floats) -> Floats:
        """CPU seconds of an item beside others."""
        more = at_once - 1
        return self.cpu * (1 + self.contention * more + self.coherency * at_once * more)


def fit(points: Sequence[Point], spread: float) -> Cost:
    """The likeliest cost.

    Args:
        points: What was measured; at least one.
        spread: Deviation of the logarithm of one item's cost.
    """
    at_once = np.array([point.at_once for point in points])
    items = np.array([float(point.items) for point in points])
    wall = np.array([max(point.wall, 1e-9) for point in points])
    windows = np.unique([point.window for point in points], return_inverse=True)[1]
    total: Floats = np.bincount(windows, items).astype(float)
    cpu = np.bincount(windows, items * [point.cpu for point in points]) / total
    mean_wall = np.bincount(windows, items * wall) / total
    off_share = max(0.0, 1 - float(items @ np.minimum(cpu, mean_wall)[windows]) / float(items @ wall))
    features = _features(at_once)
    if off_share < SURE_SHARE:
        # Nearly all is computing, of which walls tell more: they are known by crowd.
        computing = _curve(features, wall * (1 - off_share), items, spread)
        return Cost(*computing, wait=off_share * float(items @ wall) / float(items.sum()), turn=None)
    means = np.array([np.bincount(windows, items * each) / total for each in features.T]).T
    cost = Cost(*_curve(means, cpu, total, spread), wait=0.0, turn=None)
    expected = cost.computing(at_once)
    usual = np.bincount(windows, items * expected) / total
    own = expected * np.where(usual > 0, cpu / np.maximum(usual, 1e-12), 0.0)[windows]
    deviation = np.sqrt(NOISE**2 + spread**2 / items) * wall
    wait, turn = _waiting(at_once, wall - own, expected, deviation)
    return cost._replace(wait=wait, turn=turn)


def _features(at_once: Floats) -> Floats:
    more = at_once - 1
    return np.stack([np.ones_like(more), more, at_once * more], axis=1)


def _curve(features: Floats, seconds: Floats, items: Floats, spread: float) -> tuple[float, float, float]:
    """(seconds alone, contention, coherency), the last two only where they are surely above 0."""
    relative = np.sqrt(NOISE**2 + spread**2 / items)
    fits: dict[tuple[int, ...], tuple[Floats, float]] = {}
    for terms in ((), (1,), (2,), (1, 2)):
        chosen = [0, *terms]
        found = _least_squares(features[:, chosen], seconds, relative)
        if found is not None:
            off = (seconds / np.maximum(features[:, chosen] @ found, 1e-12) - 1) / relative
            fits[terms] = found, float(_loss(off).sum())
    misfit = max(1.0, min(square for _, square in fits.values()) / len(seconds))

    def rank(terms: tuple[int, ...]) -> float:
        return fits[terms][1] / misfit + len(terms) * max(WORTH, math.log(len(seconds)))

    best = min(fits, key=rank)
    values = dict(zip(best, fits[best][0][1:], strict=True))
    alone = float(fits[best][0][0])
    return alone, float(values.get(1, 0.0)) / alone, float(values.get(2, 0.0)) / alone


def _least_squares(features: Floats, seconds: Floats, relative: Floats) -> Floats | None:
    """Coefficients, deviations being shares of what is predicted; None where one would have to be below 0."""
    level = np.maximum(seconds, 1e-12)
    trust: Floats = np.ones_like(seconds)
    found: Floats = np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        weight = trust / (relative * level)
        found = np.asarray(np.linalg.lstsq(features * weight[:, None], seconds * weight, rcond=None)[0], np.float64)
        if found[0] <= 0 or found.min() < 0:
            return None if features.shape[1] > 1 else np.array([1e-9])
        level = np.maximum(features @ found, 1e-12)
        trust = 1 / np.sqrt(1 + ((seconds / level - 1) / (FAR * relative)) ** 2)
    return found


def _loss(deviations: Floats) -> Floats:
    """Their squares, but for those that are far off, which count little more for being further."""
    return np.asarray(FAR**2 * np.log1p((deviations / FAR) ** 2), np.float64)


def _waiting(at_once: Floats, off: Floats, cpu: Floats, deviation: Floats) -> tuple[float, Turn | None]:
    """The same for all, or a turn, by the seconds in which items did not compute."""
    trust: Floats = np.ones_like(off)
    constant = 0.0
    for _ in range(ROUNDS):
        weight = trust / deviation**2
        constant = max(0.0, float(weight @ off) / float(weight.sum()))
        trust = 1 / (1 + ((off - constant) / (FAR * deviation)) ** 2)
    plain = float(_loss((off - constant) / deviation).sum())
    # A device of one stream and a lock within which is computed take turns alike; the former comes first, so that it
    # is chosen where they cannot be told apart.
    kinds = [(1.0, False), (1.0, True), *((places, False) for places in PLACES[1:])]
    tried = [_turn(at_once, off, cpu, deviation, *kind) for kind in kinds]
    misfit = max(1.0, min(each.square for each in tried) / len(off))

    def rank(each: "_Tried") -> float:
        return each.square / misfit + max(WORTH, math.log(len(off))) * (1 if each.turn.places == 1 else 2)

    best = min(tried, key=rank)
    if best.turn.places > 1:
        near = [_turn(at_once, off, cpu, deviation, best.turn.places * times, False) for times in NEAR]
        best = min([best, *near], key=rank)
    if rank(best) >= plain / misfit:
        return constant, None
    return best.wait, best.turn


class _Tried(NamedTuple):
    square: float
    wait: float
    turn: Turn


def _turn(at_once: Floats, off: Floats, cpu: Floats, deviation: Floats, places: float, computes: bool) -> _Tried:
    """The best turn of a kind: a grid of its seconds and of what is waited for beside it, then a finer one."""
    longest = float(np.min(cpu)) if computes else float(np.max(cpu + np.maximum(off, 0.0)))
    turns = np.geomspace(max(longest, 1e-9) / 300, max(longest, 1e-9), GRID)
    waits = np.linspace(0.0, max(0.0, float(np.quantile(off, 0.9))), WAITS)
    for _ in range(FINER):
        seconds, wait = turns[:, None, None], waits[None, :, None]
        think = np.maximum(cpu + wait - (seconds if computes else 0.0), 0.0)
        queued = np.maximum(at_once * seconds / places - think, 0.0)
        passing = (seconds**SHARP + queued**SHARP) ** (1 / SHARP)
        expected = wait + passing - (seconds if computes else 0.0)
        squares = _loss((off - expected) / deviation).sum(2)
        i, j = divmod(int(squares.argmin()), WAITS)
        found = _Tried(float(squares[i, j]), float(waits[j]), Turn(float(turns[i]), places, computes))
        turns = np.linspace(turns[max(0, i - 1)], turns[min(GRID - 1, i + 1)], GRID)
        waits = np.linspace(waits[max(0, j - 1)], waits[min(WAITS - 1, j + 1)], WAITS)
    return found
