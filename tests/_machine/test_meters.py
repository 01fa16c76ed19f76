"""All that can be measured of the machine over one window."""

import os
import resource
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from intune._clock import SystemClock
from intune._machine import Headroom, LockProbe, Meter, System, run_queue_seconds
from intune._values import MachineSnapshot

ME = os.getpid()
TICK = 1 / os.sysconf("SC_CLK_TCK")
POINT = "/sys/fs/cgroup"
FIGURES = {field.name for field in fields(MachineSnapshot)} - {"read_from", "memory", "memory_used_by"}


def process(machine: Any, *, ticks: int = 0, read_bytes: int | None = 0, children: str = "") -> None:
    machine.write(f"/proc/{ME}/stat", f"{ME} (x) S 1 " + "0 " * 9 + f"{ticks} 0 0 0 0 0 0 0 7 0\n")
    machine.write(f"/proc/{ME}/task/{ME}/children", children)
    machine.write(f"/proc/{ME}/status", "RssAnon:\t100 kB\nRssShmem:\t0 kB\n")
    machine.write(f"/proc/{ME}/smaps_rollup", "Pss:  120 kB\n")
    if read_bytes is not None:
        machine.write(f"/proc/{ME}/io", f"rchar: 99\nread_bytes: {read_bytes}\nwrite_bytes: 5\n")


def pressure(micros: int) -> str:
    return f"some avg10=1.00 avg60=0.00 avg300=0.00 total={micros}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"


def test_what_cannot_be_read_is_none_and_says_so(machine: Any, clock: Any) -> None:
    window = Meter(machine.system(affinity=5), clock).window()
    assert window.cpus == 5
    assert {name for name in FIGURES if getattr(window, name) is None} == FIGURES - {"cpus"}
    assert set(window.read_from) == FIGURES
    assert "no CPU quota file" in window.read_from["cpus"]
    assert all(window.read_from.values())


def test_cpu_seconds_of_the_window_only(machine: Any, clock: Any) -> None:
    machine.write("/proc/stat", "cpu  100 10 50 900 77 5 5 66 40 0\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 1\n")
    process(machine, ticks=1000)
    meter = Meter(machine.system(), clock)
    process(machine, ticks=1150)
    # Idle, waiting for disks, stolen and guest (counted in user already) are not ours to count.
    machine.write("/proc/stat", "cpu  200 20 60 999 99 6 9 88 99 9\n")
    window = meter.window()
    assert window.cpu_seconds_used == pytest.approx(150 * TICK)
    assert window.cpu_seconds_all == pytest.approx(125 * TICK)
    window = meter.window()
    assert (window.cpu_seconds_used, window.cpu_seconds_all) == (0, 0)
    assert window.read_from["cpu_seconds_all"] == f"{machine.root}/proc/stat"


def test_read_bytes(machine: Any, clock: Any) -> None:
    process(machine, read_bytes=5000)
    meter = Meter(machine.system(), clock)
    process(machine, read_bytes=7000)
    assert meter.window().read_bytes == 2000
    (machine.root / f"proc/{ME}/io").unlink()
    window = meter.window()
    assert window.read_bytes is None
    assert "cannot be read" in window.read_from["read_bytes"]


def test_what_an_ended_child_had_read_is_not_counted_again_with_its_parent(machine: Any, clock: Any) -> None:
    process(machine, read_bytes=5000, children=f"{ME + 1}")
    child = machine.root / f"proc/{ME + 1}/stat"
    machine.write(f"/proc/{ME + 1}/stat", f"{ME + 1} (x) S {ME} " + "0 " * 17 + "7 0\n")
    machine.write(f"/proc/{ME + 1}/io", "read_bytes: 100\n")
    meter = Meter(machine.system(), clock)
    machine.write(f"/proc/{ME + 1}/io", "read_bytes: 900\n")
    assert meter.window().read_bytes == 800
    child.unlink()
    process(machine, read_bytes=5000 + 950)  # 50 more before it ended
    assert meter.window().read_bytes == 50


def test_read_bytes_of_some_processes_only_says_so(machine: Any, clock: Any) -> None:
    process(machine, children=f"{ME + 1}")
    machine.write(f"/proc/{ME + 1}/stat", f"{ME + 1} (x) S {ME} " + "0 " * 17 + "7 0\n")
    assert Meter(machine.system(), clock).window().read_from["read_bytes"] == "/proc/PID/io of 1 of 2 processes"


