"""Whether what was learnt holds for the pipeline at hand: a change detector on predicted against actual rates.

The fitted model says what rate it expects of an allocation. While what is got stays near, it knows the pipeline, and so
does the policy that was trained on top of it. Where it is off for long (a cumulative sum, Page 1954), the pipeline is
unlike those of training: then the policy is no longer followed, and if the model goes on being wrong, neither is the
model: everything is left open. Either comes back once predictions have been good for a while.
"""

import math
from enum import IntEnum


class Trust(IntEnum):
    """Who decides."""

    SHARED = 0
    MODEL = 1
    POLICY = 2


SLACK = 0.25
"""Logarithm of actual over predicted rates that is no surprise in a window."""

MOST = 1.0
"""What a single window counts at most."""

MISFIT = 4.0
"""Sum of what is beyond the slack from which trust is lost."""

GOOD_WINDOWS = 20
"""Windows within the slack, one after another but for chance, after which trust comes back by one."""


class Detector:
    """Follows how far predictions are off.

    Attributes:
        trust: Who may decide.
    """

    def __init__(self) -> None:
        self.trust = Trust.POLICY
        self._sum = 0.0
        self._good = 0

    def observe(self, expected: float | None, got: float, starved: bool) -> bool:
        """Judge a window.

        Args:
            expected: Rate that was predicted for it; None = nothing was.
            got: The rate that came of it.
            starved: Whether the training loop had to wait. If not, it was the limit, and nothing can be judged.

        Returns:
            Whether trust was lost or won back.
        """
        if expected is None or expected <= 0 or not starved:
            return False
        off = min(MOST, abs(math.log(max(got, 1e-9 * expected) / expected)))
        self._sum = max(0.0, self._sum + off - SLACK)
        self._good = self._good + 1 if off <= SLACK else max(0, self._good - 3)
        before = self.trust
        if self._sum > MISFIT and self.trust > Trust.SHARED:
            self.trust = Trust(self.trust - 1)
        elif self._good >= GOOD_WINDOWS and self.trust < Trust.POLICY:
            self.trust = Trust(self.trust + 1)
        if self.trust != before:
            self._sum, self._good = 0.0, 0
        return self.trust != before
