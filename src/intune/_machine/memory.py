"""The tightest memory limit on this process, and what is used of it.

Used is what cannot be dropped: anonymous and shared pages. Where a control group sets the limit, its own count
of them is taken, as that is what the kernel will compare. Elsewhere it is the proportional size (PSS) of those
of the process tree. PSS costs the kernel some 13 ms for each GiB of small pages, so it is taken as seldom as keeps its
cost at 0.5 % of a core, and at 0.1 % while processes share next to nothing; in between, the last one is moved by the
growth of resident anonymous and shared memory, which costs microseconds.
"""

import os
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from intune._clock import Clock
from intune._machine.cgroups import Level, levels
from intune._machine.system import Reading, System, picked, read_or_none
from intune._machine.tree import Key, Process, ProcessTree

_UNLIMITED = 2**60
"""cgroup v1 says "no limit" by a number just below 2**63."""

ADDRESS_SPACE = "RLIMIT_AS"

_LIST_SECONDS = 1.5
"""How old the list of processes may be when memory is read; whoever makes one once a second spares us ours."""

_COST_SHARE = 0.001
_COST_SHARE_SHARED = 0.005
_COST_SHARE_NEW = 0.05
"""CPU that taking PSS may cost, as share of the time. More while processes share memory, as what is not shared any
more counts for more; most while there are processes it was never taken of, because a forked one counts twice until
then."""

_SHARED_BYTES = 16 * 2**20
"""Processes share memory where PSS is so much less than what is resident, or shared pages have moved by so much."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on the memory of this process.

    Attributes:
        limit_bytes: The limit in bytes; None = none could be read.
        read_from: The file or call that it was read from.
        level: The control group that sets it; None = none does.
    """

    limit_bytes: int | None
    read_from: str
    level: Level | None = None


def physical_memory_bytes(system: System) -> int | None:
    """Memory of the machine in bytes."""
    return _meminfo(system, "MemTotal")[0]


def available_memory_bytes(system: System) -> int | None:
    """Memory of the machine in bytes that can be had without swapping; limits of this process are not looked at."""
    return _meminfo(system, "MemAvailable")[0]


def _meminfo(system: System, *names: str) -> list[int | None]:
    found = picked(read_or_none(system.path("/proc/meminfo")), *names)
    return [found[name] * 1024 if name in found else None for name in names]


def memory_limit(system: System) -> MemoryLimit:
    """The tightest of the control groups' limits at every level, RLIMIT_AS and the machine's memory.

    `memory.high` counts as a limit: past it the kernel slows the group down to a crawl.
    """
    none = MemoryLimit(None, "no limit could be read")
    return min(memory_limits(system), key=lambda limit: limit.limit_bytes or 0, default=none)


def memory_limits(system: System) -> list[MemoryLimit]:
    """Every limit that binds this process: of its control groups at each level, RLIMIT_AS, the machine's memory."""
    limits = [limit for limit in map(level_limit, levels(system, "memory")) if limit is not None]
    limits += _hidden_limit(system, limits)
    address_space = system.soft_limit(resource.RLIMIT_AS)
    if address_space is not None:
        limits.append(MemoryLimit(address_space, ADDRESS_SPACE))
    physical = physical_memory_bytes(system)
    if physical is not None:
        limits.append(MemoryLimit(physical, "MemTotal in /proc/meminfo"))
    return limits


def used_of_limit(system: System, limit: MemoryLimit) -> Reading:
    """Bytes used of a limit by all that it is for: the group, the address space of this process, or the machine."""
    if limit.level is not None:
        return group_memory(limit.level)
    if limit.read_from == ADDRESS_SPACE:
        kibibytes = picked(read_or_none(system.path("/proc/self/status")), "VmSize").get("VmSize")
        return Reading(None if kibibytes is None else kibibytes * 1024, "VmSize in /proc/self/status")
    physical, available = _meminfo(system, "MemTotal", "MemAvailable")
    used = None if physical is None or available is None else physical - available
    return Reading(used, "MemTotal - MemAvailable in /proc/meminfo")


