"""How long the items of each stage take, by how many are worked on at once: a regression for many workloads together.

For each stage the seconds for which an item occupies its place are taken to grow with the stage's own concurrency n,

    seconds(n) = c (1 + a (n - 1) + b (n - 1)^2)

which covers what scales (a = b = 0), what takes turns (a lock, a disk: a = 1), and what falls back with many at once
(b > 0). c, a and b are found by Bayesian linear regression: windows weigh by the items that were finished in them and
fade with time; the prior says that a stage scales until seen otherwise, and how far that is still open is the
posterior's deviation. What a thread waited for neither computing nor for a CPU tells of a even where n never varies:
n - 1 of n threads that take turns wait.

From that follows the best rate: the largest X (source rows a second) at which every stage s finds a concurrency n(s)
with n(s) / seconds(n(s)) >= X, and the items of all stages that hold slots, X seconds(n(s)) each, fit into the slots.

All arrays are [E, S]: E workloads, S stages (see `intune.tuners.view`).
"""

import numpy as np
import numpy.typing as npt

from intune._values import CROWDS
from intune.tuners.view import Bools, Floats, View

GRID = np.array(CROWDS, dtype=np.float64)
"""Concurrencies that are looked at."""

BASIS = np.stack([np.ones_like(GRID), GRID - 1, (GRID - 1) ** 2], axis=-1)
"""float[K, 3]; what c, c a and c b are multiplied with at each of them."""

PRIOR = np.array([10.0, 0.3, 0.05])
"""Prior standard deviations of c, c a and c b, relative to the first measurement."""

_PRIOR_PRECISION = np.diag(PRIOR**-2.0)

FADING = 0.96
"""What windows weigh a window later."""

SURPRISE = 3.0
"""Deviations by which two windows in a row are off before what was learnt is forgotten."""

MARGIN = 1.2
"""A stage that slows down with concurrency gets what gives this much more than the common rate, as items vary."""

GROWTH = 1.05
"""A stage whose items take no more than this much longer with all concurrency than with little gets all."""

ITEM_DEVIATION, WINDOW_DEVIATION = 0.4, 0.03
"""Relative standard deviation of the seconds of one item, and what remains of it however many there are."""


