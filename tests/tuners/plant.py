"""A small pipeline in figures: how many rows it delivers under an allocation, by flow and not by any tuner's model.

Stages work at n items at once for `seconds * (1 + slope (n - 1) + bend n (n - 1))` a row. Slots go to the deepest
stage that has input; few rows may lie between the source and the trainer; threads share the interpreter lock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from intune._values import (
    Allocation,
    Budget,
    ConsumerSnapshot,
    Event,
    MachineSnapshot,
    Snapshot,
    StageInfo,
    StageSnapshot,
    Tuner,
)
from intune.control.guard import Guard
from intune.testing import ScriptedWorkload

STEP = 0.005
THREADS = 64


@dataclass
class PlantStage:
    """One stage: the curve of its seconds a row, and the share of them in which it holds the interpreter lock."""

    name: str
    seconds: float
    slope: float = 0.0
    bend: float = 0.0
    lock: float = 0.0
    executor: str = "thread"
    waits: bool = False
    max_concurrency: int | None = None
    process_bytes: int | None = None
    waiting: float = 0.0

    @property
    def info(self) -> StageInfo:
        kind = "source" if self.name == "source" else "map"
        return StageInfo(self.name, kind, self.executor, self.max_concurrency, self.waits)  # type: ignore[arg-type]

    def rate(self, busy: float) -> float:
        more = max(0.0, busy - 1)
        return busy / (self.seconds * (1 + self.slope * more + self.bend * more * (more + 1)))


class Plant:
    """A function from the allocation in force to the snapshot of one more second."""

    def __init__(
        self, stages: Sequence[PlantStage], *, cpus: int = 8, trainer: float = 0.0, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.stages, self.cpus, self.trainer, self.noise = list(stages), cpus, trainer, noise
        self.ready = 0.0
        self.rates: list[float] = []
        self._draw = random.Random(seed)

    def __call__(self, allocation: Allocation) -> Snapshot:
        busy, done, lost = ([0.0] * len(self.stages) for _ in range(3))
        taken = blocked = 0.0
        for _ in range(round(1 / STEP)):
            step = self._flow(allocation, busy, done, lost)
            taken += step[0]
            blocked += step[1]
        self.rates.append(taken)
        figures = zip(self.stages, busy, done, lost, strict=True)
        found = tuple(self._seen(allocation, *each) for each in figures)
        locked = any(share > 0.05 * used for share, used in zip(lost, busy, strict=True))
        consumer = ConsumerSnapshot(int(taken), int(taken), 1 / taken if taken else None, min(1.0, blocked))
        held = sum(each.processes_live * (each.process_resident_bytes or 0) for each in found if each.processes_live)
        machine = MachineSnapshot(
            self.cpus, lock_wait_seconds=0.012 if locked else 1e-4, memory_bytes=2**30 + held, memory_limit_bytes=2**33
        )
        return Snapshot(1.0, all(s.items_out for s in found), found, consumer, machine, allocation)

    def _flow(
        self, allocation: Allocation, busy: list[float], done: list[float], lost: list[float]
    ) -> tuple[float, float]:
        """One step; the rows that the trainer took, and the seconds for which it was blocked."""
        free, moved, at_work = float(allocation.slots), [0.0] * len(self.stages), [0.0] * len(self.stages)
        ahead = sum(stage.waiting for stage in self.stages[1:]) + self.ready
        for place in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[place]
            most = self.most(stage, allocation)
            at_once = min(most, max(0.0, 1.5 * self.cpus + 4 - ahead if place == 0 else stage.waiting))
            if place == len(self.stages) - 1:
                at_once = min(at_once, max(0.0, 2 + self.cpus - self.ready))
            if not stage.waits:
                at_once = min(at_once, free)
                free -= at_once
            moved[place] = stage.rate(at_once) * STEP if at_once else 0.0
            busy[place] += at_once * STEP
            at_work[place] = at_once
        stretch = self._stretch(at_work)
        for place, stage in enumerate(self.stages):
            slowed = 1 / (1 - stage.lock + stage.lock * stretch)
            lost[place] += at_work[place] * (1 - slowed) * STEP
            moved[place] *= slowed
            done[place] += moved[place]
            if place:
                stage.waiting -= moved[place]
            if place + 1 < len(self.stages):
                self.stages[place + 1].waiting += moved[place]
        self.ready += moved[-1]
        wanted = STEP / self.trainer if self.trainer else self.ready
        taken = min(self.ready, wanted)
        self.ready -= taken
        return taken, STEP * (1 - taken / wanted) if self.trainer and wanted else STEP

    def most(self, stage: PlantStage, allocation: Allocation) -> int:
        """Items that it may work on at once."""
        most = allocation.concurrency[stage.name] or allocation.slots
        if stage.waits and allocation.concurrency[stage.name] is None:
            most = (THREADS - allocation.slots) // sum(each.waits for each in self.stages)
        return min(most, stage.max_concurrency or most)

    def _stretch(self, at_work: list[float]) -> float:
        """How many times as long the parts of all stages take that hold the lock, so that one holds it at a time."""
        if not any(stage.lock for stage in self.stages):
            return 1.0
        low, high = 1.0, 1000.0
        for _ in range(30):
            middle = (low + high) / 2
            held = sum(
                n * stage.lock / (1 - stage.lock + stage.lock * middle)
                for n, stage in zip(at_work, self.stages, strict=True)
            )
            low, high = (middle, high) if held > 1 else (low, middle)
        return low

    def _seen(self, allocation: Allocation, stage: PlantStage, busy: float, done: float, lost: float) -> StageSnapshot:
        wall = busy / done * self._draw.uniform(1 - self.noise, 1 + self.noise) if done else None
        share = 1 - lost / busy if busy else 1.0
        process = stage.executor == "process"
        return StageSnapshot(
            stage.info,
            None,
            round(busy),
            processes_live=self.most(stage, allocation) if process else None,
            items_out=int(done),
            source_rows_per_item=1.0,
            wall_seconds_mean=wall,
            cpu_seconds_mean=wall and wall * share * (0.02 if stage.waits else 1.0),
            busy_seconds=busy,
            run_queue_seconds=0.0,
            process_resident_bytes=stage.process_bytes,
        )


def run(
    tuner: Tuner, plant: Plant, decisions: int, *, start: Allocation | None = None
) -> tuple[list[Allocation], list[float]]:
    """What was applied at each decision, and the rows that came out of the second after it; from all open on."""
    budget = Budget(cpus=plant.cpus)
    workload = ScriptedWorkload([stage.info for stage in plant.stages], plant)
    workload.apply(start or Allocation({stage.name: None for stage in plant.stages}, plant.cpus))
    before, guard, events = len(plant.rates), Guard(), list[Event]()
    for _ in range(decisions):
        snapshot = replace(workload.snapshot(), events=tuple(events))
        allowed, events = guard.check(tuner.propose(snapshot, budget), snapshot, budget)
        workload.apply(allowed)
    workload.snapshot()
    return workload.applied[1:], plant.rates[before + 1 :]
