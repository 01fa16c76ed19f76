"""One-to-many: units of a source that give blocks, and items before a flat_map, drawn one at a time."""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from intune.pipeline.blocks import block_rows, block_slice
from intune.pipeline.calls import Failure, Flow, Keys, StageCall
from intune.pipeline.footprint import Footprint, footprint
from intune.pipeline.gather import Gather
from intune.pipeline.item import Item
from intune.pipeline.ledger import Charge, Forecast
from intune.pipeline.nodes import Node, Work, size_of
from intune.pipeline.samples import RunLength
from intune.pipeline.segment import Segment, Sequence
from intune.pipeline.sequence import Order, Path
from intune.pipeline.stage import LiveStage


class Drawing:
    """A parent whose items are being drawn: a unit of the source, or an item before a flat_map."""

    __slots__ = (
        "bound",
        "call",
        "children",
        "draw",
        "drawn",
        "kept",
        "last",
        "origin",
        "parent",
        "path",
        "position",
        "rows",
    )

    def __init__(self, path: Path, position: int, bound: int, origin: Callable[[], str], parent: Item | None) -> None:
        self.path, self.position, self.bound, self.origin, self.parent = path, position, bound, origin, parent
        self.draw: Iterator[Any] | None = None
        self.children = 0
        self.call: StageCall | None = None
        self.kept: Charge | None = None
        self.last: Any = None
        self.drawn = 0
        self.rows = 0.0


class Child(NamedTuple):
    """What one draw gave: a block or a run with its sequence numbers, or nothing at the end."""

    payload: Any
    keys: Keys | None
    rows: int
    sizes: Footprint
    source_rows: float
    ended: bool
    failure: Failure | None = None
    skipped: tuple[Failure, ...] = ()


