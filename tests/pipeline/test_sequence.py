"""Order restored, and what batch and shuffle decide: each row once, and the same after a resume."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from intune.pipeline.sequence import (
    BatchSequencer,
    Order,
    ReplayLog,
    Restorer,
    Sequencer,
    ShuffleSequencer,
)

from .chains import batches, emissions

Path = tuple[int, ...]


# --- order restored


class Node(NamedTuple):
    """A path that comes: a leaf, or a parent with children; `gone`: nothing came of it."""

    path: Path
    children: tuple["Node", ...] | None
    gone: bool


@st.composite
def forests(draw: st.DrawFn) -> tuple[int, int, tuple[Node, ...]]:
    """Depth, number of the first root, and the roots."""
    depth, first = draw(st.integers(1, 3)), draw(st.integers(0, 5))

    def node(path: Path) -> Node:
        gone = draw(st.integers(0, 4)) == 0
        if gone or len(path) == depth:
            return Node(path, None, gone)
        return Node(path, tuple(node((*path, i)) for i in range(draw(st.integers(0, 3)))), False)

    return depth, first, tuple(node((root,)) for root in range(first, first + draw(st.integers(0, 4))))


Event = tuple[str, Path, int]


def events_of(node: Node) -> Iterator[Event]:
    if node.gone:
        yield "drop", node.path, 0
    elif node.children is None:
        yield "leaf", node.path, 0
    else:
        yield "close", node.path, len(node.children)
        for child in node.children:
            yield from events_of(child)


def leaves_of(node: Node) -> Iterator[Path]:
    if node.children is not None:
        for child in node.children:
            yield from leaves_of(child)
    elif not node.gone:
        yield node.path


def next_of(roots: tuple[Node, ...], first: int, depth: int, known: set[Path]) -> Path:
    """The path, as long as a leaf's, that comes next once everything that is known was given back."""

    def find(node: Node) -> Path | None:
        for child in node.children or ():
            found = find(child)
            if found is not None:
                return found
        if node.path in known:
            return None
        return (*node.path, len(node.children)) if node.children else node.path

    for root in roots:
        found = find(root)
        if found is not None:
            return found + (0,) * (depth - len(found))
    return (first + len(roots),) + (0,) * (depth - 1)


class TestRestorer:
    @given(forests(), st.randoms(use_true_random=False), st.integers(1, 5))
    def test_gives_each_leaf_once_in_order_whatever_comes_when(
        self, forest: tuple[int, int, tuple[Node, ...]], rng: random.Random, every: int
    ) -> None:
        depth, first, roots = forest
        events = [event for root in roots for event in events_of(root)]
        rng.shuffle(events)
        restorer = Restorer(depth, first)
        given_back: list[Path] = []
        for number, (kind, path, count) in enumerate(events):
            if kind == "leaf":
                restorer.leaf(path, path)
            elif kind == "drop":
                restorer.drop(path)
            else:
                restorer.close(path, count)
            if number % every == 0:
                given_back += restorer.ready()
        given_back += restorer.ready()
        assert given_back == [leaf for root in roots for leaf in leaves_of(root)]
        assert restorer.low == first + len(roots)

    @given(forests(), st.randoms(use_true_random=False))
    def test_knows_what_comes_next(self, forest: tuple[int, int, tuple[Node, ...]], rng: random.Random) -> None:
        depth, first, roots = forest
        events = [event for root in roots for event in events_of(root)]
        rng.shuffle(events)
        restorer, known = Restorer(depth, first), set[Path]()
        asked = [path for _, path, _ in events] + [(*path, count) for kind, path, count in events if kind == "close"]
        for kind, path, count in [*events, ("", (), 0)]:
            following = next_of(roots, first, depth, known)
            assert restorer.low == following[0]
            for question in asked:
                assert restorer.expects(question) == (question + (0,) * (depth - len(question)) == following), question
            if kind == "leaf":
                restorer.leaf(path, path)
            elif kind == "drop":
                restorer.drop(path)
            elif kind == "close":
                restorer.close(path, count)
            known.add(path)
            deque(restorer.ready(), maxlen=0)

    def test_may_be_stopped_between_two_leaves(self) -> None:
        restorer = Restorer(2)
        for child in range(3):
            restorer.leaf((0, child), child)
        restorer.close((0,), 3)
        restorer.leaf((1, 0), 3)
        assert next(restorer.ready()) == 0
        assert restorer.expects((0, 1))
        assert list(restorer.ready()) == [1, 2, 3]
        assert restorer.low == 1

    def test_a_parent_without_children_is_passed(self) -> None:
        restorer = Restorer(3)
        restorer.close((0,), 0)
        restorer.close((1,), 1)
        restorer.close((1, 0), 0)
        restorer.leaf((2, 0, 0), "leaf")
        assert list(restorer.ready()) == ["leaf"]


