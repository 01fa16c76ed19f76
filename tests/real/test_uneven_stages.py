"""Stages of unequal cost: how many items a second come out, with the loader's own choice and with fixed ones.

Work is emulated, and so is time: what a stage would do in some seconds it does at once, and its result is booked when
those seconds have passed on a clock that jumps from one end of work to the next. The engine, its scheduler, the tuner
and the control are the real ones, so that counts are exact and depend on no machine.
"""

import heapq
import threading
from typing import Any

import pytest

import intune
from intune._compose import build_loader
from intune._values import Budget
from intune.control.controller import intervals
from intune.pipeline.options import LoaderOptions
from intune.pipeline.scheduler import Task
from intune.testing import EmulatedClock, TokenPool, emulated
from intune.tuners import Static

pytestmark = pytest.mark.timeout(180)

WARM_UP, MEASURED = 100, 400
"""Items that may come before the rate has to be reached, and items over which it is measured."""
FOUND_OUT_SECONDS = 2.0
"""Seconds in which the default tuner lets stages begin with few items at once, to see how they scale."""


class Jumps:
    """Time that the test's thread moves. Its sleep is only noted, as work that ends so much later."""

    def __init__(self) -> None:
        self.now = self.ahead = 0.0
        self._thread = threading.get_ident()

    def wall(self) -> float:
        return self.now + (self.ahead if threading.get_ident() == self._thread else 0.0)

    def cpu(self) -> float:
        return 0.0

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        if threading.get_ident() != self._thread:
            return wake.wait()  # the control and its probes: the test takes the decisions itself
        self.ahead += seconds
        return wake.is_set()


class EmulatedLoader:
    """A loader without threads of its own: whoever waits for it has its work done, in the order of its ends."""

    def __init__(self, pipe: intune.Pipeline, time: Jumps, clock: EmulatedClock, slots: int, **options: Any) -> None:
        self.time = time
        self.loader = build_loader(pipe, LoaderOptions(**options), clock=clock, budget=lambda: Budget(slots))
        self._engine = self.loader._engine
        self._engine.scheduler.max_threads = 0
        self._engine._arrived = self  # type: ignore[assignment]
        self._under_way: list[tuple[float, int, Task]] = []
        self._begun = 0
        self._intervals = intervals(1.0)
        self._decides_at = next(self._intervals)

    def notify_all(self) -> None:
        """Nobody sleeps."""

    def wait(self) -> None:
        """The consumer waits until something has happened."""
        self._begin_all()
        assert self._under_way, "nothing is under way, and nothing can begin"
        self._jump(self._under_way[0][0])

    def spend(self, seconds: float) -> None:
        """The consumer is busy while the stages go on."""
        until = self.time.now + seconds
        self._begin_all()
        while self._under_way and self._under_way[0][0] <= until:
            self._jump(self._under_way[0][0])
            self._begin_all()
        self.time.now = until

    def _begin_all(self) -> None:
        scheduler = self._engine.scheduler
        with scheduler.lock:
            while (task := scheduler.take()) is not None:
                scheduler.lock.release()
                try:
                    task.run()
                finally:
                    scheduler.lock.acquire()
                self._begun += 1
                heapq.heappush(self._under_way, (self.time.wall(), self._begun, task))
                self.time.ahead = 0.0

    def _jump(self, to: float) -> None:
        scheduler = self._engine.scheduler
        self.time.now = to
        with scheduler.lock:
            while self._under_way and self._under_way[0][0] <= to:
                _, _, task = heapq.heappop(self._under_way)
                scheduler.observe()
                if task.holds_slot:
                    scheduler.used -= 1
                task.done()
        if to >= self._decides_at:
            self._decides_at = to + next(self._intervals)
            self.loader._control._controller.step()  # type: ignore[attr-defined]


class Reads:
    """A dataset whose samples take a token for some seconds."""

    def __init__(self, seconds: float, tokens: TokenPool) -> None:
        self._read = emulated(seconds, tokens)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        return self._read(index)


STAGES = ("from_dataset", "first", "second", "third")


def make(costs: tuple[float, ...], slots: int, **options: Any) -> EmulatedLoader:
    """A loader of four stages that take so many milliseconds an item."""
    time = Jumps()
    clock = EmulatedClock(time)
    tokens = TokenPool(slots, clock)
    pipe = intune.from_dataset(Reads(costs[0] / 1e3, tokens))
    for name, cost in zip(STAGES[1:], costs[1:], strict=True):
        pipe = pipe.map(emulated(cost / 1e3, tokens), name=name)
    return EmulatedLoader(pipe, time, clock, slots, **options)


