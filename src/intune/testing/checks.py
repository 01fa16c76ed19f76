"""What every tuner and every workload must keep. Run them in the tests of your own."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from intune._errors import AllocationError
from intune._values import Allocation, Budget, Event, Snapshot, StageInfo, Tuner, Workload
from intune.control.allocation import check_complete, open_allocation
from intune.control.guard import Guard
from intune.testing.scenes import Scene, scenes, window


def check_tuner(tuner: Tuner, *, stages: Sequence[StageInfo] | None = None) -> None:
    """Let a tuner decide in some 400 situations and check every answer.

    The situations: 1 to 12 stages of all kinds; windows in which nothing or not everything was measured, or in
    which figures are zero or huge; a stage that a user paused; CPUs cut and given back; proposals that were
    clamped or vetoed. In each the answer must be complete and legal, slots within the budget, the same from a
    copy of the tuner that saw the same, and nothing that it was shown may be changed.

    Args:
        tuner: Is not used itself but copied (`copy.deepcopy`) for each workload.
        stages: The stages of the only workload that this tuner is made for; None = any.

    Raises:
        AssertionError: If it does not hold, with the snapshot and the budget at which it does not.
    """
    for scene in scenes(stages):
        _play(scene, copy.deepcopy(tuner), copy.deepcopy(tuner))


def check_workload(workload: Workload) -> None:
    """Check that a workload keeps to its protocol; what was in force before is put back at the end.

    Checked are names, the figures of its snapshots, that every allowed allocation is in force in the next
    snapshot, and that an unknown, missing or negative entry raises AllocationError and changes nothing.

    Raises:
        AssertionError: If it does not hold, with what was applied or the snapshot.
    """
    names = [stage.name for stage in workload.stages]
    _require(bool(names) and len(set(names)) == len(names), f"names of stages must differ, at least one: {names}")
    first = workload.snapshot()
    _check_snapshot(first, names)
    try:
        for allocation in _allowed(workload.stages):
            workload.apply(allocation)
            snapshot = workload.snapshot()
            _check_snapshot(snapshot, names)
            _check_in_force(snapshot, allocation)
            for what, wrong in _not_allowed(allocation):
                _check_refused(workload, what, wrong)
                _check_in_force(workload.snapshot(), allocation)
    finally:
        workload.apply(first.allocation)


def _play(scene: Scene, tuner: Tuner, twin: Tuner) -> None:
    """One workload, whose snapshots show what became of the tuner's proposals."""
    names = [stage.name for stage in scene.stages]
    guard, allocation = Guard(), open_allocation(scene.stages, scene.budgets[0].cpus)
    events: list[Event] = []
    for number, budget in enumerate(scene.budgets):
        paused = [names[0]] if number == 3 else []
        allocation = replace(allocation, concurrency={**allocation.concurrency, **dict.fromkeys(paused, 0)})
        snapshot = window(scene, number, allocation, events)
        shown = copy.deepcopy(snapshot)
        try:
            proposal = check_complete(tuner.propose(shown, budget), names, paused=paused)
            again = check_complete(twin.propose(copy.deepcopy(snapshot), budget), names, paused=paused)
        except Exception as error:
            raise _fault(f"{type(error).__name__}: {error}", snapshot, budget) from error
        if proposal.slots > budget.cpus:
            raise _fault(f"slots is {proposal.slots}, more than the {budget.cpus} CPUs", snapshot, budget)
        if unknown := set(proposal.reasons) - set(names):
            raise _fault(f"reasons name unknown stages {sorted(unknown)}", snapshot, budget)
        if shown != snapshot:
            raise _fault("the snapshot was changed", snapshot, budget)
        if proposal != again:
            raise _fault(f"a copy decides differently: {proposal} against {again}", snapshot, budget)
        running = {name: 1 if value == 0 else value for name, value in proposal.concurrency.items()}
        allocation, events = guard.check(replace(proposal, concurrency=running), snapshot, budget)


def _fault(what: str, snapshot: Snapshot, budget: Budget) -> AssertionError:
    return AssertionError(f"{what}\nat {budget}\nand {snapshot}")


def _allowed(stages: Sequence[StageInfo]) -> Iterator[Allocation]:
    yield Allocation({stage.name: None for stage in stages}, slots=1)
    yield Allocation({stage.name: 1 for stage in stages}, slots=2, in_flight_bytes=2**30)
    for chosen in stages:
        most = min(2, chosen.max_concurrency or 2)
        yield Allocation({stage.name: most if stage is chosen else 1 for stage in stages}, slots=2)
        yield Allocation({stage.name: 0 if stage is chosen else None for stage in stages}, slots=1)


def _not_allowed(allocation: Allocation) -> Iterator[tuple[str, Allocation]]:
    entries: Mapping[str, int | None] = allocation.concurrency
    name = next(iter(entries))
    unknown = "no such stage"
    while unknown in entries:
        unknown += "!"
    yield "an unknown entry", replace(allocation, concurrency={**entries, unknown: 1})
    yield "a missing entry", replace(allocation, concurrency={key: entries[key] for key in entries if key != name})
    yield "a negative entry", replace(allocation, concurrency={**entries, name: -1})
    yield "no slot", replace(allocation, slots=0)
    yield "negative bytes", replace(allocation, in_flight_bytes=-1)


def _check_refused(workload: Workload, what: str, wrong: Allocation) -> None:
    try:
        workload.apply(wrong)
    except AllocationError:
        return
    raise AssertionError(f"apply took {what} without AllocationError: {wrong}")


def _check_in_force(snapshot: Snapshot, allocation: Allocation) -> None:
    got = dict(snapshot.allocation.concurrency), snapshot.allocation.slots
    _require(got == (dict(allocation.concurrency), allocation.slots), f"{got} is in force after {allocation}")
    shown = {stage.name: stage.concurrency for stage in snapshot.stages}
    _require(shown == got[0], f"stages show {shown}, in force is {got[0]}")


def _check_snapshot(snapshot: Snapshot, names: Sequence[str]) -> None:
    shown = [stage.name for stage in snapshot.stages]
    _require(shown == list(names), f"the snapshot has the stages {shown}, the workload {list(names)}")
    _require(snapshot.window_seconds >= 0, f"window_seconds is {snapshot.window_seconds}")
    parts: list[Any] = [snapshot, snapshot.consumer, snapshot.machine, *snapshot.stages]
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            number = isinstance(value, int | float)
            _require(not number or (math.isfinite(value) and value >= 0), f"{field.name} is {value} in {part}")
    for stage in snapshot.stages:
        total = sum(stage.wait_share.values())
        within = all(share >= 0 for share in stage.wait_share.values()) and total <= 1 + 1e-6
        _require(
            within, f"wait shares of stage {stage.name} must be at least 0, their sum at most 1: {stage.wait_share}"
        )
        uncounted = stage.processes_live is None or stage.info.executor == "process"
        _require(uncounted, f"processes_live of a stage on threads must be None: {stage}")


def _require(holds: Any, message: str) -> None:
    if not holds:
        raise AssertionError(message)
