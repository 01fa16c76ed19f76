"""How long a training loop waits for data, whatever gives it the data."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from intune._clock import Clock, SystemClock
from intune._words import count, duration

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_BUCKETS = 64
_NOT_THE_LIMIT = 0.05
"""Below this share of time waited even a loader that never makes one wait would hardly be noticed."""
_LEAST_BATCHES, _LEAST_SECONDS = 10, 1.0
"""With fewer, what happens once (starting workers, the first step) is most of what was seen."""


@dataclass(frozen=True)
class WatchReport:
    """What was seen of a training loop so far.

    Attributes:
        batches: Batches handed over.
        seconds: From the first batch asked for in each pass to the last thing seen in it, summed over passes.
        wait_seconds: Of these, inside the loader's `next()`: until a batch, the end or an error came.
        first_wait_seconds: Of these, before the first batch of each pass: starting workers, opening files.
        wait_median_seconds: Half of the waits for a batch took at most so long; None before the first batch. Within
            a factor of 1.42 of the true one, as is the next.
        wait_p99_seconds: 99 % of the waits for a batch took at most so long.
        wait_largest_seconds: The longest wait for a batch; exact.
    """

    batches: int
    seconds: float
    wait_seconds: float
    first_wait_seconds: float
    wait_median_seconds: float | None
    wait_p99_seconds: float | None
    wait_largest_seconds: float | None

    @property
    def wait_share(self) -> float | None:
        """Share of the loop's time that it waited for the loader, 0 to 1; None before any time passed."""
        return self.wait_seconds / self.seconds if self.seconds > 0 else None

    @property
    def limited(self) -> bool | None:
        """Whether the loader limits the loop: it waited for at least 5 % of its time.

        None where that is too little to judge by: fewer than 10 batches, or less than a second.
        """
        share = self.wait_share
        if share is None or self.batches < _LEAST_BATCHES or self.seconds < _LEAST_SECONDS:
            return None
        return share >= _NOT_THE_LIMIT

    @property
    def largest_speedup(self) -> float | None:
        """How many times as fast the loop would be if no batch made it wait; None where it did nothing else."""
        busy = self.seconds - self.wait_seconds
        return self.seconds / busy if busy > 0 else None

    def __str__(self) -> str:
        """What was seen, and what follows from it, in sentences for a person."""
        return f"{self._seen()} {self._verdict()}" if self.batches else self._nothing_came()

    def _nothing_came(self) -> str:
        if not self.seconds:
            return "no batch has come yet."
        return f"no batch came; the loop waited {duration(self.wait_seconds)} for one."

    def _seen(self) -> str:
        share = self.wait_share or 0.0
        parts = [f"{count(self.batches, 'batch', 'batches')} in {duration(self.seconds)}"]
        if self.batches > 1 and self.wait_median_seconds is not None and self.wait_largest_seconds is not None:
            half = f"half of the waits for a batch took at most about {duration(self.wait_median_seconds)}"
            parts.append(f"{half}, the longest {duration(self.wait_largest_seconds)}")
        if self.first_wait_seconds > 0.5 * self.wait_seconds:
            parts.append(f"{duration(self.first_wait_seconds)} of the waiting came before the first batch of a pass")
        return f"the loop waited for data {100 * share:.1f} % of the time ({'; '.join(parts)})."

    def _verdict(self) -> str:
        speedup = self.largest_speedup
        if self.limited is None:
            return (
                "Too short to judge whether the loader is the limit: "
                f"that takes {_LEAST_BATCHES} batches and {duration(_LEAST_SECONDS)}."
            )
        if not self.limited:
            return "The loader is not the limit: what the loop does with the batches is."
        if speedup is None:
            return "The loop did nothing but wait."
        return f"The loader is a limit: with every batch ready the loop would be {speedup:,.2f} times as fast."


def watch(
    loader: Iterable[Batch],
    *,
    every: float | None = None,
    report: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> "Watched[Batch]":
    """Watch how long a training loop waits for its data; nothing else about the loop changes.

        loader = intune.watch(loader)
        for batch in loader:
            step(batch)

    At the end of each pass a line says what share of the time the loop waited and whether the loader is the limit at
    all; fewer than 10 batches or less than a second is called too short to judge. Batches pass through untouched, at
    well under 5 CPU microseconds each.

    Time inside the loader's `next()` counts as waiting. Work that a step only queues (kernels on a GPU) may still
    run meanwhile, so this is the wait of the loop and not of the device: where it is small, the loader is not the
    limit; where it is large, the device may still have had work for a part of it.

    Args:
        loader: Any iterable of batches: a DataLoader, a loader of this library, a `tf.data` dataset, a generator.
        every: Also report while a pass goes on, each time that so many seconds have passed; None = only at the end.
        report: Gets each line; None = printed to standard error. If it raises, that is logged and the loop goes on.
        clock: Time; None = the machine's.

    Returns:
        An iterable with the same batches. Other attributes, and `len`, are the loader's own.

    Raises:
        TypeError: If `loader` is not iterable.
        ValueError: If `every` is not above 0.
    """
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"watch needs an iterable of batches, got {type(loader).__name__}")
    if every is not None and not every > 0:
        raise ValueError(f"every must be a number of seconds above 0, got {every!r}")
    return Watched(loader, every, report or _print, clock or SystemClock())


