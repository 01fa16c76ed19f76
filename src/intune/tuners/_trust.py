"""Whether what was learnt holds for the pipeline at hand: a change detector on predicted against actual rates.

The fitted model says what rate it expects of an allocation. While what is got stays near, it knows the pipeline, and so
does the policy that was trained on top of it. Where it is off for long (a cumulative sum, Page 1954), the pipeline is
unlike those of training, until predictions have been good for a while.
"""

import math

SLACK = 0.25
"""Logarithm of actual over predicted rates that is no surprise in a window."""

MOST = 1.0
"""What a single window counts at most."""

MISFIT = 4.0
"""Sum of what is beyond the slack from which the pipeline counts as unlike those of training."""

GOOD_WINDOWS = 20
"""Windows within the slack, one after another but for chance, after which it no longer does."""


class Detector:
    """Follows how far predictions are off.

    Attributes:
        fits: Whether the pipeline is like those of training, as far as is known.
    """

    def __init__(self) -> None:
        self.fits = True
        self._sum = 0.0
        self._good = 0

    def observe(self, expected: float | None, got: float, starved: bool) -> None:
        """Judge a window.

        Args:
            expected: Rate that was predicted for it; None = nothing was.
            got: The rate that came of it.
            starved: Whether the training loop had to wait. If not, it was the limit, and nothing can be judged.
        """
        if expected is None or expected <= 0 or not starved:
            return
        off = min(MOST, abs(math.log(max(got, 1e-9 * expected) / expected)))
        self._sum = max(0.0, self._sum + off - SLACK)
        self._good = self._good + 1 if off <= SLACK else max(0, self._good - 3)
        turns = self._sum > MISFIT if self.fits else self._good >= GOOD_WINDOWS
        if turns:
            self.fits = not self.fits
            self._sum, self._good = 0.0, 0
