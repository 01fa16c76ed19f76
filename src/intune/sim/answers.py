"""A calibrated simulator: what it answers to "what if", how sure it is, and what it refuses."""

import copy
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from intune._errors import PipelineError, SourceError
from intune._values import Tuner
from intune._words import count
from intune.control.journal import to_plain
from intune.sim.fitting import Fitted
from intune.sim.play import play
from intune.sim.scenario import Change, Scenario, SimMachine, SimStage, SimTrainer
from intune.tuners import Shared, Static, make_tuner

SCHEMA = 1

FURTHEST = 2
"""How many times what was seen may be asked for."""

LEAST_ERROR = 0.02
"""Deviation of an answer as a share below which none is taken to be."""

DEVIATIONS = 1.645
"""Half of an interval in which nine of ten lie."""

DECIDE_SECONDS = 30
"""How long a tuner that learns is given before its rate counts."""

STEPS = 200
"""Steps that a rate is taken from, about."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What would be.

    Attributes:
        rows_per_second: Rows that the trainer would be given in a second; 0 where memory would run out.
        low: Lower end of the interval in which nine of ten answers lie.
        high: Upper end of it.
        died: What memory would come to where it would run out; None = it would not.
    """

    rows_per_second: float
    low: float
    high: float
    died: str | None = None


