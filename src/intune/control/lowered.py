"""Limits that were lowered while a loader ran: what order waits for is kept below them, and where it cannot be it ends.

Whatever the brake allows, what order waits for goes on, one item at a time: else nothing would ever come out again. A
limit that was there from the start has room for that. One that was lowered, or set, since then may have none: a window
of a shuffle that has to be filled before anything of it can come out may not fit, and the kernel would end the process
in the midst of it.

So below a limit that was lowered even that waits while memory, with what it usually takes, would pass 0.98 of it; what
was given back since memory was read does not count, as allocators may have kept it. Often there is room again a moment
later: memory is given back, the limit is raised. Where nothing changes for ten seconds and ten readings, with nothing
of the loader's left that could give bytes back, the epoch ends with an error that says what was needed.

It covers limits on resident memory, the user's own included. Not RLIMIT_AS: of the address space that is taken much may
be free, and what does not fit is refused and kills nobody. Nor a rest that grows below a limit which stays as it was.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from intune._shares import STRICT
from intune._values import MemoryUse
from intune._words import size

STUCK_SECONDS, STUCK_READINGS = 10.0, 10
"""For so long, and in so many readings, nothing can go on below a limit before that is taken to be so for good."""


class Stalling(Protocol):
    """A workload that can be kept from taking more than there is, and tells where that keeps it from going on."""

    def keep_to(self, spare_bytes: int | None) -> None:
        """From now on what order waits for may take no more than this until it is told again; None = what it takes."""
        ...

    def lacks(self) -> int | None:
        """Bytes that would have to be to spare for anything to go on; None = it goes on, or lacks something else.

        Not None only while nothing of the workload is left that could give bytes back by itself.
        """
        ...

    def give_up(self, why: str) -> None:
        """End with an error that says why, if it is still as `lacks` said."""
        ...


class LoweredLimits:
    """Watches for limits that were lowered. Readings in, decisions out to the workload.

    Args:
        workload: What is kept below them.
    """

    def __init__(self, workload: Stalling) -> None:
        self._workload = workload
        self._highest: dict[str, float] = {}
        self._strict = False
        self._stuck_since: float | None = None
        self._readings = 0

    def forget(self) -> None:
        """Nothing is measured any more; what limits were is remembered."""
        self._stuck_since = None
        if self._strict:
            self._strict = False
            self._workload.keep_to(None)

    def observe(self, seconds: float, uses: Sequence[MemoryUse], held_bytes: int) -> bool:
        """Decide by what is used of each limit while items hold so many bytes.

        Returns:
            Whether allocators should give back what they keep unused, before it is said that nothing can go on.
        """
        lowered = self._lowered(uses)
        if not lowered:
            self.forget()
            return False
        tightest = min(lowered, key=_spare)
        self._strict = True
        self._workload.keep_to(_spare(tightest))
        lacking = self._workload.lacks()
        if lacking is None:
            self._stuck_since = None
            return False
        if self._stuck_since is None:
            self._stuck_since, self._readings = seconds, 0
        self._readings += 1
        if seconds - self._stuck_since >= STUCK_SECONDS and self._readings >= STUCK_READINGS:
            self._workload.give_up(self._why(tightest, held_bytes, lacking))
            self._stuck_since = None
        return self._readings == 1

    def _lowered(self, uses: Sequence[MemoryUse]) -> list[MemoryUse]:
        """Those on resident memory that were higher before, or not there when limits were first seen."""
        found = [use for use in uses if use.with_processes and use.used_bytes is not None]
        unseen = math.inf if self._highest else 0
        for use in found:
            self._highest[use.limit_from] = max(use.limit_bytes, self._highest.get(use.limit_from, unseen))
        return [use for use in found if use.limit_bytes < self._highest[use.limit_from]]

    def _why(self, use: MemoryUse, held_bytes: int, lacking: int) -> str:
        highest, used = self._highest[use.limit_from], use.used_bytes or 0
        came = "was set to" if math.isinf(highest) else f"was lowered from {size(int(highest))} to"
        rest, needed = size(max(0, used - held_bytes)), math.ceil((used + lacking) / STRICT)
        return (
            f"the memory limit ({use.limit_from}) {came} {size(use.limit_bytes)} while the loader ran, too little for "
            f"it to go on: {size(needed)} are needed for the next item alone, {rest} of them by all but items in flight"
        )


def _spare(use: MemoryUse) -> int:
    """Bytes that are left to the share of a limit that is kept strictly; below 0 where it is passed already."""
    return int(STRICT * use.limit_bytes) - (use.used_bytes or 0)
