"""The click probability behind made-up labels, and how well a model that knows it ranks the rows.

It rests on counts and on frequent categories alone: about 50 numbers, which one pass over a million rows is enough to
learn. Rare categories carry no signal, and a missing count tells as much as a count of 0, since models see it so.
"""

from collections.abc import Mapping

import numpy as np

from intune.recsys.laws import Floats, Integers

INTERCEPT = -1.004

COUNT_WEIGHTS = {"I1": 0.25, "I3": -0.08, "I5": -0.06, "I6": -0.16, "I7": 0.28, "I11": 0.25, "I13": -0.25}
"""By column: how much one unit of log(1 + max(count, 0)) adds to the logit."""

CATEGORY_EFFECTS = {
    "C5": (0.1, -0.4, 0.4, -0.3, 0.3),
    "C6": (0.2, -0.3, 0.2, -0.4, 0.4),
    "C8": (-0.1, 0.4, -0.3, 0.3, -0.4),
    "C14": (0.3, -0.3, 0.1, -0.5, 0.4),
    "C17": (-0.2, 0.4, 0.2, -0.4, 0.4, -0.3, 0.3, -0.3, 0.3),
    "C20": (0.3, 0.0, -0.3),
    "C23": (-0.2, 0.3, 0.1, -0.3, 0.4, -0.4),
    "C24": (0.4, -0.4, 0.3, -0.3),
}
"""By column: what the first values add to the logit; all others add nothing."""


def true_logit(counts: Mapping[str, Integers], categories: Mapping[str, Integers], shift: float = 0.0) -> Floats:
    """The logit of the click probability of n rows, float64[n].

    Args:
        counts: By column int64[n], 0 where missing.
        categories: By column which value, int64[n] from 0; -1 where missing.
        shift: Added to all.
    """
    logit = np.full(len(next(iter(counts.values()))), INTERCEPT + shift)
    for name, weight in COUNT_WEIGHTS.items():
        logit += weight * np.log(np.maximum(counts[name], 0) + 1.0)
    for name, effects in CATEGORY_EFFECTS.items():
        padded = np.array([0.0, *effects, 0.0])  # missing, the first values, all others
        logit += padded.take(categories[name] + 1, mode="clip")
    return logit


class IdealAuc:
    """The AUC of a model that knows every row's click probability, of all rows that were added.

    It is not one draw of labels that is scored but its expectation: each row counts as a click by its probability p
    and as none by 1 - p. Rows are kept as sums over 32,768 ranges of logits, so the memory stays the same; two rows of
    one range count as a tie, which is exact to about 1e-6.
    """

    _BINS = 32_768
    _WIDEST = 16.0

    def __init__(self) -> None:
        self._clicks = np.zeros(self._BINS)
        self._others = np.zeros(self._BINS)

    def add(self, logit: Floats) -> None:
        """Add rows by their true logits, float64[n]; beyond -16 and 16 they count as these."""
        near = np.clip(logit, -self._WIDEST, self._WIDEST)
        place = ((near + self._WIDEST) * (self._BINS / (2 * self._WIDEST))).astype(np.int64)
        place = np.minimum(place, self._BINS - 1)
        click = 1 / (1 + np.exp(-near))
        self._clicks += np.bincount(place, click, self._BINS)
        self._others += np.bincount(place, 1 - click, self._BINS)

    @property
    def value(self) -> float | None:
        """The AUC; None before rows were added."""
        pairs = self._clicks.sum() * self._others.sum()
        if not pairs:
            return None
        below = self._others.cumsum() - self._others / 2
        return float(self._clicks @ below / pairs)

    @property
    def click_rate(self) -> float | None:
        """The mean click probability; None before rows were added."""
        rows = self._clicks.sum() + self._others.sum()
        return float(self._clicks.sum() / rows) if rows else None
