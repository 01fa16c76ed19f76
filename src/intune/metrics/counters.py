"""Counters on the hot path: cumulative, added to under the scheduler's lock, read by taking differences."""

import bisect
import math
from collections.abc import Mapping

from intune._values import CAUSES, CROWDS, Cause


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


class Load:
    """How many items were in hand, integrated over time.

    Attributes:
        area: Seconds times items in hand, up to the last call.
    """

    __slots__ = ("_in_hand", "_since", "area")

    def __init__(self) -> None:
        self.area = 0.0
        self._in_hand = 0
        self._since = 0.0

    def change(self, now: float, by: int) -> float:
        """So many more items are in hand from now on (0 = as many as before); the area up to now."""
        self.area += self._in_hand * (now - self._since)
        self._since = now
        self._in_hand += by
        return self.area

    def copy(self) -> "Load":
        """The same figures, apart."""
        other = Load()
        other.area, other._in_hand, other._since = self.area, self._in_hand, self._since
        return other


class Crowds:
    """Items and their seconds by how many were worked on at once."""

    __slots__ = ("counts", "seconds")

    GAPS = 0.05
    """Share by which a mean falls short of a crowd that is whole but for the gaps between one item and the next."""

    def __init__(self) -> None:
        self.counts = [0] * len(CROWDS)
        self.seconds = [0.0] * len(CROWDS)

    def add(self, at_once: float, items: int, seconds: float) -> None:
        """Items that took so many seconds in all."""
        place = max(0, bisect.bisect_right(CROWDS, at_once * (1 + self.GAPS)) - 1)
        self.counts[place] += items
        self.seconds[place] += seconds

    def copy(self) -> "Crowds":
        """The same figures, apart."""
        other = Crowds()
        other.counts, other.seconds = self.counts.copy(), self.seconds.copy()
        return other

    def since(self, earlier: "Crowds") -> tuple[tuple[int, int, float], ...]:
        """What was added after an earlier copy: (crowd, items, mean seconds of one)."""
        found = []
        for place, crowd in enumerate(CROWDS):
            items = self.counts[place] - earlier.counts[place]
            if items:
                found.append((crowd, items, (self.seconds[place] - earlier.seconds[place]) / items))
        return tuple(found)


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
        load: Items in hand over time.
        wait_seconds: By cause, seconds in which fewer than its concurrency ran.
        skipped: Items left out.
        worked_items: Items that were worked on.
        walls: Wall seconds an item.
        crowds: Items and their wall seconds by the place in `CROWDS` of how many were worked on at once.
        sizes: Bytes an item.
    """

    __slots__ = (
        "_tasks",
        "cpu_seconds",
        "crowds",
        "items_in",
        "items_out",
        "load",
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
        "worked_items",
    )

    QUEUE_EVERY = 17
    """One task in so many has its time in the run queue measured, which costs some 15 microseconds. It is odd as tasks
    of a source come in turns, one for a unit and one that finds its end: it must not always be the same kind."""

    def __init__(self) -> None:
        self.items_in = self.items_out = self.rows_out = self.skipped = self.worked_items = 0
        self.source_rows = self.wall_seconds = self.cpu_seconds = 0.0
        self.queue_wall_seconds = self.queue_seconds = 0.0
        self._tasks = 0
        self.output_bytes = 0
        self.wait_seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self.walls = Histogram()
        self.crowds = Crowds()
        self.load = Load()
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

    def worked(self, items: int, wall: float, cpu: float, at_once: float) -> None:
        """So many items were worked on for these seconds in all, beside others: so many at once, with them."""
        self.wall_seconds += wall
        self.cpu_seconds += cpu
        self.worked_items += items
        if items:
            self.walls.add(wall / items, items)
            self.crowds.add(at_once, items, wall)

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
