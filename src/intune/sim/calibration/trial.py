"""A fitted pipeline under a tuner, for as long as its rate needs, on a machine of as many CPUs as one likes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from intune._errors import PipelineError
from intune._values import Budget, Tuner
from intune.sim.calibration.fitting import Fitted
from intune.sim.play import play
from intune.sim.scenario import Scenario
from intune.tuners import Shared, Static

DECIDE_SECONDS = 30
"""How long a tuner that learns is given before its rate counts."""

STEPS, LONGEST = 200, 20
"""Steps that a rate is taken from, about; simulated seconds that this may take."""

QUICK = 3
"""Decisions in quick succession at the start, a second all together."""

USUAL = Budget(1).max_threads
"""Threads and processes that a budget has unless something limits them."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation came to: rows a second for the trainer, the most at once by stage, and what memory came to."""

    rows_per_second: float
    reached: Mapping[str, float]
    died: str | None


def simulate(fit: Fitted, tuner: Tuner, steps_per_second: float, cpus: int | None = None) -> Run:
    """A fitted pipeline under a tuner.

    Args:
        fit: The pipeline.
        tuner: Who decides; used as it is.
        steps_per_second: Steps that are expected, about.
        cpus: CPUs; None = as in the scenario.
    """
    scenario = fit.scenario if cpus is None else _on(fit.scenario, cpus)
    warm = min(LONGEST, QUICK + math.ceil(4 * scenario.through_seconds + scenario.starting_seconds))
    if not isinstance(tuner, Static | Shared):
        warm = max(warm, DECIDE_SECONDS)
    long = min(LONGEST, max(5, math.ceil(STEPS / max(steps_per_second, 1e-9))))
    trace = play(scenario, tuner, warm + long)
    if trace.tuner_failed is not None:
        raise PipelineError(f"the tuner failed, so there is no answer: {trace.tuner_failed}")
    real = {simulated: name for name, simulated in fit.names.items()}
    reached: dict[str, float] = {}
    for line in trace.lines[warm:]:
        for name, stage in line["seen"]["stages"].items():  # type: ignore[index]
            reached[real[name]] = max(reached.get(real[name], 0.0), stage["in_hand_mean"])
    return Run(fit.rows * trace.rows_per_second(warm), reached, trace.died)


def _on(scenario: Scenario, cpus: int) -> Scenario:
    """The same on another machine, whose limits on threads and processes grow where they are the usual ones."""
    machine = scenario.machine
    threads = machine.max_threads + (max(0, cpus - machine.cpus) if machine.max_threads >= USUAL else 0)
    processes = max(machine.max_processes, cpus) if machine.max_processes >= USUAL else machine.max_processes
    return replace(scenario, machine=replace(machine, cpus=cpus, max_threads=threads, max_processes=processes))
