"""A clock that a test moves by hand."""

import math
import threading

POLL_SECONDS = 0.001
"""How often, in real time, a sleeper looks whether its time has come: its event tells it only of being woken."""


class ManualClock:
    """Time passes when `advance` is called, and only then; a `Clock`, safe to use from several threads.

    `cpu` is kept by thread: a thread that was never advanced has used none.

    Args:
        auto: Whether `sleep` moves the clock to its end by itself and returns at once.
    """

    def __init__(self, *, auto: bool = False) -> None:
        self._auto = auto
        self._changed = threading.Condition()
        self._now = 0.0
        self._ends: dict[object, float] = {}
        self._own = threading.local()

    def wall(self) -> float:
        """Seconds that were advanced so far."""
        with self._changed:
            return self._now

    def cpu(self) -> float:
        """CPU seconds that the calling thread advanced so far."""
        return getattr(self._own, "cpu", 0.0)

    def advance(self, seconds: float, *, cpu_seconds: float = 0.0) -> None:
        """Let wall seconds pass for everyone, and CPU seconds for the calling thread.

        Sleepers whose time has come are let go, and no longer count as sleeping when this returns.
        """
        if not (0 <= seconds < math.inf and 0 <= cpu_seconds < math.inf):
            raise ValueError(f"cannot advance by {seconds} s and {cpu_seconds} CPU s: time does not go back")
        self._own.cpu = self.cpu() + cpu_seconds
        with self._changed:
            self._now += seconds
            self._ends = {sleeper: end for sleeper, end in self._ends.items() if end > self._now + 1e-9}
            self._changed.notify_all()

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Wait until `wake` is set or the clock was advanced by `seconds`; returns whether `wake` is set."""
        if wake.is_set() or seconds <= 0:
            return wake.is_set()
        if self._auto:
            self.advance(seconds)
            return wake.is_set()
        sleeper = object()
        with self._changed:
            self._ends[sleeper] = self._now + seconds
            self._changed.notify_all()
        while not wake.wait(POLL_SECONDS):
            with self._changed:
                if sleeper not in self._ends:
                    return wake.is_set()
        with self._changed:
            self._ends.pop(sleeper, None)
        return True

    def wait_for_sleepers(self, count: int = 1, *, timeout: float = 10.0) -> None:
        """Wait, in real time, until at least so many threads sleep on this clock.

        Raises:
            TimeoutError: If that takes more than `timeout` real seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ends) >= count, timeout):
                raise TimeoutError(f"{len(self._ends)} of {count} threads sleep on the clock after {timeout} s")
