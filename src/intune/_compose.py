"""The composition root: joins a pipeline, control and a tuner into a loader. Nothing else knows all three."""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from intune._allocators import release_unused
from intune._clock import Clock, SystemClock
from intune._errors import AllocationError, MemoryLimitError, PipelineError
from intune._machine import (
    Headroom,
    LockProbe,
    Meter,
    System,
    cpu_reading,
    memory_limit,
    parse_bytes,
    parse_share,
    process_limit,
    run_queue_seconds,
    thread_limit,
)
from intune._values import Allocation, Budget, Event, Snapshot
from intune._words import duration, size
from intune.control import Controller, Guard, Journal
from intune.control.brake import Brakes, BrakeThread
from intune.control.explain import explain
from intune.control.whole_run import WholeRun
from intune.pipeline.chain import Pipeline
from intune.pipeline.context import Context
from intune.pipeline.engine import Engine, EngineOptions
from intune.pipeline.impasse import Impasse
from intune.pipeline.ledger import Ledger
from intune.pipeline.loader import Loader
from intune.pipeline.options import LoaderOptions
from intune.pipeline.process import ProcessPool
from intune.pipeline.run import Share
from intune.pipeline.source import BlockSource, SequentialSource, Source
from intune.tuners import make_tuner

THREADS_BESIDE_SLOTS = 32
"""Threads for waiting stages where there are many CPUs."""


class LoaderControl:
    """What steers one loader: the threads of controller and brake, the probe of the interpreter lock, the journal."""

    def __init__(
        self, controller: Controller, brake: BrakeThread, probe: LockProbe, journal: Journal, workload: "_Watched"
    ) -> None:
        self._controller, self._brake, self._probe = controller, brake, probe
        self._journal, self._workload = journal, workload
        self._started = False

    def start(self) -> None:
        """Begin to tune; calling it again does nothing."""
        if not self._started:
            self._started = True
            self._probe.start()
            self._brake.start()
            self._controller.start()

    def stop(self) -> None:
        """End; calling it again does nothing."""
        with ExitStack() as last:  # each of them, whatever the others raise
            last.callback(self._journal.close)
            last.callback(self._probe.stop)
            last.callback(self._brake.stop)
            last.callback(self._controller.stop)

    def last(self) -> Snapshot | None:
        """The last window."""
        return self._workload.last

    def lines(self) -> list[dict[str, Any]]:
        """The last lines of the journal."""
        return self._journal.lines()

    def explain(self, ended: str | None = None) -> str:
        """What limits the run, for a person: in the last window that says something of that.

        Args:
            ended: Why nothing goes on; then it is said what limited the run for longest. None = something goes on.
        """
        if self._started and self._workload.run.last is None:
            self._controller.step()  # closes the first window early
        measured, most = self._workload.run.last, self._workload.run.most()
        if measured is None or most is None:
            if ended is not None:
                return f"{ended}; nothing was measured, as no stage finished anything."
            return "Nothing has been measured yet: iterate the loader first."
        if ended is None:
            return explain(measured, self._controller.outcome)
        time = f"{most.share:.0%} of the {duration(most.seconds)} that were measured"
        return f"{ended}. What limited it for {time}, with the figures of the last such window:\n" + explain(
            most.window, self._controller.outcome
        )

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is the controller's, the brake's or the probe's."""
        return thread.name.startswith("intune-control") or thread.name.startswith("intune-lock-probe")


class _Watched:
    """The engine as the controller's workload; keeps the last window for whoever asks."""

    def __init__(self, engine: Engine, brakes: Brakes) -> None:
        self._engine, self._brakes = engine, brakes
        self._newest: Snapshot | None = None
        self.run = WholeRun()
        self.last: Snapshot | None = None

    @property
    def stages(self) -> Any:
        """The stages, source first."""
        return self._engine.stages

    def snapshot(self) -> Snapshot:
        """Close the window."""
        snapshot = self._engine.snapshot()
        self._newest = self._brakes.told(snapshot, self._engine.process_bytes()[0])
        return self._newest

    def note(self, event: Event) -> None:
        """Something became known in the window that was closed last."""
        if self._newest is not None:
            self._newest = replace(self._newest, events=(*self._newest.events, event))

    def apply(self, allocation: Allocation) -> None:
        """Put an allocation into force, and show the window that it was decided by."""
        self._engine.apply(allocation)
        newest = self._newest
        if newest is not None and (newest.consumer.steps or self.last is None or newest.window_seconds > 0.5):
            self.last = newest
            self.run.see(newest)