class Watched(Generic[Batch]):
    """An iterable of batches that notes how long each one took to come; made by `watch`."""

    def __init__(
        self, loader: Iterable[Batch], every: float | None, report: Callable[[str], None], clock: Clock
    ) -> None:
        self._loader, self._every, self._report, self._clock = loader, every, report, clock
        self._counts = _Counts()

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass over the loader."""
        return _Pass(iter(self._loader), self._counts, self._clock, self._every, self._report)

    def __len__(self) -> int:
        """The loader's own length.

        Raises:
            TypeError: If the loader has none.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The loader's own attributes: `dataset`, `sampler`, `set_epoch`, `state_dict` and so on."""
        if name.startswith("_"):  # also while a copy is being made, which has no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def report(self) -> WatchReport:
        """What was seen so far, over all passes."""
        return self._counts.since(_Counts(), self._counts.largest)


@dataclass
class _Counts:
    batches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    first: float = 0.0
    largest: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    """How many waits of 2**(i - 1) to 2**i microseconds, for each i."""

    def since(self, before: "_Counts", largest: float) -> WatchReport:
        batches = self.batches - before.batches
        waits = [after - earlier for after, earlier in zip(self.buckets, before.buckets, strict=True)]
        return WatchReport(
            batches=batches,
            seconds=self.seconds - before.seconds,
            wait_seconds=self.waited - before.waited,
            first_wait_seconds=self.first - before.first,
            wait_median_seconds=_quantile(waits, 0.5, largest),
            wait_p99_seconds=_quantile(waits, 0.99, largest),
            wait_largest_seconds=largest if batches else None,
        )


class _Pass(Iterator[Batch]):
    """One pass over the loader; whatever the loader raises passes through."""

    def __init__(
        self,
        batches: Iterator[Batch],
        counts: _Counts,
        clock: Clock,
        every: float | None,
        report: Callable[[str], None],
    ) -> None:
        self._batches, self._counts, self._now, self._every, self._report = batches, counts, clock.wall, every, report
        self._largest = 0.0
        self._before = replace(counts, buckets=list(counts.buckets))
        self._seen: float | None = None
        """Until when time is booked; None before the first batch was asked for."""
        self._told = self._now()
        self._ended = False

    def __next__(self) -> Batch:
        """The next batch, untouched."""
        asked = self._now()
        try:
            batch = next(self._batches)
        except BaseException:
            self._book(asked, self._now())
            self._end()
            raise
        now = self._now()
        waited = self._book(asked, now)
        counts = self._counts
        counts.batches += 1
        counts.buckets[min(int(waited * 1e6).bit_length(), _BUCKETS - 1)] += 1
        if waited > self._largest:
            self._largest = waited
            counts.largest = max(waited, counts.largest)
        if self._every is not None and now - self._told >= self._every:
            self._tell(now)
        return batch

    def __del__(self) -> None:
        """A loop that was left early is reported as well."""
        if self._seen is not None and not sys.is_finalizing():
            self._end()

    def _book(self, asked: float, now: float) -> float:
        counts, waited = self._counts, now - asked
        if self._seen is None:
            counts.first += waited
            counts.seconds += waited
        else:
            counts.seconds += now - self._seen
        counts.waited += waited
        self._seen = now
        return waited

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._tell(self._seen or 0.0)

    def _tell(self, now: float) -> None:
        self._told = now
        line = f"intune: {self._counts.since(self._before, self._largest)}"
        try:
            self._report(line)
        except Exception as error:  # training is worth more than a line about it
            _log.warning("%s: %s, while it was told: %s", type(error).__name__, error, line)


def _quantile(waits: list[int], share: float, largest: float) -> float | None:
    left = share * sum(waits)
    for power, number in enumerate(waits):
        left -= number
        if number and left <= 0:
            return min(float(2.0 ** (power - 0.5)) * 1e-6, largest)
    return None


def _print(line: str) -> None:
    if sys.stderr is not None:  # as it is where the process was begun without one; None would mean stdout to print
        print(line, file=sys.stderr)
