"""What was measured, simulated again: whether a fitted simulator says of tried allocations what they gave."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from intune._values import Allocation, Budget, Snapshot
from intune.sim.calibration.fitting import Fitted
from intune.sim.calibration.levels import SCATTER, Sample, level, usual_scatter
from intune.sim.calibration.seen import Window
from intune.sim.play import play

MOST = 16
"""Allocations that are simulated again: those that were held for longest."""

LEAST_SECONDS, LEAST_STEPS = 1.0, 5
"""A rate is taken of no less."""

WARM, COUNTED = 2, 4
"""Simulated seconds before an allocation's rate counts, and for which it does, at least."""

STEPS = 20
"""Steps of the trainer that a simulated rate is taken from, about."""

MOST_WARM, MOST_COUNTED = 20, 20

LUMPS = 0.5
"""Deviation of a single step as a share of it: some end in the next window, or come several at once."""

DRIFTS = 0.25
"""Deviation of a rate from one time to the next from which on times are no chance: more of them make it no surer."""

VISIT_SECONDS = 10.0
"""An allocation that stays for longer counts as held again: what goes on around has changed by then."""

SURE = 1.645
"""Deviations within which nine of ten lie."""


class Held(NamedTuple):
    """An allocation that was held.

    Attributes:
        concurrency: By stage; None = open.
        slots: CPU slots.
        seconds: For how long it was in force and what was in hand had been begun under it.
        measured: Rows a second that the trainer was given.
        deviation: Of that rate, as a share of it.
        visits: How often it was held.
        simulated: The same rate, simulated.
    """

    concurrency: Mapping[str, int | None]
    slots: int
    seconds: float
    measured: float
    deviation: float
    visits: int
    simulated: float

    @property
    def off(self) -> float:
        """Logarithm of what was simulated over what was measured."""
        return math.log(max(self.simulated, 1e-9) / self.measured)

    @property
    def surely_off(self) -> float:
        """The same, less what chance explains of it."""
        return math.copysign(max(0.0, abs(self.off) - SURE * self.deviation), self.off)


def drift(held: Sequence[Held]) -> float:
    """Deviation of an allocation's rate from one time to the next, as a share; 0 where it is no more than usual."""
    found = statistics.median(each.deviation * math.sqrt(each.visits) for each in held)
    return found if found > DRIFTS else 0.0


class _Turns:
    """Decides for one allocation after another, each for so many decisions."""

    def __init__(self, allocations: Sequence[Allocation], each: int) -> None:
        self._left = [allocation for allocation in allocations for _ in range(each)]

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The one whose turn it is, in the end the last one."""
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


def replayed(fit: Fitted, windows: Sequence[Window]) -> tuple[Held, ...]:
    """The allocations that were held, each with its rate as measured and as simulated; that of longest comes first."""
    known = _rates(windows)[:MOST]
    if not known:
        return ()
    through = fit.scenario.through_seconds
    warm = min(MOST_WARM, max(WARM, math.ceil(2 * through + fit.scenario.starting_seconds)))
    steps = max(one.steps / one.seconds for one in known)
    counted = min(MOST_COUNTED, max(COUNTED, math.ceil(2 * through), math.ceil(STEPS / steps)))
    turns = [
        Allocation({fit.names[name]: value for name, value in one.concurrency.items()}, one.slots) for one in known
    ]
    each = warm + counted
    # The first decision is taken at once and then some in quick succession: they count as its warming up.
    trace = play(fit.scenario, _Turns([turns[0], *turns], each), each * (len(turns) + 1))
    found = []
    for place, one in enumerate(known, 1):
        first, last = place * each + warm, (place + 1) * each
        simulated = fit.rows * trace.rows_per_second(first, last)
        found.append(Held(one.concurrency, one.slots, one.seconds, one.rate, one.deviation, one.visits, simulated))
    return tuple(found)


class _Visit:
    """A time for which one allocation was held."""

    def __init__(self) -> None:
        self.seconds = self.rows = 0.0
        self.steps = 0

    def add(self, window: Window) -> None:
        """One more window of it."""
        self.seconds += window.snapshot.window_seconds
        self.rows += window.snapshot.consumer.rows
        self.steps += window.snapshot.consumer.steps

    @property
    def sample(self) -> Sample:
        """Its seconds a row."""
        return Sample(1.0, self.steps, self.seconds / self.rows)


class _Rate(NamedTuple):
    """An allocation, for how long and how often it was held, rows a second and their deviation as a share."""

    concurrency: dict[str, int | None]
    slots: int
    seconds: float
    rate: float
    deviation: float
    visits: int
    steps: int


def _rates(windows: Sequence[Window]) -> list[_Rate]:
    """Those that were held for long enough, that of longest first; where none was, by what was left of the one before.

    How sure a rate is follows from how far several visits differ: windows one after another share what went on around.
    """
    return _rates_of(windows, settled=True) or _rates_of(windows, settled=False)


def _rates_of(windows: Sequence[Window], *, settled: bool) -> list[_Rate]:
    visits: dict[Any, list[_Visit]] = {}
    before: Any = None
    for window in windows:
        snapshot = window.snapshot
        key = (limits_of(snapshot), snapshot.allocation.slots)
        if key != before or visits[key][-1].seconds >= VISIT_SECONDS:
            visits.setdefault(key, []).append(_Visit())
        through = sum(stage.wall_seconds_mean or 0.0 for stage in snapshot.stages)
        if window.held_seconds >= snapshot.window_seconds + through or (not settled and key == before):
            visits[key][-1].add(window)
        before = key
    samples = {key: [each.sample for each in some if each.rows] for key, some in visits.items()}
    usual = max(SCATTER, usual_scatter(samples.values()))
    found = []
    for (limits, slots), some in visits.items():
        seconds, steps = sum(each.seconds for each in some), sum(each.steps for each in some)
        if seconds >= LEAST_SECONDS and steps >= LEAST_STEPS:
            mine = samples[limits, slots]
            point = level(mine, usual, LUMPS)
            found.append(_Rate(dict(limits), slots, seconds, 1 / point.seconds, point.deviation, len(mine), steps))
    return sorted(found, key=lambda each: -each.seconds)


def limits_of(snapshot: Snapshot) -> tuple[tuple[str, int | None], ...]:
    """By stage, what it is let have; a limit that is no lower than what it takes by itself is none."""
    found = []
    for stage in snapshot.stages:
        value, most = snapshot.allocation.concurrency.get(stage.name) or None, stage.info.max_concurrency
        found.append((stage.name, None if value is not None and most is not None and value >= most else value))
    return tuple(found)
