"""In plain words: what limits a run now, and what it is doing.

The rule: a trainer that hardly waits is the limit itself. Otherwise a stage that works all the time at a limit of
its own is; else the interpreter lock, memory, or CPUs that are busy all the time. If it is none of these, start at the
stage nearest to the trainer and go towards the source for as long as the stage mainly lacks input, as the one before
is slower then; what the stage where this ends mainly lacks names the limit.

A stage may have an item in hand that no thread has begun to work on, for want of a CPU or of the lock. So a stage is
the limit only where its working time says so too. One that waits is never named for what others use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from intune._values import CAUSES, Cause, Snapshot, StageSnapshot
from intune._words import count, duration, size
from intune.control.advice import advice
from intune.control.bounds import most_at_once, trainer_bound
from intune.control.lock import (
    FREE_SECONDS,
    HELD_SECONDS,
    IN_USE_SECONDS,
    LockBound,
    cpu_seconds,
    lock_bound,
    lost_seconds,
)
from intune.control.outcome import Outcome
from intune.control.shortage import shortage
from intune.control.turns import takes_turns

Kind = Literal[
    "trainer", "paused", "cpu", "lock", "turns", "concurrency", "waits", "disk", "memory", "order", "source", "unknown"
]

TRAINER_WAITS_LITTLE = 0.05
"""Share of the window in which the trainer may wait for data and still be the limit."""

TRAINER_WAITS_IN_BURSTS = 0.3
"""The same where batches lie ready for most of the window."""

BUSY_SHARE = 0.85
"""Share of the time that they might be in use from which slots, or a stage, count as busy all the time."""

ALONE_SHARE, ALONE_BUSY_SHARE = 0.75, 0.5
"""A stage that works on one item at once is the limit if it does this share of all work on threads and is busy so
much: the rest of the time goes by between two of its items, where nothing else has much to do."""

OTHERS_SHARE = 0.2
"""Share of the CPUs' time from which other programs are blamed for what is missing."""

SLOTS_TAKEN_SHARE = 0.5
"""Share of the slots' time in use below which it is not for want of slots that stages wait for one."""

SLOW_RATIO = 2.0
"""99th percentile over median of the times of items from which some count as slow."""


WAITS_SHARE = 0.7
"""Share of its working time that a stage neither computes nor is in want of a CPU from which it waits."""

READS_BYTES = 1e6
"""Bytes a second from storage below which it is not reading that a source waits for."""

EARLY_SECONDS = 0.75
"""Seconds of a window below which what it says of a run is no more than a first look."""

