"""Something that is done again and again in a thread of its own, on an injected clock."""

import logging
import threading
from collections.abc import Callable, Generator

from intune._clock import Clock

_log = logging.getLogger(__name__)

JOIN_SECONDS = 2.0
"""How long `stop` waits for a step that is under way."""


class Periodic:
    """A daemon thread that goes through a generator: what it yields is how many seconds it sleeps before it goes on.

    The generator is made, run and closed in the thread. The thread ends when the generator does, or when it is
    stopped.

    Args:
        name: The thread's.
        steps: Makes the generator. It must not raise.
        clock: Time between steps.
        who: Whom the log names if a step does not return.
    """

    def __init__(
        self, name: str, steps: Callable[[], Generator[float, None, None]], clock: Clock, who: str | None = None
    ) -> None:
        self._name, self._steps, self._clock, self._who = name, steps, clock, who or name
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def started(self) -> bool:
        """Whether it was started and not stopped since, even where its steps have come to their end."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; nothing happens if it was started."""
        if self._thread is None:
            self._stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._stop,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # not before: an interrupt in between must not leave one that cannot be joined

    def stop(self) -> None:
        """End the thread and wait for it; may be called again and from any thread, that one included.

        A step that does not return within two seconds is left alone with its thread and named in the log.
        """
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(JOIN_SECONDS)
        if thread.is_alive():
            _log.warning("%s did not return within %g s; its thread is left alone", self._who, JOIN_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        steps = self._steps()
        try:
            for seconds in steps:
                if self._clock.sleep(seconds, stop):
                    return
        finally:
            steps.close()
