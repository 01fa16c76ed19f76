"""How many threads, processes and open files there may be, and how much shared memory is free."""

import contextlib
import os
import resource
from dataclasses import dataclass

from intune._machine.cgroups import levels
from intune._machine.system import System, process_ids, read_or_none

_MOST = 64
"""Threads, and processes, where nothing limits them: more were never seen to help."""

_TASKS_PER_PROCESS = 4
"""A worker process, its helper thread and two threads of the libraries in it; the kernel counts each."""


@dataclass(frozen=True, slots=True)
class FileDescriptors:
    """Open files of this process.

    Attributes:
        used: Open now; None = cannot be read.
        limit: The most that may be open; None = unlimited.
    """

    used: int | None
    limit: int | None


def thread_limit(system: System) -> int:
    """Threads that a loader may own: 64, or half the tasks that a pids or user limit still leaves; at least 1."""
    room = _task_room(system)
    return _MOST if room is None else max(1, min(_MOST, room // 2))


def process_limit(system: System) -> int:
    """Worker processes that a loader may own: 64, or as many as the other half is enough for; at least 1."""
    room = _task_room(system)
    return _MOST if room is None else max(1, min(_MOST, room // 2 // _TASKS_PER_PROCESS))


def _task_room(system: System) -> int | None:
    """Tasks (threads of any process) that may still be started; None = no limit."""
    rooms = [most - now for most, now in _group_tasks(system)]
    most = system.soft_limit(resource.RLIMIT_NPROC)
    # The kernel does not hold the superuser to it.
    if most is not None and (uid := os.getuid()) != 0:
        rooms.append(most - _user_tasks(system, uid))
    return max(0, min(rooms)) if rooms else None


def _group_tasks(system: System) -> list[tuple[int, int]]:
    """(most, now) at each level that has a pids limit."""
    found = []
    for level in levels(system, "pids"):
        most = (read_or_none(level.file("pids.max")) or "").strip()
        now = (read_or_none(level.file("pids.current")) or "").strip()
        if most.isdecimal():
            found.append((int(most), int(now) if now.isdecimal() else 0))
    return found


def _user_tasks(system: System, uid: int) -> int:
    """Tasks of one user on the whole machine, as far as this process can see."""
    tasks = 0
    for pid in process_ids(system):
        folder = system.path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # ended meanwhile
            if os.stat(folder).st_uid == uid:
                tasks += len(os.listdir(f"{folder}/task"))
    return tasks


def file_descriptors(system: System) -> FileDescriptors:
    """Open files of this process and their limit."""
    try:
        used = len(os.listdir(system.path("/proc/self/fd"))) - 1  # one is the listing's own
    except OSError:
        used = None
    return FileDescriptors(used, system.soft_limit(resource.RLIMIT_NOFILE))


def shared_memory_free_bytes(system: System) -> int | None:
    """Bytes free in /dev/shm; None where there is none."""
    try:
        stat = os.statvfs(system.path("/dev/shm"))
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
