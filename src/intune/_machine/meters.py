"""All that can be measured of the machine over one window."""

import os
from collections.abc import Mapping

from intune._clock import Clock
from intune._machine.cgroups import levels
from intune._machine.cpus import read_cpus
from intune._machine.headroom import Headroom, nearest
from intune._machine.memory import own_memory
from intune._machine.probe import LockProbe
from intune._machine.system import Reading, System, numbers, read_or_none
from intune._machine.tree import Count, Key, Process, TreeCounter
from intune._values import MachineSnapshot

_BUSY_FIELDS = (1, 2, 3, 6, 7)
"""user, nice, system, irq, softirq in /proc/stat. Guests stand in user; steal is what other machines took."""


class Meter:
    """Turns counters that only grow into figures of one window. Not safe for several threads at once.

    Attributes:
        cpus: CPUs that this process may use, as read when the last window was closed.
    """

    def __init__(
        self, system: System, clock: Clock, headroom: Headroom | None = None, probe: LockProbe | None = None
    ) -> None:
        """Begin the first window.

        Args:
            system: The machine that is asked.
            clock: For the length of windows.
            headroom: Says what memory there is and what is used of it; None = the machine's.
            probe: A probe of the interpreter lock that the caller starts and stops; None = no such figure.
        """
        self.cpus = 1
        self._headroom = headroom or Headroom(system, clock)
        self._system = system
        self._clock = clock
        self._probe = probe
        self._pid = os.getpid()
        self._cpu, self._io = TreeCounter(), TreeCounter()
        self._all, self._throttled, self._pressure = _Growth(), _Growth(), _Growth()
        self._wall = clock.wall()
        self.window()

    def window(self) -> MachineSnapshot:
        """Close the window that began at the last call, or when this was made, and say what happened in it.

        `throttled_seconds` is summed over CPUs: two CPUs held back for a second are two.
        """
        wall = self._clock.wall()
        seconds, self._wall = wall - self._wall, wall
        cpus, problems = read_cpus(self._system)
        self.cpus = cpus.cpus
        members = self._headroom.meter.members()
        uses = self._headroom.read_all()
        memory = nearest(uses)
        unknown = "no memory limit could be read together with what is used of it"
        readings = {
            "cpu_seconds_used": self._cpu_used(members),
            "cpu_seconds_all": self._cpu_all(),
            "throttled_seconds": self._throttled_seconds(),
            "pressure_share": self._pressure_share(seconds),
            "lock_wait_seconds": self._lock_wait(),
            "read_bytes": self._read_bytes(members),
            "own_memory_bytes": own_memory(self._system),
        }
        figures = {name: reading.value for name, reading in readings.items()}
        return MachineSnapshot(
            cpus=cpus.cpus,
            cpu_seconds_used=figures["cpu_seconds_used"],
            cpu_seconds_all=figures["cpu_seconds_all"],
            throttled_seconds=figures["throttled_seconds"],
            pressure_share=figures["pressure_share"],
            lock_wait_seconds=figures["lock_wait_seconds"],
            read_bytes=_whole(figures["read_bytes"]),
            memory_bytes=memory.used_bytes if memory else None,
            memory_limit_bytes=memory.limit_bytes if memory else None,
            memory_used_by=memory.used_by if memory else "",
            own_memory_bytes=_whole(figures["own_memory_bytes"]),
            memory=tuple(uses),
            read_from={
                "cpus": "; ".join([cpus.read_from["cpus"], *problems]),
                "memory_bytes": memory.used_from if memory else unknown,
                "memory_limit_bytes": memory.limit_from if memory else unknown,
                **{name: reading.read_from for name, reading in readings.items()},
            },
        )

    def _cpu_used(self, members: Mapping[Key, Process]) -> Reading:
        counts = {key: Count(process.own_ticks, process.reaped_ticks) for key, process in members.items()}
        ticks = self._cpu.growth(members, counts)
        if not members:
            return Reading(None, "own /proc/PID/stat cannot be read")
        return Reading(_seconds(ticks), f"/proc/PID/stat of {len(members)} processes and those that they waited for")

    def _cpu_all(self) -> Reading:
        file = self._system.path("/proc/stat")
        words = (read_or_none(file) or "").partition("\n")[0].split()
        known = len(words) > max(_BUSY_FIELDS) and words[0] == "cpu"
        ticks = self._all.since({file: sum(int(words[at]) for at in _BUSY_FIELDS)} if known else {})
        return Reading(None if ticks is None else _seconds(ticks), file)

    def _throttled_seconds(self) -> Reading:
        found = {}
        for level in levels(self._system, "cpu"):
            name, unit = ("throttled_usec", 1e-6) if level.version == 2 else ("throttled_time", 1e-9)
            stat = numbers(read_or_none(level.file("cpu.stat")))
            if name in stat:
                found[level.file("cpu.stat")] = stat[name] * unit
        return Reading(self._throttled.since(found), " + ".join(found) or "no cpu.stat tells of throttling")

    def _pressure_share(self, seconds: float) -> Reading:
        # The own group's pressure says what holds us back; the machine's is second best.
        own = [level.file("cpu.pressure") for level in levels(self._system, "cpu") if level.version == 2][:1]
        for file in [*own, self._system.path("/proc/pressure/cpu")]:
            total = _pressure_micros(read_or_none(file))
            if total is not None:
                micros = self._pressure.since({file: total})
                share = None if micros is None or seconds <= 0 else min(1.0, micros * 1e-6 / seconds)
                return Reading(share, f"some in {file}")
        self._pressure.since({})
        return Reading(None, "no cpu.pressure file")

    def _lock_wait(self) -> Reading:
        if self._probe is None:
            return Reading(None, "no probe thread")
        return Reading(self._probe.mean_wait_seconds(), "probe thread: late by, less /proc/thread-self/schedstat")

    def _read_bytes(self, members: Mapping[Key, Process]) -> Reading:
        texts = {key: read_or_none(self._system.path(f"/proc/{key.pid}/io")) for key in members}
        found = {key: numbers(text) for key, text in texts.items()}
        # What children that were waited for have read stands in their parent's figure.
        counts = {key: Count(0, number["read_bytes"]) for key, number in found.items() if "read_bytes" in number}
        grown = self._io.growth(members, counts)
        if not any(key.pid == self._pid for key in counts):
            return Reading(None, "own /proc/PID/io cannot be read")
        return Reading(grown, f"/proc/PID/io of {len(counts)} of {len(members)} processes")


class _Growth:
    """Growth of counters, each known by the file that it was read from."""

    def __init__(self) -> None:
        self._last: Mapping[str, float] = {}

    def since(self, now: Mapping[str, float]) -> float | None:
        """Growth since the last call, summed over the files read both times; None if there is none."""
        before, self._last = self._last, now
        both = [file for file in now if file in before]
        return sum(max(0.0, now[file] - before[file]) for file in both) if both else None


def _whole(figure: float | None) -> int | None:
    return None if figure is None else int(figure)


def _seconds(ticks: float) -> float:
    return ticks / os.sysconf("SC_CLK_TCK")


def _pressure_micros(text: str | None) -> int | None:
    """Microseconds in which some task waited for a CPU, from "some avg10=.. avg60=.. avg300=.. total=123"."""
    for line in (text or "").splitlines():
        words = line.split()
        if words and words[0] == "some" and words[-1].startswith("total=") and words[-1][6:].isdecimal():
            return int(words[-1][6:])
    return None
