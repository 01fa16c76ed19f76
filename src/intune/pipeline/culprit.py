"""Which part of a function cannot go to another process."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_DEPTH = 5


def why_unpicklable(value: Any, dumps: Callable[[Any], bytes]) -> str:
    """Name the innermost part that cannot be pickled: "function 'clean', variable 'lock' (a lock)"."""
    path, part = [_named(value)], value
    for _ in range(_DEPTH):
        found = next(((name, inner) for name, inner in _parts(part) if not _works(inner, dumps)), None)
        if found is None:
            break
        name, part = found
        path.append(f"{name} (a {type(part).__qualname__})")
    return ", ".join(path)


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
    elif not isinstance(value, type):
        yield from ((f"attribute {name!r}", inner) for name, inner in getattr(value, "__dict__", {}).items())


def _works(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True
