"""What the machine allows and what it is doing: the only place that asks the system.

    system    where to ask (one root folder, the environment, two calls), so that tests can pretend
    cgroups   the control groups that hold this process, from its own up to the root, v1, v2 and both at once
    cpus      CPUs that this process may use: affinity, quota, shared with the other ranks of this host
    limits    threads, processes, open files, shared memory
    memory    the tightest memory limit, and what is used of it
    headroom  every memory limit with its use, and which is nearest to being reached
    host      CPUs of the whole machine: how many, how fast, how much of them others take
    tree      this process and its descendants, and counters over them that never run backwards
    probe     waiting for a CPU, waiting for the interpreter lock
    meters    all of it over one window, as a MachineSnapshot
    units     sizes and shares as people write them

What cannot be read is None, never 0, and every figure says where it was read.
"""

from intune._machine.cpus import CpuReading, cpu_reading, read_cpus
from intune._machine.headroom import Headroom
from intune._machine.host import (
    cpu_model,
    frequency_share,
    nvidia_driver,
    online_cpus,
    steal_share,
    throttled_share,
)
from intune._machine.limits import (
    FileDescriptors,
    TaskLimit,
    file_descriptors,
    memfd_works,
    process_limit,
    shared_memory_bytes,
    shared_memory_free_bytes,
    task_limits,
    thread_limit,
)
from intune._machine.memory import (
    MemoryLimit,
    MemoryMeter,
    available_memory_bytes,
    memory_limit,
    memory_limits,
    own_memory,
    physical_memory_bytes,
    swap_bytes,
    used_of_limit,
)
from intune._machine.meters import Meter
from intune._machine.probe import LockProbe, run_queue_seconds
from intune._machine.system import Reading, System
from intune._machine.units import parse_bytes, parse_share

__all__ = [
    "CpuReading",
    "FileDescriptors",
    "Headroom",
    "LockProbe",
    "MemoryLimit",
    "MemoryMeter",
    "Meter",
    "Reading",
    "System",
    "TaskLimit",
    "available_memory_bytes",
    "cpu_model",
    "cpu_reading",
    "file_descriptors",
    "frequency_share",
    "memfd_works",
    "memory_limit",
    "memory_limits",
    "nvidia_driver",
    "online_cpus",
    "own_memory",
    "parse_bytes",
    "parse_share",
    "physical_memory_bytes",
    "process_limit",
    "read_cpus",
    "run_queue_seconds",
    "shared_memory_bytes",
    "shared_memory_free_bytes",
    "steal_share",
    "swap_bytes",
    "task_limits",
    "thread_limit",
    "throttled_share",
    "used_of_limit",
]
