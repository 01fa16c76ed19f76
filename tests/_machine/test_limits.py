"""Threads, processes, open files, shared memory."""

import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._machine import (
    System,
    TaskLimit,
    file_descriptors,
    memfd_works,
    process_limit,
    shared_memory_bytes,
    shared_memory_free_bytes,
    task_limits,
    thread_limit,
)

POINT = "/sys/fs/cgroup/pids"


def test_nothing_limits_them(machine: Any) -> None:
    machine.mount("v2", "/sys/fs/cgroup")
    machine.level("/sys/fs/cgroup", {"pids.max": "max\n", "pids.current": "7\n"})
    assert (thread_limit(machine.system()), process_limit(machine.system())) == (64, 64)


@pytest.mark.parametrize(
    ("most", "now", "threads", "processes"),
    [(10_000, 10, 64, 64), (100, 20, 40, 10), (30, 26, 2, 1), (10, 10, 1, 1), (5, 9, 1, 1)],
)
@pytest.mark.parametrize("kind", ["v2", "pids"])
def test_a_pids_limit(machine: Any, kind: str, most: int, now: int, threads: int, processes: int) -> None:
    machine.mount(kind, POINT)
    machine.level(POINT, {"pids.max": f"{most}\n", "pids.current": f"{now}\n"})
    assert (thread_limit(machine.system()), process_limit(machine.system())) == (threads, processes)


@pytest.mark.slow
@given(st.lists(st.none() | st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=4))
def test_the_level_with_least_room_wins(machine_at: Any, tasks: list[tuple[int, int] | None]) -> None:
    with tempfile.TemporaryDirectory() as root:
        machine = machine_at(Path(root))
        steps = [f"g{depth}" for depth in range(len(tasks) - 1)]
        machine.mount("pids", POINT, group="/" + "/".join(steps))
        for depth, task in enumerate(tasks):
            most, now = task or ("max", 0)
            folder = "/".join([POINT, *steps[:depth]])
            machine.level(folder, {"pids.max": f"{most}\n", "pids.current": f"{now}\n"})
        rooms = [max(0, most - now) for most, now in filter(None, tasks)]
        threads = thread_limit(machine.system())
        assert threads == max(1, min([64, *(room // 2 for room in rooms)]))
        # One worker process is allowed in any case; where there is room for it, both limits together fit.
        assert all(threads + 4 * process_limit(machine.system()) <= max(room, 8) for room in rooms)


@pytest.fixture
def user_tasks(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two processes with three threads each, of the one user that there is."""
    user = os.getuid() or 12345
    for pid in (10, 11):
        for thread in range(3):
            (machine.root / f"proc/{pid}/task/{thread}").mkdir(parents=True)
        if os.getuid() == 0:
            os.chown(machine.root / f"proc/{pid}", user, -1)
    monkeypatch.setattr(os, "getuid", lambda: user)
    return machine


def _nproc(limit: int) -> Any:
    return lambda kind: limit if kind == resource.RLIMIT_NPROC else None


def test_a_user_limit_less_what_the_user_runs(user_tasks: Any) -> None:
    assert thread_limit(user_tasks.system(soft_limit=_nproc(46))) == 20
    assert process_limit(user_tasks.system(soft_limit=_nproc(46))) == 5


def test_a_user_limit_does_not_bind_the_superuser(user_tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert thread_limit(user_tasks.system(soft_limit=_nproc(46))) == 64


def test_every_limit_on_tasks_with_its_file(user_tasks: Any) -> None:
    user_tasks.mount("v2", POINT, group="/pod/job")
    user_tasks.level(f"{POINT}/pod", {"pids.max": "100\n", "pids.current": "7\n"})
    user_tasks.level(f"{POINT}/pod/job", {"pids.max": "50\n"})
    root = user_tasks.root
    assert task_limits(user_tasks.system(soft_limit=_nproc(46))) == [
        TaskLimit(50, None, f"{root}{POINT}/pod/job/pids.max"),
        TaskLimit(100, 7, f"{root}{POINT}/pod/pids.max"),
        TaskLimit(46, 6, "RLIMIT_NPROC"),
    ]


def test_open_files_of_this_process() -> None:
    before = file_descriptors(System())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = {resource.RLIM_INFINITY: None}
    assert (before.limit, before.hard_limit) == (endless.get(soft, soft), endless.get(hard, hard))
    with open(os.devnull) as first, open(os.devnull) as second:
        after = file_descriptors(System())
        assert (first.closed, second.closed) == (False, False)
    assert before.used is not None
    assert after.used == before.used + 2


def test_open_files_that_cannot_be_counted(machine: Any) -> None:
    assert file_descriptors(machine.system()).used is None


def test_shared_memory(machine: Any) -> None:
    assert shared_memory_free_bytes(machine.system()) is None
    (machine.root / "dev/shm").mkdir(parents=True)
    free = shared_memory_free_bytes(machine.system())
    size = shared_memory_bytes(machine.system())
    assert free is not None
    assert size is not None
    assert 0 < free <= size


def test_memory_can_be_shared_with_workers_unless_the_call_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memfd_works()

    def forbidden(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert not memfd_works()
