"""A line now and then about how training goes, taken from a loader's last window."""

import textwrap
from collections.abc import Callable

import intune

EVERY_SECONDS = 2.0
COLUMNS = 80


class Progress:
    """Says every two seconds what happened since the last time, in lines that a terminal of 80 columns can show."""

    def __init__(self, echo: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Begin now; `clock` gives seconds."""
        self._echo = echo
        self._clock = clock
        self._since = clock()
        self._rows_then = 0
        self._decided = ""

    def due(self) -> bool:
        """Whether two seconds have passed since the last line."""
        return self._clock() - self._since >= EVERY_SECONDS

    def say(self, *, epoch: int, rows: int, loss: float, window: "intune.Snapshot | None") -> None:
        """Write a line, and below it what the tuner has decided where that has changed.

        Args:
            epoch: The epoch that is trained on.
            rows: Rows trained since training began, over all epochs.
            loss: Mean loss of the last steps.
            window: The loader's last window; None before the first is over.
        """
        now = self._clock()
        rate = (rows - self._rows_then) / (now - self._since)
        self._since, self._rows_then = now, rows
        line = f"epoch {epoch}  {rows:,} rows  {rate:,.0f} rows/s  loss {loss:.4f}"
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
