"""What an allocation may be: complete for its stages, and within the budget.

`check_complete` tells a decision from a mistake; it never repairs. `clamp` lowers what a budget does not
allow and says so, stage by stage. A tuner that asks for too much is no fault, one that leaves a stage out is.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from intune._errors import AllocationError
from intune._values import Allocation, Budget, Event, Snapshot, StageInfo, StageSnapshot
from intune._words import count


def open_allocation(stages: Iterable[StageInfo], slots: int) -> Allocation:
    """Every concurrency open, on so many slots: what holds where no tuner has decided."""
    return Allocation(concurrency={stage.name: None for stage in stages}, slots=slots)


def check_complete(allocation: object, names: Sequence[str], *, paused: Collection[str] = ()) -> Allocation:
    """The same allocation in plain ints, in a copy that its maker cannot change any more.

    Args:
        allocation: What a tuner gave.
        names: The stages of the workload, source first.
        paused: Stages that stand at 0 because a user paused them: only these may have a 0.

    Raises:
        AllocationError: If it is no Allocation, an entry is unknown, missing or of a value that is not allowed.
    """
    if not isinstance(allocation, Allocation):
        raise AllocationError(f"expected an Allocation, got {allocation!r}: propose must return one")
    given = _mapping(allocation.concurrency, "concurrency")
    if missing := [name for name in names if name not in given]:
        raise AllocationError(f"no entry for stage {missing[0]!r}: an allocation has one for each of {list(names)}")
    if unknown := [name for name in given if name not in names]:
        raise AllocationError(f"unknown stage {unknown[0]!r}: this workload has {list(names)}")
    memory = allocation.in_flight_bytes
    return Allocation(
        concurrency={name: _concurrency(name, given[name], 0 if name in paused else 1) for name in names},
        slots=_whole(allocation.slots, 1, "slots"),
        in_flight_bytes=None if memory is None else _whole(memory, 0, "in_flight_bytes"),
        reasons={str(name): str(why) for name, why in _mapping(allocation.reasons, "reasons").items()},
        expected_rows_per_second=_rate(allocation.expected_rows_per_second),
    )


def clamp(proposal: Allocation, snapshot: Snapshot, budget: Budget) -> tuple[Allocation, list[Event]]:
    """Lower a complete allocation to what the budget allows.

    * `slots` is at most `budget.cpus`, and leaves a thread for each waiting stage.
    * Open stays open; an int is at most the stage's `max_concurrency` and `budget.max_threads`.
    * Waiting stages own their threads: their ints and the slots are together at most `budget.max_threads`.
    * Worker processes of all stages are together at most `budget.max_processes`, at every moment: a stage
      grows only into the room that processes which already ended have left, and gets the rest later. An open
      process stage that does not fit becomes an int.

    What is too much is taken from the stages that want most. Nothing goes below 1, but a stage that stands
    paused and has no room yet stays at 0.

    Returns:
        The allocation, and one "clamped" event for each number that was lowered. What was expected of the proposal is
        expected of it only where none was.
    """
    stages = snapshot.stages
    waiting = [stage.info.name for stage in stages if stage.info.waits]
    slots = max(1, min(proposal.slots, budget.cpus, budget.max_threads - len(waiting)))
    events = []
    if slots < proposal.slots:
        why = f"the budget has {count(budget.cpus, 'CPU')} and {count(budget.max_threads, 'thread')}"
        events.append(Event("clamped", None, f"slots lowered from {proposal.slots} to {slots}: {why}"))
    wanted = {stage.name: _own_limit(stage.info, proposal.concurrency[stage.name], budget) for stage in stages}
    wanted |= _within_threads(waiting, wanted, budget.max_threads - slots)
    wanted |= _within_processes([s for s in stages if s.info.executor == "process"], wanted, slots, budget)
    reasons = dict(proposal.reasons)
    for stage in stages:
        before, after = proposal.concurrency[stage.name], wanted[stage.name]
        if after != before:
            detail = f"lowered from {_said(before)} to {after}: {_why(stage, before, after, budget)}"
            events.append(Event("clamped", stage.name, detail))
            reasons[stage.name] = detail
    expected = None if events else proposal.expected_rows_per_second
    return Allocation(wanted, slots, proposal.in_flight_bytes, reasons, expected), events


def processes_held(stage: StageSnapshot, slots: int) -> tuple[int, int, int]:
    """Worker processes of a process stage that are (ready, being started, leaving) at the end of the window.

    Where the workload did not count them, as many as its concurrency allows are taken to be ready.
    """
    if stage.processes_live is None:
        return processes_when_open(stage.info, slots) if stage.concurrency is None else stage.concurrency, 0, 0
    return stage.processes_live, stage.processes_starting or 0, stage.processes_leaving or 0


def processes_when_open(stage: StageInfo, slots: int) -> int:
    """Worker processes that an open concurrency of a process stage stands for."""
    return min(stage.max_concurrency or slots, slots)


def level(wants: Sequence[int], total: int, *, least: int = 1) -> list[int]:
    """Share out `total`: every one gets min(want, least), then the ones that have least get more, the earlier first."""
    shares = [min(want, least) for want in wants]
    for _ in range(total - sum(shares)):
        below = [(share, place) for place, (share, want) in enumerate(zip(shares, wants, strict=True)) if share < want]
        if not below:
            break
        shares[min(below)[1]] += 1
    return shares


def _mapping(value: Any, field: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise AllocationError(f"{field} must be a mapping by stage name, got {value!r}")
    return value


def _concurrency(name: str, value: Any, least: int) -> int | None:
    return None if value is None else _whole(value, least, f"concurrency of stage {name!r}")


def _whole(value: Any, least: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        pause = " (only users pause a stage)" if value == 0 and "concurrency" in what else ""
        raise AllocationError(f"{what} must be an int of at least {least}, got {value!r}{pause}")
    return int(value)


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise AllocationError(f"expected_rows_per_second must be a number of at least 0, or None, got {value!r}")
    return float(value)


def _own_limit(stage: StageInfo, value: int | None, budget: Budget) -> int | None:
    if value is None:
        return None
    return min(value, stage.max_concurrency or value, max(1, budget.max_threads))


def _within_threads(waiting: Sequence[str], wanted: Mapping[str, int | None], room: int) -> dict[str, int | None]:
    """The ints of the waiting stages; the open ones share what is left, so each of them needs one at least."""
    ints = {name: value for name in waiting if (value := wanted[name]) is not None}
    free = room - (len(waiting) - len(ints))
    return dict(zip(ints, level(list(ints.values()), free), strict=True))


def _within_processes(
    stages: Sequence[StageSnapshot], wanted: Mapping[str, int | None], slots: int, budget: Budget
) -> dict[str, int | None]:
    open_as = {stage.name: processes_when_open(stage.info, slots) for stage in stages}
    wants = [open_as[stage.name] if (value := wanted[stage.name]) is None else value for stage in stages]
    targets = level(wants, budget.max_processes)
    held = [processes_held(stage, slots) for stage in stages]
    growth = [max(0, target - ready - starting) for target, (ready, starting, _) in zip(targets, held, strict=True)]
    grants = level(growth, budget.max_processes - sum(map(sum, held)), least=0)
    result: dict[str, int | None] = {}
    for stage, want, target, grow, grant in zip(stages, wants, targets, growth, grants, strict=True):
        now = max(0 if stage.concurrency == 0 else 1, target - (grow - grant)) if target else 0
        result[stage.name] = wanted[stage.name] if now == want else now
    return result


def _why(stage: StageSnapshot, before: int | None, after: int | None, budget: Budget) -> str:
    most = stage.info.max_concurrency
    if before is not None and most is not None and after == most:
        return f"the stage's max_concurrency is {most}"
    if stage.info.executor == "process":
        processes = count(budget.max_processes, "process", "processes")
        return f"the budget has {processes}, those that are still ending included"
    return f"the budget has {count(budget.max_threads, 'thread')}"


def _said(value: int | None) -> str:
    return "open" if value is None else str(value)
