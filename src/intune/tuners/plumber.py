"""Rates by resource accounting and a linear program, after Plumber (Kuchnik et al., MLSys 2022).

Plumber traces how many CPU seconds of each stage one element of the output costs, divides the cores so that the common
rate is largest, and says what holds it down. With `c` CPU seconds a source row (of a stage that waits: wall seconds)
and `b` bytes read a source row, the program over the rate X and the cores `t` of each stage is

    maximise X   subject to   X c <= t <= limit of the stage,   sum of t over the stages that compute <= CPUs,
                              X b <= bandwidth of the disk (if it is known)

The fractions of cores are rounded to whole ones. As in Plumber a stage's cost is taken not to depend on its
concurrency. Left out of Plumber are its advice on caches, its prefetch buffers, and its measurement of the disk: the
bandwidth is an option here, as windows show what was read but not what could have been.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageSnapshot
from intune.tuners._rows import as_before, cpu_per_row, most_useful, rows_finished, wall_per_row, whole


class Plumber:
    """Divides the CPUs by a linear program, each time or now and then.

    Args:
        every: Decisions from one solution to the next; what was found stays in between. A change of the budget
            is answered at once.
        rounding: Of fractions of a core: "nearest" or "up"; at least 1 in any case.
        disk_bytes_per_second: What the disk can read; None = not known, no constraint.

    Raises:
        PipelineError: If scipy is not installed, or an argument is not allowed.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        rounding: Literal["nearest", "up"] = "up",
        disk_bytes_per_second: float | None = None,
    ) -> None:
        if every < 1:
            raise PipelineError(f"every is {every}, must be at least 1")
        if rounding not in ("nearest", "up"):
            raise PipelineError(f"rounding {rounding!r}: give 'nearest' or 'up'")
        _solver()  # to fail here and not while training
        self._every = every
        self._nearest = rounding == "nearest"
        self._disk = disk_bytes_per_second
        self._plan: Allocation | None = None
        self._planned_for: Budget | None = None
        self._age = 0

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The rounded solution of the program, or the one of up to `every` decisions ago."""
        self._age += 1
        if self._plan is not None and self._planned_for == budget and self._age < self._every:
            return self._plan
        if not snapshot.warm:
            return as_before(snapshot, budget, "too little was measured in this window")
        costs = {stage.name: cost for stage in snapshot.stages if (cost := _cost(stage)) is not None}
        if not any(costs.values()):
            return as_before(snapshot, budget, "no stage takes any time")
        rate, cores = self._solve(snapshot, budget, costs)
        if rate <= 0:
            return as_before(snapshot, budget, "the linear program has no solution for these figures")
        concurrency: dict[str, int | None] = dict.fromkeys(stage.name for stage in snapshot.stages)
        reasons = dict.fromkeys(concurrency, "open: not measured")
        for stage in snapshot.stages:
            if (share := cores.get(stage.name)) is not None:
                most = most_useful(stage.info, budget)
                concurrency[stage.name] = whole(round(share) if self._nearest else share, most)
                reasons[stage.name] = f"{share:.2f} cores for {rate:.3g} source rows/s"
        self._plan, self._planned_for, self._age = Allocation(concurrency, budget.cpus, reasons=reasons), budget, 0
        return self._plan

    def _solve(
        self, snapshot: Snapshot, budget: Budget, costs: Mapping[str, float]
    ) -> tuple[float, Mapping[str, float]]:
        """Source rows a second, and cores by stage; a rate of 0 where there is no solution."""
        measured = [stage for stage in snapshot.stages if stage.name in costs]
        # In units in which all costs together are 1, so that the solver sees numbers of usual size.
        total = sum(costs.values())
        cost = np.array([costs[stage.name] / total for stage in measured])
        above = np.column_stack([cost, -np.eye(len(measured))])
        cpu = np.array([0.0, *(not stage.info.waits for stage in measured)])
        rows, bounds = [*above, cpu], [*np.zeros(len(measured)), float(budget.cpus)]
        if self._disk is not None and (read := _read_per_row(snapshot)) is not None:
            rows.append(np.array([read / total, *np.zeros(len(measured))]))
            bounds.append(self._disk)
        # Any cores above X c are as good for X, so a little is taken off for each: none are given for nothing.
        objective = np.array([-1.0, *np.full(len(measured), 1e-6)])
        most = [(0, most_useful(stage.info, budget)) for stage in measured]
        found = _solver()(
            objective, A_ub=np.array(rows), b_ub=np.array(bounds), bounds=[(0, None), *most], method="highs"
        )
        if not found.success:
            return 0.0, {}
        return float(found.x[0]) / total, {stage.name: float(t) for stage, t in zip(measured, found.x[1:], strict=True)}


def _cost(stage: StageSnapshot) -> float | None:
    """Seconds a source row of the resource that it needs: a core, or for one that waits a thread."""
    return wall_per_row(stage) if stage.info.waits else cpu_per_row(stage)


def _read_per_row(snapshot: Snapshot) -> float | None:
    rows = rows_finished(snapshot.stages[0])
    return None if not rows or snapshot.machine.read_bytes is None else snapshot.machine.read_bytes / rows


def _solver() -> Callable[..., Any]:
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise PipelineError("the tuner 'plumber' needs scipy: pip install 'intune[sim]'") from error
    found: Callable[..., Any] = linprog
    return found
