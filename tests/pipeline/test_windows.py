"""What a shuffle's windows hold while they are given out, and what is charged for it."""

import random
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune
from intune.pipeline.chain import Pipeline
from intune.pipeline.footprint import footprint
from intune.pipeline.gather import Gather
from intune.pipeline.item import Item
from intune.pipeline.ledger import Charge, Forecast
from intune.pipeline.run import Position
from intune.pipeline.sequence import Order, ShuffleSequencer

from .chains import Blocks, Chain, Given, shuffle
from .harness import Settings, Stepped


class Sample:
    """One that can be watched."""

    def __init__(self, number: int) -> None:
        self.number = number


class Token:
    """What a gather sees of an item."""

    def __init__(self, payload: Any, rows: int) -> None:
        self.payload, self.rows, self.source_rows = payload, rows, float(rows)


def windows(counts: list[int], size: int, emit: int) -> tuple[list[Order], list[Token], list["weakref.ref[Sample]"]]:
    """Orders for samples that come in runs of so many."""
    sequencer, found, tokens, watched = ShuffleSequencer(size, emit, (1,)), list[Order](), list[Token](), []
    for count in counts:
        samples = [Sample(len(watched) + place) for place in range(count)]
        watched += [weakref.ref(sample) for sample in samples]
        tokens.append(Token(samples, count))
        del samples
        found += sequencer.push(tokens[-1], count)
    return found + sequencer.finish(), tokens, watched


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 9), st.data())
def test_a_sample_is_let_go_of_when_it_is_drawn_and_a_run_with_its_last_one(
    counts: list[int], size: int, emit: int, data: st.DataObject
) -> None:
    """But a run that two windows share stays until both are done with it."""
    found, tokens, watched = windows(counts, size, emit)
    gather = Gather("sample", emit, False, None)
    ends = np.cumsum(counts)
    drawn = set[int]()
    for order in found:
        gather.prepare(order)
        window = order.window
        assert window is not None
        shared = {id(token) for token, start, stop in window.pieces if (start, stop) != (0, token.rows)}
        start, let_go = 0, list[int]()
        while start < order.rows:
            stop = data.draw(st.integers(start + 1, order.rows))
            drawn |= {sample.number for sample in gather.part(order, start, stop)}
            let_go += window.data.taken().let_go
            start = stop
            for token, end, count in zip(tokens, ends, counts, strict=True):
                if id(token) in {id(piece.token) for piece in window.pieces} - shared:
                    alive = {number for number in range(end - count, end) if watched[number]() is not None}
                    assert alive == set(range(end - count, end)) - drawn
        for place in let_go:
            token, begin, end = window.pieces[place]
            number = tokens.index(token)
            rows = range(ends[number] - counts[number] + begin, ends[number] - counts[number] + end)
            assert drawn.issuperset(rows)
        window.give_back(let_go)
        if order.start + order.rows == window.rows:
            assert window.let_go == set(range(len(window.pieces)))
    assert drawn == set(range(sum(counts)))


def arrays(rows: int = 1250) -> tuple[Pipeline, list["weakref.ref[Any]"]]:
    """Numbered arrays of 10,000 bytes each, shuffled, and what is alive of them."""
    watched = []

    def make(number: int) -> Any:
        made = np.full(rows, number)
        watched.append(weakref.ref(made))
        return made

    pipe = intune.from_iterable(range(300)).map(make, executor="thread")
    return pipe.shuffle(32).map(lambda array: array, executor="thread", name="after"), watched


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_that_was_drawn_is_charged_once(seed: int) -> None:
    """A run of them is charged until the last one was drawn, which takes a few bytes beside a list."""
    pipe, watched = arrays()
    stepped = Stepped(Given(pipe), Settings(memory=10**9), random.Random(seed))
    got, most = [], 0
    for array in stepped.loader:
        got.append(int(array[0]))
        del array
        alive = 10_000 * sum(each() is not None for each in watched)
        most = max(most, stepped.ledger.held - alive)
        stepped.go_on(stepped.rng.randrange(6))
    assert sorted(got) == list(range(300))
    assert most <= 1.1 * 10_000
    stepped.close()


def test_while_samples_of_a_window_wait_for_bytes_nothing_is_read() -> None:
    """Also when the order that they belong to was begun: the next window would take what they need."""
    pipe, _ = arrays()
    stepped = Stepped(Given(pipe), Settings(slots=4, memory=10**9), random.Random(1))
    running = iter(stepped.loader)
    for _ in range(40):
        next(running)
    sequence = stepped.engine.runs[0].sequences[0]
    while not (sequence.wanted(10**9) and not sequence.out):
        next(running)
    ledger, needs = stepped.ledger, sequence.wanted(10**9)
    ledger.budget = ledger.charged + int(0.9 * needs)
    assert sequence.starves
    ledger.budget = ledger.charged + int(1.5 * needs)
    assert not sequence.starves
    stepped.close()


def test_a_copy_of_a_window_is_reserved_when_it_is_begun_and_charged_by_its_own_buffers() -> None:
    """What it was made of is freed, and its addresses may be another's, who must be charged for them anew."""
    stepped = Stepped(Chain(Blocks([[20] * 12]), (shuffle(640, seed=1),)), Settings(memory=10**9), random.Random(1))
    iter(stepped.loader)
    run = stepped.engine.begin(0, Position())
    ledger, sequence = stepped.ledger, run.sequences[0]
    items, charges = [], set[Charge]()
    for root in range(3):
        block = pa.RecordBatch.from_pydict({"id": np.arange(20)})
        items.append(Item((root,), root, ledger.reserve(160, charges), 0, Forecast(), lambda: "somewhere"))
        items[-1].payload, items[-1].rows = block, 20
        ledger.true_up(items[-1].charge, footprint(block))
        sequence.accept(items[-1])
    window = sequence.out[0].window
    assert window is not None
    assert (window.rows, ledger.held) == (40, 3 * 160)
    gather, emission = run.nodes[1], sequence.out[0].rows  # of whose bytes nothing is known
    run.delivery.ready.append(items[2])  # as long as the consumer has work nothing is forced
    for spare, opens in (319, False), (320, True):
        ledger.budget = ledger.charged + emission + spare
        assert gather.gates() == (True, True, True, opens)
        assert sequence.starves is not opens
    freed, order = items[0].charge.buffers, sequence.out.popleft()
    sequence.begun(order, 320)
    assert Gather("block", 5000, False, None).copy_bytes(order) == 0
    assert (ledger.held, ledger.charged) == (3 * 160, 3 * 160 + 320)
    window.data.take(0, 10)
    sequence.taken(window)
    assert [item.payload is None for item in items] == [True, True, False]
    assert (ledger.held, ledger.charged) == (2 * 160 + 160, 2 * 160 + 160)
    ledger.true_up(ledger.reserve(0, charges), freed)
    assert ledger.held == 2 * 160 + 160 + 160
    sequence.taken(window)
    for each in (order, *sequence.out):
        sequence.done(each)
    assert (ledger.held, ledger.charged) == (160 + 160, 160 + 160)
