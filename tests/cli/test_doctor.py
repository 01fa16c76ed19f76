"""`intune doctor`: what it says of machines made of files, and of this one."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import intune
from intune._machine import System, TaskLimit
from intune.cli import doctor as command
from intune.cli import facts as facts_module
from intune.cli.app import app
from intune.cli.facts import Facts, GpuFacts, gather
from intune.cli.findings import Finding, findings
from intune.cli.plain import to_json, to_lines

POINT = "/sys/fs/cgroup"
GIB = 2**30
MEMINFO = (
    f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n"
    f"SwapTotal: {2 * GIB // 1024} kB\nSwapFree: {2 * GIB // 1024} kB\n"
)
STATUS = f"VmSize:\t{GIB // 1024} kB\nRssAnon:\t{GIB // 2048} kB\nRssShmem:\t0 kB\n"
SOUND_LIMITS = {resource.RLIMIT_NOFILE: 4096}


@pytest.fixture
def machine(machine: Any) -> Any:
    """A sound one: 12 CPUs, 64 GiB, no control group limits it."""
    machine.mount("v2", POINT, group="/pod/job")
    for path in (POINT, f"{POINT}/pod", f"{POINT}/pod/job"):
        machine.level(path, {"cpu.max": "max 100000\n", "memory.max": "max\n", "pids.max": "max\n"})
    machine.write("/proc/meminfo", MEMINFO)
    machine.write("/proc/self/status", STATUS)
    machine.write("/proc/stat", "cpu  100 0 100 800 0 0 0 0 0 0\n" + "".join(f"cpu{i} 1\n" for i in range(12)))
    machine.write("/proc/self/fd/0", "")
    machine.write("/proc/cpuinfo", "model name : A CPU\n")
    (machine.root / "dev/shm").mkdir(parents=True)
    return machine


def system(
    machine: Any,
    *,
    affinity: int = 12,
    environ: Mapping[str, str] | None = None,
    limits: Mapping[int, int] = SOUND_LIMITS,
    hard: int | None = 65_536,
) -> System:
    made = machine.system(affinity=affinity, environ=environ, soft_limit=limits.get)
    return replace(made, hard_limit=lambda kind: hard)


def found(machine: Any, **options: Any) -> dict[str, Finding]:
    """Findings by id; what PyTorch is installed on the machine of the test does not matter."""
    facts = gather(system(machine, **options))
    packages = {**facts.software.packages, "torch": "2.13.0"}
    return by_id(replace(facts, software=replace(facts.software, packages=packages)))


def by_id(facts: Facts) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings(facts)}


# ---- facts ----------------------------------------------------------------------------------------------------------


def test_a_sound_machine_has_nothing_to_fix(machine: Any) -> None:
    assert found(machine) == {}
    facts = gather(system(machine))
    assert (facts.cpu.model, facts.cpu.online, facts.cpu.affinity, facts.cpu.quota) == ("A CPU", 12, 12, None)
    assert (facts.cpu.cpus, facts.choices.cpus, facts.choices.slots) == (12, 12, 12)
    assert facts.memory.limit_bytes == facts.choices.memory_bytes == 64 * GIB
    assert facts.memory.read_from["limit_bytes"] == "MemTotal in /proc/meminfo"
    assert (facts.memory.own_bytes, facts.memory.others_bytes) == (GIB // 2, 7 * GIB // 2)
    assert (facts.memory.room_bytes, facts.memory.swap_bytes, facts.memory.swap_used_bytes) == (60 * GIB, 2 * GIB, 0)
    assert (facts.limits.tasks, facts.limits.descriptors_limit, facts.limits.descriptors_hard_limit) == (
        (),
        4096,
        65536,
    )
    assert (facts.choices.max_threads, facts.choices.max_processes) == (64, 64)
    assert facts.gpu == GpuFacts(None, False, None, None)


def test_nested_v2_groups(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "350000 100000\n", "memory.max": f"{6 * GIB}\n", "pids.max": "500\n"})
    machine.level(f"{POINT}/pod", {"memory.stat": f"anon {4 * GIB}\nshmem 0\n", "pids.current": "100\n"})
    machine.level(f"{POINT}/pod/job", {"cpu.max": "800000 100000\n", "memory.max": f"{8 * GIB}\n"})
    machine.level(f"{POINT}/pod/job", {"memory.stat": f"anon {GIB}\nshmem 0\n"})
    facts = gather(system(machine))
    pod = f"{machine.root}{POINT}/pod"
    assert (facts.cpu.quota, facts.cpu.cpus) == (3.5, 3)
    assert facts.cpu.read_from["quota"] == facts.cpu.read_from["cpus"] == f"{pod}/cpu.max"
    assert [(limit.limit_bytes, limit.used_bytes) for limit in facts.memory.limits] == [
        (6 * GIB, 4 * GIB),
        (8 * GIB, GIB),
        (64 * GIB, 4 * GIB),
    ]
    assert facts.memory.read_from["limit_bytes"] == f"{pod}/memory.max"
    assert (facts.memory.others_bytes, facts.memory.room_bytes) == (7 * GIB // 2, 2 * GIB)
    assert facts.memory.read_from["room_bytes"].startswith(f"{pod}/memory.max - anon + shmem in {pod}/memory.stat")
    assert facts.limits.tasks == (TaskLimit(500, 100, f"{pod}/pids.max"),)
    # 0.9 of 6 GiB, less the 4 GiB that the group uses.
    assert facts.choices.in_flight_bytes == int(6 * GIB * 0.9) - 4 * GIB


def test_v1_groups(machine: Any) -> None:
    machine = type(machine)(machine.root.parent / "v1")
    machine.write("/proc/meminfo", MEMINFO)
    machine.write("/proc/self/status", STATUS)
    for name in ("cpu", "memory", "pids"):
        machine.mount(name, f"{POINT}/{name}", group="/job")
    machine.write(f"{POINT}/cpu/job/cpu.cfs_quota_us", "250000\n")
    machine.write(f"{POINT}/cpu/job/cpu.cfs_period_us", "100000\n")
    machine.write(f"{POINT}/memory/job/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write(f"{POINT}/memory/job/memory.stat", f"total_rss {2 * GIB}\ntotal_shmem 0\n")
    machine.write(f"{POINT}/pids/job/pids.max", "200\n")
    facts = gather(system(machine))
    assert (facts.cpu.quota, facts.cpu.cpus, facts.cpu.online) == (2.5, 2, None)
    assert facts.cpu.read_from["quota"] == f"{machine.root}{POINT}/cpu/job/cpu.cfs_quota_us"
    assert (facts.memory.limit_bytes, facts.memory.room_bytes) == (4 * GIB, 2 * GIB)
    assert facts.memory.read_from["limit_bytes"] == f"{machine.root}{POINT}/memory/job/memory.limit_in_bytes"
    assert facts.limits.tasks == (TaskLimit(200, None, f"{machine.root}{POINT}/pids/job/pids.max"),)
    assert facts.limits.shm_bytes is None


def test_ranks_share_the_cpus(machine: Any) -> None:
    facts = gather(system(machine, environ={"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "3,2"}))
    assert (facts.cpu.cpus, facts.cpu.local_world_size, facts.cpu.library_threads) == (3, 4, 3)
    assert facts.cpu.read_from["cpus"] == "os.sched_getaffinity / LOCAL_WORLD_SIZE"
    assert by_id(facts).keys() <= {"no-torch"}


def test_an_address_space_is_for_this_process_alone(machine: Any) -> None:
    facts = gather(system(machine, limits={**SOUND_LIMITS, resource.RLIMIT_AS: 3 * GIB}))
    assert (facts.memory.limit_bytes, facts.memory.room_bytes, facts.memory.others_bytes) == (3 * GIB, 2 * GIB, None)
    assert facts.memory.read_from["others_bytes"] == "RLIMIT_AS is for this process alone"


def test_nothing_can_be_read(machine: Any) -> None:
    bare = type(machine)(machine.root.parent / "none")
    facts = gather(system(bare))
    numbers = [facts.cpu.online, facts.cpu.quota, facts.cpu.steal_share, facts.limits.descriptors_used]
    memory = dataclasses.asdict(facts.memory)
    assert numbers == [None] * 4
    assert {name for name, value in memory.items() if value is not None} == {"limits", "read_from"}
    assert (facts.choices.memory_bytes, facts.choices.in_flight_bytes) == (None, None)
    assert {"memory-unknown", "cpus-unreadable"} <= by_id(facts).keys()
    assert "  limit             unknown  (no limit could be read)" in "\n".join(to_lines(facts, ()))


# ---- findings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "action"), [(1, "at least 1 CPU ("), (3, "at least 3 CPUs")])
def test_a_quota_below_one(machine: Any, ranks: int, action: str) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": f"{50_000 * ranks} 100000\n"})
    finding = found(machine, environ={"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"})["quota-below-one"]
    assert finding.severity == "serious"
    assert f"the CPU quota is {0.5 * ranks:g} CPUs ({machine.root}{POINT}/pod/cpu.max)" in finding.what
    assert action in finding.action


def test_more_ranks_than_cpus(machine: Any) -> None:
    findings = found(machine, affinity=2, environ={"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"})
    assert findings["more-ranks-than-cpus"].severity == "serious"
    assert "start no more processes than the 2 CPUs" in findings["more-ranks-than-cpus"].action


def test_an_affinity_narrower_than_the_quota(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "800000 100000\n"})
    finding = found(machine, affinity=3)["affinity-below-quota"]
    assert finding.severity == "warning"
    assert "the quota allows 8 CPUs, but the affinity mask has only 3" in finding.what
    assert "affinity-below-quota" not in found(machine, affinity=8)


def test_a_quota_that_cannot_be_read(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "lots\n"})
    assert "expected '<quota or max> <period>', found 'lots'" in found(machine)["cpus-unreadable"].what


@pytest.mark.parametrize(
    ("environ", "severity", "what"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "serious", "each of 4 ranks will compute with up to 12 threads on 3 CPUs"),
        ({"OMP_NUM_THREADS": "24"}, "warning", "OMP_NUM_THREADS asks for 24 threads, but this process has 12 CPUs"),
        ({"MKL_NUM_THREADS": "48"}, "serious", "MKL_NUM_THREADS asks for 48 threads"),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "x"}, "serious", "OMP_NUM_THREADS is not set"),
    ],
)
def test_more_library_threads_than_cpus(machine: Any, environ: dict[str, str], severity: str, what: str) -> None:
    finding = found(machine, environ=environ)["threads-oversubscribed"]
    assert finding.severity == severity
    assert what in finding.what
    assert "set OMP_NUM_THREADS=" in finding.action


def test_a_quota_that_libraries_do_not_look_at(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "200000 100000\n"})
    finding = found(machine)["threads-oversubscribed"]
    assert finding.severity == "warning"
    assert "up to 12 threads on 2 CPUs" in finding.what
    assert "set OMP_NUM_THREADS=2 before" in finding.action


@pytest.mark.parametrize(("used", "severity"), [(7.3, "serious"), (6.5, "warning"), (5, None)])
def test_a_memory_limit_nearly_used(machine: Any, used: float, severity: str | None) -> None:
    machine.level(f"{POINT}/pod", {"memory.max": f"{8 * GIB}\n", "memory.stat": f"anon {int(used * GIB)}\nshmem 0\n"})
    finding = found(machine).get("memory-nearly-used")
    assert (finding and finding.severity) == severity
    if finding:
        assert finding.what == f"{used:.1f} GiB of 8.0 GiB are in use ({machine.root}{POINT}/pod/memory.max)"


def test_the_fullest_limit_counts_and_not_the_tightest(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"memory.max": f"{32 * GIB}\n", "memory.stat": f"anon {31 * GIB}\nshmem 0\n"})
    machine.level(f"{POINT}/pod/job", {"memory.max": f"{8 * GIB}\n", "memory.stat": "anon 1\nshmem 0\n"})
    assert "31.0 GiB of 32.0 GiB" in found(machine)["memory-nearly-used"].what


def test_swap_in_use(machine: Any) -> None:
    machine.write("/proc/meminfo", MEMINFO.replace(f"SwapFree: {2 * GIB // 1024}", f"SwapFree: {GIB // 1024}"))
    assert "1.0 GiB of the machine's memory are swapped out" in found(machine)["swapped"].what


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "action"),
    [
        (256, 65_536, "warning", "ulimit -n 65536 before the start"),
        (256, None, "warning", "ulimit -n 65536 before the start"),
        (32, 4096, "serious", "ulimit -n 4096 before the start"),
        (256, 256, "warning", "raise the hard limit, which is 256 too"),
    ],
)
def test_few_descriptors(machine: Any, soft: int, hard: int | None, severity: str, action: str) -> None:
    finding = found(machine, limits={resource.RLIMIT_NOFILE: soft}, hard=hard)["descriptors-few"]
    assert finding.severity == severity
    assert action in finding.action


@pytest.mark.parametrize(("most", "severity"), [(105, "serious"), (180, "warning"), (400, None)])
def test_few_tasks(machine: Any, most: int, severity: str | None) -> None:
    machine.level(f"{POINT}/pod", {"pids.max": f"{most}\n", "pids.current": "100\n"})
    finding = found(machine).get("tasks-few")
    assert (finding and finding.severity) == severity
    assert finding is None or f"only {most - 100} more threads or processes may start" in finding.what


@pytest.mark.parametrize(("stolen", "severity"), [(300, "serious"), (100, "warning"), (10, None)])
def test_stolen_time(machine: Any, stolen: int, severity: str | None) -> None:
    machine.write("/proc/stat", f"cpu  100 0 100 {800 - stolen} 0 0 0 {stolen} 0 0\n")
    finding = found(machine).get("steal")
    assert (finding and finding.severity) == severity
    assert finding is None or f"took {stolen / 1000:.0%} of the CPU time since boot" in finding.what


def test_a_capped_frequency(machine: Any) -> None:
    machine.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "1200000\n")
    machine.write("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3000000\n")
    assert "CPUs may run at 40% of their highest frequency" in found(machine)["frequency-capped"].what


def test_a_group_that_was_held_back(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.stat": "nr_periods 100\nnr_throttled 30\n"})
    assert "in 30% of all periods" in found(machine)["throttled"].what


@pytest.mark.parametrize(("size", "small"), [(64 * 2**20, True), (8 * GIB, False), (None, False)])
def test_a_small_shared_memory(machine: Any, size: int | None, small: bool) -> None:
    facts = gather(system(machine))
    facts = replace(facts, limits=replace(facts.limits, shm_bytes=size))
    assert ("shm-small" in by_id(facts)) == small


def test_no_memory_to_share(machine: Any) -> None:
    facts = gather(system(machine))
    facts = replace(facts, limits=replace(facts.limits, memfd=False))
    assert by_id(facts)["memfd-missing"].severity == "serious"


@pytest.mark.parametrize(
    ("version", "old"), [("2.1.9", True), ("1.26", True), ("2.2.0", False), ("2.2.0+local", False), ("2.10", False)]
)
def test_an_old_version(machine: Any, version: str, old: bool) -> None:
    facts = gather(system(machine))
    packages = {**facts.software.packages, "numpy": version}
    facts = replace(facts, software=replace(facts.software, packages=packages, least={"numpy": "2.2"}))
    finding = by_id(facts).get("old-version")
    assert (finding is not None) == old
    if finding:
        assert (finding.severity, finding.action) == ("serious", 'pip install "numpy>=2.2"')


def test_the_oldest_versions_are_those_that_the_package_asks_for() -> None:
    least = gather(System()).software.least
    assert {"numpy", "pyarrow", "torch", "typer"} <= least.keys()
    assert all(version[0].isdigit() for version in least.values())


def test_without_torch(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_other = facts_module._version
    monkeypatch.setattr(facts_module, "_version", lambda name: None if name == "torch" else of_other(name))
    facts = gather(system(machine), ask_torch=True)
    assert facts.gpu == GpuFacts(None, True, None, None)
    assert by_id(facts)["no-torch"].severity == "note"


@pytest.mark.parametrize(
    ("cuda", "devices", "action"),
    [(None, (), "install a CUDA build"), ("12.8", (), "CUDA_VISIBLE_DEVICES"), ("12.8", ("H200",), None)],
)
def test_a_gpu_that_torch_does_not_see(
    machine: Any, cuda: str | None, devices: tuple[str, ...], action: str | None
) -> None:
    machine.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n")
    facts = gather(system(machine))
    assert facts.gpu.nvidia_driver == "550.54.15"
    packages = {**facts.software.packages, "torch": "2.13.0"}
    facts = replace(
        facts, gpu=GpuFacts("550.54.15", True, cuda, devices), software=replace(facts.software, packages=packages)
    )
    finding = by_id(facts).get("gpu-unused")
    assert (finding is None) == (action is None)
    assert finding is None or (finding.severity == "serious" and str(action) in finding.action)


@pytest.mark.parametrize("error", [ImportError("libcudart.so.12:\n cannot open"), OSError("no space")])
def test_a_torch_that_cannot_be_imported(machine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch":
                raise error

    of_other = facts_module._version
    monkeypatch.setattr(facts_module, "_version", lambda name: "2.13.0" if name == "torch" else of_other(name))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    facts = gather(system(machine), ask_torch=True)
    assert facts.gpu.devices is None
    finding = by_id(facts)["torch-broken"]
    assert finding.severity == "serious"
    assert finding.what.endswith(f"cannot be used: {' '.join(str(error).split())}")


def test_the_worst_comes_first(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "50000 100000\n", "pids.max": "190\n", "pids.current": "100\n"})
    severities = [finding.severity for finding in found(machine).values()]
    assert severities == ["serious", "warning", "warning"]


# ---- the command ----------------------------------------------------------------------------------------------------


def invoke(machine: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "System", lambda: system(machine))
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    assert result.stderr == ""
    return result.exit_code, result.stdout


def test_text_fits_a_terminal_but_for_paths(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "350000 100000\n", "memory.max": f"{6 * GIB}\n"})
    code, text = invoke(machine, monkeypatch)
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == "CPUs"
    assert "  quota             3.5" in lines
    assert f"                    ({machine.root}{POINT}/pod/cpu.max)" in lines
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)
    assert "            -> set OMP_NUM_THREADS=3 before Python starts, or call" in lines


def test_code_1_is_for_what_is_serious(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(machine, monkeypatch)[0] == 0
    machine.level(f"{POINT}/pod", {"pids.max": "190\n", "pids.current": "100\n"})
    code, text = invoke(machine, monkeypatch)
    assert code == 0
    assert "\n  warning   Only 90 more threads" in text
    machine.level(f"{POINT}/pod", {"pids.max": "101\n", "pids.current": "100\n"})
    code, text = invoke(machine, monkeypatch)
    assert code == 1
    assert "\n  serious   Only 1 more thread or process" in text
    assert invoke(machine, monkeypatch, "--json")[0] == 1


KEYS = {
    "schema": None,
    "cpu": "model online affinity quota local_world_size cpus library_threads throttled_share steal_share "
    "frequency_share problems read_from",
    "memory": "physical_bytes available_bytes limits limit_bytes own_bytes others_bytes room_bytes swap_bytes "
    "swap_used_bytes read_from",
    "limits": "tasks descriptors_used descriptors_limit descriptors_hard_limit shm_bytes shm_free_bytes memfd",
    "software": "intune python packages least",
    "gpu": "nvidia_driver asked torch_cuda devices problem",
    "choices": "cpus slots max_threads max_processes memory_bytes in_flight_bytes arrow_allocator",
}
"""The keys that other programs rely on: more may come, none may go while `schema` is 1."""


def check_keys(report: dict[str, Any]) -> None:
    assert report.keys() == KEYS.keys() | {"findings"}
    for section, names in KEYS.items():
        if names is not None:
            assert list(report[section]) == names.split(), section
    for limit in report["memory"]["limits"]:
        assert list(limit) == ["limit_bytes", "used_bytes", "read_from", "used_from"]
    for task in report["limits"]["tasks"]:
        assert list(task) == ["limit", "used", "read_from"]
    for finding in report["findings"]:
        assert list(finding) == ["id", "severity", "what", "action"]


def test_json_of_a_machine(machine: Any) -> None:
    machine.level(f"{POINT}/pod", {"cpu.max": "50000 100000\n", "pids.max": "190\n"})
    facts = gather(system(machine))
    report = json.loads(to_json(facts, findings(facts)))
    check_keys(report)
    assert report["schema"] == 1
    assert report["cpu"]["quota"] == 0.5
    assert report["cpu"]["library_threads"] is None
    assert report["limits"]["tasks"] == [
        {"limit": 190, "used": None, "read_from": f"{machine.root}{POINT}/pod/pids.max"}
    ]
    assert report["findings"][0]["id"] == "quota-below-one"


@pytest.mark.slow
def test_the_real_command_on_this_machine() -> None:
    program = (
        "import atexit, sys; from intune.cli import main\n"
        "said = lambda: print(sorted({'torch', 'pandas'} & sys.modules.keys()), file=sys.stderr)\n"
        "atexit.register(said); main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stderr == "[]\n"  # torch was not imported for its version
    report = json.loads(run.stdout)
    check_keys(report)
    serious = any(finding["severity"] == "serious" for finding in report["findings"])
    assert run.returncode == int(serious)
    assert report["software"]["intune"] == intune.__version__
    assert report["software"]["python"].split(".")[:2] == list(map(str, sys.version_info[:2]))
    assert report["cpu"]["affinity"] == len(os.sched_getaffinity(0))
    assert report["cpu"]["library_threads"] == 1
    assert report["limits"]["memfd"] is True
    assert 0 < report["memory"]["own_bytes"] < report["memory"]["limit_bytes"]
    assert 0 < report["choices"]["cpus"] <= report["cpu"]["affinity"]


@pytest.mark.slow
def test_gpus_are_asked_for_with_torch() -> None:
    torch = pytest.importorskip("torch")
    gpu = gather(System(), ask_torch=True).gpu
    assert gpu.asked
    assert gpu.torch_cuda == torch.version.cuda
    assert gpu.devices is not None
    assert len(gpu.devices) == torch.cuda.device_count()