# --- batch and shuffle

KEY = (5, 0, 3, 1)

headers_of_rows = st.lists(st.integers(0, 12), max_size=14)


def feed(sequencer: Sequencer, headers: list[tuple[int, int]]) -> list[Order]:
    """Give headers as (first row, rows); the token of a header is its first row."""
    orders = [order for first, rows in headers for order in sequencer.push(first, rows)]
    return orders + sequencer.finish()


def numbered(rows: list[int], first: int = 0) -> list[tuple[int, int]]:
    """Headers with so many rows as (first row, rows)."""
    return [(first + sum(rows[:i]), count) for i, count in enumerate(rows)]


def rows_of(order: Order) -> list[int]:
    """The rows, by their number from the start of the epoch, that carrying out an order gives."""
    window = order.window
    if window is None:
        return [token + row for token, start, stop in order.pieces for row in range(start, stop)]
    held = [token + row for token, start, stop in window.pieces for row in range(start, stop)]
    assert len(held) == window.rows
    return [held[place] for place in window.permutation()[order.start : order.start + order.rows]]


class Case(NamedTuple):
    """A way to make a sequencer, and what it must give for so many rows."""

    make: Callable[..., Sequencer]
    expected: Callable[[int], list[list[int]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 40))
    if draw(st.booleans()):
        drop = draw(st.booleans())
        return Case(lambda **at: BatchSequencer(size, drop, **at), lambda total: batches(range(total), size, drop))
    emit = draw(st.integers(1, 20))
    return Case(lambda **at: ShuffleSequencer(size, emit, KEY, **at), lambda total: emissions(total, size, emit, KEY))


