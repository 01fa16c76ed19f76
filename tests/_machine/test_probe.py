"""Waiting for a CPU and waiting for the interpreter lock."""

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from intune._clock import SystemClock
from intune._machine import LockProbe, System, run_queue_seconds

SCHEDSTAT = "/proc/thread-self/schedstat"
NEEDS_SCHEDSTAT = pytest.mark.skipif(
    run_queue_seconds(System()) is None, reason="this kernel keeps no run-queue times (/proc/PID/schedstat)"
)


class Script:
    """A clock whose sleeps overshoot as a test says: (overshoot, of that in the run queue), in seconds."""

    def __init__(self, machine: Any, sleeps: list[tuple[float, float]]) -> None:
        self._machine = machine
        self._sleeps = list(sleeps)
        self._queued = 1.0
        self._wall = 50.0
        self.done = threading.Event()
        self.asked: list[float] = []
        self._write()

    def _write(self) -> None:
        self._machine.write(SCHEDSTAT, f"123456 {round(self._queued * 1e9)} 77\n")

    def wall(self) -> float:
        return self._wall

    def cpu(self) -> float:
        raise AssertionError("the probe has no use for CPU time")

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        self.asked.append(seconds)
        if not self._sleeps:
            self.done.set()
            return wake.wait(60)
        overshoot, queued = self._sleeps.pop(0)
        self._wall += seconds + overshoot
        self._queued += queued
        self._write()
        return False


def mean(machine: Any, sleeps: list[tuple[float, float]]) -> float | None:
    clock = Script(machine, sleeps)
    probe = LockProbe(machine.system(), clock, sleep_seconds=0.25)
    probe.start()
    assert clock.done.wait(60)
    found = probe.mean_wait_seconds()
    assert probe.mean_wait_seconds() is None  # the next window has no samples yet
    probe.stop()
    assert set(clock.asked) == {0.25}
    return found


def test_the_overshoot_is_the_wait_for_the_lock(machine: Any) -> None:
    assert mean(machine, [(0.004, 0.0), (0.002, 0.0), (0.0, 0.0)]) == pytest.approx(0.002)


def test_the_wait_for_a_cpu_is_not(machine: Any) -> None:
    assert mean(machine, [(0.010, 0.007), (0.005, 0.005)]) == pytest.approx(0.0015)


def test_more_time_in_the_run_queue_than_overshot_is_no_negative_wait(machine: Any) -> None:
    assert mean(machine, [(0.001, 0.002), (0.003, 0.0)]) == pytest.approx(0.0015)


@pytest.mark.parametrize("text", [None, "", "0\n"])
def test_without_run_queue_times_there_is_no_figure(machine: Any, text: str | None) -> None:
    clock = SystemClock()
    if text is not None:
        machine.write(SCHEDSTAT, text)
    assert run_queue_seconds(machine.system()) is None
    probe = LockProbe(machine.system(), clock, sleep_seconds=0.0)
    probe.start()
    probe.stop()
    assert probe.mean_wait_seconds() is None


def test_stop_does_not_wait_for_the_sleep_and_both_may_be_called_twice() -> None:
    probe = LockProbe(System(), SystemClock(), sleep_seconds=3600)
    before = threading.active_count()
    probe.stop()
    probe.start()
    probe.start()
    assert threading.active_count() == before + 1
    probe.stop()
    probe.stop()
    assert threading.active_count() == before
    probe.start()
    probe.stop()


class Counting(SystemClock):
    """The real clock, with an event that is set after some sleeps; the one after them lasts until it is woken."""

    def __init__(self, sleeps: int) -> None:
        self.enough = threading.Event()
        self._left = sleeps

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        if self._left == 0:
            self.enough.set()
            return wake.wait(60)
        self._left -= 1
        return super().sleep(seconds, wake)


@NEEDS_SCHEDSTAT
@pytest.mark.slow
def test_a_thread_that_keeps_the_lock_is_seen() -> None:
    clock = Counting(sleeps=10)
    probe = LockProbe(System(), clock, sleep_seconds=0.001)

    def keep() -> None:
        while not clock.enough.is_set():
            sum(range(1000))

    keeper = threading.Thread(target=keep)
    keeper.start()
    probe.start()
    assert clock.enough.wait(60)
    keeper.join()
    found = probe.mean_wait_seconds()
    probe.stop()
    assert found is not None
    # A thread gives the lock up only when another has asked for it for a switch interval.
    assert found > sys.getswitchinterval() / 2


def test_run_queue_of_a_given_thread(machine: Any) -> None:
    machine.write("/proc/self/task/4711/schedstat", "5 2500000000 1\n")
    assert run_queue_seconds(machine.system(), 4711) == 2.5
    assert run_queue_seconds(machine.system(), 4712) is None
    assert run_queue_seconds(machine.system()) is None


@NEEDS_SCHEDSTAT
@pytest.mark.slow
def test_two_that_share_a_cpu_wait_for_it() -> None:
    mask = os.sched_getaffinity(0)
    one = min(mask)
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); print(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rival:
        assert rival.stdout is not None
        rival.stdout.readline()
        try:
            os.sched_setaffinity(0, {one})
            read = (System(), None), (System(), threading.get_native_id()), (System(), None)
            before, by_id, again = (run_queue_seconds(*of_whom) for of_whom in read)
            assert before is not None
            assert by_id is not None
            assert again is not None
            assert before <= by_id <= again  # it waits between the readings, too
            begun = time.thread_time()
            while time.thread_time() < begun + 0.1:
                pass
            after = run_queue_seconds(System())
        finally:
            os.sched_setaffinity(0, mask)
            rival.kill()
    assert after is not None
    assert after - before > 0.02
