"""What a stage is while its loader lives: limits, counters, function instances, processes."""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from intune._clock import Clock
from intune._errors import WorkerDiedError
from intune._values import StageInfo
from intune.metrics.counters import StageCounters
from intune.pipeline.calls import Failure, Output, StageCall, key_at
from intune.pipeline.chain import Executor, Pipeline
from intune.pipeline.executors import ExecutorTrial
from intune.pipeline.growth import Growth
from intune.pipeline.source import IndexedSource, SequentialSource

KILL_SECONDS = 30.0
"""After a process was killed one less is wanted for so long, and then one more again each time so much has passed."""


class ProcessSizes(NamedTuple):
    """Memory of worker processes that is their own, in bytes.

    Attributes:
        done: Of each that has done an item.
        fresh: Of each that has not: what it works with it may only make with its first item.
    """

    done: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()


class Pool(Protocol):
    """Worker processes of one stage."""

    @property
    def live(self) -> int:
        """Processes ready to work."""
        ...

    @property
    def starting(self) -> int:
        """Processes being started."""
        ...

    @property
    def leaving(self) -> int:
        """Processes that were asked to end."""
        ...

    @property
    def failed(self) -> bool:
        """Whether processes cannot be started; `call` raises why."""
        ...

    def resize(self, n: int) -> None:
        """Set the wanted number."""
        ...

    def call(self, *args: Any) -> Any:
        """Run the target in a free process."""
        ...

    def sizes(self) -> ProcessSizes:
        """What each process that works or could work holds."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


class RemoteCall:
    """What runs in a worker process: a stage's call, and the CPU seconds that it took there."""

    def __init__(self, call: StageCall) -> None:
        self.call = replace(call, reseed=True)

    def __call__(self, payload: Any, keys: Any, epoch: int) -> tuple[Any, float]:
        """The output of one item (for flat_map: the list of its children) and CPU seconds."""
        before = time.thread_time()
        if self.call.kind == "flat_map":
            result: Any = list(self.call.draw(payload, keys, epoch))
        else:
            result = self.call(payload, keys, epoch)
        return result, time.thread_time() - before

    def close(self) -> None:
        """Close what a class made."""
        self.call.close()


class Instances:
    """Function objects of a thread stage: one for all, or one a worker where the function is a class.

    Each instance is lent to one item at a time. Surplus ones are closed when the stage's concurrency falls.
    """

    def __init__(self, call: StageCall) -> None:
        self._call = call
        self._made = isinstance(call.function, type)
        self._idle: list[StageCall] = []
        self._lock = threading.Lock()
        self.count = 0

    def borrow(self) -> StageCall:
        """An instance for one item."""
        if not self._made:
            return self._call
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self.count += 1
        return replace(self._call)

    def give_back(self, call: StageCall, limit: int) -> None:
        """The item is done; the instance is closed where more than `limit` exist."""
        if not self._made:
            return
        with self._lock:
            if self.count <= limit:
                self._idle.append(call)
                return
            self.count -= 1
        call.close()

    def trim(self, limit: int) -> None:
        """Close idle instances above `limit`."""
        with self._lock:
            surplus = min(len(self._idle), max(0, self.count - limit))
            closing = [self._idle.pop() for _ in range(surplus)]
            self.count -= surplus
        for call in closing:
            call.close()


@dataclass
class Trial:
    """Finds out by measurement whether a stage waits.

    A stage waits if *each* item measured spent more than `SHARE` of its wall time neither computing nor ready
    to compute. One item that computed settles that it does not: what disturbs a measurement (a busy
    machine, another holder of the interpreter lock) makes an item look as if it waited, never the opposite.
    So items are measured among others until it looks as if they waited; from then on they run alone. Those that were
    under way by then still run beside others, perhaps for the same lock: they count only if they computed.
    To run alone costs the pipeline all that it could do meanwhile. One short item that seems to have waited is no
    reason for that, as it may just have lost its turn once: a few in a row are, or one that took long.
    """

    ITEMS, SECONDS, SHARE, LIFTED_SHARE = 4, 0.2, 0.7, 0.95
    LOOKS = 3
    """So many short items in a row must look as if they waited."""
    PATIENCE_SECONDS = 1.0
    """An item that takes longer has the others let go on beside it (it may even wait for them)."""

    items: int = 0
    wall: float = 0.0
    looks: int = 0
    suspected: bool = False
    """It looks as if its items waited: the next ones run alone."""
    lifted: bool = False
    """Others run beside it again, so that only an item that hardly computes at all counts as waiting."""

    @property
    def wants_alone(self) -> bool:
        """Whether the next item is to be measured with nothing else under way."""
        return self.suspected and not self.lifted

    @property
    def counts(self) -> bool:
        """Whether an item that begins now may show that the stage waits."""
        return self.suspected

    def add(self, wall: float, cpu: float, queued: float, counts: bool = True) -> bool | None:
        """One more item: wall seconds, the seconds of CPU and of the run queue in them, what `counts` was at its begin.

        Time in the run queue says nothing about the stage and is left out of account.

        Returns:
            Whether the stage waits, or None while that is open. The first item is left out unless it was
            long: it pays for imports and cold caches.
        """
        self.items += 1
        if self.items == 1 and wall < self.SECONDS:
            return None
        share = self.LIFTED_SHARE if self.lifted else self.SHARE
        own = wall - queued
        if own <= 0 or (own - cpu) / own <= share:
            return False
        if not self.suspected:
            self.looks += 1
            self.suspected = own >= self.SECONDS or self.looks >= self.LOOKS
            return None
        if not counts:
            return None
        self.wall += wall
        return True if self.items >= self.ITEMS or self.wall >= self.SECONDS else None


