"""Ctrl-C and SIGTERM while a model is trained: what is in hand is made whole first, and saved."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Literal, TypeVar

PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.01

Position = Mapping[str, Any]
T = TypeVar("T")


class BrokenOff(KeyboardInterrupt):
    """What was in hand did not end in time after a signal, or was only a wait."""


class Interrupts:
    """Within it, SIGINT and SIGTERM are taken note of; nothing is broken off but the wait for a batch.

    * A signal sets `asked`. The loop looks at it after each step, leaves, saves, and calls `deliver` at last.
    * During `wait`, which may last, the loop is first asked where it stands, and then the wait is broken off. What was
      told is in `position`: whether or not a batch came just then, it is that of the steps that were done.
    * Another signal sets a limit: what is in hand two seconds later, a save or a step, is broken off by `BrokenOff`.

    Only signals that have a handler of Python are taken over, and only in the main thread, where Python has signals
    handled. So SIGTERM ends a process as ever where nobody has said otherwise.
    """

    def __init__(self, where: Callable[[], Position | None], patience: float = PATIENCE_SECONDS) -> None:
        """Take nothing over yet.

        Args:
            where: Says where the loop stands while it waits for a batch; called from another thread. None = it cannot
                be said just now, as a batch or the end of an epoch is being handed over.
            patience: Seconds after which what does not end is broken off.
        """
        self.asked: int | None = None
        self.position: Position | None = None
        self.broke_wait = False
        self._where = where
        self._patience = patience
        self._before: dict[int, Any] = {}
        self._waiting = self._hurried = self._breaking = self._closed = False
        self._words: SimpleQueue[Literal["find", "hurry", "end"]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()

    def __enter__(self) -> "Interrupts":
        """Take over the signals."""
        if threading.current_thread() is threading.main_thread():
            self._thread = threading.Thread(target=self._attend, name="intune-interrupts", daemon=True)
            self._thread.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        with self._lock:
            self._closed = True
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._thread is not None:
            self._words.put("end")
            self._thread.join()

    def wait(self, take: Callable[[], T | None]) -> T | None:
        """What `take` gives; None also where a signal came before or meanwhile."""
        try:
            try:
                self._waiting = True
                return take() if self.asked is None else None
            finally:
                self._waiting = False
        except BrokenOff:
            self.broke_wait = True
            return None

    def deliver(self) -> None:
        """Let the signal that came do now what it would have done; called outside the `with` block.

        Raises:
            KeyboardInterrupt: Or what the handler raises that was in force before.
        """
        if self.asked is not None:
            self._before[self.asked](self.asked, None)
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._breaking:  # our own, from the thread below
            self._breaking = False
            if self._waiting or self._hurried:
                self._waiting = False
                raise BrokenOff
        elif self.asked is None:
            self.asked = number
            if self._waiting:
                self._words.put("find")
        elif not self._hurried:
            self._hurried = True
            self._words.put("hurry")

    # What follows runs in the thread.

    def _attend(self) -> None:
        while (word := self._words.get()) != "end":
            try:
                if word == "find":
                    self._find()
                elif self._ended_within(self._patience):
                    return
            finally:
                self._break_off()

    def _find(self) -> None:
        until = time.monotonic() + self._patience
        while self._waiting and self.position is None and time.monotonic() < until:
            self.position = self._where()
            if self.position is None:
                time.sleep(_LOOK_SECONDS)

    def _ended_within(self, seconds: float) -> bool:
        try:
            return self._words.get(timeout=seconds) == "end"
        except Empty:
            return False

    def _break_off(self) -> None:
        with self._lock:
            if not self._closed and self.asked is not None:
                self._breaking = True
                signal.pthread_kill(self._main, self.asked)
