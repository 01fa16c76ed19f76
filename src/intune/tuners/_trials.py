"""When a stage is given another concurrency in order to learn, and which.

How items take longer the more there are at once shows by itself, as that number varies, but only up to what was ever
allowed. So each stage begins with few at once (`Ramp`), and where the stage that holds up all others might be faster
with a few more or less, that is tried for one decision (`Trials`). What nothing speaks for is tried ever more seldom
(`Probe`): one process more where all are busy though memory is thought to be what holds up; and twice as many of a
stage that is limited because it slowed down, as with few at once it would not show if it no longer did.
"""

from collections.abc import Collection, Mapping

from intune._values import Budget, Snapshot, StageSnapshot
from intune.tuners._beliefs import STARVED, Belief
from intune.tuners._plan import Line
from intune.tuners._rows import most_useful

MOST_AT_ONCE = 3
"""With fewer CPUs than this there is nothing to find out."""

LEAST_LEVEL = 1.5
"""Items at once of which half can tell anything."""

TRY_LESS = 4
"""By how much longer the pause between trials gets with each of them."""


class Ramp:
    """Gives each stage few at once, then more each time that it has finished half as many items as that, then all.

    A stage that hinders itself would go deep into that at once otherwise, and hardly anything would be finished to
    learn from. Who finishes nothing gets no more: it has nothing to do, or has just that difficulty. A stage that was
    found to have changed goes through it again, from half of what it was busy on.
    """

    FIRST = 1 / 8
    """Share of what is useful that a stage begins with."""

    GROWTH = 4
    """By how much more it gets each time."""

    def __init__(self, known: Collection[str] = ()) -> None:
        """The stages in `known` need not show how they scale."""
        self._known = known
        self._levels: dict[str, int] | None = None
        self._finished: dict[str, int] = {}  # since it has its present level

    def levels(
        self, snapshot: Snapshot, budget: Budget, beliefs: Mapping[str, Belief], changed: frozenset[str]
    ) -> dict[str, int]:
        """The most at once of each stage that has not come through it yet.

        Args:
            snapshot: The window just ended.
            budget: What may be used.
            beliefs: By stage, what is known of it.
            changed: The stages that were found to have changed.
        """
        if budget.cpus < MOST_AT_ONCE:
            self._levels = {}
        elif self._levels is None:
            unknown = [stage for stage in snapshot.stages if stage.name not in self._known]
            useful = {stage.name: most_useful(stage.info, budget) for stage in unknown}
            self._levels = {name: max(1, round(self.FIRST * most)) for name, most in useful.items() if most > 1}
        else:
            for stage in snapshot.stages:
                if stage.name in self._levels:
                    self._raise(stage.name, _worked(stage), most_useful(stage.info, budget))
            for belief in (beliefs[name] for name in changed if snapshot.consumer.wait_share > STARVED):
                # Processes that will be wanted again at once are not ended.
                if belief.busy >= LEAST_LEVEL and belief.info.executor == "thread":
                    self._levels[belief.info.name] = max(1, round(belief.busy / 2))
        return dict(self._levels)

    def _raise(self, name: str, finished: int, most: int) -> None:
        assert self._levels is not None
        self._finished[name] = self._finished.get(name, 0) + finished
        if 2 * self._finished[name] >= self._levels[name]:
            self._finished[name] = 0
            self._levels[name] *= self.GROWTH
            if self._levels[name] >= most:
                del self._levels[name]


def _worked(stage: StageSnapshot) -> int:
    """Items that it was done with, also those that it dropped."""
    by_crowd = sum(items for _, items, _ in stage.wall_seconds_by_crowd)
    return max(stage.items_out, by_crowd, stage.items_in - stage.running)


class Trials:
    """Remembers when the last one was.

    Args:
        every: Decisions at least between two; four times as many after each further one. 0 = none at all.
        worth: By what factor its rate might be larger for a level to be worth trying.
    """

    def __init__(self, every: int, worth: float) -> None:
        self._every = self._pause = every
        self._worth = worth
        self._since = 0

    def level(self, belief: Belief, line: Line, now: int, snapshot: Snapshot, changed: bool) -> int | None:
        """What the stage that holds up all others is to be tried at; None = there is nothing to find out now.

        Args:
            belief: What is known of the stage.
            line: The same, as far as rates go.
            now: What it has.
            snapshot: The window just ended.
            changed: Whether a stage was found to have changed: then trials may pay again.
        """
        if changed:
            self._pause = self._every
        self._since += 1
        if not self._every or self._since <= self._pause or snapshot.consumer.wait_share <= STARVED:
            return None
        step = max(1, now // 4)
        levels = [level for level in (now + step, now - step) if 1 <= level <= line.most]
        hoped = {level: level / belief.fit.at_least(level) for level in levels}
        if not hoped or max(hoped.values()) < self._worth * line.rate(now):
            return None
        self._pause *= TRY_LESS
        self._since = 0
        return max(hoped, key=lambda level: hoped[level])


class Probe:
    """Tries more of something for some decisions, though nothing that is known promises that it helps.

    After each time the pause gets longer.

    Args:
        every: Decisions at least between two; four times as many after each further one. 0 = none at all.
        lasts: Decisions that one takes: a process needs time to start, and one window alone may be chance.
    """

    def __init__(self, every: int, lasts: int) -> None:
        self._every = self._pause = every
        self._lasts = lasts
        self._since = self._left = 0
        self._level = 0

    @property
    def going_on(self) -> bool:
        """Whether it will try more at the next decision, too."""
        return self._left > 0

    def level(self, now: int, more: int, worth: bool, changed: bool) -> int | None:
        """What the stage is to be tried at; None = what it would get.

        Args:
            now: What it would get.
            more: What might be tried instead.
            worth: Whether there is a reason to.
            changed: Whether a stage was found to have changed: then it may pay again.
        """
        if changed:
            self._pause, self._left = self._every, 0
        if self._left:
            self._left -= 1
            return self._level if self._level > now else None
        self._since += 1
        if not self._every or self._since <= self._pause or not worth or more <= now:
            return None
        self._pause *= TRY_LESS
        self._since, self._left, self._level = 0, self._lasts - 1, more
        return self._level
