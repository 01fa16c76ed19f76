"""Windows as arrays: what a learned tuner computes with, for one live workload or for many simulated ones at once.

E is the number of workloads (1 for a live one), S the largest number of stages. NaN = not measured. Rates are compared
in source rows: a stage's `visits` turn its items into those.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from intune._values import CAUSES, CROWDS, Allocation, Budget, Snapshot, StageSnapshot

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class View:
    """One window of each of E workloads.

    Attributes:
        present: bool[E, S]; whether there is such a stage; stages come first, source first.
        process: bool[E, S]; it runs in processes.
        waits: bool[E, S]; its items hold no slot. What is undecided counts as not.
        gathers: bool[E, S]; it is a shuffle or batch.
        most: float[E, S]; the most items that it could ever work on at once: max_concurrency, or inf.
        asked: float[E, S]; its concurrency in the allocation in force; inf = open.
        cap: float[E, S]; what that amounts to: `asked` within slots (threads), processes that are up, and `most`.
        busy: float[E, S]; items that were in hand, on average over the window.
        items: float[E, S]; items that it finished.
        visits: float[E, S]; its items for each source row.
        wall: float[E, S]; wall seconds an item.
        crowd_items: float[E, S, K]; items by how many were worked on at once, `intune._values.CROWDS`.
        crowd_wall: float[E, S, K]; wall seconds of one of those; 0 where there was none.
        cpu: float[E, S]; CPU seconds an item.
        queue: float[E, S]; seconds of an item's wall in which it had no CPU.
        wait: float[E, S, 5]; share of the window in which it ran fewer than `cap` for want of input, order, room,
            memory, slot.
        ready: float[E, S]; processes that are up; NaN for threads.
        starting: float[E, S]; processes being started; NaN for threads.
        resident: float[E, S]; bytes of a process as a share of the memory limit; NaN for threads or without a limit.
        seconds: float[E]; length of the window.
        rate: float[E]; source rows a second that the trainer was given.
        starved: float[E]; share of the window in which the trainer was blocked.
        ready_batches: float[E]; batches that waited for it at the end.
        cpus: float[E]; slots that the budget has.
        slots: float[E]; slots in force.
        threads: float[E]; threads that the budget has.
        used: float[E]; CPUs that the process tree used on average.
        others: float[E]; CPUs that everybody else used.
        lock_wait: float[E]; mean seconds that a thread waits for the interpreter lock.
        read_rate: float[E]; bytes a second read from storage.
        memory: float[E]; used share of the memory limit; NaN without a limit.
        held_back: float[E]; share of the window in which only memory kept an item back.
        vetoed: float[E]; 1 where the last proposal was clamped or vetoed.
        changed: float[E]; 1 where the budget changed or an epoch began.
    """

    present: Bools
    process: Bools
    waits: Bools
    gathers: Bools
    most: Floats
    asked: Floats
    cap: Floats
    busy: Floats
    items: Floats
    visits: Floats
    wall: Floats
    crowd_items: Floats
    crowd_wall: Floats
    cpu: Floats
    queue: Floats
    wait: Floats
    ready: Floats
    starting: Floats
    resident: Floats
    seconds: Floats
    rate: Floats
    starved: Floats
    ready_batches: Floats
    cpus: Floats
    slots: Floats
    threads: Floats
    used: Floats
    others: Floats
    lock_wait: Floats
    read_rate: Floats
    memory: Floats
    held_back: Floats
    vetoed: Floats
    changed: Floats


def view(snapshot: Snapshot, budget: Budget) -> View:
    """A snapshot as arrays, with E = 1.

    Args:
        snapshot: The window just ended.
        budget: What holds now.
    """
    stages, seconds, machine = snapshot.stages, snapshot.window_seconds, snapshot.machine
    limit = machine.memory_limit_bytes if machine.memory_limit_bytes is not None else budget.memory_bytes
    visits = [_visits(stage) for stage in stages]
    delivered = _delivered_rows(snapshot)
    kinds = {event.kind for event in snapshot.events}

    def each(values: list[float | None]) -> Floats:
        return np.array([[np.nan if value is None else float(value) for value in values]])

    def one(value: float | None) -> Floats:
        return np.array([np.nan if value is None else float(value)])

    used, everything = machine.cpu_seconds_used, machine.cpu_seconds_all
    others = everything - used if used is not None and everything is not None else None
    per_second = 1 / seconds if seconds > 0 else 0.0
    return View(
        present=np.ones((1, len(stages)), dtype=np.bool_),
        process=np.array([[stage.info.executor == "process" for stage in stages]]),
        waits=np.array([[stage.info.waits is True for stage in stages]]),
        gathers=np.array([[stage.info.kind in ("shuffle", "batch") for stage in stages]]),
        most=each([stage.info.max_concurrency or np.inf for stage in stages]),
        asked=each([np.inf if stage.concurrency is None else stage.concurrency for stage in stages]),
        cap=each([_cap(stage, snapshot.allocation, budget, stages) for stage in stages]),
        busy=each([stage.in_hand_mean for stage in stages]),
        items=each([stage.items_out for stage in stages]),
        visits=each(visits),
        wall=each([stage.wall_seconds_mean for stage in stages]),
        crowd_items=np.array([[_by_crowd(stage, 1) for stage in stages]]),
        crowd_wall=np.array([[_by_crowd(stage, 2) for stage in stages]]),
        cpu=each([stage.cpu_seconds_mean for stage in stages]),
        queue=each([_queue(stage) for stage in stages]),
        wait=np.array([[[stage.wait_share.get(cause, 0.0) for cause in CAUSES] for stage in stages]]),
        ready=each([stage.processes_live for stage in stages]),
        starting=each([stage.processes_starting for stage in stages]),
        resident=each([_share(stage.process_resident_bytes, limit) for stage in stages]),
        seconds=one(seconds),
        rate=one(None if delivered is None else delivered * per_second),
        starved=one(snapshot.consumer.wait_share),
        ready_batches=one(snapshot.consumer.ready),
        cpus=one(budget.cpus),
        slots=one(snapshot.allocation.slots),
        threads=one(budget.max_threads),
        used=one(None if used is None else used * per_second),
        others=one(None if others is None else others * per_second),
        lock_wait=one(machine.lock_wait_seconds),
        read_rate=one(None if machine.read_bytes is None else machine.read_bytes * per_second),
        memory=one(_share(machine.memory_bytes, limit)),
        held_back=one(snapshot.held_back_share),
        vetoed=one(bool(kinds & {"clamped", "vetoed"})),
        changed=one(bool(kinds & {"budget", "epoch_start"})),
    )


def _visits(stage: StageSnapshot) -> float | None:
    return 1 / stage.source_rows_per_item if stage.source_rows_per_item else None


def _by_crowd(stage: StageSnapshot, place: int) -> list[float]:
    """One figure of each of `CROWDS`: place 1 = items, 2 = seconds."""
    found = {row[0]: float(row[place]) for row in stage.wall_seconds_by_crowd}
    return [found.get(crowd, 0.0) for crowd in CROWDS]


def _queue(stage: StageSnapshot) -> float | None:
    """Seconds an item in the run queue, from those of the window."""
    if stage.run_queue_seconds is None or stage.wall_seconds_mean is None or not stage.busy_seconds:
        return None
    return stage.wall_seconds_mean * stage.run_queue_seconds / stage.busy_seconds


def _share(size: float | None, limit: float | None) -> float | None:
    return size / limit if size is not None and limit else None


def _cap(stage: StageSnapshot, allocation: Allocation, budget: Budget, stages: tuple[StageSnapshot, ...]) -> float:
    waiting = sum(each.info.waits is True for each in stages)
    open_to = (
        max(1, (budget.max_threads - allocation.slots) // max(1, waiting)) if stage.info.waits else allocation.slots
    )
    cap = float(open_to if stage.concurrency is None else stage.concurrency)
    if not stage.info.waits:
        cap = min(cap, allocation.slots)
    if stage.info.max_concurrency is not None:
        cap = min(cap, stage.info.max_concurrency)
    return min(cap, stage.processes_live) if stage.processes_live is not None else cap


def _delivered_rows(snapshot: Snapshot) -> float | None:
    """Source rows in what the trainer was given, by what the last stage's items stand for."""
    last = snapshot.stages[-1]
    if not last.items_out or not last.source_rows_per_item:
        return 0.0 if not snapshot.consumer.steps else None
    rows_per_item = last.rows_out / last.items_out if last.rows_out else 1.0
    items = snapshot.consumer.rows / rows_per_item if rows_per_item else float(snapshot.consumer.steps)
    return items * last.source_rows_per_item
