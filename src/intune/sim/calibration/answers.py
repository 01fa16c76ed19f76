"""A calibrated simulator: what it answers to "what if", how sure it is, and what it refuses."""

import copy
import difflib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from intune._errors import PipelineError, SourceError
from intune._values import Tuner
from intune._words import count
from intune.sim.calibration.fitting import Fitted
from intune.sim.calibration.replay import SURE, Held, drift
from intune.sim.calibration.saved import as_json, fitted_from
from intune.sim.calibration.trial import simulate
from intune.sim.scenario import Scenario
from intune.tuners import Static, make_tuner

SCHEMA = 1

FURTHEST = 2
"""How many times what was seen may be asked for."""

LEAST_ERROR = 0.05
"""Deviation of an answer as a share below which none is taken to be: live pipelines were off by so much, also where all
that was measured fitted."""

SAID, REFUSED = 0.15, 0.5
"""Shares by which an allocation that was measured is off when it is simulated again: from the first on that is said and
counted, from the second on, where it was held more than once, nothing is answered by simulation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What would be.

    Attributes:
        rows_per_second: Rows that the trainer would be given in a second; 0 where memory would run out.
        low: Lower end of the interval in which nine of ten answers lie.
        high: Upper end of it.
        died: What memory would come to where it would run out; None = it would not.
        measured_seconds: For how long just this was measured; None = it is simulated.
    """

    rows_per_second: float
    low: float
    high: float
    died: str | None = None
    measured_seconds: float | None = None


