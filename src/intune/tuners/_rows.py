"""What a window says of each stage by *source row*, the unit in which stages of one pipeline can be compared."""

import math

from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot


def wall_per_row(stage: StageSnapshot) -> float | None:
    """Wall seconds for which it works on what one source row becomes; None where a figure is missing."""
    return _per_row(stage, stage.wall_seconds_mean)


def cpu_per_row(stage: StageSnapshot) -> float | None:
    """CPU seconds that it spends on what one source row becomes; None where a figure is missing."""
    return _per_row(stage, stage.cpu_seconds_mean)


def rows_finished(stage: StageSnapshot) -> float | None:
    """Source rows that the items stand for which it finished in the window; None where that was not measured."""
    return None if not stage.source_rows_per_item else stage.items_out * stage.source_rows_per_item


def trainer_per_row(snapshot: Snapshot) -> float | None:
    """Seconds that the training loop itself needs for a source row, its waiting left out; None if it took nothing."""
    batch = snapshot.stages[-1].source_rows_per_item
    steps = snapshot.consumer.steps
    if not steps or not batch:
        return None
    return snapshot.window_seconds * max(0.0, 1 - snapshot.consumer.wait_share) / (steps * batch)


def rows_of_source_row(snapshot: Snapshot) -> float | None:
    """Rows that the training loop takes for a source row; None where the window says nothing of it."""
    last = snapshot.stages[-1]
    if not last.items_out or not last.rows_out or not last.source_rows_per_item:
        return None
    return last.rows_out / (last.items_out * last.source_rows_per_item)


def in_force(snapshot: Snapshot) -> dict[str, int | None]:
    """The concurrency of each stage as a tuner may propose it again: a stage that a user paused is open."""
    return {stage.name: snapshot.allocation.concurrency.get(stage.name) or None for stage in snapshot.stages}


def most_useful(stage: StageInfo, budget: Budget) -> int:
    """The largest concurrency that can be of use: for stages that compute no more than there are CPUs."""
    largest = budget.max_threads if stage.waits else budget.cpus
    return max(1, min(largest, stage.max_concurrency or largest))


def as_before(snapshot: Snapshot, budget: Budget, why: str) -> Allocation:
    """What is in force, on all CPUs, with the same reason for each stage."""
    now = in_force(snapshot)
    return Allocation(now, budget.cpus, reasons=dict.fromkeys(now, f"as before: {why}"))


def whole(value: float, most: int) -> int:
    """The next whole number, from 1 to `most`; what is no number or too large gives `most`."""
    return max(1, min(most, math.ceil(value - 1e-9))) if value < most else most


def _per_row(stage: StageSnapshot, seconds: float | None) -> float | None:
    return None if seconds is None or not stage.source_rows_per_item else seconds / stage.source_rows_per_item