TRAINER_COULD, TRAINER_COULD_MOST = 1.05, 20.0
"""How much more the training loop could take, where that is said: a bound beyond says nothing."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a run.

    Attributes:
        kind: "trainer" takes what it gets at once; "paused": a user paused a stage; "cpu": no free slot; "lock":
            threads wait for the interpreter lock; "turns": items of a stage take turns for something else that only
            one or a few may have; "concurrency": a stage that computes works at its limit;
            "waits": one that waits does; "disk": so does a source that reads from storage; "memory": items are not
            admitted; "order": a slow item holds the others back; "source": it has no more input; "unknown": nothing
            stands out, or nothing was measured.
        stage: The stage that uses most of what is short, or that is short of memory or input; None where it is none.
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
            f"and {count(consumer.ready, 'batch', 'batches')} lay ready.",
        )
    for stage in snapshot.stages:
        if stage.concurrency == 0:
            return Limit("paused", stage.name, f"Stage {stage.name} is paused by the user.")
    found = _narrow(snapshot)
    if found is None:
        return Limit("unknown", None, "Nothing was measured in this window yet.")
    stage, cause = found
    return (
        _alone(snapshot)
        or _locked(snapshot)
        or _in_turns(snapshot, full := _full(snapshot))
        or full
        or (Limit("memory", stage.name, _memory_sentence(snapshot, stage)) if cause == "memory" else None)
        or _busy_slots(snapshot)
        or _judge(snapshot, stage, cause)
        or _nothing_full(snapshot)
    )


def explain(snapshot: Snapshot, outcome: Outcome | None = None) -> str:
    """Several lines: what limits the run and what would help, the last change, then figures of the window.

    Args:
        snapshot: The window.
        outcome: What is known of the last change of the allocation.
    """
    found = limit(snapshot)
    early = snapshot.window_seconds < EARLY_SECONDS
    helps = None if early else advice(snapshot, found.kind, found.stage)
    first = f"A first look at {duration(snapshot.window_seconds)} only: " if early else ""
    changed = [] if outcome is None else [_last_change(outcome)]
    return "\n".join([first + found.sentence, *([helps] if helps else []), *changed, *_details(snapshot)])


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


def _alone(snapshot: Snapshot) -> Limit | None:
    """A stage on threads that works on one item at a time, all the time, and does not queue for the lock meanwhile."""
    threads = [stage for stage in snapshot.stages if stage.info.executor == "thread" and not stage.info.waits]
    busy = sum(stage.busy_seconds for stage in threads)
    for stage in threads:
        limited = most_at_once(stage) == 1 and (snapshot.allocation.slots > 1 or stage.info.max_concurrency == 1)
        share = _busy_share(snapshot, stage)
        if share is None:
            share = 1 - sum(stage.wait_share.values())
        most_of_all = stage.busy_seconds >= ALONE_SHARE * busy and share >= ALONE_BUSY_SHARE
        held = (snapshot.machine.lock_wait_seconds or 0.0) >= HELD_SECONDS
        queues = held and lost_seconds(stage) > stage.busy_seconds / 2
        if limited and (share >= BUSY_SHARE or most_of_all) and not queues:
            return _at_its_limit(snapshot, stage)
    return None


def _full(snapshot: Snapshot) -> Limit | None:
    """The stage that works all the time on as many items as it may itself, fewer than there are slots."""
    shares = {
        stage.name: _busy_share(snapshot, stage) or 0.0
        for stage in snapshot.stages
        if (most := most_at_once(stage)) is not None and (stage.info.waits or most < snapshot.allocation.slots)
    }
    fullest = max(snapshot.stages, key=lambda stage: shares.get(stage.name, 0.0))
    return _at_its_limit(snapshot, fullest) if shares.get(fullest.name, 0.0) >= BUSY_SHARE else None


def _locked(snapshot: Snapshot) -> Limit | None:
    bound = lock_bound(snapshot)
    return None if bound is None else Limit("lock", bound.stage.name, _lock_sentence(bound))


def _in_turns(snapshot: Snapshot, full: Limit | None) -> Limit | None:
    """The stage whose items lose most time as they take turns; None where another one is full."""
    turns = [(stage, more) for stage in snapshot.stages if (more := takes_turns(snapshot, stage)) is not None]
    if not turns:
        return None
    stage, more = max(turns, key=lambda each: lost_seconds(each[0]))
    if full is not None and full.stage != stage.name:
        return None
    if (reading := _reading(snapshot, stage)) is not None:
        return reading
    said = "its items take turns (a lock, a disk, a connection), as it gives hardly more a second"
    than = f"with {more.many:.1f} at once than with {more.few:.1f}"
    return Limit("turns", stage.name, f"Stage {stage.name} is the limit: {said} {than}{_seconds_an_item(stage)}.")


def _busy_slots(snapshot: Snapshot) -> Limit | None:
    """CPU as the limit where the slots were busy nearly all the time."""
    stages = [stage for stage in snapshot.stages if not stage.info.waits]
    busy, most = sum(stage.busy_seconds for stage in stages), snapshot.allocation.slots * snapshot.window_seconds
    if not stages or most <= 0 or busy < BUSY_SHARE * most:
        return None
    worst = max(stages, key=lambda stage: stage.busy_seconds)
    # What a thread loses to other programs or to the lock is no waiting of its own.
    others = worst.run_queue_seconds is None and _taken_by_others(snapshot)
    undisturbed = (snapshot.machine.lock_wait_seconds or 0.0) < HELD_SECONDS and not others
    if worst.info.executor == "thread" and undisturbed and lost_seconds(worst) > WAITS_SHARE * worst.busy_seconds:
        if (reading := _reading(snapshot, worst)) is not None:
            return reading
        held = f"it holds {_share(worst.busy_seconds / most)} of the slots' time"
        computes = f"computes for {_share(cpu_seconds(worst) / worst.busy_seconds)} of that"
        return Limit("waits", worst.name, f"Stage {worst.name} is the limit: {held} but {computes}.")
    share = f"and stage {worst.name} takes {_share(worst.busy_seconds / busy)} of that"
    return Limit("cpu", worst.name, f"CPU is the limit: all slots are busy, {share}{_cpu_figures(snapshot)}.")


def _judge(snapshot: Snapshot, stage: StageSnapshot, cause: Cause | None) -> Limit | None:
    """The limit by what the narrow stage lacked; None where its working time contradicts that."""
    if cause == "input":
        return Limit("source", stage.name, f"The source {stage.name} has nothing more to read.")
    if cause == "slot":
        busiest, held = _busiest(snapshot), sum(each.busy_seconds for each in snapshot.stages if not each.info.waits)
        if held < SLOTS_TAKEN_SHARE * snapshot.allocation.slots * snapshot.window_seconds:
            return None
        waited = f"stage {stage.name} waited for a slot {_share(stage.wait_share['slot'])} of the time"
        most = f"; stage {busiest.name} uses most of them" if busiest is not stage else ""
        return Limit("cpu", busiest.name, f"CPU is the limit: {waited}{most}{_cpu_figures(snapshot)}.")
    if cause in ("order", "room"):
        return _slow_item(snapshot, stage, cause)
    share = _busy_share(snapshot, stage)
    return _at_its_limit(snapshot, stage) if share is None or share >= ALONE_BUSY_SHARE else None


def _slow_item(snapshot: Snapshot, stage: StageSnapshot, cause: Cause) -> Limit | None:
    """A slow item that others wait for; None where there is none."""
    behind = snapshot.stages[snapshot.stages.index(stage) + 1 :]
    if cause == "room" and (
        snapshot.consumer.wait_share <= TRAINER_WAITS_IN_BURSTS
        or not any(later.info.kind in ("shuffle", "batch") for later in behind)
    ):
        return _bursts(snapshot, stage)  # the room that it lacks is the trainer's to make
    timed = [stage for stage in snapshot.stages if stage.wall_seconds_p99 is not None]
    slow = max(timed, key=lambda stage: stage.wall_seconds_p99 or 0.0, default=None)
    if slow is not None and (slow.wall_seconds_p99 or 0.0) < SLOW_RATIO * (slow.wall_seconds_p50 or 0.0):
        return None
    sentence = f"A slow item is the limit: stage {stage.name} waited {_share(stage.wait_share[cause])} of the time"
    sentence = f"{sentence} for one that comes before"
    if slow is None:
        return Limit("order", None, f"{sentence}.")
    return Limit(
        "order",
        slow.name,
        f"{sentence}; the slowest are in stage {slow.name}: {duration(slow.wall_seconds_p99)} (99th percentile) "
        f"against {duration(slow.wall_seconds_p50)} (median).",
    )


def _bursts(snapshot: Snapshot, full: StageSnapshot) -> Limit | None:
    """The trainer as nearly the limit, which takes batches in bursts; None where it waits for much of the time."""
    if snapshot.consumer.wait_share > TRAINER_WAITS_IN_BURSTS:
        return None
    said = f"it waited for data {_share(snapshot.consumer.wait_share)} of the time"
    room = f"stage {full.name} {_share(full.wait_share['room'])} for room"
    return Limit("trainer", None, f"The trainer is nearly the limit: {said}, and {room}.")


def _nothing_full(snapshot: Snapshot) -> Limit:
    """What can be said where no stage is busy all the time."""
    machine, seconds = snapshot.machine, snapshot.window_seconds
    worked = max(snapshot.stages, key=lambda stage: stage.busy_seconds)
    if seconds <= 0 or not worked.busy_seconds:
        return Limit("unknown", None, "Nothing stands out: no stage finished an item in this window.")
    busiest = _busiest(snapshot)
    if (machine.cpu_seconds_used or 0.0) >= BUSY_SHARE * min(snapshot.allocation.slots, machine.cpus) * seconds:
        sentence = f"CPU is the limit: stage {busiest.name} uses most of it{_cpu_figures(snapshot)}."
        return Limit("cpu", busiest.name, sentence)
    if _taken_by_others(snapshot):
        return Limit("cpu", None, f"CPU is the limit: other programs use what is missing{_cpu_figures(snapshot)}.")
    average = f"it has {worked.busy_seconds / seconds:.1f} items in hand on average"
    sentence = f"Nothing stands out: no stage is busy all the time; {worked.name} is worked on most ({average})."
    return Limit("unknown", worked.name, sentence)


def _taken_by_others(snapshot: Snapshot) -> bool:
    """Whether other programs use a notable part of CPUs that are busy nearly all the time."""
    machine, cpus = snapshot.machine, snapshot.machine.cpus * snapshot.window_seconds
    if machine.cpu_seconds_used is None or machine.cpu_seconds_all is None:
        return False
    # Of a machine with more CPUs than this process may use, the sum over all programs says nothing.
    busy = BUSY_SHARE * cpus <= machine.cpu_seconds_all <= 1.1 * cpus
    return busy and machine.cpu_seconds_all - machine.cpu_seconds_used >= OTHERS_SHARE * cpus


def _at_its_limit(snapshot: Snapshot, stage: StageSnapshot) -> Limit:
    if stage.info.waits:
        if (reading := _reading(snapshot, stage)) is not None:
            return reading
        most = most_at_once(stage)
        at = "as many as threads allow" if most is None else f"all {most} that it may have"
        sentence = f"Stage {stage.name} is the limit: it waits for something outside, with {at} under way"
        return Limit("waits", stage.name, f"{sentence}{_seconds_an_item(stage)}.")
    most = most_at_once(stage)
    if most is None and stage.info.executor == "thread":
        sentence = f"CPU is the limit: stage {stage.name} fills all slots{_cpu_figures(snapshot)}."
        return Limit("cpu", stage.name, sentence)
    at = "as many items at once as it may" if most is None else "one item at a time" if most == 1 else f"{most} at once"
    own = stage.info.max_concurrency
    why = f"; its max_concurrency is {own}" if own is not None else ""
    sentence = f"Stage {stage.name} is the limit: it works on {at} nearly all the time{why}{_seconds_an_item(stage)}."
    return Limit("concurrency", stage.name, sentence)


def _reading(snapshot: Snapshot, stage: StageSnapshot) -> Limit | None:
    """Reading as what a source waits for; None where it is no source, or little is read from storage."""
    read, seconds = snapshot.machine.read_bytes, snapshot.window_seconds
    if stage.info.kind != "source" or not read or seconds <= 0 or read < READS_BYTES * seconds:
        return None
    lost = lost_seconds(stage) / stage.busy_seconds if stage.busy_seconds else 0.0
    if lost <= WAITS_SHARE:
        return None
    said = f"stage {stage.name} spends {_share(lost)} of its time neither computing nor in want of a CPU"
    return Limit(
        "disk",
        stage.name,
        f"Reading is the limit: {said}, and {size(int(read / seconds))}/s come from storage{_seconds_an_item(stage)}.",
    )


def _last_change(outcome: Outcome) -> str:
    reasons = [f"{name}: {why}" for name, why in outcome.change.reasons.items() if why]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    words = outcome.in_words()
    ago = f", {count(outcome.decisions_ago, 'decision')} ago" if outcome.decisions_ago else ""
    return f"Last change{ago}: {outcome.change.numbers()}{why}{f'; {words}' if words else ''}."


def _busy_share(snapshot: Snapshot, stage: StageSnapshot) -> float | None:
    """Working time over the most it could be; None where items take so long that the window says nothing of it."""
    long = (stage.wall_seconds_p99 or 0.0) > snapshot.window_seconds / 4
    most = most_at_once(stage) or (None if stage.info.waits else snapshot.allocation.slots)
    if long or most is None or snapshot.window_seconds <= 0 or (not stage.items_out and stage.running):
        return None
    return stage.busy_seconds / (most * snapshot.window_seconds)


def _busiest(snapshot: Snapshot) -> StageSnapshot:
    """The stage that holds most of the slots' time; where no stage needs slots, the one that works most."""
    stages = [stage for stage in snapshot.stages if not stage.info.waits] or list(snapshot.stages)
    return max(stages, key=lambda stage: stage.busy_seconds)


