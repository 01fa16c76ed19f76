"""A pipeline made of numbers, for the brake to hold back: its functions allocate what nobody is told of.

Its items are admitted as a ledger and a forecast allow, and go on from stage to stage as they do in a segment.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from intune.control.brake import SECONDS, Brake, Reading
from intune.pipeline.growth import Growth
from intune.pipeline.ledger import Charge, Forecast, Ledger

MIB = 2**20
BASE = 400 * MIB
"""What is there without items."""


@dataclass
class Scene:
    """What is to be run.

    Attributes:
        tokens: Functions that may be at work at once.
        extra: Bytes of the limit beyond what is there without items.
        seconds, sizes, scratch: By stage: how long an item is at work, what it gives, and the share of that which is
            allocated beside it meanwhile.
        tail: Share of items, and how many times as large they are.
        burst_every: Of so many items the first tenth is three times as large; 0 = none.
        pause: Seconds in which the consumer takes nothing, from the second one on.
        step: Seconds that the consumer takes for an item.
    """

    tokens: int
    extra: int
    seconds: list[float]
    sizes: list[int]
    scratch: list[float]
    tail: tuple[float, float] = (0.0, 1.0)
    burst_every: int = 0
    pause: float = 0.0
    step: float = 0.0

    def times(self, number: int, seed: int) -> float:
        """How many times as large as usual an item is."""
        share, factor = self.tail
        times = factor if np.random.default_rng([22, seed, number]).random() < share else 1.0
        return 3 * times if self.burst_every and number % self.burst_every < self.burst_every / 10 else times


def scene(number: int) -> Scene:
    """The one with this number."""
    rng = np.random.default_rng([20, number])
    tokens, extra = int(rng.choice([8, 16, 32, 64])), int(rng.uniform(0.5, 4) * 1024 * MIB)
    count = int(rng.integers(2, 8))
    seconds = np.exp(rng.uniform(np.log(0.004), np.log(0.12), count))
    sizes = np.exp(rng.uniform(np.log(MIB / 4), np.log(16 * MIB), count))
    # No more can be written in a second than the kernel can clear.
    seconds *= max(1.0, min(0.5, sizes.sum() * tokens / (1200 * MIB)) / seconds.sum())
    sizes *= min(1.0, 1200 * MIB * seconds.sum() / tokens / sizes.sum())
    factor = max(1.0, min(float(rng.uniform(4, 16)), extra / 16 / sizes.max()))
    return Scene(
        tokens=tokens,
        extra=extra,
        seconds=seconds.tolist(),
        sizes=sizes.astype(int).tolist(),
        scratch=np.where(rng.random(count) < 0.25, rng.uniform(0.5, 2.0, count), 0.0).tolist(),
        tail=(0.03, factor) if rng.random() < 1 / 3 else (0.0, 1.0),
        burst_every=int(rng.integers(100, 400)) if rng.random() < 1 / 4 else 0,
        pause=1.5 if rng.random() < 1 / 3 else 0.0,
        step=float(rng.uniform(0.5, 2.0) * seconds.sum() / tokens) if rng.random() < 1 / 3 else 0.0,
    )


@dataclass
class Passing:
    """An item on its way."""

    number: int
    charge: Charge
    times: float
    place: int = 0
    came: int = 0
    largest: int = 0


@dataclass
class Plant:
    """Runs a scene: deeper stages go first, and the consumer gets items in order.

    `peaks` and `done_at` say, for each step, the most bytes that were used in it, and the items that had come out.
    """

    scene: Scene
    seed: int
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    memory: int = BASE
    peak: int = BASE
    peaks: list[int] = field(default_factory=list)
    done: int = 0
    done_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([21, self.seed])
        self._forecast, self._owner = Forecast(), set[Charge]()
        self._ends: list[tuple[float, int, Passing]] = []
        self._freed: list[tuple[float, int]] = []
        self._waiting: list[list[tuple[int, Passing]]] = [[] for _ in self.scene.sizes]
        self._growth = [Growth() for _ in self.scene.sizes]
        self._ready: list[tuple[int, Passing]] = []
        self._begun = 0
        self._consumer_free = 0.0

    def go_on(self, until: float) -> None:
        """Let time pass."""
        self._begin_all(until)
        while self._ends and self._ends[0][0] <= until:
            now, _, item = heapq.heappop(self._ends)
            self._give_back(now)
            self._finish(now, item)
            self._consume(now)
            self._begin_all(now)
        self._give_back(until)
        self._consume(until)
        self._begin_all(until)

    def _begin_all(self, now: float) -> None:
        while len(self._ends) < self.scene.tokens:
            item = self._next()
            if item is None:
                return
            out = self._gives(item)
            self.ledger.work_on(item.charge, self._needs(item, item.place))
            self.memory += out + int(out * self.scene.scratch[item.place])
            self.peak = max(self.peak, self.memory)
            seconds = self.scene.seconds[item.place] * float(self._rng.uniform(0.8, 1.2))
            heapq.heappush(self._ends, (now + seconds, item.number, item))

    def _next(self) -> Passing | None:
        for place in reversed(range(len(self._waiting))):
            waiting = self._waiting[place]
            if waiting and self._proven(place) and self._goes_on(waiting[0][1], place):
                return heapq.heappop(waiting)[1]
        return self._admitted() if self._proven(0) else None

    def _proven(self, place: int) -> bool:
        """Before an item has passed a stage only one at a time is let in."""
        return self._growth[place].usual > 0 or all(item.place != place for _, _, item in self._ends)

    def _goes_on(self, item: Passing, place: int) -> bool:
        charge, budget = item.charge, self.ledger.budget or 0
        here = self._needs(item, place)
        needs = max(here, self._forecast.bytes(1, budget))
        has = max(charge.reserved, charge.actual)
        fits = needs <= 1.1 * has or self.ledger.admits(needs - has)
        allowed = budget > 0 and fits and self.ledger.admits_work(here)
        waits = bool(self._ready) and self._ready[0][0] == self.done  # for the consumer, who gives bytes back
        if not allowed and (waits or (item.number != self.done and self._ends)):
            return False
        self.ledger.raise_to(charge, needs)
        return True

    def _needs(self, item: Passing, place: int) -> int:
        return item.came + int(self._growth[place].predict(item.came))

    def _admitted(self) -> Passing | None:
        size = self._forecast.bytes(1, self.ledger.budget or 0)
        number = self._begun
        if number - self.done > self.scene.tokens + max(4, self.scene.tokens // 2):
            return None
        if not (self._forecast.known and self.ledger.admits(size)) and number > self.done:
            return None
        self._begun += 1
        return Passing(number, self.ledger.reserve(size, self._owner), self.scene.times(number, self.seed))

    def _gives(self, item: Passing) -> int:
        return int(self.scene.sizes[item.place] * item.times)

    def _finish(self, now: float, item: Passing) -> None:
        out, growth = self._gives(item), self._growth[item.place]
        self._free(now, item.came + int(out * self.scene.scratch[item.place]))
        item.largest = max(item.largest, item.came + out)
        self._forecast.note(1, item.largest)
        if item.place == 0 and growth.usual > 0:
            self._forecast.compare(out / growth.usual)
        growth.add(item.came, out)
        item.came, item.place = out, item.place + 1
        self.ledger.true_up(item.charge, {item.number: out})
        if item.place < len(self._waiting):
            heapq.heappush(self._waiting[item.place], (item.number, item))
        else:
            self.ledger.settle(item.charge)
            heapq.heappush(self._ready, (item.number, item))

    def _consume(self, now: float) -> None:
        paused = 1.0 <= now < 1.0 + self.scene.pause
        while self._ready and self._ready[0][0] == self.done and not paused and now >= self._consumer_free:
            item = heapq.heappop(self._ready)[1]
            self._consumer_free = now + self.scene.step
            self._forecast.add(1, item.largest)
            self.ledger.release(item.charge)
            self._free(now, item.came)
            self.done += 1

    def _free(self, now: float, size: int) -> None:
        """Allocators give back a little later."""
        heapq.heappush(self._freed, (now + float(self._rng.uniform(0, 0.1)), size))

    def _give_back(self, now: float) -> None:
        while self._freed and self._freed[0][0] <= now:
            self.memory -= heapq.heappop(self._freed)[1]


def run(
    chosen: Scene,
    seed: int,
    seconds: float,
    limit: Callable[[float, int], int] = lambda now, limit: limit,
    *,
    braked: bool = True,
) -> Plant:
    """A scene with the brake, or without; `limit` may change its limit (seconds, limit) -> limit while it runs."""
    plant, brake, next_one = Plant(chosen, seed), Brake(), 0.0
    for step in range(int(seconds / SECONDS)):
        now = step * SECONDS
        plant.go_on(now)
        if now > next_one - SECONDS / 2:
            most = limit(now, BASE + chosen.extra)
            said = brake.observe(Reading(now, most, plant.memory, plant.ledger.in_flight()))
            plant.ledger.budget, plant.ledger.work_budget = (
                (said.in_flight_bytes, said.working_bytes) if braked else (2**60, None)
            )
            next_one = now + said.seconds
        plant.peaks.append(plant.peak)
        plant.done_at.append(plant.done)
        plant.peak = plant.memory
    return plant
