"""A tuner that another one takes over from."""

from collections.abc import Mapping

from intune._values import Allocation, Budget, Snapshot, Tuner
from intune.tuners import Static


class HandedOver:
    """Proposes what it is told at first; then another tuner, which has seen nothing, meets what is in force."""

    def __init__(self, first: Mapping[str, int], decisions: int, then: Tuner) -> None:
        self._first, self._left, self._then = Static(first), decisions, then

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        self._left -= 1
        return (self._first if self._left >= 0 else self._then).propose(snapshot, budget)
