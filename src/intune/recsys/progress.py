"""A line now and then about how training goes, taken from a loader's last window."""

from collections.abc import Callable

import intune
from intune._values import StageSnapshot

EVERY_SECONDS = 2.0


class Progress:
    """Says every two seconds what happened since the last time."""

    def __init__(self, echo: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Begin now; `clock` gives seconds."""
        self._echo = echo
        self._clock = clock
        self._since = clock()
        self._rows_then = 0

    def due(self) -> bool:
        """Whether two seconds have passed since the last line."""
        return self._clock() - self._since >= EVERY_SECONDS

    def say(self, *, epoch: int, rows: int, loss: float, window: "intune.Snapshot | None") -> None:
        """Write a line.

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
        if window is not None:
            stages = "  ".join(map(_stage, window.stages))
            line += f"  waited {window.consumer.wait_share:.0%}  |  running/concurrency  {stages}"
        self._echo(line)


def _stage(stage: StageSnapshot) -> str:
    return f"{stage.name} {stage.running}/{'open' if stage.concurrency is None else stage.concurrency}"
