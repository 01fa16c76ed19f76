"""Tuners run over scenarios and held against the oracle: rows of results, in a file that can be gone on with."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from intune._errors import PipelineError, SourceError
from intune._values import Tuner
from intune.control.controller import intervals as until_next
from intune.sim.families import scenario
from intune.sim.oracle import Best, Effort, oracle
from intune.sim.play import Interval, Trace, play
from intune.sim.scenario import Scenario
from intune.sim.workers import carry_out
from intune.sim.writable import make_folder
from intune.tuners import RandomMoves, make_tuner

WINDOWS = (0, 5, 10, 20, 40, 60)
"""Decisions between which rates are reported."""
MOMENTS = (5, 10, 20)
"""Decisions at which the share of the oracle is reported, over the `SPAN` intervals that follow."""
SPAN = 5
CONVERGED = 20
"""Decisions after which a tuner that still changes something is counted."""

Row = Mapping[str, Any]
Key = tuple[str, int, str, str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run.

    Attributes:
        families: Families of scenarios.
        scenarios: Scenarios of each, seeds from `first_seed` on.
        tuners: Their names, "random" included.
        decisions: Decisions of each run.
        first_seed: The first seed.
        effort: How hard the oracle is searched.
    """

    families: tuple[str, ...]
    scenarios: int
    tuners: tuple[str, ...]
    decisions: int = 60
    first_seed: int = 0
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True)
class _Job:
    family: str
    seed: int
    tuners: tuple[str, ...]


def evaluate(plan: Plan, out: Path, jobs: int = 1, done: Callable[[int, int], None] = lambda n, of: None) -> list[Row]:
    """Run what is not in a file of results yet, and append it there, a line a run.

    Oracles are kept in a folder beside the file, of the same name but for the ending ".oracle". It may be stopped at
    any time and begun again with the same file.

    Args:
        plan: What is run.
        out: File of JSON lines; made if needed. Lines of other plans stay and are not part of the result.
        jobs: Processes.
        done: Called with the scenarios that are done and how many there are.

    Returns:
        The rows of the plan, sorted: who played where, what `measure` gives, and what the tuner raised as
        `tuner_failed`, None if nothing.

    Raises:
        PipelineError: If there is no such family or tuner, or the file has the ending of the folder.
        SourceError: If a line of the file is no row.
        OSError: If file or folder cannot be read or written; found out before anything is run.
    """
    wanted = _keys(plan)
    have = {_key(row): row for row in read_rows(out)} if out.exists() else {}
    missing: dict[tuple[str, int], list[str]] = {}
    for family, seed, tuner, *_ in (key for key in wanted if key not in have):
        missing.setdefault((family, seed), []).append(tuner)
    work = [_Job(family, seed, tuple(tuners)) for (family, seed), tuners in missing.items()]
    folder = out.with_suffix(".oracle")
    if folder == out:
        raise PipelineError(f"{out}: oracles are kept in a folder of that name, so give another ending, such as .jsonl")
    make_folder(folder)
    mend_end(out)
    run = partial(_run, plan, folder)
    of = len({key[:2] for key in wanted})
    with out.open("a", encoding="utf-8") as file, closing(carry_out(work, run, jobs)) as found:
        for number, rows in enumerate(found, 1):
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            have.update((_key(row), row) for row in rows)
            done(of - len(work) + number, of)
    return [have[key] for key in wanted]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was torn when it was stopped is left out.

    Raises:
        SourceError: If another line is no JSON.
        OSError: If the file cannot be read.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise SourceError(f"{path}, line {number}: no JSON: {line[:80]!r}") from error
    return rows


def tuner_named(name: str, seed: int = 0) -> Tuner:
    """A new tuner by its name; "random" makes moves that belong to the seed.

    Raises:
        PipelineError: If there is none of that name.
    """
    return RandomMoves(seed) if name == "random" else make_tuner(name)


