"""The living side of a loader: its stages, threads, ledger and runs; what control sees as a workload."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from intune._errors import LoaderError
from intune._values import Allocation, Budget, Event, InFlight, MachineSnapshot, Snapshot, StageInfo
from intune._words import count, or_open
from intune.metrics.counters import StageCounters
from intune.metrics.windows import ConsumerCounters, consumer_snapshot, stage_snapshot
from intune.pipeline.calls import Failure
from intune.pipeline.chain import Pipeline
from intune.pipeline.checks import check_allocation
from intune.pipeline.context import Context
from intune.pipeline.executors import PROBE_SECONDS, ExecutorTrial
from intune.pipeline.item import Item
from intune.pipeline.run import EpochRun, Position, Share
from intune.pipeline.scheduler import Bell
from intune.pipeline.source import BlockSource
from intune.pipeline.stage import LiveStage, Pool, RemoteCall, planned
from intune.pipeline.trials import Trials
from intune.pipeline.waits import Waits

PRUNE_EVERY = 16
SKIPS_KEPT = 100
CLOSE_SECONDS = 1.5
"""Threads get so long to end; with the processes' end everything is gone within two seconds."""


@dataclass
class EngineOptions:
    """Choices of a loader that its engine needs.

    Attributes:
        share: Seed and rank.
        ordered: Whether order is restored.
        skip: Whether failures are left out.
        prefetch: Batches that may wait for the consumer; None = `Segment.has_room` decides.
        max_ahead: The most items past the lowest unfinished one; None = from the slots.
        epochs: Number of epochs that will be asked for; None = unknown.
    """

    share: Share = field(default_factory=Share)
    ordered: bool = True
    skip: bool = False
    prefetch: int | None = None
    max_ahead: int | None = None
    epochs: int | None = None


MakePool = Callable[[str, Callable[..., Any], Callable[[], None], Callable[[str], None]], Pool]
"""Name of the stage, what runs, what is called when processes came or went, and when one died and how."""


