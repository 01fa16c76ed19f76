"""What each change of the allocation was to bring, and what it brought.

Compared are the rows that the training loop took a second before and after a change. A count of n steps is off by one
either way, as batches lie ready, and a loader gives them unevenly; so both sides need `LEAST_STEPS` steps, over as many
windows as that takes. Left out are windows that say nothing of an allocation: in which processes are started or end,
an epoch begins or ends, a worker died, or memory was held back. Where the allocation changes again, or the budget does,
before there are enough steps, or the training loop's own part of a step changed (it paused, say), nothing is said.

Covers what happened after a change, not what happened by it: a file that is cheaper to read counts too.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from intune._values import Allocation, Event, Snapshot, StageSnapshot
from intune._words import count, duration, or_open

LEAST_STEPS = 30
"""Steps on each side below which no rate is told from another one: with so many it is known to about 5 %."""

TRAINER_CHANGED = 0.1
"""By what share of the time of a step the training loop's own part may differ where before and after are compared."""

LEAVES_OUT = frozenset({"epoch_start", "epoch_end", "worker_died", "braked", "over_limit"})
"""Events of windows that say nothing of an allocation."""

ENDS = frozenset({"budget", "pause", "executor", "waits", "tuner_failed"})
"""Events after which the windows before cannot be compared with those that come."""


class Window(NamedTuple):
    """A window as far as rates go: its seconds, those that the training loop waited, its steps, their rows."""

    seconds: float
    waited: float
    steps: int
    rows: int


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed something.

    Attributes:
        concurrency: By stage that was changed, its concurrency before and after; None = open.
        slots: CPU slots before and after.
        reasons: By stage that was changed, why, in the tuner's words; and what was seen of it.
        expected: Change of the rate that the tuner expected, as a share of the rate before: an estimate. None = it did
            not say, or the rate before is not known.
    """

    concurrency: Mapping[str, tuple[int | None, int | None]]
    slots: tuple[int, int]
    reasons: Mapping[str, str]
    expected: float | None

    def numbers(self) -> str:
        """What was changed, as in "work 3 -> 5, slots 8 -> 6"."""
        said = [f"{name} {moved(*both)}" for name, both in self.concurrency.items()]
        if self.slots[0] != self.slots[1]:
            said.append(f"slots {self.slots[0]} -> {self.slots[1]}")
        return ", ".join(said)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change.

    Attributes:
        change: What was changed.
        got: Change of the rate, as a share of the rate before; None = that cannot be told, or not yet.
        steps: Steps since, in windows that count.
        seconds: Seconds of these.
        decisions_ago: Decisions since the one that changed it.
    """

    change: Change
    got: float | None
    steps: int
    seconds: float
    decisions_ago: int

    def events(self) -> list[Event]:
        """One for each stage that was changed, and one without a stage where only slots were."""
        if not self.change.concurrency:
            return [Event("outcome", None, f"{self.change.numbers()}: {self.in_words()}")]
        return [
            Event("outcome", name, "; ".join(filter(None, [said, self.change.reasons[name], self.in_words()])))
            for name, both in self.change.concurrency.items()
            for said in [f"concurrency {moved(*both)}"]
        ]

    def in_words(self) -> str:
        """As in "estimated +18 %, got +15 % (45 steps in 3.0 s)"; what is not known is left out."""
        said = [] if self.change.expected is None else [f"estimated {_percent(self.change.expected)}"]
        if self.got is not None:
            said.append(f"got {_percent(self.got)} ({count(self.steps, 'step')} in {duration(self.seconds)})")
        elif said:
            said.append(f"what it brought is not known ({count(self.steps, 'step')} since that can be compared)")
        return ", ".join(said)


