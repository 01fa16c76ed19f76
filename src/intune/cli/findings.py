"""What is wrong with a machine for training, how bad it is, and what to do about it: from facts alone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from intune._words import count, size
from intune.cli.facts import CpuFacts, Facts, GpuFacts, LimitFacts, MemoryFacts, SoftwareFacts

Severity = Literal["serious", "warning", "note"]
"""How bad: training would break or be badly slowed; it may be slowed, or break under load; good to know."""

SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "note")

MEMORY_FULL, MEMORY_TIGHT = 0.9, 0.75
"""Shares of a limit in use. Past the first a loader gets the least that it can work with: it plans with 0.9."""

FEW_DESCRIPTORS, SAFE_DESCRIPTORS = 64, 1024
"""Files that can still be opened, of which a loader and a dataset's files need some tens; and the usual limit."""

SAFE_TASKS = 64
"""Threads that a loader takes where nothing limits them."""

SMALL_SHM_BYTES = 64 * 2**20
"""What Docker gives if it is not told otherwise."""

STEAL_BAD, STEAL_SOME = 0.2, 0.05
THROTTLED = 0.1
SLOWED = 0.8
SWAPPED_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to fix, or to know.

    Attributes:
        id: A fixed name of its kind.
        severity: "serious", "warning" or "note".
        what: What was found, with its figures.
        action: What to do.
    """

    id: str
    severity: Severity
    what: str
    action: str


def findings(facts: Facts) -> tuple[Finding, ...]:
    """All that was found, the worst first."""
    found = [
        *_cpu(facts.cpu),
        *_speed(facts.cpu),
        *_threads(facts.cpu),
        *_memory(facts.memory),
        *_limits(facts.limits),
        *_software(facts.software),
        *_gpu(facts.gpu, facts.software),
    ]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _cpu(cpu: CpuFacts) -> Iterator[Finding]:
    ranks = f", shared by {cpu.local_world_size} processes of the job" if cpu.local_world_size > 1 else ""
    if cpu.quota is not None and cpu.quota / cpu.local_world_size < 1:
        yield Finding(
            "quota-below-one",
            "serious",
            f"the CPU quota is {_cpus(cpu.quota)} ({cpu.read_from['quota']}){ranks}: less than one for a "
            "process, so that all its threads stand still for a part of each period",
            f"give the container at least {_cpus(cpu.local_world_size)} (docker --cpus, limits.cpu, cpu.max)",
        )
    elif cpu.local_world_size > cpu.affinity and not cpu.read_from["cpus"].endswith("split by Slurm"):
        yield Finding(
            "more-ranks-than-cpus",
            "serious",
            f"{cpu.local_world_size} processes of the job ({cpu.read_from['local_world_size']}) share "
            f"{_cpus(cpu.affinity)}: they take turns",
            f"start no more processes than the {_cpus(cpu.affinity)} that they have, or give the job more",
        )
    if cpu.quota is not None and cpu.affinity < cpu.quota:
        yield Finding(
            "affinity-below-quota",
            "warning",
            f"the quota allows {_cpus(cpu.quota)}, but the affinity mask has only {cpu.affinity}",
            "widen the mask (taskset, cpuset.cpus, numactl, the launcher's binding), or expect no more than it allows",
        )
    for problem in cpu.problems:
        yield Finding(
            "cpus-unreadable", "warning", problem, f"pass cpus= (--cpus) if {cpu.cpus} is not what this process has"
        )


def _speed(cpu: CpuFacts) -> Iterator[Finding]:
    if cpu.throttled_share is not None and cpu.throttled_share >= THROTTLED:
        yield Finding(
            "throttled",
            "warning",
            f"the CPU quota held this group back in {cpu.throttled_share:.0%} of all periods so far",
            "raise the quota, or run fewer threads than it has CPUs (OMP_NUM_THREADS, --cpus)",
        )
    if cpu.steal_share is not None and cpu.steal_share >= STEAL_SOME:
        yield Finding(
            "steal",
            "serious" if cpu.steal_share >= STEAL_BAD else "warning",
            f"other virtual machines took {cpu.steal_share:.0%} of the CPU time since boot",
            "move to a host that is not oversold, or to an instance with dedicated CPUs",
        )
    if cpu.frequency_share is not None and cpu.frequency_share < SLOWED:
        yield Finding(
            "frequency-capped",
            "warning",
            f"CPUs may run at {cpu.frequency_share:.0%} of their highest frequency only",
            "lift the cap (cpupower frequency-set --max, the power profile, the firmware's settings)",
        )


def _threads(cpu: CpuFacts) -> Iterator[Finding]:
    """PyTorch, OpenMP and BLAS start a thread for each CPU of the mask, unless a variable says how many."""
    fix = f"set OMP_NUM_THREADS={cpu.cpus} before Python starts, or call torch.set_num_threads({cpu.cpus})"
    if cpu.library_threads is not None:
        if cpu.library_threads > cpu.cpus:
            yield Finding(
                "threads-oversubscribed",
                "serious" if cpu.library_threads >= 4 * cpu.cpus else "warning",
                f"{cpu.read_from['library_threads']} asks for {cpu.library_threads} threads, but this process has "
                f"{_cpus(cpu.cpus)}",
                fix,
            )
    elif cpu.affinity > cpu.cpus:
        many = cpu.local_world_size > 1
        why = f"each of {cpu.local_world_size} ranks" if many else "this process"
        yield Finding(
            "threads-oversubscribed",
            "serious" if many else "warning",
            f"OMP_NUM_THREADS is not set: {why} will compute with up to {cpu.affinity} threads on {_cpus(cpu.cpus)}",
            fix,
        )


def _memory(memory: MemoryFacts) -> Iterator[Finding]:
    if memory.limit_bytes is None:
        yield Finding(
            "memory-unknown",
            "warning",
            "no limit on memory could be read, so that none is kept to",
            'pass memory= (--memory), for example "24GiB"',
        )
    rooms = [(each.room_bytes / each.limit_bytes, each) for each in memory.limits if each.room_bytes is not None]
    if rooms:
        free, limit = min(rooms, key=lambda pair: pair[0])
        if free <= 1 - MEMORY_TIGHT:
            yield Finding(
                "memory-nearly-used",
                "serious" if free <= 1 - MEMORY_FULL else "warning",
                f"{size(limit.used_bytes)} of {size(limit.limit_bytes)} are in use ({limit.read_from})",
                "end what else runs in it, or raise the limit (docker --memory, Kubernetes limits.memory, memory.max)",
            )
    if memory.swap_used_bytes is not None and memory.swap_used_bytes >= SWAPPED_BYTES:
        yield Finding(
            "swapped",
            "warning",
            f"{size(memory.swap_used_bytes)} of the machine's memory are swapped out",
            "free memory before training: what comes back from swap comes at the speed of a disk",
        )


def _limits(limits: LimitFacts) -> Iterator[Finding]:
    yield from _descriptors(limits)
    for task in limits.tasks:
        room = task.limit - (task.used or 0)
        if room < 2 * SAFE_TASKS:
            more = count(max(0, room), "more thread or process", "more threads or processes")
            yield Finding(
                "tasks-few",
                "serious" if room < SAFE_TASKS // 4 else "warning",
                f"only {more} may start ({task.read_from} is {task.limit:,})",
                "raise the limit (docker --pids-limit, ulimit -u), or end what else runs under it",
            )
    if not limits.memfd:
        yield Finding(
            "memfd-missing",
            "serious",
            'memfd_create does not work here: stages with executor="process" cannot start',
            "allow the system call in the sandbox's seccomp profile, or use threads only",
        )
    if limits.shm_bytes is not None and limits.shm_bytes <= SMALL_SHM_BYTES:
        yield Finding(
            "shm-small",
            "warning",
            f"/dev/shm has {size(limits.shm_bytes)}: this library does not use it, but NCCL between GPUs and the "
            "worker processes of torch.utils.data.DataLoader do",
            "give the container more if you use those (docker --shm-size=8g, an emptyDir of medium Memory)",
        )


def _descriptors(limits: LimitFacts) -> Iterator[Finding]:
    most, hard = limits.descriptors_limit, limits.descriptors_hard_limit
    if most is None:
        return
    left = most - (limits.descriptors_used or 0)
    if left >= FEW_DESCRIPTORS and most >= SAFE_DESCRIPTORS:
        return
    target = 65_536 if hard is None else min(65_536, hard)
    action = (
        f"ulimit -n {target} before the start"
        if target > most
        else f"raise the hard limit, which is {most:,} too (docker --ulimit nofile=65536, limits.conf)"
    )
    yield Finding(
        "descriptors-few",
        "serious" if left < FEW_DESCRIPTORS else "warning",
        f"{count(max(0, left), 'more file')} may be opened, of {most:,}",
        action,
    )


def _software(software: SoftwareFacts) -> Iterator[Finding]:
    for name, least in software.least.items():
        version = software.packages.get(name)
        if version is not None and _numbers(version) < _numbers(least):
            yield Finding(
                "old-version",
                "serious",
                f"{name} is {version}; this library needs {least} or newer",
                f'pip install "{name}>={least}"',
            )
    if software.packages.get("torch") is None:
        yield Finding(
            "no-torch",
            "note",
            "PyTorch is not installed: to_torch and `intune train` need it",
            'pip install "intune[torch]"',
        )


def _gpu(gpu: GpuFacts, software: SoftwareFacts) -> Iterator[Finding]:
    if gpu.problem is not None:
        yield Finding(
            "torch-broken",
            "serious",
            f"PyTorch is installed but cannot be used: {gpu.problem}",
            "install it anew, in a build that fits this machine: https://pytorch.org/get-started/locally/",
        )
    if gpu.nvidia_driver is None or gpu.devices != () or software.packages.get("torch") is None:
        return
    if gpu.torch_cuda is None:
        what, action = "was built without CUDA", "install a CUDA build: https://pytorch.org/get-started/locally/"
    else:
        what = f"(built for CUDA {gpu.torch_cuda}) sees no device"
        action = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all"
    yield Finding(
        "gpu-unused", "serious", f"the NVIDIA driver {gpu.nvidia_driver} is loaded, but PyTorch {what}", action
    )


def _cpus(number: float) -> str:
    return "1 CPU" if number == 1 else f"{round(number, 2):g} CPUs"


def _numbers(version: str) -> tuple[int, ...]:
    """The release in a version: "2.13.0+cpu" -> (2, 13)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
