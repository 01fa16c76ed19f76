"""Reading again what failed for a moment: which errors those are, how often, and after how long a wait."""

import errno
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import TypeVar

from intune._clock import Clock, SystemClock
from intune.pipeline.scheduler import ending

T = TypeVar("T")

_FIRST_WAIT = 0.1  # seconds
_GROWTH = 3.0
_CODES = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EINTR,
        errno.EPIPE,
        errno.ESTALE,  # a network file system lost its handle; opening the file again gives a new one
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    }
)
# Arrow's object stores raise a plain OSError without a code; what happened is in its text.
_TEXTS = (
    "AWS Error NETWORK_CONNECTION",
    "AWS Error REQUEST_TIMEOUT",
    "AWS Error SERVICE_UNAVAILABLE",
    "AWS Error SLOW_DOWN",
    "AWS Error THROTTLING",
    "AWS Error INTERNAL_FAILURE",
    "curlCode: 28,",  # timeout
    "curlCode: 56,",  # failure in receiving
)
# Those of the libraries below fsspec that are no OSError, told by name: none of them has to be installed.
_NAMES = frozenset(
    {
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("botocore", "HTTPClientError"),
        ("urllib3", "ProtocolError"),
        ("urllib3", "TimeoutError"),
    }
)


def is_transient(error: BaseException) -> bool:
    """Whether the same read may well succeed a moment later: timeouts, lost connections, input/output errors."""
    if isinstance(error, OSError):
        if error.errno is not None:
            return error.errno in _CODES
        return isinstance(error, ConnectionError | TimeoutError) or any(text in str(error) for text in _TEXTS)
    return any((kind.__module__.split(".")[0], kind.__name__) in _NAMES for kind in type(error).__mro__)


class Retries:
    """How reads are repeated: `most` times after the first failure, waiting about 0.1, 0.3, 0.9, ... seconds.

    Each wait is shortened by a random share of up to a half, so that many readers of one server do not come
    back all at once; closing the loader ends it. What is read never depends on it. May be used from several threads at
    once.
    """

    def __init__(self, *, most: int = 3, clock: Clock | None = None, generator: random.Random | None = None) -> None:
        """Remember how to wait.

        Args:
            most: Retries after the first failure.
            clock: Waits with its `sleep`; None: the machine's.
            generator: Draws the share by which a wait is shortened; None: one that differs in each process.
        """
        self._most = most
        self._clock = SystemClock() if clock is None else clock
        self._generator = random.Random() if generator is None else generator

    def call(self, read: Callable[[], T]) -> T:
        """Call `read` until it succeeds.

        Raises:
            OSError: If all tries failed for a moment; the message has the last failure and the number of tries.
            Exception: What `read` raised, if that is not transient.
        """
        failed = 0
        while True:
            try:
                return read()
            except Exception as error:
                failed += 1
                self._wait(error, failed)

    def resume(self, start: Callable[[], Generator[T, None, None]]) -> Iterator[T]:
        """Draw from a generator; when it fails, make a new one and skip what was given, so that each comes once.

        Args:
            start: Makes a generator that gives the same each time. What it holds is closed when this ends.

        Raises:
            OSError: If it failed for a moment in all tries for the same item; with the number of tries.
            Exception: What it raised, if that is not transient.
        """
        given = failed = 0
        while True:
            with closing(start()) as items:
                rest = islice(items, given, None)
                while True:
                    try:
                        item = next(rest)
                    except StopIteration:
                        return
                    except Exception as error:
                        failed += 1
                        self._wait(error, failed)
                        break
                    given, failed = given + 1, 0
                    yield item

    def _wait(self, error: Exception, failed: int) -> None:
        """Wait before the next try, or raise: also if the loader is closed meanwhile."""
        if not is_transient(error):
            raise error
        if failed > self._most:
            raise OSError(f"{error} (tried {failed} times)") from error
        longest = _FIRST_WAIT * _GROWTH ** (failed - 1)
        if self._clock.sleep(longest * (1 - self._generator.random() / 2), ending()):
            raise OSError(f"{error} (not tried again: the loader is being closed)") from error