def machine_budget(system: System, cpus: int | None, memory: str | int | float | None) -> Budget:
    """What the machine allows, or what the user says.

    Raises:
        PipelineError: If memory is not an allowed value.
    """
    slots = cpus if cpus is not None else cpu_reading(system).cpus
    most = thread_limit(system)
    wanted = max(64, slots + THREADS_BESIDE_SLOTS) if most >= 64 else most
    limit = memory_limit(system).limit_bytes
    return Budget(
        cpus=slots,
        max_threads=max(1, wanted),
        max_processes=max(1, min(process_limit(system), max(64, slots))),
        memory_bytes=_memory_bytes(memory, limit),
    )


def _memory_bytes(memory: str | int | float | None, limit: int | None) -> int | None:
    if memory is None:
        return limit
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise PipelineError(f"memory must be {_MEMORY}, got {memory!r} ({type(memory).__name__})")
    share: float | None = None
    if isinstance(memory, float):
        share = memory
        if not 0 < share <= 1:
            raise PipelineError(f"memory must be {_MEMORY}, got {memory!r}: a float is a share")
    else:
        try:
            share = parse_share(memory) if isinstance(memory, str) else None
            if share is None:
                return parse_bytes(memory)
        except AllocationError as error:
            as_share = "" if "share" in str(error) else ' Or give a share of the machine\'s limit: "50%", or 0.5.'
            raise PipelineError(f"memory: {error}{as_share}") from error
    if limit is None:
        raise PipelineError(f"memory={memory!r} is a share, but no limit of this machine could be read: give bytes")
    return int(share * limit)


_MEMORY = 'a size ("24GiB", or an int of bytes) or a share of the machine\'s limit ("50%", or 0.5)'


def build_loader(
    pipeline: Pipeline,
    options: LoaderOptions,
    *,
    clock: Clock | None = None,
    budget: Callable[[], Budget] | None = None,
) -> Loader:
    """Make a loader; `Pipeline.loader` explains the options.

    Args:
        pipeline: The chain.
        options: What was chosen.
        clock: Time; None = the machine's. Tests and emulated work inject their own.
        budget: What may be used, asked for at each decision; None = from the machine and the options.

    Raises:
        PipelineError: If options contradict each other or the chain.
    """
    decide = make_tuner(options.tuner)
    share = _share(pipeline, options)
    system, clock = System(), clock or SystemClock()
    first = budget() if budget is not None else machine_budget(system, options.cpus, options.memory)
    probe = LockProbe(system, clock)
    latest, limited = first, options.memory is not None or budget is not None
    headroom = Headroom(system, clock, lambda: latest.memory_bytes if limited else None)
    meter = Meter(system, clock, headroom, probe)
    read_budget = budget or partial(_current_budget, meter, headroom, first, options)

    def current_budget() -> Budget:
        nonlocal latest
        latest = read_budget()
        return latest

    _check_memory(options, first, headroom)
    exact = share.world_size > 1 and share.on_uneven != "uneven"
    context = Context(
        clock,
        Ledger(None),
        exact_rows=exact,
        run_queue=lambda: run_queue_seconds(system),
        make_probe=partial(LockProbe, system, clock),
    )
    chosen = EngineOptions(
        share, options.ordered, options.on_error == "skip", options.prefetch, options.max_ahead, options.epochs
    )

    pools = weakref.WeakSet[ProcessPool]()

    def make_pool(
        name: str, target: Callable[..., Any], changed: Callable[[], None], died: Callable[[str], None]
    ) -> ProcessPool:
        pool = ProcessPool(name, target, on_change=changed, on_death=died)
        pools.add(pool)
        return pool

    def release() -> None:
        release_unused()
        for pool in tuple(pools):
            pool.release_unused()

    engine = Engine(pipeline, chosen, context, first, meter.window, make_pool)
    try:
        kept = _open_journal(options.journal, clock)
        brake = BrakeThread(engine, headroom.read_all, engine.note, release, clock, Impasse(engine))
        watched = _Watched(engine, brake.brakes)
        controller = Controller(
            watched, decide, budget=current_budget, guard=Guard(), journal=kept, clock=clock, tell=watched.note
        )
        controller.step()  # the first allocation, before anything runs
        return Loader(engine, LoaderControl(controller, brake, probe, kept, watched))
    except BaseException:
        engine.close()
        raise