def _lock_sentence(bound: LockBound) -> str:
    said = (
        "The interpreter lock is the limit: Python code runs in one thread at a time, so the stages on threads get "
        f"{bound.threads_cpus:.1f} of {bound.cpus} CPUs; {_share(bound.share)} of that is stage {bound.stage.name} "
        f"(a thread waits {duration(bound.wait_seconds)} for the lock, some {duration(FREE_SECONDS)} where it is free)."
    )
    if bound.move:
        stages = f"stage{'s' if len(bound.move) > 1 else ''} {' and '.join(bound.move)}"
        enough = " and ".join(str(number) for number in bound.processes.values())
        many = f"with {enough} process{'es' if max(*bound.processes.values(), len(bound.move)) > 1 else ''}"
        faster = f"makes it up to {bound.gain:.1f} times as fast"
        return f'{said} More threads do not help. For the next run, executor="process" on {stages} {faster}, {many}.'
    small = f"Its items take only {duration(bound.stage.cpu_seconds_mean)}, too little to send each to a process. "
    return f"{said} {small if bound.too_small else ''}Work on whole columns in numpy or Arrow needs the lock less."


def _cpu_figures(snapshot: Snapshot) -> str:
    machine, slots, seconds = snapshot.machine, snapshot.allocation.slots, snapshot.window_seconds
    parts = [f"{count(slots, 'slot')} of {count(machine.cpus, 'CPU')}"]
    if machine.cpu_seconds_used is not None and seconds > 0:
        parts.append(f"{machine.cpu_seconds_used / seconds:.1f} CPUs used")
        if machine.cpu_seconds_all is not None and machine.cpu_seconds_all > 1.2 * machine.cpu_seconds_used:
            parts.append(f"{(machine.cpu_seconds_all - machine.cpu_seconds_used) / seconds:.1f} by other programs")
    if machine.throttled_seconds:
        parts.append(f"held back by the CPU quota for {duration(machine.throttled_seconds)}")
    return f" ({', '.join(parts)})"


