"""The discrete-event level: the loader's own engine, guard and brake, with time, functions and the machine simulated.

Whatever decides (which item goes on, what is admitted, what is measured) is the code that runs in a real loader; only
how long a task takes is computed, from the resources that tasks share. A task's function is called when its time is
over, with the clock set back to its begin, so that the engine measures what passed. Nothing depends on the real time
or on threads: the same scenario under the same tuner gives the same run.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from intune._errors import MemoryLimitError
from intune._values import Allocation, Budget, Event, MachineSnapshot, MemoryUse, Snapshot, StageInfo
from intune.control.brake import BrakeThread
from intune.pipeline.chain import Pipeline
from intune.pipeline.context import Context
from intune.pipeline.engine import Engine, EngineOptions
from intune.pipeline.impasse import Impasse
from intune.pipeline.ledger import Ledger
from intune.pipeline.run import EpochRun, Position, RunTask
from intune.pipeline.scheduler import Scheduler
from intune.pipeline.scheduler import Task as EngineTask
from intune.sim.parts import SimClock, SimGather, SimPool, SimSource, blank_block
from intune.sim.resources import LOCK_TURN_SECONDS, PARTS, Part, Resources, Task
from intune.sim.scenario import LARGEST, Change, Scenario, SimStage

SIMULATED = "simulated"
"""Where figures of the machine are read."""

DRAWS = 1024


class _Draws:
    """Factors for cost and size of the items of one stage, one after another: the same under every tuner."""

    def __init__(self, stage: SimStage, seed: int, number: int) -> None:
        self._random = np.random.default_rng((seed, number))
        self._stage = stage
        self._left: list[tuple[float, float]] = []

    def next(self) -> tuple[float, float]:
        """Factors with a mean of 1: (cost, bytes a row)."""
        if not self._left:
            stage, random = self._stage, self._random
            costs = np.exp(stage.spread * random.standard_normal(DRAWS) - stage.spread**2 / 2)
            if stage.tail_share:
                tail = np.where(random.random(DRAWS) < stage.tail_share, stage.tail_factor, 1.0)
                costs *= tail / (1 + stage.tail_share * (stage.tail_factor - 1))
            away = np.clip(random.standard_normal(DRAWS), -LARGEST, LARGEST)
            sizes = np.exp(stage.bytes_spread * away - stage.bytes_spread**2 / 2)
            self._left = list(zip(costs.tolist(), sizes.tolist(), strict=True))
        return self._left.pop()


@dataclass(slots=True, eq=False)
class _Work(Task):
    """A task of the engine in progress."""

    run: EngineTask | None = None
    ended: Callable[[], None] | None = None
    size: float = 1.0
    holds_bytes: float = 0.0


class _SimScheduler(Scheduler):
    """Gives tasks to the simulation instead of to threads."""

    def __init__(self, name: str, slots: int, max_threads: int, begin: Callable[[Any], None]) -> None:
        super().__init__(name, slots, max_threads)
        self._begin = begin
        self.running = 0

    def dispatch(self) -> None:
        """Begin what may begin; the lock is held."""
        while self.running < self.max_threads and (task := self.take()) is not None:
            self.running += 1
            self._begin(task)

    def nudge(self, sure: bool = False) -> None:
        """The same; no thread needs to be woken."""
        self.dispatch()


class OutOfMemory(Exception):
    """The simulated kernel has ended the simulated process: what it held passed the limit."""


class Simulation:
    """A scenario being run: a `Workload`, whose time passes in `advance`.

    Args:
        scenario: What is run.
        brake: Whether the brake watches its memory, as it does with a real loader.

    Attributes:
        steps: Steps that the trainer has finished.
        rows: Rows in the batches that it took.
        peak_bytes: The most memory that was held at any moment.
    """

    def __init__(self, scenario: Scenario, *, brake: bool = True) -> None:
        self.scenario = scenario
        self._braked = brake and scenario.machine.memory_bytes is not None
        self.steps = self.rows = 0
        self.peak_bytes = 0.0
        self._clock = SimClock()
        self._resources = Resources(scenario.machine)
        self._limit = scenario.machine.memory_bytes
        self._cost = dict.fromkeys((stage.name for stage in scenario.stages), 1.0)
        self._bytes = dict(self._cost)
        self._device = scenario.trainer.device_seconds
        self._stages = {stage.name: stage for stage in scenario.stages}
        self._draws = {s.name: _Draws(s, scenario.seed, n) for n, s in enumerate(scenario.stages)}
        self._rows = _nominal_rows(scenario.stages)
        self._pools: dict[str, SimPool] = {}
        self._current: _Work | None = None
        self._at_once: list[_Work] = []
        self._task_bytes = self._high = 0.0
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._window = (0.0,) * 5
        self._engine = self._make_engine()
        self._brake = BrakeThread(
            self._engine, self._read_memory, self._engine.note, self._give_back, self._clock, Impasse(self._engine)
        )
        self._run: EpochRun | None = None
        self._training = self._waiting = False
        self._epoch = -1
        for change in scenario.changes:
            self._at(change.seconds, partial(self._change, change))

    # --- Workload

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The stages, source first."""
        return self._engine.stages

    def snapshot(self) -> Snapshot:
        """Close the window that began at the last call and say what happened in it."""
        snapshot = self._engine.snapshot()
        return replace(snapshot, rest_bytes=self._brake.brakes.rest_bytes(SIMULATED, self._engine.process_bytes()[0]))

    def apply(self, allocation: Allocation) -> None:
        """Put an allocation into force and return at once."""
        self._engine.apply(allocation)

    # --- time

    @property
    def now(self) -> float:
        """Seconds that have passed."""
        return self._resources.now

    @property
    def clock(self) -> SimClock:
        """Its time as a `Clock`, for a controller and a journal."""
        return self._clock

    def budget(self) -> Budget:
        """What holds now."""
        machine, limit = self.scenario.machine, self._limit
        cpus = max(1, math.floor(self._resources.cpus))
        return Budget(cpus, machine.max_threads, machine.max_processes, None if limit is None else int(limit))

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            OutOfMemory: If what is held passes the limit.
        """
        until = self.now + seconds
        if self._run is None:
            if self._braked:
                self._brake_step()
            self._begin_epoch()
        while True:
            self._settle()
            ends = self._resources.next_end()
            due = min(until, math.inf if ends is None else ends, self._timed[0][0] if self._timed else math.inf)
            done = self._resources.advance(due)
            self._clock.now = due
            for task in done:
                self._end(task)
            if done:
                continue
            while self._timed and self._timed[0][0] <= due:
                heapq.heappop(self._timed)[2]()
            if due >= until:
                self._settle()
                return

    def close(self) -> None:
        """Let go of what is held."""
        self._engine.close()

    @property
    def memory_bytes(self) -> float:
        """What the process and its descendants hold now."""
        items = self._in_flight()
        self._high = max(self._high, items)
        trainer = self.scenario.trainer
        grown = trainer.growth_bytes * min(1.0, self.steps / max(1, trainer.growth_steps))
        kept = self.scenario.machine.kept_share * (self._high - items)
        return self.scenario.machine.baseline_bytes + grown + self._process_bytes() + items + kept

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds used so far, the trainer's included."""
        return self._resources.cpu_used

    @property
    def processes(self) -> int:
        """Worker processes alive."""
        return sum(pool.live + pool.starting for pool in self._pools.values())

    # --- the engine's side

    def _make_engine(self) -> Engine:
        machine = self.scenario.machine
        measured = "run_queue_seconds" not in machine.unmeasured
        gather = type("Gather", (SimGather,), {"make": staticmethod(self._made)})
        context = Context(
            self._clock,
            Ledger(None),
            run_queue=lambda: self._clock.queue_seconds if measured else None,
            make_scheduler=lambda name, slots, threads: _SimScheduler(name, slots, threads, self._begin_task),
            make_gather=gather,
        )
        engine = Engine(self._pipeline(), EngineOptions(), context, self.budget(), self._machine, self._make_pool)
        for live in engine.live:
            if live.info.waits is None and (waits := self._stages[live.info.name].waits) is not None:
                live.decide(waits)  # a pipeline says so of maps only
        return engine

    def _pipeline(self) -> Pipeline:
        source = self.scenario.stages[0]
        units = self.scenario.epoch_items
        made = partial(self._made, source.rows)
        pipe = Pipeline(SimSource(source.name, units, source.rows, source.row_bytes, source.max_concurrency, made))
        for stage in self.scenario.stages[1:]:
            if stage.kind == "shuffle":
                pipe = pipe.shuffle(rows=stage.rows)
            elif stage.kind == "batch":
                pipe = pipe.batch(stage.rows)
            else:
                options: dict[str, Any] = {
                    "name": stage.name,
                    "executor": stage.executor,
                    "max_concurrency": stage.max_concurrency,
                    "waits": stage.waits,
                }
                if stage.kind == "flat_map":
                    pipe = pipe.flat_map(self._children(stage), **options)
                else:
                    pipe = pipe.map(self._mapped(stage), **options)
        return pipe

    def _mapped(self, stage: SimStage) -> Callable[[Any], Any]:
        return lambda block: self._made(max(1, round(block.num_rows * stage.kept)))

    def _children(self, stage: SimStage) -> Callable[[Any], Any]:
        def children(block: Any) -> Any:
            for _ in range(stage.children):
                yield self._made(max(1, round(block.num_rows * stage.kept / stage.children)))

        return children

    def _made(self, rows: int) -> Any:
        """What the task whose time is over gives; the clock passes from its begin to its end."""
        task = self._current
        assert task is not None
        self._clock.now = self._resources.now
        self._clock.cpu_seconds += task.cpu_seconds
        self._clock.queue_seconds += task.queue_seconds
        task.cpu_seconds = task.queue_seconds = 0.0
        return blank_block(rows, task.stage.row_bytes * self._bytes[task.stage.name] * task.size)

    def _make_pool(self, name: str, target: Any, changed: Callable[[], None], died: Callable[[str], None]) -> SimPool:
        stage = self._stages[name]

        def up() -> None:
            pool.started()
            changed()

        def start() -> None:
            starting = replace(stage, name=f"{name}: a process starts", contention=0.0, coherency=0.0, moved_bytes=0.0)
            parts: list[tuple[Part, float]] = [("wait", stage.start_seconds), ("cpu", stage.start_cpu_seconds)]
            self._begin(_Work(starting, True, parts, self.now, ended=up))

        pool = SimPool(target, start, self._clock.cpu, stage.resident_bytes)
        self._pools[name] = pool
        return pool

    def _begin_task(self, run: RunTask) -> None:
        """The engine begins a task; called with its lock held."""
        name = run.stage.info.name
        stage = self._stages[name]
        parts: list[tuple[Part, float]] = []
        size, held = 1.0, 0.0
        if run.drawn < _draws_of(stage):
            cost, size = self._draws[name].next()
            parts = self._parts(stage, cost * self._cost[name])
            held = stage.scratch_bytes + self._rows[name] * stage.row_bytes * self._bytes[name] * size
        work = _Work(stage, stage.executor == "process", parts, self.now, run=run, size=size, holds_bytes=held)
        if name in self._pools:
            self._pools[name].busy += 1
        self._task_bytes += held
        self._begin(work)

    def _parts(self, stage: SimStage, factor: float) -> list[tuple[Part, float]]:
        machine = self.scenario.machine
        wait = stage.wait_seconds * factor
        wait += machine.disk_seconds if stage.disk_bytes else 0.0
        wait += machine.network_seconds if stage.network_bytes else 0.0
        amounts: Mapping[Part, float] = {
            "disk": stage.disk_bytes * factor,
            "network": stage.network_bytes * factor,
            "serial": stage.serial_seconds * factor,
            "lock": stage.lock_seconds * factor,
            "cpu": stage.cpu_seconds * factor,
            "wait": wait,
        }
        return [(part, amounts[part]) for part in PARTS if amounts[part] > 0]

    def _begin(self, task: _Work) -> None:
        if any(amount > 0 for _, amount in task.parts):
            self._resources.begin(task)
        else:
            task.began = self.now
            self._at_once.append(task)

    def _settle(self) -> None:
        """All that happens without time passing."""
        while True:
            while self._at_once:
                self._end(self._at_once.pop(0))
            self._consume()
            if not self._at_once:
                return

    def _end(self, task: Task) -> None:
        assert isinstance(task, _Work)
        if task.ended is not None:
            task.ended()
            return
        run, scheduler = task.run, self._engine.scheduler
        assert run is not None
        self._check_memory()
        self._clock.now, self._current = task.began, task
        run.run()
        self._current = None
        self._clock.now = self.now
        self._task_bytes -= task.holds_bytes
        pool = self._pools.get(task.stage.name)
        if pool is not None:
            pool.busy -= 1
        with scheduler.lock:
            scheduler.running -= 1  # type: ignore[attr-defined]
            scheduler.book(run)
            scheduler.dispatch()
        if pool is not None and pool.settle():
            self._engine.refresh()
        self._check_memory()

    # --- the trainer

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._run = self._engine.begin(self._epoch, Position())

    def _consume(self) -> None:
        """The trainer takes a batch if it wants one and there is one."""
        while not self._training:
            assert self._run is not None
            if not self._waiting:
                self._engine.consumer.enter(self.now)
                self._waiting = True
            if self._engine.nothing_for(self._run):
                return
            self._engine.consumer.book(self.now)
            try:
                item = self._engine.next_item(self._run)
            except MemoryLimitError as error:
                raise OutOfMemory(str(error)) from error
            self._waiting = False
            if item is None:
                self._begin_epoch()
                continue
            if item.failure is not None:  # nothing fails here: an interrupt came while a task was being carried out
                raise item.failure.error
            self.rows += item.rows
            self._begin_step()

    def _begin_step(self) -> None:
        trainer = self.scenario.trainer
        self._training = True
        parts: list[tuple[Part, float]] = [("lock", trainer.lock_seconds), ("cpu", trainer.cpu_seconds)]
        stage = SimStage("the trainer")
        self._begin(_Work(stage, False, parts, self.now, threads=trainer.threads, ended=self._computed))

    def _computed(self) -> None:
        trainer = self.scenario.trainer
        pause = trainer.pause_every and (self.steps + 1) % trainer.pause_every == 0
        seconds = self._device + (trainer.pause_seconds if pause else 0.0)
        if seconds:
            self._at(self.now + seconds, self._stepped)
        else:
            self._stepped()

    def _stepped(self) -> None:
        self.steps += 1
        self._training = False

    # --- the machine

    def _machine(self) -> MachineSnapshot:
        """The machine over the time since the last call."""
        resources, machine = self._resources, self.scenario.machine
        now = (self.now, resources.cpu_used, resources.cpu_others, resources.lock_waits, resources.read_bytes)
        seconds, used, others, locked, read = (a - b for a, b in zip(now, self._window, strict=True))
        self._window = now
        figures: dict[str, Any] = {
            "cpu_seconds_used": used,
            "cpu_seconds_all": used + others,
            "lock_wait_seconds": LOCK_TURN_SECONDS * locked / seconds if seconds else None,
            "read_bytes": int(read),
            "memory_bytes": int(self.memory_bytes),
            "memory_limit_bytes": None if self._limit is None else int(self._limit),
        }
        known = {name: value for name, value in figures.items() if name not in machine.unmeasured}
        return MachineSnapshot(max(1, math.floor(resources.cpus)), **known, read_from=dict.fromkeys(known, SIMULATED))

    def _read_memory(self) -> list[MemoryUse]:
        return [] if self._limit is None else [MemoryUse(int(self._limit), int(self.memory_bytes), SIMULATED)]

    def _process_bytes(self) -> float:
        return sum(pool.bytes for pool in self._pools.values())

    def _in_flight(self) -> float:
        return self._engine.context.ledger.held + self._task_bytes

    def _give_back(self) -> None:
        self._high = self._in_flight()

    def _check_memory(self) -> None:
        memory = self.memory_bytes
        self.peak_bytes = max(self.peak_bytes, memory)
        if self._limit is not None and memory > self._limit:
            raise OutOfMemory(f"{memory / 1e6:,.0f} MB of {self._limit / 1e6:,.0f} MB at {self.now:.1f} s")

    def _brake_step(self) -> None:
        self._brake.step()
        self._at(self.now + self._brake.seconds, self._brake_step)

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timed, (seconds, next(self._order), call))

    def _change(self, change: Change) -> None:
        what, value, stage = change.what, change.value, change.stage
        if what == "cost":
            self._cost[stage or ""] = value
        elif what == "bytes":
            self._bytes[stage or ""] = value
        elif what == "cpus":
            self._resources.cpus = value
        elif what == "neighbours":
            self._resources.neighbours = value
        elif what == "memory":
            self._limit = value
        else:
            self._device = self.scenario.trainer.device_seconds * value
        self._resources.changed()
        self._engine.note(Event("simulated", stage, f"{what} is {value:g} from now on"))


def _draws_of(stage: SimStage) -> int:
    """How many draws of one parent give an item; the one after them finds the end and costs nothing."""
    return stage.children if stage.kind == "flat_map" else 1


def _nominal_rows(stages: tuple[SimStage, ...]) -> dict[str, float]:
    """Rows of an item that comes out, by stage."""
    rows, found = float(stages[0].rows), {}
    for stage in stages:
        if stage.kind in ("shuffle", "batch"):
            rows = float(stage.rows)
        elif stage.kind == "flat_map":
            rows = max(1.0, rows * stage.kept / stage.children)
        elif stage.kind == "map":
            rows = max(1.0, rows * stage.kept)
        found[stage.name] = rows
    return found