def test_throttled_seconds_are_summed_over_levels(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/a")
    machine.level(POINT, {"cpu.max": "max 1000\n", "cpu.stat": "usage_usec 9\nthrottled_usec 500000\n"})
    machine.level(f"{POINT}/a", {"cpu.max": "max 1000\n", "cpu.stat": "throttled_usec 0\n"})
    meter = Meter(machine.system(), clock)
    machine.level(POINT, {"cpu.stat": "usage_usec 9\nthrottled_usec 750000\n"})
    machine.level(f"{POINT}/a", {"cpu.stat": "throttled_usec 1000000\n"})
    window = meter.window()
    assert window.throttled_seconds == pytest.approx(1.25)
    files = [f"{machine.root}{POINT}/a/cpu.stat", f"{machine.root}{POINT}/cpu.stat"]
    assert window.read_from["throttled_seconds"] == " + ".join(files)


def test_throttled_seconds_in_nanoseconds_of_v1(machine: Any, clock: Any) -> None:
    machine.mount("cpu", f"{POINT}/cpu")
    machine.write(f"{POINT}/cpu/cpu.stat", "nr_periods 1\nthrottled_time 1000000000\n")
    meter = Meter(machine.system(), clock)
    machine.write(f"{POINT}/cpu/cpu.stat", "nr_periods 1\nthrottled_time 1500000000\n")
    assert meter.window().throttled_seconds == pytest.approx(0.5)


def test_throttled_seconds_after_a_move_to_another_group(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/a")
    for group, micros in (("a", 5), ("b", 9_000_000)):
        machine.level(f"{POINT}/{group}", {"cpu.max": "max 1000\n", "cpu.stat": f"throttled_usec {micros}\n"})
    meter = Meter(machine.system(), clock)
    machine.write("/proc/self/cgroup", "0::/b\n")
    assert meter.window().throttled_seconds is None  # what b was held back before is not ours
    assert meter.window().throttled_seconds == 0


@pytest.mark.parametrize(("micros", "share"), [(0, 0.0), (500_000, 0.25), (2_000_000, 1.0), (2_000_900, 1.0)])
def test_pressure_share_of_the_window(machine: Any, clock: Any, micros: int, share: float) -> None:
    machine.write("/proc/pressure/cpu", pressure(1_000))
    meter = Meter(machine.system(), clock)
    machine.write("/proc/pressure/cpu", pressure(1_000 + micros))
    clock.wall_seconds += 2.0
    window = meter.window()
    assert window.pressure_share == pytest.approx(share)
    assert window.read_from["pressure_share"] == f"some in {machine.root}/proc/pressure/cpu"
    assert meter.window().pressure_share is None  # a window of no length


def test_pressure_on_the_own_group_where_the_kernel_tells_it(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT, group="/a")
    machine.level(f"{POINT}/a", {"cpu.max": "max 1000\n", "cpu.pressure": pressure(0)})
    machine.write("/proc/pressure/cpu", pressure(0))
    meter = Meter(machine.system(), clock)
    machine.level(f"{POINT}/a", {"cpu.pressure": pressure(100_000)})
    machine.write("/proc/pressure/cpu", pressure(900_000))
    clock.wall_seconds += 1.0
    window = meter.window()
    assert window.pressure_share == pytest.approx(0.1)
    assert window.read_from["pressure_share"] == f"some in {machine.root}{POINT}/a/cpu.pressure"


def test_memory_and_its_limit(machine: Any, clock: Any) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"cpu.max": "300000 100000\n", "memory.max": "1000\n", "memory.stat": "anon 700\nshmem 30\n"})
    meter = Meter(machine.system(), clock)
    window = meter.window()
    assert meter.cpus == 3
    assert (window.cpus, window.memory_bytes, window.memory_limit_bytes) == (3, 730, 1000)
    machine.level(POINT, {"cpu.max": "200000 100000\n", "memory.max": "900\n"})
    window = meter.window()
    assert (window.cpus, window.memory_limit_bytes) == (2, 900)
    assert window.read_from["memory_limit_bytes"] == f"{machine.root}{POINT}/memory.max"
    assert window.memory_bytes == 730
    assert meter.cpus == 2


