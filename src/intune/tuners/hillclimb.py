"""What AUTOTUNE of tf.data decides, in three of its modes.

Written from the behaviour of `tensorflow/core/framework/model.cc` (2022-2023): `OptimizeHillClimb`,
`OptimizeMaxParallelism` (its default) and `OptimizeStageBased`. Each starts from a parallelism of 1 in every stage and
raises one stage by one, again and again, on a *model* of the pipeline, and applies only where it ended:

* "climb": raises the stage that lowers the modelled output latency most. It ends when that latency is below
  (sum of the stages' seconds) / CPUs, when all are at their maximum, or with the step that fills the memory budget.
* "max-parallelism": the same without the first of the three ends, so that every stage comes to its maximum, one for
  each CPU, unless memory ends it before. It over-allocates on purpose.
* "stage-based": raises the stage with the largest seconds / parallelism until that is no more than the training loop
  itself needs, the stage cannot be raised, or memory is full (then nothing changes at all).

Modelled as there: the service time of a stage is its measured wall time, assumed not to depend on parallelism; a stage
of parallelism p has a buffer of p elements before it, and waits for it as in a queue with one server, random
arrivals and p places; buffers may hold a share of the memory (p elements of mean size by stage).

Not modelled: sizes of prefetch buffers (there are no such queues here); that tf.data runs serial stages in the thread
of the next parallel one (here any stage runs beside the others); the special treatment of parallel interleave; the
doubling of its period from 10 ms to 60 s (it decides each time that it is asked).
"""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.tuners._rows import as_before, most_useful, trainer_per_row, wall_per_row

Mode = Literal["climb", "max-parallelism", "stage-based"]

STILL_A_GAIN_SECONDS = -1e-9
"""Change of the latency, a nanosecond for the worse, from which on a step still counts as one."""


class HillClimb:
    """tf.data's AUTOTUNE; see the module for what of it is modelled.

    Args:
        mode: "climb", "max-parallelism" (the default of tf.data) or "stage-based".
        newest: Weight of the newest window in the running mean of the service times, above 0, at most 1.
        memory_share: Share of the memory limit that buffers may fill; 0.5 in tf.data.
    """

    def __init__(self, mode: Mode = "max-parallelism", *, newest: float = 0.5, memory_share: float = 0.5) -> None:
        if mode not in get_args(Mode):
            raise PipelineError(f"mode {mode!r}: give one of {', '.join(map(repr, get_args(Mode)))}")
        self._mode = mode
        self._newest = newest
        self._memory_share = memory_share
        self._seconds: dict[str, float] = {}

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """Where climbing on the model ends."""
        if not snapshot.warm:
            return as_before(snapshot, budget, "too little was measured in this window")
        for stage in snapshot.stages:
            new = wall_per_row(stage)
            if new is not None:
                old = self._seconds.get(stage.name, new)
                self._seconds[stage.name] = old + self._newest * (new - old)
        stages = [stage for stage in snapshot.stages if stage.name in self._seconds]
        if not stages or not any(self._seconds[stage.name] for stage in stages):
            return as_before(snapshot, budget, "no stage takes any time")
        seconds = np.array([self._seconds[stage.name] for stage in stages])
        most = np.array([most_useful(stage.info, budget) for stage in stages])
        item_bytes = np.array([stage.item_bytes_mean or 0.0 for stage in stages])
        room = math.inf if budget.memory_bytes is None else budget.memory_bytes * self._memory_share
        if self._mode == "stage-based":
            found = _stage_based(seconds, most, item_bytes, room, trainer_per_row(snapshot) or 0.0)
        else:
            # Latency can be no less than 0, so that a goal of 0 is never passed.
            goal = seconds.sum() / budget.cpus if self._mode == "climb" else 0.0
            found = _climb(seconds, most, item_bytes, room, goal)
        if found is None:
            return as_before(snapshot, budget, "buffers would fill their share of the memory")
        return self._allocation(snapshot, budget, {stage.name: int(p) for stage, p in zip(stages, found, strict=True)})

    def _allocation(self, snapshot: Snapshot, budget: Budget, found: Mapping[str, int]) -> Allocation:
        concurrency: dict[str, int | None] = {stage.name: found.get(stage.name) for stage in snapshot.stages}
        reasons = dict.fromkeys(concurrency, "open: not measured")
        for name, parallelism in found.items():
            seconds = self._seconds[name]
            reasons[name] = f"{self._mode}: {seconds * 1e3:.3g} ms a source row / {parallelism}"
        return Allocation(concurrency, budget.cpus, reasons=reasons)


def latency(seconds: NDArray[np.float64], parallelism: NDArray[np.int64]) -> NDArray[np.float64]:
    """Modelled seconds from asking for a source row to having it, of a consumer that asks at once again.

    Each stage hands over after its own time, seconds / parallelism, and after waiting for the stages before it: their
    output time times the probability that its buffer is empty, in a queue of one server with `parallelism` places.

    Args:
        seconds: Service time of each stage a source row, float64[stages], the source first.
        parallelism: int64[..., stages].

    Returns:
        float64[...].
    """
    own = seconds / parallelism
    used_behind = np.cumsum(own[..., ::-1], axis=-1)[..., ::-1]
    output = own[..., 0]
    for place in range(1, seconds.size):
        empty = _probability_empty(output, used_behind[..., place], parallelism[..., place])
        output = own[..., place] + empty * output
    return np.asarray(output)


def _probability_empty(
    producer: NDArray[np.float64], consumer: NDArray[np.float64], places: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Of a buffer that is filled every `producer` seconds and emptied every `consumer` seconds."""
    # (1 - r) / (1 - r ** (places + 1)) with r = consumer / producer; by powers of 1 / r where r is above 1, so that
    # none overflows, and 1 / (places + 1) where r is 1.
    slow = consumer > producer
    with np.errstate(all="ignore"):  # both branches are computed everywhere
        ratio = np.where(slow, producer / consumer, consumer / producer)
        ratio = np.nan_to_num(ratio, nan=1.0)
        whole = np.where(ratio == 1, places + 1, (1 - ratio ** (places + 1)) / (1 - ratio))
        return np.asarray(np.where(slow, ratio**places, 1.0) / whole)


def _climb(
    seconds: NDArray[np.float64], most: NDArray[np.int64], item_bytes: NDArray[np.float64], room: float, goal: float
) -> NDArray[np.int64]:
    parallelism = np.ones_like(most)
    if goal <= 0 and float(most @ item_bytes) <= room:
        return most  # every path ends there
    now = float(latency(seconds, parallelism))
    while now >= goal and float(parallelism @ item_bytes) <= room:
        may_rise = np.flatnonzero(parallelism < most)
        if not may_rise.size:
            break
        tried = np.tile(parallelism, (may_rise.size, 1))
        tried[np.arange(may_rise.size), may_rise] += 1
        after = latency(seconds, tried)
        best = int(np.argmin(after))
        if now - float(after[best]) <= STILL_A_GAIN_SECONDS:
            break
        parallelism, now = tried[best], float(after[best])
    return parallelism


def _stage_based(
    seconds: NDArray[np.float64], most: NDArray[np.int64], item_bytes: NDArray[np.float64], room: float, goal: float
) -> NDArray[np.int64] | None:
    parallelism = np.ones_like(most)
    while True:
        slowest = int(np.argmax(seconds / parallelism))
        if seconds[slowest] / parallelism[slowest] <= goal or parallelism[slowest] >= most[slowest]:
            return parallelism
        parallelism[slowest] += 1
        if float(parallelism @ item_bytes) > room:
            return None
