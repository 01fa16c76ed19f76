"""Limits that the kernel really sets: temporary v1 groups with a child process in them.

The groups are made below the one that holds the tests, so that whatever limits the tests limits the child too.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from intune._machine import System
from intune._machine.cgroups import levels

pytestmark = pytest.mark.slow

MIB = 2**20
PRELUDE = """
import json, mmap, os, sys, time
from intune._clock import SystemClock
from intune._machine import *
sys.stdin.readline()
system = System(environ={})
"""

Group = Callable[[str, dict[str, int], dict[str, int]], Path]


@pytest.fixture
def group() -> Iterator[Group]:
    """Make an outer group with one inside it, with limits; gives the inner one, and removes both at the end."""
    made: list[Path] = []

    def make(controller: str, outer: dict[str, int], inner: dict[str, int]) -> Path:
        own = [level for level in levels(System(), controller) if level.version == 1]
        if not own:
            pytest.skip(f"no v1 hierarchy with {controller} is mounted")
        folder = Path(own[0].path) / f"intune-test-{uuid.uuid4().hex}"
        for path, limits in ((folder, outer), (folder / "inner", inner)):
            try:
                path.mkdir()
            except OSError as error:
                pytest.skip(f"no group can be made for a test: {error}")
            made.append(path)
            for name, limit in limits.items():
                (path / name).write_text(str(limit))
        return folder / "inner"

    yield make
    for path in reversed(made):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a group; for a moment after its last process was waited for the kernel may call it busy."""
    deadline = time.monotonic() + 10
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def run_in(groups: list[Path], program: str) -> Any:
    """What a program prints, as JSON; it runs in these groups from its first line on."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    try:
        for path in groups:
            (path / "cgroup.procs").write_text(str(child.pid))
        out, err = child.communicate(b"\n", timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, err.decode()) == (0, "")
    return json.loads(out)


def test_quota_of_the_outer_group_and_time_throttled(group: Group) -> None:
    # So small that even on a crowded machine the quota is what holds the child back.
    inner = group("cpu", {"cpu.cfs_quota_us": 10_000, "cpu.cfs_period_us": 100_000}, {})
    found = run_in(
        [inner],
        f"""
def throttled():
    words = open({str(inner.parent / "cpu.stat")!r}).read().split()
    return int(words[words.index("throttled_time") + 1]) / 1e9
reading = cpu_reading(system)
before = throttled()
meter = Meter(system, SystemClock())
inside = throttled()
while throttled() < inside + 0.2: pass
at_least = throttled() - inside
window = meter.window()
print(json.dumps([reading.cpus, reading.quota, reading.read_from["quota"], window.cpus,
                  [at_least, window.throttled_seconds, throttled() - before]]))
""",
    )
    cpus, quota, read_from, window_cpus, seconds = found
    assert (cpus, quota, window_cpus) == (1, 0.1, 1)
    assert read_from == str(inner.parent / "cpu.cfs_quota_us")
    seconds = [round(figure, 6) for figure in seconds]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0.19


def test_a_quota_above_the_affinity_and_one_of_a_cpu_and_a_half(group: Group) -> None:
    inner = group("cpu", {"cpu.cfs_quota_us": 6_400_000}, {"cpu.cfs_quota_us": 150_000})
    program = """
reading = cpu_reading(system)
print(json.dumps([reading.cpus, reading.quota, reading.affinity]))
"""
    assert run_in([inner], program)[:2] == [1, 1.5]
    cpus, quota, affinity = run_in([inner.parent], program)
    assert quota == 64.0
    assert cpus == min(64, affinity)


def test_memory_limit_of_the_outer_group_and_what_is_used_of_it(group: Group) -> None:
    inner = group("memory", {"memory.limit_in_bytes": 256 * MIB}, {"memory.limit_in_bytes": 512 * MIB})
    found = run_in(
        [inner],
        f"""
