"""What may be done instead of what the fitted model proposes: a few joint departures from it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from intune._values import Allocation, Budget, Snapshot, StageSnapshot
from intune.tuners._rows import in_force, most_useful

FACTORS = ((0.5, 0.75, 1.5, 2.0), (0.5, 1.5), (0.5, 1.5))
"""What the concurrency of the fullest stage is multiplied by, of the next one, and of the third."""

LESS, MORE = 0.6, 2.0
"""What the concurrency of all stages at once is multiplied by."""

MOVE_FEATURES = 5
"""Numbers for each stage that say what a move does to it."""


class Move(NamedTuple):
    """A departure: what is done, in words, and the concurrency of the stages that depart; None = open."""

    name: str
    levels: Mapping[str, int | None]


class _Stages:
    """Concurrency in numbers: what an open one stands for, and when a number is as good as open."""

    def __init__(self, snapshot: Snapshot, budget: Budget, proposal: Allocation) -> None:
        self.limit = {stage.name: most_useful(stage.info, budget) for stage in snapshot.stages}
        self.process = {stage.name: stage.info.executor == "process" for stage in snapshot.stages}
        self.proposed = {name: self.number(name, proposal.concurrency[name]) for name in self.limit}

    def number(self, name: str, concurrency: int | None) -> int:
        return self.limit[name] if concurrency is None else max(1, min(concurrency, self.limit[name]))

    def departing(self, levels: Mapping[str, int]) -> dict[str, int | None]:
        """Those that differ from what is proposed."""
        found: dict[str, int | None] = {}
        for name, level in levels.items():
            within = self.number(name, level)
            if within != self.proposed[name]:
                found[name] = None if within == self.limit[name] and not self.process[name] else within
        return found


def moves(snapshot: Snapshot, budget: Budget, proposal: Allocation) -> list[Move]:
    """Departures from a proposal, each different from it and from the others.

    All stages on threads open; what is in force; all that are limited with more; all with less; the CPUs in equal
    parts; those that wait with more or less; and the fullest stages, one at a time, with more or less.
    """
    stages = _Stages(snapshot, budget, proposal)
    have, now = stages.proposed, in_force(snapshot)
    waits = [stage.name for stage in snapshot.stages if stage.info.waits]
    share = max(1, budget.cpus // len(have))
    wanted: list[tuple[str, dict[str, int]]] = [
        ("all open", {name: most for name, most in stages.limit.items() if not stages.process[name]}),
        ("as in force", {name: stages.number(name, now[name]) for name in have}),
        ("all more", {name: round(MORE * have[name]) for name in have if proposal.concurrency[name] is not None}),
        ("all less", {name: round(LESS * level) for name, level in have.items()}),
        ("equal parts", {name: share for name in have if name not in waits}),
        ("waiting stages more", {name: round(MORE * have[name]) for name in waits}),
        ("waiting stages less", {name: have[name] // 2 for name in waits}),
    ]
    for stage, factors in zip(_fullest(snapshot.stages, stages), FACTORS, strict=False):
        for factor in factors:
            level = round(have[stage] * factor)
            if level == have[stage]:
                level += 1 if factor > 1 else -1
            wanted.append((f"{stage} times {factor:g}", {stage: level}))
    found: list[Move] = []
    for name, levels in wanted:
        departing = stages.departing(levels)
        if departing and all(departing != each.levels for each in found):
            found.append(Move(name, departing))
    return found


def _fullest(all_stages: Sequence[StageSnapshot], stages: _Stages) -> list[str]:
    """Stages that may have another concurrency, those first that use most of what they would get."""
    free = [stage for stage in all_stages if stages.limit[stage.name] > 1]
    return [each.name for each in sorted(free, key=lambda each: -each.in_hand_mean / stages.proposed[each.name])]


def move_features(
    snapshot: Snapshot, budget: Budget, proposal: Allocation, departures: Sequence[Mapping[str, int | None]]
) -> npt.NDArray[np.float32]:
    """float32[C, S, MOVE_FEATURES]: what each of C departures does to each stage; an empty one follows the proposal."""
    stages, now = _Stages(snapshot, budget, proposal), in_force(snapshot)
    found = np.zeros((len(departures), len(stages.limit), MOVE_FEATURES), np.float32)
    for row, levels in zip(found, departures, strict=True):
        for numbers, (name, limit) in zip(row, stages.limit.items(), strict=True):
            asked = levels.get(name, proposal.concurrency[name])
            level, proposed, before = stages.number(name, asked), stages.proposed[name], stages.number(name, now[name])
            numbers[:] = (
                math.log(level / proposed),
                math.log(level / before),
                math.log(level / limit) / 2,
                asked is None,
                level != proposed,
            )
    return found
