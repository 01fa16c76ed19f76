"""Time, injected: nothing in the library reads a clock but through one of these."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Three readings in seconds; only differences between two readings of the same kind mean anything."""

    def wall(self) -> float:
        """Seconds that passed for everyone."""
        ...

    def cpu(self) -> float:
        """CPU seconds that the calling thread used."""
        ...

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Wait until `wake` is set or `seconds` have passed; returns whether `wake` is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    wall = staticmethod(time.perf_counter)
    cpu = staticmethod(time.thread_time)

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Wait until `wake` is set or `seconds` have passed; returns whether `wake` is set."""
        return wake.wait(seconds)
