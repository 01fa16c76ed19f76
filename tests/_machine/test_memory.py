"""The tightest memory limit, and what is used of it."""

import mmap
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._clock import SystemClock
from intune._machine import (
    MemoryLimit,
    MemoryMeter,
    System,
    available_memory_bytes,
    memory_limit,
    memory_limits,
    own_memory,
    physical_memory_bytes,
    swap_bytes,
    used_of_limit,
)

POINT = "/sys/fs/cgroup"
V1 = f"{POINT}/memory"
NONE_V1 = 2**63 - 4096
GIB = 2**30
MEMINFO = f"MemTotal:       {8 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {5 * GIB // 1024} kB\n"
LIMITS = st.none() | st.integers(1, 16 * GIB)


@pytest.fixture
def machine(machine: Any) -> Any:
    machine.write("/proc/meminfo", MEMINFO)
    return machine


def process(
    machine: Any, pid: int, *, anon: int, shmem: int = 0, pss: int | None = None, children: str = "", parent: int = 1
) -> None:
    """A process with these kB; without `pss` it cannot be read."""
    machine.write(f"/proc/{pid}/stat", f"{pid} (a ) b) S {parent} " + "0 " * 17 + "7000 0 0\n")
    machine.write(f"/proc/{pid}/task/{pid}/children", children)
    machine.write(f"/proc/{pid}/status", f"Name:\tx\nRssAnon:\t{anon} kB\nRssFile:\t5 kB\nRssShmem:\t{shmem} kB\n")
    machine.write(f"/proc/{pid}/statm", "999 70 20 1 0 1 0\n")
    rollup = machine.root / f"proc/{pid}/smaps_rollup"
    rollup.unlink(missing_ok=True)
    if pss is not None:
        machine.write(f"/proc/{pid}/smaps_rollup", f"5597-7fff ---p 00 00:00 0 [rollup]\nRss: 1 kB\nPss:  {pss} kB\n")


def test_physical_and_available_memory(machine: Any, machine_at: Any, tmp_path: Path) -> None:
    assert physical_memory_bytes(machine.system()) == 8 * GIB
    assert available_memory_bytes(machine.system()) == 5 * GIB
    assert physical_memory_bytes(machine_at(tmp_path / "none").system()) is None


def test_each_limit_with_what_is_used_of_it(machine: Any) -> None:
    machine.mount("v2", POINT, group="/pod/job")
    machine.level(f"{POINT}/pod", {"memory.max": f"{6 * GIB}\n", "memory.stat": f"anon {GIB}\nshmem 24\n"})
    machine.level(f"{POINT}/pod/job", {"memory.max": f"{4 * GIB}\n"})
    machine.write("/proc/self/status", "VmSize:\t300 kB\nRssAnon:\t20 kB\nRssFile:\t9 kB\nRssShmem:\t1 kB\n")
    system = machine.system(soft_limit=lambda kind: 7 * GIB if kind == resource.RLIMIT_AS else None)
    limits = memory_limits(system)
    names = [limit.read_from.removeprefix(str(machine.root)) for limit in limits]
    job, pod = f"{POINT}/pod/job/memory", f"{POINT}/pod/memory"
    assert names == [f"{job}.max", f"{pod}.max", "RLIMIT_AS", "MemTotal in /proc/meminfo"]
    used = [used_of_limit(system, limit) for limit in limits]
    assert [reading.value for reading in used] == [None, GIB + 24, 300 * 1024, 3 * GIB]
    assert used[3].read_from == "MemTotal - MemAvailable in /proc/meminfo"
    assert own_memory(system) == (21 * 1024, "RssAnon + RssShmem in /proc/self/status")


def test_what_a_machine_does_not_tell_is_none(machine_at: Any, tmp_path: Path) -> None:
    system = machine_at(tmp_path / "none").system()
    assert used_of_limit(system, MemoryLimit(5, "RLIMIT_AS")).value is None
    assert used_of_limit(system, MemoryLimit(5, "MemTotal in /proc/meminfo")).value is None
    assert own_memory(system).value is None
    assert swap_bytes(system) == (None, None)


def test_swap(machine: Any) -> None:
    machine.write("/proc/meminfo", "SwapTotal:  300 kB\nSwapFree:  100 kB\n")
    assert swap_bytes(machine.system()) == (300 * 1024, 100 * 1024)


