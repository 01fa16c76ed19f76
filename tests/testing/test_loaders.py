from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from intune.testing import assert_exactly_once, assert_same_after_resume


def test_each_once_in_any_order_passes() -> None:
    assert_exactly_once([2, 0, 1], 3)
    assert_exactly_once(np.array([1, 0]), 2)
    assert_exactly_once([], 0)


@pytest.mark.parametrize(
    ("ids", "n", "message"),
    [
        ([0, 2], 3, "of 3 ids: 1 missing: 1"),
        ([0, 1, 1, 2], 3, "1 more than once: 1"),
        ([0, 1, 3], 2, r"1 not in 0\.\.1: 3"),
        ([0, -1], 1, r"1 not in 0\.\.0: -1"),
        ([], 20, "20 missing: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10 more"),
        ([0, 0, 5], 2, r"1 missing: 1; 1 more than once: 0; 1 not in 0\.\.1: 5"),
    ],
)
def test_anything_else_is_named(ids: list[int], n: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_exactly_once(ids, n)


class Counting:
    """A loader of `items` that counts what it delivered; `fault` breaks it."""

    def __init__(self, items: list[Any], fault: str = "", log: list[str] | None = None) -> None:
        self.items, self.fault, self.log = items, fault, log
        self.start = self.done = 0

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.start, len(self.items)):
            self.done = place + 1
            changed = self.fault == "values" and self.start and place == len(self.items) - 1
            yield self.items[place] + 1 if changed else self.items[place]

    def state_dict(self) -> dict[str, Any]:
        return {"done": {self.done} if self.fault == "no json" else self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.fault != "no load"
        self.start = state["done"] + {"skips": 1, "repeats": -1}.get(self.fault, 0)

    def close(self) -> None:
        if self.log is not None:
            self.log.append("closed")


def maker(items: list[Any], fault: str = "") -> Callable[[], Counting]:
    return lambda: Counting(items, fault)


def test_a_loader_that_resumes_exactly_passes_at_every_place() -> None:
    items = [{"x": np.arange(n), "y": [float("nan"), "text", None]} for n in range(5)]
    assert_same_after_resume(maker(items), at=range(6))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("skips", "resumed after 2 of 4 items: 1 items came, expected 2"),
        ("repeats", "resumed after 2 of 4 items: 3 items came, expected 2"),
        ("values", "resumed after 2 of 4 items, item 3: item is 31, expected 30"),
    ],
)
def test_a_loader_that_does_not_is_caught(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_after_resume(maker([0, 10, 20, 30], fault), at=[2])


def test_a_state_that_json_cannot_write_is_caught() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        assert_same_after_resume(maker([0, 1], "no json"), at=[1])


def test_stopping_past_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot stop after 3 items: the loader gives 2"):
        assert_same_after_resume(maker([0, 1]), at=[3])


def test_every_loader_is_closed_the_broken_one_too() -> None:
    log: list[str] = []
    assert_same_after_resume(lambda: Counting([0, 1], log=log), at=[1])
    assert log == ["closed"] * 3
    with pytest.raises(AssertionError):
        assert_same_after_resume(lambda: Counting([0, 1], "no load", log), at=[1])
    assert log == ["closed"] * 6


def test_a_loader_without_close_passes() -> None:
    class Bare:
        def __init__(self) -> None:
            self.inner = Counting([1, 2])
            self.__iter__ = self.inner.__iter__

        def __iter__(self) -> Iterator[Any]:
            return iter(self.inner)

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner.load_state_dict(state)

    assert_same_after_resume(Bare, at=[0, 1, 2])


class Pair(NamedTuple):
    a: Any
    b: Any


class Twice:
    """Gives one item in its first life and another one after a resume."""

    def __init__(self, item: Any, other: Any) -> None:
        self.item, self.other, self.resumed = item, other, False

    def __iter__(self) -> Iterator[Any]:
        yield self.other if self.resumed else self.item

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = True


def batch(values: list[Any], kind: pa.DataType) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": pa.array(values, kind)})


@pytest.mark.parametrize(
    ("item", "other", "message"),
    [
        (1, 1.0, "item is a float, expected a int"),
        ({"a": 1}, {"b": 1}, r"item has the keys \['b'\], expected \['a'\]"),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, r"item\['a'\]\[1\]\[1\] is 4, expected 3"),
        ([1], [1, 2], "item has 2 entries, expected 1"),
        (Pair(1, 2), (1, 2), "item is a tuple, expected a Pair"),
        (np.zeros(2), np.zeros(2, "f4"), r"item is float32\[2\], expected float64\[2\]"),
        (np.zeros((2, 1)), np.zeros(2), r"item is float64\[2\], expected float64\[2, 1\]"),
        (np.array([0, 1]), np.array([0, 2]), r"item has other values: \[0 2\], expected \[0 1\]"),
        (np.float32(1), np.float32(2), "item has other values"),
        (batch([1], pa.int64()), batch([1], pa.int32()), "expected x: int64"),
        (batch([1, None], pa.int64()), batch([1, 2], pa.int64()), r"item\[1\]\['x'\] is a int, expected a NoneType"),
        (pa.array([1]), pa.array([2]), r"item\[0\] is 2, expected 1"),
        ("text", "next", "item is 'next', expected 'text'"),
        (float("nan"), 1.0, "item is 1.0, expected nan"),
    ],
)
def test_items_that_differ_are_told_apart(item: Any, other: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_after_resume(lambda: Twice(item, other), at=[0])


@pytest.mark.parametrize(
    ("item", "other"),
    [
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0])),
        (np.array(["a", None], dtype=object), np.array(["a", None], dtype=object)),
        (Pair(np.arange(2), "x"), Pair(np.arange(2), "x")),
        (batch([1.0, float("nan"), None], pa.float64()), batch([1.0, float("nan"), None], pa.float64())),
        (float("nan"), float("nan")),
        ({}, {}),
    ],
)
def test_items_that_are_the_same_pass(item: Any, other: Any) -> None:
    assert_same_after_resume(lambda: Twice(item, other), at=[0])


@pytest.mark.slow
def test_tensors_are_compared_by_type_and_value() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.ones(2, requires_grad=True)
    assert_same_after_resume(lambda: Twice(weights, torch.ones(2)), at=[0])
    with pytest.raises(AssertionError, match="float64"):
        assert_same_after_resume(lambda: Twice(torch.ones(2), torch.ones(2, dtype=torch.float64)), at=[0])
    with pytest.raises(AssertionError, match="other values"):
        assert_same_after_resume(lambda: Twice(torch.ones(2), torch.zeros(2)), at=[0])
