"""SIGINT and SIGTERM, from a command's first line to its last: how it ends, and how soon.

Wherever one lands, the command ends with 128 + its number and a line that says what is kept. While a command is only
being imported, or has done its work, it ends on the spot (`end_at_once`). While it works, an exception takes it to its
end (`Unwinding`), so that what is half done is saved or deleted.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""By the signals that are handled, what is said of the command."""

GRACE_SECONDS = 3.0
"""More than a loader takes to end, and hardly more than a person waits."""

UNFLUSHED = 120
"""Exit code where what was said could not be written, as Python has it."""

_SHOW_CURSOR = b"\x1b[?25h"


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What handles Ctrl-C handles it as well."""


def end_at_once(when: str) -> None:
    """From now on a signal ends the process where it stands; those that are ignored, as under nohup, stay so.

    Args:
        when: What is said after "interrupted".
    """
    _handle_by(partial(_end, when))


def leave(code: int) -> NoReturn:
    """End the process, with all that was registered for its exit, but without the interpreter's own end.

    That takes a while with PyTorch, and a signal that lands in it would end the process in a way of its own.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # as where it was closed from the start
                stream.flush()
        except OSError:  # nobody reads it any more
            code = code or UNFLUSHED
    os._exit(code)


class Unwinding:
    """Within it the first signal raises KeyboardInterrupt, and what then cleans up has three seconds.

    Further ones change nothing: the end is on its way. It comes by force where the exception was lost, as it is in a
    finaliser, or where something does not return. Does nothing but in the main thread.
    """

    def __init__(self, end: Callable[[str, int], object] | None = None, grace_seconds: float = GRACE_SECONDS) -> None:
        """Take nothing over yet.

        Args:
            end: Ends the process, told when and by which signal; None = for good.
            grace_seconds: How long the end may take.
        """
        self.number: int | None = None
        """The signal that came first."""
        self._grace_seconds = grace_seconds
        self._force = end or _end
        self._came: SimpleQueue[int | None] = SimpleQueue()  # unlike an event, it may be told of by a signal handler
        self._before: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Unwinding":
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():
            self._thread = threading.Thread(target=self._watch, name="intune-stopping", daemon=True)
            self._thread.start()
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._lost
            self._before = _handle_by(self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        if self._thread is None:
            return
        for number, before in self._before.items():
            signal.signal(number, self._following(before))
        sys.unraisablehook = self._unraisable
        self._came.put(None)
        self._thread.join()

    def _following(self, before: Any) -> Any:
        """What handles a signal from now on."""
        if not isinstance(before, partial):  # not ours: this is no process of its own
            return before
        # After a first signal the end is on its way, and has something to say.
        return partial(_end, "when its work was done") if self.number is None else signal.SIG_IGN

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            self._came.put(number)
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def _lost(self, what: Any) -> None:
        if self.number is None or not isinstance(what.exc_value, KeyboardInterrupt):
            self._unraisable(what)

    def _watch(self) -> None:
        number = self._came.get()
        if number is None:
            return
        try:
            self._came.get(timeout=self._grace_seconds)
        except Empty:
            self._force(f"and ended by force, as it did not end within {self._grace_seconds:g} s", number)


def _handle_by(handler: Any) -> dict[int, Any]:
    """Have the signals handled so, but those that are ignored; by signal, how it was handled before."""
    known: dict[int, Any] = {number: signal.getsignal(number) for number in WORDS}
    before = {number: how for number, how in known.items() if how is not None and how != signal.SIG_IGN}
    if threading.current_thread() is threading.main_thread():
        for number in before:
            signal.signal(number, handler)
    return before


def _end(when: str, number: int, frame: FrameType | None = None) -> None:
    with contextlib.suppress(Exception):  # the signal may have come within a write
        sys.stdout.flush()
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, f"{WORDS[signal.Signals(number)]} {when}\n".encode())
    os._exit(128 + number)
