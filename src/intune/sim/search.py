"""The same search of parameters for every tuner, so that those that are compared have been tuned with the same effort.

Candidates are the tuner's default and random draws. They go through rounds (`Rung`): in each, all that are left play
the same new scenarios, and those with the best mean over all that they have played go on; the default always does. A
candidate's score in a scenario is log(its rows / rows of the reference tuner there), within `MOST` on both sides, and
the least where it ran out of memory or raised. So each tuner is given the same number of decisions.

Who comes first among many looks better than it is. So the one that is ahead of the default in the end is held against
it on scenarios that no search has seen, in pairs, and only if the interval of 95 % of the mean difference lies above 0
is it called better. Scenarios are of the trained families only, each of them as often.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intune._errors import PipelineError
from intune.sim.evaluate import Row, mend_end, read_rows, version_of
from intune.sim.families import TRAINED, scenario
from intune.sim.play import play
from intune.sim.spaces import SPACES, Parameters, Space
from intune.sim.summary import Estimate, estimate
from intune.sim.workers import carry_out
from intune.sim.writable import make_folder

MOST = -math.log(0.05)
"""The largest score; the least is the same below 0: a twentieth of the reference's rows, and a death."""

FAMILIES = tuple(TRAINED)


@dataclass(frozen=True, slots=True)
class Rung:
    """One round: so many `candidates`, the default one of them, each play so many new `scenarios`."""

    candidates: int
    scenarios: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What each tuner is given.

    Attributes:
        rungs: The rounds; two are left in the last, the default and its challenger.
        validation: Scenarios on which the challenger is held against the default after the search.
        decisions: Decisions of each run.
        first_seed: Of the scenarios of the search, which have seeds of their own from here on.
        validation_seed: The same of those of the validation.
        draw: Seed of the random candidates.

    Raises:
        PipelineError: If rounds get larger, the last has not two candidates, or the two lists have seeds in common.
    """

    rungs: tuple[Rung, ...] = (Rung(12, 16), Rung(4, 16), Rung(2, 32))
    validation: int = 64
    decisions: int = 30
    first_seed: int = 5000
    validation_seed: int = 6000
    draw: int = 0

    def __post_init__(self) -> None:
        sizes = [rung.candidates for rung in self.rungs]
        if sizes != sorted(sizes, reverse=True) or sizes[-1:] != [2]:
            raise PipelineError(f"rounds of {sizes} candidates: each must be no larger than the one before, the last 2")
        numbers = {"decisions": self.decisions, "validation": self.validation}
        numbers |= {f"scenarios of round {place}": rung.scenarios for place, rung in enumerate(self.rungs, 1)}
        for name, value in numbers.items():
            if value < 1:
                raise PipelineError(f"{name}: {value}, must be at least 1")
        if min(self.first_seed, self.validation_seed) < 0:
            raise PipelineError(f"seeds {self.first_seed} and {self.validation_seed} must not be below 0")
        searched = range(self.first_seed, self.first_seed + self.scenarios)
        validated = range(self.validation_seed, self.validation_seed + self.validation)
        if both := set(searched) & set(validated):
            raise PipelineError(f"seeds from {min(both)} on are those of search and of validation: set them apart")

    @property
    def scenarios(self) -> int:
        """Scenarios of the search."""
        return sum(rung.scenarios for rung in self.rungs)

    @property
    def search_decisions(self) -> int:
        """Decisions that a search of one tuner takes, whichever it is."""
        return self.decisions * sum(rung.candidates * rung.scenarios for rung in self.rungs)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; all figures are differences or means of scores.

    Attributes:
        tuner: Its name.
        default: Its parameters when nothing is said.
        best: Those that were ahead of it; the same where none were.
        decisions: Decisions that were played in the search.
        default_score: Mean of the default over all scenarios of the search.
        best_score: The same of the best.
        search: Best less default over the scenarios of the last round, which chose nothing; None where it is the same.
        validation: The same over scenarios that the search never saw.
        died: Of those, how often memory ran out under default and best.
    """

    tuner: str
    default: Parameters
    best: Parameters
    decisions: int
    default_score: float
    best_score: float
    search: Estimate | None
    validation: Estimate | None
    died: tuple[int, int] | None

    @property
    def better(self) -> bool:
        """Whether the best is better than the default beyond chance; where it is not, the default stays."""
        return self.validation is not None and self.validation.low > 0


Drawn = tuple[str, int]
"""Family and seed."""


@dataclass(frozen=True, slots=True)
class _Job:
    space: Space
    parameters: Parameters
    drawn: Drawn
    decisions: int

    def head(self) -> dict[str, Any]:
        family, seed = self.drawn
        version = version_of(self.space.tuner(self.parameters, seed))
        who = {"tuner": self.space.name, "version": version, "parameters": dict(self.parameters)}
        return {**who, "family": family, "seed": seed, "decisions": self.decisions}


