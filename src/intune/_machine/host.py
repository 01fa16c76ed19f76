"""What the machine is, whoever uses it: its CPUs, how fast they may run, and what other machines take of them."""

import glob
import os

from intune._machine.cgroups import levels
from intune._machine.system import Reading, System, numbers, read_or_none

_STEAL = 7
"""Field of steal in the line "cpu" of /proc/stat, counted from user = 0; guests, after it, stand in user already."""


def online_cpus(system: System) -> int | None:
    """CPUs of the machine that are switched on, whoever may use them."""
    lines = (read_or_none(system.path("/proc/stat")) or "").splitlines()
    return sum(line.startswith("cpu") and line[3:4].isdecimal() for line in lines) or None


def cpu_model(system: System) -> str | None:
    """What the CPU calls itself."""
    for line in (read_or_none(system.path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return None


def steal_share(system: System) -> Reading:
    """Share of all CPU time since boot that other virtual machines took while this one could have run."""
    file = system.path("/proc/stat")
    words = (read_or_none(file) or "").partition("\n")[0].split()[1:]
    if len(words) <= _STEAL or not all(word.isdecimal() for word in words):
        return Reading(None, f"no steal in {file}")
    ticks = [int(word) for word in words[: _STEAL + 1]]
    return Reading(ticks[_STEAL] / sum(ticks) if sum(ticks) else None, f"steal since boot in {file}")


def frequency_share(system: System) -> Reading:
    """Share of their highest frequency that CPUs may run at: the lowest over the CPUs that say."""
    shares = []
    for folder in glob.glob(glob.escape(system.path("/sys/devices/system/cpu")) + "/cpu[0-9]*/cpufreq"):
        texts = [read_or_none(os.path.join(folder, name)) for name in ("scaling_max_freq", "cpuinfo_max_freq")]
        allowed, highest = ((text or "").strip() for text in texts)
        if allowed.isdecimal() and highest.isdecimal() and int(highest) > 0:
            shares.append(int(allowed) / int(highest))
    pattern = system.path("/sys/devices/system/cpu/cpu*/cpufreq")
    return Reading(min(shares, default=None), f"scaling_max_freq / cpuinfo_max_freq in {pattern}")


def throttled_share(system: System) -> Reading:
    """Share of the periods since its start in which the quota held this process's group back; the worst level's."""
    found: list[tuple[float, str]] = []
    for level in levels(system, "cpu"):
        file = level.file("cpu.stat")
        stat = numbers(read_or_none(file))
        if stat.get("nr_periods"):
            found.append((stat.get("nr_throttled", 0) / stat["nr_periods"], file))
    if not found:
        return Reading(None, "no cpu.stat counts periods")
    share, file = max(found)
    return Reading(share, f"nr_throttled / nr_periods in {file}")


def nvidia_driver(system: System) -> str | None:
    """Version of the NVIDIA driver that is loaded; None where none is."""
    for line in (read_or_none(system.path("/proc/driver/nvidia/version")) or "").splitlines():
        words = line.split()
        if line.startswith("NVRM") and "Module" in line:
            return next((word for word in words if word[:1].isdigit()), None)
    return None
