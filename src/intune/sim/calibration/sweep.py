"""The tuner that goes through a designed sequence of allocations, so that something can be learnt from each."""

import math

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.tuners._rows import most_useful

OPEN_SHARE = 0.3
"""Share of the points at which a stage has all that it may have."""

FIRST = 1
"""What each stage begins with."""

SLOWED = 4.0
"""Times as long as alone from which on a stage is given no more: what is known of it by then is enough."""

CYCLE = 10
"""Points after which it begins again: what is seen at several times tells chance from what an allocation does."""

THROUGH = 2
"""A point is held for at least so many times as long as an item takes from end to end."""

LONGEST = 4
"""A point is held at most so many times as long as wanted, where items take long or stages finish nothing."""


class Sweep:
    """Holds one allocation after another: first rising ones, then points that fill the space evenly.

    Each stage begins with one at once, and may get twice of what it was seen working on, as long as its items don't
    take several times as long by that: a stage that hinders itself would finish nothing for the rest of the sweep
    otherwise.
    Within that, concurrencies are spread evenly over their logarithms, by a sequence (the additive recurrence of
    Roberts) of which every beginning is spread evenly too: it may be broken off at any time. After `CYCLE` points it
    comes back to the first one, where all is open. Guard and brake hold as for any tuner.

    Args:
        hold_seconds: For how long each is held, above 0; longer where items take long or processes start.
    """

    def __init__(self, hold_seconds: float = 3.0) -> None:
        if not hold_seconds > 0:
            raise PipelineError(f"hold_seconds must be above 0, got {hold_seconds!r}")
        self._hold_seconds = hold_seconds
        self._held = self._up = 0.0
        self._point = 0
        self._rising = True
        self._finished: set[str] = set()
        self._most: dict[str, int] = {}
        self._walls: dict[str, dict[int, float]] = {}

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The point that is its turn."""
        self._held += snapshot.window_seconds
        starting = any(stage.processes_starting for stage in snapshot.stages)
        self._up = 0.0 if starting else self._up + snapshot.window_seconds
        for stage in snapshot.stages:
            self._learn(stage)
        through = sum(stage.wall_seconds_mean or 0.0 for stage in snapshot.stages)
        enough = THROUGH * through if len(self._finished) == len(snapshot.stages) else math.inf
        if self._up >= max(self._hold_seconds, enough) or self._held >= self._hold_seconds * LONGEST:
            self._held = self._up = 0.0
            self._finished.clear()
            self._rising = any([self._raise(stage.info, budget) for stage in snapshot.stages])
            self._point += not self._rising
        infos = [stage.info for stage in snapshot.stages]
        levels = {info.name: self._level(place, len(infos), info, budget) for place, info in enumerate(infos)}
        return Allocation(levels, budget.cpus, reasons=dict.fromkeys(levels, f"point {self._point} of a sweep"))

    def _learn(self, stage: StageSnapshot) -> None:
        walls = self._walls.setdefault(stage.name, {})
        walls.update({crowd: wall for crowd, _, wall in stage.wall_seconds_by_crowd})
        if stage.items_out:
            self._finished.add(stage.name)

    def _raise(self, info: StageInfo, budget: Budget) -> bool:
        """Let a stage have more, where that is of use and known to do no harm; whether it may."""
        before, walls = self._most.get(info.name, FIRST), self._walls[info.name]
        if not walls or walls[max(walls)] > SLOWED * min(walls.values()):
            return False
        self._most[info.name] = max(before, min(2 * max(walls), _useful(info, budget)))
        return self._most[info.name] > before

    def _level(self, place: int, dimensions: int, info: StageInfo, budget: Budget) -> int | None:
        useful = _useful(info, budget)
        most = min(self._most.get(info.name, FIRST), useful)
        drawn = (self._point % CYCLE) * _ratio(dimensions) ** -(place + 1) % 1
        if self._rising or drawn < OPEN_SHARE:
            # Of a stage that may yet turn out to wait, open could mean dozens at once.
            return None if most == useful and info.waits is not None else most
        return max(1, round(math.pow(most, (drawn - OPEN_SHARE) / (1 - OPEN_SHARE))))


def _useful(info: StageInfo, budget: Budget) -> int:
    most = most_useful(info, budget)
    return max(1, min(most, budget.max_processes)) if info.executor == "process" else most


def _ratio(dimensions: int) -> float:
    """The root of x ** (d + 1) = x + 1 above 1: the golden ratio for d = 1."""
    root = 1.5
    for _ in range(60):
        root = math.pow(1 + root, 1 / (dimensions + 1))
    return root
