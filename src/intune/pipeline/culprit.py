"""Which part of a function cannot go to another process."""

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

_DEPTH = 8
_ELEMENTS = 1000


def why_unpicklable(value: Any, dumps: Callable[[Any], bytes], role: str = "") -> str:
    """Name the innermost part that cannot be pickled: "function 'clean', variable 'lock' (a lock)".

    Args:
        value: What could not be pickled.
        dumps: Pickles it.
        role: What it is to the user, "the dataset": "the dataset (a Clicks), attribute 'lock' (a lock)".
    """
    first = _with_type(role, value) if role else _named(value)
    return ", ".join([first, *(_with_type(name, part) for name, part in _way(value, dumps))])


def innermost_unpicklable(value: Any, dumps: Callable[[Any], bytes]) -> str:
    """Name the innermost part alone: "a lock"."""
    parts = [value, *(part for _, part in _way(value, dumps))]
    return f"a {type(parts[-1]).__qualname__}"


def _way(value: Any, dumps: Callable[[Any], bytes]) -> Iterator[tuple[str, Any]]:
    """From a value to the innermost part that cannot be pickled: what each is in the one before, and itself."""
    for _ in range(_DEPTH):
        found = next(((name, inner) for name, inner in _parts(value) if not _works(inner, dumps)), None)
        if found is None:
            return
        yield found
        value = found[1]


def _with_type(name: str, value: Any) -> str:
    return f"{name} (a {type(value).__qualname__})"


def _named(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name!r}" if name else f"an object of type {type(value).__qualname__}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "the function of the partial", value.func
        yield from ((f"argument {number}", inner) for number, inner in enumerate(value.args))
        yield from ((f"argument {name!r}", inner) for name, inner in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "the object of the method", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"variable {name!r}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"global {name!r}", value.__globals__[name]
    elif isinstance(value, list | tuple):
        yield from ((f"element {number}", inner) for number, inner in enumerate(value[:_ELEMENTS]))
    elif isinstance(value, dict):
        yield from ((f"entry {key!r}", inner) for key, inner in itertools.islice(value.items(), _ELEMENTS))
    elif not isinstance(value, type):
        yield from ((f"attribute {name!r}", inner) for name, inner in _state(value).items())


def _state(value: Any) -> dict[str, Any]:
    """Attributes that would be pickled: an object may leave some of them out."""
    try:
        state = value.__getstate__()
    except Exception:
        return {}
    parts = state if isinstance(state, tuple) else (state,)  # attributes, or those and what is in slots
    return {name: inner for part in parts if isinstance(part, dict) for name, inner in part.items()}


def _works(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True
