"""What every loader must keep: each row once, and the same rest after a resume."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

SHOWN = 10


class ResumableLoader(Protocol):
    """What `assert_same_after_resume` needs of a loader; one that also has `close` is closed."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands, as JSON can write it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration."""
        ...


def assert_exactly_once(ids: Iterable[int], n: int) -> None:
    """Check that `ids` are 0 to n - 1, each once, in any order.

    Raises:
        AssertionError: If one is missing, comes twice or is no such number; the message has the first ones.
    """
    seen = Counter(int(number) for number in ids)
    faults = {
        "missing": [number for number in range(n) if number not in seen],
        "more than once": sorted(number for number, times in seen.items() if times > 1),
        f"not in 0..{n - 1}": sorted(number for number in seen if not 0 <= number < n),
    }
    found = [f"{len(numbers)} {name}: {_first(numbers)}" for name, numbers in faults.items() if numbers]
    if found:
        raise AssertionError(f"of {n} ids: {'; '.join(found)}")


def assert_same_after_resume(make_loader: Callable[[], ResumableLoader], at: Sequence[int]) -> None:
    """Check that a loader that is stopped after k items and resumed in a new one gives the same rest.

    The state goes through JSON as text in between.

    Args:
        make_loader: Makes a new loader each time, always the same.
        at: After how many items to stop; 0 = before the first one was asked for.

    Raises:
        AssertionError: If an item of the rest is missing, too many, or differs in type, dtype, shape or value.
        ValueError: If the loader has fewer items than `at` asks for.
    """
    whole = _taken(make_loader(), None)
    for stop in at:
        if not 0 <= stop <= len(whole):
            raise ValueError(f"cannot stop after {stop} items: the loader gives {len(whole)}")
        rest = _resumed(make_loader(), json.dumps(_state_after(make_loader(), stop)))
        where = f"resumed after {stop} of {len(whole)} items"
        if len(rest) != len(whole) - stop:
            raise AssertionError(f"{where}: {len(rest)} items came, expected {len(whole) - stop}")
        for place, (got, expected) in enumerate(zip(rest, whole[stop:], strict=True), start=stop):
            if difference := _difference(got, expected, "item"):
                raise AssertionError(f"{where}, item {place}: {difference}")


def _taken(loader: ResumableLoader, state: Any) -> list[Any]:
    try:
        if state is not None:
            loader.load_state_dict(state)
        return list(loader)
    finally:
        _close(loader)


def _resumed(loader: ResumableLoader, state: str) -> list[Any]:
    return _taken(loader, json.loads(state))


def _state_after(loader: ResumableLoader, items: int) -> Mapping[str, Any]:
    try:
        if not items:
            return loader.state_dict()
        running = iter(loader)  # kept until the state was taken: with some loaders the place goes with it
        for _ in range(items):
            next(running)
        return loader.state_dict()
    finally:
        _close(loader)


def _close(loader: ResumableLoader) -> None:
    close = getattr(loader, "close", None)
    if close is not None:
        close()


def _difference(got: Any, expected: Any, where: str) -> str | None:
    """The first difference between two items in words, or None."""
    if type(got) is not type(expected):
        return f"{where} is a {type(got).__name__}, expected a {type(expected).__name__}"
    if isinstance(expected, Mapping):
        if list(got) != list(expected):
            return f"{where} has the keys {list(got)}, expected {list(expected)}"
        return _first_difference((got[key], expected[key], f"{where}[{key!r}]") for key in expected)
    if isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{where} has {len(got)} entries, expected {len(expected)}"
        entries = enumerate(zip(got, expected, strict=True))
        return _first_difference((one, other, f"{where}[{place}]") for place, (one, other) in entries)
    if isinstance(expected, pa.RecordBatch | pa.Table | pa.Array | pa.ChunkedArray):
        kinds = [
            table.schema if isinstance(table, pa.RecordBatch | pa.Table) else table.type for table in (got, expected)
        ]
        if kinds[0] != kinds[1]:
            return f"{where} is of {kinds[0]}, expected {kinds[1]}"
        return _difference(got.to_pylist(), expected.to_pylist(), where)
    if hasattr(expected, "__array__"):
        return _array_difference(_array(got), _array(expected), where)
    both_nan = got != got and expected != expected
    return None if both_nan or got == expected else f"{where} is {got!r}, expected {expected!r}"


def _first_difference(pairs: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next((found for pair in pairs if (found := _difference(*pair))), None)


def _array(value: Any) -> np.ndarray[Any, Any]:
    """An array, or a torch tensor on whatever device, as a numpy array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _array_difference(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], where: str) -> str | None:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"{where} is {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"
    numbers = got.dtype.kind in "fc"
    if np.array_equal(got, expected, equal_nan=numbers):
        return None
    return f"{where} has other values: {got.ravel()[:SHOWN]}, expected {expected.ravel()[:SHOWN]}"


def _first(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more
