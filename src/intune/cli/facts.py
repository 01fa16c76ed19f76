"""What `intune doctor` gathers: one frozen value, of which both its text and its JSON are made.

The names of the fields are the keys of the JSON, and stay. None: could not be read, or there is none, as the field
says; never 0. `read_from` has, by field, the file, call or variable that a figure was read from.
"""

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

import intune
from intune._clock import SystemClock
from intune._compose import machine_budget
from intune._machine import (
    Headroom,
    Reading,
    System,
    TaskLimit,
    available_memory_bytes,
    cpu_model,
    file_descriptors,
    frequency_share,
    memfd_works,
    memory_limits,
    nvidia_driver,
    online_cpus,
    own_memory,
    physical_memory_bytes,
    read_cpus,
    shared_memory_bytes,
    shared_memory_free_bytes,
    steal_share,
    swap_bytes,
    task_limits,
    throttled_share,
    used_of_limit,
)
from intune.control.guard import in_flight_limit

SCHEMA = 1

PACKAGES = ("numpy", "pyarrow", "psutil", "cloudpickle", "torch", "typer", "rich")
"""Packages whose versions are looked up, without importing them."""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """CPUs.

    Attributes:
        model: What the CPU calls itself.
        online: CPUs of the machine, whoever may use them.
        affinity: CPUs in this process's affinity mask.
        quota: CPUs that the tightest of its control groups may use; None = no quota.
        local_world_size: Processes of this job on this host that share them.
        cpus: Whole CPUs that count for this process, at least 1.
        library_threads: Threads that OMP_NUM_THREADS, else MKL_NUM_THREADS asks for; None = neither is set.
        throttled_share: Share of its periods in which the quota held the group back, since the group's start.
        steal_share: Share of the CPU time since boot that other virtual machines took.
        frequency_share: Share of their highest frequency that the CPUs may run at.
        problems: What could not be read, in sentences.
        read_from: By field.
    """

    model: str | None
    online: int | None
    affinity: int
    quota: float | None
    local_world_size: int
    cpus: int
    library_threads: int | None
    throttled_share: float | None
    steal_share: float | None
    frequency_share: float | None
    problems: tuple[str, ...]
    read_from: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MemoryLimitFacts:
    """One limit on memory.

    Attributes:
        limit_bytes: The limit.
        used_bytes: What all that it is for use of it now, pages that can be dropped left out.
        read_from: File or call of the limit.
        used_from: File or call of what is used.
    """

    limit_bytes: int
    used_bytes: int | None
    read_from: str
    used_from: str

    @property
    def room_bytes(self) -> int | None:
        """Bytes that are left of it."""
        return None if self.used_bytes is None else max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory, in bytes.

    Attributes:
        physical_bytes: Memory of the machine.
        available_bytes: What of it can be had without swapping.
        limits: Every limit on this process, the tightest first.
        limit_bytes: The tightest; None = none could be read.
        own_bytes: What this process holds itself.
        others_bytes: What else is used of the tightest limit: by other processes of its group, or of the machine.
        room_bytes: What this process may still take: the least that a limit or the machine leaves.
        swap_bytes: Swap of the machine; 0 = it has none.
        swap_used_bytes: What of it is in use.
        read_from: By field.
    """

    physical_bytes: int | None
    available_bytes: int | None
    limits: tuple[MemoryLimitFacts, ...]
    limit_bytes: int | None
    own_bytes: int | None
    others_bytes: int | None
    room_bytes: int | None
    swap_bytes: int | None
    swap_used_bytes: int | None
    read_from: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Tasks, open files, shared memory.

    Attributes:
        tasks: Every limit on threads and processes: `limit`, `used`, `read_from`; empty = there is none.
        descriptors_used: Files open in this process.
        descriptors_limit: The most that may be open (soft limit); None = unlimited.
        descriptors_hard_limit: The most that the soft limit may be raised to; None = unlimited.
        shm_bytes: Size of /dev/shm; None = there is none.
        shm_free_bytes: What is free in it.
        memfd: Whether memory can be shared with worker processes.
    """

    tasks: tuple[TaskLimit, ...]
    descriptors_used: int | None
    descriptors_limit: int | None
    descriptors_hard_limit: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    memfd: bool


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Versions.

    Attributes:
        intune: Of this library.
        python: Of the interpreter.
        packages: By name, the version of each of `PACKAGES`; None = not installed.
        least: By name, the oldest version that this library works with.
    """

    intune: str
    python: str
    packages: Mapping[str, str | None]
    least: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """GPUs.

    Attributes:
        nvidia_driver: Version of the loaded driver; None = none is loaded.
        asked: Whether PyTorch was asked for its devices.
        torch_cuda: Version of CUDA that PyTorch was built with; None = not asked, or built without.
        devices: Names of the CUDA devices that PyTorch sees; None = not asked, or PyTorch cannot be used.
        problem: Why an installed PyTorch cannot be used; None = nothing is known to be wrong with it.
    """

    nvidia_driver: str | None
    asked: bool
    torch_cuda: str | None
    devices: tuple[str, ...] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFacts:
    """What a loader would choose where it is told nothing.

    Attributes:
        cpus: CPUs that it counts on.
        slots: Pieces of CPU work at once.
        max_threads: Threads that it may own.
        max_processes: Worker processes that it may own.
        memory_bytes: Limit for the whole process tree; None = none.
        in_flight_bytes: Bytes that items in flight may hold at the start; None = no limit.
        arrow_allocator: What Arrow allocates with.
    """

    cpus: int
    slots: int
    max_threads: int
    max_processes: int
    memory_bytes: int | None
    in_flight_bytes: int | None
    arrow_allocator: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it.

    Attributes:
        schema: 1; a later number would mean that a field was taken away or changed its meaning.
        cpu: CPUs.
        memory: Memory.
        limits: Tasks, open files, shared memory.
        software: Versions.
        gpu: GPUs.
        choices: What a loader would choose.
    """

    schema: int
    cpu: CpuFacts
    memory: MemoryFacts
    limits: LimitFacts
    software: SoftwareFacts
    gpu: GpuFacts
    choices: ChoiceFacts


