"""An exception on its way from a worker process to its parent.

Pickle rebuilds an exception by calling its type with `args`, which fails for many types and hides the real error
behind another one. So it is tried where it was raised, and if it fails the exception is rebuilt without its
constructor, and if that fails too a `StageError` tells all that is known. The traceback comes along as a note.
"""

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from intune._errors import StageError

Dumps = Callable[[Any], bytes]


def reduce_error(error: BaseException, dumps: Dumps) -> tuple[Any, ...]:
    """What pickle needs for an exception, for `__reduce__` and `reducer_override`.

    Args:
        error: The exception.
        dumps: Pickles a value, exceptions in pickle's own way.
    """
    message, trace = _text(error), None
    if error.__traceback__ is not None:
        trace = f"In worker process {os.getpid()}:\n{_formatted(error)}"
    for attempt in (lambda: error, lambda: _Bare(error, dumps)):
        with contextlib.suppress(Exception):
            data = dumps(attempt())
            again = pickle.loads(data)
            if type(again) is type(error) and _text(again) == message:
                return rebuild_error, (data, type(error).__qualname__, message, trace)
    return rebuild_error, (None, type(error).__qualname__, message, trace)


def rebuild_error(data: bytes | None, kind: str, message: str, trace: str | None) -> BaseException:
    """The exception itself where that is possible, else one that says what it was."""
    error: BaseException | None = None
    if data is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(data)
    if not isinstance(error, BaseException):
        return StageError(
            f"{kind}: {message} (an exception that cannot be rebuilt outside of its process)\n{trace or ''}"
        )
    if trace is not None:
        error.add_note(trace)
    return error


def rebuild_bare(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An exception made without its own constructor, by that of the built-in type that it derives from."""
    base = _builtin(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    error.__setstate__(state)
    return error


class Shown(str):
    """What is left of a value that cannot be pickled: its text."""

    __slots__ = ()
    __repr__ = str.__str__


class _Bare:
    """Pickles as an exception without its constructor and without what cannot be pickled."""

    def __init__(self, error: BaseException, dumps: Dumps) -> None:
        self._error = error
        self._dumps = dumps

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self._error)
        reduced: Any = _builtin(kind).__reduce__(self._error)  # the built-in types know all of their arguments
        _, args, *more = reduced
        state = more[0] if more else {}
        shown = tuple(arg if self._picklable(arg) else Shown(_text(arg)) for arg in args)
        return rebuild_bare, (kind, shown, {name: value for name, value in state.items() if self._picklable(value)})

    def _picklable(self, value: Any) -> bool:
        try:
            pickle.loads(self._dumps(value))
        except Exception:
            return False
        return True


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    return next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")


def _formatted(error: BaseException) -> str:
    """The traceback without the frames of ours that called the function."""
    folder = os.path.dirname(__file__)
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == folder:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<no text: {type(error).__qualname__}>"
