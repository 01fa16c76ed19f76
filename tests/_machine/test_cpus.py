"""CPUs for this process: affinity, quotas at every level, and the ranks that share them."""

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._machine import System, cpu_reading

POINT = "/sys/fs/cgroup"
QUOTAS = st.none() | st.tuples(st.integers(1_000, 6_400_000), st.sampled_from([10_000, 100_000, 1_000_000]))


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [
        ("400000 100000\n", 4),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("max 100000\n", 12),
        ("399999 100000\n", 3),
        ("20000 10000\n", 2),
        ("9000000 100000\n", 12),
    ],
)
def test_v2_quota(machine: Any, cpu_max: str, cpus: int) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"cpu.max": cpu_max})
    reading = cpu_reading(machine.system())
    assert (reading.cpus, reading.affinity) == (cpus, 12)
    limited = not cpu_max.startswith(("max", "9"))
    assert reading.read_from["cpus"] == (f"{machine.root}{POINT}/cpu.max" if limited else "os.sched_getaffinity")


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 12), ("400000", 4), ("150000", 1), ("1000", 1)])
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_v1_quota(machine: Any, controllers: str, quota: str, cpus: int) -> None:
    point = f"{POINT}/{controllers}"
    machine.mount(controllers, point)
    machine.write(f"{point}/cpu.cfs_quota_us", f"{quota}\n")
    machine.write(f"{point}/cpu.cfs_period_us", "100000\n")
    reading = cpu_reading(machine.system())
    assert reading.cpus == cpus
    assert reading.quota == (None if quota == "-1" else int(quota) / 100_000)


def test_child_without_quota_under_a_parent_with_one(machine: Any) -> None:
    machine.mount("v2", POINT, group="/pod/container")
    machine.level(f"{POINT}/pod", {"cpu.max": "200000 100000\n"})
    machine.level(f"{POINT}/pod/container", {"cpu.max": "max 100000\n"})
    reading = cpu_reading(machine.system())
    assert (reading.cpus, reading.quota) == (2, 2.0)
    assert reading.read_from["quota"] == f"{machine.root}{POINT}/pod/cpu.max"


def test_quota_of_a_sibling_does_not_count(machine: Any) -> None:
    machine.mount("v2", POINT, group="/mine")
    machine.level(f"{POINT}/mine", {"cpu.max": "500000 100000\n"})
    machine.level(f"{POINT}/other", {"cpu.max": "100000 100000\n"})
    machine.level(f"{POINT}/mine/child", {"cpu.max": "100000 100000\n"})
    assert cpu_reading(machine.system()).cpus == 5


@pytest.mark.slow
@given(v1=st.lists(QUOTAS, min_size=1, max_size=4), v2=st.lists(QUOTAS, min_size=1, max_size=4))
def test_the_tightest_level_wins_in_hybrid_mounts(machine_at: Any, v1: list[Any], v2: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        machine = machine_at(Path(root))
        for kind, point, quotas in (("cpu", f"{POINT}/cpu", v1), ("v2", f"{POINT}/unified", v2)):
            steps = [f"g{depth}" for depth in range(len(quotas) - 1)]
            machine.mount(kind, point, group="/" + "/".join(steps))
            for depth, quota in enumerate(quotas):
                folder = "/".join([point, *steps[:depth]])
                number, period = quota or (-1 if kind == "cpu" else "max", 100_000)
                if kind == "v2":
                    machine.level(folder, {"cpu.max": f"{number} {period}\n"})
                else:
                    machine.write(f"{folder}/cpu.cfs_quota_us", f"{number}\n")
                    machine.write(f"{folder}/cpu.cfs_period_us", f"{period}\n")
        tightest = min([12.0, *(quota / period for quota, period in filter(None, v1 + v2))])
        assert cpu_reading(machine.system()).cpus == max(1, math.floor(tightest))


@pytest.mark.parametrize(
    "cpu_max", ["", "garbage\n", "400000\n", "-1 100000\n", "400000 0\n", "1.5 1\n", "0 100000\n", "4 1 1\n", "max x\n"]
)
def test_garbage_means_affinity_and_one_warning(machine: Any, cpu_max: str) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"cpu.max": cpu_max})
    with pytest.warns(RuntimeWarning, match=r"cannot be read from .*cpu\.max.*Counting on 12 CPUs") as caught:
        assert cpu_reading(machine.system()).cpus == 12
    assert len(caught) == 1


def test_garbage_at_two_levels_is_one_warning_and_the_third_level_counts(machine: Any) -> None:
    machine.mount("v2", POINT, group="/a/b")
    machine.level(POINT, {"cpu.max": "x\n"})
    machine.level(f"{POINT}/a", {"cpu.max": "300000 100000\n"})
    machine.level(f"{POINT}/a/b", {"cpu.max": "y\n"})
    with pytest.warns(RuntimeWarning, match=r"'x'") as caught:
        assert cpu_reading(machine.system()).cpus == 3
    assert len(caught) == 1