class DrawNode(Node):
    """One-to-many: draws items of a parent one at a time and gives its slot up in between."""

    def __init__(self, stage: LiveStage, segment: Segment) -> None:
        super().__init__(stage, segment)
        self._parked: list[tuple[Path, Drawing]] = []
        self._opened: set[Drawing] = set()
        self.forecast = Forecast()

    def _next_parent(self) -> Path | None:
        """Path of the parent that is first in order, if one waits."""
        raise NotImplementedError

    def _open(self) -> Drawing:
        """Take that parent."""
        raise NotImplementedError

    def _bound(self, drawing: Drawing | None) -> int:
        """Bound on the size of the next item of a parent; None = that parent."""
        raise NotImplementedError

    def _kept(self) -> int:
        """Bytes that the parent that is next will keep beside its items while it is open."""
        return 0

    def _may_open(self, path: Path) -> bool:
        """Whether order lets it begin."""
        return self.segment.opens_child(path)

    def _draw(self, drawing: Drawing) -> Child:
        """Draw one item; called without the lock."""
        raise NotImplementedError

    def abandon(self, idle: bool) -> None:
        """Let go of parents that were not drawn to their end; of those in hand once the run is idle."""
        given_up = set(self._opened) if idle else {drawing for _, drawing in self._parked}
        for drawing in given_up:
            drawing.draw = None
            self._let_go(drawing)
        self._opened -= given_up
        self._parked.clear()

    def _let_go(self, drawing: Drawing) -> None:
        """Nothing more is drawn from a parent."""

    def _drew(self, drawing: Drawing, child: Child) -> None:
        """An item was drawn from a parent, which stays open."""

    def _closed(self, drawing: Drawing) -> None:
        """A parent is drawn to its end."""

    def _choose(self) -> Drawing | Path | None:
        """What to go on with: a drawing, or the path of a parent to open; the lower path first.

        Open parents are limited by the stage's concurrency, but never so that the one which order waits
        for could not be opened: the others would wait for it for ever.
        """
        parent = self._next_parent()
        parked = self._parked[0] if self._parked else None
        first = parent is not None and (parked is None or parent < parked[0])
        if parent is not None and first and self._may_open_one_more(parent):
            return parent
        return parked[1] if parked is not None else None

    def _may_open_one_more(self, parent: Path) -> bool:
        """Whether concurrency lets a parent be opened: one opening is kept for the parent that order waits for."""
        if not self.context.ordered:
            return len(self._opened) < self.stage.cap
        if self.segment.expects((*parent, 0)):
            return True  # after a cut there may be more open than allowed, and they would wait for this one
        others = sum(not self.segment.expects((*drawing.path, drawing.children)) for drawing in self._opened)
        return len(self._opened) < self.stage.cap and others < self.stage.cap - 1

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """An open drawing or a parent, order, room, memory."""
        choice = self._choose()
        if choice is None:
            return False, True, self.segment.has_room(), True
        if isinstance(choice, Drawing):
            path = (*choice.path, choice.children)
            order, bound, kept = self.segment.opens_child(path), self._bound(choice), 0
        else:
            path = (*choice, 0)
            order, bound, kept = self._may_open(path), self._bound(None), self._kept()
        return True, *self.segment.gates(order, path, self.forecast, bound, kept)

    def begin(self) -> Work:
        """Go on with the first drawing, or open a parent."""
        drawing = self._choose()
        if isinstance(drawing, Drawing):
            heapq.heappop(self._parked)
        else:
            drawing = self._open()
            self._opened.add(drawing)
        drawing.bound = self._bound(drawing)
        path = (*drawing.path, drawing.children)
        item = self.segment.begin(path, drawing.position, self.forecast, drawing.bound, drawing.origin)
        clock = self.context.clock

        def work() -> tuple[Child, float, float]:
            wall, cpu = clock.wall(), clock.cpu()
            child = self._draw(drawing)
            return child, clock.wall() - wall, clock.cpu() - cpu

        return Work(
            work,
            lambda result: self._finish(drawing, item, *result),
            lambda error: self._fail(drawing, item, error),
            drawing.children,
        )

    def _finish(self, drawing: Drawing, item: Item, child: Child, wall: float, cpu: float) -> None:
        self._skipped(item, child.skipped)
        self.context.ledger.true_up(item.charge, child.sizes)
        item.payload, item.keys, item.rows = child.payload, child.keys, child.rows
        item.source_rows = child.source_rows
        count = item.count if child.rows else 0
        self._book(count, wall, cpu)
        if child.keys is not None:
            self.stage.note_seconds(count, wall)
        if child.failure is not None:
            parent = drawing.parent
            passed_on = parent is not None and parent.failure is child.failure
            item.fail(child.failure, parent.failed_stage if parent is not None and passed_on else self.stage.info.name)
            self.failed()
        emitted = bool(child.rows) or child.failure is not None
        if child.keys is not None:
            item.bound = count  # perhaps fewer than were asked for
        if emitted:
            drawing.children += 1
            item.held(item.charge.actual)
        else:
            item.bound = 0
        ended = child.ended or child.failure is not None
        if not ended:
            self._drew(drawing, child)
        self._end_or_park(drawing, ended)
        if emitted:
            if child.rows:
                self._out(item, item.charge.actual)
                self.after(item)
            else:
                self.segment.arrived(item)
        else:
            self.segment.unborn(item)

    def _fail(self, drawing: Drawing, item: Item, error: BaseException) -> None:
        drawing.children += 1
        item.bound = 0
        self._end_or_park(drawing, True)
        self._broke(item, error)

    def _end_or_park(self, drawing: Drawing, ended: bool) -> None:
        if not ended:
            heapq.heappush(self._parked, (drawing.path, drawing))
            return
        self._opened.discard(drawing)
        drawing.draw = None
        self._closed(drawing)
        self.segment.closed(drawing.path, drawing.children)


