"""Snapshots and budgets as a tuner may meet them, drawn from a seed: good windows, cold ones, missing figures, cuts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from intune._values import (
    CAUSES,
    CROWDS,
    Allocation,
    Budget,
    ConsumerSnapshot,
    Event,
    MachineSnapshot,
    Snapshot,
    StageInfo,
    StageSnapshot,
)

MOODS = ("measured", "cold", "holes", "extreme")
"""What windows are like: all figures; nothing yet; any figure may be None; zeros and very large figures."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One workload for a few decisions.

    Attributes:
        stages: Its stages.
        mood: One of `MOODS`.
        budgets: What holds at each decision.
        seed: Where the figures are drawn from.
    """

    stages: tuple[StageInfo, ...]
    mood: str
    budgets: tuple[Budget, ...]
    seed: int


def scenes(stages: Sequence[StageInfo] | None = None) -> list[Scene]:
    """Each mood on 1 to 12 stages, or on the given ones; the CPUs are cut, given back, cut to 1 and raised to 128."""
    found: list[Scene] = []
    for count in range(1, 13):
        for mood in MOODS:
            seed = len(found)
            draw = random.Random(seed)
            chosen = tuple(stages) if stages else tuple(_stage(draw, place) for place in range(count))
            memory = draw.choice((None, 2**28, 2**33))
            found.append(Scene(chosen, mood, tuple(_budgets(len(chosen), memory)), seed))
    return found


def window(scene: Scene, number: int, allocation: Allocation, events: Sequence[Event]) -> Snapshot:
    """The window before decision `number` of a scene, in which `allocation` was in force."""
    draw = random.Random(f"{scene.seed} {number}")
    cold = scene.mood == "cold" or (number == 0 and scene.mood != "extreme")
    stages = tuple(_measured(draw, scene.mood, cold, stage, allocation) for stage in scene.stages)
    memory = scene.budgets[number].memory_bytes
    machine = MachineSnapshot(
        cpus=scene.budgets[number].cpus,
        cpu_seconds_used=None if cold else draw.uniform(0, allocation.slots),
        lock_wait_seconds=draw.choice((None, 1e-4, 0.02)),
        memory_bytes=None if memory is None else int(memory * draw.uniform(0.2, 1.1)),
        memory_limit_bytes=memory,
    )
    steps = 0 if cold else draw.choice((0, 1, 50))
    return Snapshot(
        window_seconds=draw.choice((1e-6, 1.0)) if scene.mood == "extreme" else 1.0,
        warm=not cold and all(stage.items_out for stage in stages),
        stages=stages,
        consumer=ConsumerSnapshot(
            steps, steps * 64, 1 / steps if steps else None, draw.random(), None, draw.randint(0, 2)
        ),
        machine=machine,
        allocation=allocation,
        in_flight_items=draw.randint(0, 40),
        in_flight_bytes=None if cold else draw.randint(0, 2**28),
        in_flight_bytes_limit=allocation.in_flight_bytes,
        epoch=None if cold else number // 4,
        events=tuple(events),
    )


def _stage(draw: random.Random, place: int) -> StageInfo:
    if place == 0:
        return StageInfo(
            "source", "source", max_concurrency=draw.choice((None, 1, 16)), waits=draw.choice((True, False))
        )
    kind = draw.choice(("map", "map_rows", "filter", "flat_map", "shuffle", "batch"))
    executor = "process" if kind in ("map", "filter") and draw.random() < 0.5 else "thread"
    waits = executor == "thread" and draw.choice((None, False, False, True))
    return StageInfo(
        f"stage {place}", kind, "process" if executor == "process" else "thread", draw.choice((None, 1, 8)), waits
    )


def _budgets(stages: int, memory: int | None) -> list[Budget]:
    most = max(8, 2 * stages)
    return [Budget(cpus, 64, most, memory) for cpus in (16, 16, 4, 16, 1, 1, 128, 128)]


def _measured(draw: random.Random, mood: str, cold: bool, stage: StageInfo, allocation: Allocation) -> StageSnapshot:
    concurrency = allocation.concurrency[stage.name]
    at_most = allocation.slots if concurrency is None else concurrency
    process = stage.executor == "process"
    found = StageSnapshot(
        stage,
        concurrency,
        running=0 if cold else draw.randint(0, at_most),
        processes_live=min(at_most, stage.max_concurrency or at_most) if process else None,
        processes_starting=0 if process else None,
        processes_leaving=0 if process else None,
    )
    if cold:
        return found
    wall = _figure(draw, mood, 10 ** draw.uniform(-4, 0))
    items = draw.randint(0, 1000) if mood == "extreme" else draw.randint(1, 1000)
    shares = [draw.random() / len(CAUSES) for _ in CAUSES]
    size = int(10 ** draw.uniform(3, 8))
    found = replace(
        found,
        items_in=items,
        items_out=items,
        rows_out=items * draw.choice((0, 1, 1000)),
        source_rows_per_item=_figure(draw, mood, draw.choice((0.01, 1.0, 8192.0))),
        wall_seconds_mean=wall,
        wall_seconds_p50=wall,
        wall_seconds_p99=None if wall is None else 3 * wall,
        cpu_seconds_mean=None if wall is None else wall * draw.random(),
        busy_seconds=at_most * draw.random(),
        in_hand_mean=at_most * draw.random(),
        wall_seconds_by_crowd=() if wall is None else ((1, 1, wall / 2), (draw.choice(CROWDS[1:]), items, wall)),
        wait_share=dict(zip(CAUSES, shares, strict=True)),
        item_bytes_mean=float(size),
        item_bytes_p99=2.0 * size,
        item_bytes_max=3 * size,
        process_resident_bytes=draw.choice((None, 2**26)) if process else None,
        saturated_concurrency=draw.choice((None, 1, at_most)),
    )
    return replace(found, **_holes(draw)) if mood == "holes" else found


def _figure(draw: random.Random, mood: str, usual: float) -> float:
    return draw.choice((0.0, 1e-12, 1e9, usual)) if mood == "extreme" else usual


def _holes(draw: random.Random) -> dict[str, Any]:
    may_be_missing = (
        "source_rows_per_item",
        "wall_seconds_mean",
        "wall_seconds_p50",
        "wall_seconds_p99",
        "cpu_seconds_mean",
        "item_bytes_mean",
        "item_bytes_p99",
        "item_bytes_max",
        "processes_live",
        "processes_starting",
        "processes_leaving",
    )
    return dict.fromkeys(name for name in may_be_missing if draw.random() < 0.4)
