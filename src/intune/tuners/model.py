"""A model of the pipeline, fitted while it runs, and the allocation that is best by it.

*What is learnt of each stage* (`_fit`): the wall seconds a source row as a curve over the items at once; CPU seconds;
how much of them holds the interpreter lock. What threads lose to the lock (neither running nor waiting for a CPU while
the probe finds the lock held) is taken out of the curve, as it isn't the stage's own: the lock is a limit of its own,
shared by all. Windows that are not warm, stages with few completions and those that start processes teach nothing.

*What follows* (`_plan`): the rate of any allocation, and the best rate with the least concurrency that reaches it. A
limit is given to a stage only where it helps: the stage slows down with concurrency, holds the lock (more threads
would only wait for it), runs in processes (which cost memory), or has far more than a slow training loop needs.
All others stay open, as shared slots go where they are needed by themselves.

*Trying out.* At one concurrency alone a slow stage cannot be told from one that hinders itself. So while the training
loop waits and the stages that fill the slots were seen at one level only, one decision runs on half the slots: that
halves every stage at once. A stage at its limit of which more has become uncertain, since it changed, gets twice
as much for one decision. A trial costs part of a window; further ones come ever less often until a stage changes.

*Steadiness.* What is in force stays while it is predicted to be within 3 % of the best and to hold little more than
is needed.

Not modelled: that the training loop computes on the same CPUs; that memory bandwidth is shared between stages;
windows of order and batches that are cut from many items; items in flight, whose bytes are bounded elsewhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.tuners._fit import StageFit
from intune.tuners._plan import Best, Limits, Line, best, enough, predict
from intune.tuners._rows import as_before, cpu_per_row, in_force, most_useful, trainer_per_row, wall_per_row

LOCK_FREE_SECONDS, LOCK_HELD_SECONDS = 3e-4, 2e-3
"""What a thread waits for the lock where nothing holds it for long, and from where on something does."""

HOLDS_LOCK = 0.2
"""Share of a stage's CPU time in which it holds the lock, from which it is given no more threads than it can use."""

CONTENDS = 0.1
"""Share of its time lost to the lock from which a stage counts as one that wants it."""

NEWEST = 0.3
"""Weight of the newest window in running means."""

FEW_SLOTS = 2 / 3
"""A stage that needs a larger share of what it has when open gets no limit for the training loop's sake."""

PLANNED_SHARE, ITEMS_SHARE = 0.9, 1 / 8
"""Shares of the memory limit: what is planned with, and what of it is left for items in flight."""

AT_LIMIT = 0.85
"""Share of its concurrency that a stage is busy on from which it would take more."""

LEAST_LEVEL = 1.5
"""Items at once of which half can tell anything."""

FULL = 0.75
"""Share of the slots that must be in use for half of them to lower any stage."""

STARVED = 0.05
"""Share of waiting of the training loop from which more is wanted at all."""

TRY_LESS = 4
"""By how much longer the pause between trials gets with each of them."""

WAITING_SPAN = 16
"""Items at once that a stage that waits is first thought of."""

MOST_BUSY = 1024.0
"""More items at once than any stage has: what a window too short to be true says is cut to it."""

UNSURE = 0.25
"""Deviation of a stage's seconds at another level, as a share, from which trying that out is worth its cost."""


@dataclass(slots=True)
class Belief:
    """What is known of a stage.

    Attributes:
        info: What it is.
        fit: Its curve.
        cpu_seconds: CPU seconds a source row, a running mean.
        lock_share: Share of these in which it holds the interpreter lock; None = not measured yet.
        busy: Items at once in the last window that taught something.
        saturated: The largest concurrency at which it was seen fully used; None = never.
        process_bytes: What one of its processes holds.
    """

    info: StageInfo
    fit: StageFit
    cpu_seconds: float | None = None
    lock_share: float | None = None
    busy: float = 0.0
    saturated: int | None = None
    process_bytes: int = 0


