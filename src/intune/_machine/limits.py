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
        hard_limit: The most that this process may raise `limit` to by itself; None = unlimited.
    """

    used: int | None
    limit: int | None
    hard_limit: int | None


@dataclass(frozen=True, slots=True)
class TaskLimit:
    """A limit on tasks: threads of any process.

    Attributes:
        limit: The most there may be.
        used: Those there are now, of all processes that the limit is for; None = cannot be read.
        read_from: The file or call that the limit was read from.
    """

    limit: int
    used: int | None
    read_from: str


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
    rooms = [each.limit - (each.used or 0) for each in task_limits(system)]
    return max(0, min(rooms)) if rooms else None


def task_limits(system: System) -> list[TaskLimit]:
    """Every limit on tasks that binds this process: of its control groups at each level, and of its user."""
    found = []
    for level in levels(system, "pids"):
        most = (read_or_none(level.file("pids.max")) or "").strip()
        now = (read_or_none(level.file("pids.current")) or "").strip()
        if most.isdecimal():
            found.append(TaskLimit(int(most), int(now) if now.isdecimal() else None, level.file("pids.max")))
    of_user = system.soft_limit(resource.RLIMIT_NPROC)
    # The kernel does not hold the superuser to it.
    if of_user is not None and (uid := os.getuid()) != 0:
        found.append(TaskLimit(of_user, _user_tasks(system, uid), "RLIMIT_NPROC"))
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
    """Open files of this process and their limits."""
    try:
        used = len(os.listdir(system.path("/proc/self/fd"))) - 1  # one is the listing's own
    except OSError:
        used = None
    soft, hard = system.soft_limit(resource.RLIMIT_NOFILE), system.hard_limit(resource.RLIMIT_NOFILE)
    return FileDescriptors(used, soft, hard)


def shared_memory_free_bytes(system: System) -> int | None:
    """Bytes free in /dev/shm; None where there is none."""
    stat = _shared_memory(system)
    return None if stat is None else stat.f_bavail * stat.f_frsize


def shared_memory_bytes(system: System) -> int | None:
    """Size of /dev/shm in bytes; None where there is none."""
    stat = _shared_memory(system)
    return None if stat is None else stat.f_blocks * stat.f_frsize


def _shared_memory(system: System) -> os.statvfs_result | None:
    try:
        return os.statvfs(system.path("/dev/shm"))
    except OSError:
        return None


def memfd_works() -> bool:
    """Whether an anonymous file in memory can be made, which worker processes need; a sandbox may forbid it."""
    try:
        os.close(os.memfd_create("intune-trial"))
    except (AttributeError, OSError):
        return False
    return True