@pytest.mark.parametrize("quota", ["garbage", "-2", "0", ""])
def test_v1_garbage_means_affinity_and_one_warning(machine: Any, quota: str) -> None:
    machine.mount("cpu", f"{POINT}/cpu")
    machine.write(f"{POINT}/cpu/cpu.cfs_quota_us", quota)
    machine.write(f"{POINT}/cpu/cpu.cfs_period_us", "100000\n")
    with pytest.warns(RuntimeWarning, match="cpu.cfs_quota_us") as caught:
        assert cpu_reading(machine.system()).cpus == 12
    assert len(caught) == 1


def test_missing_quota_files_mean_affinity_and_one_warning(machine: Any) -> None:
    machine.mount("v2", POINT, group="/here")
    machine.level(f"{POINT}/here", {})
    with pytest.warns(RuntimeWarning, match="no CPU quota file") as caught:
        assert cpu_reading(machine.system(affinity=7)).cpus == 7
    assert len(caught) == 1


def test_no_control_groups_at_all_mean_affinity_and_one_warning(machine: Any) -> None:
    with pytest.warns(RuntimeWarning, match="no CPU quota file") as caught:
        assert cpu_reading(machine.system(affinity=3)).cpus == 3
    assert len(caught) == 1


def test_the_root_group_of_a_machine_has_no_quota_and_that_is_no_problem(machine: Any) -> None:
    machine.mount("v2", POINT)
    assert cpu_reading(machine.system()).cpus == 12


@pytest.mark.parametrize("group", ["/docker/0123", "/../../elsewhere", "/.."])
def test_a_host_path_that_the_container_cannot_see_means_the_mount(machine: Any, group: str) -> None:
    machine.mount("v2", POINT, group=group)
    machine.level(POINT, {"cpu.max": "200000 100000\n"})
    machine.level("/sys/fs", {"cpu.max": "100000 100000\n"})  # no control group, but where ".." would lead
    assert cpu_reading(machine.system()).cpus == 2


def test_a_mount_that_shows_a_part_of_the_hierarchy(machine: Any) -> None:
    machine.mount("cpu,cpuacct", f"{POINT}/cpu,cpuacct", root="/docker/0123", group="/docker/0123/job")
    for folder, quota in (("", 600_000), ("/job", 500_000)):
        machine.write(f"{POINT}/cpu,cpuacct{folder}/cpu.cfs_quota_us", f"{quota}\n")
        machine.write(f"{POINT}/cpu,cpuacct{folder}/cpu.cfs_period_us", "100000\n")
    assert cpu_reading(machine.system()).cpus == 5


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_mounts_of_a_hierarchy_the_one_that_shows_more_counts(machine: Any, first: int) -> None:
    mounts = [("/mnt/part", "/elsewhere"), ("/mnt/with\\040space", "/")]
    for number in (first, 1 - first):
        point, root = mounts[number]
        machine.mount("v2", point, root=root, group="/job", own=number == 0)
    machine.level("/mnt/with space/job", {"cpu.max": "300000 100000\n"})
    machine.level("/mnt/part", {"cpu.max": "max 100000\n"})
    assert cpu_reading(machine.system()).cpus == 3


@pytest.mark.parametrize(
    ("environ", "ranks", "cpus"),
    [
        ({}, 1, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 4, 3),
        ({"LOCAL_WORLD_SIZE": "5"}, 5, 2),
        ({"LOCAL_WORLD_SIZE": "64"}, 64, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, 6),
        ({"MPI_LOCALNRANKS": "3"}, 3, 4),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "6"}, 6, 2),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 2, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3, 4),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_ID": "0"}, 4, 3),
        # In a batch script there is one process, however many tasks later steps will have.
        ({"SLURM_NTASKS_PER_NODE": "4"}, 1, 12),
        # All tasks see the 12 CPUs of the job, or each was bound to 12 of its own.
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3"}, 4, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "12"}, 4, 12),
    ],
)
def test_ranks_share_the_cpus(machine: Any, environ: dict[str, str], ranks: int, cpus: int) -> None:
    machine.mount("v2", POINT)
    reading = cpu_reading(machine.system(environ=environ))
    assert (reading.local_world_size, reading.cpus) == (ranks, cpus)
    assert reading.read_from["local_world_size"] in [*environ, "no variable says otherwise"]


def test_a_quota_is_shared_even_where_the_affinity_is_split(machine: Any) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"cpu.max": "2000000 100000\n"})
    environ = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "12"}
    reading = cpu_reading(machine.system(environ=environ))
    assert reading.cpus == 5
    assert reading.read_from["cpus"] == f"{machine.root}{POINT}/cpu.max / SLURM_STEP_TASKS_PER_NODE"


@pytest.mark.parametrize(
    "environ",
    [
        {"LOCAL_WORLD_SIZE": "many"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "-2"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x2),?"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "3"},
    ],
)
def test_a_number_of_ranks_that_makes_no_sense_is_one_warning(machine: Any, environ: dict[str, str]) -> None:
    machine.mount("v2", POINT)
    with pytest.warns(RuntimeWarning, match=next(iter(environ))) as caught:
        assert cpu_reading(machine.system(environ=environ)).cpus == 12
    assert len(caught) == 1


def test_this_machine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a machine without quotas may run the tests
        reading = cpu_reading(System(environ={}))
    assert 1 <= reading.cpus <= reading.affinity
