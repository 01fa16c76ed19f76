"""Each stage in proportion to its need, in closed form.

Let `service` of a stage be the seconds for which it occupies a place, for each row of the *source*: CPU
seconds of an item for stages on threads, wall seconds for stages in processes (a process is occupied while it
waits, too) and for stages that wait, divided by the source rows that an item stands for. At a rate of X source
rows a second a stage works on X * service items at once. All stages but those that wait share the CPUs, and no
stage passes its own limit, so the best rate is

    X = min(cpus / sum of service over the stages that compute, max_concurrency / service of each stage)

and a stage needs ceil(X * service), at least 1; it gets a margin beyond that, as costs vary. Noise must not move it
for ever: a stage that has up to twice as much as it is to get (or one more) keeps what it has, and all stay where that
reaches 93 % of X. What these shares are was searched for (`intune.sim.search`).

A stage that is not measured is left open and takes no part in X. A window that is not warm changes nothing.
Known weakness: a thread that waits now and then (for a disk, for a lock) occupies its place for longer than its
CPU seconds say.
"""

import math
from collections.abc import Mapping

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageSnapshot
from intune.tuners._rows import most_useful


class Proportional:
    """Gives each stage the concurrency that the best common rate needs.

    Args:
        keep: Share of the best rate at which a change is not worth it, above 0, at most 1.
        margin: Concurrency beyond the need, as a share of it; no more than can be of use.
        spare: Share of what a stage is to get that it may have beyond that without being lowered; one in any case.
    """

    def __init__(self, *, keep: float = 0.931, margin: float = 0.283, spare: float = 1.02) -> None:
        if not 0 < keep <= 1 or margin < 0 or spare < 0:
            raise PipelineError(
                f"keep {keep} must be above 0 and at most 1, margin {margin} and spare {spare} not below 0"
            )
        self._keep, self._margin, self._spare = keep, margin, spare

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The closed form on the figures of this window."""
        now = {stage.name: snapshot.allocation.concurrency.get(stage.name) or None for stage in snapshot.stages}
        service = {stage.name: seconds for stage in snapshot.stages if (seconds := _service(stage)) is not None}
        computing = [stage.name for stage in snapshot.stages if not stage.info.waits]
        limits = {stage.name: stage.info.max_concurrency or math.inf for stage in snapshot.stages}
        best = _rate(service, computing, limits, budget.cpus)
        if not snapshot.warm or math.isinf(best):
            reason = "as before: too little was measured in this window"
            return Allocation(now, budget.cpus, reasons=dict.fromkeys(now, reason))
        useful = {stage.name: most_useful(stage.info, budget) for stage in snapshot.stages}
        needs = {name: self._need(best * seconds, useful[name]) for name, seconds in service.items()}
        in_force = {name: now[name] or math.inf for name in needs}
        fitting = all(in_force[name] <= self._enough(need) for name, need in needs.items())
        reached = _rate(service, computing, in_force, budget.cpus)
        wanted: dict[str, int | None] = dict.fromkeys(now)
        reasons = dict.fromkeys(now, "open: not measured")
        near = f"as before: within {1 - self._keep:.0%} of the best, {best:.3g} source rows/s"
        for name, need in needs.items():
            if fitting and reached >= self._keep * best:
                wanted[name], reasons[name] = now[name], near
            else:
                wanted[name] = now[name] if need <= in_force[name] <= self._enough(need) else need
                busy = best * service[name]
                reasons[name] = f"busy on {busy:.2f} items at once at {best:.3g} source rows/s"
        return Allocation(wanted, budget.cpus, reasons=reasons)

    def _need(self, busy: float, useful: int) -> int:
        need = max(1, math.ceil(busy - 1e-9))
        return max(need, min(math.ceil(busy * (1 + self._margin) - 1e-9), useful))

    def _enough(self, need: int) -> int:
        """The most that a stage may have without being lowered."""
        return need + max(1, int(need * self._spare))


def _service(stage: StageSnapshot) -> float | None:
    """Seconds a source row, or None where a figure is missing."""
    by_wall = stage.info.waits or stage.info.executor == "process"
    seconds = stage.wall_seconds_mean if by_wall else stage.cpu_seconds_mean
    if seconds is None or not stage.source_rows_per_item:
        return None
    return seconds / stage.source_rows_per_item


def _rate(service: Mapping[str, float], computing: list[str], limits: Mapping[str, float], cpus: int) -> float:
    """Source rows a second that these limits allow; infinite where nothing takes time."""
    total = sum(service.get(name, 0.0) for name in computing)
    by_cpu = cpus / total if total else math.inf
    return min([by_cpu, *(limits[name] / seconds for name, seconds in service.items() if seconds)])
