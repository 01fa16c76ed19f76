"""The places at which work begins in one run: what they share, and the calls and gathers.

Each node picks its next task and books its result with the scheduler's lock held; the work in between runs
without it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

from intune.pipeline.blocks import block_rows
from intune.pipeline.calls import Failure, Flow, Keys, Output
from intune.pipeline.footprint import Footprint, footprint, run_bytes
from intune.pipeline.gather import Gather, source_rows
from intune.pipeline.item import Item
from intune.pipeline.ledger import Forecast
from intune.pipeline.segment import Segment, Sequence
from intune.pipeline.sequence import Order, Path
from intune.pipeline.stage import LiveStage


class Work(NamedTuple):
    """What a node wants done: the work, what books its result or its failure, and items drawn of its parent before."""

    work: Callable[[], Any]
    finish: Callable[[Any], None]
    broke: Callable[[BaseException], None]
    drawn: int = 0


class Next(Protocol):
    """Where a node's items go: the next node, or the end of the segment."""

    def __call__(self, item: Item) -> None:
        """Take an item."""
        ...


class Node:
    """One stage in one run."""

    def __init__(self, stage: LiveStage, segment: Segment) -> None:
        self.stage, self.segment = stage, segment
        self.context = segment.context
        self.after: Next = segment.arrived
        self.failed: Callable[[], None] = lambda: None
        self.stopped: Callable[[], bool] = lambda: False

    def waiting(self) -> list[Item]:
        """Items that wait before it."""
        return []

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """Whether input, order, room and memory would let it begin one more item."""
        raise NotImplementedError

    def begin(self) -> Work:
        """Take the next item in hand; all gates are open."""
        raise NotImplementedError

    def abandon(self, idle: bool) -> None:
        """The run was cancelled: let go of what is half done. `idle`: nothing of the run is in hand any more."""

    def _book(self, items: int, wall: float, cpu: float) -> None:
        self.stage.counters.worked(items, wall, cpu, self.stage.crowd)

    def _out(self, item: Item, size: int) -> None:
        self.stage.counters.finished(item.count, item.rows, item.source_rows, size)

    def _skipped(self, item: Item, failures: tuple[Failure, ...]) -> None:
        if failures:
            self.stage.counters.skipped += len(failures)
            self.context.on_skip(self.stage.info.name, item.origin(), failures)

    def _broke(self, item: Item, error: BaseException) -> None:
        """The work on an item failed as a whole, outside the user's function or in a worker process."""
        failure = Failure(error, item.path, item.rows)
        item.payload, item.keys, item.rows = None, None, 0
        if self.context.skip and isinstance(error, Exception):
            self._skipped(item, (failure,))
        else:
            item.fail(failure, self.stage.info.name)
            self.failed()
        self.segment.arrived(item)


def size_of(payload: Any, keys: Keys | None) -> Footprint:
    """Buffers of a payload; a run of samples counts as one."""
    if keys is not None:
        return {id(payload): run_bytes(payload)}
    return footprint(payload)


