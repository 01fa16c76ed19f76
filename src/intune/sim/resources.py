"""Work that shares CPUs, locks, disks and memory bandwidth: how far each piece gets while time passes. Pure.

Each task goes through parts one after another. All tasks of one stage in the same part progress at one rate, which
changes whenever a task begins or ends a part:

* *CPU*: what computes shares the CPUs (processor sharing): with more of it than CPUs each gets cpus / runnable.
* *Interpreter lock*: of the threads of one process that need it one computes at a time; they take turns.
* *Serial section*: the same, for the items of one stage.
* *Disk, network*: what is read shares the bandwidth, and no read gets more than a stream can.
* *Memory bandwidth*: when computing would move more bytes than it allows, all that move bytes slow down alike.
* *Scalability*: n items of a stage at once compute 1 + sigma (n - 1) + kappa n (n - 1) times as long (Gunther's
  Universal Scalability Law). What they wait for may depend on n in any way (`SimStage.wait_by_crowd`).

So what a timer would measure (wall seconds, CPU seconds, seconds in the run queue) comes out with all its bias.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Literal

from intune.sim.scenario import SimMachine, SimStage

Part = Literal["wait", "disk", "network", "serial", "lock", "cpu"]
LOCK_TURN_SECONDS = 5e-3
"""For how long a thread keeps the interpreter lock while others want it (`sys.getswitchinterval`)."""

SHORTEST = 1e-6
"""Share of the usual waiting below which none falls."""

PARTS: tuple[Part, ...] = ("wait", "disk", "network", "serial", "lock", "cpu")


@dataclass(slots=True, eq=False)
class Task:
    """Work in progress.

    Attributes:
        stage: What it belongs to: its name is the key under which it is counted.
        process: Whether it runs in a process of its own, with a lock of its own.
        parts: What is left to do, as (part, amount): seconds, or bytes for disk and network.
        cpu_seconds: CPU seconds used in parts that have ended.
        queue_seconds: Seconds in which it could have computed but had no CPU, likewise.
        began: When it began.
        threads: CPUs that it would use at once.
    """

    stage: SimStage
    process: bool
    parts: list[tuple[Part, float]]
    began: float
    cpu_seconds: float = 0.0
    queue_seconds: float = 0.0
    threads: int = 1
    _cpu_from: float = 0.0
    _queue_from: float = 0.0


@dataclass(slots=True, eq=False)
class _Class:
    """All tasks of one stage in one part: they progress alike."""

    part: Part
    stage: SimStage
    process: bool
    threads: int
    done: float = 0.0
    """Work that a task would have got that was there from the start."""
    cpu: float = 0.0
    queue: float = 0.0
    rate: float = 0.0
    cpu_rate: float = 0.0
    queue_rate: float = 0.0
    tasks: list[tuple[float, int, Task]] = field(default_factory=list)


class Resources:
    """Carries tasks through their parts.

    Args:
        machine: What there is.

    Attributes:
        now: Seconds that have passed.
        cpus: CPUs that may be used now (a quota may change).
        neighbours: Threads of others that compute all the time.
        lock_waits: Integral over time of the threads of the main process that want its interpreter lock.
        cpu_used: CPU seconds used so far by tasks.
        cpu_others: CPU seconds used so far by others.
        read_bytes: Bytes read from disk so far.
    """

    def __init__(self, machine: SimMachine) -> None:
        self.machine = machine
        self.now = 0.0
        self.cpus = float(machine.cpus)
        self.neighbours = 0.0
        self.lock_waits = self.cpu_used = self.cpu_others = self.read_bytes = 0.0
        self.running: dict[str, int] = {}
        self._classes: dict[tuple[str, Part], _Class] = {}
        self._order = itertools.count()
        self._lock_demand = 0
        self._share = 1.0
        self._stale = False

    def begin(self, task: Task) -> None:
        """A task begins now."""
        task.began = self.now
        name = task.stage.name
        self.running[name] = self.running.get(name, 0) + 1
        self._stale = True
        self._enter(task)

    def next_end(self) -> float | None:
        """When the next part of any task ends if nothing else happens; None = nothing is under way."""
        if self._stale:
            self._set_rates()
        left = [(c.tasks[0][0] - c.done) / c.rate for c in self._classes.values() if c.tasks and c.rate > 0]
        return self.now + max(0.0, min(left)) if left else None

    def advance(self, to: float) -> list[Task]:
        """Let time pass up to `to`, at most the next end; the tasks that are done then, in the order of their start."""
        if self._stale:
            self._set_rates()
        seconds = to - self.now
        self.now = to
        for each in self._classes.values():
            count = len(each.tasks)
            each.done += each.rate * seconds if count else 0.0
            each.cpu += each.cpu_rate * seconds
            each.queue += each.queue_rate * seconds
            self.cpu_used += each.cpu_rate * seconds * count * each.threads
            if each.part == "disk":
                self.read_bytes += each.rate * seconds * count
        self.lock_waits += self._lock_demand * seconds
        self.cpu_others += self.neighbours * self._share * seconds
        return self._ends()

    def _ends(self) -> list[Task]:
        """Let what has ended its part go on to the next one; the tasks that are done, in the order of their start."""
        ended: list[Task] = []
        for each in list(self._classes.values()):
            while each.tasks and each.tasks[0][0] - each.done <= 1e-9 * max(1.0, each.done):
                _, _, task = heapq.heappop(each.tasks)
                task.cpu_seconds += each.cpu - task._cpu_from
                task.queue_seconds += each.queue - task._queue_from
                task.parts.pop(0)
                self._stale = True
                if not self._enter(task):
                    self.running[task.stage.name] -= 1
                    ended.append(task)
        return sorted(ended, key=lambda task: task.began)

    def changed(self) -> None:
        """CPUs or neighbours have changed."""
        self._stale = True

    def _enter(self, task: Task) -> bool:
        """Put a task into its next part that takes anything; False = there is none."""
        while task.parts and task.parts[0][1] <= 0:
            task.parts.pop(0)
        if not task.parts:
            return False
        part, amount = task.parts[0]
        key = (task.stage.name, part)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class(part, task.stage, task.process, task.threads)
        task._cpu_from, task._queue_from = found.cpu, found.queue
        heapq.heappush(found.tasks, (found.done + amount, next(self._order), task))
        return True

    def _set_rates(self) -> None:
        self._stale = False
        machine = self.machine
        active = [each for each in self._classes.values() if each.tasks]
        runnable = self.neighbours
        lock = disk = network = 0
        for each in active:
            count = len(each.tasks)
            if each.part == "cpu":
                runnable += count * each.threads
            elif each.part == "serial":
                runnable += 1
            elif each.part == "lock":
                if each.process:
                    runnable += count
                else:
                    lock += count
            elif each.part == "disk":
                disk += count
            elif each.part == "network":
                network += count
        runnable += 1 if lock else 0
        self._lock_demand = lock
        share = self._share = min(1.0, self.cpus / runnable) if runnable else 1.0
        moved = sum(
            len(each.tasks) * share * each.stage.moved_bytes / each.stage.cpu_seconds
            for each in active
            if each.part == "cpu" and each.stage.moved_bytes and each.stage.cpu_seconds
        )
        bandwidth = min(1.0, machine.memory_bytes_per_second / moved) if moved else 1.0
        for each in active:
            count = len(each.tasks)
            each.cpu_rate = each.queue_rate = 0.0
            if each.part == "wait":
                each.rate = 1.0
                if each.stage.wait_by_crowd:
                    waiting = each.stage.waiting(self.running.get(each.stage.name, 1))
                    each.rate = each.stage.wait_seconds / max(waiting, SHORTEST * each.stage.wait_seconds)
            elif each.part == "disk":
                each.rate = min(machine.disk_stream_bytes_per_second, machine.disk_bytes_per_second / disk)
            elif each.part == "network":
                each.rate = min(machine.network_stream_bytes_per_second, machine.network_bytes_per_second / network)
            else:
                turns = lock if each.part == "lock" and not each.process else count if each.part == "serial" else 1
                each.cpu_rate, each.queue_rate = share / turns, (1 - share) / turns
                slowed = bandwidth if each.part == "cpu" and each.stage.moved_bytes else 1.0
                each.rate = each.cpu_rate * slowed / self._slowdown(each.stage)

    def _slowdown(self, stage: SimStage) -> float:
        n = self.running.get(stage.name, 1)
        return 1 + stage.contention * (n - 1) + stage.coherency * n * (n - 1)
