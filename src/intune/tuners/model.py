"""A model of the pipeline, learnt by watching it run, and the allocation that is best by it.

*Watching* (`_beliefs`, `_fit`): how many items a stage works on at once goes up and down all the time, whatever the
limits are, and each window says how long items took beside how many others. So which stages slow down by their own
concurrency, and by how much, is a regression on windows of a pipeline that nobody touched. From it and from CPU seconds
and how much of them holds the interpreter lock follows what each stage could do at any level. What threads lose to the
lock (neither running nor waiting for a CPU while the probe finds the lock held) is taken out of it, as it isn't the
stage's own: the lock is a limit of its own, shared by all.

*Only what is beyond chance* counts: a stage slows down, for this tuner, if it surely takes a quarter longer with some
of the numbers that it may come to than with those that it needs. All others are taken to be flat. So noise moves
nothing.

*What follows* (`_plan`): the rate of any allocation, and the best rate with the least concurrency that reaches it. A
limit is given to a stage only where it helps: the stage slows down, holds the lock (more threads would only wait for
it), runs in processes (which cost memory), or waits and needs more than its share of the threads. All others stay
open, as shared slots go where they are needed by themselves. A training loop that takes less than the CPUs could give
gets fewer slots, and more again if it ever waits for it.

*Trying out* (`_trials`) comes second: watching says nothing of levels that were never allowed, so each stage begins
with few at once and gets more as it finishes items; one that was found to have changed does so again. And the stage
that holds up all others gets a little more or less for one decision while that might well be faster, ever more seldom.

*Steadiness.* What is in force stays while it is predicted to be within 3 % of the best, holds little more than is
needed and has no limit without a reason; a limit stays while its stage slows down at all.

Not modelled: that memory bandwidth is shared between stages; windows of order and batches that are cut from many
items; items in flight, whose bytes are bounded elsewhere. A training loop that computes on the same CPUs takes its
share of them by itself: fewer slots for the loader only made it slower in all that was simulated.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, memory_uses
from intune.tuners._beliefs import NEWEST, STARVED, Belief, Beliefs, computes_on_threads
from intune.tuners._plan import Best, Limits, Line, best, enough, predict
from intune.tuners._proposals import all_open, at_most, in_words, too_much, tried_at
from intune.tuners._remembered import Remembered, same_stages, stage_keys
from intune.tuners._rows import in_force, most_useful, rows_of_source_row
from intune.tuners._trials import Probe, Ramp, Trials

HOLDS_LOCK = 0.2
"""Share of a stage's CPU time in which it holds the lock, from which it is given no more threads than it can use."""

CROWDED = 0.5
"""Share of the time in which the lock is held from which those who hold it get no more threads than they need."""

SLOWS, STILL_SLOWS = 1.25, 1.1
"""How many times as long an item takes when a stage takes all that it may, from which it gets and keeps a limit."""

SURE = 2.5
"""Deviations by which a slow-down must be above chance for a stage to get a limit."""

HELD_BACK, FULL, ALL_BUSY = 0.3, 0.8, 0.95
"""Share of a window in which only memory kept items back, from which it is taken to set the rate, unless processes are
busy for more than the second; and from where on one more of them might be of use."""

MOST_HELD_UP = 0.9
"""Share of the time in which a stage is held up that is counted at most."""

ONE_MORE_LASTS, RECHECK_LASTS = 6, 3
"""Decisions for which one process more is tried; and for which it is tried whether a stage still slows down."""

RECHECK_EVERY, RECHECK_REMEMBERED = 128, 8
"""Decisions after which the latter is done for the first time, of what this run and of what an earlier one found."""

GRANTED_WINDOWS = 8
"""Of so many windows the largest share of the room that might be in flight counts: it rises for some seconds."""

PLANNED_SHARE, ITEMS_SHARE = 0.9, 1 / 8
"""Shares of the memory limit: what is planned with, and what of it is left for items in flight."""


