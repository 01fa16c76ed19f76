"""Every memory limit with what is used of it, and which one is nearest to being reached."""

from collections.abc import Callable, Sequence

from intune._clock import Clock
from intune._machine.memory import (
    ADDRESS_SPACE,
    MemoryLimit,
    MemoryMeter,
    level_limit,
    memory_limits,
    used_of_limit,
)
from intune._machine.system import Reading, System
from intune._shares import COMPARED
from intune._values import MemoryUse

OWN = "this process and its workers"

_LIMITS_SECONDS = 1.0
"""How old the list of what sets limits may be: finding it costs more than reading limits and what is used."""


def nearest(uses: Sequence[MemoryUse]) -> MemoryUse | None:
    """Of limits whose use is known the one that is nearest to being reached; None = there is none."""
    known = [(COMPARED * use.limit_bytes - use.used_bytes, use) for use in uses if use.used_bytes is not None]
    return min(known, key=lambda each: each[0])[1] if known else None


class Headroom:
    """All limits that bind this process: of its control groups at each level, RLIMIT_AS, the machine's memory.

    Each is compared with what all that it is for use of it, other programs included. A limit that the user chose is for
    this process and its descendants.

    Args:
        system: The machine that is asked.
        clock: For the age of what was read.
        own: The user's limit in bytes; None = none was chosen.

    Attributes:
        meter: Measures the process tree.
    """

    def __init__(self, system: System, clock: Clock, own: Callable[[], int | None] = lambda: None) -> None:
        self.meter = MemoryMeter(system, clock)
        self._system, self._own, self._clock = system, own, clock
        self._limits: list[MemoryLimit] = []
        self._read_at: float | None = None

    def least_limit(self) -> int | None:
        """The tightest limit of the system in bytes; None = none could be read."""
        return min((limit.limit_bytes for limit in self._current() if limit.limit_bytes is not None), default=None)

    def read(self) -> MemoryUse | None:
        """The limit that is nearest to being reached; None = nothing could be read."""
        return nearest(self.read_all())

    def read_all(self) -> list[MemoryUse]:
        """Each limit of which could be read what is used of it."""
        found = [use for use in (self._use(limit) for limit in self._current()) if use is not None]
        chosen = self._own()
        if chosen is not None and (tree := self.meter.tree()).value is not None:
            limit_from = "the loader's memory="
            found.append(MemoryUse(chosen, int(tree.value), limit_from, tree.read_from, chosen=True, used_by=OWN))
        return found

    def _current(self) -> list[MemoryLimit]:
        now = self._clock.wall()
        if self._read_at is None or now - self._read_at >= _LIMITS_SECONDS:
            self._limits, self._read_at = memory_limits(self._system), now
            return self._limits
        return [self._now(limit) for limit in self._limits]

    @staticmethod
    def _now(limit: MemoryLimit) -> MemoryLimit:
        """A control group's limit as it is now: what lowers it does not wait for us."""
        now = level_limit(limit.level) if limit.level is not None else None
        return limit if now is None or now.read_from != limit.read_from else now

    def _use(self, limit: MemoryLimit) -> MemoryUse | None:
        used, used_by = used_of_limit(self._system, limit), _used_by(limit)
        if used.value is None and limit.level is not None:
            tree = self.meter.tree()  # the kernel does not say what the group uses
            used, used_by = Reading(tree.value, f"{tree.read_from} ({used.read_from})"), OWN
        if limit.limit_bytes is None or used.value is None:
            return None
        shared, amount = limit.read_from != ADDRESS_SPACE, int(used.value)
        return MemoryUse(
            limit.limit_bytes, amount, limit.read_from, used.read_from, with_processes=shared, used_by=used_by
        )


def _used_by(limit: MemoryLimit) -> str:
    if limit.level is not None:
        return "all programs in this control group"
    return "the addresses of this process" if limit.read_from == ADDRESS_SPACE else "all programs on this machine"