class Engine:
    """Runs epochs of a pipeline and can be tuned while it does: a `Workload`.

    What `apply` means, clause by clause:

    * It sets numbers and returns; nothing is waited for.
    * A stage whose concurrency grows begins more items at once; a process stage as its processes come up,
      as many at once as have done an item, holding no slot meanwhile.
    * A stage whose concurrency falls finishes what it has in hand; nothing is lost or done twice.
    * 0 pauses a stage: it begins nothing, the others go on.
    * Fewer slots: running tasks finish, none begins until use has fallen below.
    * Other stages never wait for a change.

    Args:
        pipeline: The chain.
        options: Choices.
        context: Clock, ledger and measurements; filled in further here.
        budget: The budget at the start.
        machine: Gives the machine's side of a snapshot.
        make_pool: Makes the processes of a stage: (name, target, on_change, on_death) -> pool.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: EngineOptions,
        context: Context,
        budget: Budget,
        machine: Callable[[], MachineSnapshot],
        make_pool: MakePool,
    ) -> None:
        self.pipeline, self.options, self.context = pipeline, options, context
        self.scheduler = context.make_scheduler(f"intune-{pipeline.source.kind}", budget.cpus, budget.max_threads)
        self.scheduler.pick = self._pick
        self.scheduler.observe = self._observe
        self.runs: list[EpochRun] = []
        self.skips: list[str] = []
        self.epochs_ended = 0
        self.consumer = ConsumerCounters()
        self._clock = context.clock
        self._machine = machine
        self._arrived = Bell()
        self._events: list[Event] = []
        self._deliveries = 0
        self._resizing = threading.RLock()
        self._asked: dict[int, int] = {}
        self._closed = False
        self._most_bytes: int | None = None
        self._giving_to: int | None = None
        self._trials = Trials(context, self)
        context.ordered, context.prefetch, context.skip = options.ordered, options.prefetch, options.skip
        context.on_skip = self._note_skips
        me = weakref.ref(self)

        def changed() -> None:
            engine = me()
            if engine is not None:
                engine.refresh()

        def died(number: int, how: str) -> None:
            engine = me()
            if engine is not None:
                engine.note_death(engine.live[number], how)

        self._make_pool, self._changed, self._died = make_pool, changed, died
        self.live: list[LiveStage] = self._make_stages(budget.cpus)
        self.allocation = Allocation({stage.info.name: None for stage in self.live}, budget.cpus)
        now = self._clock.wall()
        self._window_start = now
        self._waits = Waits(now)
        self._before = [StageCounters() for _ in self.live]
        self._consumer_before = self.consumer.copy()
        self._set(self.allocation)
        self.resize_pools()

    # --- Workload

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The stages, source first."""
        return tuple(stage.info for stage in self.live)

    def apply(self, allocation: Allocation) -> None:
        """Put an allocation into force and return at once.

        Raises:
            AllocationError: If an entry is unknown, missing or not allowed; nothing is clamped.
        """
        check_allocation(allocation, [stage.info.name for stage in self.live])
        with self.scheduler.lock:
            for stage in self.live:
                before, after = stage.concurrency, allocation.concurrency[stage.info.name]
                if before != after:
                    kind = "pause" if after == 0 else "resize"
                    detail = f"concurrency {or_open(before)} -> {or_open(after)}"
                    self._events.append(Event(kind, stage.info.name, detail))
            self._set(allocation)
            self.scheduler.dispatch()
        for stage in self.live:
            if stage.instances is not None:
                stage.instances.trim(max(1, stage.cap))
        self.refresh()

    def snapshot(self) -> Snapshot:
        """Close the window that began at the last call and say what happened in it."""
        self.check_not_within()
        machine = self._machine()
        for stage in self.live:
            stage.measure_processes()
        with self.scheduler.lock:
            self._reap()
            now = self._clock.wall()
            self._waits.book(now, *self._now())
            more = [stage.try_more(now) for stage in self.live]
            if self._trials.end_long(now) or any(more):
                self._refresh()
                self.scheduler.dispatch()
            seconds = now - self._window_start
            run = self.runs[0] if self.runs else None
            nodes = {id(node.stage): node for node in run.nodes} if run is not None else {}
            snapshots = []
            for number, stage in enumerate(self.live):
                stage.counters.load.change(now, 0)
                node = nodes.get(id(stage))
                waiting = node.waiting() if node is not None else []
                snapshots.append(stage_snapshot(stage, self._before[number], seconds, waiting))
            ready = len(run.delivery.ready) if run is not None else 0
            self.consumer.book(now)
            consumer = consumer_snapshot(self.consumer, self._consumer_before, seconds, ready)
            snapshot = Snapshot(
                window_seconds=seconds,
                warm=all(stage.items_out > 0 for stage in snapshots),
                stages=tuple(snapshots),
                consumer=consumer,
                machine=machine,
                allocation=self.allocation,
                in_flight_items=sum(each.in_flight() for each in self.runs),
                in_flight_bytes=self.context.ledger.held,
                in_flight_bytes_limit=self.context.ledger.budget,
                held_back_share=min(1.0, self._waits.held_back / seconds) if seconds > 0 else 0.0,
                epoch=run.epoch if run is not None else None,
                events=tuple(self._events),
            )
            self._events.clear()
            self._waits.held_back = 0.0
            self._before = [stage.counters.copy() for stage in self.live]
            self._consumer_before = self.consumer.copy()
            self._window_start = now
        return snapshot

    # --- the brake

    def in_flight(self) -> InFlight:
        """Bytes of items in flight."""
        with self.scheduler.lock:
            return self.context.ledger.in_flight()

    def process_bytes(self) -> tuple[int, int]:
        """Bytes that worker processes were last seen to hold, and how many more once each has done an item."""
        return sum(stage.process_bytes for stage in self.live), sum(stage.process_growth for stage in self.live)

    def hold_back(self, in_flight_bytes: int | None, working_bytes: int | None) -> None:
        """Let items in flight hold no more than this, whatever the allocation says; None = no such limit.

        Work begins while all of it needs at most `working_bytes`. At 0 no process starts but the first of a stage.
        """
        with self.scheduler.lock:
            self._most_bytes, self.context.ledger.work_budget = in_flight_bytes, working_bytes
            self._limit_bytes()
            for stage in self.live:
                stage.room = in_flight_bytes
            self._refresh()
            self.scheduler.dispatch()
        self.resize_pools()

    def note(self, event: Event) -> None:
        """Let an event stand in the next snapshot."""
        with self.scheduler.lock:
            self._events.append(event)

    # --- the consumer

    def begin(self, epoch: int, start: Position) -> EpochRun:
        """Begin an epoch, or take up the one that was begun ahead."""
        for run in self.runs:
            if run.epoch == epoch and run.start == start and not run.cancelled:
                self._retire(keep=run)
                return run
        run = self._new_run(epoch, start)
        with self.scheduler.lock:
            for other in self.runs:
                other.cancel()
            self.runs = [run]
            run.open()
            self._events.append(Event("epoch_start", None, f"epoch {epoch}"))
            self.scheduler.nudge(sure=True)
        return run

    def next_item(self, run: EpochRun) -> Item | None:
        """The next item of a run; None at its end.

        Raises:
            BaseException: What a function raised, or what keeps the engine from going on.
        """
        while True:
            self._await(run)
            try:
                self._giving_to = threading.get_ident()
                with self.scheduler.lock:
                    if not self.nothing_for(run):  # unless another thread was faster
                        return self._give(run)
            finally:
                self._giving_to = None

    def check_not_within(self) -> None:
        """Refuse a signal handler that asks for something while its own thread is inside `next` and holds the lock.

        Raises:
            LoaderError: It would wait for itself for ever.
        """
        if self._giving_to == threading.get_ident() and self.scheduler.lock.locked():
            raise LoaderError(
                "the loader was asked from a signal handler that interrupted next(): let the handler set a flag, and "
                "ask between two batches"
            )

    def _await(self, run: EpochRun) -> None:
        """Wait, without the lock, until there is something for the consumer; an interrupt leaves nothing behind."""
        self.consumer.enter(self._clock.wall())
        while self.nothing_for(run):
            self._arrived.wait()

    def nothing_for(self, run: EpochRun) -> bool:
        """Whether `next_item` would have to wait."""
        return not run.delivery.ready and not run.delivery.ended and run.error is None and not self._closed

    def _give(self, run: EpochRun) -> Item | None:
        self._observe()
        item = run.take() if run.delivery.ready and run.error is None else None
        self.consumer.leave(self._clock.wall(), item.count if item else 0, item.rows if item else 0)
        self._arrived.notify_all()
        if run.error is not None:
            raise run.error
        if item is None:
            if run.delivery.ended:
                self.epochs_ended += 1
                self._events.append(Event("epoch_end", None, f"epoch {run.epoch}"))
            return None
        self._deliveries += 1
        if self._deliveries % PRUNE_EVERY == 0 and self.context.ordered:
            run.position(0)  # forgets what no resumed run could need
        self.scheduler.nudge()
        return item

    def end(self, run: EpochRun) -> None:
        """The consumer is done with a run. Called from finalisers and after interrupts, so it takes no lock.

        What the run holds is given back with its last task in hand, the next run or the next snapshot.
        """
        run.cancelled = True
        self.consumer.leave(self._clock.wall(), 0, 0)

    def close(self) -> list[str]:
        """End everything; names of threads that were still inside a function. Idempotent."""
        with self.scheduler.lock:
            self._closed = True
            for run in self.runs:
                run.cancel()
            self._arrived.notify_all()
        with self._resizing:
            pools = [stage.pool for stage in self.live if stage.pool is not None]
        for pool in pools:
            pool.close()
        self._trials.join()
        stuck = self.scheduler.close(CLOSE_SECONDS)
        with self.scheduler.lock:
            self._reap()
        for stage in self.live:
            if stage.instances is not None:
                stage.instances.trim(0)
        return stuck

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    def refresh(self) -> None:
        """Processes came or went, or limits changed: compute anew what each stage may run."""
        with self.scheduler.lock:
            if self._closed:
                return
            self._refresh()
            self.scheduler.dispatch()
        self.resize_pools()
        for stage in self.live:
            stage.measure_processes()

    def note_death(self, stage: LiveStage, how: str) -> None:
        """A process of a stage died with an item in hand, which is done again."""
        with self.scheduler.lock:
            detail = f"a process {how}; its item is done again"
            if "SIGKILL" in how:
                stage.was_killed(self._clock.wall())
                detail += f" by at most {count(stage.most_processes or 1, 'process', 'processes')} for a while"
            self._events.append(Event("worker_died", stage.info.name, detail))
        self.refresh()

    # --- what trials decide

    def make_pool(self, stage: LiveStage) -> Pool:
        """Processes for a stage."""
        assert stage.call is not None
        died = partial(self._died, stage.number)
        return self._make_pool(stage.info.name, RemoteCall(stage.call), self._changed, died)

    def decided(self, event: Event | None) -> None:
        """Something was decided: limits are to be computed anew; and what a person may want to know of it."""
        if event is not None:
            self._events.append(event)
        self._refresh()

    # --- inside

    def _make_stages(self, slots: int) -> list[LiveStage]:
        share = self.options.share
        plans = planned(self.pipeline, (share.seed, share.rank), self.options.skip)
        live: list[LiveStage] = []
        try:
            for number, (info, call, open_executor) in enumerate(plans):
                pool = trial = None
                if info.executor == "process" and call is not None:
                    pool = self._make_pool(info.name, RemoteCall(call), self._changed, partial(self._died, number))
                if open_executor and slots > 1:
                    trial = ExecutorTrial(self.context.make_probe(PROBE_SECONDS))
                live.append(LiveStage(info, call, number, pool=pool, executor_trial=trial))
        except BaseException:
            for made in live:
                if made.pool is not None:
                    made.pool.close()
            raise
        return live

    def _new_run(self, epoch: int, start: Position) -> EpochRun:
        wake = self._arrived.notify_all
        return EpochRun(self.pipeline, self.live, self.context, self.options.share, epoch, start, wake)

    def _pick(self, slot_free: bool) -> Any:
        if self.context.alone:
            return None
        for run in self.runs:
            if run.cancelled:
                continue
            task = run.pick(slot_free, self._trials.waits)
            if task is not None:
                return task
            if self.context.alone:
                return None
        self._run_ahead()
        return None

    def _observe(self) -> None:
        self._waits.book_if_due(self._clock.wall(), *self._now())

    def _now(self) -> tuple[EpochRun | None, bool]:
        """The epoch that is delivered, and whether a CPU slot is free."""
        return self.runs[0] if self.runs else None, self.scheduler.used < self.scheduler.slots

    def _run_ahead(self) -> None:
        """Begin the next epoch, if one will come, once this one's source has given all; not with bytes to spare."""
        epochs = self.options.epochs
        if epochs is None or len(self.runs) != 1 or not self.runs[0].source_done or self.runs[0].failed:
            return
        following = self.runs[0].epoch + 1
        if following < epochs and self.context.ledger.spare is None and isinstance(self.pipeline.source, BlockSource):
            self.runs.append(self._new_run(following, Position()))
            self.runs[-1].open()

    def _set(self, allocation: Allocation) -> None:
        self.allocation = allocation
        for stage in self.live:
            stage.concurrency = allocation.concurrency[stage.info.name]
        self.scheduler.slots = allocation.slots
        self._limit_bytes()
        if allocation.in_flight_bytes is not None:
            self.context.most_bytes = max(allocation.in_flight_bytes, self.context.most_bytes or 0)
        self._refresh()

    def _limit_bytes(self) -> None:
        limits = [size for size in (self.allocation.in_flight_bytes, self._most_bytes) if size is not None]
        self.context.ledger.budget = min(limits, default=None)

    def _refresh(self) -> None:
        slots = self.scheduler.slots
        waiting = sum(stage.info.waits is True for stage in self.live)
        share = max(1, (self.scheduler.max_threads - slots) // max(1, waiting))
        for stage in self.live:
            stage.refresh(slots, share)
        ahead = self.options.max_ahead
        most = max([slots, *(stage.cap for stage in self.live if stage.info.waits)])
        self.scheduler.slotless = waiting > 0
        self.scheduler.spare = slots + sum(stage.cap for stage in self.live if stage.info.waits)
        self.context.at_once = max(2, most)
        self.context.max_ahead = ahead if ahead is not None else most + max(4, most // 2)

    def resize_pools(self) -> None:
        """Ask for the processes that are wanted; without the lock, as pools tell of changes at once."""
        with self._resizing:
            for stage in self.live:
                if stage.pool is not None and not self._closed and self._asked.get(stage.number) != stage.ordered:
                    self._asked[stage.number] = stage.ordered
                    stage.pool.resize(stage.ordered)

    def _note_skips(self, stage: str, origin: str, failures: tuple[Failure, ...]) -> None:
        for failure in failures:
            if len(self.skips) < SKIPS_KEPT:
                self.skips.append(f"{stage}, {origin}, item {failure.key}: {failure.line()}")
        self._events.append(Event("skipped", stage, f"{len(failures)} left out: {failures[0].line()}"))

    def _reap(self) -> None:
        for run in self.runs:
            if run.cancelled:
                run.cancel()
        self.runs = [run for run in self.runs if not run.cancelled or run.running]
        if not self.runs and not self.context.busy:
            self.context.ledger.clear()

    def _retire(self, keep: EpochRun) -> None:
        with self.scheduler.lock:
            for other in self.runs:
                if other is not keep:
                    other.cancel()
            self.runs = [keep]
            self._events.append(Event("epoch_start", None, f"epoch {keep.epoch}"))
            self.scheduler.nudge(sure=True)


def totals(engine: Engine) -> dict[str, StageCounters]:
    """Lifetime counters by stage, a copy."""
    engine.check_not_within()
    with engine.scheduler.lock:
        return {stage.info.name: stage.counters.copy() for stage in engine.live}
