"""How long a stage works on a source row, depending on how many items it works on at once; learnt window by window.

The curve is that of the Universal Scalability Law: with n items at once

    seconds(n) = base + slope (n - 1) + bend n (n - 1)          base > 0, slope >= 0, bend >= 0

`slope` comes from parts that only one item at a time can pass (the rate n / seconds(n) flattens), `bend` from items
that hinder one another (the rate falls beyond a peak). What is expected before anything is seen is no dependence, but
that an item takes twice as long beside only one or two others is no surprise either.

Fitted by recursive least squares to a point for each number at once that occurred in a window; a point's weight
follows from its items and from how well windows were predicted lately. A new window makes old ones count less *in the
direction that it tells about* only: while a stage stays at one level, what was learnt at others remains. Two windows
in a row on the same side, more than three deviations off, mean that the stage changed: the level is taken from the
newest one, the shape is kept as a guess, and everything is uncertain again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from intune._values import CROWDS

SPREAD = 0.5
"""Deviation of a single item's seconds, as a share of their mean, where nothing else is known."""

SURPRISE = 3.0
"""Deviations off from which a window is a surprise."""

PRIOR = np.array([1.0, 1.0, 0.3])
"""Deviations of what is expected of base, slope and bend before anything is seen, in units of the first seconds."""

EDGES = tuple(np.array([False, *zero]) for zero in ((False, True), (True, False), (True, True)))
"""Which of base, slope and bend are 0 at the edges of what is allowed."""

LEAST_BASE = 0.02
"""Share of the first seconds seen below which the base is not taken to be: an item does something even alone."""

REMEMBERED = 0.25
"""Weight of what an earlier run knew: it may have run on another machine."""

LEAST_SECONDS, MOST_SECONDS = 1e-15, 1e9
"""Seconds a row that count as none; and that no row takes."""

MOST_MISFIT, MOST_SHAPE, MOST_SURE = 100.0, 1e6, 1e15
"""Bounds of what is kept: the misfit, base, slope and bend in units of the seconds, and how sure they are."""


class Point(NamedTuple):
    """Items that were worked on beside as many others: how many at once, how many items, their mean seconds a row."""

    at_once: float
    items: int
    seconds: float


