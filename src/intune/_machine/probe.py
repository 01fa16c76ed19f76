"""What a thread waits for: a CPU (the run queue), and the interpreter lock."""

import os
import threading
from collections.abc import Generator

from intune._clock import Clock
from intune._machine.system import System, read_or_none
from intune._periodic import Periodic


def run_queue_seconds(system: System, thread_id: int | None = None) -> float | None:
    """Seconds in its life that a thread could have run but had no CPU; None if the kernel does not say.

    Args:
        system: The machine that is asked.
        thread_id: Native id of a thread of this process; None = the calling thread.
    """
    thread = "thread-self" if thread_id is None else f"self/task/{thread_id}"
    return _queued_seconds(read_or_none(system.path(f"/proc/{thread}/schedstat")) or "")


def _queued_seconds(schedstat: str) -> float | None:
    words = schedstat.split()
    return int(words[1]) / 1e9 if len(words) >= 2 else None


class LockProbe:
    """A daemon thread that measures how long a thread waits for the interpreter lock.

    It sleeps without the lock; by how much a sleep is overshot, less the time in which the thread waited for a
    CPU, is the wait for the lock. Without any contention that is 0.1 to 0.2 ms, the precision of timers. Without
    run-queue times the two waits cannot be told apart, and there is no figure.

    What costs is to wake up: some 0.02 ms of CPU on a busy machine, 0.15 ms where it brings an idle virtual machine
    back to life.
    """

    def __init__(self, system: System, clock: Clock, sleep_seconds: float = 0.1) -> None:
        """Args: system: the machine that is asked. clock: time and sleep. sleep_seconds: time between samples."""
        self._system = system
        self._clock = clock
        self._sleep_seconds = sleep_seconds
        self._thread = Periodic("intune-lock-probe", self._sample, clock)
        self._lock = threading.Lock()
        self._waited_seconds = 0.0
        self._samples = 0

    def start(self) -> None:
        """Start the thread; nothing happens if it runs."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for its end; nothing happens if none runs."""
        self._thread.stop()

    def mean_wait_seconds(self) -> float | None:
        """Mean wait for the interpreter lock since the last call; None without samples."""
        with self._lock:
            waited, samples = self._waited_seconds, self._samples
            self._waited_seconds, self._samples = 0.0, 0
        return waited / samples if samples else None

    def _sample(self) -> Generator[float, None, None]:
        try:
            # Kept open: to open it costs more than all else that is done in a round.
            schedstat = os.open(self._system.path("/proc/thread-self/schedstat"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            queued = _read_queued(schedstat)
            while queued is not None:
                begun = self._clock.wall()
                yield self._sleep_seconds
                overshoot = self._clock.wall() - begun - self._sleep_seconds
                before, queued = queued, _read_queued(schedstat)
                if queued is not None:
                    with self._lock:
                        self._waited_seconds += max(0.0, overshoot - (queued - before))
                        self._samples += 1
        finally:
            os.close(schedstat)


def _read_queued(schedstat: int) -> float | None:
    return _queued_seconds(os.pread(schedstat, 128, 0).decode())