class Runs:
    """Runs of candidates, kept in a file of JSON lines, so that each is played once however often it is asked for.

    Args:
        path: The file; made if needed.
        jobs: Processes.

    Raises:
        SourceError: If a line of the file is no row.
        OSError: If the file cannot be read or written.
    """

    def __init__(self, path: Path, jobs: int = 1) -> None:
        make_folder(path.parent)
        mend_end(path)
        self._path, self._jobs = path, jobs
        self._rows = {_key(row): row for row in read_rows(path)} if path.exists() else {}

    def play(self, work: Sequence[_Job]) -> list[Row]:
        """The rows of these runs, in their order; those that are not in the file are played and appended to it."""
        keys = [_key(job.head()) for job in work]
        missing = {key: job for key, job in zip(keys, work, strict=True) if key not in self._rows}
        with (
            self._path.open("a", encoding="utf-8") as file,
            closing(carry_out([*missing.values()], _run, self._jobs)) as rows,
        ):
            for row in rows:
                file.write(json.dumps(row) + "\n")
                file.flush()
                self._rows[_key(row)] = row
        return [self._rows[key] for key in keys]


def search(
    space: Space,
    plan: Plan,
    runs: Runs,
    reference: Space = SPACES["model"],
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Search the parameters of a tuner, and hold what was found against its default on other scenarios.

    Args:
        space: What is searched.
        plan: How much is played.
        runs: Plays, or knows what was played before.
        reference: Whose rows, at its default, scores are relative to.
        tell: Called with a line on each round.

    Raises:
        PipelineError: If the space has fewer candidates than the plan asks for.
    """
    table = _Table(space, plan.decisions, runs, reference)
    left = space.candidates(plan.rungs[0].candidates, plan.draw)
    default, seed, scores = left[0], plan.first_seed, np.zeros((len(left), 0))
    for rung in plan.rungs:
        # A stable sort, so that of equal ones those that were drawn first stay; the default always does.
        order = [0, *(1 + np.argsort(-scores[1:].mean(axis=1), kind="stable"))] if scores.size else range(len(left))
        kept = [int(place) for place in order[: rung.candidates]]
        left = [left[place] for place in kept]
        played = table.scores(left, _scenarios(seed, rung.scenarios))
        scores = np.hstack([scores[kept], played])
        seed += rung.scenarios
        tell(f"{space.name}: {len(left)} candidates on {rung.scenarios} scenarios, ahead: {_ahead(left, scores)}")
    default_score, best_score = map(float, scores.mean(axis=1))
    if best_score <= default_score:
        none = None, None, None
        return Found(space.name, default, default, plan.search_decisions, default_score, default_score, *none)
    last = scores[:, -plan.rungs[-1].scenarios :]
    others = _scenarios(plan.validation_seed, plan.validation)
    fresh = table.scores(left, others)
    tell(f"{space.name}: validated on {plan.validation} scenarios: {_ahead(left, fresh)}")
    return Found(
        space.name,
        default,
        left[1],
        plan.search_decisions,
        default_score,
        best_score,
        estimate(last[1] - last[0], np.mean),
        estimate(fresh[1] - fresh[0], np.mean),
        table.deaths(left, others),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Scores of candidates by scenario."""

    space: Space
    decisions: int
    runs: Runs
    reference: Space

    def scores(self, candidates: Sequence[Parameters], drawn: Sequence[Drawn]) -> np.ndarray[Any, Any]:
        """float64[candidates, scenarios]."""
        reference, *rows = self._rows([(self.reference, self.reference.default), *self._of(candidates)], drawn)
        return np.array([[_score(row, by) for row, by in zip(each, reference, strict=True)] for each in rows])

    def deaths(self, candidates: Sequence[Parameters], drawn: Sequence[Drawn]) -> tuple[int, int]:
        """How often memory ran out under each of two candidates."""
        first, second = (sum(row["died"] for row in rows) for rows in self._rows(self._of(candidates), drawn))
        return first, second

    def _of(self, candidates: Sequence[Parameters]) -> list[tuple[Space, Parameters]]:
        return [(self.space, parameters) for parameters in candidates]

    def _rows(self, who: Sequence[tuple[Space, Parameters]], drawn: Sequence[Drawn]) -> list[list[Row]]:
        work = [_Job(space, parameters, each, self.decisions) for space, parameters in who for each in drawn]
        rows = self.runs.play(work)
        return [rows[first : first + len(drawn)] for first in range(0, len(rows), len(drawn))]


def _scenarios(first: int, number: int) -> list[Drawn]:
    return [(FAMILIES[place % len(FAMILIES)], first + place) for place in range(number)]


def _run(job: _Job) -> Row:
    family, seed = job.drawn
    trace = play(scenario(family, seed), job.space.tuner(job.parameters, seed), job.decisions)
    rows = sum(each.rows for each in trace.intervals)
    return {**job.head(), "rows": rows, "died": trace.died is not None, "failed": trace.tuner_failed}


def _score(row: Row, reference: Row) -> float:
    if row["died"] or row["failed"] is not None or not row["rows"]:
        return -MOST
    return max(-MOST, min(MOST, math.log(row["rows"] / max(1, reference["rows"]))))


def _ahead(left: Sequence[Parameters], scores: np.ndarray[Any, Any]) -> str:
    means = scores.mean(axis=1)
    best = int(np.argmax(means))
    return f"{means[best]:+.3f} against {means[0]:+.3f} of the default" if best else "the default"


def _key(row: Row) -> str:
    names = ("tuner", "version", "parameters", "family", "seed", "decisions")
    return json.dumps([row[name] for name in names], sort_keys=True)


def as_json(found: Found) -> dict[str, Any]:
    """The same for a file."""
    return {**asdict(found), "better": found.better}