def own_memory(system: System) -> Reading:
    """Anonymous and shared bytes of this process alone, shared ones in full."""
    status = picked(read_or_none(system.path("/proc/self/status")), "RssAnon", "RssShmem")
    known = "RssAnon" in status and "RssShmem" in status
    size = (status["RssAnon"] + status["RssShmem"]) * 1024 if known else None
    return Reading(size, "RssAnon + RssShmem in /proc/self/status")


def swap_bytes(system: System) -> tuple[int | None, int | None]:
    """Swap of the machine in bytes: (all of it, what is free)."""
    total, free = _meminfo(system, "SwapTotal", "SwapFree")
    return total, free


def level_limit(level: Level) -> MemoryLimit | None:
    """The limit that a control group sets itself; None = none."""
    names = ("memory.max", "memory.high") if level.version == 2 else ("memory.limit_in_bytes",)
    found = []
    for name in names:
        text = (read_or_none(level.file(name)) or "").strip()
        if text.isdecimal() and int(text) < _UNLIMITED:
            found.append(MemoryLimit(int(text), level.file(name), level))
    return min(found, key=lambda limit: limit.limit_bytes or 0, default=None)


def _hidden_limit(system: System, seen: list[MemoryLimit]) -> list[MemoryLimit]:
    """The limit of v1 groups above the topmost one that can be seen, such as a pod's around a container.

    The kernel only says the tightest limit of all levels: a hidden one shows where it is below those that are seen.
    """
    own = [level for level in levels(system, "memory") if level.version == 1]
    if not own:
        return []
    file = own[0].file("memory.stat")
    limit = picked(read_or_none(file), "hierarchical_memory_limit").get("hierarchical_memory_limit", _UNLIMITED)
    visible = [each.limit_bytes for each in seen if each.limit_bytes and each.level and each.level.version == 1]
    if limit >= min(visible, default=_UNLIMITED):
        return []
    # What the hidden group uses cannot be seen; the topmost visible one is the nearest to it.
    return [MemoryLimit(limit, f"hierarchical_memory_limit in {file}", own[-1])] if limit < _UNLIMITED else []


def group_memory(level: Level) -> Reading:
    """Anonymous and shared bytes of a control group and those below it; None where the kernel does not say."""
    names = ("anon", "shmem") if level.version == 2 else ("total_rss", "total_shmem")
    file = level.file("memory.stat")
    stat = picked(read_or_none(file), *names)
    missing = [name for name in names if name not in stat]
    if missing:
        return Reading(None, f"no {' and '.join(missing)} in {file}")
    return Reading(sum(stat[name] for name in names), f"{' + '.join(names)} in {file}")


def _fixed_pss(rollup: Mapping[str, int]) -> int | None:
    """KiB of what cannot be dropped; before Linux 5.9 mapped files are in the only figure there is."""
    if "Pss_Anon" in rollup and "Pss_Shmem" in rollup:
        return rollup["Pss_Anon"] + rollup["Pss_Shmem"]
    return rollup.get("Pss")


class MemoryMeter:
    """Memory used, cheap enough for ten readings a second. May be asked by several threads."""

    def __init__(self, system: System, clock: Clock) -> None:
        """Args: system: the machine that is asked. clock: for the age of readings and their cost."""
        self._lock = threading.Lock()
        self._tree = TreeMemory(system, clock, ProcessTree(system, os.getpid()))

    def tree(self) -> Reading:
        """Bytes of this process and its descendants, whatever sets the limit."""
        with self._lock:
            return self._tree.read()

    def members(self) -> dict[Key, Process]:
        """This process and its descendants, listed anew."""
        with self._lock:
            return self._tree.members()