class FlatMapNode(DrawNode):
    """flat_map: the parents are items. `stages`: itself and those that its items pass."""

    def __init__(self, stage: LiveStage, segment: Segment, stages: list[LiveStage], epoch: int, flow: Flow) -> None:
        super().__init__(stage, segment)
        self._epoch, self._flow, self._runs = epoch, flow, RunLength(stages)
        self._heap: list[tuple[Path, Item]] = []

    def put(self, item: Item) -> None:
        """A parent comes in."""
        if item.rows == 0:
            self.segment.arrived(item)
        else:
            self.segment.waits_as_parent()
            heapq.heappush(self._heap, (item.path, item))

    def waiting(self) -> list[Item]:
        """Items that wait before it."""
        return [item for _, item in self._heap]

    def _next_parent(self) -> Path | None:
        return self._heap[0][0] if self._heap else None

    def _bound(self, drawing: Drawing | None) -> int:
        return self._runs.next(self.forecast) if self._flow == "sample" else 1

    def _open(self) -> Drawing:
        item = heapq.heappop(self._heap)[1]
        self.stage.counters.items_in += item.count
        self.segment.becomes_parent(item)
        drawing = Drawing(item.path, item.position, 1, item.origin, item)
        drawing.rows = item.source_rows
        return drawing

    def _draw(self, drawing: Drawing) -> Child:
        item = drawing.parent
        assert item is not None
        if drawing.draw is None:
            drawing.draw = self._iterator(drawing, item)
        most = drawing.bound
        self._runs.took(most)
        keys: list[tuple[int, ...]] = []
        children: list[Any] = []
        skipped: list[Failure] = []
        failure, ended = None, False
        while len(children) < most:
            drawn = next(drawing.draw, None)
            if drawn is None:
                ended = True
                break
            key, child = drawn
            if isinstance(child, Failure):
                if child.fatal or not self.context.skip:
                    failure = child
                    break
                skipped.append(child)
                continue
            if self._flow == "block" and not block_rows(child):
                continue
            keys.append(key)
            children.append(child)
        if ended and failure is None and item.failure is not None:  # the parent's run broke off here
            failure = item.failure
        source_rows, drawing.rows = drawing.rows if children else 0.0, 0.0 if children else drawing.rows
        if self._flow == "sample":
            sizes = size_of(children, keys) if children else {}
            return Child(children, keys, len(children), sizes, source_rows, ended, failure, tuple(skipped))
        block = children[0] if children else None
        rows = block_rows(block) if block is not None else 0
        sizes = footprint(block) if block is not None else {}
        return Child(block, None, rows, sizes, source_rows, ended, failure, tuple(skipped))

    def _iterator(self, drawing: Drawing, item: Item) -> Iterator[Any]:
        keys = item.keys if item.keys is not None else item.path
        if self.stage.pool is not None:
            children, _, _ = self.stage.execute(item.payload, keys, self._epoch, self.context.clock)
            return iter(children)
        assert self.stage.instances is not None
        drawing.call = self.stage.instances.borrow()
        return drawing.call.draw(item.payload, keys, self._epoch)

    def _let_go(self, drawing: Drawing) -> None:
        if drawing.call is not None and self.stage.instances is not None:
            self.stage.instances.give_back(drawing.call, max(1, self.stage.cap))

    def _closed(self, drawing: Drawing) -> None:
        self._let_go(drawing)
        assert drawing.parent is not None
        self.context.ledger.release(drawing.parent.charge)


class OrderNode(DrawNode):
    """shuffle of samples: the parents are its orders, of which samples are taken in runs like from a source."""

    def __init__(
        self, stage: LiveStage, segment: Segment, stages: list[LiveStage], before: Sequence, gather: Gather
    ) -> None:
        super().__init__(stage, segment)
        self._before, self._gather, self._runs = before, gather, RunLength(stages)
        self._orders: dict[Drawing, Order] = {}
        self.forecast = segment.forecast
        before.on_orders, before.wanted = self._came, self._wanted

    def waiting(self) -> list[Item]:
        """Items that waiting orders refer to."""
        return [piece.token for order in self._before.out for piece in order.pieces]

    def _came(self, orders: list[Order]) -> None:
        for order in orders:
            self._gather.prepare(order)

    def _wanted(self, budget: int) -> int:
        choice = self._choose()
        if choice is None:
            return 0
        return self.forecast.bytes(self._bound(choice if isinstance(choice, Drawing) else None), budget)

    def _next_parent(self) -> Path | None:
        return (self._before.out[0].emission,) if self._before.out else None

    def _may_open_one_more(self, parent: Path) -> bool:
        return len(self._opened) < max(1, self.stage.cap)  # orders come in order, as units do

    def _may_open(self, path: Path) -> bool:
        return self.segment.opens_order() and self.segment.opens_child(path)

    def _bound(self, drawing: Drawing | None) -> int:
        rows = self._before.out[0].rows if drawing is None else self._orders[drawing].rows - drawing.drawn
        return max(1, min(rows, self._runs.next(self.forecast)))

    def _open(self) -> Drawing:
        order = self._before.out.popleft()
        emission, name = order.emission, self.stage.info.name
        self.segment.next_root = emission + 1
        self.segment.hold(emission)
        self._before.begun(order)
        self.stage.counters.items_in += 1
        drawing = Drawing((emission,), emission, 1, lambda: f"{name} {emission}", None)
        self._orders[drawing] = order
        return drawing

    def _draw(self, drawing: Drawing) -> Child:
        order, start = self._orders[drawing], drawing.drawn
        stop = min(order.rows, start + drawing.bound)
        self._runs.took(stop - start)
        samples = self._gather.part(order, start, stop)
        drawing.drawn = stop
        keys = range(order.row + start, order.row + stop)
        assert order.window is not None
        source_rows = float(order.window.data.source_rows) * (stop - start) / order.window.rows
        return Child(samples, keys, len(samples), size_of(samples, keys), source_rows, stop == order.rows)

    def _finish(self, drawing: Drawing, item: Item, child: Child, wall: float, cpu: float) -> None:
        window = self._orders[drawing].window
        assert window is not None
        self._before.taken(window)  # before those that drew the same samples are charged for them
        super()._finish(drawing, item, child, wall, cpu)

    def _closed(self, drawing: Drawing) -> None:
        self._before.done(self._orders.pop(drawing))

    def _let_go(self, drawing: Drawing) -> None:
        self._orders.pop(drawing, None)


