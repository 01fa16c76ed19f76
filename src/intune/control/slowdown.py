"""Which stages do less with more items at once, in words: by how long items took beside how many others.

Figures count only from windows in which a stage had had the same limit for a while: just after a change items that
began beside few end beside many, and would be taken for items among those in between.
"""

from collections.abc import Mapping

from intune._values import Snapshot, StageSnapshot
from intune._words import count, duration

LEAST_ITEMS = 10
"""Fewer items at a number say nothing."""

LESS = 0.85
"""Share of the best rate below which a stage is said to do less with more at once."""

SETTLED = 3
"""Windows for which a stage must have had its limit."""

FADING = 0.95
"""What a window weighs one later."""


class Watch:
    """Keeps, by stage, how long items took by how many were at work, from settled windows; older ones fade."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, tuple[float, float]]] = {}
        self._limits: dict[str, tuple[object, int]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """One more window."""
        for stage in snapshot.stages:
            limit = (stage.concurrency, stage.info.waits, stage.processes_live, snapshot.allocation.slots)
            before, windows = self._limits.get(stage.name, (None, 0))
            windows = windows + 1 if limit == before else 0
            self._limits[stage.name] = limit, windows
            if windows >= SETTLED:
                self._learn(stage)

    def sentences(self) -> list[str]:
        """One for each stage that was seen to finish fewer items a second with more at once."""
        return [said for name, found in self._found.items() if (said := _slowdown(name, found)) is not None]

    def _learn(self, stage: StageSnapshot) -> None:
        found = {
            crowd: (FADING * items, FADING * seconds)
            for crowd, (items, seconds) in self._found.get(stage.name, {}).items()
        }
        for crowd, number, mean in stage.wall_seconds_by_crowd:
            items, seconds = found.get(crowd, (0.0, 0.0))
            found[crowd] = items + number, seconds + number * mean
        self._found[stage.name] = found


def _slowdown(name: str, found: Mapping[int, tuple[float, float]]) -> str | None:
    known = {
        crowd: seconds / items for crowd, (items, seconds) in found.items() if items >= LEAST_ITEMS and seconds > 0
    }
    if len(known) < 2:
        return None
    best, most = max(known, key=lambda crowd: crowd / known[crowd]), max(known)
    gone = 1 - (most / known[most]) / (best / known[best])
    if gone <= 1 - LESS:
        return None
    return (
        f"Stage {name} slows down with concurrency: {count(best, 'item')} at once took {duration(known[best])} each, "
        f"{most} at once {duration(known[most])} each, which is {100 * gone:.0f} % fewer items a second. "
        'The tuner "model" limits such stages; max_concurrency= does it by hand.'
    )