def test_memory_is_what_the_headroom_says(machine: Any, clock: Any) -> None:
    """A limit that the user chose is compared too."""
    machine.mount("v2", POINT)
    machine.level(POINT, {"memory.max": f"{2**30}\n", "memory.stat": "anon 700\nshmem 30\n"})
    process(machine)
    system = machine.system()
    window = Meter(system, clock, Headroom(system, clock, lambda: 2**20)).window()
    assert (window.memory_bytes, window.memory_limit_bytes) == (120 * 1024, 2**20)
    assert window.read_from["memory_limit_bytes"] == "the loader's memory="
    assert window.read_from["memory_bytes"].startswith("Pss in /proc/PID/smaps_rollup of 1 processes")


@pytest.mark.skipif(run_queue_seconds(System()) is None, reason="this kernel keeps no run-queue times")
def test_lock_wait_of_a_real_probe() -> None:
    sampled = threading.Event()

    class Clock(SystemClock):
        sleeps = 0

        def sleep(self, seconds: float, wake: threading.Event) -> bool:
            self.sleeps += 1
            if self.sleeps == 3:  # two samples are in
                sampled.set()
            return super().sleep(seconds, wake)

    clock = Clock()
    probe = LockProbe(System(), clock, sleep_seconds=0.001)
    meter = Meter(System(), clock, probe=probe)
    assert meter.window().lock_wait_seconds is None
    probe.start()
    assert sampled.wait(60)
    window = meter.window()
    probe.stop()
    assert window.lock_wait_seconds is not None
    assert window.lock_wait_seconds >= 0


BURN = "import time\nwhile time.process_time() < 0.15: pass\n"


def burn(then: str = "") -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", BURN + then], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def cpu_seconds() -> float:
    """CPU seconds of this process and the children that it has waited for, by another way."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.mark.slow
def test_real_children_that_live_on_end_and_come_between_windows() -> None:
    before = cpu_seconds()
    meter = Meter(System(), SystemClock())
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])\n"
    long_lived = burn("print(1, flush=True); input()\n" + grandchild)
    assert long_lived.stdout is not None
    long_lived.stdout.readline()
    first = meter.window()
    short_lived = burn()
    short_lived.communicate()  # born, ended and waited for within one window
    second = meter.window()
    long_lived.communicate(b"\n")  # seen before; burns again in a child of its own, then ends
    third = meter.window()
    used = [window.cpu_seconds_used for window in (first, second, third)]
    assert all(seconds is not None and seconds >= 0.14 for seconds in used), used
    # Nothing twice, nothing lost: two clock ticks of rounding for each process, some work before and after.
    assert sum(filter(None, used)) == pytest.approx(cpu_seconds() - before, abs=0.1)
    assert first.read_from["cpu_seconds_used"].startswith("/proc/PID/stat of 2 processes")


@pytest.mark.slow
def test_a_child_that_is_killed_does_not_make_the_figure_negative() -> None:
    meter = Meter(System(), SystemClock())
    child = burn("print(1, flush=True); input()")
    assert child.stdout is not None
    child.stdout.readline()
    own = resource.getrusage(resource.RUSAGE_SELF)
    meter.window()
    child.kill()
    child.communicate()
    used = meter.window().cpu_seconds_used
    now = resource.getrusage(resource.RUSAGE_SELF)
    assert used is not None
    assert 0 <= used < 0.14 + now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime


@pytest.mark.slow
def test_real_bytes_read_from_storage_by_a_child_that_has_ended(tmp_path: Path) -> None:
    size = 2**21
    file = tmp_path / "data"
    with file.open("wb") as out:
        out.write(os.urandom(size))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    meter = Meter(System(), SystemClock())
    program = (
        "import sys\nbefore = int(open('/proc/self/io').read().split('read_bytes: ')[1].split()[0])\n"
        "open(sys.argv[1], 'rb').read()\n"
        "print(int(open('/proc/self/io').read().split('read_bytes: ')[1].split()[0]) - before)"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program, file], capture_output=True, check=True)
    window = meter.window()
    if int(run.stdout) < size:
        pytest.skip(f"reading {file} did not reach a disk (a file system in memory?)")
    assert window.read_bytes is not None
    assert window.read_bytes >= size
    again = meter.window().read_bytes
    assert again is not None
    assert again < size