class Fit:
    """What is known of the stages of E workloads.

    Args:
        workloads: E.
        stages: S.
    """

    def __init__(self, workloads: int, stages: int) -> None:
        shape = (workloads, stages)
        self._scale = np.full(shape, np.nan)
        self._precision = np.zeros((*shape, 3, 3))
        self._moment = np.zeros((*shape, 3))
        self._off = np.zeros(shape)
        self.coefficients = np.zeros((*shape, 3))
        """float[E, S, 3]; c relative to the first measurement, and c a, c b likewise."""
        self.deviations = np.zeros((*shape, 3))
        """float[E, S, 3]; posterior standard deviations of the same."""
        self._covariance = np.zeros((*shape, 3, 3))
        self.visits = np.ones(shape)
        self.surprised = np.zeros(shape, dtype=np.bool_)
        """bool[E, S]; whether what was known was forgotten in the last window."""
        self.reset(np.arange(workloads))

    def reset(self, rows: npt.NDArray[np.int64]) -> None:
        """Forget all of these workloads."""
        self._scale[rows] = np.nan
        self._moment[rows] = self._off[rows] = 0.0
        self._precision[rows] = _PRIOR_PRECISION
        self.coefficients[rows] = self._moment[rows]
        self.coefficients[rows, :, 0] = 1.0
        self.deviations[rows] = PRIOR
        self._covariance[rows] = np.diag(PRIOR**2.0)
        self.visits[rows] = 1.0
        self.surprised[rows] = False

    @property
    def known(self) -> Bools:
        """bool[E, S]; whether a stage was ever measured."""
        return np.asarray(~np.isnan(self._scale))

    def update(self, view: View) -> None:
        """Learn from a window."""
        good = view.present & (view.items >= 1) & (view.wall > 0) & ~np.isnan(view.visits)
        self.visits = np.where(good, view.visits, self.visits)
        self._scale = np.where(good & ~self.known, view.wall, self._scale)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(good[..., None], view.crowd_wall / self._scale[..., None], 0.0)
        items = np.where(good[..., None], view.crowd_items, 0.0)
        self._forget_after_surprise(good, relative, items)
        weight = items / (ITEM_DEVIATION**2 + items * WINDOW_DEVIATION**2) / np.maximum(relative, 0.1) ** 2
        fading = np.where(good, FADING, 1.0)[..., None]
        self._precision = _PRIOR_PRECISION + fading[..., None] * (self._precision - _PRIOR_PRECISION)
        self._precision += np.einsum("esk,ki,kj->esij", weight, BASIS, BASIS)
        self._moment = self._moment * fading + np.einsum("esk,ki->esi", weight * relative, BASIS)
        self._add_turns(view, good)
        self._covariance = np.linalg.inv(self._precision).astype(np.float64)
        found = np.einsum("esij,esj->esi", self._covariance, self._moment)
        found[..., 0] = np.maximum(found[..., 0], 1e-3)
        found[..., 1:] = np.maximum(found[..., 1:], 0.0)
        self.coefficients = found
        self.deviations = np.sqrt(np.einsum("esii->esi", self._covariance))

    def seconds(self, optimism: float = 0.0) -> Floats:
        """float[E, S, K]; seconds for which one source row occupies a stage, with so many at once as `GRID` says.

        Args:
            optimism: Posterior deviations by which it may be shorter, down to half: what is unknown looks promising.
        """
        mean = self.coefficients @ BASIS.T
        if optimism:
            deviation = np.sqrt(np.einsum("ki,esij,kj->esk", BASIS, self._covariance, BASIS))
            mean = np.maximum(mean - optimism * deviation, 0.5 * mean)
        return np.asarray(mean * np.where(self.known, self._scale * self.visits, 0.0)[..., None])

    def solve(self, view: View, limit: Floats | None = None, optimism: float = 0.0) -> tuple[Floats, Floats, Floats]:
        """The best rate, and the least concurrency that each stage needs for it.

        Args:
            view: The last window: slots, limits of stages.
            limit: float[E]; a rate that is enough, such as the trainer's; None = as fast as possible.
            optimism: As for `seconds`.

        Returns:
            float[E]: the rate in source rows a second; inf where nothing was measured.
            float[E, S]: concurrency that reaches it.
            float[E, S]: what to give it, with a margin; inf = all that there is, which costs no more.
        """
        most = self.most(view)
        seconds = self.seconds(optimism)
        allowed = np.maximum(most, 1.0)[..., None] >= GRID
        with np.errstate(divide="ignore", invalid="ignore"):
            capacity = np.where(allowed, GRID / seconds, 0.0)
        capacity = np.where(self.known[..., None] & view.present[..., None], capacity, np.inf)
        ceiling = capacity.max(axis=-1).min(axis=-1)
        holds = view.present & ~view.waits & self.known
        low, high = np.zeros(len(ceiling)), np.where(np.isinf(ceiling), 1e12, ceiling)
        if limit is not None:
            high = np.minimum(high, limit)
        for _ in range(30):
            middle = np.where(low > 0, np.sqrt(low * high), high / 1024)
            first = self._first(capacity, middle)
            used = np.where(holds, middle[:, None] * np.take_along_axis(seconds, first[..., None], -1)[..., 0], 0.0)
            fits = used.sum(axis=-1) <= view.slots
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        rate = low
        needs = GRID[self._first(capacity, rate)]
        return np.where(self.known.any(axis=-1), rate, np.inf), needs, self._bounds(capacity, seconds, rate, allowed)

    def _bounds(self, capacity: Floats, seconds: Floats, rate: Floats, allowed: Bools) -> Floats:
        """Concurrency that gives somewhat more than the rate; inf where all of it would cost no more an item."""
        cap = self._first(capacity, MARGIN * rate)
        most = allowed.sum(axis=-1) - 1
        here, there = (np.take_along_axis(seconds, place[..., None], -1)[..., 0] for place in (cap, most))
        return np.where((cap >= most) | (there <= GROWTH * here), np.inf, GRID[cap])

    @staticmethod
    def _first(capacity: Floats, rate: Floats) -> npt.NDArray[np.int64]:
        """Place in the grid of the least concurrency that gives this rate; of the best one where none does."""
        enough = capacity >= rate[:, None, None] * (1 - 1e-9)
        return np.asarray(np.where(enough.any(axis=-1), enough.argmax(axis=-1), capacity.argmax(axis=-1)))

    @staticmethod
    def most(view: View) -> Floats:
        """The most that a stage could be given."""
        slots = np.broadcast_to(view.slots[:, None], view.most.shape)
        threads = np.broadcast_to(view.threads[:, None], view.most.shape)
        return np.minimum(np.where(view.waits, threads, slots), view.most)

    def _add_turns(self, view: View, good: Bools) -> None:
        """Of n threads that take turns n - 1 wait: what they waited says how steep the growth is, at any n."""
        others = np.maximum(view.busy - 1, 0.0)
        tells = good & ~view.process & ~view.waits & (others > 0.5) & ~np.isnan(view.cpu) & ~np.isnan(view.queue)
        idle = np.where(tells, view.wall - view.cpu - view.queue, 0.0)
        slope = np.where(tells, np.maximum(idle, 0.0) / np.where(tells, self._scale * others, 1.0), 0.0)
        weight = np.where(tells, 1 / (0.1 + 0.3 * slope) ** 2, 0.0) * (1 - FADING)
        self._precision[..., 1, 1] += weight
        self._moment[..., 1] += weight * slope

    def _forget_after_surprise(self, good: Bools, relative: Floats, items: Floats) -> None:
        """Two windows that are far from what was expected: it is another stage now."""
        total = items.sum(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(good[..., None], items / total[..., None], 0.0)
        basis = shares @ BASIS
        expected = np.einsum("esi,esi->es", self.coefficients, basis)
        doubt = np.einsum("esi,esij,esj->es", basis, self._covariance, basis)
        found = (shares * relative).sum(axis=-1)
        noise = (ITEM_DEVIATION**2 / np.maximum(total, 1) + WINDOW_DEVIATION**2) * np.maximum(expected, 0.1) ** 2
        away = np.abs(found - expected) / np.sqrt(noise + doubt)
        self._off = np.where(good, np.where(away > SURPRISE, self._off + 1, 0.0), self._off)
        self.surprised = self._off >= 2
        again = np.nonzero(self.surprised)
        self._precision[again] = _PRIOR_PRECISION
        self._moment[again] = 0.0
        self._off[again] = 0.0
