"""What may begin between two places of order, in which order things leave, and what they may hold meanwhile."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from intune.pipeline.calls import Failure
from intune.pipeline.context import Context
from intune.pipeline.item import Item
from intune.pipeline.ledger import Charge, Forecast, Ledger
from intune.pipeline.segment import PAUSE_SHARE, Delivery, Segment, Sequence
from intune.pipeline.sequence import BatchSequencer, ReplayLog, Sequencer, ShuffleSequencer
from intune.testing import ManualClock


class Taken:
    """An end that notes what it takes."""

    full = False
    idle = True
    starves = False

    def __init__(self) -> None:
        self.items, self.finished = list[Item](), 0

    def accept(self, item: Item) -> None:
        self.items.append(item)

    def finish(self) -> None:
        self.finished += 1


def context(**options: Any) -> Context:
    return Context(ManualClock(), Ledger(options.pop("budget", None)), **options)


def begun(segment: Segment, *path: int, rows: int = 1) -> Item:
    item = segment.begin(path, path[0], segment.forecast, 0, lambda: "somewhere")
    item.rows, item.payload = rows, path
    if len(path) == 1:
        segment.next_root = path[0] + 1
    return item


class TestSegment:
    def test_few_roots_begin_past_the_lowest_unfinished_one(self) -> None:
        segment = Segment(context(max_ahead=3), 1, 0, Taken(), set())
        items = []
        while segment.opens_order():
            items.append(begun(segment, len(items)))
        assert len(items) == 3
        segment.arrived(items[1])
        segment.arrived(items[2])
        assert not segment.opens_order()
        segment.arrived(items[0])
        assert segment.opens_order()

    @pytest.mark.parametrize(("prefetch", "most"), [(None, 4), (5, 5), (1, 1)])
    def test_there_is_room_until_as_many_batches_wait_as_were_chosen(self, prefetch: int | None, most: int) -> None:
        setting = context(max_ahead=3, at_once=4, prefetch=prefetch)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        for root in range(most):
            assert (segment.has_room(), segment.opens_order()) == (True, True)
            segment.arrived(begun(segment, root))
        assert (len(delivery.ready), segment.has_room(), segment.few_ready()) == (most, False, False)
        delivery.ready.popleft()
        assert segment.has_room()

    @staticmethod
    def waiting(segment: Segment, delivery: Delivery) -> int:
        """Batches that wait once there is no more room."""
        while segment.has_room():
            segment.arrived(begun(segment, segment.next_root))
        return len(delivery.ready)

    @staticmethod
    def take(delivery: Delivery, count: int) -> None:
        for _ in range(count):
            delivery.taking()
            delivery.ready.popleft()

    @pytest.mark.parametrize(("budget", "prefetch", "most"), [(1000, None, 16), (None, None, 4), (1000, 3, 3)])
    def test_more_may_wait_for_a_consumer_that_had_all_there_was_before_it_paused(
        self, budget: int | None, prefetch: int | None, most: int
    ) -> None:
        setting = context(at_once=4, budget=budget, prefetch=prefetch)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        first = self.waiting(segment, delivery)
        assert first == (prefetch or 4)  # nothing was taken yet: it may be an epoch that is begun ahead
        self.take(delivery, first)
        assert self.waiting(segment, delivery) == most

    def test_but_not_for_one_that_finds_enough_whenever_it_comes(self) -> None:
        setting = context(at_once=4, budget=1000)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        for _ in range(9):
            assert self.waiting(segment, delivery) == 4
            self.take(delivery, 2)
        self.take(delivery, 2)
        assert self.waiting(segment, delivery) == 16
        self.take(delivery, 14)  # it found enough: that it is the faster one has to show anew
        assert self.waiting(segment, delivery) == 4

    def test_nor_while_items_in_flight_hold_half_of_what_they_may(self) -> None:
        setting = context(at_once=4, budget=1000)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        self.waiting(segment, delivery)
        self.take(delivery, 4)
        charge = segment.keep(500)
        assert self.waiting(segment, delivery) == 4
        setting.ledger.release(charge)
        assert segment.has_room()

    def test_on_a_device_there_is_room_for_two_unless_more_were_chosen(self) -> None:
        for prefetch, most in ((None, 2), (4, 4)):
            setting = context(max_ahead=9, prefetch=prefetch)
            delivery = Delivery(setting, 0, lambda: None)
            segment = Segment(setting, 1, 0, delivery, set())
            for root in range(most):
                assert segment.few_ready()
                segment.arrived(begun(segment, root))
            assert not segment.few_ready()

    def test_few_children_lie_past_the_lowest_unfinished_one(self) -> None:
        segment = Segment(context(max_ahead=4), 2, 0, Taken(), set())
        segment.hold(0)
        children = []
        while segment.opens_child((0, len(children))):
            children.append(begun(segment, 0, len(children)))
        assert len(children) == 4
        for child in children[1:]:
            segment.arrived(child)
        assert not segment.opens_child((0, 4))
        segment.arrived(children[0])
        assert segment.opens_child((0, 4))

    def test_what_order_waits_for_may_always_begin(self) -> None:
        segment = Segment(context(max_ahead=1), 2, 0, Taken(), set())
        segment.hold(0)
        segment.hold(1)
        waiting = [begun(segment, 1, child) for child in range(3)]
        assert not segment.opens_child((1, 3))
        assert segment.opens_child((0, 0))
        assert segment.expects((0, 0))
        assert segment.expects((0,))
        segment.arrived(begun(segment, 0, 0))
        segment.closed((0,), 1)
        assert segment.expects((1, 0))
        for item in waiting:
            segment.arrived(item)
        assert segment.expects((1, 3))

    def test_ends_once_when_all_roots_have_left(self) -> None:
        end = Taken()
        segment = Segment(context(), 1, 0, end, set())
        items = [begun(segment, root) for root in range(2)]
        segment.arrived(items[1])
        segment.total = 2
        segment.pump()
        assert end.finished == 0
        segment.arrived(items[0])
        segment.pump()
        assert (end.finished, [item.payload for item in end.items], segment.idle) == (1, [(0,), (1,)], True)

    def test_items_without_rows_are_passed_and_let_go(self) -> None:
        end, charges = Taken(), set[Charge]()
        segment = Segment(context(), 2, 0, end, charges)
        segment.hold(0)
        empty, other = begun(segment, 0, 0, rows=0), begun(segment, 0, 1)
        segment.arrived(other)
        segment.arrived(empty)
        assert [item.payload for item in end.items] == [(0, 1)]
        assert charges == {other.charge}

    def test_a_failure_waits_for_what_is_before_it(self) -> None:
        """Also where the stage that has to begin that may begin one item at a time only."""
        end = Taken()
        segment = Segment(context(max_ahead=1), 1, 0, end, set())
        segment.fail(1, Failure(ValueError(), (1,)), "stage", lambda: "somewhere")
        assert (end.items, segment.opens_order()) == ([], True)
        segment.arrived(begun(segment, 0))
        assert [item.failure is not None for item in end.items] == [False, True]

    def test_without_order_items_pass_as_they_come(self) -> None:
        end = Taken()
        segment = Segment(context(ordered=False, max_ahead=3), 1, 0, end, set())
        items = [begun(segment, root) for root in range(3)]
        assert (segment.opens_order(), segment.expects((3,))) == (False, False)
        for place in (2, 0, 1):
            segment.arrived(items[place])
        assert [item.payload for item in end.items] == [(2,), (0,), (1,)]
        assert (segment.opens_order(), segment.expects((3,)), segment.low) == (True, True, 3)

    def test_what_does_not_fit_begins_only_when_all_behind_has_run_dry(self) -> None:
        setting = context(budget=100, max_ahead=5)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        for _ in range(3):
            segment.forecast.add(1, 1)
        setting.ledger.reserve(90, set())
        assert segment.opens_memory((1,), segment.forecast, 9)  # forecast 9.45 bytes
        assert not segment.opens_memory((1,), segment.forecast, 11)
        assert segment.opens_memory((0,), segment.forecast, 11)  # order waits for it
        segment.arrived(begun(segment, 0))
        assert not segment.opens_memory((1,), segment.forecast, 11)  # the consumer has one to take
        delivery.ready.popleft()
        assert segment.opens_memory((1,), segment.forecast, 11)

    def test_until_one_item_has_shown_what_they_take_the_others_wait_for_it_and_not_for_bytes(self) -> None:
        setting = context(budget=100, max_ahead=5)
        segment = Segment(setting, 1, 0, Delivery(setting, 0, lambda: None), set())
        assert segment.gates(True, (0,), segment.forecast, 9) == (True, True, True)
        first = begun(segment, 0)
        assert segment.gates(True, (1,), segment.forecast, 9) == (False, True, True)
        segment.forecast.note(1, 1)
        assert segment.gates(True, (1,), segment.forecast, 9) == (True, True, True)
        setting.ledger.reserve(95, set())
        assert segment.gates(True, (1,), segment.forecast, 9) == (True, True, False)
        segment.arrived(first)
        setting.ledger.budget = None
        assert segment.gates(True, (1,), Forecast(), 9) == (True, True, True)

    def test_what_is_reserved_for_those_behind_lets_the_first_one_go_further(self) -> None:
        """All were reserved 20 and turn out to need 30: else each would wait for what all have."""
        setting = context(budget=100, max_ahead=9)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        for _ in range(3):
            segment.forecast.add(10, 20)
        items = [segment.begin((root,), root, segment.forecast, 9, lambda: "somewhere") for root in range(5)]
        setting.busy = 1
        delivery.ready.append(items[0])  # behind it the consumer has work
        assert not setting.ledger.admits(20)
        first, *behind = items[1:]
        reserved = [item.charge.reserved for item in behind]
        assert not segment.opens_further(first, 20, 30, ())
        assert segment.opens_further(first, 20, 30, reversed(behind))
        charged = setting.ledger.charged
        segment.goes_further(first, 30, reversed(behind))
        assert first.charge.reserved == 30
        assert setting.ledger.charged <= max(charged, 100)
        taken = [before - item.charge.reserved for before, item in zip(reserved, behind, strict=True)]
        assert taken[:2] == [0, 0]  # the last one first, and no more than is lacking
        assert 0 < taken[2] <= 11

    def test_work_that_may_take_too_much_at_once_waits_though_all_is_reserved(self) -> None:
        setting = context(budget=1000, max_ahead=9)
        delivery = Delivery(setting, 0, lambda: None)
        segment = Segment(setting, 1, 0, delivery, set())
        segment.forecast.add(1, 10)
        items = [segment.begin((root,), root, segment.forecast, 10, lambda: "somewhere") for root in range(4)]
        for item in items:
            setting.ledger.true_up(item.charge, {id(item): 10})
        setting.busy, setting.ledger.work_budget = 1, 150
        delivery.ready.append(items[0])
        setting.ledger.work_on(items[1].charge, 100)
        assert segment.opens_further(items[2], 50, 50, ())
        assert not segment.opens_further(items[2], 51, 51, ())
        setting.ledger.true_up(items[1].charge, {1: 100})
        assert segment.opens_further(items[2], 51, 51, ())


class TestDelivery:
    def deliver(self, delivery: Delivery, ledger: Ledger, *runs: tuple[int, Any]) -> list[Any]:
        charges = set[Charge]()
        for position, payload in runs:
            item = Item((position,), position, ledger.reserve(10, charges), 0, Forecast(), lambda: "somewhere")
            item.payload, item.rows = payload, len(payload)
            item.keys = range(len(payload)) if isinstance(payload, list) else None
            delivery.accept(item)
        assert ledger.charged == 10 * len(delivery.ready)
        return [item.payload for item in delivery.ready]

    def test_what_the_consumer_has_had_is_left_out(self) -> None:
        setting, woken = context(), list[int]()
        delivery = Delivery(setting, 5, lambda: woken.append(1))
        runs = [(0, [1, 2]), (2, [3, 4]), (4, [5, 6, 7]), (7, [8])]
        assert self.deliver(delivery, setting.ledger, *runs) == [[6, 7], [8]]
        assert len(woken) == 2
        assert [(item.rows, list(item.keys or ())) for item in delivery.ready] == [(2, [1, 2]), (1, [0])]

    def test_blocks_count_as_one(self) -> None:
        setting = context()
        assert self.deliver(Delivery(setting, 2, lambda: None), setting.ledger, (0, "abc"), (0, "de"), (1, "f")) == [
            "f"
        ]

    def test_a_failure_behind_what_was_had_stays(self) -> None:
        setting = context()
        delivery = Delivery(setting, 2, lambda: None)
        item = Item((0,), 0, setting.ledger.reserve(0, set()), 0, Forecast(), lambda: "somewhere")
        item.payload, item.rows, item.keys = [1, 2], 2, range(2)
        item.fail(Failure(ValueError(), (2,)), "stage")
        delivery.accept(item)
        assert [(item.rows, item.failure is not None) for item in delivery.ready] == [(0, True)]


class TestSequence:
    def make(self, sequencer: Sequencer, failure: Failure | None = None) -> Sequence:
        setting = context()
        following = Segment(setting, 1, 0, Taken(), set())
        return Sequence(setting, sequencer, ReplayLog(), None, following, lambda sequence, orders: failure)

    def give(self, sequence: Sequence, root: int, rows: int, failure: Failure | None = None) -> Item:
        item = Item((root,), root, sequence.context.ledger.reserve(100, set()), 0, Forecast(), lambda: "somewhere")
        item.rows, item.failure = rows, failure
        sequence.accept(item)
        return item

    def test_items_are_held_until_the_last_order_that_needs_them_is_done(self) -> None:
        sequence = self.make(BatchSequencer(4))
        ledger = sequence.context.ledger
        first, second = self.give(sequence, 0, 6), self.give(sequence, 1, 3)
        one, other = sequence.out
        assert (ledger.charged, first.charge.uses, second.charge.uses) == (200, 2, 2)
        sequence.done(other)
        assert (ledger.charged, first.charge.uses, second.charge.uses) == (200, 1, 1)
        sequence.done(one)
        assert (ledger.charged, second.charge.uses) == (100, 1)
        sequence.finish()
        sequence.done(sequence.out[-1])
        assert ledger.charged == 0

    def test_while_an_order_waits_for_bytes_nothing_before_it_takes_any(self) -> None:
        sequence = self.make(BatchSequencer(2))
        sequence.wanted = lambda budget: sequence.following.forecast.bytes(sum(o.rows for o in sequence.out), budget)
        ledger = sequence.context.ledger
        ledger.budget = 300
        before = Segment(sequence.context, 1, 0, sequence, set())
        for segment in (before, sequence.following):
            for _ in range(3):
                segment.forecast.add(1, 50)  # an order of two rows: 105 bytes
        ledger.reserve(80, set())
        self.give(sequence, 0, 2)  # holds 100
        ledger.budget = 285
        assert not sequence.starves
        assert before.opens_memory((1,), before.forecast, 1)
        ledger.budget = 284
        assert sequence.starves
        assert ledger.admits(before.forecast.bytes(1, 284))
        assert not before.opens_memory((1,), before.forecast, 1)
        sequence.out.clear()
        assert before.opens_memory((1,), before.forecast, 1)

    def test_takes_nothing_while_orders_wait_to_begin(self) -> None:
        sequence = self.make(BatchSequencer(2))
        self.give(sequence, 0, 5)
        assert (len(sequence.out), sequence.full, sequence.idle) == (2, True, False)
        sequence.out.clear()
        assert (sequence.full, sequence.idle) == (False, True)

    def test_takes_nothing_while_two_windows_are_in_hand(self) -> None:
        sequence = self.make(ShuffleSequencer(16, 100, (0,)))  # windows of 1, 2 and more rows
        self.give(sequence, 0, 3)
        orders = list(sequence.out)
        sequence.out.clear()  # both have begun
        assert sequence.full
        sequence.done(orders[0])
        assert not sequence.full

    def test_is_not_idle_while_what_was_made_of_an_order_goes_on(self) -> None:
        sequence = self.make(BatchSequencer(2))
        item = begun(sequence.following, 0)
        assert not sequence.idle
        sequence.following.arrived(item)
        assert sequence.idle

    def test_the_end_says_how_many_orders_there_were(self) -> None:
        sequence = self.make(BatchSequencer(2, drop_last=True))
        self.give(sequence, 0, 5)
        sequence.finish()
        assert (sequence.following.total, len(sequence.out)) == (2, 2)
        assert sequence.context.ledger.charged == 100  # the rest of its rows was given up, but two orders need it

    @pytest.mark.parametrize("by_check", [True, False])
    def test_a_failure_takes_the_place_of_the_next_order(self, by_check: bool) -> None:
        failure = Failure(ValueError(), (0,))
        sequence = self.make(BatchSequencer(2), failure if by_check else None)
        self.give(sequence, 0, 3, None if by_check else failure)
        later = self.give(sequence, 1, 2)
        sequence.finish()
        end = sequence.following.end
        assert isinstance(end, Taken)
        assert (len(sequence.out), end.items, later.charge.uses, sequence.following.total) == (1, [], 0, None)
        sequence.following.arrived(begun(sequence.following, 0))
        sequence.done(sequence.out.popleft())
        assert [item.failure for item in end.items] == [None, failure]
        assert sequence.context.ledger.charged == 0

    def test_remembers_from_which_root_rows_came(self) -> None:
        sequence = self.make(BatchSequencer(2))
        for root, rows in [(3, 1), (3, 1), (4, 5)]:
            self.give(sequence, root, rows)
        assert sequence.log.find(1) == (3, 0)
        assert sequence.log.find(6) == (4, 2)


# --- one segment, its gates and the ledger, against plain bookkeeping


@dataclass
class Made:
    """What comes of one draw: bytes as it is read, bytes after the stage behind, rows, and whether that stage fails."""

    read: int
    mapped: int
    rows: int
    fails: bool


@dataclass
class Unit:
    """A unit of a source: a bound on the bytes of what it gives, what it gives, and what it keeps while it is open."""

    bound: int
    gives: list[Made]
    kept: int


@dataclass
class Hand:
    """An item in hand."""

    item: Item
    made: Made | None
    drawing: "Draw"
    reserved: int
    forced: bool
    read: bool = False


@dataclass
class Draw:
    """A unit that is being drawn from."""

    root: int
    unit: Unit
    drawn: int = 0
    given: int = 0
    charge: Charge | None = None
    forced: bool = False


sizes = st.integers(0, 300)
units = st.lists(
    st.builds(
        Unit,
        st.integers(1, 100),
        st.lists(st.builds(Made, sizes, sizes, st.integers(0, 2), st.just(False)), max_size=9),
        st.just(0) | st.integers(0, 400),
    ),
    max_size=8,
)


class AdmissionMachine(RuleBasedStateMachine):
    """Units are drawn and mapped, and the consumer takes what comes: rules are all that a scheduler could do next."""

    @initialize(
        units=units,
        budget=st.none() | st.integers(0, 1000),
        ahead=st.integers(1, 6),
        prefetch=st.none() | st.integers(1, 3),
        failing=st.none() | st.integers(0, 20),
        slots=st.integers(1, 9),
    )
    def begin_run(
        self, units: list[Unit], budget: int | None, ahead: int, prefetch: int | None, failing: int | None, slots: int
    ) -> None:
        made = [(root, child) for root, unit in enumerate(units) for child in unit.gives if child.rows]
        if failing is not None and failing < len(made):
            made[failing][1].fails = True
            made = made[: failing + 1]
        self.to_come = [child for _, child in made]
        self.units, self.slots, self.count = units, slots, len(made)
        self.context = Context(ManualClock(), Ledger(budget), prefetch=prefetch, max_ahead=ahead)
        self.ledger, self.charges = self.context.ledger, set[Charge]()
        self.delivery = Delivery(self.context, 0, lambda: None)
        self.segment = Segment(self.context, 2, 0, self.delivery, self.charges)
        self.segment.total = len(units)
        self.segment.pump()
        self.hands, self.parked, self.alive = list[Hand](), list[Draw](), True
        self.live: dict[Charge, Hand] = {}
        self.open: list[Draw] = []
        self.failed = False

    # what a scheduler could do

    def choice(self) -> Draw | None:
        """The unit to draw from next, as a source chooses it, if all gates are open."""
        segment, root = self.segment, self.segment.next_root
        self.parked.sort(key=lambda draw: draw.root)
        new = Draw(root, self.units[root]) if root < len(self.units) and not self.failed else None
        draw = min(
            (each for each in (new, *self.parked[:1]) if each is not None), key=lambda each: each.root, default=None
        )
        if draw is None or len(self.hands) >= self.slots or not segment.has_room():
            return None
        path = (draw.root, draw.given)
        order = segment.opens_child(path) and (draw is not new or segment.opens_order())
        kept = draw.unit.kept if draw is new else 0
        return draw if all(segment.gates(order, path, segment.forecast, draw.unit.bound, kept)) else None

    @precondition(lambda self: self.alive and self.choice() is not None)
    @rule()
    def draw(self) -> None:
        draw, segment, ledger = self.choice(), self.segment, self.ledger
        assert draw is not None
        size = segment.forecast.bytes(draw.unit.bound, ledger.budget) if ledger.budget is not None else 0
        if draw in self.parked:
            self.parked.remove(draw)
            forced = not ledger.admits(size)
        else:
            forced = draw.forced = not ledger.admits(size + draw.unit.kept)
            segment.next_root += 1
            segment.hold(draw.root)
            draw.charge = segment.keep(draw.unit.kept)
            self.open.append(draw)
        if forced:  # what order waits for, and the consumer has all that came before
            assert not self.delivery.ready
            assert not any(hand.item.path < (draw.root, draw.given) for hand in self.live.values())
            assert not any(hand.forced and not hand.read for hand in self.live.values())
        if ledger.budget is not None and not segment.forecast.known:
            assert segment.live == 0
        waiting, prefetch = len(self.delivery.ready), self.context.prefetch
        if prefetch is not None or waiting < self.context.at_once:
            assert waiting < (prefetch or self.context.at_once)
        else:  # for a consumer that is the faster one, with half of the memory left
            assert waiting < PAUSE_SHARE * self.context.at_once
            assert self.delivery.short
            assert ledger.budget is not None
            assert 2 * ledger.charged < ledger.budget
        path, bound = (draw.root, draw.given), draw.unit.bound
        item = segment.begin(path, draw.root, segment.forecast, bound, lambda: f"unit {draw.root}")
        made = draw.unit.gives[draw.drawn] if draw.drawn < len(draw.unit.gives) else None
        draw.drawn += 1
        hand = Hand(item, made, draw, size, forced)
        self.hands.append(hand)
        self.live[item.charge] = hand

    def workable(self) -> list[Hand]:
        """Units being drawn, and items that the ledger lets go on to be mapped."""
        self.context.busy = sum(not hand.read for hand in self.hands)
        return [hand for hand in self.hands if not hand.read or self.opens_further(hand.item)]

    def needs(self, item: Item) -> int:
        return 0 if self.ledger.budget is None else self.segment.forecast.bytes(item.bound, self.ledger.budget)

    def opens_further(self, item: Item) -> bool:
        return self.segment.opens_further(item, 0, self.needs(item), ())

    @precondition(lambda self: self.alive and self.workable())
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.workable())))

    def finish(self, hand: Hand) -> None:
        self.hands.remove(hand)
        item, made, draw = hand.item, hand.made, hand.drawing
        if hand.read:
            assert made is not None
            charged = self.ledger.charged
            self.segment.goes_further(item, self.needs(item), ())
            if self.ledger.charged > charged:
                hand.reserved = item.charge.reserved
                hand.forced = hand.forced or self.ledger.debt > 0
            item.held(item.charge.actual + made.mapped)
            self.ledger.true_up(item.charge, {id(item): made.mapped})
            item.rows = made.rows
            if made.fails:
                item.rows = 0
                item.fail(Failure(ValueError(), item.path), "stage")
                self.failed = True
            self.segment.arrived(item)
            assert item.charge.reserved == 0
        elif made is None:  # the unit gave nothing more
            assert draw.charge is not None
            self.ledger.release(draw.charge)
            self.open.remove(draw)
            self.segment.closed((draw.root,), draw.given)
            self.segment.unborn(item)
        else:
            assert draw.charge is not None
            self.ledger.true_up(item.charge, {id(made): made.read})
            if draw.unit.kept:  # it holds on to the last one too
                self.ledger.true_up(draw.charge, {id(made): made.read, id(draw): draw.unit.kept})
            item.held(made.read)
            item.payload = made
            draw.given += 1
            self.parked.append(draw)
            hand.read = True
            self.hands.append(hand)

    @precondition(lambda self: self.alive and self.delivery.ready)
    @rule()
    def take(self) -> None:
        self.delivery.taking()
        item = self.delivery.ready.popleft()
        assert item.payload is self.to_come.pop(0)
        assert (item.failure is not None) == (item.payload.fails)
        self.ledger.release(item.charge)
        if item.failure is not None:
            self.stop(True)

    @rule(now=st.integers(0, 19).map(lambda number: number == 7))
    def stop(self, now: bool) -> None:
        if not now:
            return
        self.alive = False
        self.ledger.release_all(self.charges)
        assert (self.ledger.charged, self.charges) == (0, set())

    # what must hold

    @invariant()
    def the_bound_is_kept(self) -> None:
        """Budget, what items made beyond their reservations, the last of each open unit, and what order waited for."""
        if not getattr(self, "alive", False):
            return
        self.live = {charge: hand for charge, hand in self.live.items() if charge in self.charges}
        if self.ledger.budget is None:
            return
        overrun = sum(max(0, charge.actual - hand.reserved) for charge, hand in self.live.items())
        forced = sum(hand.reserved for hand in self.live.values() if hand.forced)
        last = sum(max(0, draw.charge.actual - draw.unit.kept) for draw in self.open if draw.charge is not None)
        kept = sum(draw.unit.kept for draw in self.open if draw.forced)
        assert self.ledger.charged <= self.ledger.budget + overrun + forced + last + kept

    @invariant()
    def few_items_lie_past_the_lowest_unfinished_one(self) -> None:
        if getattr(self, "alive", False):
            assert self.segment.next_root - self.segment.low <= self.context.max_ahead
            assert self.segment.live <= self.context.max_ahead * 2 + 1

    def teardown(self) -> None:
        """Go on until all was taken; there is always something that can go on."""
        if not getattr(self, "alive", False):
            return
        while self.to_come or not self.delivery.ended:
            if self.choice() is not None:
                self.draw()
            elif self.workable():
                self.finish(self.workable()[0])
            elif self.delivery.ready:
                self.take()
            else:
                note(f"{self.parked}, {self.segment.low}, {self.ledger.charged}")
                raise AssertionError("a deadlock")
            if not self.alive:
                return
            self.the_bound_is_kept()
        assert (self.ledger.charged, self.segment.live) == (0, 0)
        assert self.segment.idle


TestAdmission = pytest.mark.slow(AdmissionMachine.TestCase)
TestAdmission.settings = settings(max_examples=100, stateful_step_count=30)
