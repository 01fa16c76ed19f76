"""What a node works out for each item, on the path that every item takes."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune
from intune.pipeline.item import Item
from intune.pipeline.ledger import Forecast, Ledger
from intune.pipeline.nodes import CallNode, Work

from .chains import Given
from .harness import Settings, Stepped


@pytest.mark.parametrize("memory", [None, 2**30])
def test_what_an_item_needs_is_worked_out_when_it_is_asked_for_and_not_again(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all where there is no limit of bytes; what is reserved is what was asked for."""
    asked: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    begun: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    needs, begin = CallNode._needs, CallNode.begin

    def noted(self: CallNode, item: Item) -> tuple[int, int]:
        asked.append((item.path, needs(self, item)))
        return asked[-1][1]

    def begins(self: CallNode) -> Work:
        path, before = self._heap[0][0], len(asked)
        work = begin(self)
        assert len(asked) == before
        begun.append((path, self._needed))
        return work

    monkeypatch.setattr(CallNode, "_needs", noted)
    monkeypatch.setattr(CallNode, "begin", begins)
    pipe = intune.from_iterable(range(40)).map(lambda item: bytes([1]) * 1000 * (item % 3))
    stepped = Stepped(Given(pipe), Settings(memory=memory), random.Random(3))
    with stepped.loader as loader:
        assert sum(map(len, loader)) == 1000 * sum(item % 3 for item in range(40))
    if memory is None:
        assert not asked
    else:
        assert len(begun) == len({path for path, _ in begun})
        assert set(begun) <= set(asked)
        assert any(here for _, (here, _) in begun)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=6), st.integers(1, 50))
def test_each_stage_learns_what_an_item_took_from_there_on_beyond_what_it_came_with(
    way: list[tuple[int, int]], bound: int
) -> None:
    """In integers up to one: bytes are kept by unit of an item's bound."""
    overall, stages = Forecast(), [Forecast() for _ in way]
    for _ in range(Forecast.ENOUGH):
        item = Item((0,), 0, Ledger().reserve(0, set()), bound, overall, lambda: "somewhere")
        for further, (came, beside) in zip(stages, way, strict=True):
            item.held(came + beside)
            item.way.append((further, came, came + beside))
        item.teach()
    held = [came + beside for came, beside in way]
    assert overall.mean * bound == pytest.approx(max(held, default=0))
    for place, (further, (came, _)) in enumerate(zip(stages, way, strict=True)):
        assert further.enough
        assert further.mean * bound == pytest.approx(max(0, max(held[place:]) - came))


def test_an_item_that_nothing_was_known_of_teaches_nothing() -> None:
    overall, further = Forecast(), Forecast()
    item = Item((0,), 0, Ledger().reserve(0, set()), 0, overall, lambda: "somewhere")
    item.way.append((further, 10, 20))
    item.teach()
    assert (overall.known, further.known) == (False, False)


def sized(size: int) -> Any:
    return lambda item: bytes(size)


@pytest.mark.parametrize(
    ("sizes", "least", "most"), [((100_000, 1000, 1000), 1000, 2000), ((1000, 1000, 80_000), 79_000, 85_000)]
)
def test_what_is_reserved_for_an_item_that_waits_is_what_it_may_still_need(
    sizes: tuple[int, int, int], least: int, most: int
) -> None:
    """Not what a stage that it has passed needed, but all that one ahead will."""
    pipe = intune.from_iterable(range(400))
    for number, size in enumerate(sizes):
        pipe = pipe.map(sized(size), executor="thread", name=f"stage{number}")
    stepped = Stepped(Given(pipe), Settings(slots=8, memory=10**9, prefetch=8), random.Random(5))
    seen = []
    for _ in stepped.loader:
        run = stepped.engine.runs[0]
        last = run.nodes[3]
        assert isinstance(last, CallNode)
        seen += [item.charge.beyond / item.count for item in last.waiting() if last._further.enough]
        stepped.go_on(stepped.rng.randrange(4))
    assert len(seen) > 20
    assert all(least <= beyond <= most for beyond in seen)
    stepped.close()
