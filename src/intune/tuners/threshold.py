"""Thresholds on utilisation and on what waits before and behind a stage, after MindSpore's dataset autotune.

MindSpore (`minddata/dataset/engine/perf/auto_tune.cc`) looks from time to time whether the queue to the device is
filled below 75 %. If so, it goes through the parallel operators. One whose input queue is fuller than its output
queue by more than 35 points, or whose workers use more than 75 % of a CPU each, gets two more workers; it begins with
four. Where workers use less than 35 %, and the input queue is below half or the output queue fuller by 35 points, its
queue is made longer. The rules are the same here, but not the numbers: `intune.sim.search` found better ones.

There are no queues between stages here, so their fullness is read from what kept a stage from working:

* the training loop is blocked for more than `starved` of the window: the device's queue is not full enough;
* the input side is as full as the share of the window in which the stage did *not* lack input;
* the output side is as full as the share in which there was no room behind it or it was too far ahead in order.

What lengthens the queue there takes one worker away here: the constant for it is in MindSpore's source, the use of it
is not, and without it no rule of this kind ever gives anything back.
"""

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageSnapshot
from intune.tuners._rows import most_useful


class Threshold:
    """Raises stages that are slow or busy, lowers those that are idle.

    Args:
        start: Concurrency from which a stage starts that has none yet.
        step: By how much a stage is raised. It is lowered by one.
        difference: From how much fuller the input side must be than the output side, 0 to 1.
        busy: From which share of a CPU for each worker on it is raised.
        idle: Below which share it may be lowered.
        scarce: Below which fullness of the input side it is lowered then.
        starved: From which share of waiting of the training loop on anything is raised at all.
    """

    def __init__(
        self,
        *,
        start: int = 15,
        step: int = 8,
        difference: float = 0.386,
        busy: float = 0.883,
        idle: float = 0.349,
        scarce: float = 0.616,
        starved: float = 0.0581,
    ) -> None:
        if start < 1 or step < 1:
            raise PipelineError(f"start is {start} and step {step}, must be at least 1")
        self._start, self._step, self._difference = start, step, difference
        self._busy, self._idle, self._scarce, self._starved = busy, idle, scarce, starved

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """Each stage a step up, a step down, or as it is."""
        concurrency: dict[str, int | None] = {}
        reasons = {}
        for stage in snapshot.stages:
            most = most_useful(stage.info, budget)
            now = min(most, snapshot.allocation.concurrency.get(stage.name) or self._start)
            step, why = self._step_of(stage, now, snapshot) if snapshot.warm else (0, "not enough measured")
            concurrency[stage.name] = max(1, min(most, now + step))
            reasons[stage.name] = why
        return Allocation(concurrency, budget.cpus, reasons=reasons)

    def _step_of(self, stage: StageSnapshot, now: int, snapshot: Snapshot) -> tuple[int, str]:
        waits = stage.wait_share
        before = 1 - waits.get("input", 0.0)
        behind = min(1.0, waits.get("room", 0.0) + waits.get("order", 0.0))
        used = _used_share(stage, now, snapshot.window_seconds)
        said = f"input side {before:.0%} full, output side {behind:.0%}, workers use {used:.0%} of a CPU"
        if snapshot.consumer.wait_share > self._starved:
            if before - behind > self._difference:
                return self._step, f"slow: {said}"
            if used > self._busy:
                return self._step, f"busy: {said}"
        if used < self._idle and (before < self._scarce or behind - before > self._difference):
            return -1, f"idle: {said}"
        return 0, f"as before: {said}"


def _used_share(stage: StageSnapshot, workers: int, window_seconds: float) -> float:
    """CPUs that its workers use, each; by wall time where CPU time was not measured or it waits."""
    share = 1.0
    if not stage.info.waits and stage.cpu_seconds_mean is not None and stage.wall_seconds_mean:
        share = min(1.0, stage.cpu_seconds_mean / stage.wall_seconds_mean)
    return min(1.0, stage.busy_seconds * share / (workers * window_seconds)) if window_seconds > 0 else 0.0
