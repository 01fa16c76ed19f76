"""Laws of columns: how a uniform or a normal number becomes a category or a count.

A law is made once from facts and is a pure function of its input from then on.
"""

from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from intune.recsys.criteo_facts import QUANTILES, CategoryFacts, CountFacts

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_TABLE = 4096  # ranks whose shares are added up one by one; what follows is so smooth that an integral is the sum
_FAR = 6.0  # standard deviations; one in 10**9 is farther


class CategoryLaw:
    """Shares of the values of a vocabulary, by rank from 0 on. Takes the same little memory for any vocabulary."""

    def __init__(self, facts: CategoryFacts) -> None:
        self._size = facts.vocabulary
        self._table = min(self._size, _TABLE)
        self._s, self._q = facts.s, facts.q
        head = np.array(facts.head)
        weights = (np.arange(len(head) + 1, self._table + 1) + self._q) ** -self._s
        self._start = self._integral(self._table + 0.5) if self._size > self._table else 0.0
        beyond = self._integral(self._size + 0.5) - self._start if self._size > self._table else 0.0
        self._scale = (1 - head.sum()) / (weights.sum() + beyond)
        shares = np.concatenate([head, weights * self._scale])
        self._ends = shares.cumsum()
        self._middles = self._ends - shares / 2

    def rank(self, uniform: Floats) -> Integers:
        """Map float64[n] in [0, 1) to ranks int64[n] such that each comes as often as its share says."""
        rank = self._ends.searchsorted(uniform, side="right")
        if self._size == self._table:
            return np.minimum(rank, self._size - 1)  # the ends may add up to a hair less than 1
        (far,) = np.nonzero(rank == self._table)
        power = 1 - self._s
        area = self._start + (uniform[far] - self._ends[-1]) / self._scale
        # The share of rank r (from 1) is the area from r - 1/2 to r + 1/2. Past the end, area * power may be below 0.
        found = np.maximum(area * power, 1e-300) ** (1 / power) - self._q
        rank[far] = np.clip(np.rint(found), self._table + 1, self._size) - 1
        return rank

    def middle(self, rank: Integers) -> Floats:
        """The uniform number, float64[n], in the middle of those that give these ranks."""
        middle = self._middles.take(rank, mode="clip")
        if self._size > self._table:
            (far,) = np.nonzero(rank >= self._table)
            middle[far] = self._ends[-1] + self._scale * (self._integral(rank[far] + 1) - self._start)
        return middle

    def _integral(self, x: Integers | float) -> Any:
        """Up to a constant, the sum of what ranks up to x weigh; of the kind of x, in floats."""
        return (x + self._q) ** (1 - self._s) / (1 - self._s)


class CountLaw:
    """Counts by a standard normal number: log-normal between the known quantiles and beyond the last of them."""

    def __init__(self, facts: CountFacts) -> None:
        normal = NormalDist()
        below = 0.0
        self._steps: list[tuple[float, int]] = []  # (up to which normal number, which count), the lowest last
        for count in range(-len(facts.negative), 1):
            below += facts.zero if count == 0 else facts.negative[-count - 1]
            self._steps.insert(0, (normal.inv_cdf(below), count))
        known = [(q, value) for q, value in zip(QUANTILES, facts.values, strict=True) if q > below and value > 0]
        # A count stands for itself and what is above, up to the next: its quantile is in the middle of that.
        x = [normal.inv_cdf(below), *(normal.inv_cdf(q) for q, _ in known)]
        y = [0.0, *(float(np.log(value + 0.5)) for _, value in known)]
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        self._x = np.array([*x, _FAR])
        self._log = np.array([*y, y[-1] + slope * (_FAR - x[-1])])
        self._limit = facts.limit

    def count(self, normal: Floats) -> Integers:
        """Map standard normal numbers float64[n] to counts int64[n]; a greater number never gives a smaller count."""
        count: Integers = np.exp(np.interp(normal, self._x, self._log)).astype(np.int64)
        for up_to, value in self._steps:
            count[normal < up_to] = value
        if self._limit is not None:
            np.minimum(count, self._limit, out=count)
        return count


def normal_factor(rank_correlations: tuple[tuple[float, ...], ...]) -> Floats:
    """A lower triangular matrix [k, k] that makes independent standard normal numbers dependent: `factor @ [k, n]`.

    Args:
        rank_correlations: Spearman's, row i with the i columns before it. Where no set of columns can have them all
            (they were measured on rows that differ), others near them are taken.
    """
    size = len(rank_correlations)
    correlations = np.eye(size)
    for i, row in enumerate(rank_correlations):
        # What normal numbers must correlate by for their ranks to correlate so.
        correlations[i, :i] = correlations[:i, i] = 2 * np.sin(np.pi / 6 * np.array(row))
    values, vectors = np.linalg.eigh(correlations)
    near = (vectors * np.maximum(values, 1e-3)) @ vectors.T
    scale = np.sqrt(near.diagonal())
    factor: Floats = np.linalg.cholesky(near / np.outer(scale, scale)).round(6)  # the same on every machine
    return factor


def category_ids(column: int, identity: Integers) -> Integers:
    """Numbers of 32 bits that stand for values of a column, int64[n]: distinct ones for distinct identities.

    Args:
        column: Which column, from 0; the same identity has another number in another column.
        identity: int64[n] in 0..2**32-1.
    """
    x = identity.astype(np.uint32)
    x += np.uint32((column + 1) * 0x9E3779B1 & 0xFFFFFFFF)
    # Each step can be undone, so that no two collide: the last mixing of MurmurHash3.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x.astype(np.int64)
