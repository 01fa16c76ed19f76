"""A segment: the stages between two places of order, and what stands at its end.

All methods are called with the scheduler's lock held.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from intune.pipeline.calls import Failure
from intune.pipeline.context import Context
from intune.pipeline.footprint import footprint
from intune.pipeline.item import Item
from intune.pipeline.ledger import Charge, Forecast
from intune.pipeline.sequence import Order, Path, ReplayLog, Restorer, Sequencer, Window

DEVICE_READY = 2
"""Batches that may wait for the consumer before no more are put on its device, unless the user says how many."""

PAUSE_SHARE = 4
"""How many times as many may wait for a consumer that pauses though it is the faster one, while memory is plentiful."""


class End(Protocol):
    """What takes a segment's items, in order."""

    @property
    def full(self) -> bool:
        """Whether it takes none now."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do behind it."""
        ...

    @property
    def starves(self) -> bool:
        """Whether an order waits behind it for bytes: nothing before it should take them."""
        ...

    def accept(self, item: Item) -> None:
        """Take the next item."""
        ...

    def finish(self) -> None:
        """No more come."""
        ...


class Segment:
    """Counts what is in flight between two places of order, restores order at its end, admits at its start.

    Args:
        context: What all runs share.
        depth: Length of the path of what arrives at its end.
        first: The first root.
        end: What takes its items.
        charges: What the run of which it is a part holds in the ledger.
    """

    ENOUGH_SHARE = 1.1
    """An item goes on without asking while it has been reserved what it needs, but for so much."""

    def __init__(self, context: Context, depth: int, first: int, end: End, charges: set[Charge]) -> None:
        self.context, self.depth, self.end = context, depth, end
        self._charges = charges
        self.next_root = first
        self.total: int | None = None
        self.live = 0
        self._parents = 0
        self.forecast = Forecast()
        self._restorer = Restorer(depth, first) if context.ordered else None
        self._open: dict[int, int] = {}
        self._finished = False

    @property
    def low(self) -> int:
        """The lowest root that has not wholly left the segment."""
        if self._restorer is not None:
            return self._restorer.low
        return self.next_root - len(self._open)

    def opens_order(self) -> bool:
        """Whether one more root may begin: few enough lie past the lowest unfinished one."""
        return self.next_root - self.low < self.context.max_ahead and not self._overfull()

    def opens_child(self, path: Path) -> bool:
        """Whether the item with this path may come into being: what order waits for always may."""
        ahead, root = self.context.max_ahead, path[0]
        if self._overfull():
            return False
        return self.live < ahead or (root == self.low and self._open.get(root, 0) <= ahead) or self.expects(path)

    def expects(self, path: Path) -> bool:
        """Whether nothing in the segment goes on before the item with this path is there."""
        if self._restorer is None:
            return self.live == self._parents
        return self._restorer.expects(path)

    @property
    def idle(self) -> bool:
        """Whether nothing is in hand here or behind: only a new item could let anything go on."""
        return not self._open and self.end.idle

    def has_room(self) -> bool:
        """Whether the consumer, if it stands at the end, has few enough batches waiting for one more to begin.

        Unless the user said how many that are, as many may wait as may be worked on at once, if there is memory: a
        consumer that pauses finds them when it goes on. If only few could, all would begin at once when these are
        taken, in bursts; of more than that the caches would hold none.

        A consumer that takes all there is, and faster, makes up for its pauses (to evaluate, to save) with what was
        made meanwhile. So more may wait for it, while items in flight hold less than half of what they may.
        """
        if not isinstance(self.end, Delivery):
            return True
        waiting, most = len(self.end.ready), self.context.prefetch
        if most is not None:
            return waiting < most
        most, ledger = self.context.at_once, self.context.ledger
        if waiting < most or not self.end.short:
            return waiting < most
        return waiting < PAUSE_SHARE * most and ledger.budget is not None and 2 * ledger.charged < ledger.budget

    def few_ready(self) -> bool:
        """Whether so few batches wait for the consumer that one more may be put on its device."""
        return not isinstance(self.end, Delivery) or len(self.end.ready) < (self.context.prefetch or DEVICE_READY)

    def open_for(self, order: bool) -> tuple[bool, bool]:
        """Order and room as gates, from whether order would let an item begin.

        Where items pile up because what stands behind takes none, that is want of room and not of order.
        """
        room = self.has_room()
        if order or (room and not self.end.full):
            return order, room
        return True, False

    def gates(self, order: bool, path: Path, forecast: Forecast, bound: int, kept: int = 0) -> tuple[bool, bool, bool]:
        """Order, room and memory as gates of an item with this path, from whether order would let it begin.

        Until one item has shown what they take they come one at a time: the others wait for that one, not for bytes.
        """
        order, room = self.open_for(order)
        known = forecast.known or self.context.ledger.budget is None or self.expects(path)
        return order and known, room, self.opens_memory(path, forecast, bound, kept)

    def opens_memory(self, path: Path, forecast: Forecast, bound: int, kept: int = 0) -> bool:
        """Whether the ledger admits what is forecast for an item.

        `kept` is what will be kept beside it.

        Nothing is while an order behind this segment waits for bytes: windows would be filled with what those that are
        full need to be emptied. What order waits for is admitted in any case, but only once everything behind this
        segment has run dry: before that, what goes on there gives bytes back. It waits only where the ledger has fewer
        bytes to spare than it usually takes.
        """
        ledger = self.context.ledger
        if ledger.budget is None:
            return True
        if ledger.admits(forecast.bytes(bound, ledger.budget) + kept) and not self.end.starves:
            return True
        return self.expects(path) and self.end.idle and self._spares(int(bound * forecast.mean) + kept)

    def opens_further(self, item: Item, here: int, needs: int, behind: Iterable[Item]) -> bool:
        """Whether the ledger has what an item will need by what is known now, if that is more than was known before.

        `here` is what it will need in the stage that it is about to enter, `needs` at most to the end of its way. What
        is reserved for those that wait `behind` it counts as free: else all could wait for what all of them have.

        What order waits for goes on in any case once everything behind this segment has run dry, and so does any
        item while nothing at all is being worked on: else nobody would give bytes back. Those wait only where the
        ledger has too few bytes to spare. With a budget of 0 nothing else goes on: memory has to fall.
        """
        ledger = self.context.ledger
        if ledger.budget is None or (not item.bound and ledger.budget):
            return True
        has = max(item.charge.reserved, item.charge.actual)
        fits = (
            needs <= self.ENOUGH_SHARE * has
            or ledger.admits(needs - has)
            or ledger.admits(needs - has - sum(other.charge.beyond for other in behind))
        )
        if ledger.budget and fits and ledger.admits_work(here):
            return True
        waited_for = (self.expects(item.path) or not self.context.busy) and self.end.idle
        return waited_for and self._spares(max(0, here - item.charge.actual))

    def goes_further(self, item: Item, needs: int, behind: Iterable[Item]) -> None:
        """Reserve what an item will need by what is known now; those that wait behind it give what is lacking."""
        ledger = self.context.ledger
        if ledger.budget is None or not item.bound:
            return
        ledger.raise_to(item.charge, needs)
        if not ledger.debt:
            return  # nobody is asked for, which may cost sorting them
        for other in behind:
            ledger.lower_by(other.charge, ledger.debt)

    def begin(self, path: Path, position: int, forecast: Forecast, bound: int, origin: Callable[[], str]) -> Item:
        """An item comes into being; what is forecast for it is reserved."""
        self.hold(path[0])
        self.live += 1
        ledger = self.context.ledger
        size = forecast.bytes(bound, ledger.budget) if ledger.budget is not None else 0
        return Item(path, position, ledger.reserve(size, self._charges), bound, forecast, origin)

    def keep(self, size: int) -> Charge:
        """Reserve what is kept beside items."""
        return self.context.ledger.reserve(size, self._charges)

    def hold(self, root: int) -> None:
        """Something of this root is in hand."""
        self._open[root] = self._open.get(root, 0) + 1

    def let_go(self, root: int) -> None:
        """Something of this root is not in hand any more."""
        left = self._open[root] - 1
        if left:
            self._open[root] = left
        else:
            del self._open[root]

    def unborn(self, item: Item) -> None:
        """An item that was begun came to nothing, and nothing waits for it."""
        self.context.ledger.release(item.charge)
        self._left(item)
        self.pump()

    def waits_as_parent(self) -> None:
        """An item waits to be drawn from: it cannot go on by itself, but needs room for its children."""
        self._parents += 1

    def becomes_parent(self, item: Item) -> None:
        """An item that waited is about to be drawn from; its root stays in hand until it is closed."""
        self._parents -= 1
        self.live -= 1
        self.context.ledger.settle(item.charge)
        item.teach()

    def closed(self, path: Path, count: int) -> None:
        """A one-to-many stage has drawn all its items of a parent."""
        if self._restorer is not None:
            self._restorer.close(path, count)
        self.let_go(path[0])
        self.pump()

    def arrived(self, item: Item) -> None:
        """An item has passed the last stage."""
        ledger = self.context.ledger
        ledger.settle(item.charge)
        item.teach()
        if item.rows == 0 and item.failure is None:
            ledger.release(item.charge)
            if self._restorer is not None:
                self._restorer.drop(item.path)
            self._left(item)
        elif self._restorer is not None:
            padded = item.path + (0,) * (self.depth - len(item.path))
            self._restorer.leaf(padded, item)
        else:
            self._left(item)
            self.end.accept(item)
        self.pump()

    def fail(self, root: int, failure: Failure, stage: str, origin: Callable[[], str]) -> None:
        """Put a failure into the order at a root that has not begun; those before it may still wait to begin."""
        item = self.begin((root,), root, self.forecast, 0, origin)
        item.fail(failure, stage)
        self.arrived(item)

    def pump(self) -> None:
        """Give the end what is next in order, as far as it takes it."""
        if self._restorer is not None and not self.end.full:
            for item in self._restorer.ready():
                self._left(item)
                self.end.accept(item)
                if self.end.full:
                    break
        if not self._finished and self.total is not None and self.low >= self.total and not self._open:
            self._finished = True
            self.end.finish()

    def _spares(self, size: int) -> bool:
        """Whether the ledger has so many bytes to spare for what order waits for; notes where it has not."""
        if self.context.ledger.spares(size, self.context.busy > 0):
            return True
        self.context.lacking = size
        return False

    def _overfull(self) -> bool:
        """Without order nothing waits at the end for room there, so nothing more may begin."""
        return self._restorer is None and self.end.full

    def _left(self, item: Item) -> None:
        self.live -= 1
        self.let_go(item.path[0])