def rate(costs: tuple[float, ...], slots: int, *, seconds: float = 0.0, **options: Any) -> float:
    """Items a second after the warm-up, which takes so many seconds at least."""
    emulation = make(costs, slots, **options)
    with emulation.loader as loader:
        began, first = 0.0, None
        for number, value in enumerate(loader):
            assert value == number
            if first is None and number >= WARM_UP and emulation.time.now >= seconds:
                began, first = emulation.time.now, number
            if first is not None and number == first + MEASURED:
                return MEASURED / (emulation.time.now - began)
    raise AssertionError("the loader ended too early")


def fixed(*concurrency: int) -> Static:
    return Static(dict(zip(STAGES, concurrency, strict=True)))


def best_split(costs: tuple[float, ...], slots: int) -> tuple[float, tuple[int, ...]]:
    """The most items a second that any fixed split of the slots gives, and the split."""
    splits = [
        (a, b, c, slots - a - b - c)
        for a in range(1, slots - 2)
        for b in range(1, slots - a - 1)
        for c in range(1, slots - a - b)
    ]
    return max((min(1e3 * n / cost for n, cost in zip(split, costs, strict=True)), split) for split in splits)


@pytest.mark.parametrize(("slots", "best", "even"), [(16, 500.0, 200.0), (8, 200.0, 100.0)])
def test_the_emulation_gives_what_arithmetic_says_of_fixed_splits(slots: int, best: float, even: float) -> None:
    """Else what follows would mean nothing."""
    costs = (4.0, 2.0, 20.0, 6.0)
    found, split = best_split(costs, slots)
    assert found == pytest.approx(best)
    assert rate(costs, slots, tuner=fixed(*split)) == pytest.approx(best, rel=0.02)
    assert rate(costs, slots, tuner=fixed(*[slots // 4] * 4)) == pytest.approx(even, rel=0.02)
    assert rate(costs, slots, tuner="even") == pytest.approx(even, rel=0.02)


@pytest.mark.parametrize("slots", [16, 8, 5])
@pytest.mark.parametrize(
    "costs", [(4.0, 2.0, 20.0, 6.0), (20.0, 6.0, 2.0, 4.0), (1.0, 1.0, 1.0, 30.0), (5.0, 5.0, 5.0, 5.0)]
)
def test_without_any_setting_the_rate_is_that_of_the_best_split(costs: tuple[float, ...], slots: int) -> None:
    best, _ = best_split(costs, slots)
    assert rate(costs, slots, seconds=FOUND_OUT_SECONDS) >= 0.85 * best
    assert rate(costs, slots, tuner="shared") >= 0.85 * best


def consumed(step: float, **options: Any) -> tuple[float, float, EmulatedLoader]:
    """The share of time that a consumer waited who is busy for so long with each item, and items a second."""
    emulation = make((4.0, 2.0, 20.0, 6.0), 16, tuner="shared", **options)
    waited, iterator = 0.0, iter(emulation.loader)
    for _ in range(1000):
        asked = emulation.time.now
        next(iterator)
        waited += emulation.time.now - asked
        emulation.spend(step)
    return waited / emulation.time.now, 1000 / emulation.time.now, emulation


@pytest.mark.parametrize("prefetch", [2, 16, None])
@pytest.mark.parametrize("step", [0.0, 0.0015, 0.010])
def test_the_share_of_time_that_the_consumer_waited_is_said(step: float, prefetch: int | None) -> None:
    """The stages can give an item every two milliseconds; with few waiting ones they give them in bursts."""
    share, _, emulation = consumed(step, prefetch=prefetch)
    with emulation.loader as loader:
        stats = loader.stats()
        assert stats.seconds == pytest.approx(emulation.time.now)
        assert stats.wait_seconds == pytest.approx(share * emulation.time.now)
        assert stats.window is not None
        assert stats.window.consumer.wait_share == pytest.approx(share, abs=0.05)
        text = loader.explain()
        assert f"waited for data {100 * stats.window.consumer.wait_share:.0f} % of the time" in text
    if prefetch != 2:
        assert share == pytest.approx({0.0: 1.0, 0.0015: 0.25, 0.010: 0.0}[step], abs=0.05)


@pytest.mark.parametrize("step", [0.0, 0.0015, 0.0025, 0.004])
def test_a_consumer_about_as_fast_as_the_stages_gets_nearly_their_rate(step: float) -> None:
    """Items do not come in bursts: one begins as another is taken."""
    _, rate, emulation = consumed(step)
    emulation.loader.close()
    assert rate >= 0.95 * min(500, 1 / step if step else 500)
