"""What is around the stages, from windows: the machine, the training loop, other programs, the interpreter lock."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from intune._values import Snapshot
from intune.sim.scenario import Change, SimMachine, SimTrainer
from intune.sim.seen import Window
from intune.tuners._beliefs import Beliefs, computes_on_threads, lock_contention

LEAST_OWN = 0.02
"""Share of the time that the training loop takes itself below which it takes none."""

LEAST_QUEUE = 0.03
"""Share of work that waited for a CPU below which other programs do not matter."""

LEAST_HELD = 0.05
"""Share of a window in which the interpreter lock is held below which nothing is learnt of who holds it."""


def machine(windows: Sequence[Window], devices: Mapping[str, float]) -> SimMachine:
    """Its CPUs and limits, and devices that some stage takes turns for."""
    budget = windows[-1].budget
    fields: dict[str, Any] = dict(devices)
    held = sum(
        (stage.process_resident_bytes or 0) * (stage.processes_live or 0) for stage in windows[-1].snapshot.stages
    )
    rest = [window.snapshot.rest_bytes for window in windows if window.snapshot.rest_bytes is not None]
    if rest:
        fields["baseline_bytes"] = max(0.0, float(np.median(rest)) - held)
    limit = budget.memory_bytes
    if limit is not None and rest and limit > 1.05 * fields["baseline_bytes"]:
        fields["memory_bytes"] = float(limit)
    slots = max(window.snapshot.allocation.slots for window in windows)
    return SimMachine(cpus=slots, max_threads=budget.max_threads, max_processes=budget.max_processes, **fields)


def trainer(windows: Sequence[Window], batches: float) -> SimTrainer:
    """What the training loop takes itself, for a step of the simulation that so many batches are."""
    seconds = sum(window.snapshot.window_seconds for window in windows)
    steps = sum(window.snapshot.consumer.steps for window in windows)
    own = sum(w.snapshot.window_seconds * (1 - w.snapshot.consumer.wait_share) for w in windows)
    if not steps or own < LEAST_OWN * seconds:
        return SimTrainer()
    used = sum(window.snapshot.machine.cpu_seconds_used or 0.0 for window in windows)
    used -= sum(
        (stage.cpu_seconds_mean or 0.0) * sum(items for _, items, _ in stage.wall_seconds_by_crowd)
        for window in windows
        for stage in window.snapshot.stages
    )
    threads = max(1, math.ceil(used / own - 0.5))
    cpu = min(own, max(0.0, used) / threads)
    waited = cpu / (1 - _queued_share(windows))  # its threads wait for CPUs as others do
    return SimTrainer(
        device_seconds=max(0.0, own - waited) / steps * batches, cpu_seconds=cpu / steps * batches, threads=threads
    )


def neighbours(windows: Sequence[Window], cpus: int) -> tuple[Change, ...]:
    """Other programs that took CPUs for which work had to wait."""
    share = _queued_share(windows)
    known = [w.snapshot for w in windows if w.snapshot.machine.cpu_seconds_all is not None]
    seconds = sum(each.window_seconds for each in known)
    used = sum(each.machine.cpu_seconds_used or 0.0 for each in known)
    others = sum(each.machine.cpu_seconds_all or 0.0 for each in known) - used
    if share < LEAST_QUEUE or others <= 0:
        return ()
    threads = min(others, max(0.0, cpus * seconds - used)) / seconds / (1 - share)
    return (Change(0.0, "neighbours", threads),) if threads > 0 else ()


def lock_shares(windows: Sequence[Window]) -> dict[str, float]:
    """By stage, the share of its CPU time in which it holds the interpreter lock, as far as that showed."""
    beliefs = Beliefs(0.97, 0.05, 1)
    for snapshot, *_ in windows:
        if contention(snapshot) >= LEAST_HELD:
            beliefs.learn(snapshot)
    return {
        name: belief.lock_share
        for name, belief in beliefs.stages.items()
        if belief.lock_share is not None and computes_on_threads(belief.info)
    }


def contention(snapshot: Snapshot) -> float:
    """Share of the window in which the interpreter lock was held: a process that hardly computes cannot hold it.

    Where it seems so all the same, other programs kept the probe from its CPU.
    """
    used = snapshot.machine.cpu_seconds_used
    most = 1.0 if used is None else min(1.0, used / snapshot.window_seconds)
    return min(most, lock_contention(snapshot))


def _queued_share(windows: Sequence[Window]) -> float:
    """Share of the time of work in which it waited for a CPU."""
    seen = [stage for window in windows for stage in window.snapshot.stages if stage.run_queue_seconds is not None]
    busy = sum(stage.busy_seconds for stage in seen)
    return min(0.9, sum(stage.run_queue_seconds or 0.0 for stage in seen) / busy) if busy else 0.0
