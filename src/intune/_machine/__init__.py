"""What the machine allows and what it is doing: the only place that asks the system.

    system    where to ask (one root folder, the environment, two calls), so that tests can pretend
    cgroups   the control groups that hold this process, from its own up to the root, v1, v2 and both at once
    cpus      CPUs that this process may use: affinity, quota, shared with the other ranks of this host
    limits    threads, processes, open files, shared memory
    memory    the tightest memory limit, and what is used of it
    tree      this process and its descendants, and counters over them that never run backwards
    probe     waiting for a CPU, waiting for the interpreter lock
    meters    all of it over one window, as a MachineSnapshot
    units     sizes as people write them

What cannot be read is None, never 0, and every figure says where it was read.
"""

from intune._machine.cpus import CpuReading, cpu_reading
from intune._machine.limits import (
    FileDescriptors,
    file_descriptors,
    process_limit,
    shared_memory_free_bytes,
    thread_limit,
)
from intune._machine.memory import (
    MemoryLimit,
    MemoryMeter,
    available_memory_bytes,
    memory_limit,
    physical_memory_bytes,
)
from intune._machine.meters import Meter
from intune._machine.probe import LockProbe, run_queue_seconds
from intune._machine.system import Reading, System
from intune._machine.units import parse_bytes

__all__ = [
    "CpuReading",
    "FileDescriptors",
    "LockProbe",
    "MemoryLimit",
    "MemoryMeter",
    "Meter",
    "Reading",
    "System",
    "available_memory_bytes",
    "cpu_reading",
    "file_descriptors",
    "memory_limit",
    "parse_bytes",
    "physical_memory_bytes",
    "process_limit",
    "run_queue_seconds",
    "shared_memory_free_bytes",
    "thread_limit",
]