class CallNode(Node):
    """map, map_rows, filter, unbatch, to_torch: one item in, one out."""

    def __init__(self, stage: LiveStage, segment: Segment, epoch: int, gives: Flow) -> None:
        super().__init__(stage, segment)
        self._epoch, self._gives = epoch, gives
        self._heap: list[tuple[Path, Item]] = []
        self._needed = (0, 0)
        """What the first of these needs here, and at most until its end, when its gates were asked for last: that is
        just before it begins."""
        self._further = Forecast()
        """Bytes that items take on the rest of their way beyond those with which they come here."""
        self.first = False
        """Whether it is the first in its segment: the earliest to see that items are larger than usual."""

    def put(self, item: Item) -> None:
        """An item comes in."""
        if item.rows == 0:  # failed before with nothing left: a function never sees 0 rows
            self.after(item)
            return
        heapq.heappush(self._heap, (item.path, item))
        further = self._takes_further(item)
        if further is not None:  # what was reserved for stages that it has passed is free for others
            self.context.ledger.lower_by(item.charge, item.charge.beyond - further)

    def waiting(self) -> list[Item]:
        """Items that wait before it."""
        return [item for _, item in self._heap]

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """Input and memory; order and room were asked for when the item began. On a device there is room for few.

        While no item has passed the stage few at a time are let in, as what it gives may be of any size: the others
        wait for the first, which comes before them.
        """
        room = self.stage.info.kind != "to_torch" or self.segment.few_ready()
        if not self._heap:
            return False, True, room, True
        if self.context.ledger.budget is None:
            return True, True, room, True
        most = self.stage.most_unproven
        if most is not None and self.stage.running >= most:
            return True, False, room, True
        item = self._heap[0][1]
        self._needed = self._needs(item)
        behind = (other for _, other in islice(self._heap, 1, None))
        return True, True, room, self.segment.opens_further(item, *self._needed, behind)

    def begin(self) -> Work:
        """Take the waiting item that is first in order."""
        item = heapq.heappop(self._heap)[1]
        here, needs = self._needed
        self.context.ledger.work_on(item.charge, here)
        if self.context.ledger.budget is not None:
            self.segment.goes_further(item, needs, self._last_first())
        self.stage.counters.items_in += item.count
        keys = item.keys if item.keys is not None else item.path

        def work() -> tuple[Output, float, float, Footprint]:
            output, wall, cpu = self.stage.execute(item.payload, keys, self._epoch, self.context.clock)
            sizes = size_of(output.payload, output.keys) if output.payload is not None else {}
            return output, wall, cpu, sizes

        return Work(work, lambda result: self._finish(item, *result), lambda error: self._broke(item, error))

    def _last_first(self) -> Iterator[Item]:
        """Items that wait, the last first; they are sorted only when one is asked for."""
        for _, item in sorted(self._heap, reverse=True):
            yield item

    def _finish(self, item: Item, output: Output, wall: float, cpu: float, sizes: Footprint) -> None:
        self._book(item.count, wall, cpu)
        self.stage.most_unproven = None
        if self.stage.executor_trial is not None:
            self.context.on_executor_trial(self.stage, wall, cpu, sum(sizes.values()))
        if item.keys is not None:
            self.stage.note_seconds(item.count, wall)
        self._skipped(item, output.skipped)
        self._measure(item, sizes)
        self.context.ledger.true_up(item.charge, sizes)
        rows = self._rows(output, item)
        if (
            self.context.exact_rows
            and self.stage.info.kind == "map"
            and rows != item.rows
            and not (output.failure or output.skipped)
        ):
            output.failure = Failure(_changed_rows(item.rows, rows), item.path, item.rows)
        item.payload, item.keys, item.rows = output.payload, output.keys, rows
        size = item.charge.actual
        if output.failure is not None:
            item.fail(output.failure, self.stage.info.name)
            self.failed()
        if rows:
            self._out(item, size)
            self.after(item)
        else:
            self.segment.arrived(item)

    def _needs(self, item: Item) -> tuple[int, int]:
        """Bytes that an item will hold while the stage has what comes in and what goes out, and until its end."""
        came, bound, budget = item.charge.actual, max(1, item.bound), self.context.ledger.budget
        here = self._copies * came + int(bound * self.stage.growth.predict(came / bound))
        if budget is None:
            return here, here
        further = self._takes_further(item)
        return here, max(here, came + further if further is not None else item.forecast.bytes(item.bound, budget))

    def _takes_further(self, item: Item) -> int | None:
        """Bytes that an item may take on the rest of its way beyond those that it has; None = not known yet."""
        budget = self.context.ledger.budget
        if budget is None or not item.bound or not self._further.enough:
            return None
        return self._further.bytes(item.bound, budget, item.charge.actual)

    def _measure(self, item: Item, sizes: Footprint) -> None:
        """Learn from what an item held, and from what the stage gave for what came in."""
        came, bound, growth = item.charge, max(1, item.bound), self.stage.growth
        gave = sum(size for key, size in sizes.items() if key not in came.buffers)
        held = self._copies * came.actual + gave
        item.held(held)
        item.way.append((self._further, came.actual, held))
        if self.first and growth.usual > 0:
            item.forecast.compare(gave / bound / growth.usual)
        growth.add(came.actual / bound, gave / bound)

    @property
    def _copies(self) -> int:
        """Of what comes in, processes have a copy."""
        return 1 if self.stage.pool is None else 2

    def _rows(self, output: Output, item: Item) -> int:
        if output.payload is None:
            return 0
        if output.keys is not None:
            return len(output.payload)
        return block_rows(output.payload) if self._gives == "block" else item.rows


