"""Thread or process: decided once, by measurement, for a stage that leaves it open."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol


class Probe(Protocol):
    """Measures how long a thread waits for the interpreter lock."""

    def start(self) -> None:
        """Begin to measure."""
        ...

    def stop(self) -> None:
        """End."""
        ...

    def mean_wait_seconds(self) -> float | None:
        """Mean wait since the last call, of samples taken all along; None without any."""
        ...


class Verdict(NamedTuple):
    """What was decided, and why."""

    executor: Literal["thread", "process"]
    reason: str


PROBE_SECONDS = 1e-3
"""Time between two samples of the probe."""


class ExecutorTrial:
    """Judges a function by its first items, each run in a thread with nothing else under way.

    Processes are worth it where the function holds the interpreter lock for most of its time, so that threads
    would queue for it, and where its work on an item is several times what sending the item costs.

    Args:
        probe: Takes a sample each `PROBE_SECONDS`.
    """

    SECONDS, ITEMS, HELD_SHARE, WORTH = 0.1, 100, 0.5, 4.0
    ITEM_SECONDS = 5e-3
    """Items shorter than this end before the probe has waited: Python hands the lock over after so long."""
    CALL_SECONDS, BYTES_A_SECOND = 1e-4, 2e9
    """What it costs to send an item and to get the result back, as measured on arrays of some megabytes."""

    def __init__(self, probe: Probe) -> None:
        self.disturbed = False
        """Others ran beside it, as an item took very long: the probe cannot tell whose the lock was."""
        self._probe = probe
        self._wait: float | None = None
        self._items = 0
        self._cpu = self._sent = self._sampled = self._held = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """An item is being worked on."""
        self._probe.start()
        try:
            yield
        finally:
            self._probe.stop()
            self._wait = self._probe.mean_wait_seconds()

    def add(self, wall: float, cpu: float, size: int) -> Verdict | None:
        """The item that was watched is done.

        Args:
            wall: Seconds that it took.
            cpu: CPU seconds in them.
            size: Bytes of its result.

        Returns:
            What is decided, or None while that is open.
        """
        self._items += 1
        if self._items == 1 and wall < self.SECONDS:
            return None  # it pays for imports and cold caches
        if self.disturbed:
            return Verdict("thread", "an item took so long that it could not be measured alone")
        self._cpu += cpu
        self._sent += self.CALL_SECONDS + 2 * size / self.BYTES_A_SECOND
        if self._wait is not None and wall >= self.ITEM_SECONDS:
            self._sampled += wall
            self._held += wall * self._wait / (self._wait + PROBE_SECONDS)
        if self._sampled < self.SECONDS and self._items < self.ITEMS:
            return None
        return self._judge()

    def _judge(self) -> Verdict:
        if not self._sampled:
            return Verdict("thread", "its items are too short to be measured")
        share = self._held / self._sampled
        if share < self.HELD_SHARE:
            return Verdict("thread", f"it holds the interpreter lock {share:.0%} of the time")
        if self._cpu < self.WORTH * self._sent:
            held = f"it holds the interpreter lock {share:.0%} of the time"
            return Verdict("thread", f"{held}, but its items cost little more than sending them to a process would")
        return Verdict("process", f"it holds the interpreter lock {share:.0%} of the time")
