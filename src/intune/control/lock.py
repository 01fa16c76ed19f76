"""Whether the interpreter lock limits a run, which stage holds it, and what processes would gain.

Only one thread of a process runs Python code at a time. Three figures together show that this is what limits:

* The probe waits for the lock clearly longer than where it is free. Code that lets go of it (numpy, Arrow) leaves
  the probe alone, however busy it is.
* The threads get no more done than one CPU could do, though they may use several. Either they queue between two
  items, so that their working time itself sums to about one CPU (many short items), or within them, so that a large
  part of it is lost: neither run nor spent waiting for a CPU (long items).
* That one CPU's worth is there nearly all the time: else something else holds the run back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from intune._values import Snapshot, StageSnapshot

FREE_SECONDS = 2e-4
"""What a thread waits for the lock where no Python code runs: the precision of timers."""

IN_USE_SECONDS = 3e-4
"""From such a wait on, Python code holds the lock for part of the time. Code in short pieces adds little to it."""

HELD_SECONDS = 2e-3
"""From such a wait on, threads that compute in Python do not let go of it before they must, after 5 ms."""

SERIAL_MOST, SERIAL_LEAST = 1.15, 0.7
"""CPUs' worth of work on threads that looks like one thread at a time, nearly all the time."""

COMPUTES_SHARE = 0.75
"""Share of that work that must be CPU time."""

HANDED_LEAST = 0.3
"""The least part of it that the stages themselves must be; the rest is handing tiny items over."""

LOST_SHARE = 0.3
"""Share of their working time that threads neither ran nor waited for a CPU, from which the lock is to blame."""

WORTH_SENDING_SECONDS = 1e-5
"""An item that takes less CPU costs about as much to send to a process and back."""

NOTABLE_SHARE = 0.15
"""Share of the threads' CPU seconds from which a stage is worth moving."""

GAIN_LEAST = 1.2
"""From such a factor on processes are advised."""

MOVABLE = frozenset({"map", "map_rows", "filter", "flat_map"})
"""Kinds of stages that may run in processes."""


@dataclass(frozen=True, slots=True)
class LockBound:
    """A run that the interpreter lock limits.

    Attributes:
        stage: The stage that holds the lock most.
        share: Its share of the CPU seconds of all stages on threads.
        threads_cpus: CPUs' worth of work that all stages on threads got done.
        cpus: CPUs that they might have used.
        wait_seconds: Mean wait for the lock.
        move: The stages to move to processes; empty where that would gain little.
        gain: How many times as fast that would be at most; 1 where nothing is to be moved.
        processes: As many as are busy then, by stage to move.
        too_small: Whether the stage could be moved but for its items, which are too small to send.
    """

    stage: StageSnapshot
    share: float
    threads_cpus: float
    cpus: int
    wait_seconds: float
    move: tuple[str, ...]
    gain: float
    processes: Mapping[str, int]
    too_small: bool


def lock_bound(snapshot: Snapshot) -> LockBound | None:
    """What the lock does to the run in this window; None where it is not what limits it, or cannot be told."""
    threads = [stage for stage in snapshot.stages if stage.info.executor == "thread" and not stage.info.waits]
    wait, seconds = snapshot.machine.lock_wait_seconds, snapshot.window_seconds
    cpus = min(snapshot.allocation.slots, snapshot.machine.cpus)
    if wait is None or wait < IN_USE_SECONDS or cpus < 2 or seconds <= 0:
        return None
    computed = sum(map(cpu_seconds, threads)) / seconds
    if not computed or not (_queue_between_items(snapshot, threads) or _queue_within(snapshot, threads, wait)):
        return None
    # One that used more than a CPU cannot have held the lock meanwhile.
    in_turn = [stage for stage in threads if cpu_seconds(stage) <= SERIAL_MOST * seconds] or threads
    worst = max(in_turn, key=cpu_seconds)
    notable = [
        stage
        for stage in threads
        if stage.info.kind in MOVABLE and cpu_seconds(stage) >= NOTABLE_SHARE * computed * seconds
    ]
    move = [stage for stage in notable if (stage.cpu_seconds_mean or 0.0) >= WORTH_SENDING_SECONDS]
    gain = _gain(snapshot, move, computed, cpus)
    if gain < GAIN_LEAST:
        move, gain = [], 1.0
    share = cpu_seconds(worst) / (computed * seconds)
    too_small = not move and worst in notable and (worst.cpu_seconds_mean or 0.0) < WORTH_SENDING_SECONDS
    processes = {stage.name: max(1, math.ceil(gain * cpu_seconds(stage) / seconds - 0.1)) for stage in move}
    return LockBound(worst, share, computed, cpus, wait, tuple(processes), gain, processes, too_small)


