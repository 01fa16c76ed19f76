"""What the agent looks at: a window, and what the fitted model makes of it, as numbers that are free of scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from intune._values import CAUSES, Allocation, Budget, Snapshot, StageSnapshot
from intune.tuners._rows import in_force, most_useful
from intune.tuners.model import Model

ACTIONS = ("as the model says", "as before", "half", "twice the model's", "four times the model's", "open")
"""What a stage may get: the model's proposal, or a multiple of that, or something relative to what is in force."""

BEGINNING = 12
"""Decisions of a run in which a stage may depart from the model."""

SINCE_MOVED, SINCE_ANY = 10, 10
"""Decisions since a change from which it is all the same how many."""

FADING = 0.99
"""What the best rate seen is multiplied by with each decision: conditions change."""

SLOW = 0.2
"""Weight of the newest window in the slow mean of a stage's seconds."""


@dataclass(slots=True)
class StageMemory:
    """What is remembered of a stage from decision to decision.

    Attributes:
        slow_wall: Slow mean of its wall seconds; None = never measured.
        last_wall: Those of the window before.
        moved: Logarithm of its last change.
        since: Decisions since that.
        rate_before: The pipeline's rate before that; 0 = none.
        finished: Items that it has finished in all windows.
    """

    slow_wall: float | None = None
    last_wall: float | None = None
    moved: float = 0.0
    since: int = SINCE_MOVED
    rate_before: float = 0.0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision is made from.

    Attributes:
        stages: float32[S, STAGE_FEATURES].
        whole: float32[GLOBAL_FEATURES].
        options: By stage, the concurrency that each of `ACTIONS` gives; None = open.
        allowed: bool[S, A]; whether an action differs from following the model, and following itself.
    """

    stages: npt.NDArray[np.float32]
    whole: npt.NDArray[np.float32]
    options: list[list[int | None]]
    allowed: npt.NDArray[np.bool_]


class Senses:
    """Turns windows into features, with a memory of what was before.

    Attributes:
        step: Decisions so far.
    """

    def __init__(self) -> None:
        self._stages: dict[str, StageMemory] = {}
        self._best = self._rate = 0.0
        self.step = 0
        self._quiet = SINCE_ANY

    def look(self, snapshot: Snapshot, budget: Budget, proposal: Allocation, model: Model) -> Seen:
        """What a window, and the model's proposal after it, amount to."""
        rate = rate_of(snapshot)
        changed = any(event.kind in ("budget", "epoch_start") for event in snapshot.events)
        self._best = rate if changed else max(FADING * self._best, rate)
        now = in_force(snapshot)
        stages, options = [], []
        for place, stage in enumerate(snapshot.stages):
            memory = self._stages.setdefault(stage.name, StageMemory())
            limit = most_useful(stage.info, budget)
            have = min(now[stage.name] or limit, limit)
            follow = min(proposal.concurrency[stage.name] or limit, limit)
            memory.finished += stage.items_out
            numbers = _of_stage(stage, snapshot, memory, model, have, follow, limit, rate)
            numbers += [float(now[stage.name] is None), float(proposal.concurrency[stage.name] is None), place == 0]
            stages.append(numbers)
            options.append(_options(follow, have, limit))
            if stage.wall_seconds_mean:
                wall = stage.wall_seconds_mean
                old = memory.slow_wall
                memory.slow_wall = wall if old is None else old + SLOW * (wall - old)
                memory.last_wall = wall
        whole = self._of_all(snapshot, budget, model, rate, changed)
        allowed = np.array([[n == 0 or each != row[0] for n, each in enumerate(row)] for row in options])
        self._rate = rate
        return Seen(_clean(stages), _clean(whole), options, allowed)

    def decided(self, snapshot: Snapshot, budget: Budget, wanted: Mapping[str, int | None]) -> None:
        """This was asked for."""
        now, any_moved = in_force(snapshot), False
        for stage in snapshot.stages:
            limit = most_useful(stage.info, budget)
            old, new = (min(each[stage.name] or limit, limit) for each in (now, wanted))
            memory = self._stages[stage.name]
            memory.since = min(memory.since + 1, SINCE_MOVED)
            if old != new:
                memory.moved, memory.since, memory.rate_before = math.log(new / old), 0, self._rate
                any_moved = True
        self.step += 1
        self._quiet = 0 if any_moved else min(self._quiet + 1, SINCE_ANY)

    def _of_all(self, snapshot: Snapshot, budget: Budget, model: Model, rate: float, changed: bool) -> list[float]:
        machine, seconds, best = snapshot.machine, max(snapshot.window_seconds, 1e-9), model.opinion.best
        limit = machine.memory_limit_bytes if machine.memory_limit_bytes is not None else budget.memory_bytes
        memory = machine.memory_bytes / limit if machine.memory_bytes is not None and limit else None
        used, everything = machine.cpu_seconds_used or 0.0, machine.cpu_seconds_all
        holding = sum(stage.in_hand_mean for stage in snapshot.stages if not stage.info.waits)
        bound = best.bound if best else ""
        return [
            math.log(budget.cpus) / 3,
            snapshot.allocation.slots / budget.cpus,
            holding / max(1, snapshot.allocation.slots),
            snapshot.consumer.wait_share,
            float(snapshot.consumer.ready > 0),
            math.log1p(snapshot.consumer.steps) / 4,
            snapshot.held_back_share,
            memory or 0.0,
            float(memory is None),
            float(any(event.kind in ("vetoed", "clamped", "braked") for event in snapshot.events)),
            float(changed),
            used / seconds / budget.cpus,
            0.0 if everything is None else max(0.0, everything - used) / seconds / budget.cpus,
            (machine.lock_wait_seconds or 0.0) * 100,
            _log_ratio(rate, self._best),
            _log_ratio(rate, self._rate),
            _log_ratio(best.rate, rate) / 2 if best else 0.0,
            self._quiet / SINCE_ANY,
            min(self.step, BEGINNING) / BEGINNING,
            math.log(seconds),
            len(snapshot.stages) / 8,
            float(bound == "slots"),
            float(bound == "trainer"),
            float(bound == "lock"),
            float(bound == "processes"),
        ]