class _Resident(NamedTuple):
    """Bytes of a process that are in memory: its own, and those that others may have too, in full."""

    anonymous: int
    shared: int


class TreeMemory:
    """Proportional size of a process tree in bytes."""

    def __init__(self, system: System, clock: Clock, tree: ProcessTree) -> None:
        """Args: system: the machine that is asked. clock: time and cost. tree: the processes."""
        self._system = system
        self._clock = clock
        self._processes = tree
        self._keys: list[Key] = []
        self._listed_at: float | None = None
        self._corrections: dict[Key, int] = {}
        self._shared_pages = 0
        self._unreadable = 0
        self._taken_at: float | None = None
        self._cost_seconds = 0.0

    def read(self) -> Reading:
        """Bytes now: an upper estimate while a process is new, exact at least whenever that is cheap."""
        now = self._clock.wall()
        if self._listed_at is None or now - self._listed_at >= _LIST_SECONDS:
            self.members()
        resident = {key: size for key in self._keys if (size := self._resident(key.pid)) is not None}
        if not resident:
            return Reading(None, f"no process could be read below {self._system.path('/proc')}")
        if self._due(now, resident):
            self._take(resident)
        total = sum(sum(size) + self._corrections.get(key, 0) for key, size in resident.items())
        return Reading(max(0, total), self._read_from(len(resident)))

    def members(self) -> dict[Key, Process]:
        """The processes, listed anew."""
        found = self._processes.members()
        self._keys, self._listed_at = list(found), self._clock.wall()
        return found

    def _due(self, now: float, resident: "dict[Key, _Resident]") -> bool:
        if self._taken_at is None:
            return True
        share = _COST_SHARE
        if not resident.keys() <= self._corrections.keys():
            share = _COST_SHARE_NEW
        elif self._shares(resident):
            share = _COST_SHARE_SHARED
        return now - self._taken_at >= self._cost_seconds / share

    def _shares(self, resident: "dict[Key, _Resident]") -> bool:
        if -sum(self._corrections.values()) > _SHARED_BYTES:
            return True
        return abs(sum(size.shared for size in resident.values()) - self._shared_pages) > _SHARED_BYTES

    def _take(self, resident: "dict[Key, _Resident]") -> None:
        """Take PSS of every process and keep by how much it differs from what is resident."""
        begun = self._clock.cpu()
        self._corrections = {}
        self._unreadable = 0
        self._shared_pages = sum(size.shared for size in resident.values())
        for key, size in resident.items():
            rollup = read_or_none(self._system.path(f"/proc/{key.pid}/smaps_rollup"))
            pss = _fixed_pss(picked(rollup, "Pss", "Pss_Anon", "Pss_Shmem"))
            self._unreadable += pss is None
            self._corrections[key] = (self._unshared(key.pid) if pss is None else pss * 1024) - sum(size)
        self._cost_seconds = self._clock.cpu() - begun
        self._taken_at = self._clock.wall()

    def _resident(self, pid: int) -> "_Resident | None":
        """Anonymous and shared bytes in memory, shared ones in full; None if it has ended."""
        text = read_or_none(self._system.path(f"/proc/{pid}/status"))
        if text is None:
            return None
        status = picked(text, "RssAnon", "RssShmem")
        return _Resident(status.get("RssAnon", 0) * 1024, status.get("RssShmem", 0) * 1024)

    def _unshared(self, pid: int) -> int:
        """Bytes in memory less shared ones: a lower estimate where PSS must not be read."""
        pages = (read_or_none(self._system.path(f"/proc/{pid}/statm")) or "").split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if len(pages) >= 3 else 0

    def _read_from(self, processes: int) -> str:
        text = f"Pss in /proc/PID/smaps_rollup of {processes} processes, moved by RssAnon + RssShmem since"
        if self._unreadable:
            text += f"; RSS less shared in /proc/PID/statm for {self._unreadable} that must not be read"
        return text