def cpu_seconds(stage: StageSnapshot) -> float:
    """CPU seconds that its items took in the window; 0 where they were not measured."""
    if stage.cpu_seconds_mean is None or not stage.wall_seconds_mean:
        return 0.0
    return stage.busy_seconds * min(1.0, stage.cpu_seconds_mean / stage.wall_seconds_mean)


def lost_seconds(stage: StageSnapshot) -> float:
    """Working time in which its threads neither ran nor waited for a CPU; 0 where that was not measured."""
    if stage.cpu_seconds_mean is None or not stage.wall_seconds_mean:
        return 0.0
    return max(0.0, stage.busy_seconds - cpu_seconds(stage) - (stage.run_queue_seconds or 0.0))


def own_cpus(snapshot: Snapshot) -> float | None:
    """CPUs that this process used, its worker processes left out; None where that was not measured."""
    if snapshot.machine.cpu_seconds_used is None or snapshot.window_seconds <= 0:
        return None
    workers = sum(cpu_seconds(stage) for stage in snapshot.stages if stage.info.executor == "process")
    return max(0.0, snapshot.machine.cpu_seconds_used - workers) / snapshot.window_seconds


def _queue_between_items(snapshot: Snapshot, threads: list[StageSnapshot]) -> bool:
    """Whether the stages on threads work one at a time, nearly all the time, and compute then.

    Where they wait for a CPU instead, a machine that others use makes numpy look the same.
    """
    busy = sum(stage.busy_seconds for stage in threads)
    serial = busy <= SERIAL_MOST * snapshot.window_seconds
    return serial and sum(map(cpu_seconds, threads)) >= COMPUTES_SHARE * busy and _one_computes(snapshot, busy)


def _queue_within(snapshot: Snapshot, threads: list[StageSnapshot], wait: float) -> bool:
    """Whether the stages on threads lose much of their working time while one of them computes."""
    busy, lost = sum(stage.busy_seconds for stage in threads), sum(map(lost_seconds, threads))
    return wait >= HELD_SECONDS and lost >= LOST_SHARE * busy and _one_computes(snapshot, busy - lost)


def _one_computes(snapshot: Snapshot, working: float) -> bool:
    """Whether one CPU's worth of work is done nearly all the time.

    Where items are tiny, handing them over is much of it, which only the CPU time of the whole process shows. That
    says something where the process as a whole never ran more than one thread; the trainer's part is taken off.
    """
    if working >= SERIAL_LEAST * snapshot.window_seconds:
        return True
    own = own_cpus(snapshot)
    if own is None or own > SERIAL_MOST or working < HANDED_LEAST * snapshot.window_seconds:
        return False
    return own - max(0.0, 1 - snapshot.consumer.wait_share) >= SERIAL_LEAST


def _gain(snapshot: Snapshot, move: list[StageSnapshot], computed: float, cpus: int) -> float:
    """How many times as fast the run would be at most.

    What stays on threads still takes turns, a stage works on so many items at once as it may, all share the CPUs,
    and the trainer needs its time.

    Args:
        snapshot: The window.
        move: The stages that would go to processes.
        computed: CPUs' worth of work of all stages on threads.
        cpus: CPUs that may be used.
    """
    seconds = snapshot.window_seconds
    now = max(computed, own_cpus(snapshot) or 0.0)
    stays = now - sum(map(cpu_seconds, move)) / seconds
    used = max(now, (snapshot.machine.cpu_seconds_used or 0.0) / seconds)
    slowest = max((cpu_seconds(stage) / seconds / (stage.info.max_concurrency or cpus) for stage in move), default=now)
    trains = max(1 / cpus, 1 - snapshot.consumer.wait_share)
    took = min(now, 1.0)  # what lets go of the lock went on beside the rest
    return min(took / max(min(stays, 1.0), used / cpus, slowest), 1 / trains)
