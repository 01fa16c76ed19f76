"""Work that takes CPUs without using any: experiments with 32 CPUs on a machine that has two.

An emulated function holds one of N tokens for some seconds and sleeps meanwhile. A token stands for a CPU:
with N tokens no more than N functions are at work, and the others wait for their turn. Read through an
`EmulatedClock`, the seconds in which a token was held look like CPU seconds.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from intune._clock import Clock, SystemClock

T = TypeVar("T")


class EmulatedClock:
    """A clock whose CPU seconds are the calling thread's own plus those in which it held a token.

    Args:
        clock: Gives wall time, own CPU seconds and sleep; None = the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = SystemClock() if clock is None else clock
        self._held = threading.local()

    def wall(self) -> float:
        """Seconds that passed for everyone."""
        return self._clock.wall()

    def cpu(self) -> float:
        """CPU seconds that the calling thread used, emulated ones included."""
        return self._clock.cpu() + getattr(self._held, "seconds", 0.0)

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Wait until `wake` is set or `seconds` have passed; returns whether `wake` is set."""
        return self._clock.sleep(seconds, wake)

    def add_cpu(self, seconds: float) -> None:
        """Let the calling thread have used so many CPU seconds more."""
        self._held.seconds = getattr(self._held, "seconds", 0.0) + seconds


class TokenPool:
    """N tokens, handed out in the order in which they are asked for; safe to use from several threads.

    Args:
        tokens: How many functions may be at work at once.
        clock: Measures and sleeps, and gets the CPU seconds; None = a new one. Give the same one to what
            measures the functions.
    """

    def __init__(self, tokens: int, clock: EmulatedClock | None = None) -> None:
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}, must be at least 1")
        self.clock = EmulatedClock() if clock is None else clock
        self._lock = threading.Lock()
        self._free = tokens
        self._waiting: deque[threading.Lock] = deque()

    def work(self, seconds: float) -> None:
        """Wait for a token, hold it for so many seconds, give it back."""
        with self.held():
            self.clock.sleep(seconds, threading.Event())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for a token and hold it: whatever is done meanwhile counts as CPU time, once."""
        self._take()
        began, own = self.clock.wall(), self.clock.cpu()
        try:
            yield
        finally:
            self.clock.add_cpu(max(0.0, self.clock.wall() - began - (self.clock.cpu() - own)))
            self._give()

    def _take(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: leave the line, or pass on what came at the same moment
            with self._lock:
                left = turn in self._waiting
                if left:
                    self._waiting.remove(turn)
            if not left:
                self._give()
            raise

    def _give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1


def emulated(seconds: float, tokens: TokenPool) -> Callable[[T], T]:
    """A stage function that gives back its input after holding a token for `seconds`.

    Not for stages in processes: tokens are shared by the threads of one process.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds is {seconds}, must be at least 0")

    def work(item: T) -> T:
        tokens.work(seconds)
        return item

    return work