class Delivery:
    """The end of the last segment: items wait here for the consumer.

    Args:
        context: What all runs share.
        drop: Items (samples one by one) at the start that the consumer has had before.
        wake: Called when something new is ready, or the end is reached.

    Attributes:
        short: Whether the consumer took the last one there was since it last found as many as may be worked on at once.
    """

    full = False
    short = False
    starves = False

    def __init__(self, context: Context, drop: int, wake: Callable[[], None]) -> None:
        self.ready: deque[Item] = deque()
        self.ended = False
        self._context, self._drop, self._wake = context, drop, wake
        self._position: int | None = None
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits for the consumer."""
        return not self.ready

    def accept(self, item: Item) -> None:
        """The next item for the consumer."""
        if item.position != self._position:
            self._position, self._count = item.position, 0
        item.before = self._count
        self._count += item.count
        if self._drop and item.rows:
            dropped = min(self._drop, item.count)
            self._drop -= dropped
            item.before += dropped
            if dropped < item.count:
                assert item.keys is not None
                item.payload, item.keys = item.payload[dropped:], item.keys[dropped:]
                item.rows -= dropped
            elif item.failure is None:
                self._context.ledger.release(item.charge)
                return
            else:
                item.payload, item.keys, item.rows = None, None, 0
        self.ready.append(item)
        self._wake()

    def taking(self) -> None:
        """The consumer takes the first that is ready."""
        waiting = len(self.ready)
        self.short = waiting == 1 or (self.short and waiting < self._context.at_once)

    def finish(self) -> None:
        """The epoch has ended."""
        self.ended = True
        self._wake()


class Copied(NamedTuple):
    """What a window's pieces are put together to, as a token like theirs."""

    charge: Charge


