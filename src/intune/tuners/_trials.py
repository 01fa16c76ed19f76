"""When to try out another concurrency for one decision, and which.

At one level alone a slow stage cannot be told from one that hinders itself. A trial costs part of a window, so it is
made only while the training loop waits, for a stage that fills slots (or waits, without a limit) and whose seconds at
half its level are uncertain, or that works at its limit and of which more has become uncertain, since it changed.
"""

from collections.abc import Mapping
from dataclasses import replace

from intune._values import Allocation, Budget, Snapshot
from intune.tuners._beliefs import Belief
from intune.tuners._rows import as_before, in_force, most_useful

AT_LIMIT = 0.85
"""Share of its concurrency that a stage is busy on from which it would take more."""

MOST_AT_ONCE = 3
"""With fewer CPUs than this there is nothing to find out in the first windows."""

LEAST_LEVEL = 1.5
"""Items at once of which half can tell anything."""

FULL = 0.75
"""Share of the slots that must be in use for half of them to lower any stage."""

STARVED = 0.05
"""Share of waiting of the training loop from which more is wanted at all."""

TRY_LESS = 4
"""By how much longer the pause between trials gets with each of them."""

UNSURE = 0.25
"""Deviation of a stage's seconds at another level, as a share, from which trying that out is worth its cost."""


class Start:
    """The first windows: few at once, then more, so that it shows how stages scale before all may be at work.

    A stage that hinders itself would go deep into that at once otherwise, and hardly anything would be finished to
    learn from.
    """

    SHARES = (1 / 4, 1 / 2)
    """Shares of the CPUs, one window after another."""

    WAIT = 5
    """Windows in which nothing is finished before the next share comes all the same."""

    def __init__(self) -> None:
        self._step = self._waited = 0

    def next(self, snapshot: Snapshot, budget: Budget) -> Allocation | None:
        """What to begin with; None = the start is over."""
        if self._step and not snapshot.warm and self._waited < self.WAIT:
            self._waited += 1
        else:
            self._step, self._waited = self._step + 1, 0
        if self._step > len(self.SHARES) or budget.cpus < MOST_AT_ONCE:
            return None
        level = max(1, round(self.SHARES[self._step - 1] * budget.cpus))
        names = [stage.name for stage in snapshot.stages]
        reason = f"a start with {level} at once: it shows how the stages scale"
        return Allocation(dict.fromkeys(names, level), budget.cpus, reasons=dict.fromkeys(names, reason))


class Trials:
    """Remembers when the last one was.

    Args:
        every: Decisions at least between two; four times as many after each further one. 0 = none at all.
    """

    def __init__(self, every: int) -> None:
        self._every = self._pause = every
        self._since: int | None = None  # None = none yet

    def levels(
        self, beliefs: Mapping[str, Belief], snapshot: Snapshot, budget: Budget, changed: bool
    ) -> dict[str, int]:
        """The stages for which a trial is due, and the level that each would come to.

        Args:
            beliefs: By stage, what is known of it.
            snapshot: The window just ended.
            budget: What may be used.
            changed: Whether a stage was found to have changed: then trials may pay again.
        """
        if changed:
            self._pause = self._every
        if self._since is not None:
            self._since += 1
        due = self._since is None or self._since > self._pause
        if not self._every or not due or snapshot.consumer.wait_share <= STARVED or budget.cpus < 2:
            return {}
        busy = sum(belief.busy for belief in beliefs.values() if not belief.info.waits)
        full, now = busy >= FULL * snapshot.allocation.slots, in_force(snapshot)
        wanted = {name: _level(belief, now.get(name), full, budget) for name, belief in beliefs.items()}
        found = {name: level for name, level in wanted.items() if level and beliefs[name].fit.deviation(level) > UNSURE}
        if found:
            self._pause *= 1 if self._since is None else TRY_LESS
            self._since = 0
        return found


def trial(levels: Mapping[str, int], beliefs: Mapping[str, Belief], snapshot: Snapshot, budget: Budget) -> Allocation:
    """What is in force but for the stages that are tried out.

    Processes that will be wanted again at once are not ended: a stage that runs in them gets half the slots.
    """
    before = as_before(snapshot, budget, "others are tried out")
    concurrency, reasons, slots = dict(before.concurrency), dict(before.reasons), budget.cpus
    for name, level in levels.items():
        belief = beliefs[name]
        reasons[name] = f"a trial at {level} instead of {belief.busy:.1f}: does it slow down with concurrency?"
        if belief.info.executor == "process" and level < belief.busy:
            slots = max(1, budget.cpus // 2)
        else:
            concurrency[name] = level
    for name, belief in beliefs.items():
        if belief.info.executor == "process" and concurrency[name] is None:
            concurrency[name] = most_useful(belief.info, budget)
    return replace(before, concurrency=concurrency, slots=slots, reasons=reasons)


def _level(belief: Belief, limit: int | None, full: bool, budget: Budget) -> int | None:
    """Where a stage would be tried out, whatever is known of it; None = nowhere."""
    most = most_useful(belief.info, budget)
    if limit is not None and limit < most and belief.busy >= AT_LIMIT * limit:
        return min(most, 2 * limit)
    reacts = limit is None if belief.info.waits else full
    half = max(1, round(belief.busy / 2))
    return half if reacts and belief.busy >= LEAST_LEVEL and half < most else None
