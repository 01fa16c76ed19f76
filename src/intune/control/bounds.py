"""How much faster a run could be at most, by the figures of a window.

Each bound holds while items cost what they do: the training loop takes no more than it can, all slots at work are all
there are, and a stage with a limit of its own works on no more than that. None of them says that it can be reached.
"""

import math
from typing import NamedTuple

from intune._values import Snapshot, StageSnapshot

LEAST_ITEMS = 10
"""Items at few and at many at once from which their seconds are compared."""


class Crowding(NamedTuple):
    """How an item's seconds compare at few and at many at once.

    Attributes:
        few: The most at once of those that count as few: up to half of `many`.
        many: The most at once that occurred.
        ratio: How many times as long an item took with more than `few` at once. Above 1 it does not say that items
            hinder each other: while dear ones come along more of them pile up. About 1 it says that they do not.
    """

    few: int
    many: int
    ratio: float


def trainer_bound(snapshot: Snapshot) -> float:
    """How many times as much the training loop could take at most."""
    consumer = snapshot.consumer
    return 1 / (1 - consumer.wait_share) if consumer.steps and consumer.wait_share < 1 else math.inf


def slots_bound(snapshot: Snapshot) -> float:
    """How many times as much the slots could do at most if all of them worked all the time."""
    busy = sum(stage.busy_seconds for stage in snapshot.stages if not stage.info.waits)
    return snapshot.allocation.slots * snapshot.window_seconds / busy if busy > 0 else math.inf


def bound_without(snapshot: Snapshot, freed: StageSnapshot | None) -> float:
    """How many times as fast the run would be at most if one stage had no limit of its own; at least 1."""
    bounds = [trainer_bound(snapshot), slots_bound(snapshot)]
    for stage in snapshot.stages:
        most = most_at_once(stage)
        if stage is not freed and most is not None and stage.busy_seconds > 0:
            bounds.append(most * snapshot.window_seconds / stage.busy_seconds)
    return max(1.0, min(bounds))


def most_at_once(stage: StageSnapshot) -> int | None:
    """The most items that it may work on at once; None = as many as there are slots, or threads."""
    limits = (stage.concurrency, stage.info.max_concurrency, stage.processes_live or None)
    return min((most for most in limits if most is not None), default=None)


def crowding(stage: StageSnapshot) -> Crowding | None:
    """Seconds of an item at few and at many at once; None where there were too few items of either."""
    levels = stage.wall_seconds_by_crowd
    if not levels:
        return None
    many = max(crowd for crowd, _, _ in levels)
    few_items = [level for level in levels if 2 * level[0] <= many]
    few, more = _mean(few_items), _mean([level for level in levels if 2 * level[0] > many])
    if few is None or more is None or few <= 0:
        return None
    return Crowding(max(crowd for crowd, _, _ in few_items), many, more / few)


def _mean(levels: list[tuple[int, int, float]]) -> float | None:
    items = sum(count for _, count, _ in levels)
    return sum(count * seconds for _, count, seconds in levels) / items if items >= LEAST_ITEMS else None