def _open_journal(path: str | os.PathLike[str] | None, clock: Clock) -> Journal:
    """The journal.

    Raises:
        PipelineError: If its file cannot be written.
    """
    if path is None:
        return Journal(None, clock=clock)
    file = Path(path)
    try:
        return Journal(file, clock=clock)
    except OSError as error:
        if os.path.isdir(file):
            advice = f"it is a folder: name a file in it, such as {file / 'journal.jsonl'}"
        elif not os.path.isdir(file.parent):
            advice = f"there is no folder {file.parent}: make it first, or name a file in one that is there"
        else:
            advice = "give a path that this user may write to, or None to keep the journal in memory only"
        why = error.strerror or type(error).__name__
        raise PipelineError(f"journal={str(path)!r} cannot be written ({why}); {advice}") from error


def _check_memory(options: LoaderOptions, budget: Budget, headroom: Headroom) -> None:
    """Refuse a limit that this process has passed before anything was loaded."""
    used = headroom.meter.tree().value
    if options.memory is None or budget.memory_bytes is None or used is None or used < budget.memory_bytes:
        return
    raise MemoryLimitError(
        f"memory={options.memory!r} is {size(budget.memory_bytes)}, but this process and its children use "
        f"{size(int(used))} already: the limit is for everything, the trainer included; give more, as bytes, as "
        "a text such as '24GiB', or as a share of the machine's limit such as 0.5"
    )


def _current_budget(meter: Meter, headroom: Headroom, first: Budget, options: LoaderOptions) -> Budget:
    """The budget now: quotas, affinity and memory limits that change while running are obeyed.

    CPUs grow no further than they were at the start, and stay as the user said if he did.
    """
    cpus = first.cpus if options.cpus is not None else min(first.cpus, meter.cpus)
    return replace(first, cpus=cpus, memory_bytes=_memory_bytes(options.memory, headroom.least_limit()))


def _share(pipeline: Pipeline, options: LoaderOptions) -> Share:
    """Whose part is read, checked against what can be known of the number of rows."""
    rank, world_size, on_uneven = options.rank, options.world_size, options.on_uneven
    if (rank is None) != (world_size is None):
        raise PipelineError(f"give both rank and world_size or none, got rank={rank!r}, world_size={world_size!r}")
    if rank is None or world_size is None:
        rank, world_size = _from_environment()
    if rank >= world_size:
        raise PipelineError(f"rank must be below world_size, got rank={rank}, world_size={world_size}")
    share = Share(options.seed, rank, world_size, on_uneven or "drop")
    if world_size == 1:
        return share
    source = pipeline.source
    changing = [stage.name for stage in pipeline.stages if stage.kind in ("filter", "flat_map")]
    if changing and on_uneven != "uneven":
        raise PipelineError(
            f"{changing} change the number of rows, so ranks may get different numbers of batches and wait for each "
            "other for ever: filter when the files are written, or pass on_uneven='uneven'"
        )
    if on_uneven == "pad" and isinstance(source, SequentialSource):
        raise PipelineError("on_uneven='pad' needs a source that can be read twice: use 'drop' or 'uneven'")
    if on_uneven is None:
        rows = _known_rows(source)
        if rows is not None and rows < world_size:
            raise PipelineError(
                f"{rows} rows for {world_size} ranks: some rank would have none; use fewer ranks, or on_uneven='drop' "
                "(no rank gets a batch), 'pad' or 'uneven'"
            )
    return share


def _known_rows(source: Source) -> int | None:
    """Rows of an epoch on all ranks, where they can be counted and are not fixed for each rank by a sampler."""
    if isinstance(source, BlockSource):
        return sum(source.count_unit_rows())
    if isinstance(source, SequentialSource):
        return source.length()
    return len(source) if source.order(0) is None else None


def _from_environment() -> tuple[int, int]:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return 0, 1
    if not (rank.isdecimal() and world_size.isdecimal()):
        raise PipelineError(
            f"RANK={rank!r} and WORLD_SIZE={world_size!r} must be numbers, or pass rank= and world_size="
        )
    return int(rank), int(world_size)