limit = memory_limit(system)
headroom = Headroom(system, SystemClock())
figures = [headroom.read().used_bytes]
anonymous = mmap.mmap(-1, 48 * {MIB}, flags=mmap.MAP_PRIVATE)
anonymous.write(b"x" * len(anonymous))
figures.append(headroom.read().used_bytes)
fd = os.memfd_create("shared")
os.write(fd, b"x" * 16 * {MIB})
figures.append(headroom.read().used_bytes)
anonymous.close()
figures.append(headroom.read().used_bytes)
print(json.dumps([limit.limit_bytes, limit.read_from, headroom.read().used_from, figures]))
""",
    )
    limit, limit_from, used_from, (at_start, anonymous, shared, freed) = found
    assert (limit, limit_from) == (256 * MIB, f"{inner.parent}/memory.limit_in_bytes")
    assert used_from == f"total_rss + total_shmem in {inner.parent}/memory.stat"
    assert anonymous - at_start == pytest.approx(48 * MIB, abs=4 * MIB)
    assert shared - anonymous == pytest.approx(16 * MIB, abs=4 * MIB)
    assert freed - shared == pytest.approx(-48 * MIB, abs=4 * MIB)


def test_the_limit_that_is_nearest_and_a_change_of_it(group: Group) -> None:
    """A neighbour fills the outer group; the inner one is tightened from outside while the program runs."""
    inner = group("memory", {"memory.limit_in_bytes": 512 * MIB}, {"memory.limit_in_bytes": 400 * MIB})
    neighbour = inner.parent / "neighbour"
    neighbour.mkdir()
    filler = subprocess.Popen(
        [sys.executable, "-c", f"input(); x = bytes([1]) * (150 * {MIB}); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        (neighbour / "cgroup.procs").write_text(str(filler.pid))
        assert filler.stdin is not None
        assert filler.stdout is not None
        filler.stdin.write(b"\n")
        filler.stdin.flush()
        filler.stdout.readline()
        found = run_in(
            [inner],
            f"""
headroom = Headroom(system, SystemClock())
uses = [headroom.read()]
inner = {str(inner)!r}
open(inner + "/memory.limit_in_bytes", "w").write(str(256 * {MIB}))
asked, use = time.monotonic(), None
while use is None or (use.limit_bytes != 256 * {MIB} and time.monotonic() < asked + 30):
    use = headroom.read()
uses.append(use)
anonymous = mmap.mmap(-1, 100 * {MIB}, flags=mmap.MAP_PRIVATE)
anonymous.write(b"x" * len(anonymous))
uses.append(headroom.read())
print(json.dumps([[use.limit_bytes, use.used_bytes, use.limit_from, use.used_from] for use in uses]))
""",
        )
    finally:
        filler.communicate(b"\n", timeout=60)
        _remove(neighbour)
    outer_use, inner_use, full = found
    assert outer_use[0] == 512 * MIB
    assert 150 * MIB < outer_use[1] < 400 * MIB
    assert outer_use[2] == f"{inner.parent}/memory.limit_in_bytes"
    assert inner_use[0] == 256 * MIB
    assert inner_use[2:] == [f"{inner}/memory.limit_in_bytes", f"total_rss + total_shmem in {inner}/memory.stat"]
    assert full[1] - inner_use[1] == pytest.approx(100 * MIB, abs=4 * MIB)


def test_a_pids_limit(group: Group) -> None:
    inner = group("pids", {"pids.max": 41}, {"pids.max": 1000})
    program = "print(json.dumps([len(os.listdir('/proc/self/task')), thread_limit(system), process_limit(system)]))"
    tasks, threads, processes = run_in([inner], program)  # libraries may have started threads on import
    assert 1 <= tasks < 30
    assert (threads, processes) == ((41 - tasks) // 2, (41 - tasks) // 2 // 4)


def test_a_memory_limit_does_not_need_a_cpu_group(group: Group) -> None:
    inner = group("memory", {}, {"memory.limit_in_bytes": 128 * MIB})
    quota = group("cpu", {}, {"cpu.cfs_quota_us": 100_000, "cpu.cfs_period_us": 100_000})
    program = """
window = Meter(system, SystemClock()).window()
print(json.dumps([window.cpus, window.memory_limit_bytes, window.memory_bytes is not None]))
"""
    assert run_in([inner, quota], program) == [1, 128 * MIB, True]