def _of_stage(
    stage: StageSnapshot,
    snapshot: Snapshot,
    memory: StageMemory,
    model: Model,
    have: int,
    follow: int,
    limit: int,
    rate: float,
) -> list[float]:
    """What there is to say of a stage; all of it free of scale."""
    wall, cpu, opinion = stage.wall_seconds_mean, stage.cpu_seconds_mean, model.opinion
    belief = model.beliefs.get(stage.name)
    line = next((line for line in opinion.lines if line.name == stage.name), None)
    cpu_share = min(1.0, cpu / wall) if wall and cpu is not None else 0.0
    queue = min(1.0, (stage.run_queue_seconds or 0.0) / stage.busy_seconds) if stage.busy_seconds > 0 else 0.0
    by_fit = [0.0] * 6
    if belief is not None and line is not None:
        base, slope, bend = belief.fit.curve

        def seconds(n: float) -> float:
            return base + slope * (n - 1) + bend * (n - 1) * n

        need = line.need(opinion.best.rate) if opinion.best else 1.0
        by_fit = [
            math.log(seconds(follow) / seconds(have)),
            math.log(seconds(limit) / seconds(have)),
            math.log(max(0.1, min(need, 1e3)) / have),
            math.log1p(belief.fit.deviation(have)),
            math.log1p(belief.fit.deviation(limit)),
            float(line.slows),
        ]
    return [
        math.log(have) / 2,
        math.log(limit) / 2,
        math.log(follow / have),
        math.log(limit / have),
        stage.in_hand_mean / have,
        math.log1p(stage.items_out) / 4,
        *(stage.wait_share.get(cause, 0.0) for cause in CAUSES),
        cpu_share,
        queue,
        max(0.0, 1 - cpu_share - queue) if wall else 0.0,
        float(belief is not None),
        *by_fit,
        float(opinion.best is not None and opinion.best.bound == stage.name),
        float(stage.name in opinion.begins),
        float(stage.name in opinion.changed),
        _log_ratio(wall, memory.slow_wall),
        _log_ratio(wall, memory.last_wall),
        _log_ratio(stage.wall_seconds_p99, wall),
        memory.since / SINCE_MOVED,
        memory.moved,
        _log_ratio(rate, memory.rate_before),
        float(stage.info.executor == "process"),
        float(stage.info.waits is True),
        float(stage.info.kind in ("shuffle", "batch")),
        (stage.processes_starting or 0) / have,
        have * (stage.process_resident_bytes or 0) / (snapshot.machine.memory_limit_bytes or math.inf),
        math.log1p(stage.waiting_items) / 4,
        math.log1p(memory.finished) / 4,
        _log_ratio(memory.finished, have) / 2,
    ]


STAGE_FEATURES, GLOBAL_FEATURES = 41, 25
"""Numbers for each stage, and for the workload as a whole."""


def _options(follow: int, have: int, limit: int) -> list[int | None]:
    """What each action gives; all that is useful counts as open, so that equal ones look equal."""
    levels = (follow, have, max(1, have // 2), 2 * follow, 4 * follow, limit)
    return [None if each >= limit else each for each in levels]


def rate_of(snapshot: Snapshot) -> float:
    """Source rows a second that the training loop was given."""
    batch = snapshot.stages[-1].source_rows_per_item
    if not batch or snapshot.window_seconds <= 0:
        return 0.0
    return snapshot.consumer.steps * batch / snapshot.window_seconds


def _log_ratio(one: float | None, other: float | None) -> float:
    return math.log(one / other) if one and other else 0.0


def _clean(numbers: object) -> npt.NDArray[np.float32]:
    return np.clip(np.nan_to_num(np.array(numbers, dtype=np.float32)), -4, 4)