def version_of(tuner: Tuner) -> str:
    """The version that a tuner says it has; "1" if it says nothing."""
    return str(getattr(tuner, "version", "1"))


def measure(drawn: Scenario, trace: Trace, bests: Sequence[Best], decisions: int) -> dict[str, Any]:
    """The figures of a run; intervals after a death count as nothing.

    Returns:
        `rates`: rows a second by window of decisions; `share_<n>`: share of the oracle in the five intervals from
        decision n on; `regret`: 1 less the share over all; `died`; `cpu_seconds`; `processes`: the most;
        `peak_share`: peak of memory over the limit, None without one; `late_changes`: share of the decisions after
        the twentieth that changed something; `seconds`: simulated seconds survived.
    """
    intervals = trace.intervals
    lengths = np.array(list(itertools.islice(until_next(1.0), decisions)))
    lengths[: len(intervals)] = np.diff([0.0, *(each.seconds for each in intervals)])
    rows = np.zeros(decisions)
    rows[: len(intervals)] = [each.rows for each in intervals]
    begins = np.cumsum(lengths) - lengths
    best = np.array([_best_at(bests, begin).rows_per_second for begin in begins]) * lengths

    def share(first: int, last: int) -> float | None:
        possible = float(best[first:last].sum())
        return float(rows[first:last].sum()) / possible if possible else None

    limit = drawn.machine.memory_bytes
    over_all = share(0, decisions)
    pairs = itertools.pairwise(WINDOWS)
    return {
        "rates": {f"{a}-{b}": float(rows[a:b].sum() / lengths[a:b].sum()) for a, b in pairs if b <= decisions},
        **{f"share_{moment}": share(moment, moment + SPAN) for moment in MOMENTS if moment + SPAN <= decisions},
        "regret": None if over_all is None else 1 - over_all,
        "died": trace.died,
        "cpu_seconds": sum(each.cpu_seconds for each in intervals),
        "processes": max((each.processes for each in intervals), default=0),
        "peak_share": trace.peak_bytes / limit if limit else None,
        "late_changes": _late_changes(intervals),
        "seconds": intervals[-1].seconds if intervals else 0.0,
    }


def _best_at(bests: Sequence[Best], seconds: float) -> Best:
    return [each for each in bests if each.seconds <= seconds][-1]


def _late_changes(intervals: Sequence[Interval]) -> float | None:
    late = intervals[CONVERGED - 1 :]
    if len(late) < 2:
        return None
    pairs = list(itertools.pairwise(late))
    return sum((a.concurrency, a.slots) != (b.concurrency, b.slots) for a, b in pairs) / len(pairs)


def _run(plan: Plan, folder: Path, job: _Job) -> list[Row]:
    drawn = scenario(job.family, job.seed)
    bests = oracle(drawn, folder, plan.effort)
    rows: list[Row] = []
    for name in job.tuners:
        tuner = tuner_named(name, job.seed)
        version = version_of(tuner)
        trace = play(drawn, tuner, plan.decisions)
        head = {"family": job.family, "seed": job.seed, "tuner": name, "version": version, "decisions": plan.decisions}
        figures = measure(drawn, trace, bests, plan.decisions)
        rows.append({**head, **figures, "tuner_failed": trace.tuner_failed})
    return rows


def _keys(plan: Plan) -> list[Key]:
    for family in plan.families:
        scenario(family, plan.first_seed)  # an unknown one is told before anything is run
    versions = {name: version_of(tuner_named(name)) for name in plan.tuners}
    seeds = range(plan.first_seed, plan.first_seed + plan.scenarios)
    return [
        (family, seed, tuner, versions[tuner], plan.decisions)
        for family in plan.families
        for seed in seeds
        for tuner in plan.tuners
    ]


def _key(row: Row) -> Key:
    return row["family"], row["seed"], row["tuner"], row["version"], row["decisions"]


def mend_end(path: Path) -> None:
    """Cut off a line that was torn, so that the next one begins a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