def test_the_machine_itself_is_a_limit(machine: Any) -> None:
    machine.mount("memory", V1)
    machine.write(f"{V1}/memory.limit_in_bytes", f"{NONE_V1}\n")
    machine.write(f"{V1}/memory.stat", f"cache 1\nhierarchical_memory_limit {NONE_V1}\n")
    limit = memory_limit(machine.system())
    assert (limit.limit_bytes, limit.read_from, limit.level) == (8 * GIB, "MemTotal in /proc/meminfo", None)


def test_nothing_can_be_read(machine_at: Any, tmp_path: Path, clock: Any) -> None:
    system = machine_at(tmp_path / "none").system()
    assert memory_limit(system).limit_bytes is None
    used = MemoryMeter(system, clock).tree()
    assert used.value is None
    assert "no process could be read" in used.read_from


def test_the_largest_number_of_v1_is_no_limit(machine: Any) -> None:
    (machine.root / "proc/meminfo").unlink()
    machine.mount("memory", V1)
    machine.write(f"{V1}/memory.limit_in_bytes", f"{NONE_V1}\n")
    machine.write(f"{V1}/memory.stat", f"hierarchical_memory_limit {NONE_V1}\n")
    assert memory_limit(machine.system()).limit_bytes is None


@pytest.mark.parametrize(
    ("most", "high", "limit", "file"),
    [
        ("max", "max", 8 * GIB, None),
        (f"{2 * GIB}", "max", 2 * GIB, "memory.max"),
        ("max", f"{3 * GIB}", 3 * GIB, "memory.high"),
        (f"{2 * GIB}", f"{GIB}", GIB, "memory.high"),
        ("garbage", f"{GIB}", GIB, "memory.high"),
    ],
)
def test_v2_limit(machine: Any, most: str, high: str, limit: int, file: str | None) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"memory.max": f"{most}\n", "memory.high": f"{high}\n"})
    found = memory_limit(machine.system())
    assert found.limit_bytes == limit
    assert found.read_from == (f"{machine.root}{POINT}/{file}" if file else "MemTotal in /proc/meminfo")


def test_address_space_limit(machine: Any) -> None:
    limit = memory_limit(machine.system(soft_limit=lambda kind: 3 * GIB if kind == resource.RLIMIT_AS else None))
    assert (limit.limit_bytes, limit.read_from, limit.level) == (3 * GIB, "RLIMIT_AS", None)