def _memory_sentence(snapshot: Snapshot, stage: StageSnapshot) -> str:
    much = 2 * (snapshot.in_flight_bytes or 0) >= (snapshot.in_flight_bytes_limit or 0)
    rest = "" if much else " (the rest is reserved for what they will need)"
    held = f"items in flight hold {_in_flight(snapshot)}{rest}"
    waited = f"stage {stage.name} waited {_share(stage.wait_share['memory'])} of the time for bytes to become free"
    missing = shortage(snapshot)
    more = f"; {missing.in_words()}" if missing is not None else ""
    return f"Memory is the limit: {waited}; {held}{more}."


def _details(snapshot: Snapshot) -> Iterator[str]:
    consumer, seconds = snapshot.consumer, snapshot.window_seconds
    rate = f"{consumer.steps / seconds:.3g} steps/s, " if seconds > 0 else ""
    most = trainer_bound(snapshot)
    could = f", so it could take up to {most:.1f} times as much" if TRAINER_COULD <= most <= TRAINER_COULD_MOST else ""
    yield f"Trainer: {rate}waited for data {_share(consumer.wait_share)} of the time{could}."
    for stage in snapshot.stages:
        figures = _stage_figures(stage, seconds, snapshot.allocation.reasons.get(stage.name))
        yield f"Stage {stage.name}: {'; '.join(figures)}."
    machine = snapshot.machine
    yield (
        f"Memory: {size(machine.memory_bytes)} of {size(machine.memory_limit_bytes)}{_whose_memory(snapshot)}; "
        f"{count(snapshot.in_flight_items, 'item')} in flight with {_in_flight(snapshot)}."
    )
    if (wait := machine.lock_wait_seconds or 0.0) >= IN_USE_SECONDS and lock_bound(snapshot) is None:
        held = "much of the time" if wait >= HELD_SECONDS else "part of the time"
        yield f"Interpreter lock: Python code holds it {held}; a thread waits {duration(wait)} for it."
    for event in snapshot.events:
        if event.kind == "outcome":
            continue  # it stands above
        yield f"Event: {event.kind}{f' at stage {event.stage}' if event.stage else ''}: {event.detail}"