def gather(system: System, *, ask_torch: bool = False) -> Facts:
    """Ask the machine.

    Args:
        system: The machine that is asked.
        ask_torch: Import PyTorch, which takes seconds, and ask it for its CUDA devices.
    """
    cpu = _cpu(system)
    return Facts(
        schema=SCHEMA,
        cpu=cpu,
        memory=_memory(system),
        limits=_limits(system),
        software=_software(),
        gpu=_gpu(system, ask_torch),
        choices=_choices(system, cpu.cpus),
    )


def _cpu(system: System) -> CpuFacts:
    reading, problems = read_cpus(system)
    shares = {
        "throttled_share": throttled_share(system),
        "steal_share": steal_share(system),
        "frequency_share": frequency_share(system),
    }
    threads, threads_from = _library_threads(system.environ)
    return CpuFacts(
        model=cpu_model(system),
        online=online_cpus(system),
        affinity=reading.affinity,
        quota=reading.quota,
        local_world_size=reading.local_world_size,
        cpus=reading.cpus,
        library_threads=threads,
        throttled_share=shares["throttled_share"].value,
        steal_share=shares["steal_share"].value,
        frequency_share=shares["frequency_share"].value,
        problems=tuple(problems),
        read_from={
            "model": system.path("/proc/cpuinfo"),
            "online": system.path("/proc/stat"),
            **reading.read_from,
            "library_threads": threads_from,
            **{name: share.read_from for name, share in shares.items()},
        },
    )