def test_the_limit_of_a_pod_that_the_container_cannot_see(machine: Any) -> None:
    machine.mount("memory", V1, root="/pod/container", group="/pod/container/job")
    machine.write(f"{V1}/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write(f"{V1}/job/memory.limit_in_bytes", f"{NONE_V1}\n")
    machine.write(f"{V1}/job/memory.stat", f"hierarchical_memory_limit {GIB}\n")
    limit = memory_limit(machine.system())
    assert limit.limit_bytes == GIB
    assert limit.read_from.startswith("hierarchical_memory_limit in ")
    assert limit.level is not None
    assert limit.level.path == f"{machine.root}{V1}"


def test_the_tightest_of_all_levels_is_no_limit_of_its_own_where_all_can_be_seen(machine: Any) -> None:
    machine.mount("memory", V1, group="/job")
    machine.write(f"{V1}/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine.write(f"{V1}/job/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write(f"{V1}/job/memory.stat", f"hierarchical_memory_limit {2 * GIB}\n")
    limits = [limit for limit in memory_limits(machine.system()) if limit.level is not None]
    assert sorted(limit.limit_bytes or 0 for limit in limits) == [2 * GIB, 4 * GIB]
    assert {limit.read_from.rsplit("/", 1)[1] for limit in limits} == {"memory.limit_in_bytes"}


def test_a_hidden_limit_that_is_no_tighter_does_not_show(machine: Any) -> None:
    machine.mount("memory", V1, root="/pod/container", group="/pod/container")
    machine.write(f"{V1}/memory.limit_in_bytes", f"{GIB}\n")
    machine.write(f"{V1}/memory.stat", f"hierarchical_memory_limit {GIB}\n")
    assert [limit.limit_bytes for limit in memory_limits(machine.system())] == [GIB, 8 * GIB]


def test_a_hidden_limit_shows_below_v2_limits_too(machine: Any) -> None:
    """A v2 group may be tighter than it; both are limits, of what each of them counts."""
    machine.mount("memory", V1, root="/pod/container", group="/pod/container")
    machine.write(f"{V1}/memory.limit_in_bytes", f"{NONE_V1}\n")
    machine.write(f"{V1}/memory.stat", f"hierarchical_memory_limit {3 * GIB}\n")
    machine.mount("v2", f"{POINT}/unified", group="/job")
    machine.level(f"{POINT}/unified/job", {"memory.max": f"{GIB}\n"})
    assert sorted(limit.limit_bytes or 0 for limit in memory_limits(machine.system())) == [GIB, 3 * GIB, 8 * GIB]
    assert memory_limit(machine.system()).limit_bytes == GIB


@pytest.mark.slow
@given(
    v1=st.lists(LIMITS, min_size=1, max_size=4),
    v2=st.lists(st.tuples(LIMITS, LIMITS), min_size=1, max_size=4),
    address_space=LIMITS,
)
def test_the_tightest_limit_wins(machine_at: Any, v1: list[Any], v2: list[Any], address_space: int | None) -> None:
    with tempfile.TemporaryDirectory() as root:
        machine = machine_at(Path(root))
        machine.write("/proc/meminfo", MEMINFO)
        for kind, point, depths in (("memory", V1, len(v1)), ("v2", f"{POINT}/unified", len(v2))):
            steps = [f"g{depth}" for depth in range(depths - 1)]
            machine.mount(kind, point, group="/" + "/".join(steps))
            for depth in range(depths):
                folder = "/".join([point, *steps[:depth]])
                if kind == "memory":
                    machine.write(f"{folder}/memory.limit_in_bytes", f"{v1[depth] or NONE_V1}\n")
                else:
                    most, high = v2[depth]
                    machine.level(folder, {"memory.max": f"{most or 'max'}\n", "memory.high": f"{high or 'max'}\n"})
        limit = memory_limit(machine.system(soft_limit=lambda kind: address_space))
        known = [*v1, *(size for pair in v2 for size in pair), address_space, 8 * GIB]
        assert limit.limit_bytes == min(filter(None, known))


def test_pss_is_summed_over_the_tree_and_moved_by_what_is_resident(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=1000, shmem=400, pss=1250, children=f"{me + 1} ")
    process(machine, me + 1, anon=300, shmem=400, pss=560, parent=me)
    process(machine, me + 2, anon=7000, pss=7000)  # not of this tree
    meter = MemoryMeter(machine.system(), _Costly(clock, seconds=0.05))
    assert meter.tree().value == (1250 + 560) * 1024
    # PSS is not taken again so soon, so that what it says now is not seen.
    process(machine, me, anon=1010, shmem=400, pss=1, children=f"{me + 1} ")
    process(machine, me + 1, anon=300, shmem=407, pss=1, parent=me)
    assert meter.tree().value == (1250 + 560 + 10 + 7) * 1024


def test_pss_is_taken_as_seldom_as_its_cost_asks_for(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=1000, pss=500)
    meter = MemoryMeter(machine.system(), _Costly(clock, seconds=0.05))
    meter.tree()
    process(machine, me, anon=1000, pss=700)
    clock.wall_seconds += 0.05 / 0.001 - 0.1
    assert meter.tree().value == 500 * 1024
    clock.wall_seconds += 0.2
    assert meter.tree().value == 700 * 1024


@pytest.mark.parametrize("moved", [False, True])
def test_pss_is_taken_five_times_as_often_while_processes_share_memory(machine: Any, clock: Any, moved: bool) -> None:
    """Shared with a child from the start, or shared pages that came to be since."""
    me, size = os.getpid(), 20 * 1024
    process(machine, me, anon=1000, shmem=0 if moved else size, pss=1000 if moved else 1000 + size // 8)
    meter = MemoryMeter(machine.system(), _Costly(clock, seconds=0.05))
    before = meter.tree().value
    process(machine, me, anon=1000, shmem=size, pss=1700)
    clock.wall_seconds += 0.05 / 0.005 - 0.1
    assert meter.tree().value == before + (size * 1024 if moved else 0)
    clock.wall_seconds += 0.2
    assert meter.tree().value == 1700 * 1024


def test_whoever_lists_the_processes_spares_the_next_reading_its_list(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=100, pss=100)
    meter = MemoryMeter(machine.system(), clock)
    meter.tree()
    process(machine, me, anon=100, pss=100, children=f"{me + 1} ")
    process(machine, me + 1, anon=30, pss=30, parent=me)
    assert meter.tree().value == 100 * 1024
    assert [key.pid for key in meter.members()] == [me, me + 1]
    assert meter.tree().value == 130 * 1024


def test_pss_is_taken_sooner_while_a_process_is_new(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=1000, pss=1000)
    meter = MemoryMeter(machine.system(), _Costly(clock, seconds=0.06))
    assert meter.tree().value == 1000 * 1024
    # A forked child shares all its pages; until PSS is taken it counts in full.
    process(machine, me, anon=1000, pss=500, children=f"{me + 1} ")
    process(machine, me + 1, anon=1000, pss=500, parent=me)
    clock.wall_seconds += 1.15
    meter.members()
    assert meter.tree().value == 2000 * 1024
    clock.wall_seconds += 0.1
    assert meter.tree().value == 1000 * 1024


def test_a_process_that_ended_no_longer_counts(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=100, pss=100, children=f"{me + 1} ")
    process(machine, me + 1, anon=300, pss=300, parent=me)
    meter = MemoryMeter(machine.system(), _Costly(clock, seconds=0.05))
    assert meter.tree().value == 400 * 1024
    (machine.root / f"proc/{me + 1}/status").unlink()
    assert meter.tree().value == 100 * 1024


def test_a_process_whose_pss_must_not_be_read_counts_without_shared_pages(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=100, pss=100, children=f"{me + 1} ")
    process(machine, me + 1, anon=300, parent=me)
    used = MemoryMeter(machine.system(), clock).tree()
    assert used.value == 100 * 1024 + 50 * resource.getpagesize()
    assert "RSS less shared in /proc/PID/statm for 1 that" in used.read_from


def test_mapped_files_do_not_count_where_the_kernel_tells_them_apart(machine: Any, clock: Any) -> None:
    me = os.getpid()
    process(machine, me, anon=100, shmem=40, pss=999, children=f"{me + 1} ")
    process(machine, me + 1, anon=300, pss=700, parent=me)
    rollup = "Rss: 1 kB\nPss: {} kB\nPss_Dirty: 3 kB\nPss_Anon: {} kB\nPss_File: 5000 kB\nPss_Shmem: {} kB\n"
    machine.write(f"/proc/{me}/smaps_rollup", rollup.format(999, 80, 20))
    assert MemoryMeter(machine.system(), clock).tree().value == (80 + 20 + 700) * 1024


@pytest.mark.parametrize("missing", ["Pss_Anon", "Pss_Shmem"])
def test_an_older_kernel_has_one_figure_for_everything(machine: Any, clock: Any, missing: str) -> None:
    me = os.getpid()
    process(machine, me, anon=100, pss=999)
    figures = {"Pss": 999, "Pss_Anon": 80, "Pss_Shmem": 20}
    del figures[missing]
    machine.write(f"/proc/{me}/smaps_rollup", "".join(f"{name}: {size} kB\n" for name, size in figures.items()))
    assert MemoryMeter(machine.system(), clock).tree().value == 999 * 1024


@pytest.mark.slow
def test_this_process_as_the_kernel_and_psutil_see_it() -> None:
    """Real pages: what is touched is seen at once, and the whole agrees with the kernel's list of mappings."""
    meter = MemoryMeter(System(), SystemClock())
    before = meter.tree().value
    assert before is not None
    assert before == pytest.approx(fixed_bytes(), rel=0.1)
    assert before < psutil.Process().memory_full_info().pss  # which has files too
    size = 64 * 2**20
    with mmap.mmap(-1, size) as area:
        area.write(b"x" * size)
        after = meter.tree().value
        assert after is not None
        assert after - before == pytest.approx(size, rel=0.1)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as area:
            assert sum(area[::4096]) == 0
            mapped = MemoryMeter(System(), SystemClock()).tree().value
    assert mapped is not None
    assert mapped - before < size / 4  # all of it is resident, but it can be dropped


def fixed_bytes() -> int:
    """Proportional bytes of this process's mappings, less those of files in file systems."""
    total, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = " ".join(words[5:])
            of_file = name.startswith("/") and not name.startswith(("/memfd:", "/dev/zero", "/dev/shm", "/SYSV"))
        elif (words[0] == "Pss:" and not of_file) or (words[0] == "Anonymous:" and of_file):
            total += int(words[1]) * 1024
    return total


class _Costly:
    """A clock by which every piece of work that is timed costs this much CPU."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.wall, self.sleep = clock.wall, clock.sleep

    def cpu(self) -> float:
        self._clock.cpu_seconds += self._seconds
        return float(self._clock.cpu_seconds)