@dataclass
class Judge:
    """Sees each window and each decision, and says what became of the changes.

    Attributes:
        last: What is known of the last change; None = nothing was changed yet.
    """

    last: Outcome | None = None
    _force: Allocation | None = None
    _before: tuple[float, float] | None = None
    _windows: deque[Window] = field(default_factory=deque)
    _settling: bool = False
    _open: bool = False

    def window(self, seen: Snapshot) -> Outcome | None:
        """A window has ended in which the allocation of the last decision was in force.

        Returns:
            What the last change brought, in the window by which that became known.
        """
        kinds = {event.kind for event in seen.events}
        if kinds & ENDS:
            self._windows.clear()
            self._open = False
        was_settling, self._settling = self._settling, _processes_move(seen)
        consumer, seconds = seen.consumer, seen.window_seconds
        if not (self._settling or was_settling or kinds & LEAVES_OUT) and consumer.steps and seconds > 0:
            self._windows.append(Window(seconds, consumer.wait_share * seconds, consumer.steps, consumer.rows))
        return self._counted()

    def decided(self, seen: Snapshot, applied: Allocation) -> None:
        """The next allocation was put into force."""
        before, self._force = self._force, applied
        if before is None or (before.concurrency == applied.concurrency and before.slots == applied.slots):
            return
        changed = {
            name: (before.concurrency[name], value)
            for name, value in applied.concurrency.items()
            if before.concurrency[name] != value
        }
        rate = self._rate_before()
        expected = None
        if rate is not None and applied.expected_rows_per_second is not None:
            expected = applied.expected_rows_per_second / rate[0] - 1
        stages = {stage.name: stage for stage in seen.stages}
        reasons = {name: _reason(stages[name], seen, applied.reasons.get(name, "")) for name in changed}
        change = Change(changed, (before.slots, applied.slots), reasons, expected)
        self.last = Outcome(change, None, 0, 0.0, 0)
        self._before, self._open = rate, rate is not None
        self._settling = any(stages[name].info.executor == "process" for name in changed)
        self._windows.clear()

    def _counted(self) -> Outcome | None:
        """Take the windows since the last change into account; what it brought, where that is known now."""
        if self.last is not None:
            self.last = replace(self.last, decisions_ago=self.last.decisions_ago + 1)
        if self.last is None or not self._open or self._before is None:
            self._forget_old()
            return None
        now, (rate, own) = _sum(self._windows), self._before
        self.last = replace(self.last, steps=now.steps, seconds=now.seconds)
        if now.steps < LEAST_STEPS:
            return None
        self._open = False
        if abs(_own_seconds(now) - own) > TRAINER_CHANGED / rate:
            return None  # it was the training loop that got slower or faster: it paused, say
        self.last = replace(self.last, got=now.rows / now.seconds / rate - 1)
        return self.last

    def _rate_before(self) -> tuple[float, float] | None:
        """Rows a second, and the training loop's own seconds a row, in the last windows; None = too few steps."""
        self._forget_old()
        before = _sum(self._windows)
        if before.steps < LEAST_STEPS or not before.rows:
            return None
        return before.rows / before.seconds, _own_seconds(before)

    def _forget_old(self) -> None:
        """Keep the last windows only that have enough steps together."""
        total = sum(window.steps for window in self._windows)
        while self._windows and total - self._windows[0].steps >= LEAST_STEPS:
            total -= self._windows.popleft().steps


def _processes_move(seen: Snapshot) -> bool:
    return any(stage.processes_starting or stage.processes_leaving for stage in seen.stages)


def _sum(windows: deque[Window]) -> Window:
    seconds, waited, steps, rows = (sum(each) for each in zip(*windows, strict=True)) if windows else (0.0, 0.0, 0, 0)
    return Window(seconds, waited, int(steps), int(rows))


def _own_seconds(window: Window) -> float:
    """Seconds a row that the training loop did not wait."""
    return max(0.0, window.seconds - window.waited) / window.rows if window.rows else 0.0


def _reason(stage: StageSnapshot, seen: Snapshot, why: str) -> str:
    """What was seen of a stage when it was changed, and why the tuner changed it."""
    facts = [f"{count(stage.waiting_items, 'item')} waited before it"] if stage.waiting_items else []
    if seen.window_seconds > 0 and stage.busy_seconds:
        busy = f"busy on {stage.busy_seconds / seen.window_seconds:.1f}"
        if stage.cpu_seconds_mean is not None and stage.wall_seconds_mean:
            busy += f" at CPU share {min(1.0, stage.cpu_seconds_mean / stage.wall_seconds_mean):.2f}"
        facts.append(busy)
    return "; ".join([*([why] if why else []), *([", ".join(facts)] if facts else [])])


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %"


def moved(before: int | None, after: int | None) -> str:
    """Two concurrencies, as in "3 -> open"."""
    return f"{or_open(before)} -> {or_open(after)}"