@dataclass(frozen=True)
class Calibration:
    """A simulator that behaves like a pipeline; made by `intune.sim.calibrate`.

    Attributes:
        fits: Scenarios that fit: the likeliest, then as many others as say how sure that one is.
        cpus: CPU slots that were in use.
        seen: By stage, the most items that it was seen working on at once.
        seconds: How long was measured.
        measured: Rows a second that the trainer was given, over all that was measured.
        steps_per_second: Steps of the simulation that this is.
        scale: What simulated rates are multiplied by, as they were off by so much on what was measured.
        error: Deviation, as a share, of what is said then of allocations that were measured.
        notes: What could not be told, a sentence each.
    """

    fits: tuple[Fitted, ...]
    cpus: int
    seen: Mapping[str, int]
    seconds: float
    measured: float
    steps_per_second: float
    scale: float
    error: float
    notes: tuple[str, ...]

    @property
    def scenario(self) -> Scenario:
        """The likeliest scenario, for `intune.sim.play` and all that takes one; its rows are source rows."""
        return self.fits[0].scenario

    def what_if(
        self,
        *,
        cpus: int | None = None,
        tuner: str | Tuner | None = None,
        concurrency: Mapping[str, int] | None = None,
    ) -> Answer:
        """Simulate the pipeline as it would be.

        Args:
            cpus: CPU slots, on a machine that has as many CPUs; None = as measured.
            tuner: Who decides, by name or as an object, of which copies are used; None = every stage open.
            concurrency: By stage, limits that stay; the other stages are open.

        Raises:
            PipelineError: If that is more than twice what was seen, there is no such stage or tuner, or tuner and
                concurrency are both given.
        """
        self._check(cpus, concurrency or {})
        if tuner is not None and concurrency:
            raise PipelineError("give tuner or concurrency, not both: limits that stay leave a tuner nothing to do")
        rates = []
        for fit in self.fits:
            if concurrency:
                chosen: Tuner = Static({fit.names[name]: value for name, value in concurrency.items()})
            else:
                chosen = make_tuner(tuner or "shared") if isinstance(tuner, str | None) else copy.deepcopy(tuner)
            run = simulate(fit, chosen, self.steps_per_second, cpus)
            if run.died is not None:
                return Answer(0.0, 0.0, 0.0, run.died)
            self._check_reached(run.reached)
            rates.append(run.rows_per_second)
        if not min(rates):
            return Answer(0.0, 0.0, 0.0)
        logs = [math.log(rate / rates[0]) for rate in rates[1:]]
        own = sum(each * each for each in logs) / len(logs) if logs else 0.0
        wide = math.exp(DEVIATIONS * math.sqrt(own + self.error**2))
        best = self.scale * rates[0]
        return Answer(best, best / wide, best * wide)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OSError: If the file cannot be written.
        """
        plain = {"schema": SCHEMA, **_plain(self)}
        Path(path).write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            SourceError: If the file is no calibration.
            OSError: If it cannot be read.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            if read["schema"] != SCHEMA:
                raise SourceError(f"{path}: schema {read['schema']!r}, this version reads {SCHEMA}")
            chosen = {field.name: read[field.name] for field in fields(cls)}
            fits = tuple(map(_fitted, read["fits"]))
            return cls(**{**chosen, "fits": fits, "notes": tuple(read["notes"])})
        except SourceError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{path}: no calibration as it is written by save: {error}") from error

    def _check(self, cpus: int | None, concurrency: Mapping[str, int]) -> None:
        asked = {**concurrency, **({"cpus": cpus} if cpus is not None else {})}
        for name, value in asked.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PipelineError(f"{name} must be a whole number of at least 1, got {value!r}")
        if cpus is not None and cpus > FURTHEST * self.cpus:
            raise PipelineError(
                f"cpus={cpus} is more than {FURTHEST} times the {count(self.cpus, 'CPU')} that it was measured "
                f"on: ask for at most {FURTHEST * self.cpus}, or calibrate on a larger machine"
            )
        for name, value in concurrency.items():
            if name not in self.seen:
                near = difflib.get_close_matches(name, self.seen, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise PipelineError(f"no stage {name!r}: this pipeline has {list(self.seen)}{meant}")
            if value > FURTHEST * self.seen[name]:
                raise PipelineError(
                    f"stage {name!r}: {value} at once is more than {FURTHEST} times the {self.seen[name]} that it was "
                    f"seen working on: ask for at most {FURTHEST * self.seen[name]}, or calibrate with more at once"
                )

    def _check_reached(self, reached: Mapping[str, float]) -> None:
        for name, value in reached.items():
            if value > FURTHEST * self.seen[name] + 0.5:
                raise PipelineError(
                    f"stage {name!r} would work on {value:.0f} items at once, more than {FURTHEST} times the "
                    f"{self.seen[name]} that it was seen working on: give it a limit of at most "
                    f"{FURTHEST * self.seen[name]} by concurrency, or calibrate with more at once"
                )


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
    scenario = fit.scenario
    if cpus is not None:
        machine = scenario.machine
        threads = (
            machine.max_threads + max(0, cpus - machine.cpus) if machine.max_threads >= 64 else machine.max_threads
        )
        processes = max(machine.max_processes, cpus) if machine.max_processes >= 64 else machine.max_processes
        scenario = replace(scenario, machine=replace(machine, cpus=cpus, max_threads=threads, max_processes=processes))
    through = sum(_seconds(stage) for stage in scenario.stages)
    starts = sum(stage.start_seconds for stage in scenario.stages if stage.executor == "process")
    warm = min(60, max(3, math.ceil(4 * through + starts * scenario.machine.cpus / 2)))
    if not isinstance(tuner, Static | Shared):
        warm = max(warm, DECIDE_SECONDS)
    long = min(60, max(5, math.ceil(STEPS / max(steps_per_second, 1e-9))))
    trace = play(scenario, tuner, warm + long)
    if trace.tuner_failed is not None:
        raise PipelineError(f"the tuner failed, so there is no answer: {trace.tuner_failed}")
    real = {simulated: name for name, simulated in fit.names.items()}
    reached: dict[str, float] = {}
    for line in trace.lines[warm:]:
        for name, stage in line["seen"]["stages"].items():  # type: ignore[index]
            reached[real[name]] = max(reached.get(real[name], 0.0), stage["in_hand_mean"])
    return Run(fit.rows * trace.rows_per_second(warm), reached, trace.died)


def _seconds(stage: SimStage) -> float:
    return stage.wait_seconds + stage.cpu_seconds + stage.lock_seconds + stage.serial_seconds


def _plain(value: Any) -> Any:
    """As JSON; a scenario has sets in it, which are empty here."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return to_plain(value)


def _fitted(read: Mapping[str, Any]) -> Fitted:
    scenario = dict(read["scenario"])
    machine = {**scenario["machine"], "unmeasured": frozenset(scenario["machine"]["unmeasured"])}
    made: dict[str, Any] = {
        **scenario,
        "stages": tuple(SimStage(**each) for each in scenario["stages"]),
        "machine": SimMachine(**machine),
        "trainer": SimTrainer(**scenario["trainer"]),
        "changes": tuple(Change(**each) for each in scenario["changes"]),
    }
    return Fitted(Scenario(**made), read["names"], read["groups"], read["rows"], read["unit"], tuple(read["doubts"]))
