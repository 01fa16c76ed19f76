"""What a loader did over its lifetime, for people and programs."""

from collections.abc import Mapping
from dataclasses import dataclass

from intune._values import Snapshot
from intune._words import count


@dataclass(frozen=True)
class StageTotals:
    """One stage over the loader's lifetime.

    Attributes:
        items: Items finished.
        rows: Rows in them.
        wall_seconds: Wall seconds that items were worked on, summed over workers.
        cpu_seconds: CPU seconds of the same.
        skipped: Items left out by on_error="skip".
    """

    items: int
    rows: int
    wall_seconds: float
    cpu_seconds: float
    skipped: int

    def __str__(self) -> str:
        """The figures in one line; the rate is that of one worker that never waits."""
        rate = _per_second(self.rows, self.wall_seconds)
        line = f"{count(self.items, 'item')}, {self.wall_seconds:,.1f} s of work, {rate} rows/s of work"
        return f"{line}, {self.skipped:,} left out" if self.skipped else line


@dataclass(frozen=True)
class Stats:
    """Figures of a loader: lifetime figures, and the last window apart from them.

    Attributes:
        seconds: Since the first batch was asked for.
        batches: Items delivered (batches, or samples where nothing batches).
        rows: Rows in them.
        wait_seconds: Seconds that the training loop was blocked in `next`.
        stages: Totals by stage.
        skipped: One line for each of the first 100 items left out.
        window: The last window that control looked at; None before the first.
    """

    seconds: float
    batches: int
    rows: int
    wait_seconds: float
    stages: Mapping[str, StageTotals]
    skipped: tuple[str, ...]
    window: Snapshot | None

    def __str__(self) -> str:
        """The figures in a few lines: what was delivered, the share waited, and a line for each stage."""
        rate = _per_second(self.rows, self.seconds)
        waited = f"{self.wait_seconds / self.seconds:.0%}" if self.seconds > 0 else "unknown"
        lines = [
            f"{count(self.batches, 'batch', 'batches')}, {count(self.rows, 'row')} "
            f"in {self.seconds:,.1f} s ({rate} rows/s), waited {waited}",
            *(f"  {name:<{self._width}}  {stage}" for name, stage in self.stages.items()),
        ]
        if self.skipped:
            lines.append(f"  the first that was left out: {self.skipped[0]}")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _width(self) -> int:
        return max(map(len, self.stages), default=0)


def _per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else "unknown"
