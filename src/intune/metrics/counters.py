"""Counters on the hot path: cumulative, added to under the scheduler's lock, read by taking differences."""

import math
from collections.abc import Mapping

from intune._values import CAUSES, Cause


class Histogram:
    """Counts in buckets an eighth of an octave wide, so that a quantile is right within 9 %."""

    __slots__ = ("counts",)

    _PER_OCTAVE = 8

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self.counts: dict[int, int] = counts if counts is not None else {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times; what is not positive counts as the smallest."""
        bucket = math.floor(math.log2(value) * self._PER_OCTAVE) if value > 0 else -10_000
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def quantile(self, share: float) -> float | None:
        """The value below which this share lies; None without values."""
        total = sum(self.counts.values())
        if not total:
            return None
        left = share * total
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return 0.0 if bucket == -10_000 else float(2 ** ((bucket + 0.5) / self._PER_OCTAVE))
        return None

    def copy(self) -> "Histogram":
        """The same counts, apart."""
        return Histogram(dict(self.counts))

    def since(self, earlier: "Histogram") -> "Histogram":
        """What was counted after an earlier copy."""
        before = earlier.counts
        return Histogram({b: n - before.get(b, 0) for b, n in self.counts.items() if n != before.get(b, 0)})


class StageCounters:
    """Everything counted for one stage over its lifetime.

    Attributes:
        items_in: Items begun.
        items_out: Items finished.
        rows_out: Rows in finished items.
        source_rows: Source rows that finished items stand for.
        wall_seconds: Wall seconds that items were worked on.
        cpu_seconds: CPU seconds of the same.
        queue_wall_seconds: Wall seconds of the tasks whose time in the run queue was measured.
        queue_seconds: Seconds in the run queue in them.
        output_bytes: Bytes of finished items.
        wait_seconds: By cause, seconds in which fewer than its concurrency ran.
        skipped: Items left out.
        walls: Wall seconds an item.
        sizes: Bytes an item.
    """

    __slots__ = (
        "_tasks",
        "cpu_seconds",
        "items_in",
        "items_out",
        "output_bytes",
        "queue_seconds",
        "queue_wall_seconds",
        "rows_out",
        "sizes",
        "skipped",
        "source_rows",
        "wait_seconds",
        "wall_seconds",
        "walls",
    )

    QUEUE_EVERY = 16
    """One task in so many has its time in the run queue measured, which costs some 15 microseconds."""

    def __init__(self) -> None:
        self.items_in = self.items_out = self.rows_out = self.skipped = 0
        self.source_rows = self.wall_seconds = self.cpu_seconds = 0.0
        self.queue_wall_seconds = self.queue_seconds = 0.0
        self._tasks = 0
        self.output_bytes = 0
        self.wait_seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self.walls = Histogram()
        self.sizes = Histogram()

    def finished(self, items: int, rows: int, source_rows: float, size: int) -> None:
        """Items came out: their number, rows, source rows and bytes in all."""
        self.items_out += items
        self.rows_out += rows
        self.source_rows += source_rows
        if items:
            each = size / items
            self.output_bytes += size
            self.sizes.add(each, items)

    def worked(self, items: int, wall: float, cpu: float) -> None:
        """So many items were worked on for these seconds in all."""
        self.wall_seconds += wall
        self.cpu_seconds += cpu
        if items:
            self.walls.add(wall / items, items)

    def wants_queue(self) -> bool:
        """Whether the next task is one whose time in the run queue is to be measured."""
        self._tasks += 1
        return self._tasks % self.QUEUE_EVERY == 0

    def queued(self, wall: float, queued: float | None) -> None:
        """A task of so many wall seconds spent so many of them in the run queue; None = the kernel did not say."""
        if queued is not None:
            self.queue_wall_seconds += wall
            self.queue_seconds += queued

    def copy(self) -> "StageCounters":
        """The same figures, apart."""
        other = StageCounters()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if hasattr(value, "copy") else value)
        return other


def wait_shares(now: StageCounters, before: StageCounters, seconds: float) -> Mapping[Cause, float]:
    """Shares of a window of so many seconds, by cause."""
    if seconds <= 0:
        return {}
    return {
        cause: min(1.0, (now.wait_seconds[cause] - before.wait_seconds[cause]) / seconds)
        for cause in CAUSES
        if now.wait_seconds[cause] > before.wait_seconds[cause]
    }


def unmet(*, input_ready: bool, order_open: bool, room: bool, memory: bool, slot: bool) -> Cause | None:
    """Why a stage that is below its concurrency does not start an item: the first unmet condition.

    Args:
        input_ready: An item waits for it (for a source: units are left).
        order_open: Few enough items lie past the lowest unfinished one.
        room: Few enough batches wait for the consumer.
        memory: The ledger admits what it would make.
        slot: A CPU slot is free, or it needs none.
    """
    for cause, met in zip(CAUSES, (input_ready, order_open, room, memory, slot), strict=True):
        if not met:
            return cause
    return None
