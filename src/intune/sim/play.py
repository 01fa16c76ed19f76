"""One tuner steers one scenario: what a controller does each second with a real loader, in simulated time."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from intune._values import Tuner
from intune.control import Controller, Guard, Journal
from intune.control.controller import intervals as until_next
from intune.control.journal import Decision
from intune.sim.discrete import OutOfMemory, Simulation
from intune.sim.scenario import Scenario
from intune.tuners import make_tuner


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two decisions.

    Attributes:
        seconds: When it ended.
        rows: Rows that the trainer took in it.
        steps: Steps that the trainer finished in it.
        cpu_seconds: CPU seconds used in it, the trainer's included.
        processes: Worker processes alive at its end.
        memory_bytes: Memory at its end.
        concurrency: By stage, what was in force; None = open.
        slots: CPU slots that were in force.
    """

    seconds: float
    rows: int
    steps: int
    cpu_seconds: float
    processes: int
    memory_bytes: float
    concurrency: Mapping[str, int | None]
    slots: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A run.

    Attributes:
        intervals: One for each decision but the last.
        peak_bytes: The most memory that was held at any moment.
        died: What the memory was when the limit was passed; None = it never was.
        lines: The journal.
        tuner_failed: What the tuner raised, when it first did; None = it never did. From then on its last good
            allocation stood in for it, so that the run says nothing about the tuner.
    """

    intervals: tuple[Interval, ...]
    peak_bytes: float
    died: str | None
    lines: tuple[Mapping[str, object], ...]
    tuner_failed: str | None = None

    def rows_per_second(self, first: int = 0, last: int | None = None) -> float:
        """Rows a second over the intervals from `first` up to `last`, that one left out; 0 after a death.

        Args:
            first: Number of the first interval.
            last: Number of the one after the last; None = to the end.
        """
        chosen = self.intervals[first:last]
        if self.died is not None or not chosen:
            return 0.0
        before = self.intervals[first - 1].seconds if first else 0.0
        return sum(each.rows for each in chosen) / (chosen[-1].seconds - before)


class _Watching(Journal):
    """A journal that remembers, however long ago, that the tuner failed."""

    failed: str | None = None

    def record(self, decision: Decision) -> None:
        for event in decision.vetoed:
            if event.kind == "tuner_failed" and self.failed is None:
                self.failed = event.detail
        super().record(decision)


def play(scenario: Scenario, tuner: Tuner | str, decisions: int = 60, *, interval_seconds: float = 1.0) -> Trace:
    """Let a tuner steer a scenario.

    Args:
        scenario: What is run.
        tuner: What decides, or its name. An object is used as it is, so give a new one for each run.
        decisions: Decisions after the first, which it takes before anything runs.
        interval_seconds: Simulated seconds between two of them, once the first ones are over.

    Raises:
        PipelineError: If there is no tuner of that name, or the object has no method `propose`.
    """
    tuner = make_tuner(tuner)
    simulation = Simulation(scenario)
    journal = _Watching(None, clock=simulation.clock)
    controller = Controller(
        simulation, tuner, budget=simulation.budget, guard=Guard(), journal=journal, clock=simulation.clock
    )
    intervals: list[Interval] = []
    rows = steps = 0
    used, died = 0.0, None
    try:
        for seconds in itertools.islice(until_next(interval_seconds), decisions):
            applied = controller.step()
            simulation.advance(seconds)
            intervals.append(
                Interval(
                    simulation.now,
                    simulation.rows - rows,
                    simulation.steps - steps,
                    simulation.cpu_seconds - used,
                    simulation.processes,
                    simulation.memory_bytes,
                    dict(applied.concurrency),
                    applied.slots,
                )
            )
            rows, steps, used = simulation.rows, simulation.steps, simulation.cpu_seconds
        controller.step()
    except OutOfMemory as error:
        died = str(error)
    finally:
        simulation.close()
    return Trace(tuple(intervals), simulation.peak_bytes, died, tuple(journal.lines()), journal.failed)
