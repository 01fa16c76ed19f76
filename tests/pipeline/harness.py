"""An engine without threads: each test decides who works when.

`Stepped` makes a real loader whose scheduler never starts a thread: tasks are picked, run and booked one at a time,
in an order that a random generator draws, also while the consumer waits. Where nothing can go on though something is
to come, it raises: that would have been a deadlock.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from intune._values import Allocation, Budget, MachineSnapshot
from intune.pipeline.context import Context
from intune.pipeline.engine import Engine, EngineOptions
from intune.pipeline.ledger import Ledger
from intune.pipeline.loader import Loader, LoaderIterator
from intune.pipeline.run import EpochRun, Share
from intune.pipeline.scheduler import Task

from .chains import BadRowError, Chain, ids


class JumpyClock:
    """Time that goes on by random steps with each reading; `busy`: the share of it that is CPU time."""

    def __init__(self, rng: random.Random, busy: float) -> None:
        self._rng, self._busy, self._now = rng, busy, 0.0

    def wall(self) -> float:
        self._now += self._rng.choice((0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.1))
        return self._now

    def cpu(self) -> float:
        return self.wall() * self._busy

    def sleep(self, seconds: float, wake: Any) -> bool:
        raise NotImplementedError


class NoControl:
    """Nobody tunes."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def last(self) -> None: ...

    def lines(self) -> list[Any]:
        return []

    def explain(self, ended: str | None = None) -> str:
        return ""

    def owns(self, thread: Any) -> bool:
        return False


class Deadlock(AssertionError):
    """Something is to come, but nothing can go on."""


@dataclass
class Settings:
    """How an engine is set up; see `EngineOptions`."""

    slots: int = 2
    share: Share = field(default_factory=Share)
    ordered: bool = True
    skip: bool = False
    prefetch: int = 2
    max_ahead: int | None = None
    epochs: int | None = None
    memory: int | None = None
    busy: float = 1.0


class Stepped:
    """A real loader on an engine that goes on only where the test says so.

    Args:
        chain: What runs.
        settings: How.
        rng: Draws what is done next.

    Attributes:
        in_hand: Tasks that were picked and have not been finished.
        most_in_hand: The most of them at once.
        most_held: The most bytes in buffers at once, without what was reserved beyond.
    """

    def __init__(self, chain: Chain, settings: Settings, rng: random.Random) -> None:
        self.rng, self.settings = rng, settings
        context = Context(JumpyClock(rng, settings.busy), Ledger(None))
        options = EngineOptions(
            settings.share, settings.ordered, settings.skip, settings.prefetch, settings.max_ahead, settings.epochs
        )
        budget = Budget(cpus=settings.slots, max_threads=0)
        self.engine = Engine(chain.pipeline(), options, context, budget, lambda: MachineSnapshot(1), self._no_pool)
        self.ledger = context.ledger
        self.in_hand: list[Task] = []
        self.most_in_hand = self.most_held = 0
        self.engine._arrived = self  # type: ignore[assignment]
        self.allocate(settings.slots, settings.memory)
        self.loader = Loader(self.engine, NoControl())

    # the engine's bell: while the consumer waits for it, the others work

    def wait(self) -> None:
        """The consumer waits, without the lock: go on by a step, after which it looks again."""
        if not self.go_on(1):
            raise Deadlock(f"{self.runs()}, {self.ledger.charged} bytes of {self.ledger.budget}")

    def notify_all(self) -> None:
        """Nobody else waits."""

    # what a test does

    def allocate(self, slots: int, memory: int | None, concurrency: int | None = None) -> None:
        """Put an allocation into force, the same concurrency for all stages."""
        names = [stage.name for stage in self.engine.stages]
        self.engine.apply(Allocation(dict.fromkeys(names, concurrency), slots, memory))

    def step(self) -> bool:
        """Pick one more task, or finish one in hand; False if neither is possible. The lock is held."""
        if not self.in_hand or self.rng.random() < 0.6:
            task = self.engine.scheduler.take()
            if task is not None:
                self.in_hand.append(task)
                self.most_in_hand = max(self.most_in_hand, len(self.in_hand))
                return True
        if not self.in_hand:
            return False
        self._finish(self.in_hand.pop(self.rng.randrange(len(self.in_hand))))
        return True

    def go_on(self, steps: int) -> int:
        """Let the engine work for so many steps while the consumer does something else; the steps that it made."""
        with self.engine.scheduler.lock:
            return sum(1 for _ in itertools.takewhile(bool, (self.step() for _ in range(steps))))

    def come_to_rest(self) -> None:
        """Finish what is in hand and begin nothing, as threads do that are told to end."""
        with self.engine.scheduler.lock:
            while self.in_hand:
                self._finish(self.in_hand.pop(self.rng.randrange(len(self.in_hand))))

    def close(self) -> None:
        """End everything; nothing may be charged any more."""
        self.loader.close()
        self.come_to_rest()
        assert (self.ledger.charged, self.engine.scheduler.used) == (0, 0)
        assert [stage.running for stage in self.engine.live] == [0] * len(self.engine.live)
        assert (self.engine.context.busy, self.engine.context.alone) == (0, False)

    def runs(self) -> list[str]:
        """Where runs stand, for messages."""
        return [self._shown(run) for run in self.engine.runs]

    # inside

    def _finish(self, task: Task) -> None:
        scheduler = self.engine.scheduler
        scheduler.lock.release()
        try:
            task.run()
        finally:
            scheduler.lock.acquire()
        if task.holds_slot:
            scheduler.used -= 1
        task.done()
        charges = [charge for run in self.engine.runs for charge in run.charges]
        buffers = {key: size for charge in charges for key, size in charge.buffers.items()}
        self.most_held = max(self.most_held, sum(buffers.values()))

    def _shown(self, run: EpochRun) -> str:
        gates = {node.stage.info.name: node.gates() for node in run.nodes}
        roots = [(segment.low, segment.next_root, segment.total, segment.live) for segment in run.segments]
        ready = len(run.delivery.ready)
        return f"epoch {run.epoch}: {gates}, roots {roots}, {ready} ready, ended {run.delivery.ended}, {run.error!r}"

    def _no_pool(self, *args: Any) -> Any:
        raise NotImplementedError("there are no processes here")


def plain(item: Any) -> Any:
    """An item as the plain chain has it: rows, or the one row of a sample."""
    return item if isinstance(item, int) else ids(item).tolist()


class Outcome(NamedTuple):
    """What came out of a loader: items, and what was raised behind them."""

    items: list[Any]
    error: BaseException | None = None


def collect(
    stepped: Stepped, iterator: LoaderIterator, most: int | None = None, pause: Callable[[], int] = lambda: 0
) -> Outcome:
    """Take items until the end, an error or `most` of them; the engine goes on for `pause()` steps in between."""
    items = list[Any]()
    try:
        while most is None or len(items) < most:
            try:
                items.append(plain(next(iterator)))
            except StopIteration:
                break
            stepped.go_on(pause())
    except Deadlock:
        raise
    except Exception as error:
        return Outcome(items, error)
    return Outcome(items)


def expected(chain: Chain, settings: Settings, epoch: int = 0) -> Outcome:
    """The same from the plain chain."""
    flow = chain.flow(settings.share, epoch, settings.skip)
    items = [rows[0] if flow.kind == "sample" else rows for _, rows in flow.items]
    return Outcome(items, BadRowError() if flow.broken else None)