class StageFit:
    """The curve of one stage.

    Args:
        forgetting: What a window's weight is multiplied by when the next one says something about the same, 0 to 1.
        noise: Deviation of a window's seconds as a share, however many items it has.
    """

    def __init__(self, *, forgetting: float, noise: float) -> None:
        self._forgetting, self._noise = forgetting, noise
        self._scale = 0.0  # seconds a row that are 1 inside
        self._mean = np.array([1.0, 0.0, 0.0])
        self._information = np.diag(PRIOR**-2.0)
        self._misfit = 1.0  # by how much windows scatter more than assumed, as a variance
        self._surprise = 0.0
        self._allowed: NDArray[np.float64] | None = None
        self._curve: tuple[float, float, float] | None = None
        self._inverse: NDArray[np.float64] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What it knows, for `remember`: JSON."""
        known = {"mean": self._mean.tolist(), "information": self._information.tolist(), "misfit": self._misfit}
        return {"seconds": self._scale, **known}

    def remember(self, state: Mapping[str, Any]) -> None:
        """Begin with what an earlier one knew, less sure of it.

        Raises:
            Exception: Of some kind, if it is nothing that `state_dict` gave.
        """
        scale, misfit = number(state["seconds"], LEAST_SECONDS, MOST_SECONDS), number(state["misfit"], 1.0, MOST_MISFIT)
        mean = np.array([number(each, -MOST_SHAPE, MOST_SHAPE) for each in state["mean"]])
        rows = [[number(each, -MOST_SURE, MOST_SURE) for each in row] for row in state["information"]]
        information = np.array(rows)
        if mean.shape != (3,) or information.shape != (3, 3) or not np.allclose(information, information.T):
            raise ValueError("a fit has a mean of three numbers and a symmetric matrix of three by three")
        np.linalg.cholesky(information)  # says so if it is not positive
        self._scale, self._mean, self._misfit = scale, mean, misfit
        self._information = REMEMBERED * information + (1 - REMEMBERED) * np.diag(PRIOR**-2.0)
        self._allowed = self._curve = self._inverse = None

    def observe(self, points: Sequence[Point]) -> bool:
        """Learn from a window.

        Args:
            points: What items took in it, by how many were worked on at once; at least one.

        Returns:
            Whether the stage was found to have changed.
        """
        items = np.array([float(point.items) for point in points])
        seconds = np.array([max(point.seconds, LEAST_SECONDS) for point in points])
        at = np.array([_features(point.at_once) for point in points])
        shares = items / items.sum()
        if not self._scale:
            self._scale = float(shares @ seconds)
        before, off = self._surprise, self._off(shares @ at, float(shares @ seconds) / self._scale, float(items.sum()))
        self._surprise = off if abs(off) > SURPRISE else 0.0
        changed = self._surprise * before > 0
        if changed:
            self._start_again(shares @ at, float(shares @ seconds))
        else:
            # Only once it was not confirmed does the last surprise count as noise, which would hide what confirms it.
            self._scatter(before)
            if self._surprise:
                return False  # may be chance
            self._scatter(off)
        self._learn(at, seconds / self._scale, items, shares @ at)
        return changed

    @property
    def curve(self) -> tuple[float, float, float]:
        """(base, slope, bend) in seconds a source row: the likeliest that are allowed."""
        if self._curve is None:
            base, slope, bend = self._allowed_mean() * self._scale
            self._curve = float(base), float(slope), float(bend)
        return self._curve

    def deviation(self, busy: float) -> float:
        """Posterior deviation of the seconds at so many items at once, as a share of what is predicted there."""
        at = _features(busy)
        predicted = max(LEAST_BASE, float(at @ self._allowed_mean()))
        return math.sqrt(max(0.0, self._variance(at))) / predicted

    def at_least(self, busy: float) -> float:
        """Seconds a source row at so many items at once, a deviation less than what is likeliest."""
        return self._scale * max(LEAST_BASE, float(_features(busy) @ self._allowed_mean())) / (1 + self.deviation(busy))

    def slows(self, few: float, many: float, by: float, deviations: float) -> bool:
        """Whether it surely takes longer with many at once than with few.

        As no curve falls, it is enough that this is so between two levels in between, where more may be known.

        Args:
            few: The lower level.
            many: The upper one.
            by: Share by which it must take longer.
            deviations: By how many deviations more than that.
        """
        between = (float(crowd) for crowd in CROWDS if few < crowd < many)
        at = np.array([_features(level) for level in (few, *between, many)])
        seconds, together = at @ self._allowed_mean(), at @ self._covariance() @ at.T
        alone = np.diag(together)
        variance = np.maximum(0.0, alone[:, None] + alone - 2 * together)
        longer = seconds - seconds[:, None] * (1 + by) - deviations * np.sqrt(variance)
        return bool(np.triu(longer, 1).max() > 0)

    def _variance(self, at: NDArray[np.float64]) -> float:
        return float(at @ self._covariance() @ at)

    def _covariance(self) -> NDArray[np.float64]:
        if self._inverse is None:
            self._inverse = np.linalg.inv(self._information).astype(np.float64)
        return self._inverse

    def _off(self, at: NDArray[np.float64], seconds: float, items: float) -> float:
        """By how many deviations a window is off, with its sign."""
        level = max(float(at @ self._allowed_mean()), seconds)
        variance = (self._noise**2 + SPREAD**2 / items) * level**2
        return (seconds - float(at @ self._mean)) / math.sqrt(self._variance(at) + variance * self._misfit)

    def _scatter(self, off: float) -> None:
        """A window was so many deviations off by chance; 0 = none was."""
        if off:
            self._misfit = min(MOST_MISFIT, max(1.0, self._misfit * (0.9 + 0.1 * min(off**2, SURPRISE**2))))

    def _learn(
        self,
        at: NDArray[np.float64],
        seconds: NDArray[np.float64],
        items: NDArray[np.float64],
        middle: NDArray[np.float64],
    ) -> None:
        levels = np.maximum(at @ self._allowed_mean(), seconds)
        weights = 1 / ((self._noise**2 + SPREAD**2 / items) * levels**2 * self._misfit)
        known = self._information @ middle
        fading = (1 - self._forgetting) / float(middle @ known)
        weighted = at.T * weights
        self._information = self._information - fading * np.outer(known, known) + weighted @ at
        self._inverse = None
        self._mean = self._mean + self._covariance() @ (weighted @ (seconds - at @ self._mean))
        self._allowed = self._curve = None

    def _start_again(self, at: NDArray[np.float64], seconds: float) -> None:
        self._mean = self._allowed_mean()
        self._scale = seconds / max(LEAST_BASE, float(at @ self._mean))
        self._surprise = 0.0
        self._allowed = self._curve = self._inverse = None
        self._information = np.diag(PRIOR**-2.0)
        self._misfit = 1.0

    def _allowed_mean(self) -> NDArray[np.float64]:
        """The mean, or where slope or bend would be negative the likeliest point that has them at 0."""
        if self._allowed is None:
            best = self._mean if self._mean[1:].min() >= 0 else self._on_the_edge()
            self._allowed = np.array([max(LEAST_BASE, best[0]), *best[1:]])
        return self._allowed

    def _on_the_edge(self) -> NDArray[np.float64]:
        best, least = self._mean, math.inf
        for zero in EDGES:
            free = ~zero
            point = np.where(zero, 0.0, self._mean)
            pull = self._information[np.ix_(free, zero)] @ self._mean[zero]
            point[free] += np.linalg.solve(self._information[np.ix_(free, free)], pull)
            away = point - self._mean
            cost = float(away @ self._information @ away)
            if point[1:].min() >= 0 and cost < least:
                best, least = point, cost
        return best


def _features(busy: float) -> NDArray[np.float64]:
    more = max(1.0, busy) - 1
    return np.array([1.0, more, more * (more + 1)])


def number(value: object, least: float, most: float) -> float:
    """The same as a float.

    Raises:
        ValueError: If it is no number, or out of these bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"a number from {least:g} to {most:g} is wanted, not a {type(value).__name__} beyond that")
    return float(value)