class UnitNode(DrawNode):
    """The source, for blocks: the parents are units."""

    def __init__(self, stage: LiveStage, segment: Segment, source: Any, plan: Any, mark_padding: bool) -> None:
        super().__init__(stage, segment)
        self._source, self._plan, self._mark_padding = source, plan, mark_padding
        self.forecast = segment.forecast
        segment.total = len(plan)

    def _next_parent(self) -> Path | None:
        root = self.segment.next_root
        return (root,) if root < len(self._plan) and not self.stopped() else None

    def _may_open_one_more(self, parent: Path) -> bool:
        return len(self._opened) < max(1, self.stage.cap)  # units come in order: none is waited for that comes later

    def _may_open(self, path: Path) -> bool:
        return self.segment.opens_order() and self.segment.opens_child(path)

    def _bound(self, drawing: Drawing | None) -> int:
        if drawing is not None:
            return drawing.bound
        return max(1, int(self._source.read_bound(self._plan[self.segment.next_root].unit) - self._kept()))

    def _kept(self) -> int:
        return int(self._source.kept_bytes(self._plan[self.segment.next_root].unit))

    def _open(self) -> Drawing:
        root = self.segment.next_root
        bound, kept = self._bound(None), self._kept()
        self.segment.next_root += 1
        self.segment.hold(root)
        self.stage.counters.items_in += 1
        unit = self._plan[root].unit
        drawing = Drawing((root,), root, bound, lambda: str(self._source.describe(unit)), None)
        drawing.kept = self.segment.keep(kept)
        return drawing

    def _drew(self, drawing: Drawing, child: Child) -> None:
        """What keeps something between two blocks holds on to the last one until it gives the next."""
        kept = drawing.kept
        if kept is not None and kept.reserved:
            drawing.last = child.payload  # else its addresses, by which it is charged, might be another's meanwhile
            self.context.ledger.true_up(kept, {**child.sizes, id(drawing): kept.reserved})

    def _let_go(self, drawing: Drawing) -> None:
        # In this order: an interrupt in between may call this again; the run gives back all that it was charged.
        kept, drawing.kept, drawing.last = drawing.kept, None, None
        if kept is not None:
            self.context.ledger.release(kept)

    def _closed(self, drawing: Drawing) -> None:
        self._let_go(drawing)

    def _draw(self, drawing: Drawing) -> Child:
        part = self._plan[drawing.path[0]]
        if drawing.draw is None:
            drawing.draw = self._source.open(part.unit)
        unit: Any = drawing.draw
        for block in unit:
            before, drawing.drawn = drawing.drawn, drawing.drawn + block.num_rows
            start = max(0, part.start - before)
            stop = block.num_rows if part.stop is None else min(block.num_rows, part.stop - before)
            ended = part.stop is not None and drawing.drawn >= part.stop
            if start >= stop:
                if ended:
                    break
                continue
            if (start, stop) != (0, block.num_rows):
                block = block_slice(block, start, stop)
            if self._mark_padding:
                block = _mark(block, part.padding)
            if ended and hasattr(unit, "close"):
                unit.close()  # a generator: let it close its file now
            return Child(block, None, block.num_rows, footprint(block), float(block.num_rows), ended)
        return Child(None, None, 0, {}, 0.0, True)


def _mark(block: Any, padding: bool) -> Any:
    return block.append_column("is_padding", pa.array(np.full(block.num_rows, padding)))
