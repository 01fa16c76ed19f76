"""The guard: what a tuner may have, whatever it asks for. It outranks every tuner.

It covers the budget (CPUs, threads, processes; see `clamp`) and, where a memory limit is known, two
predictions for the next window. Of several limits (the user's for the process tree, those of control groups, the
machine's) each is compared with what is used of that one, and the tightest holds.

* *Items in flight.* Let B be the limit and `rest` what is used of it less what items in flight hold, that is
  the trainer, the workers, the interpreter and what allocators keep. Items may then hold 0.9 B - rest.
  A tenth is spared, as measurements lag and items differ. But memory that allocators keep looks like `rest`
  and will be used again for the next items, so that this figure alone would fall a little whenever fewer
  items are in flight and never rise again. So B / 8 is always granted, as far as rest + B / 8 <= B holds:
  `max(0.9 B - rest, min(B / 8, B - rest))`, and never below 0. (At 0 one item at a time goes on.)
* *Worker processes.* One more process costs what those of its stage hold on average that have done an item, and
  512 MiB while none has: what a function works with it often makes with its first item. Processes are added only while
  rest, what the processes being started and those without an item yet will hold more, and B / 8 for items stay within
  0.9 B.
  Where those that run already leave less than B / 16 for items, one is taken away a step, from the stage whose
  processes hold most.

It does not cover what it has no figure for: growth of the trainer, or a single item larger than everything so far.
Between its steps the brake watches what is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from intune._shares import GUARD_PLANS
from intune._values import Allocation, Budget, Event, Snapshot, StageSnapshot, memory_uses
from intune._words import count, size
from intune.control.allocation import clamp, processes_held, processes_when_open

FLOOR = 1 / 8
"""Share of the limit that items in flight may hold although the rest seems to need it."""

UNMEASURED = 512 * 2**20
"""Bytes that a process is taken to hold while none of its stage was measured: few fit a tight limit, many a wide."""


class Guard:
    """Lowers allocations to the budget and to what memory allows; pure, without state."""

    def check(self, proposal: Allocation, snapshot: Snapshot, budget: Budget) -> tuple[Allocation, list[Event]]:
        """The most of a proposal that is allowed, and why the rest is not.

        Args:
            proposal: A complete allocation; 0 for stages that a user paused.
            snapshot: The window just ended; its stages are those of the proposal.
            budget: What holds now, a change since the window included.

        Returns:
            The allocation to apply, never above the proposal but for `in_flight_bytes`, which becomes a number
            where a memory limit is known; and the events: "clamped" by the budget, "vetoed" by a prediction.
        """
        allocation, events = clamp(proposal, snapshot, budget)
        uses = memory_uses(snapshot, budget)
        rooms = [_Room(use.limit_bytes, use.rest_bytes, use.with_processes) for use in uses]
        if not rooms:
            return allocation, events
        allocation, rooms, vetoes = _veto_processes(allocation, snapshot, rooms)
        allocation, cuts = _cut_processes(allocation, snapshot, rooms)
        events += vetoes + cuts
        tightest = min(rooms, key=lambda room: in_flight_limit(room.limit, room.rest))
        most = in_flight_limit(tightest.limit, tightest.rest)
        asked = allocation.in_flight_bytes
        if asked is not None and asked > most:
            detail = f"in_flight_bytes lowered from {size(asked)} to {size(most)}: the limit for everything is "
            events.append(
                Event("vetoed", None, f"{detail}{size(tightest.limit)}, the rest needs {size(tightest.rest)}")
            )
        expected = None if events else allocation.expected_rows_per_second  # of the proposal, not of what is left of it
        granted = most if asked is None else min(asked, most)
        return replace(allocation, in_flight_bytes=granted, expected_rows_per_second=expected), events


class _Room(NamedTuple):
    """A limit, what all but items in flight holds of it (None: not measured), and whether it is for processes too."""

    limit: int
    rest: int | None
    with_processes: bool

    def left(self, share: float) -> float:
        """Bytes that are left to this share of the limit."""
        return math.inf if self.rest is None or not self.with_processes else self.limit * share - self.rest

    def with_more(self, size: int) -> "_Room":
        """Processes hold so many bytes more."""
        return self if self.rest is None or not self.with_processes else self._replace(rest=self.rest + size)


def in_flight_limit(limit: int, rest: int | None) -> int:
    """Bytes that items in flight may hold, where everything else holds `rest` of `limit` bytes.

    A `rest` of None, not measured, grants the floor.
    """
    floor = int(limit * FLOOR)
    if rest is None:
        return floor
    return max(0, int(limit * GUARD_PLANS) - rest, min(floor, limit - rest))


def _veto_processes(
    allocation: Allocation, snapshot: Snapshot, rooms: list[_Room]
) -> tuple[Allocation, list[_Room], list[Event]]:
    """The allocation with only the processes that fit, what there is with those added, and the vetoes."""
    stages = [stage for stage in snapshot.stages if stage.info.executor == "process"]
    slots = allocation.slots
    more = sum(_still_to_come(stage, slots) for stage in stages)
    unknown = sum(processes_held(s, slots)[0] * UNMEASURED for s in stages if s.process_resident_bytes is None)
    concurrency, reasons, events = dict(allocation.concurrency), dict(allocation.reasons), []
    for stage, target, added, resident in _growing(stages, allocation):
        filled = [room.with_more(more + unknown) for room in rooms]
        tightest = min(filled, key=lambda room: room.left(GUARD_PLANS - FLOOR))
        left = tightest.left(GUARD_PLANS - FLOOR)
        granted = added if left == math.inf else max(0, min(added, int(left) // resident))
        least = 0 if stage.concurrency == 0 and stage.process_resident_bytes else 1  # else it never is measured
        granted = max(granted, least - (target - added))
        more += granted * resident
        if granted < added:
            now = target - (added - granted)
            detail = (
                f"{count(now, 'process', 'processes')} instead of {target}: {added} more of {size(resident)} each do "
                f"not fit into a limit of {size(tightest.limit)}, of which "
                f"{size((tightest.rest or 0) + granted * resident)} are needed otherwise"
            )
            concurrency[stage.name] = now
            reasons[stage.name] = detail
            events.append(Event("vetoed", stage.name, detail))
    allocation = replace(allocation, concurrency=concurrency, reasons=reasons)
    return allocation, [room.with_more(more) for room in rooms], events


def _cut_processes(
    allocation: Allocation, snapshot: Snapshot, rooms: Sequence[_Room]
) -> tuple[Allocation, list[Event]]:
    """The allocation with one process less where those that run leave items too little, and what was cut."""
    tightest = min(rooms, key=lambda room: room.left(GUARD_PLANS - FLOOR / 2))
    if tightest.left(GUARD_PLANS - FLOOR / 2) >= 0:
        return allocation, []
    held = {
        stage.name: (live * stage.process_resident_bytes, live)
        for stage in snapshot.stages
        if stage.process_resident_bytes and (live := processes_held(stage, allocation.slots)[0]) > 1
    }
    if not held:
        return allocation, []
    name = max(held, key=lambda each: held[each][0])
    total, live = held[name]
    detail = (
        f"{count(live - 1, 'process', 'processes')} instead of {live}: they hold {size(total)}, and all but items in "
        f"flight {size(tightest.rest)} of {size(tightest.limit)}"
    )
    wanted = allocation.concurrency[name]
    if wanted is not None and wanted < live:
        return allocation, []  # fewer are wanted already
    cut = replace(
        allocation,
        concurrency={**allocation.concurrency, name: live - 1},
        reasons={**allocation.reasons, name: detail},
    )
    return cut, [Event("vetoed", name, detail)]


def _still_to_come(stage: StageSnapshot, slots: int) -> int:
    """Bytes that the processes there are, or are being started, do not hold yet but will, as far as that is known."""
    starting = processes_held(stage, slots)[1]
    return starting * (stage.process_resident_bytes or UNMEASURED) + (stage.process_growth_bytes or 0)


def _growing(stages: Sequence[StageSnapshot], allocation: Allocation) -> list[tuple[StageSnapshot, int, int, int]]:
    """The stages that would get more processes: (stage, target, how many more, resident bytes of each)."""
    found = []
    for stage in stages:
        target = allocation.concurrency[stage.name]
        if target is None:
            target = processes_when_open(stage.info, allocation.slots)
        ready, starting, _ = processes_held(stage, allocation.slots)
        added = target - ready - starting
        if added > 0:
            found.append((stage, target, added, stage.process_resident_bytes or UNMEASURED))
    return found
