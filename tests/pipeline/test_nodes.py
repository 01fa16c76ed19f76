"""What a node works out for each item, on the path that every item takes."""

import random

import pytest

import intune
from intune.pipeline.item import Item
from intune.pipeline.nodes import CallNode, Work

from .chains import Given
from .harness import Settings, Stepped


@pytest.mark.parametrize("memory", [None, 2**30])
def test_what_an_item_needs_is_worked_out_when_it_is_asked_for_and_not_again(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all where there is no limit of bytes; what is reserved is what was asked for."""
    asked: list[tuple[tuple[int, ...], int]] = []
    begun: list[tuple[tuple[int, ...], int]] = []
    needs, begin = CallNode._needs, CallNode.begin

    def noted(self: CallNode, item: Item) -> int:
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
        assert any(size for _, size in begun)
