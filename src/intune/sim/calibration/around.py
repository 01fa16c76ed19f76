"""What is around the stages, from windows: the machine, the training loop, other programs, the interpreter lock."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from intune._values import Snapshot
from intune.sim.calibration.seen import Window
from intune.sim.scenario import SimMachine, SimTrainer
from intune.tuners._beliefs import Beliefs, computes_on_threads, lock_contention

LEAST_OWN = 0.02
"""Share of the time that the training loop takes itself below which it takes none."""

LEAST_OTHERS = 0.05
"""Threads of other programs below which they do not matter."""

BUSY = 0.85
"""Share of the most that was ever used here from which on a window is one in which most was wanted."""

WANTS = 0.4
"""Share of the CPUs that must be used here to tell of others where no thread was seen waiting for one."""

LEAST_WINDOWS = 5

LONG_CPU = 3e-4
"""CPU seconds of an item from which on its time in the run queue tells of CPUs that are short, and not of waking up."""

LEAST_HELD = 0.05
"""Share of a window in which the interpreter lock is held below which nothing is learnt of who holds it."""


def machine(windows: Sequence[Window]) -> SimMachine:
    """Its CPUs and limits."""
    budget = windows[-1].budget
    fields: dict[str, Any] = {}
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


def trainer(windows: Sequence[Window], batches: float, neighbours: float) -> SimTrainer:
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
    queued = statistics.median(queued_share(window.snapshot, neighbours) for window in windows)
    waited = cpu / (1 - queued)  # its threads wait for CPUs as others do
    return SimTrainer(
        device_seconds=max(0.0, own - waited) / steps * batches, cpu_seconds=cpu / steps * batches, threads=threads
    )


def neighbours(windows: Sequence[Window]) -> tuple[float, float, float]:
    """Threads of other programs that work here had to share CPUs with; 0 where none were in its way.

    That others use CPUs which nobody else wants is no harm, and a program of low priority gives way. So it is taken
    from how long work here waited for a CPU: R threads here and N of others on C CPUs do for 1 - C / (R + N) of their
    time. Windows in which most was wanted here and the others are asked apart, and those that tell of fewer are
    believed.

    Returns:
        Lower quartile, median and upper quartile over windows.
    """
    told = [each for each in (_others(window.snapshot) for window in windows) if each is not None]
    most = max((used for used, _ in told), default=0.0)
    busy = [others for used, others in told if used >= BUSY * most]
    rest = [others for used, others in told if used < BUSY * most]
    quartiles = [np.quantile(group, (0.25, 0.5, 0.75)) for group in (busy, rest) if len(group) >= LEAST_WINDOWS]
    low, middle, high = min(quartiles, key=lambda each: float(each[1]), default=(0.0, 0.0, 0.0))
    return (float(low), float(middle), float(high)) if middle >= LEAST_OTHERS else (0.0, 0.0, 0.0)


def _others(snapshot: Snapshot) -> tuple[float, float] | None:
    """(CPUs used here, threads of others) in a window; None where it does not tell."""
    machine, seconds, queued = snapshot.machine, snapshot.window_seconds, _queued_share(snapshot)
    if machine.cpu_seconds_used is None or machine.cpu_seconds_all is None:
        return None
    used = machine.cpu_seconds_used / seconds
    if queued is None and used < WANTS * machine.cpus:
        return None
    ran = 1 - (queued or 0.0)
    taken = max(0.0, machine.cpu_seconds_all / seconds - used) / ran
    return used, min(taken, max(0.0, machine.cpus / ran - max(1.0, used / ran)))


def queued_share(snapshot: Snapshot, neighbours: float) -> float:
    """Of the time in which work could run, the share for which it waits for a CPU, by how much of it there was.

    It is what the simulator adds by itself; what was measured beyond that, such as the time to be woken up on a machine
    that has idle CPUs, belongs to the work.

    Args:
        snapshot: A window.
        neighbours: Threads of others.
    """
    machine, measured = snapshot.machine, _queued_share(snapshot)
    if machine.cpu_seconds_used is None:
        return measured or 0.0
    ours = machine.cpu_seconds_used / snapshot.window_seconds
    if measured is None:
        computing = [stage for stage in snapshot.stages if not stage.info.waits]
        ours = max(ours, sum(stage.busy_seconds for stage in computing) / snapshot.window_seconds)
    else:
        ours /= 1 - measured
    return min(0.9, max(0.0, 1 - machine.cpus / max(ours + neighbours, 1e-9)))


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


def _queued_share(snapshot: Snapshot) -> float | None:
    """The same as it was measured, of threads that compute for long enough; None = there were none."""
    queued = ran = 0.0
    for stage in snapshot.stages:
        cpu = stage.cpu_seconds_mean
        if stage.run_queue_seconds is not None and cpu is not None and cpu >= LONG_CPU:
            queued += stage.run_queue_seconds
            ran += cpu * sum(items for _, items, _ in stage.wall_seconds_by_crowd)
    return min(0.9, queued / (queued + ran)) if ran else None
