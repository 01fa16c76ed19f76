"""Ctrl-C between steps, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class WholeSteps:
    """Within it, a Ctrl-C that comes during a step is held back until the step is done.

    So the model is never left between two states, and can be saved. A second Ctrl-C during the same step is not
    held back: the step may hang. Outside the main thread, where no signal is handled, it does nothing.
    """

    def __init__(self) -> None:
        """Begin outside of any step."""
        self._inside = self._held = False
        self._before: Any = None

    def __enter__(self) -> "WholeSteps":
        """Take over the interrupt signal."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Give it back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step.

        Raises:
            KeyboardInterrupt: At its end, if one was held back.
        """
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        if self._held:
            self._held = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._inside and not self._held:
            self._held = True
        elif callable(self._before):
            self._before(number, frame)
