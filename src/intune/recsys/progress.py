"""How training goes: what the training loop tells of it, and a line now and then that says it."""

import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import intune

EVERY_SECONDS = 2.0
COLUMNS = 80

Window = Callable[[], "intune.Snapshot | None"]
"""Gives the loader's last window; None before the first is over."""


@dataclass(frozen=True)
class Standing:
    """Where training stands.

    Attributes:
        epoch: The epoch that is trained on.
        rows: Rows trained since training began, over all epochs and, where it was resumed, over all its runs.
        loss: Mean loss of the last steps; NaN before the first.
        window: The loader's last window; None before the first is over.
        rows_before: Rows trained before this run took training up.
        rows_total: About how many rows all epochs have; None = not known.
        seconds_limit: Seconds after which this run ends; None = no limit.
    """

    epoch: int
    rows: int
    loss: float
    window: "intune.Snapshot | None"
    rows_before: int = 0
    rows_total: int | None = None
    seconds_limit: float | None = None


class Reporter(Protocol):
    """Shows a person how training goes."""

    def running(self, window: Window) -> AbstractContextManager[object]:
        """Within it the training loop runs.

        Args:
            window: May be called from any thread while it lasts.
        """
        ...

    def due(self) -> bool:
        """Whether it is time to say again where training stands; asked after each step."""
        ...

    def say(self, standing: Standing) -> None:
        """Take note of where training stands, or show it."""
        ...


class Progress:
    """Says every two seconds what happened since the last time, in lines that a terminal of 80 columns can show."""

    def __init__(self, echo: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Begin now; `clock` gives seconds."""
        self._echo = echo
        self._clock = clock
        self._since = clock()
        self._rows_then: int | None = None
        self._decided = ""

    def running(self, window: Window) -> AbstractContextManager[object]:
        """Nothing to begin or end: lines are written when something is said."""
        return nullcontext()

    def due(self) -> bool:
        """Whether two seconds have passed since the last line."""
        return self._clock() - self._since >= EVERY_SECONDS

    def say(self, standing: Standing) -> None:
        """Write a line, and below it what the tuner has decided where that has changed."""
        now = self._clock()
        before = standing.rows_before if self._rows_then is None else self._rows_then
        rate = (standing.rows - before) / (now - self._since)
        self._since, self._rows_then = now, standing.rows
        line = f"epoch {standing.epoch}  {standing.rows:,} rows  {rate:,.0f} rows/s  loss {standing.loss:.4f}"
        window = standing.window
        if window is None:
            self._echo(line)
            return
        self._echo(f"{line}  waited {window.consumer.wait_share:.0%}")
        decided = _decided(window)
        if decided != self._decided:
            self._decided = decided
            for part in textwrap.wrap(decided, COLUMNS, initial_indent="  ", subsequent_indent="    "):
                self._echo(part)


def _decided(window: "intune.Snapshot") -> str:
    """The allocation in words; stages whose concurrency is open share all slots and are not listed."""
    limited = [f"{name} {most}" for name, most in window.allocation.concurrency.items() if most is not None]
    return f"{window.allocation.slots} CPU slots; most items at once: {', '.join(limited) or 'no limit'}"