def _library_threads(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Threads that numeric libraries are told to use, and by which variable; of "4,2", for nested regions, the 4."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        outer = environ.get(name, "").split(",")[0].strip()
        if outer.isdecimal() and int(outer) > 0:
            return int(outer), name
    return None, "neither OMP_NUM_THREADS nor MKL_NUM_THREADS says a number"


def _memory(system: System) -> MemoryFacts:
    limits = []
    for limit in memory_limits(system):
        if limit.limit_bytes is not None:
            used = used_of_limit(system, limit)
            limits.append(MemoryLimitFacts(limit.limit_bytes, _whole(used), limit.read_from, used.read_from))
    limits.sort(key=lambda each: each.limit_bytes)
    tightest = limits[0] if limits else None
    own = own_memory(system)
    others, others_from = _others(tightest, own)
    available = available_memory_bytes(system)
    rooms = [(each.room_bytes, f"{each.read_from} - {each.used_from}") for each in limits]
    rooms.append((available, "MemAvailable in /proc/meminfo"))
    known = [(room, source) for room, source in rooms if room is not None]
    room, room_from = min(known) if known else (None, "nothing that is left of a limit could be read")
    swap, swap_free = swap_bytes(system)
    return MemoryFacts(
        physical_bytes=physical_memory_bytes(system),
        available_bytes=available,
        limits=tuple(limits),
        limit_bytes=tightest.limit_bytes if tightest else None,
        own_bytes=_whole(own),
        others_bytes=others,
        room_bytes=room,
        swap_bytes=swap,
        swap_used_bytes=None if swap is None or swap_free is None else swap - swap_free,
        read_from={
            "physical_bytes": "MemTotal in /proc/meminfo",
            "available_bytes": "MemAvailable in /proc/meminfo",
            "limit_bytes": tightest.read_from if tightest else "no limit could be read",
            "own_bytes": own.read_from,
            "others_bytes": others_from,
            "room_bytes": room_from,
            "swap_bytes": "SwapTotal in /proc/meminfo",
            "swap_used_bytes": "SwapTotal - SwapFree in /proc/meminfo",
        },
    )


def _others(tightest: MemoryLimitFacts | None, own: Reading) -> tuple[int | None, str]:
    """What is used of the tightest limit beside this process; an address space is for this process alone."""
    if tightest is None or tightest.used_bytes is None or own.value is None:
        return None, "what is used of the tightest limit could not be read"
    if tightest.used_from.startswith("VmSize"):
        return None, f"{tightest.read_from} is for this process alone"
    return max(0, tightest.used_bytes - int(own.value)), f"{tightest.used_from}, less {own.read_from}"


def _limits(system: System) -> LimitFacts:
    descriptors = file_descriptors(system)
    return LimitFacts(
        tasks=tuple(task_limits(system)),
        descriptors_used=descriptors.used,
        descriptors_limit=descriptors.limit,
        descriptors_hard_limit=descriptors.hard_limit,
        shm_bytes=shared_memory_bytes(system),
        shm_free_bytes=shared_memory_free_bytes(system),
        memfd=memfd_works(),
    )


def _software() -> SoftwareFacts:
    least = {}
    for requirement in _requirements():
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", requirement)
        if match is not None and match[1] in PACKAGES:
            least[match[1]] = match[2]
    return SoftwareFacts(
        intune=intune.__version__,
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        least=least,
    )


def _requirements() -> list[str]:
    """What this library says it needs; nothing where it runs without having been installed."""
    try:
        return importlib.metadata.requires("intune") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(system: System, ask_torch: bool) -> GpuFacts:
    driver = nvidia_driver(system)
    if not ask_torch or _version("torch") is None:
        return GpuFacts(driver, ask_torch, None, None)
    try:
        import torch

        names = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    except (ImportError, OSError, RuntimeError) as error:  # a library that does not load, a driver that does not fit
        return GpuFacts(driver, True, None, None, " ".join(str(error).split()))
    return GpuFacts(driver, True, torch.version.cuda, names)


def _choices(system: System, cpus: int) -> ChoiceFacts:
    budget = machine_budget(system, cpus, None)
    uses = Headroom(system, SystemClock()).read_all()
    most = budget.memory_bytes
    return ChoiceFacts(
        cpus=budget.cpus,
        slots=max(1, min(budget.cpus, budget.max_threads)),
        max_threads=budget.max_threads,
        max_processes=budget.max_processes,
        memory_bytes=most,
        in_flight_bytes=min((in_flight_limit(use.limit_bytes, use.used_bytes) for use in uses), default=None),
        arrow_allocator=pa.default_memory_pool().backend_name,
    )


def _whole(reading: Reading) -> int | None:
    return None if reading.value is None else int(reading.value)