@dataclass
class Sequence:
    """The end of an inner segment: a sequencer, whose orders the next segment's gather carries out.

    Attributes:
        context: What all runs share.
        sequencer: Decides what is put together.
        log: Finds back from rows to roots.
        preceding: The segment at whose end it stands; set once that exists.
        following: The next segment.
        check: Says whether what it would hold does not fit; a failure ends the epoch.
        out: Orders that wait to be carried out.
        on_orders: Called with new orders.
        wanted: Says how many bytes what is to be done next with what it gave would take, given the budget; 0 = nothing
            waits.
        stage: Name of the shuffle or batch.
    """

    context: Context
    sequencer: Sequencer
    log: ReplayLog
    preceding: Segment | None
    following: Segment
    check: Callable[["Sequence", list[Order]], Failure | None]
    out: deque[Order] = field(default_factory=deque)
    on_orders: Callable[[list[Order]], None] = lambda orders: None
    wanted: Callable[[int], int] = lambda budget: 0
    stage: str = ""
    _poisoned: bool = False

    @property
    def full(self) -> bool:
        """Whether it takes no header now: orders wait, which would pile up while the consumer pauses."""
        return bool(self.out) or self.sequencer.full

    @property
    def idle(self) -> bool:
        """Whether no order waits, and nothing made of one is in hand."""
        return not self.out and self.following.idle

    @property
    def starves(self) -> bool:
        """Whether what is to be taken next of its orders waits for bytes, or one behind it does."""
        ledger = self.context.ledger
        if ledger.budget is None or self.following.end.starves:
            return self.following.end.starves
        wanted = self.wanted(ledger.budget)
        return wanted > 0 and not ledger.admits(wanted)

    def accept(self, item: Item) -> None:
        """Take the next header."""
        ledger = self.context.ledger
        if self._poisoned:
            ledger.release(item.charge)
            return
        made = self.sequencer.made
        if self.context.ordered:
            self.log.add(item.position, item.rows)
        orders = self.sequencer.push(item, item.rows)
        pieces = self.sequencer.made - made
        if pieces:
            ledger.use(item.charge, pieces - 1)
        else:
            ledger.release(item.charge)
        self._give(orders)
        failure = item.failure or self.check(self, orders)
        if failure is not None:
            self._poison(failure, item)

    def finish(self) -> None:
        """No more headers come."""
        if self._poisoned:
            return
        self._give(self.sequencer.finish())
        self._release(self.sequencer.abandon())
        self.following.total = self.sequencer.emission
        self.following.pump()

    def begun(self, order: Order, copy_bytes: int = 0) -> None:
        """An order was taken in hand: there may be room for more headers now.

        `copy_bytes` is what it takes to put the pieces of its window together, if it does that.
        """
        if copy_bytes:
            assert order.window is not None
            order.window.copy = Copied(self.following.keep(copy_bytes))
        if self.preceding is not None:
            self.preceding.pump()

    def taken(self, window: Window) -> None:
        """Rows of a window were taken: what of it is not needed any more is given back."""
        let_go, copy = window.data.taken()
        if copy is not None:
            self.context.ledger.true_up(window.copy.charge, footprint(copy))
            self.context.ledger.settle(window.copy.charge)
        tokens = window.give_back(let_go)
        self._release(tokens)
        if copy is not None:
            for token in tokens:
                token.payload = None  # only now: its addresses, by which it was charged, might be another's at once

    def done(self, order: Order) -> None:
        """An order was carried out; the sequencer may take more now."""
        self._release(self.sequencer.done(order))
        if self.preceding is not None:
            self.preceding.pump()

    def _give(self, orders: list[Order]) -> None:
        self.on_orders(orders)
        self.out.extend(orders)

    def _poison(self, failure: Failure, item: Item) -> None:
        self._poisoned = True
        self._release(self.sequencer.abandon())
        self.following.fail(self.sequencer.emission, failure, item.failed_stage or self.stage, item.origin)

    def _release(self, tokens: list[Any]) -> None:
        release: Callable[[Charge], None] = self.context.ledger.release
        for token in tokens:
            release(token.charge)