@dataclass
class LiveStage:
    """A stage of a living loader; fields are read and written under the scheduler's lock.

    Attributes:
        info: What the stage is.
        call: What it does to an item; None for sources and gathers.
        number: Its place in the pipeline, the source being 0.
        concurrency: Limit in force; None = open; 0 = paused by the user.
        cap: The most items that it may run now.
        processes: Worker processes wanted.
        ordered: Those that its pool is asked for: more and more, as long as there is memory for them.
        running: Items in hand.
        crowd: How many it worked on at once while it did the item that is being booked, on average.
        pool: Its processes, for a process stage.
        trial: The measurement of whether it waits, until that is decided.
        executor_trial: The measurement of whether processes are worth it, until that is decided.
        most_processes: Processes that are wanted at most since some were killed; None = none was.
        killed_at: When the last one was.
        most_unproven: While no item has passed it nobody knows what size it gives, and it runs no more than so
            many; None = one has passed.
        growth: What it gives for what came in, in bytes.
        sample_seconds: Recent wall seconds a sample, for the length of runs.
        sizes: What its processes hold, as last measured.
        resident: Mean bytes of those that had done an item, as last measured; None = none ever had.
        room: Bytes that items in flight may hold, of which processes that start take some; None = no limit. At 0, as
            memory runs out, none is started; one may always live.
    """

    info: StageInfo
    call: StageCall | None
    number: int
    concurrency: int | None = None
    cap: int = 1
    processes: int = 0
    ordered: int = 0
    running: int = 0
    crowd: float = 1.0
    pool: Pool | None = None
    trial: Trial | None = None
    executor_trial: ExecutorTrial | None = None
    most_processes: int | None = None
    killed_at: float = 0.0
    most_unproven: int | None = 1
    growth: Growth = field(default_factory=Growth)
    sample_seconds: float | None = None
    sizes: ProcessSizes = field(default_factory=ProcessSizes)
    resident: int | None = None
    room: int | None = None
    largest_cap: int = 0
    counters: StageCounters = field(default_factory=StageCounters)
    instances: Instances | None = None

    def __post_init__(self) -> None:
        if self.call is not None and self.pool is None:
            self.instances = Instances(self.call)
        if self.info.waits is None:
            self.trial = Trial()

    @property
    def holds_slot(self) -> bool:
        """Whether its items hold a CPU slot."""
        return self.info.waits is not True

    @property
    def wants_alone(self) -> bool:
        """Whether its next item is to be measured with nothing else under way."""
        return (self.trial is not None and self.trial.wants_alone) or self.executor_trial is not None

    def decide(self, waits: bool) -> None:
        """It is now known whether the stage waits."""
        self.info = replace(self.info, waits=waits)
        self.trial = None

    def refresh(self, slots: int, waiting_share: int) -> None:
        """Compute `cap`, and the processes wanted, from what is in force."""
        most = self.info.max_concurrency
        wanted = self.concurrency
        if wanted is None:
            wanted = waiting_share if self.info.waits else slots
        if most is not None:
            wanted = min(wanted, most)
        if self.pool is not None:
            if self.most_processes is not None:
                wanted = min(wanted, self.most_processes)
            if self.room == 0:
                wanted = min(wanted, max(1, self.pool.live))
            self.processes = self.ordered = wanted
            if self.room is not None:
                self.ordered = min(wanted, self.pool.live + max(self.pool.starting, self._starts(self.room)))
            # A pool that cannot start its processes says why to whoever calls it.
            wanted = min(wanted, self.pool.live if not self.pool.failed else max(1, self.pool.live))
        if self.wants_alone:
            wanted = min(wanted, 1)
        self.cap = wanted

    def _starts(self, room: int) -> int:
        """How many processes may be started at once: no more than would take half of the room from items."""
        return max(1, room // (2 * self.resident)) if self.resident else 1

    def measure_processes(self) -> None:
        """Look what its processes hold. Called without the lock."""
        if self.pool is not None:
            self.sizes = self.pool.sizes()
            if self.sizes.done:
                self.resident = sum(self.sizes.done) // len(self.sizes.done)

    @property
    def process_bytes(self) -> int:
        """Bytes of all its processes, as last measured; what those hold that are leaving is taken to be as usual."""
        if self.pool is None:
            return 0
        unseen = self.pool.live + self.pool.leaving - len(self.sizes.done) - len(self.sizes.fresh)
        return sum(self.sizes.done) + sum(self.sizes.fresh) + max(0, unseen) * (self.resident or 0)

    @property
    def process_growth(self) -> int:
        """Bytes that its processes will hold beside these, once each has done an item; 0 while none has.

        Of those that are being started it is not known what they hold already.
        """
        if self.pool is None or self.resident is None:
            return 0
        return sum(max(0, self.resident - size) for size in self.sizes.fresh) + self.pool.starting * self.resident

    def was_killed(self, now: float) -> None:
        """The system killed one of its processes, as it does when memory runs out: for a while one less is wanted."""
        self.most_processes, self.killed_at = max(1, self.processes - 1), now

    def try_more(self, now: float) -> bool:
        """Whether one more process may be tried now, since none was killed for long; takes note of that."""
        if self.most_processes is None or now - self.killed_at < KILL_SECONDS:
            return False
        most, self.killed_at = self.most_processes + 1, now
        self.most_processes = most if self.concurrency is None or most < self.concurrency else None
        return True

    def note_seconds(self, samples: int, wall: float) -> None:
        """A run of samples took so many seconds."""
        if samples:
            each = wall / samples
            known = self.sample_seconds
            self.sample_seconds = each if known is None else known + 0.25 * (each - known)

    def execute(self, payload: Any, keys: Any, epoch: int, clock: Clock) -> tuple[Any, float, float]:
        """Apply the stage to one item: output, wall and CPU seconds. Called without the lock."""
        began, cpu = clock.wall(), clock.cpu()
        if self.pool is not None:
            output, used = self._remote(self.pool, payload, keys, epoch)
            return output, clock.wall() - began, used
        assert self.instances is not None
        call = self.instances.borrow()
        try:
            with self.executor_trial.watch() if self.executor_trial is not None else nullcontext():
                output = call(payload, keys, epoch)
        finally:
            self.instances.give_back(call, max(1, self.cap))
        return output, clock.wall() - began, clock.cpu() - cpu

    def _remote(self, pool: Pool, payload: Any, keys: Any, epoch: int) -> tuple[Any, float]:
        """Output and CPU seconds of a worker. Samples that killed it together go one by one, to lose no other."""
        assert self.call is not None
        try:
            return pool.call(payload, keys, epoch)  # type: ignore[no-any-return]
        except WorkerDiedError:
            alone = self.call.flow != "sample" or self.call.kind == "flat_map" or len(payload) == 1
            if alone or pool.failed:
                raise
        whole, used = Output([], []), 0.0
        for number, sample in enumerate(payload):
            output, seconds = self._single(pool, sample, key_at(keys, number), epoch)
            whole = Output(
                whole.payload + output.payload,
                [*(whole.keys or ()), *(output.keys or ())],
                output.failure,
                whole.skipped + output.skipped,
            )
            used += seconds
            if whole.failure is not None:
                break
        return whole, used

    def _single(self, pool: Pool, sample: Any, key: tuple[int, ...], epoch: int) -> tuple[Output, float]:
        """Output and CPU seconds for one sample, which may kill its workers."""
        assert self.call is not None
        try:
            return pool.call([sample], [key], epoch)  # type: ignore[no-any-return]
        except WorkerDiedError as error:
            failure = Failure(error, key)
            return Output([], [], skipped=(failure,)) if self.call.skip else Output([], [], failure), 0.0


class Planned(NamedTuple):
    """A stage before it lives: what it is, what it does to an item, and whether its executor is still open."""

    info: StageInfo
    call: StageCall | None
    open_executor: bool


def planned(pipeline: Pipeline, seed: tuple[int, ...], skip: bool) -> list[Planned]:
    """The stages of a pipeline, source first.

    Args:
        pipeline: The chain.
        seed: Seed of the loader and its rank.
        skip: Whether failures are left out.
    """
    source = pipeline.source
    most = 1 if isinstance(source, SequentialSource) else source.max_concurrency
    if isinstance(source, IndexedSource):
        call: StageCall | None = StageCall("get", "sample", source.get, seed=seed, skip=skip)
        plans = [_plan(source.kind, "source", source.executor, most, None, call)]
    else:
        plans = [_plan(source.kind, "source", "thread", most, None, None)]
    for number, stage in enumerate(pipeline.stages, 1):
        call = None
        if stage.kind not in ("shuffle", "batch"):
            function = stage.function if stage.function is not None else _nothing
            call = StageCall(stage.kind, stage.flow, function, stage.rng, seed, number, skip)
        plans.append(_plan(stage.name, stage.kind, stage.executor, stage.max_concurrency, stage.waits, call))
    return plans


def _plan(
    name: str, kind: str, executor: Executor, most: int | None, waits: bool | None, call: StageCall | None
) -> Planned:
    process = executor == "process"
    info = StageInfo(name, kind, "process" if process else "thread", most, False if process else waits)
    return Planned(info, call, executor == "auto" and not waits)


def _nothing(value: Any) -> Any:
    return value
