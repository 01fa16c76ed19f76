"""What is said of functions and datasets that cannot go to another process: the user's object, and the way from it."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import intune
from intune import PipelineError
from intune.pipeline import transport
from intune.pipeline.culprit import innermost_unpicklable, why_unpicklable


class Locked:
    """A map-style dataset that holds what cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index

    def method(self, item: Any) -> Any:
        return item


class Numbers:
    """A dataset that can be sent."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return index


class Part(Locked):
    """A dataset made of others."""

    def __init__(self) -> None:
        self.parts = [[0], Locked()]


class Careful(Locked):
    """Leaves its lock out, but not all that cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.open = {"first": 1, "files": threading.Lock()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class NoState:
    def __getstate__(self) -> Any:
        raise ValueError("nothing to be had")


def closure() -> Callable[[Any], Any]:
    lock = threading.Lock()

    def clean(item: Any) -> Any:
        return item, lock

    return clean


LOCK = "(a lock)"


@pytest.mark.parametrize(
    ("value", "role", "said"),
    [
        (Locked(), "the dataset", f"the dataset (a Locked), attribute 'lock' {LOCK}"),
        (
            Part(),
            "the dataset",
            f"the dataset (a Part), attribute 'parts' (a list), element 1 (a Locked), attribute 'lock' {LOCK}",
        ),
        (Careful(), "the dataset", f"the dataset (a Careful), attribute 'open' (a dict), entry 'files' {LOCK}"),
        (Slotted(), "", f"an object of type Slotted, attribute 'lock' {LOCK}"),
        (NoState(), "", "an object of type NoState"),
        (functools.partial(print, sep=threading.Lock()), "", f"an object of type partial, argument 'sep' {LOCK}"),
        (
            Locked().method,
            "",
            f"method 'Locked.method', the object of the method (a Locked), attribute 'lock' {LOCK}",
        ),
    ],
)
def test_the_way_to_the_part(value: Any, role: str, said: str) -> None:
    assert why_unpicklable(value, transport.dumps, role) == said


@pytest.mark.parametrize(
    ("value", "said"), [(Part(), "a lock"), ([1, {"a": (2, Locked())}], "a lock"), (NoState(), "a NoState")]
)
def test_the_part_alone(value: Any, said: str) -> None:
    assert innermost_unpicklable(value, transport.dumps) == said


@pytest.mark.parametrize("kind", ["map", "dataset", "flat_map"])
def test_a_result_in_processes(kind: str) -> None:
    """What the function gave is named, not what it travels in."""

    def gives_lock(value: int) -> Any:
        return [{"value": value, "lock": threading.Lock()}]

    class Locks(Numbers):
        def __getitem__(self, index: int) -> Any:
            return gives_lock(index)

    pipe = {
        "map": intune.from_iterable(range(3)).map(gives_lock, executor="process"),
        "flat_map": intune.from_iterable(range(3)).flat_map(gives_lock, executor="process"),
        "dataset": intune.from_dataset(Locks(), executor="process"),
    }[kind]
    with pipe.loader(cpus=1) as loader, pytest.raises(TypeError, match="cannot pickle") as raised:
        next(iter(loader))
    assert "intune: what cannot be pickled is a lock" in raised.value.__notes__


def test_a_dataset_in_processes() -> None:
    with pytest.raises(PipelineError) as refused:
        intune.from_dataset(Locked(), executor="process").batch(2).loader()
    assert str(refused.value) == (
        "stage 'from_dataset': the dataset (a Locked), attribute 'lock' (a lock) cannot be sent to a worker process "
        "(TypeError: cannot pickle '_thread.lock' object). Open it at the first __getitem__, or leave it out in "
        '__getstate__, or use executor="thread"'
    )


def test_a_function_in_processes() -> None:
    with pytest.raises(PipelineError) as refused:
        intune.from_iterable(range(9)).map(closure(), executor="process").loader()
    assert str(refused.value) == (
        "stage 'clean': function 'closure.<locals>.clean', variable 'lock' (a lock) cannot be sent to a worker process "
        "(TypeError: cannot pickle '_thread.lock' object). Make it inside the function, or in the constructor of a "
        'class given in its place, or use executor="thread"'
    )
