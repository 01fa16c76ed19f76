"""A network that predicts how stages slow down, and the allocation that is best by it.

`model` fits a curve to each stage from its own windows alone. Here a network has seen windows of many simulated
pipelines (`intune.sim.train_learned_model`) and says from the first ones of a stage what its curve will be: seconds a
source row with n items at once are base + slope (n - 1) + bend n (n - 1). What follows from the curves is computed
exactly (`_plan`). So learning does what it is good at, to predict, and nothing else; for video streams that won over
learnt decisions (Puffer, Yan et al., NSDI 2020). It is here for comparison.

As with `model`, stages begin with few at once and get more as they finish items. What it does besides is left out: no
trials later on, no account of the interpreter lock or of the memory of items, no slots given back. A limit is given to
stages that would slow down by more than a quarter without one, and to processes; what is in force stays while it is
predicted to be good enough.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intune._errors import PipelineError
from intune._values import CAUSES, CROWDS, Allocation, Budget, Snapshot, StageSnapshot, memory_uses
from intune.tuners import _weights
from intune.tuners._beliefs import lost_share_of
from intune.tuners._plan import Best, Limits, Line, best, enough, predict
from intune.tuners._rows import in_force, most_useful, trainer_per_row, wall_per_row
from intune.tuners._trials import Ramp
from intune.tuners.view import Floats

FADING = (0.5, 0.95)
"""What the weight of older windows is multiplied by at each new one, in two memories."""

OTHERS = 21
"""Figures of a stage's newest window, beside how its seconds depend on how many are at work."""

SIZES = (2 * len(FADING) * len(CROWDS) + OTHERS, 64, 64, 3)
FORMAT = "intune learned-model 1"

LEAST, MOST = np.array([-3.0, -9.0, -12.0]), np.array([3.0, 1.0, 0.0])
"""What logarithms of the base over the mean seconds, and of slope and bend over the base, are within."""

LEVELS = np.log(CROWDS)
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e12
LEAST_ITEMS = 1e-3
"""What is left of items that were long ago, below which they are forgotten."""
SLOWS = 1.25
"""Times as long with all that it may take as with what it needs, from which a stage gets a limit."""
SPARE = 1.5
"""Times the processes that are wanted, from which some are taken away."""
NEWEST = 0.3
"""Weight of the newest window in running means."""
PLANNED_SHARE = 0.9 - 1 / 8
"""Share of the memory limit that is planned with, items in flight left out."""


class History:
    """What was seen of one stage; all that the network is told is free of scale.

    Attributes:
        process_bytes: What one of its processes holds.
    """

    def __init__(self) -> None:
        self._items, self._sums = np.zeros((2, len(FADING), len(CROWDS)))
        self._others = np.zeros(OTHERS)
        self.process_bytes = 0

    def add(self, stage: StageSnapshot, snapshot: Snapshot, budget: Budget) -> None:
        """Take in a window; one in which it finished nothing is left out."""
        points = points_of(stage)
        if not points:
            return
        fading = np.array(FADING)[:, None]
        faded = self._items * fading
        fading = np.where(faded > LEAST_ITEMS, fading, 0.0)
        self._items *= fading
        self._sums *= fading
        for place, items, seconds in points:
            self._items[:, place] += items
            self._sums[:, place] += items * seconds
        self._others = _others(stage, snapshot, budget)
        self.process_bytes = stage.process_resident_bytes or self.process_bytes

    @property
    def seconds(self) -> float:
        """Mean seconds a source row of late; 0 while nothing is known."""
        items = float(self._items[0].sum())
        return float(self._sums[0].sum()) / items if items else 0.0

    def features(self) -> Floats:
        """float64[SIZES[0]]: what the network is told.

        Twice, by memory and number at work, the logarithm of the seconds over their mean, between the numbers that
        occurred interpolated; then how many items that is from, and the figures of the newest window.
        """
        ratios = []
        for items, sums in zip(self._items, self._sums, strict=True):
            known = items > 0
            found = np.log(sums[known] / items[known] / self.seconds)
            ratios.append(np.interp(LEVELS, LEVELS[known], np.clip(found, -3, 3)))
        return np.concatenate([*ratios, np.log1p(self._items).ravel() / 5, self._others])


