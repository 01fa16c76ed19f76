"""Samplers: which numbers they may give, how often they are read, and going on where they were."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import intune
from intune import SourceError, StateError
from intune.sources.samples import DatasetSource


class Rows:
    """A map-style dataset: row i is i."""

    def __init__(self, rows: int = 40) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return index


class Shuffled:
    """Another order each time that it is read, as torch's RandomSampler has without a generator."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(40).tolist())


class ByEpoch:
    """An order that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(40).tolist())


def order(sampler: Any, rows: int = 40) -> list[int]:
    numbers = DatasetSource(Rows(rows), sampler).order(0)
    assert numbers is not None
    assert numbers.dtype == np.int64
    return [int(number) for number in numbers]


@pytest.mark.parametrize(
    "sampler",
    [
        [3, 0, 39, -40],
        (np.int8(3), np.uint64(0), np.int64(39), np.int32(-40)),
        np.array([3, 0, 39, -40]),
        np.array([3, 0, 39, -40], np.int16),
        [np.array(3), 0, 39, -40],
    ],
)
def test_whole_numbers_of_any_kind(sampler: Any) -> None:
    assert order(sampler) == [3, 0, 39, -40]


def test_numbers_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert order(torch.tensor([3, 0])) == [3, 0]
    assert order(torch.utils.data.SequentialSampler(Rows(5))) == [0, 1, 2, 3, 4]
    for bad in (torch.tensor([True, False]), torch.tensor([[1], [2]]), torch.tensor([1.0])):
        with pytest.raises(SourceError, match="gives a Tensor"):
            order(bad)


@pytest.mark.parametrize(
    ("value", "kind", "hint"),
    [
        (1.9, "a float, 1.9", ""),
        (2.0, "a float, 2.0", ""),
        (np.float64(1), "a float64", ""),
        ("12", "a str, '12'", ""),
        (None, "a NoneType, None", ""),
        (True, "a bool, True", "; of a mask, give the places where it is true"),
        (np.False_, "a bool, np.False_", "; of a mask, give the places where it is true"),
        ([1, 2], "a list, [1, 2]", "; if it gives batches, give the sampler inside it, and say .batch(n)"),
        (
            np.array([1]),
            "a ndarray, array([1])",
            "; if it gives batches, give the sampler inside it, and say .batch(n)",
        ),
    ],
)
def test_what_is_no_number_is_said_with_its_place(value: Any, kind: str, hint: str) -> None:
    end = f", at place 2 of its order, where the whole number of a sample is expected{hint}"
    with pytest.raises(SourceError, match=f"^{re.escape(f'the sampler gives {kind}')}.*{re.escape(end)}$"):
        order([0, 1, value])


def test_a_string_is_no_sampler() -> None:
    with pytest.raises(SourceError, match="gives a str, '1', at place 0"):
        order("12")


@pytest.mark.parametrize("number", [40, -41, 2**63, -(2**70)])
def test_numbers_of_no_sample(number: int) -> None:
    with pytest.raises(SourceError, match=rf"gives number {number}, at place 1 of its order, for 40 samples"):
        order([5, number])
    with pytest.raises(SourceError, match="gives number 0, at place 0 of its order, for 0 samples"):
        order([0], rows=0)


class Same:
    """Gives the same iterator each time, without being one."""

    def __init__(self) -> None:
        self.numbers = iter([1, 2, 3])

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class Rewinds:
    """Its own iterator, which begins anew whenever it is asked for."""

    def __iter__(self) -> "Rewinds":
        self.left = [3, 2, 1]
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


@pytest.mark.parametrize(
    "sampler", [(number for number in (1, 2, 3)), iter([1, 2, 3]), map(int, (1, 2, 3)), Same()], ids=lambda s: type(s)
)
def test_a_sampler_that_can_be_read_once_serves_for_one_epoch(sampler: Any) -> None:
    with intune.from_dataset(Rows(), sampler=sampler).loader(cpus=1) as loader:
        assert list(iter(loader)) == [1, 2, 3]
        for _ in range(2):
            with pytest.raises(
                SourceError, match=r"^sampler= got a .*, which can be read only once, and has been: give"
            ):
                next(iter(loader))


def test_the_first_epoch_is_whole_though_the_second_is_prepared_meanwhile() -> None:
    sampler = (number for number in (1, 2, 3))
    with intune.from_dataset(Rows(), sampler=sampler).loader(cpus=1, epochs=2) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [1, 2, 3]
        assert list(batches) == []
        with pytest.raises(SourceError, match="only once"):
            next(iter(loader))


@pytest.mark.parametrize("sampler", [Rewinds(), [1, 2, 3], range(1, 4)], ids=lambda s: type(s))
def test_a_sampler_that_begins_anew_serves_for_all(sampler: Any) -> None:
    with intune.from_dataset(Rows(), sampler=sampler).loader(cpus=1) as loader:
        assert [list(loader) for _ in range(3)] == [[1, 2, 3]] * 3


def test_an_empty_sampler_is_no_error() -> None:
    with intune.from_dataset(Rows(), sampler=iter([])).loader(cpus=1) as loader:
        assert [list(loader) for _ in range(2)] == [[], []]


def stop(sampler: Any, epoch: int, after: int) -> tuple[list[int], Any]:
    with intune.from_dataset(Rows(), sampler=sampler).batch(4).loader(cpus=1) as loader:
        loader.set_epoch(epoch)
        batches = iter(loader)
        seen = [row for _ in range(after) for row in next(batches).tolist()]
        return seen, json.loads(json.dumps(loader.state_dict()))


def go_on(sampler: Any, state: Any) -> list[int]:
    with intune.from_dataset(Rows(), sampler=sampler).batch(4).loader(cpus=1) as loader:
        loader.load_state_dict(state)
        return [row for batch in loader for row in batch.tolist()]


def test_going_on_with_another_order_is_refused() -> None:
    _, state = stop(Shuffled(1), 0, after=5)
    with pytest.raises(StateError, match=r"epoch 0 in another order.*samples would come twice.*set_epoch\(epoch\)"):
        go_on(Shuffled(2), state)


def test_going_on_with_the_same_order() -> None:
    seen, state = stop(Shuffled(1), 0, after=5)
    assert sorted(seen + go_on(Shuffled(1), state)) == list(range(40))
    seen, state = stop(ByEpoch(), 7, after=3)
    assert sorted(seen + go_on(ByEpoch(), state)) == list(range(40))


def test_a_later_epoch_of_a_generator_that_runs_on_is_refused() -> None:
    sampler = Shuffled(1)
    with intune.from_dataset(Rows(), sampler=sampler).batch(4).loader(cpus=1) as loader:
        list(loader)
        next(iter(loader))
        state = loader.state_dict()
        assert state["epoch"] == 1
        list(loader)
        with pytest.raises(StateError, match="epoch 1 in another order"):
            loader.load_state_dict(state)  # it was read for epoch 2 meanwhile
    with pytest.raises(StateError, match="epoch 1 in another order"):
        go_on(Shuffled(1), state)


def test_a_state_is_right_though_the_length_of_the_next_epoch_was_asked_for() -> None:
    sampler = Shuffled(1)
    with intune.from_dataset(Rows(), sampler=sampler).batch(4).loader(cpus=1) as loader:
        batches = iter(loader)
        seen = next(batches).tolist()
        assert len(loader) == 10  # reads the sampler again
        state = loader.state_dict()
    assert sorted(seen + go_on(Shuffled(1), state)) == list(range(40))


def test_a_state_before_an_epoch_does_not_fix_its_order() -> None:
    _, state = stop(Shuffled(1), 3, after=0)
    assert sorted(go_on(Shuffled(2), state)) == list(range(40))
