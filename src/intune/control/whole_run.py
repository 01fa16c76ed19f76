"""A run as a whole, from its windows: what limited it for longest, and what items took at each number at once."""

import threading
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from intune._values import Snapshot, StageSnapshot
from intune.control.explain import Kind, limit

SAYS_NOTHING: frozenset[Kind] = frozenset({"source", "unknown"})
"""Kinds of limits that are told of a run only where no window had another one."""


def went_on(window: Snapshot) -> bool:
    """Whether something was taken in a window, or asked for and worked on.

    Else it says nothing of what limits a run, which had not begun, was over, or was left alone by the training loop.
    """
    worked_on = any(stage.items_in or stage.running for stage in window.stages)
    return bool(window.consumer.steps or (window.consumer.wait_share and worked_on))


class SeenCrowds:
    """What items took by how many there were at once, of all windows of a run.

    One window seldom has both few and many at once; a run begins with few.
    """

    def __init__(self) -> None:
        self._levels: defaultdict[str, dict[int, tuple[int, float]]] = defaultdict(dict)

    def add(self, window: Snapshot) -> Snapshot:
        """The window, in which a stage's `wall_seconds_by_crowd` is that of all windows up to now."""
        return replace(window, stages=tuple(map(self._added, window.stages)))

    def _added(self, stage: StageSnapshot) -> StageSnapshot:
        levels = self._levels[stage.name]
        for crowd, items, wall in stage.wall_seconds_by_crowd:
            before, seconds = levels.get(crowd, (0, 0.0))
            levels[crowd] = (before + items, seconds + items * wall)
        known = ((crowd, items, seconds / items) for crowd, (items, seconds) in sorted(levels.items()) if items)
        return replace(stage, wall_seconds_by_crowd=tuple(known))


class Most(NamedTuple):
    """What limited a run for longest.

    Attributes:
        window: The last window in which it did.
        share: For what share of the time.
        seconds: Of so many seconds, of all windows in which anything went on.
    """

    window: Snapshot
    share: float
    seconds: float


class WholeRun:
    """Is shown one window after another; may be asked by another thread meanwhile.

    Attributes:
        last: The last window that says what limits the run: in which something went on, and a stage finished an item.
            Its seconds by crowd are those of the whole run. That a source has no more to read does not stand
            for what came before.
    """

    def __init__(self) -> None:
        self.last: Snapshot | None = None
        self._lock = threading.Lock()
        self._crowds = SeenCrowds()
        self._found: dict[tuple[Kind, str | None], tuple[float, Snapshot]] = {}

    def see(self, window: Snapshot) -> None:
        """A window has ended."""
        known = self._crowds.add(window)
        if not went_on(window):
            return
        found = limit(known)
        if any(stage.items_out for stage in window.stages) and (self.last is None or found.kind != "source"):
            self.last = known
        with self._lock:
            seconds, _ = self._found.get((found.kind, found.stage), (0.0, known))
            self._found[found.kind, found.stage] = (seconds + window.window_seconds, known)

    def most(self) -> Most | None:
        """What limited it for longest; None before anything went on."""
        with self._lock:
            found = dict(self._found)
        total = sum(seconds for seconds, _ in found.values())
        if total <= 0:
            return None
        telling = {key: each for key, each in found.items() if key[0] not in SAYS_NOTHING} or found
        seconds, window = max(telling.values(), key=lambda each: each[0])
        return Most(window, seconds / total, total)