def _in_flight(snapshot: Snapshot) -> str:
    held, most = snapshot.in_flight_bytes, snapshot.in_flight_bytes_limit
    return f"{size(held)}, and no more for now" if most == 0 else f"{size(held)} of {size(most)}"


def _whose_memory(snapshot: Snapshot) -> str:
    """Who uses it; and what of it this process does, where others may."""
    machine = snapshot.machine
    if not machine.memory_used_by:
        return ""
    chosen = next((use for use in machine.memory if use.chosen), None)
    if chosen is not None and machine.memory_used_by == chosen.used_by:
        return f" used by {machine.memory_used_by}"
    if chosen is not None and chosen.used_bytes is not None:
        return f" used by {machine.memory_used_by}, of which {size(chosen.used_bytes)} by {chosen.used_by}"
    if machine.own_memory_bytes is None:
        return f" used by {machine.memory_used_by}"
    workers = [stage for stage in snapshot.stages if stage.processes_live]
    known = [(stage.processes_live or 0) * (stage.process_resident_bytes or 0) for stage in workers]
    rest = f" and {size(sum(known))} by its {count(sum(s.processes_live or 0 for s in workers), 'worker')}"
    own = f"{size(machine.own_memory_bytes)} by this process{rest if sum(known) else ''}"
    return f" used by {machine.memory_used_by}, of which {own}"


def _stage_figures(stage: StageSnapshot, seconds: float, reason: str | None) -> Iterator[str]:
    why = f" ({reason})" if reason else ""
    yield "concurrency open" if stage.concurrency is None else f"concurrency {stage.concurrency}{why}"
    if stage.processes_live is not None:
        yield count(stage.processes_live, "process", "processes")
    if seconds > 0:
        yield f"{stage.items_out / seconds:.3g} items/s"
    if stage.wall_seconds_mean is not None:
        cpu = "" if stage.cpu_seconds_mean is None else f" ({duration(stage.cpu_seconds_mean)} CPU)"
        yield f"{duration(stage.wall_seconds_mean)} an item{cpu}"
    waits = [f"{cause} {_share(share)}" for cause in CAUSES if (share := stage.wait_share.get(cause, 0.0)) >= 0.005]
    if waits:
        yield f"lacked {', '.join(waits)} of the time"


def _seconds_an_item(stage: StageSnapshot) -> str:
    return "" if stage.wall_seconds_mean is None else f" ({duration(stage.wall_seconds_mean)} an item)"


def _share(share: float) -> str:
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