@dataclass(frozen=True)
class Calibration:
    """A simulator that behaves like a pipeline; made by `intune.sim.calibrate`.

    Attributes:
        fits: Scenarios that fit: the likeliest, then as many others as say how sure that one is.
        cpus: CPU slots that were in use.
        seen: By stage, the most items that it was seen working on at once, other than in passing.
        given: By stage, the most that it was let work on at once; None = it was open.
        held: Allocations that were measured, and what they give when they are simulated.
        steps_per_second: Steps of the simulation that this is.
        notes: What could not be told, a sentence each.
    """

    fits: tuple[Fitted, ...]
    cpus: int
    seen: Mapping[str, int]
    given: Mapping[str, int | None]
    held: tuple[Held, ...]
    steps_per_second: float
    notes: tuple[str, ...]

    @property
    def scenario(self) -> Scenario:
        """The likeliest scenario, for `intune.sim.play` and all that takes one; its rows are source rows."""
        return self.fits[0].scenario

    @property
    def best(self) -> Held:
        """The allocation under which most was measured."""
        return max(self.held, key=lambda each: each.measured)

    @property
    def error(self) -> float:
        """Deviation, as a share, of what is simulated of allocations that were measured, less that of measuring."""
        off = 1.48 * statistics.median(abs(each.off) for each in self.held)
        measuring = statistics.median(each.deviation for each in self.held)
        return max(LEAST_ERROR, math.sqrt(max(0.0, off**2 - measuring**2)))

    @property
    def misfits(self) -> tuple[Held, ...]:
        """Allocations that are off by more than `SAID` of what was measured, and not by chance; the worst first."""
        off = [each for each in self.held if abs(each.off) > math.log(1 + SAID) and each.surely_off]
        return tuple(sorted(off, key=lambda each: -abs(each.off)))

    def what_if(
        self,
        *,
        cpus: int | None = None,
        tuner: str | Tuner | None = None,
        concurrency: Mapping[str, int] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Answer:
        """How many rows a second there would be. What was measured is not simulated, but said as it was measured.

        Args:
            cpus: CPU slots, on a machine that has as many CPUs; None = as measured.
            tuner: Who decides, by name or as an object, of which copies are used.
            concurrency: By stage, limits that stay; other stages may have what they were given at most when it was
                measured, with more CPUs twice as much. None, and no tuner: as it ran best.
            progress: Called with (simulations done, of how many), first with none done.

        Raises:
            PipelineError: If that is more than twice what was seen, there is no such stage or tuner, tuner and
                concurrency are both given, or the simulator does not fit what was measured.
        """
        self.check(cpus, concurrency or {})
        if tuner is not None and concurrency:
            raise PipelineError("give tuner or concurrency, not both: limits that stay leave a tuner nothing to do")
        limits = None if tuner is not None else self._limits(cpus, concurrency)
        known = self._measured(cpus, dict.fromkeys(self.seen) if tuner == "shared" else limits)
        if known is not None:
            return known
        self._check_fit()
        rates: list[float] = []
        if progress is not None:
            progress(0, len(self.fits))
        for number, fit in enumerate(self.fits, 1):
            run = simulate(fit, self._decides(fit, tuner, limits), self.steps_per_second, cpus)
            if run.died is not None:
                return Answer(0.0, 0.0, 0.0, run.died)
            if number == 1:
                self._check_reached(run.reached, cpus)
            rates.append(run.rows_per_second)
            if progress is not None:
                progress(number, len(self.fits))
        return self._interval(rates)

    def _interval(self, rates: Sequence[float]) -> Answer:
        """From the likeliest rate and those that may be true as well."""
        over = max((each.off for each in self.misfits), default=0.0)
        under = max((-each.off for each in self.misfits), default=0.0)
        wide = SURE * math.hypot(self.error, drift(self.held))
        low = min(*rates, rates[0]) * math.exp(-max(wide, over))
        return Answer(rates[0], low, max(*rates, rates[0]) * math.exp(max(wide, under)))

    def _limits(self, cpus: int | None, asked: Mapping[str, int] | None) -> dict[str, int | None]:
        """What each stage may have; None = open."""
        more = cpus is not None and cpus > self.cpus
        if asked is None and not more:
            return dict(self.best.concurrency)
        free = {
            name: FURTHEST * self.seen[name] if more and value is not None else value
            for name, value in self.given.items()
        }
        return {**free, **(asked or {})}

    def _measured(self, cpus: int | None, limits: Mapping[str, int | None] | None) -> Answer | None:
        """What was measured of it, if it was; CPU slots decide, too."""
        for one in self.held:
            if limits is not None and dict(one.concurrency) == dict(limits) and one.slots == (cpus or self.cpus):
                wide = math.exp(SURE * math.hypot(one.deviation, drift(self.held)))
                return Answer(one.measured, one.measured / wide, one.measured * wide, measured_seconds=one.seconds)
        return None

    def _decides(self, fit: Fitted, tuner: str | Tuner | None, limits: Mapping[str, int | None] | None) -> Tuner:
        if limits is not None:
            return Static({fit.names[name]: value for name, value in limits.items() if value is not None})
        return make_tuner(tuner) if isinstance(tuner, str) else copy.deepcopy(make_tuner(tuner or "shared"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OSError: If the file cannot be written.
        """
        plain = {"schema": SCHEMA, **as_json(self)}
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
            made = {"fits": tuple(map(fitted_from, read["fits"])), "held": tuple(Held(**each) for each in read["held"])}
            return cls(**{**chosen, **made, "notes": tuple(read["notes"])})
        except SourceError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{path}: no calibration as it is written by save: {error}") from error

    def check(self, cpus: int | None, concurrency: Mapping[str, int]) -> None:
        """See whether it may be asked.

        Raises:
            PipelineError: As of `what_if`.
        """
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
            if value > FURTHEST * self.seen[name] and not self._was_given(name, value):
                raise PipelineError(
                    f"stage {name!r}: {value} at once is more than {FURTHEST} times the {self.seen[name]} that it was "
                    f"seen working on: ask for at most {FURTHEST * self.seen[name]}, or calibrate with more at once"
                )

    def _was_given(self, name: str, value: float) -> bool:
        """Whether a stage was let have so many."""
        given = self.given[name]
        return given is None or value <= given

    def _check_reached(self, reached: Mapping[str, float], cpus: int | None) -> None:
        for name, value in reached.items():
            as_it_was = self._was_given(name, value) and (cpus is None or cpus <= self.cpus)
            if value > FURTHEST * self.seen[name] + 0.5 and not as_it_was:
                raise PipelineError(
                    f"stage {name!r} would work on {value:.0f} items at once, more than {FURTHEST} times the "
                    f"{self.seen[name]} that it was seen working on: give it a limit of at most "
                    f"{FURTHEST * self.seen[name]}, or calibrate with more at once"
                )

    def _check_fit(self) -> None:
        far = [each for each in self.misfits if each.visits > 1 and abs(each.surely_off) >= math.log(1 + REFUSED)]
        if far:
            raise PipelineError(
                f"the simulator does not fit this pipeline, so only what was measured is answered: {off_line(far[0])}. "
                "Calibrate for longer, or while machine and work stay the same; or try it on the pipeline itself"
            )


def off_line(one: Held) -> str:
    """By how much an allocation is off that was measured."""
    limits = ", ".join(f"{name}={value}" for name, value in one.concurrency.items() if value is not None)
    return (
        f"{limits or 'all stages open'} gave {one.measured:,.0f} rows/s, simulated {one.simulated:,.0f} "
        f"({math.expm1(one.off):+.0%})"
    )