class Model:
    """Fits how stages depend on concurrency and proposes what is best by it.

    Args:
        forgetting: Weight of a window once the next one has said something about the same, above 0, at most 1.
        margin: Concurrency beyond the need for variability, as a share of the need.
        keep: Share of the best predicted rate from which on what is in force stays.
        try_every: Decisions at least between two trials; four times as many after each further one, until a stage
            is found to have changed. 0 = no trials.
        least_items: Completions below which a stage's window teaches nothing.
        noise: Deviation of a window's seconds as a share, however many items it has.
    """

    def __init__(
        self,
        *,
        forgetting: float = 0.97,
        margin: float = 0.25,
        keep: float = 0.97,
        try_every: int = 10,
        least_items: int = 4,
        noise: float = 0.05,
    ) -> None:
        if not 0 < forgetting <= 1 or not 0 < keep <= 1:
            raise PipelineError(f"forgetting {forgetting} and keep {keep} must be above 0 and at most 1")
        if margin < 0 or noise <= 0 or try_every < 0:
            raise PipelineError(
                f"margin {margin} and try_every {try_every} must not be below 0, noise {noise} above it"
            )
        self._forgetting, self._noise = forgetting, noise
        self._margin, self._keep, self._least_items = margin, keep, least_items
        self._try_every = self._pause = try_every
        self._since_trial: int | None = None  # None = none yet
        self._beliefs: dict[str, Belief] = {}
        self._trainer_seconds: float | None = None
        self._last: Snapshot | None = None

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What is in force if that is good enough, a trial where one is due, or the target."""
        self.update(snapshot)
        if not snapshot.warm:
            return as_before(snapshot, budget, "too little was measured in this window")
        lines = self._lines(budget)
        if not lines:
            return as_before(snapshot, budget, "no stage has figures yet")
        if levels := self._to_try(snapshot, budget):
            return self._trial(snapshot, budget, levels)
        found, target = self._solve(budget)
        now = Allocation(in_force(snapshot), budget.cpus)
        predicted = self.predict(now, budget)
        if (
            predicted is not None
            and predicted >= self._keep * found.rate
            and not self._holds_too_much(now, target, budget)
        ):
            share = predicted / found.rate if found.rate else 1.0
            return as_before(snapshot, budget, f"predicted at {share:.0%} of the best, {_said(found)}")
        return target

    def update(self, snapshot: Snapshot) -> None:
        """Learn from a window; done by `propose`, for those who only want what is learnt."""
        self._last = snapshot
        if not snapshot.warm or snapshot.window_seconds <= 0:
            return
        own = trainer_per_row(snapshot)
        if own is not None:
            self._trainer_seconds = _mean(self._trainer_seconds, own)
        contention = _lock_contention(snapshot)
        lost = {stage.name: _lost_share(stage) * contention for stage in snapshot.stages}
        for stage in snapshot.stages:
            self._learn(stage, snapshot, lost[stage.name])
        self._learn_lock(snapshot, lost)

    def predict(self, allocation: Allocation, budget: Budget) -> float | None:
        """Source rows a second under an allocation; None while no stage has figures."""
        lines = self._lines(budget)
        if not lines:
            return None
        slots = min(allocation.slots, budget.cpus)
        given = {line.name: self._at_most(line.name, allocation.concurrency.get(line.name), budget) for line in lines}
        return predict(lines, given, self._limits(budget, slots))

    def target(self, budget: Budget) -> Allocation:
        """The allocation with the best predicted rate and the least concurrency, whatever is in force.

        Raises:
            PipelineError: If no window was seen yet.
        """
        if self._last is None:
            raise PipelineError("no window was seen yet: call update(snapshot) first")
        if not self._beliefs:
            return as_before(self._last, budget, "no stage has figures yet")
        return self._solve(budget)[1]

    @property
    def deviation(self) -> Mapping[str, float]:
        """By stage, how uncertain its seconds a row are at half its present level, as a share of them."""
        return {name: belief.fit.deviation(belief.busy / 2) for name, belief in self._beliefs.items()}

    @property
    def beliefs(self) -> Mapping[str, Belief]:
        """By stage, what is known of it; to be read only."""
        return self._beliefs

    def _learn(self, stage: StageSnapshot, snapshot: Snapshot, lost_share: float) -> None:
        seconds, cpu = wall_per_row(stage), cpu_per_row(stage)
        if seconds is None or stage.items_out < self._least_items or stage.processes_starting:
            return
        belief = self._beliefs.get(stage.name)
        if belief is None:
            span = WAITING_SPAN if stage.info.waits else max(snapshot.machine.cpus, snapshot.allocation.slots)
            fit = StageFit(span, forgetting=self._forgetting, noise=self._noise)
            belief = self._beliefs[stage.name] = Belief(stage.info, fit)
        belief.info = stage.info
        belief.busy = min(stage.busy_seconds / snapshot.window_seconds, MOST_BUSY)
        belief.saturated = stage.saturated_concurrency
        belief.process_bytes = stage.process_resident_bytes or belief.process_bytes
        if cpu is not None:
            belief.cpu_seconds = _mean(belief.cpu_seconds, min(cpu, seconds))
        if belief.fit.observe(belief.busy, seconds * (1 - lost_share), stage.items_out):
            self._pause = self._try_every  # it changed: trying out may pay again

    def _learn_lock(self, snapshot: Snapshot, lost: Mapping[str, float]) -> None:
        """How much of their CPU time stages on threads hold the interpreter lock.

        Of n threads that all need it all the time each loses 1 - 1 / n of its time. As one thread holds it at a
        time, all together hold it for no longer than the window.
        """
        threads = [s for s in snapshot.stages if s.name in self._beliefs and _computes_on_threads(s.info)]
        contending = [stage for stage in threads if lost[stage.name] >= CONTENDS]
        at_once = sum(stage.busy_seconds for stage in contending) / snapshot.window_seconds
        if snapshot.machine.lock_wait_seconds is None or at_once < 1.5:
            return
        shares = {stage.name: min(1.0, lost[stage.name] / (1 - 1 / at_once)) for stage in threads}
        held = sum(shares[stage.name] * _cpu_share(stage) * stage.busy_seconds for stage in threads)
        too_much = max(1.0, held / snapshot.window_seconds)
        for name, share in shares.items():
            self._beliefs[name].lock_share = _mean(self._beliefs[name].lock_share, share / too_much)

    def _lines(self, budget: Budget) -> list[Line]:
        waiting = sum(belief.info.waits is True for belief in self._beliefs.values())
        lines = []
        for name, belief in self._beliefs.items():
            most = most_useful(belief.info, budget)
            process, cpu = belief.info.executor == "process", belief.cpu_seconds or 0.0
            if belief.info.waits:
                most = max(1, min(most, budget.max_threads - budget.cpus - waiting + 1))
            if process:
                most = max(1, min(most, budget.max_processes))
            base, slope, bend = belief.fit.curve
            lock = cpu * (belief.lock_share or 0.0) if _computes_on_threads(belief.info) else 0.0
            holds = belief.info.waits is not True
            lines.append(Line(name, base, slope, bend, most, holds, process, belief.process_bytes, lock, cpu))
        return lines

    def _limits(self, budget: Budget, slots: int) -> Limits:
        trainer = 1 / self._trainer_seconds if self._trainer_seconds else math.inf
        return Limits(slots, trainer, budget.max_processes, self._process_room(budget))

    def _process_room(self, budget: Budget) -> float:
        """Bytes that worker processes may hold together."""
        last = self._last
        if last is None or budget.memory_bytes is None or last.machine.memory_bytes is None:
            return math.inf
        limit = min(budget.memory_bytes, last.machine.memory_limit_bytes or budget.memory_bytes)
        rest = last.rest_bytes
        if rest is None:
            rest = last.machine.memory_bytes - (last.in_flight_bytes or 0)
        held = sum((stage.processes_live or 0) * (stage.process_resident_bytes or 0) for stage in last.stages)
        return max(0.0, limit * (PLANNED_SHARE - ITEMS_SHARE) - max(0, rest - held))

    def _open(self, name: str, budget: Budget) -> int:
        """What an open concurrency stands for."""
        info = self._beliefs[name].info
        largest = budget.cpus
        if info.waits:
            waiting = sum(belief.info.waits is True for belief in self._beliefs.values())
            largest = max(1, (budget.max_threads - budget.cpus) // waiting)
        return min(largest, info.max_concurrency or largest)

    def _at_most(self, name: str, concurrency: int | None, budget: Budget) -> int:
        largest = self._open(name, budget) if concurrency is None else concurrency
        return max(1, min(largest, most_useful(self._beliefs[name].info, budget)))

    def _solve(self, budget: Budget) -> tuple[Best, Allocation]:
        """The best rate, and the least concurrency that reaches it."""
        assert self._last is not None
        lines, limits = self._lines(budget), self._limits(budget, budget.cpus)
        found = best(lines, limits)
        concurrency = in_force(self._last)
        reasons = dict.fromkeys(concurrency, "as before: not measured yet")
        for line in lines:
            concurrency[line.name], reasons[line.name] = self._limit(line, found, limits, budget)
        return found, Allocation(concurrency, budget.cpus, reasons=reasons)

    def _limit(self, line: Line, found: Best, limits: Limits, budget: Budget) -> tuple[int | None, str]:
        """The concurrency of a stage, and why."""
        need, when_open = line.need(found.rate), self._open(line.name, budget)
        # Processes beyond the need only where they do not count.
        margin = 0.0 if line.process and found.bound == "processes" else self._margin
        wanted = enough(line, found.rate, margin)
        busy = f"busy on {need:.2f} at {_said(found)}"
        if line.process:
            return wanted, f"{busy}; each process more costs memory"
        if (slowest := line.rate(when_open)) < self._keep * min(found.rate, line.rate(line.best_within(when_open))):
            peak = line.best_within(line.most)
            said = f"{line.rate(peak):.3g} source rows/s at {peak}, {slowest:.3g} at {when_open}"
            return wanted, f"slows down with concurrency: {said}"
        if line.lock_seconds > HOLDS_LOCK * line.cpu_seconds and found.bound in ("lock", "trainer"):
            return wanted, f"holds the interpreter lock, more threads would wait for it; {busy}"
        if wanted > when_open:
            return wanted, f"{busy}, more than its share of the threads"
        spare = math.ceil(need * (1 + self._margin)) + 1
        if found.bound == "trainer" and spare <= FEW_SLOTS * when_open:
            return spare, f"the training loop takes no more: {busy}"
        return None, f"open: {busy}, a limit would not help"

    def _holds_too_much(self, now: Allocation, target: Allocation, budget: Budget) -> bool:
        """Whether a stage with a limit has more than half as much again (and more than one more)."""
        for name, wanted in target.concurrency.items():
            if wanted is not None and name in self._beliefs:
                given = self._at_most(name, now.concurrency[name], budget)
                if given > wanted + max(1, wanted // 2):
                    return True
        return False

    def _to_try(self, snapshot: Snapshot, budget: Budget) -> dict[str, int]:
        """The stages for which a trial is due, and the level that each would come to."""
        if self._since_trial is not None:
            self._since_trial += 1
        due = self._since_trial is None or self._since_trial > self._pause
        if not self._try_every or not due or snapshot.consumer.wait_share <= STARVED or budget.cpus < 2:
            return {}
        computing = [belief for belief in self._beliefs.values() if not belief.info.waits]
        full = sum(belief.busy for belief in computing) >= FULL * snapshot.allocation.slots
        now, found = in_force(snapshot), {}
        for name, belief in self._beliefs.items():
            limit, most = now.get(name), most_useful(belief.info, budget)
            if limit is not None and limit < most and belief.busy >= AT_LIMIT * limit:
                level = min(most, 2 * limit)
            elif belief.busy >= LEAST_LEVEL and ((full and not belief.info.waits) or (belief.info.waits and not limit)):
                level = max(1, round(belief.busy / 2))
            else:
                continue
            if belief.fit.deviation(level) > UNSURE:
                found[name] = level
        return found

    def _trial(self, snapshot: Snapshot, budget: Budget, levels: Mapping[str, int]) -> Allocation:
        """One decision on twice the concurrency for stages at their limit, and on half the slots for others."""
        if self._since_trial is not None:
            self._pause *= TRY_LESS
        self._since_trial = 0
        before = as_before(snapshot, budget, "others are tried out")
        concurrency, reasons, slots = dict(before.concurrency), dict(before.reasons), budget.cpus
        for name, level in levels.items():
            belief = self._beliefs[name]
            reasons[name] = f"a trial at {level} instead of {belief.busy:.1f}: does it slow down with concurrency?"
            if belief.info.waits or level > belief.busy:
                concurrency[name] = level
            else:
                slots = max(1, budget.cpus // 2)
        for name, belief in self._beliefs.items():
            if belief.info.executor == "process" and concurrency[name] is None:
                # Fewer slots must not end processes that will be wanted again at once.
                concurrency[name] = self._open(name, budget)
        return replace(before, concurrency=concurrency, slots=slots, reasons=reasons)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST * (new - old)


def _said(found: Best) -> str:
    words = {
        "trainer": "what the training loop takes",
        "lock": "what the interpreter lock allows",
        "slots": "what the CPUs allow",
        "processes": "what the processes allow",
    }
    return f"{found.rate:.3g} source rows/s, {words.get(found.bound, f'what {found.bound} can do')}"


def _computes_on_threads(info: StageInfo) -> bool:
    return info.executor == "thread" and not info.waits


def _cpu_share(stage: StageSnapshot) -> float:
    """CPU seconds in a second of its work."""
    if stage.cpu_seconds_mean is None or not stage.wall_seconds_mean:
        return 1.0
    return min(1.0, stage.cpu_seconds_mean / stage.wall_seconds_mean)


def _lost_share(stage: StageSnapshot) -> float:
    """Share of its work in which its threads neither ran nor waited for a CPU."""
    if not _computes_on_threads(stage.info) or stage.busy_seconds <= 0:
        return 0.0
    return max(0.0, 1 - _cpu_share(stage) - (stage.run_queue_seconds or 0.0) / stage.busy_seconds)


def _lock_contention(snapshot: Snapshot) -> float:
    """From 0, the lock is free, to 1: threads that compute in Python hold it all the time."""
    wait = snapshot.machine.lock_wait_seconds
    if wait is None:
        return 0.0
    return min(1.0, max(0.0, (wait - LOCK_FREE_SECONDS) / (LOCK_HELD_SECONDS - LOCK_FREE_SECONDS)))
