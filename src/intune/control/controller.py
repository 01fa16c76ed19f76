"""The controller: asks a tuner once in an interval and puts into force what budget and guard allow.

`step` is one decision and knows no thread; `start` runs it in a thread of its own. Nothing that a tuner does
can stop training: a tuner that fails is logged once and replaced by its last good allocation, a workload or
journal that fails stops tuning, and what was applied last stays in force.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields, replace

from intune._clock import Clock
from intune._errors import AllocationError
from intune._periodic import Periodic
from intune._values import Allocation, Budget, Event, Snapshot, Tuner, Workload
from intune.control.allocation import check_complete, open_allocation
from intune.control.guard import Guard
from intune.control.journal import Decision, Journal
from intune.control.outcome import Judge, Outcome

_log = logging.getLogger(__name__)


FIRST_SHARES = (0.25, 0.25, 0.5)
"""The first steps come sooner, after these shares of the interval: what a run begins with is most in need of change."""


def intervals(interval_seconds: float) -> Iterator[float]:
    """Seconds between the steps of a controller, one after another, without end."""
    for share in FIRST_SHARES:
        yield share * interval_seconds
    while True:
        yield interval_seconds


class Controller:
    """Steers one workload with one tuner.

    Args:
        workload: What is tuned.
        tuner: What decides.
        budget: Called at each step; what it returns holds from that step on, so that a decrease is obeyed in
            the very step that sees it.
        guard: Lowers each decision to the budget and to what memory allows.
        journal: Gets each decision. It stays open when the controller stops.
        clock: Time between steps.
        interval_seconds: Seconds from the end of a step to the next one, once the first ones are over.
        tell: Called with what a person should know: what came of a change. It comes before the next allocation is
            applied; None = nobody is told.
    """

    def __init__(
        self,
        workload: Workload,
        tuner: Tuner,
        *,
        budget: Callable[[], Budget],
        guard: Guard,
        journal: Journal,
        clock: Clock,
        interval_seconds: float = 1.0,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        self._workload = workload
        self._tuner: Tuner | None = tuner
        self._read_budget = budget
        self._guard = guard
        self._journal = journal
        self._interval_seconds = interval_seconds
        self._tell = tell or (lambda event: None)
        self._judge = Judge()
        self._names = [stage.name for stage in workload.stages]
        self._stepping = threading.Lock()
        self._budget: Budget | None = None
        self._good: Allocation | None = None
        self._news: list[Event] = []
        self._pausing = threading.Lock()
        self._paused: frozenset[str] = frozenset()
        self._pause_events: list[Event] = []
        self._thread = Periodic("intune-controller", self._steps, clock, who=repr(tuner))

    def step(self) -> Allocation:
        """Take one decision now, in the calling thread.

        Returns:
            The allocation that was applied.

        Raises:
            Exception: What the workload raises. What the tuner raises is logged and never comes out of here.
        """
        with self._stepping:
            snapshot = self._workload.snapshot()
            budget = self._read_budget()
            paused, events = self._user_pauses()
            seen = replace(snapshot, events=(*snapshot.events, *self._news, *self._budget_change(budget), *events))
            self._news = []
            outcome = self._judge.window(seen)
            if outcome is not None:
                seen = self._with_outcome(seen, outcome)
            proposal = self._propose(seen, budget)
            wanted = _with_pauses(proposal, paused)
            allocation, vetoes = self._guard.check(wanted, seen, budget)
            self._news += vetoes
            self._workload.apply(allocation)
            self._judge.decided(seen, allocation)
            self._journal.record(Decision(seen, budget, proposal, tuple(self._news), allocation, outcome))
            return allocation

    @property
    def outcome(self) -> Outcome | None:
        """What is known of the last decision that changed something; None = there was none yet."""
        return self._judge.last

    def pause(self, stage: str) -> None:
        """Let a stage begin no more items from the next step on, whatever the tuner says, until `resume`.

        Raises:
            AllocationError: If there is no such stage.
        """
        self._set_paused(stage, True)

    def resume(self, stage: str) -> None:
        """Give a paused stage back to the tuner from the next step on; nothing happens if it is not paused.

        Raises:
            AllocationError: If there is no such stage.
        """
        self._set_paused(stage, False)

    def start(self) -> None:
        """Take a first step now, then go on in a thread until `stop`; nothing happens if that thread runs."""
        if not self._thread.started and self._try_step():
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; may be called again and from any thread, that one included.

        A tuner that does not return within two seconds is left alone with its thread and named in the log.
        """
        self._thread.stop()

    def _steps(self) -> Generator[float, None, None]:
        for seconds in intervals(self._interval_seconds):
            yield seconds
            if not self._try_step():
                return

    def _try_step(self) -> bool:
        try:
            self.step()
        except Exception:
            _log.exception("Tuning stops after an error; training goes on with the allocation in force")
            return False
        return True

    def _propose(self, seen: Snapshot, budget: Budget) -> Allocation:
        """What the tuner wants, or its last good allocation from the first fault on."""
        if self._tuner is not None:
            try:
                given = self._tuner.propose(seen, budget)
                self._good = self._checked(given, seen)
            except (Exception, SystemExit, GeneratorExit) as error:
                last = "its last good allocation" if self._good else "every stage open"
                _log.exception("The tuner %r failed; training goes on with %s", self._tuner, last)
                detail = f"{type(error).__name__}: {error}; replaced by {last}"
                self._news.append(Event("tuner_failed", None, detail))
                self._tuner = None
        return self._good or open_allocation(self._workload.stages, budget.cpus)

    def _with_outcome(self, seen: Snapshot, outcome: Outcome) -> Snapshot:
        events = outcome.events()
        for event in events:
            self._tell(event)
        return replace(seen, events=(*seen.events, *events))

    def _checked(self, given: object, seen: Snapshot) -> Allocation:
        """A complete allocation without pauses: a tuner that repeats what it sees may repeat a user's pause."""
        paused = [name for name, value in seen.allocation.concurrency.items() if value == 0]
        allocation = check_complete(given, self._names, paused=paused)
        before = self._good.concurrency if self._good else {}
        return replace(
            allocation,
            concurrency={
                name: before.get(name) if value == 0 else value for name, value in allocation.concurrency.items()
            },
        )

    def _budget_change(self, budget: Budget) -> list[Event]:
        before, self._budget = self._budget, budget
        if before is None or before == budget:
            return []
        changes = [
            f"{field.name} {getattr(before, field.name)} -> {getattr(budget, field.name)}"
            for field in fields(Budget)
            if getattr(before, field.name) != getattr(budget, field.name)
        ]
        return [Event("budget", None, ", ".join(changes))]

    def _user_pauses(self) -> tuple[frozenset[str], list[Event]]:
        with self._pausing:
            events, self._pause_events = self._pause_events, []
            return self._paused, events

    def _set_paused(self, stage: str, paused: bool) -> None:
        if stage not in self._names:
            raise AllocationError(f"unknown stage {stage!r}: this workload has {self._names}")
        with self._pausing:
            if paused != (stage in self._paused):
                self._paused = self._paused ^ {stage}
                verb = "paused" if paused else "resumed"
                self._pause_events.append(Event("pause", stage, f"{verb} by the user"))


def _with_pauses(proposal: Allocation, paused: frozenset[str]) -> Allocation:
    if not paused:
        return proposal
    return replace(
        proposal,
        expected_rows_per_second=None,
        concurrency={**proposal.concurrency, **dict.fromkeys(paused, 0)},
        reasons={**proposal.reasons, **dict.fromkeys(paused, "paused by the user")},
    )