class TestSequencers:
    @given(cases(), headers_of_rows)
    def test_give_each_row_once_as_planned_however_rows_are_cut(self, case: Case, rows: list[int]) -> None:
        orders = feed(case.make(), numbered(rows))
        expected = case.expected(sum(rows))
        assert [rows_of(order) for order in orders] == expected
        assert [order.emission for order in orders] == list(range(len(expected)))
        assert [order.rows for order in orders] == [len(each) for each in expected]
        assert [order.row for order in orders] == [sum(map(len, expected[:i])) for i in range(len(expected))]

    @given(cases(), headers_of_rows)
    def test_know_beforehand_how_much_they_give(self, case: Case, rows: list[int]) -> None:
        orders = feed(case.make(), numbered(rows))
        sequencer = case.make()
        assert sequencer.count(sum(rows)) == len(orders)
        assert sequencer.rows(sum(rows)) == sum(order.rows for order in orders)

    @pytest.mark.slow
    @given(cases(), headers_of_rows, st.data())
    def test_give_each_piece_back_once(self, case: Case, rows: list[int], data: st.DataObject) -> None:
        sequencer, held, out = case.make(), Counter[int](), list[Order]()

        def carry_out_some(least: int) -> None:
            while len(out) > least:
                held.subtract(sequencer.done(out.pop(data.draw(st.integers(0, len(out) - 1)))))

        for first, count in numbered(rows):
            before = sequencer.made
            out += sequencer.push(first, count)
            held[first] += sequencer.made - before
            assert (sequencer.made > before) == (count > 0)
            carry_out_some(data.draw(st.integers(0, 3)))
        out += sequencer.finish()
        if data.draw(st.booleans()):
            carry_out_some(0)
        held.subtract(sequencer.abandon())
        carry_out_some(0)
        assert set(held.values()) <= {0}
        assert sequencer.abandon() == []

    @pytest.mark.slow
    @given(cases(), headers_of_rows, st.data())
    @settings(max_examples=200)
    def test_go_on_from_any_emission(self, case: Case, rows: list[int], data: st.DataObject) -> None:
        """The log finds the root from which a second sequencer has to be fed."""
        roots = [0]
        for _ in rows[1:]:
            roots.append(roots[-1] + data.draw(st.integers(0, 1)))
        headers, log = numbered(rows), ReplayLog()
        whole = case.make()
        orders = list[Order]()
        for root, (first, count) in zip(roots, headers, strict=False):
            log.add(root, count)
            orders += whole.push(first, count)
        orders += whole.finish()
        for emission in range(len(orders) + 1):
            found = log.find(whole.first_row(emission))
            if not rows:
                assert found is None
                continue
            assert found is not None
            root, row = found
            again = case.make(emission=emission, row=row)
            rest = [header for number, header in zip(roots, headers, strict=False) if number >= root]
            assert rest[0][0] == row
            orders_again = feed(again, rest)
            assert [rows_of(order) for order in orders_again] == [rows_of(order) for order in orders[emission:]]
            assert [order[:2] + order[4:] for order in orders_again] == [o[:2] + o[4:] for o in orders[emission:]]
            assert again.emission == len(orders)
            pieces = [token for order in orders_again for token in again.done(order)] + again.abandon()
            assert len(pieces) == again.made

    @given(cases(), headers_of_rows)
    def test_need_the_fewest_rows(self, case: Case, rows: list[int]) -> None:
        """First rows rise with emissions, and no emission needs a row before them."""
        sequencer = case.make()
        orders = feed(sequencer, numbered(rows))
        needed = [sequencer.first_row(order.emission) for order in orders]
        assert needed == sorted(needed)
        for first, order in zip(needed, orders, strict=True):
            whole = range(first, first + order.window.rows) if order.window is not None else rows_of(order)
            assert whole[0] == first
            assert set(rows_of(order)) <= set(whole)

    @given(cases(), st.integers(0, 200))
    def test_know_positions_asked_for_in_any_order(self, case: Case, emission: int) -> None:
        asked = case.make()
        places = [asked.first_row(number) for number in (emission, emission // 2, emission, 0)]
        assert places == [case.make().first_row(number) for number in (emission, emission // 2, emission, 0)]

    @pytest.mark.parametrize(
        "make", [lambda **at: BatchSequencer(4, **at), lambda **at: ShuffleSequencer(4, 2, KEY, **at)]
    )
    def test_refuse_to_begin_behind_the_rows_they_need(self, make: Callable[..., Sequencer]) -> None:
        with pytest.raises(ValueError, match=r"rows begin at 5"):
            make(emission=1, row=5)


class TestShuffle:
    def test_windows_rise_and_then_stay(self) -> None:
        orders = feed(ShuffleSequencer(1000, 10_000, KEY), [(0, 3500)])
        sizes = [order.window.rows for order in orders if order.window is not None]
        assert sizes == [62, 125, 250, 500, 1000, 1000, 563]

    def test_tiny_windows_have_at_least_one_row(self) -> None:
        orders = feed(ShuffleSequencer(5, 100, KEY), [(0, 15)])
        assert [order.rows for order in orders] == [1, 1, 1, 2, 5, 5]

    def test_emissions_are_cut_at_multiples_so_that_batches_fit(self) -> None:
        orders = feed(ShuffleSequencer(64, 10, KEY), [(0, 140)])
        bounds = [(order.row, order.row + order.rows) for order in orders]
        ends = {stop for _, stop in bounds}
        assert all(start // 10 == (stop - 1) // 10 for start, stop in bounds)
        assert {4, 12, 28, 60, 124, 140} <= ends
        assert all(stop % 10 == 0 or stop in {4, 12, 28, 60, 124} for stop in ends)

    def test_is_full_while_two_windows_are_held(self) -> None:
        sequencer = ShuffleSequencer(16, 2, KEY)  # windows of 1, 2, 4, 8 and then 16 rows
        first = sequencer.push("a", 1)
        assert not sequencer.full
        second = sequencer.push("b", 2)
        assert sequencer.full
        sequencer.done(first[0])
        assert not sequencer.full
        third = sequencer.push("c", 4)
        assert sequencer.full
        assert len(second) == 2
        sequencer.done(second[1])
        assert sequencer.full  # one emission of the window is still to come
        sequencer.done(second[0])
        assert not sequencer.full
        for order in third:
            sequencer.done(order)
        assert sequencer.abandon() == []

    def test_a_window_keeps_its_data_until_all_its_orders_are_done(self) -> None:
        sequencer = ShuffleSequencer(32, 1, KEY)  # the first window has 2 rows
        one, other = sequencer.push("a", 2)
        assert one.window is not None
        one.window.data = "kept"
        assert sequencer.done(other) == []
        assert one.window.data == "kept"
        assert sequencer.done(one) == ["a"]
        assert one.window.data is None

    def test_differs_by_key_and_window_only(self) -> None:
        def mixed(key: tuple[int, ...]) -> list[list[int]]:
            return [rows_of(order) for order in feed(ShuffleSequencer(30, 100, key), [(0, 90)])]

        assert mixed((1, 2)) == mixed((1, 2))
        assert mixed((1, 2)) != mixed((1, 3))
        one, other = mixed((1, 2))[4:6]
        assert [row - min(one) for row in one] != [row - min(other) for row in other]


class TestReplayLog:
    def test_finds_the_last_root_that_began_at_or_before_a_row(self) -> None:
        log = ReplayLog(100)
        assert log.find(100) is None
        for root, rows in [(7, 4), (7, 6), (8, 0), (9, 10)]:
            log.add(root, rows)
        assert log.find(100) == (7, 100)
        assert log.find(109) == (7, 100)
        assert log.find(110) == (9, 110)
        assert log.find(500) == (9, 110)

    def test_forgets_what_is_not_needed_any_more(self) -> None:
        log = ReplayLog()
        for root in range(1000):
            log.add(root, 3)
        assert log.find(2400) == (800, 2400)
        assert log.find(0) == (800, 2400)


# --- shuffle, then batch, with rows left out in between


class Spot(NamedTuple):
    """Where a run of the composed chain begins: a unit, then (emission, row) for shuffle and batch."""

    unit: int = 0
    shuffle: tuple[int, int] = (0, 0)
    batch: tuple[int, int] = (0, 0)


class Composed:
    """Units of rows -> shuffle -> filter -> batch, one step at a time, as an engine would run it."""

    def __init__(self, units: list[list[int]], size: int, emit: int, keep: int, batch: int, start: Spot) -> None:
        self._keep = keep
        self._shuffle = ShuffleSequencer(size, emit, KEY, emission=start.shuffle[0], row=start.shuffle[1])
        self._batch = BatchSequencer(batch, emission=start.batch[0], row=start.batch[1])
        self._unit_log, self._emission_log = ReplayLog(start.shuffle[1]), ReplayLog(start.batch[1])
        self._units, self._start = units, start

    def __iter__(self) -> Iterator[tuple[list[int], Spot]]:
        """Each batch, and where a run goes on after it."""
        first = 0
        for number, blocks in enumerate(self._units):
            for rows in blocks:
                if number >= self._start.unit:
                    self._unit_log.add(number, rows)
                    yield from self._emitted(self._shuffle.push(first, rows))
                first += rows
        yield from self._emitted(self._shuffle.finish())
        yield from self._given(self._batch.finish())

    def _emitted(self, orders: list[Order]) -> Iterator[tuple[list[int], Spot]]:
        for order in orders:
            kept = [row for row in rows_of(order) if row % self._keep]
            if kept:  # what is empty is never heard of
                self._emission_log.add(order.emission, len(kept))
                yield from self._given(self._batch.push(kept, len(kept)))

    def _given(self, orders: list[Order]) -> Iterator[tuple[list[int], Spot]]:
        for order in orders:
            rows = [token[row] for token, start, stop in order.pieces for row in range(start, stop)]
            following = order.emission + 1
            emission, row = self._found(self._emission_log, self._batch.first_row(following))
            unit, source_row = self._found(self._unit_log, self._shuffle.first_row(emission))
            yield rows, Spot(unit, (emission, source_row), (following, row))

    def _found(self, log: ReplayLog, row: int) -> tuple[int, int]:
        found = log.find(row)
        assert found is not None
        return found


@pytest.mark.slow
@given(
    units=st.lists(st.lists(st.integers(1, 12), max_size=4), max_size=6),
    size=st.integers(1, 40),
    emit=st.integers(1, 20),
    keep=st.integers(1, 5),
    batch=st.integers(1, 15),
)
@example(units=[[1, 1], [], [2]], size=1, emit=1, keep=1, batch=3)
@settings(max_examples=150)
def test_a_chain_goes_on_after_any_batch(units: Any, size: int, emit: int, keep: int, batch: int) -> None:
    def run(start: Spot) -> list[tuple[list[int], Spot]]:
        return list(Composed(units, size, emit, keep, batch, start))

    whole = run(Spot())
    total = sum(map(sum, units))
    kept = [row for emission in emissions(total, size, emit, KEY) for row in emission if row % keep]
    assert [rows for rows, _ in whole] == [kept[i : i + batch] for i in range(0, len(kept), batch)]
    for given_before, (_, start) in enumerate(whole, 1):
        rest = run(start)
        assert [rows for rows, _ in rest] == [rows for rows, _ in whole[given_before:]]
        assert [spot for _, spot in rest] == [spot for _, spot in whole[given_before:]]
