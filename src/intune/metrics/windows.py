"""Windows: differences of counters as the values that tuners see."""

from collections.abc import Sequence
from typing import Any, Protocol

from intune._values import ConsumerSnapshot, StageInfo, StageSnapshot
from intune.metrics.counters import StageCounters, wait_shares


class ConsumerCounters:
    """What the training loop did over the loader's lifetime."""

    __slots__ = ("_inside_since", "items", "rows", "wait_seconds")

    def __init__(self) -> None:
        self.items = self.rows = 0
        self.wait_seconds = 0.0
        self._inside_since: float | None = None

    def enter(self, now: float) -> None:
        """It called `next` and may be blocked there."""
        self._inside_since = now

    def leave(self, now: float, items: int, rows: int) -> None:
        """It got items (batches, or samples), or the end."""
        self.book(now)
        self._inside_since = None
        self.items += items
        self.rows += rows

    def book(self, now: float) -> None:
        """Count the waiting that goes on up to now: it belongs to the window that ends here."""
        if self._inside_since is not None:
            self.wait_seconds += now - self._inside_since
            self._inside_since = now

    @property
    def inside(self) -> bool:
        """Whether it is in `next` and may be blocked there."""
        return self._inside_since is not None

    def copy(self) -> "ConsumerCounters":
        """The same figures, apart."""
        other = ConsumerCounters()
        other.items, other.rows, other.wait_seconds = self.items, self.rows, self.wait_seconds
        return other


class Measured(Protocol):
    """A stage that can be measured."""

    @property
    def info(self) -> StageInfo:
        """What it is."""
        ...

    counters: StageCounters
    concurrency: int | None
    running: int
    largest_cap: int
    pool: Any
    resident: int | None

    @property
    def process_growth(self) -> int:
        """Bytes that its processes will hold more."""
        ...


class Waiting(Protocol):
    """An item that waits before a stage."""

    charge: Any


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def stage_snapshot(
    stage: Measured,
    before: StageCounters,
    seconds: float,
    waiting: Sequence[Waiting],
) -> StageSnapshot:
    """One stage over a window of so many seconds."""
    now, pool = stage.counters, stage.pool
    items, source_rows = now.items_out - before.items_out, now.source_rows - before.source_rows
    walls, sizes = now.walls.since(before.walls), now.sizes.since(before.sizes)
    worked = sum(walls.counts.values())
    busy, sampled = now.wall_seconds - before.wall_seconds, now.queue_wall_seconds - before.queue_wall_seconds
    queued = (now.queue_seconds - before.queue_seconds) / sampled * busy if sampled > 0 and pool is None else None
    distinct = {id(item): item for item in waiting}
    return StageSnapshot(
        info=stage.info,
        concurrency=stage.concurrency,
        running=stage.running,
        processes_live=pool.live if pool is not None else None,
        processes_starting=pool.starting if pool is not None else None,
        processes_leaving=pool.leaving if pool is not None else None,
        items_in=now.items_in - before.items_in,
        items_out=items,
        rows_out=now.rows_out - before.rows_out,
        source_rows_per_item=source_rows / items if items and source_rows else None,
        wall_seconds_mean=busy / worked if worked else None,
        wall_seconds_p50=walls.quantile(0.5),
        wall_seconds_p99=walls.quantile(0.99),
        wall_seconds_by_crowd=now.crowds.since(before.crowds),
        cpu_seconds_mean=(now.cpu_seconds - before.cpu_seconds) / worked if worked else None,
        busy_seconds=busy,
        in_hand_mean=(now.load.area - before.load.area) / seconds if seconds > 0 else 0.0,
        run_queue_seconds=queued,
        wait_share=wait_shares(now, before, seconds),
        item_bytes_mean=(now.output_bytes - before.output_bytes) / items if items else None,
        item_bytes_p99=sizes.quantile(0.99),
        item_bytes_max=_whole(sizes.quantile(1.0)),
        waiting_items=len(distinct),
        waiting_bytes=sum(item.charge.actual for item in distinct.values()),
        process_resident_bytes=stage.resident,
        process_growth_bytes=stage.process_growth if pool is not None and stage.resident is not None else None,
        saturated_concurrency=stage.largest_cap or None,
    )


def consumer_snapshot(now: ConsumerCounters, before: ConsumerCounters, seconds: float, ready: int) -> ConsumerSnapshot:
    """The training loop over a window of so many seconds."""
    steps = now.items - before.items
    waited = now.wait_seconds - before.wait_seconds
    return ConsumerSnapshot(
        steps=steps,
        rows=now.rows - before.rows,
        seconds_per_step=seconds / steps if steps else None,
        wait_share=min(1.0, max(0.0, waited / seconds)) if seconds > 0 else 0.0,
        ready=ready,
    )
