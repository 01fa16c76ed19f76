"""Which memory limit is nearest to being reached."""

import os
import resource
from typing import Any

import pytest

from intune._machine import Headroom

POINT = "/sys/fs/cgroup"
V1 = f"{POINT}/memory"
NONE_V1 = 2**63 - 4096
MIB, GIB = 2**20, 2**30


@pytest.fixture
def machine(machine: Any) -> Any:
    meminfo(machine, 64 * GIB, 60 * GIB)
    tree(machine, 100 * MIB)
    return machine


def meminfo(machine: Any, total: int, available: int) -> None:
    machine.write("/proc/meminfo", f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")


def tree(machine: Any, size: int, *, address_space: int = 0) -> None:
    """This process has so many anonymous bytes, and no children."""
    me, kibibytes = os.getpid(), size // 1024
    status = f"VmSize:\t{address_space // 1024} kB\nRssAnon:\t{kibibytes} kB\nRssShmem:\t0 kB\n"
    machine.write(f"/proc/{me}/stat", f"{me} (x) S 1 " + "0 " * 17 + "7000 0 0\n")
    machine.write(f"/proc/{me}/task/{me}/children", "")
    machine.write(f"/proc/{me}/status", status)
    machine.write("/proc/self/status", status)
    machine.write(f"/proc/{me}/smaps_rollup", f"Pss: 1 kB\nPss_Anon: {kibibytes} kB\nPss_Shmem: 0 kB\n")


def v2(machine: Any, path: str, limit: int | None, used: int | None) -> None:
    files = {"memory.max": f"{limit or 'max'}\n"}
    if used is not None:
        files["memory.stat"] = f"anon {used - MIB}\nfile 99999999999\nshmem {MIB}\n"
    machine.level(path, files)


def v1(machine: Any, path: str, limit: int | None, used: int | None, *, tightest: int = NONE_V1) -> None:
    machine.write(f"{path}/memory.limit_in_bytes", f"{limit or NONE_V1}\n")
    shown = "" if used is None else f"total_rss {used - MIB}\ntotal_shmem {MIB}\ntotal_cache 99999999999\n"
    machine.write(f"{path}/memory.stat", f"hierarchical_memory_limit {tightest}\n{shown}")


def headroom(machine: Any, clock: Any, *, own: int | None = None, address_space: int | None = None) -> Headroom:
    system = machine.system(soft_limit=lambda kind: address_space if kind == resource.RLIMIT_AS else None)
    return Headroom(system, clock, lambda: own)


def read(machine: Any, clock: Any, **options: Any) -> tuple[int, int, str, str]:
    """Limit and use in MiB, and where they are from, below the machine's root."""
    use = headroom(machine, clock, **options).read()
    assert use is not None
    root = str(machine.root)
    return (
        use.limit_bytes // MIB,
        use.used_bytes // MIB,
        use.limit_from.replace(root, ""),
        use.used_from.replace(root, ""),
    )


def test_the_whole_machine_where_nothing_else_limits(machine: Any, clock: Any) -> None:
    """Others use most of it, and that counts."""
    meminfo(machine, 64 * GIB, 3 * GIB)
    found = read(machine, clock)
    assert found == (64 * 1024, 61 * 1024, "MemTotal in /proc/meminfo", "MemTotal - MemAvailable in /proc/meminfo")


@pytest.mark.parametrize(
    ("outer", "inner", "nearest"),
    [
        ((4000, 1000), (2000, 1000), "inner"),
        ((4000, 3500), (2000, 1000), "outer"),  # a neighbour in the outer one needs the rest
        ((4000, 1000), (None, 1000), "outer"),
        ((None, 1000), (2000, 10), "inner"),
        ((2000, 1000), (2000, 900), "outer"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_nested_groups(
    machine: Any, clock: Any, version: int, outer: tuple[int | None, int], inner: tuple[int, int], nearest: str
) -> None:
    point, write = (V1, v1) if version == 1 else (POINT, v2)
    machine.mount("memory" if version == 1 else "v2", point, group="/pod/job")
    groups = {"outer": (f"{point}/pod", *outer), "inner": (f"{point}/pod/job", *inner)}
    for path, limit, used in groups.values():
        write(machine, path, limit and limit * MIB, used * MIB)
    path, limit, used = groups[nearest]
    names = ("memory.limit_in_bytes", "total_rss + total_shmem") if version == 1 else ("memory.max", "anon + shmem")
    assert read(machine, clock) == (limit, used, f"{path}/{names[0]}", f"{names[1]} in {path}/memory.stat")


def test_the_slow_down_limit_counts_too(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", 2 * GIB, GIB)
    machine.write(f"{POINT}/job/memory.high", f"{1536 * MIB}\n")
    assert read(machine, clock)[:3] == (1536, 1024, f"{POINT}/job/memory.high")


def test_v1_and_v2_at_once(machine: Any, clock: Any) -> None:
    machine.mount("memory", V1, group="/job")
    machine.mount("v2", f"{POINT}/unified", group="/job")
    v1(machine, f"{V1}/job", 4 * GIB, 3 * GIB)
    v2(machine, f"{POINT}/unified/job", 4 * GIB, GIB)
    assert read(machine, clock)[2] == f"{V1}/job/memory.limit_in_bytes"
    v1(machine, f"{V1}/job", 4 * GIB, GIB // 2)
    assert read(machine, clock)[2] == f"{POINT}/unified/job/memory.max"


def test_the_address_space_is_compared_with_the_address_space(machine: Any, clock: Any) -> None:
    """It is full of what was never touched; resident memory has nothing to do with it."""
    tree(machine, 100 * MIB, address_space=7 * GIB)
    found = read(machine, clock, address_space=8 * GIB)
    assert found == (8 * 1024, 7 * 1024, "RLIMIT_AS", "VmSize in /proc/self/status")
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", GIB, 850 * MIB)
    assert read(machine, clock, address_space=8 * GIB)[2] == f"{POINT}/job/memory.max"


def test_the_limit_that_a_user_chose_is_for_the_tree(machine: Any, clock: Any) -> None:
    """A neighbour in the group does not count against it."""
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", 4 * GIB, 2 * GIB)
    limit, used, limit_from, used_from = read(machine, clock, own=GIB)
    assert (limit, used, limit_from) == (1024, 100, "the loader's memory=")
    assert used_from.startswith("Pss in /proc/PID/smaps_rollup of 1 processes")
    # But the group counts as soon as it is nearer to its own.
    v2(machine, f"{POINT}/job", 4 * GIB, 3500 * MIB)
    assert read(machine, clock, own=GIB)[:3] == (4096, 3500, f"{POINT}/job/memory.max")


def test_all_limits_are_told_each_with_its_own_use(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/pod/job")
    v2(machine, f"{POINT}/pod", 8 * GIB, 3 * GIB)
    v2(machine, f"{POINT}/pod/job", 4 * GIB, 2 * GIB)
    tree(machine, 100 * MIB, address_space=5 * GIB)
    uses = headroom(machine, clock, own=GIB, address_space=16 * GIB).read_all()
    found = {use.limit_from.replace(str(machine.root), ""): use for use in uses}
    assert {
        name: (use.limit_bytes // MIB, use.used_bytes and use.used_bytes // MIB) for name, use in found.items()
    } == {
        f"{POINT}/pod/job/memory.max": (4096, 2048),
        f"{POINT}/pod/memory.max": (8192, 3072),
        "RLIMIT_AS": (16 * 1024, 5 * 1024),
        "MemTotal in /proc/meminfo": (64 * 1024, 4 * 1024),
        "the loader's memory=": (1024, 100),
    }
    assert [name for name, use in found.items() if use.chosen] == ["the loader's memory="]
    assert [name for name, use in found.items() if not use.with_processes] == ["RLIMIT_AS"]


def test_a_user_s_limit_above_the_group_s_changes_nothing(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", GIB, 100 * MIB)
    assert read(machine, clock, own=9 * GIB)[2] == f"{POINT}/job/memory.max"


def test_a_user_s_limit_that_changes_is_seen_at_once(machine: Any, clock: Any) -> None:
    system, chosen = machine.system(), [2 * GIB]
    room = Headroom(system, clock, lambda: chosen[0])
    assert room.read().limit_bytes == 2 * GIB  # type: ignore[union-attr]
    chosen[0] = GIB
    assert room.read().limit_bytes == GIB  # type: ignore[union-attr]


def test_the_nearest_is_the_one_with_fewest_bytes_left_not_with_the_largest_share_used(
    machine: Any, clock: Any
) -> None:
    machine.mount("v2", POINT, group="/pod/job")
    v2(machine, f"{POINT}/pod", 100 * GIB, 85 * GIB)  # 85 % used, and 5 GiB left to 90 %
    v2(machine, f"{POINT}/pod/job", 4 * GIB, GIB)  # a quarter used, and 2.6 GiB left
    meminfo(machine, 512 * GIB, 500 * GIB)
    assert read(machine, clock)[2] == f"{POINT}/pod/job/memory.max"
    v2(machine, f"{POINT}/pod", 100 * GIB, 88 * GIB)  # 2 GiB left
    assert read(machine, clock)[2] == f"{POINT}/pod/memory.max"


def test_a_limit_that_changes_is_seen_at_once_and_a_new_one_after_a_second(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", 2 * GIB, GIB)
    room = headroom(machine, clock)

    def now() -> tuple[int, int]:
        use = room.read()
        assert use is not None
        return use.limit_bytes // MIB, use.used_bytes // MIB

    assert now() == (2048, 1024)
    v2(machine, f"{POINT}/job", 1500 * MIB, 1100 * MIB)
    assert now() == (1500, 1100)
    v2(machine, f"{POINT}/job", None, 1100 * MIB)
    clock.wall_seconds += 1
    assert now() == (64 * 1024, 4 * 1024)
    v2(machine, f"{POINT}/job", 3 * GIB, 1100 * MIB)
    clock.wall_seconds += 1
    assert now() == (3072, 1100)


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_cannot_be_read_is_taken_to_hold_the_tree(machine: Any, clock: Any, version: int) -> None:
    if version == 1:
        machine.mount("memory", V1, group="/job")
        v1(machine, f"{V1}/job", GIB, None)
    else:
        machine.mount("v2", POINT, group="/job")
        v2(machine, f"{POINT}/job", GIB, None)
    limit, used, limit_from, used_from = read(machine, clock)
    assert (limit, used) == (1024, 100)
    assert "/job/memory." in limit_from
    assert used_from.startswith("Pss in /proc/PID/smaps_rollup of 1 processes")
    names = "total_rss and total_shmem" if version == 1 else "anon and shmem"
    assert f"no {names} in " in used_from


def test_a_hidden_limit_is_compared_with_the_topmost_group_that_can_be_seen(machine: Any, clock: Any) -> None:
    machine.mount("memory", V1, root="/pod/container", group="/pod/container/job")
    v1(machine, V1, 4 * GIB, 900 * MIB)
    v1(machine, f"{V1}/job", None, 300 * MIB, tightest=GIB)
    limit, used, limit_from, used_from = read(machine, clock)
    assert (limit, used) == (1024, 900)
    assert limit_from == f"hierarchical_memory_limit in {V1}/job/memory.stat"
    assert used_from == f"total_rss + total_shmem in {V1}/memory.stat"


def test_where_nothing_can_be_read_there_is_no_answer(machine_at: Any, tmp_path: Any, clock: Any) -> None:
    assert headroom(machine_at(tmp_path / "none"), clock).read() is None
    assert headroom(machine_at(tmp_path / "none"), clock, own=GIB).read() is None


def test_whose_use_it_is(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/job")
    v2(machine, f"{POINT}/job", 8 * GIB, GIB)
    tree(machine, 300 * MIB, address_space=GIB)
    found = headroom(machine, clock, own=3 * GIB, address_space=16 * GIB).read_all()
    assert {use.limit_bytes // GIB: use.used_by for use in found} == {
        8: "all programs in this control group",
        16: "the addresses of this process",
        64: "all programs on this machine",
        3: "this process and its workers",
    }
    v2(machine, f"{POINT}/job", 8 * GIB, None)
    machine.write(f"{POINT}/job/memory.stat", "file 5\n")
    unread = headroom(machine, clock).read_all()
    assert [use.used_by for use in unread if use.limit_bytes == 8 * GIB] == ["this process and its workers"]
