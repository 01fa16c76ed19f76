"""In plain words: what limits a run now, and what it is doing.

The rule: a trainer that hardly waits is the limit itself. Otherwise start at the stage nearest to it and go
towards the source for as long as the stage mainly lacks input, as the one before is slower then. The stage
where this ends is the narrow one, and what it mainly lacks (or that it lacks nothing) names the limit. If that
is no limit of the stage's own and the slots are busy nearly all the time, then CPUs are the limit, or the
interpreter lock, and the stage that uses most of them is named.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from intune._values import CAUSES, Cause, Snapshot, StageSnapshot

Kind = Literal["trainer", "paused", "cpu", "lock", "concurrency", "waits", "memory", "order", "source", "unknown"]

TRAINER_WAITS_LITTLE = 0.05
"""Share of the window in which the trainer may wait for data and still be the limit."""

LOCK_WAIT_SECONDS = 0.002
"""A thread alone waits some 0.1 ms for the interpreter lock, beside one that computes in Python 5 ms."""

LOCK_LOST_SHARE = 0.3
"""Share of its working time that a thread neither ran nor waited for a CPU, from which the lock is to blame."""

SLOTS_BUSY_SHARE = 0.85
"""Share of the slots' time in use from which they count as busy all the time."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a run.

    Attributes:
        kind: "trainer" takes what it gets at once; "paused": a user paused a stage; "cpu": no free slot; "lock":
            threads wait for the interpreter lock; "concurrency": a stage that computes works at its limit;
            "waits": one that waits does; "memory": items are not admitted; "order": a slow item holds the
            others back; "source": it has no more input; "unknown": nothing stands out, or nothing
            was measured.
        stage: The stage that it shows in; None where it is none.
        sentence: The same in words and figures.
    """

    kind: Kind
    stage: str | None
    sentence: str


def limit(snapshot: Snapshot) -> Limit:
    """What limits the run in this window."""
    consumer = snapshot.consumer
    if consumer.wait_share < TRAINER_WAITS_LITTLE and (consumer.steps or consumer.ready):
        return Limit(
            "trainer",
            None,
            f"The trainer is the limit: it waited for data {_share(consumer.wait_share)} of the time, "
            f"and {_count(consumer.ready, 'batch', 'batches')} lay ready.",
        )
    for stage in snapshot.stages:
        if stage.concurrency == 0:
            return Limit("paused", stage.name, f"Stage {stage.name} is paused by the user.")
    found = _narrow(snapshot)
    narrow = _judge(snapshot, *found) if found is not None else None
    if narrow is not None and narrow.kind in ("concurrency", "waits", "memory"):
        return narrow
    return _busy_slots(snapshot) or narrow or Limit("unknown", None, "Nothing was measured in this window yet.")


def _busy_slots(snapshot: Snapshot) -> Limit | None:
    """CPU as the limit, or the interpreter lock, where the slots were busy nearly all the time."""
    stages = [stage for stage in snapshot.stages if not stage.info.waits]
    busy, most = sum(stage.busy_seconds for stage in stages), snapshot.allocation.slots * snapshot.window_seconds
    if not stages or most <= 0 or busy < SLOTS_BUSY_SHARE * most:
        return None
    if locked := _locked(snapshot):
        return locked
    worst = max(stages, key=lambda stage: stage.busy_seconds)
    if worst.info.executor == "thread" and _lost_seconds(worst) > 0.7 * worst.busy_seconds:
        sentence = (
            f"Stage {worst.name} is the limit: it holds {_share(worst.busy_seconds / most)} of the slots' time but "
        )
        return Limit("waits", worst.name, f"{sentence}hardly computes; waits=True would let it wait without a slot.")
    share = f"and stage {worst.name} takes {_share(worst.busy_seconds / busy)} of that"
    return Limit("cpu", worst.name, f"CPU is the limit: all slots are busy, {share}{_cpu_figures(snapshot)}.")


def explain(snapshot: Snapshot) -> str:
    """Several lines: what limits the run, then trainer, stages, memory and events of the window, with figures."""
    return "\n".join([limit(snapshot).sentence, *_details(snapshot)])


def _narrow(snapshot: Snapshot) -> tuple[StageSnapshot, Cause | None] | None:
    """The stage where going towards the source ends, and what it mainly lacked; None = nothing."""
    for stage in reversed(snapshot.stages):
        if not stage.wait_share and not stage.items_in and not stage.running:
            return None
        cause = _main_cause(stage)
        if cause != "input" or stage is snapshot.stages[0]:
            return stage, cause
    return None


def _main_cause(stage: StageSnapshot) -> Cause | None:
    cause = max(CAUSES, key=lambda cause: stage.wait_share.get(cause, 0.0))
    full = 1 - sum(stage.wait_share.values())
    return None if full >= stage.wait_share.get(cause, 0.0) else cause


def _judge(snapshot: Snapshot, stage: StageSnapshot, cause: Cause | None) -> Limit:
    if cause == "memory":
        return Limit("memory", stage.name, _memory_sentence(snapshot, stage))
    if cause in ("order", "room"):
        return Limit("order", stage.name, _order_sentence(snapshot, stage, cause))
    if cause == "input":
        return Limit("source", stage.name, f"The source {stage.name} has nothing more to read.")
    if locked := _locked(snapshot):
        return locked
    if cause == "slot":
        waited = f"stage {stage.name} waited for one {_share(stage.wait_share['slot'])} of the time"
        return Limit("cpu", stage.name, f"CPU is the limit: {waited}{_cpu_figures(snapshot)}.")
    return _at_its_limit(snapshot, stage)


def _at_its_limit(snapshot: Snapshot, stage: StageSnapshot) -> Limit:
    if stage.info.waits:
        at = "as many as threads allow" if stage.concurrency is None else f"all {stage.concurrency} that it may have"
        sentence = f"Stage {stage.name} is the limit: it waits for something outside, with {at} under way"
        return Limit("waits", stage.name, f"{sentence}{_seconds_an_item(stage)}.")
    if stage.concurrency is None and stage.info.max_concurrency is None and stage.info.executor == "thread":
        sentence = f"CPU is the limit: stage {stage.name} fills all slots{_cpu_figures(snapshot)}."
        return Limit("cpu", stage.name, sentence)
    most = stage.info.max_concurrency
    at = f"{stage.concurrency} at once" if stage.concurrency is not None else "as many at once as it may"
    own = f"; its max_concurrency is {most}" if most is not None else ""
    sentence = f"Stage {stage.name} is the limit: it works on {at} nearly all the time{own}{_seconds_an_item(stage)}."
    return Limit("concurrency", stage.name, sentence)


def _locked(snapshot: Snapshot) -> Limit | None:
    """The interpreter lock as the limit, shown in the stage that loses most time to it, if it is that."""
    wait = snapshot.machine.lock_wait_seconds
    if wait is None or wait < LOCK_WAIT_SECONDS:
        return None
    threads = [stage for stage in snapshot.stages if stage.info.executor == "thread" and not stage.info.waits]
    lost = {stage.name: (_lost_seconds(stage), stage.busy_seconds) for stage in threads}
    busy = sum(seconds for _, seconds in lost.values())
    if not busy or sum(seconds for seconds, _ in lost.values()) / busy < LOCK_LOST_SHARE:
        return None
    worst = max(threads, key=lambda stage: lost[stage.name][0])
    share = _share(lost[worst.name][0] / worst.busy_seconds)
    sentence = (
        f"The interpreter lock is the limit: a thread waits {_time(wait)} for it, and stage {worst.name} loses "
        f'{share} of its working time so; executor="process" would avoid that.'
    )
    return Limit("lock", worst.name, sentence)


def _lost_seconds(stage: StageSnapshot) -> float:
    """Working time in which its threads neither ran nor waited for a CPU."""
    if stage.cpu_seconds_mean is None or not stage.wall_seconds_mean:
        return 0.0
    off_cpu = stage.busy_seconds * (1 - stage.cpu_seconds_mean / stage.wall_seconds_mean)
    return max(0.0, off_cpu - (stage.run_queue_seconds or 0.0))


def _cpu_figures(snapshot: Snapshot) -> str:
    machine, slots, seconds = snapshot.machine, snapshot.allocation.slots, snapshot.window_seconds
    parts = [f"{_count(slots, 'slot', 'slots')} of {_count(machine.cpus, 'CPU', 'CPUs')}"]
    if machine.cpu_seconds_used is not None and seconds > 0:
        parts.append(f"{machine.cpu_seconds_used / seconds:.1f} CPUs used")
        if machine.cpu_seconds_all is not None and machine.cpu_seconds_all > 1.2 * machine.cpu_seconds_used:
            parts.append(f"{(machine.cpu_seconds_all - machine.cpu_seconds_used) / seconds:.1f} by other programs")
    if machine.throttled_seconds:
        parts.append(f"held back by the CPU quota for {_time(machine.throttled_seconds)}")
    return f" ({', '.join(parts)})"


def _memory_sentence(snapshot: Snapshot, stage: StageSnapshot) -> str:
    held = f"items in flight hold {_size(snapshot.in_flight_bytes)} of {_size(snapshot.in_flight_bytes_limit)}"
    waited = f"stage {stage.name} waited {_share(stage.wait_share['memory'])} of the time for bytes to become free"
    return f"Memory is the limit: {waited}; {held}."


def _order_sentence(snapshot: Snapshot, stage: StageSnapshot, cause: Cause) -> str:
    share = _share(stage.wait_share[cause])
    sentence = f"A slow item is the limit: stage {stage.name} waited {share} of the time for one that comes before"
    timed = [stage for stage in snapshot.stages if stage.wall_seconds_p99 is not None]
    if not timed:
        return f"{sentence}."
    slow = max(timed, key=lambda stage: stage.wall_seconds_p99 or 0.0)
    return (
        f"{sentence}; the slowest are in stage {slow.name}: {_time(slow.wall_seconds_p99)} (99th percentile) "
        f"against {_time(slow.wall_seconds_p50)} (median)."
    )


def _details(snapshot: Snapshot) -> Iterator[str]:
    consumer, seconds = snapshot.consumer, snapshot.window_seconds
    rate = f"{consumer.steps / seconds:.3g} steps/s, " if seconds > 0 else ""
    yield f"Trainer: {rate}waited for data {_share(consumer.wait_share)} of the time."
    for stage in snapshot.stages:
        yield f"Stage {stage.name}: {'; '.join(_stage_figures(stage, seconds))}."
    machine = snapshot.machine
    yield (
        f"Memory: {_size(machine.memory_bytes)} of {_size(machine.memory_limit_bytes)}; "
        f"{_count(snapshot.in_flight_items, 'item', 'items')} in flight with {_size(snapshot.in_flight_bytes)} "
        f"of {_size(snapshot.in_flight_bytes_limit)}."
    )
    for event in snapshot.events:
        yield f"Event: {event.kind}{f' at stage {event.stage}' if event.stage else ''}: {event.detail}"


def _stage_figures(stage: StageSnapshot, seconds: float) -> Iterator[str]:
    yield "concurrency open" if stage.concurrency is None else f"concurrency {stage.concurrency}"
    if stage.processes_live is not None:
        yield _count(stage.processes_live, "process", "processes")
    if seconds > 0:
        yield f"{stage.items_out / seconds:.3g} items/s"
    if stage.wall_seconds_mean is not None:
        cpu = "" if stage.cpu_seconds_mean is None else f" ({_time(stage.cpu_seconds_mean)} CPU)"
        yield f"{_time(stage.wall_seconds_mean)} an item{cpu}"
    waits = [f"{cause} {_share(share)}" for cause in CAUSES if (share := stage.wait_share.get(cause, 0.0)) >= 0.005]
    if waits:
        yield f"lacked {', '.join(waits)} of the time"


def _seconds_an_item(stage: StageSnapshot) -> str:
    return "" if stage.wall_seconds_mean is None else f" ({_time(stage.wall_seconds_mean)} an item)"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _size(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / 2**20:,.0f} MiB"