def points_of(stage: StageSnapshot) -> list[tuple[int, int, float]]:
    """What items took in a window: (place in `CROWDS`, items, seconds a source row)."""
    rows = stage.source_rows_per_item
    if not rows or not stage.items_out or not (mean := wall_per_row(stage)):
        return []
    found = [(CROWDS.index(crowd), items, wall / rows) for crowd, items, wall in stage.wall_seconds_by_crowd if items]
    if not found:
        place = int(np.searchsorted(CROWDS, max(1.0, stage.in_hand_mean), "right")) - 1
        found = [(place, stage.items_out, mean)]
    return [(place, items, min(MOST_SECONDS, max(LEAST_SECONDS, seconds))) for place, items, seconds in found]


def curves(outputs: Floats, seconds: Floats) -> Floats:
    """Base, slope and bend in seconds, float64[n, 3], from what the network gives and mean seconds [n]."""
    base, slope, bend = np.exp(np.clip(outputs, LEAST, MOST)).T
    base = base * seconds
    return np.stack([base, base * slope, base * bend], 1)


class LearnedModel:
    """Predicts how stages depend on concurrency by a trained network and proposes what is best by it.

    Args:
        weights: A file that `intune.sim.train_learned_model` made; None = the one that comes with the library.
        margin: Concurrency beyond the need for variability, as a share of the need.
        keep: Share of the best predicted rate from which on what is in force stays.

    Raises:
        PipelineError: If the file holds no weights for it, or an option is not allowed.
    """

    def __init__(self, weights: str | Path | None = None, *, margin: float = 0.25, keep: float = 0.97) -> None:
        if margin < 0:
            raise PipelineError(f"margin {margin:g} must not be below 0")
        if not 0 < keep <= 1:
            raise PipelineError(f"keep {keep:g} must be above 0 and at most 1")
        path = _weights.shipped("learned_model.npz") if weights is None else Path(weights)
        self._layers = _weights.read(path, FORMAT, SIZES)
        self._margin, self._keep = margin, keep
        self._ramp = Ramp()
        self._histories: dict[str, History] = {}
        self._trainer_seconds: float | None = None

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What is best by the predicted curves, or what is in force if that is good enough."""
        self._learn(snapshot, budget)
        lines, ramped = self._lines(snapshot, budget), self._ramp.levels(snapshot, budget, {}, frozenset())
        concurrency: dict[str, int | None] = dict.fromkeys(stage.name for stage in snapshot.stages)
        reasons = dict.fromkeys(concurrency, "open: not measured yet")
        if ramped or not lines:
            why = dict.fromkeys(ramped, "few at first, then more: it shows how the stage scales")
            return Allocation(concurrency | ramped, budget.cpus, reasons=reasons | why)
        limits = self._limits(snapshot, budget)
        found, now = best(lines, limits), in_force(snapshot)
        opened = {line.name: _open(line, snapshot, budget) for line in lines}
        for line in lines:
            concurrency[line.name], reasons[line.name] = self._limit(line, found, opened[line.name])
        given = {line.name: min(now[line.name] or opened[line.name], line.most) for line in lines}
        share = predict(lines, given, limits) / found.rate
        if share >= self._keep and not any(_too_much(line, now[line.name], concurrency[line.name]) for line in lines):
            stays = f"as before: predicted at {share:.0%} of the best"
            return Allocation(now, budget.cpus, reasons={name: f"{stays}; {why}" for name, why in reasons.items()})
        return Allocation(concurrency, budget.cpus, reasons=reasons)

    def _learn(self, snapshot: Snapshot, budget: Budget) -> None:
        for stage in snapshot.stages:
            self._histories.setdefault(stage.name, History()).add(stage, snapshot, budget)
        own, known = trainer_per_row(snapshot), self._trainer_seconds
        if own is not None:
            self._trainer_seconds = own if known is None else known + NEWEST * (own - known)

    def _lines(self, snapshot: Snapshot, budget: Budget) -> list[Line]:
        """The stages that were measured, by what the network predicts of them."""
        stages = [stage for stage in snapshot.stages if self._histories[stage.name].seconds]
        if not stages:
            return []
        histories = [self._histories[stage.name] for stage in stages]
        outputs = _weights.forward(self._layers, np.array([history.features() for history in histories]))
        predicted = curves(outputs, np.array([history.seconds for history in histories]))
        lines = []
        for stage, history, curve in zip(stages, histories, predicted.tolist(), strict=True):
            process = stage.info.executor == "process"
            most = most_useful(stage.info, budget)
            if process:
                most = max(1, min(most, budget.max_processes))
            holds = stage.info.waits is not True
            base, slope, bend = curve
            lines.append(Line(stage.name, base, slope, bend, most, holds, process, history.process_bytes))
        return lines

    def _limits(self, snapshot: Snapshot, budget: Budget) -> Limits:
        held = sum((stage.processes_live or 0) * (stage.process_resident_bytes or 0) for stage in snapshot.stages)
        rooms = [
            use.limit_bytes * PLANNED_SHARE - max(0, use.rest_bytes - held)
            for use in memory_uses(snapshot, budget)
            if use.rest_bytes is not None and use.with_processes
        ]
        trainer = 1 / self._trainer_seconds if self._trainer_seconds else math.inf
        return Limits(budget.cpus, trainer, budget.max_processes, max(0.0, min(rooms, default=math.inf)))

    def _limit(self, line: Line, found: Best, when_open: int) -> tuple[int | None, str]:
        """The concurrency of a stage, and why."""
        wanted = enough(line, found.rate, self._margin)
        busy = f"busy on {line.need(found.rate):.2f} at {found.rate:.3g} source rows/s"
        if line.process:
            return wanted, f"{busy}; each process more costs memory"
        slower = line.seconds(when_open) / line.seconds(wanted)
        if slower > SLOWS:
            return wanted, f"{busy}; predicted to take {slower:.3g} times as long with {when_open} at once"
        return None, f"open: {busy}, a limit would not help"


def _too_much(line: Line, now: int | None, wanted: int | None) -> bool:
    """Whether a stage holds many more processes than are wanted, or has a limit where none is."""
    if wanted is None or not line.process:
        return wanted is None and now is not None
    return (now or line.most) > SPARE * wanted


def _open(line: Line, snapshot: Snapshot, budget: Budget) -> int:
    """What an open concurrency stands for."""
    if line.holds_slot:
        return min(line.most, budget.cpus)
    waiting = sum(stage.info.waits is True for stage in snapshot.stages)
    return min(line.most, max(1, (budget.max_threads - budget.cpus) // waiting))


def _others(stage: StageSnapshot, snapshot: Snapshot, budget: Budget) -> Floats:
    """float64[OTHERS]: the figures of a window; what was not measured is 0."""
    wall, info, machine = stage.wall_seconds_mean or LEAST_SECONDS, stage.info, snapshot.machine
    seconds, cpus = max(snapshot.window_seconds, LEAST_SECONDS), budget.cpus
    used, everybody = machine.cpu_seconds_used, machine.cpu_seconds_all
    figures: Sequence[float] = (
        info.executor == "process",
        info.waits is True,
        info.kind == "source",
        info.kind in ("shuffle", "batch"),
        math.log2(cpus) / 5,
        math.log2(max(1, stage.concurrency or snapshot.allocation.slots)) / 5,
        math.log2(1 + stage.in_hand_mean) / 5,
        stage.in_hand_mean / cpus,
        (stage.cpu_seconds_mean or 0.0) / wall,
        (stage.run_queue_seconds or 0.0) / max(stage.busy_seconds, LEAST_SECONDS),
        lost_share_of(stage),
        math.log(max(1.0, (stage.wall_seconds_p99 or 0.0) / wall)),
        math.log1p(stage.items_out) / 5,
        snapshot.consumer.wait_share,
        (used or 0.0) / seconds / cpus,
        max(0.0, (everybody or 0.0) - (used or 0.0)) / seconds / cpus,
        *(stage.wait_share.get(cause, 0.0) for cause in CAUSES),
    )
    return np.clip(np.array(figures, dtype=np.float64), 0.0, 4.0)