class Model:
    """Fits how stages depend on concurrency and proposes what is best by it.

    Args:
        forgetting: Weight of a window once the next one has said something about the same, above 0, at most 1.
        margin: Concurrency beyond the need for variability, as a share of the need.
        keep: Share of the best predicted rate from which on what is in force stays.
        try_every: Decisions at least between two trials; four times as many after each further one, until a stage
            is found to have changed. 0 = no trials, and stages do not begin with few at once either.
        least_items: Completions below which a stage's window teaches nothing.
        noise: Deviation of a window's seconds as a share, however many items it has.
    """

    def __init__(
        self,
        *,
        forgetting: float = 0.97,
        margin: float = 0.25,
        keep: float = 0.97,
        try_every: int = 4,
        least_items: int = 1,
        noise: float = 0.05,
    ) -> None:
        if not 0 < forgetting <= 1 or not 0 < keep <= 1:
            raise PipelineError(f"forgetting {forgetting} and keep {keep} must be above 0 and at most 1")
        if margin < 0 or noise <= 0 or try_every < 0:
            raise PipelineError(
                f"margin {margin} and try_every {try_every} must not be below 0, noise {noise} above it"
            )
        self._margin, self._keep, self._try_every = margin, keep, try_every
        self._new_beliefs = partial(Beliefs, forgetting, noise, least_items)
        self._remembered: Remembered | None = None  # until it is compared with the first snapshot
        self._begin()

    def _begin(self) -> None:
        """Know nothing."""
        try_every = self._try_every
        self._learnt = self._new_beliefs()
        self._trials = Trials(try_every, 1 / self._keep)
        self._one_more = Probe(try_every, ONE_MORE_LASTS)
        self._recheck = Probe(RECHECK_EVERY if try_every else 0, RECHECK_LASTS)
        self._rechecked: str | None = None  # the stage that the last one was about
        self._ramp = Ramp() if try_every else None
        self._slowing: set[str] = set()  # stages that were last found to slow down
        self._least_slots = 1  # that a training loop which takes no more was not seen to wait with
        self._last: Snapshot | None = None
        self._bytes_per_rate: float | None = None  # what items in flight held for each source row a second
        self._granted = deque([1.0] * GRANTED_WINDOWS, GRANTED_WINDOWS)
        self._known: tuple[Budget, list[Line]] | None = None  # of the last window: lines cost most of a decision

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The target, or what is in force if that is good enough, but for stages that are still being found out."""
        proposal = self._decide(snapshot, budget)
        return replace(proposal, expected_rows_per_second=self._expected(proposal, snapshot, budget))

    def state_dict(self) -> dict[str, Any]:
        """What was learnt of the stages, for `load_state_dict` of the next run of the same pipeline: small, JSON."""
        known = self._remembered or Remembered.of(self._last, self._learnt, self._slowing)
        return known.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learnt; stages that it knew do not begin with few at once.

        Where the stages turn out to be others, in number, name, kind, executor or order, a warning says so and it
        counts for nothing. Costs and CPUs may be others: it is taken as a guess only.

        Args:
            state: What `state_dict` gave. Nothing in it is ever executed.

        Raises:
            PipelineError: If it is something else.
        """
        self._remembered = Remembered.read(state, self._new_beliefs())

    def _recall(self, remembered: Remembered, snapshot: Snapshot) -> None:
        """Begin with what an earlier run knew, if it is of these stages."""
        self._begin()
        if remembered.fits(snapshot):
            self._learnt, self._slowing = remembered.beliefs, set(remembered.slowing)
            self._recheck = Probe(RECHECK_REMEMBERED if self._try_every else 0, RECHECK_LASTS)
            # Many fetches begun at once would share a network so that the first one is done when the last one is.
            known = frozenset(name for name, belief in self.beliefs.items() if not belief.info.waits)
            self._ramp = Ramp(known) if self._ramp else None
        self._remembered = None

    def _decide(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        if self._remembered is not None:
            self._recall(self._remembered, snapshot)
        elif self._last is not None and not same_stages(stage_keys(self._last), snapshot):
            self._begin()
        changed = self.update(snapshot)
        ramped = self._ramp.levels(snapshot, budget, self.beliefs, changed) if self._ramp else {}
        if not ramped:
            self._learn_bytes(snapshot, budget, bool(changed))
        lines = self._lines(budget)
        self._known = budget, lines
        if not lines:
            return at_most(all_open(snapshot, budget), ramped, budget)
        self._slowing = {line.name for line in lines if line.slows}
        found, within = self._bests(lines, budget)
        self._learn_slots(found, snapshot, budget)
        target = self._solve(lines, found, within, snapshot, budget)
        if ramped:
            return at_most(target, ramped, budget)
        if tried := self._trial(lines, found, target, snapshot, budget, bool(changed)):
            return tried
        if tried := self._checked_again(lines, found, target, snapshot, bool(changed)):
            return tried
        if within.bound == "memory" and (tried := self._with_one_more(lines, target, snapshot, bool(changed))):
            return tried
        now = Allocation(in_force(snapshot), min(snapshot.allocation.slots, budget.cpus))
        reached = self._rate(lines, now, budget) / within.rate if within.rate > 0 else 1.0
        if reached >= self._keep and not self._differs(now, target, snapshot, budget):
            stays = f"as before: predicted at {reached:.0%} of the best"
            return replace(now, reasons={name: f"{stays}; {why}" for name, why in target.reasons.items()})
        return target

    def update(self, snapshot: Snapshot) -> frozenset[str]:
        """Learn from a window; done by `propose`, for those who only want what is learnt.

        Returns:
            The stages that were found to have changed.
        """
        self._last, self._known = snapshot, None
        return self._learnt.learn(snapshot)

    def predict(self, allocation: Allocation, budget: Budget) -> float | None:
        """Source rows a second under an allocation; None while no stage has figures."""
        lines = self._known[1] if self._known and self._known[0] == budget else self._lines(budget)
        return self._rate(lines, allocation, budget) if lines else None

    def _rate(self, lines: list[Line], allocation: Allocation, budget: Budget) -> float:
        slots = min(allocation.slots, budget.cpus)
        given = {line.name: self._at_most(line.name, allocation.concurrency.get(line.name), budget) for line in lines}
        return predict(lines, given, self._in_memory(budget, slots))

    def _expected(self, proposal: Allocation, snapshot: Snapshot, budget: Budget) -> float | None:
        """Rows a second that the training loop will take; None while a stage has no figures."""
        rows, rate = rows_of_source_row(snapshot), self.predict(proposal, budget)
        if rows is None or rate is None or len(self.beliefs) < len(snapshot.stages) or not math.isfinite(rate * rows):
            return None
        return rate * rows

    def target(self, budget: Budget) -> Allocation:
        """The allocation with the best predicted rate and the least concurrency, whatever is in force.

        Raises:
            PipelineError: If no window was seen yet.
        """
        if self._last is None:
            raise PipelineError("no window was seen yet: call update(snapshot) first")
        if not (lines := self._lines(budget)):
            return all_open(self._last, budget)
        return self._solve(lines, *self._bests(lines, budget), self._last, budget)

    @property
    def deviation(self) -> Mapping[str, float]:
        """By stage, how uncertain its seconds a row are at half its present level, as a share of them."""
        return {name: belief.fit.deviation(belief.busy / 2) for name, belief in self.beliefs.items()}

    @property
    def beliefs(self) -> Mapping[str, Belief]:
        """By stage, what is known of it; to be read only."""
        return self._learnt.stages

    def _lines(self, budget: Budget) -> list[Line]:
        """The stages as far as rates go: those that slow down beyond doubt by their curve, the others without one."""
        curves = self._curves(budget)
        if not curves:
            return []
        rate = best(curves, self._limits(budget, budget.cpus)).rate
        return [line if self._slows(line, rate, budget) else self._flat(line) for line in curves]

    def _slows(self, line: Line, rate: float, budget: Budget) -> bool:
        """Whether it surely takes longer with all that it may take than with those that are needed."""
        few, when_open = min(line.need(rate), line.best_within(line.most)), self._open(line.name, budget)
        by, sure = (STILL_SLOWS - 1, 0.0) if line.name in self._slowing else (SLOWS - 1, SURE)
        return few < when_open and self.beliefs[line.name].fit.slows(few, when_open, by, sure)

    def _flat(self, line: Line) -> Line:
        return replace(line, base=line.seconds(self.beliefs[line.name].busy), slope=0.0, bend=0.0)

    def _curves(self, budget: Budget) -> list[Line]:
        waiting = sum(belief.info.waits is True for belief in self.beliefs.values())
        lines = []
        for name, belief in self.beliefs.items():
            most = most_useful(belief.info, budget)
            process, cpu = belief.info.executor == "process", belief.cpu_seconds or 0.0
            if belief.info.waits:
                most = max(1, min(most, budget.max_threads - budget.cpus - waiting + 1))
            if process:
                most = max(1, min(most, budget.max_processes))
            base, slope, bend = belief.fit.curve
            lock = cpu * (belief.lock_share or 0.0) if computes_on_threads(belief.info) else 0.0
            holds = belief.info.waits is not True
            lines.append(Line(name, base, slope, bend, most, holds, process, belief.process_bytes, lock, cpu))
        return lines

    def _limits(self, budget: Budget, slots: int) -> Limits:
        trainer = 1 / self._learnt.trainer_seconds if self._learnt.trainer_seconds else math.inf
        for_processes, for_all = self._room(budget)
        return Limits(slots, trainer, budget.max_processes, for_processes, for_all)

    def _bests(self, lines: list[Line], budget: Budget) -> tuple[Best, Best]:
        """The best, and the best within memory, which is the same where memory is plentiful."""
        found = best(lines, self._limits(budget, budget.cpus))
        return found, best(lines, self._in_memory(budget, budget.cpus)) if self._bytes_per_rate else found

    def _in_memory(self, budget: Budget, slots: int) -> Limits:
        """The same with the memory of items, where processes may crowd them out.

        Only processes are counted by it. A limit on threads that followed from how fast it goes beside short memory
        would keep it slow for ever.
        """
        per_rate = (self._bytes_per_rate or 0.0) / max(self._granted)
        return replace(self._limits(budget, slots), bytes_per_rate=per_rate)

    def _learn_bytes(self, snapshot: Snapshot, budget: Budget, changed: bool) -> None:
        """How fast it goes with so many bytes in flight: beside short memory the rate is in proportion to them.

        And what share of the room that processes leave may be in flight, less than all where functions take memory too.

        Where all processes of a stage are busy these may be what sets the rate: it takes no more bytes than that.
        """
        if changed or any(event.kind == "budget" for event in snapshot.events):
            self._bytes_per_rate = None
        processes = [stage for stage in snapshot.stages if stage.info.executor == "process" and stage.processes_live]
        limit, batch = snapshot.in_flight_bytes_limit, snapshot.stages[-1].source_rows_per_item
        steps = snapshot.consumer.steps
        if not processes or not limit or not batch or not steps or snapshot.window_seconds <= 0:
            return
        held = sum((stage.processes_live or 0) * (stage.process_resident_bytes or 0) for stage in processes)
        if math.isfinite(room := self._room(budget)[1] - held):
            self._granted.append(limit / max(limit, room))
        here, known = limit * snapshot.window_seconds / (steps * batch), self._bytes_per_rate
        full = any(stage.in_hand_mean > FULL * (stage.processes_live or 1) for stage in processes)
        if snapshot.held_back_share > HELD_BACK and not full:
            self._bytes_per_rate = here if known is None else known + NEWEST * (here - known)
        elif known is not None:
            self._bytes_per_rate = min(known, here)

    def _room(self, budget: Budget) -> tuple[float, float]:
        """Bytes that worker processes may hold together, and they and items in flight."""
        last = self._last
        if last is None:
            return math.inf, math.inf
        held = sum((stage.processes_live or 0) * (stage.process_resident_bytes or 0) for stage in last.stages)
        rooms = [(math.inf, math.inf)]
        for use in memory_uses(last, budget):
            if use.rest_bytes is None or not use.with_processes:
                continue
            room = use.limit_bytes * PLANNED_SHARE - max(0, use.rest_bytes - held)
            rooms.append((max(0.0, room - use.limit_bytes * ITEMS_SHARE), max(0.0, room)))
        return min(rooms)

    def _open(self, name: str, budget: Budget) -> int:
        """What an open concurrency stands for."""
        info = self.beliefs[name].info
        largest = budget.cpus
        if info.waits:
            waiting = sum(belief.info.waits is True for belief in self.beliefs.values())
            largest = max(1, (budget.max_threads - budget.cpus) // waiting)
        return min(largest, info.max_concurrency or largest)

    def _at_most(self, name: str, concurrency: int | None, budget: Budget) -> int:
        largest = self._open(name, budget) if concurrency is None else concurrency
        return max(1, min(largest, most_useful(self.beliefs[name].info, budget)))

    def _solve(self, lines: list[Line], found: Best, within: Best, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The least concurrency and slots that reach the best rate, and the processes for the best within memory."""
        unknown = all_open(snapshot, budget)
        concurrency, reasons = dict(unknown.concurrency), dict(unknown.reasons)
        lock_seconds = sum(line.lock_seconds for line in lines)
        spare = self._spare_processes(lines, within, budget)
        for line in lines:
            rate, margin = (within, spare) if line.process else (found, self._margin)
            concurrency[line.name], reasons[line.name] = self._limit(line, rate, lock_seconds, margin, budget)
        return Allocation(concurrency, self._slots(lines, found, budget), reasons=reasons)

    def _spare_processes(self, lines: list[Line], found: Best, budget: Budget) -> float:
        """The margin of process stages, as far as all of them still fit: what is cut instead is cut where it is needed.

        None to spare where there are too few; more where items that pile up would hold up a waiting trainer.
        """
        most = {"processes": 0.0, "memory": 0.0, "trainer": self._margin}.get(found.bound, 2 * self._margin)
        limits, stages = self._in_memory(budget, budget.cpus), [line for line in lines if line.process]
        for margin in (most, most / 2):
            wanted = [enough(line, found.rate, margin) for line in stages]
            held = sum(number * line.process_bytes for number, line in zip(wanted, stages, strict=True))
            room_for_items = found.rate <= limits.rate_in_memory(held)
            if sum(wanted) <= limits.processes and held <= limits.process_bytes and room_for_items:
                return margin
        return 0.0

    def _limit(
        self, line: Line, found: Best, lock_seconds: float, margin: float, budget: Budget
    ) -> tuple[int | None, str]:
        """The concurrency of a stage, and why."""
        need, when_open = line.need(found.rate), self._open(line.name, budget)
        wanted = enough(line, found.rate, margin)
        busy = f"busy on {need:.2f} at {in_words(found)}"
        if line.process:
            return wanted, f"{busy}; each process more costs memory"
        if line.slows:
            if found.bound == "slots" and line.holds_slot and need < 1:
                wanted = 1  # a second one would slow down the first and take a slot from all others
            bursts, held_up = self._in_bursts(line, wanted, need), self.beliefs[line.name].held_up
            if bursts > wanted:
                return bursts, f"{busy} on average, in bursts: those behind it hold it up {held_up:.0%} of the time"
            # Even where its rate still rises, all that come at once would hold up each other.
            said = f"{line.seconds(need) * 1e3:.3g} ms a source row at the {need:.2f} that it needs"
            all_at_once = line.seconds(when_open) * 1e3
            return wanted, f"slows down with concurrency: {said}, by its curve {all_at_once:.3g} at {when_open}"
        if line.lock_seconds > HOLDS_LOCK * line.cpu_seconds and found.rate * lock_seconds > CROWDED:
            # Where slots are scarce a thread that waits for the lock takes one from those who could use it.
            wanted = enough(line, found.rate, 0.0) if found.bound == "slots" else wanted
            return wanted, f"holds the interpreter lock, more threads would wait for it; {busy}"
        if wanted > when_open:
            return wanted, f"{busy}, more than its share of the threads"
        return None, f"open: {busy}, a limit would not help"

    def _in_bursts(self, line: Line, wanted: int, need: float) -> int:
        """What a stage needs that can work only part of the time, if it isn't surely slower with so many at once."""
        belief = self.beliefs[line.name]
        level = min(line.most, math.ceil(need / (1 - min(MOST_HELD_UP, belief.held_up))))
        if level <= wanted + 1 or belief.fit.slows(wanted, level, level / wanted - 1, SURE):
            return wanted
        return level

    def _learn_slots(self, found: Best, snapshot: Snapshot, budget: Budget) -> None:
        """A training loop that had to wait though it was thought to take no more needs twice the slots."""
        slots = snapshot.allocation.slots
        if found.bound != "trainer":
            self._least_slots = 1
        elif slots < budget.cpus and snapshot.consumer.wait_share > STARVED:
            self._least_slots = 2 * slots

    def _slots(self, lines: list[Line], found: Best, budget: Budget) -> int:
        """The CPU slots that are wanted: all, or what a slow training loop needs and some to spare."""
        if found.bound != "trainer":
            return budget.cpus
        needed = sum(line.need(found.rate) for line in lines if line.holds_slot)
        return min(budget.cpus, max(self._least_slots, math.ceil(needed * (1 + 2 * self._margin)) + 1))

    def _trial(
        self, lines: list[Line], found: Best, target: Allocation, snapshot: Snapshot, budget: Budget, changed: bool
    ) -> Allocation | None:
        """The target but for the stage that holds up all others, if something else is worth trying for it."""
        line = next((line for line in lines if line.name == found.bound), None)
        if line is None:
            return None
        belief = self.beliefs[line.name]
        now = self._at_most(line.name, target.concurrency[line.name], budget)
        level = self._trials.level(belief, line, now, snapshot, changed)
        if level is None:
            return None
        return tried_at(target, line.name, level, f"instead of {now}: it might be faster")

    def _checked_again(
        self, lines: list[Line], found: Best, target: Allocation, snapshot: Snapshot, changed: bool
    ) -> Allocation | None:
        """The target with twice as many for a stage that holds up all others and is limited because it slowed down.

        With few at once it would not show if it no longer did.
        """
        asked = self._rechecked if self._recheck.going_on else found.bound
        line = next((line for line in lines if line.name == asked and line.slows and not line.process), None)
        now = None if line is None else target.concurrency[line.name]
        if line is None or now is None:
            return None
        starved = snapshot.consumer.wait_share > STARVED
        level = self._recheck.level(now, min(2 * now, line.most), starved, changed)
        if level is None:
            return None
        self._rechecked = line.name
        return tried_at(target, line.name, level, f"instead of {now}: it may no longer slow down")

    def _with_one_more(
        self, lines: list[Line], target: Allocation, snapshot: Snapshot, changed: bool
    ) -> Allocation | None:
        """The target with one process more for the stage that has most, if that is worth trying."""
        most = max((line for line in lines if line.process), key=lambda line: target.concurrency[line.name] or 0)
        stage = next(stage for stage in snapshot.stages if stage.name == most.name)
        busy = stage.in_hand_mean > ALL_BUSY * (stage.processes_live or 1) and snapshot.consumer.wait_share > STARVED
        now = target.concurrency[most.name]
        level = None if now is None or now >= most.most else self._one_more.level(now, now + 1, busy, changed)
        if level is None:
            return None
        why = f"instead of {now}: all are busy, and what memory allows is known from below only"
        return tried_at(target, most.name, level, why)

    def _differs(self, now: Allocation, target: Allocation, snapshot: Snapshot, budget: Budget) -> bool:
        """Whether what is in force holds much more than is wanted, or has limits where none are, or is too little."""
        if too_much(now.slots, target.slots):
            return True
        starved = snapshot.consumer.wait_share > STARVED
        if now.slots < target.slots and starved:
            return True
        for name, wanted in target.concurrency.items():
            given = now.concurrency[name]
            if wanted is None:
                if given is not None:
                    return True
                continue
            has = self._at_most(name, given, budget)
            if (given is None and has > wanted) or too_much(has, wanted) or (starved and too_much(wanted, has)):
                return True
        return False