def _changed_rows(before: int, after: int) -> ValueError:
    return ValueError(
        f"map gave {after} rows for a block of {before}, but the number of rows was promised (len() of the loader, or "
        "several ranks): use filter or flat_map for that"
    )


class GatherNode(Node):
    """Carries out the orders of a sequencer: batch and shuffle."""

    def __init__(self, stage: LiveStage, segment: Segment, before: Sequence, gather: Gather, gives: Flow) -> None:
        super().__init__(stage, segment)
        self._before, self._gather, self._gives = before, gather, gives
        before.on_orders, before.wanted = self._came, self._wanted

    @property
    def orders(self) -> deque[Order]:
        """Orders that wait."""
        return self._before.out

    def waiting(self) -> list[Item]:
        """Items that waiting orders refer to."""
        return [piece.token for order in self.orders for piece in order.pieces]

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """An order, its place in order, room, memory."""
        orders = self.orders
        if not orders:
            return False, True, self.segment.has_room(), True
        order = orders[0]
        if order.window is not None and order.window.preparing:
            return False, True, self.segment.has_room(), True
        segment, copy = self.segment, self._gather.copy_bytes(order)
        return True, *segment.gates(segment.opens_order(), (order.emission,), segment.forecast, order.rows, copy)

    def begin(self) -> Work:
        """Take the next order."""
        order = self.orders.popleft()
        if order.window is not None and order.start == 0:
            order.window.preparing = True
        segment = self.segment
        origin = lambda: f"{self.stage.info.name} {order.emission}"  # noqa: E731
        item = segment.begin((order.emission,), order.emission, segment.forecast, order.rows, origin)
        segment.next_root = order.emission + 1
        self._before.begun(order, self._gather.copy_bytes(order))
        self.stage.counters.items_in += 1
        keys = range(order.row, order.row + order.rows) if self._gives == "sample" else None
        clock = self.context.clock

        def work() -> tuple[Any, Footprint, float, float]:
            wall, cpu = clock.wall(), clock.cpu()
            payload = self._gather(order)
            sizes = size_of(payload, keys)
            return payload, sizes, clock.wall() - wall, clock.cpu() - cpu

        return Work(
            work,
            lambda result: self._finish(order, item, keys, *result),
            lambda error: self._fail(order, item, error),
        )

    def _wanted(self, budget: int) -> int:
        if not self.orders:
            return 0
        order = self.orders[0]
        return self.segment.forecast.bytes(order.rows, budget) + self._gather.copy_bytes(order)

    def _done(self, order: Order) -> None:
        if order.window is not None:
            order.window.preparing = False
        self._before.done(order)

    def _finish(
        self, order: Order, item: Item, keys: Keys | None, payload: Any, sizes: Footprint, wall: float, cpu: float
    ) -> None:
        item.payload, item.keys, item.rows = payload, keys, order.rows
        item.source_rows = self._source_rows(order)
        self.context.ledger.true_up(item.charge, sizes)
        if order.window is not None:
            self._before.taken(order.window)
        item.held(item.charge.actual)
        self._done(order)
        self._book(1, wall, cpu)
        self._out(item, item.peak)
        self.after(item)

    def _fail(self, order: Order, item: Item, error: BaseException) -> None:
        self._done(order)
        self._broke(item, error)

    def _came(self, orders: list[Order]) -> None:
        for order in orders:
            self._gather.prepare(order)

    def _source_rows(self, order: Order) -> float:
        if order.window is not None:
            return float(order.window.data.source_rows) * order.rows / order.window.rows
        return source_rows(order.pieces)
