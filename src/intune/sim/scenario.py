"""What is simulated: stages, the machine that they share, the trainer, and what changes meanwhile. Values only.

Nothing here says how much stages disturb each other: that follows from what they share. Seconds are those of one item
on an idle machine, bytes are bytes, rates are a second.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from intune.sim.checks import Checks, is_number

Kind = Literal["source", "map", "flat_map", "shuffle", "batch"]
Executor = Literal["thread", "process"]
What = Literal["cost", "bytes", "cpus", "memory", "trainer", "neighbours"]

LARGEST = 3.0
"""Deviations, of the logarithm, that sizes of items are within: no loader survives one as large as all its memory."""


@dataclass(frozen=True, slots=True)
class SimStage:
    """One stage: what one of its items costs and gives.

    An item goes through its parts one after another, in the order in which they stand here.

    Attributes:
        name: Unique in its scenario; for a shuffle or batch "shuffle" or "batch", the second one "batch_2" and so on.
        kind: What it is; the first stage is the only source.
        executor: Where it runs.
        wait_seconds: Asleep: an answer is waited for.
        disk_bytes: Read from the disk that all share.
        network_bytes: Fetched over the network that all share.
        serial_seconds: Computing in a section that only one item of the stage may be in.
        lock_seconds: Computing while holding the interpreter lock; each process has its own.
        cpu_seconds: Computing without it.
        moved_bytes: Memory traffic while computing without the lock, out of the bandwidth that all share.
        contention: Sigma of the Universal Scalability Law: with n items at once each computes
            1 + contention (n - 1) + coherency n (n - 1) times as long.
        coherency: Kappa of the same law: above 0 the rate falls again with many items at once.
        spread: Standard deviation of the logarithm of an item's cost.
        tail_share: Share of items that cost `tail_factor` times as much; the mean stays what it is.
        tail_factor: How much dearer those are.
        rows: Rows of an item of a source, of a batch, or of a window of a shuffle; no meaning elsewhere.
        children: Items that a flat_map makes of one.
        kept: Share of the rows of an item that come out, for maps; above 1 it makes rows.
        row_bytes: Bytes of a row that comes out.
        bytes_spread: Standard deviation of the logarithm of an item's bytes a row; none is more than three of them off.
        scratch_bytes: What is needed beside input and output while an item is worked on.
        max_concurrency: The most items at once; None = no limit of its own.
        waits: Whether it is known to wait and so holds no slot; None = to be found out.
        wait_by_crowd: By how many items of the stage are at work, how many times `wait_seconds` they wait: pairs (n,
            times) in rising order of n, linear between and the same beyond; empty = once. For runs only: the fluid
            level refuses it.
        start_seconds: How long a process takes to start, asleep.
        start_cpu_seconds: And computing, after that.
        resident_bytes: Memory of a process.
    """

    name: str
    kind: Kind = "map"
    executor: Executor = "thread"
    wait_seconds: float = 0.0
    disk_bytes: float = 0.0
    network_bytes: float = 0.0
    serial_seconds: float = 0.0
    lock_seconds: float = 0.0
    cpu_seconds: float = 0.0
    moved_bytes: float = 0.0
    contention: float = 0.0
    coherency: float = 0.0
    spread: float = 0.0
    tail_share: float = 0.0
    tail_factor: float = 1.0
    rows: int = 1
    children: int = 1
    kept: float = 1.0
    row_bytes: float = 1000.0
    bytes_spread: float = 0.0
    scratch_bytes: float = 0.0
    max_concurrency: int | None = None
    waits: bool | None = None
    wait_by_crowd: tuple[tuple[float, float], ...] = ()
    start_seconds: float = 0.3
    start_cpu_seconds: float = 0.2
    resident_bytes: float = 80e6

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If one is none that a stage can have.
        """
        checks = Checks(f"stage {self.name!r}", self)
        if not isinstance(self.name, str) or not self.name:
            raise checks.wrong("name", "a text that is not empty")
        checks.one_of("kind", get_args(Kind))
        checks.one_of("executor", get_args(Executor))
        checks.one_of("waits", (True, False, None))
        checks.amounts("wait_seconds", "disk_bytes", "network_bytes", "serial_seconds", "lock_seconds", "cpu_seconds")
        checks.amounts("moved_bytes", "contention", "coherency", "spread", "row_bytes", "bytes_spread", "scratch_bytes")
        checks.amounts("start_seconds", "start_cpu_seconds", "resident_bytes")
        checks.amounts("tail_factor", "kept", above=True)
        checks.shares("tail_share")
        checks.counts("rows", "children")
        checks.counts("max_concurrency", optional=True)
        flat = [each for pair in self.wait_by_crowd for each in pair]
        crowds = flat[::2]
        if not all(is_number(each) and each >= 0 for each in flat) or crowds != sorted(set(crowds)):
            raise checks.wrong("wait_by_crowd", "pairs of numbers of at least 0, the first ones rising")

    def waiting(self, at_once: float) -> float:
        """Seconds that an item waits, with so many of the stage at work."""
        if not self.wait_by_crowd:
            return self.wait_seconds
        pairs = self.wait_by_crowd
        place = bisect.bisect_left(pairs, (at_once, 0.0))
        if place in (0, len(pairs)):
            return self.wait_seconds * pairs[min(place, len(pairs) - 1)][1]
        (few, short), (many, long) = pairs[place - 1 : place + 1]
        return self.wait_seconds * (short + (long - short) * (at_once - few) / (many - few))

    @property
    def takes_time(self) -> bool:
        """Whether an item of it takes any."""
        moved = self.wait_seconds, self.disk_bytes, self.network_bytes
        return any((*moved, self.serial_seconds, self.lock_seconds, self.cpu_seconds))


@dataclass(frozen=True, slots=True)
class SimMachine:
    """What stages share.

    Attributes:
        cpus: CPUs, also the slots that a budget has.
        disk_bytes_per_second: What all reads together get.
        disk_stream_bytes_per_second: The most that one of them gets.
        disk_seconds: Latency of one read.
        network_bytes_per_second: What all fetches together get.
        network_stream_bytes_per_second: The most that one of them gets.
        network_seconds: Latency of one fetch.
        memory_bytes_per_second: Memory bandwidth.
        memory_bytes: The memory limit; None = none.
        baseline_bytes: What the trainer and the interpreter use.
        kept_share: Share of what items gave back that allocators keep, until it is used again or is given back.
        max_threads: The most threads of the loader.
        max_processes: The most worker processes.
        unmeasured: Fields of a snapshot's machine, and "run_queue_seconds", that cannot be measured here.
    """

    cpus: int = 8
    disk_bytes_per_second: float = 2e9
    disk_stream_bytes_per_second: float = 1e9
    disk_seconds: float = 0.0
    network_bytes_per_second: float = 1e9
    network_stream_bytes_per_second: float = 1e8
    network_seconds: float = 0.0
    memory_bytes_per_second: float = 100e9
    memory_bytes: float | None = None
    baseline_bytes: float = 500e6
    kept_share: float = 0.2
    max_threads: int = 64
    max_processes: int = 64
    unmeasured: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If one is none that a machine can have, or the memory limit is used up from the start.
        """
        checks = Checks("machine", self)
        checks.counts("cpus", "max_threads", "max_processes")
        checks.amounts("disk_bytes_per_second", "disk_stream_bytes_per_second", "memory_bytes_per_second", above=True)
        checks.amounts("network_bytes_per_second", "network_stream_bytes_per_second", above=True)
        checks.amounts("disk_seconds", "network_seconds", "baseline_bytes")
        checks.shares("kept_share")
        if self.memory_bytes is not None and not (
            is_number(self.memory_bytes) and self.memory_bytes > self.baseline_bytes
        ):
            room = f"a number of bytes above baseline_bytes = {self.baseline_bytes:g}, or None for no limit"
            raise checks.wrong("memory_bytes", room)
        if not isinstance(self.unmeasured, frozenset):
            raise checks.wrong("unmeasured", "a frozenset of names")


@dataclass(frozen=True, slots=True)
class SimTrainer:
    """The training loop: takes a batch, computes on the machine's CPUs, then waits for its device.

    Attributes:
        device_seconds: A step on the device, which disturbs nobody.
        cpu_seconds: A step's computing in each of its threads, on the CPUs that the loader uses too.
        threads: How many threads that are.
        lock_seconds: A step's computing while it holds the interpreter lock.
        pause_every: Steps after which it pauses (evaluation, a checkpoint); 0 = never.
        pause_seconds: For how long.
        growth_bytes: Memory that it takes in its first steps.
        growth_steps: How many steps that takes.
    """

    device_seconds: float = 0.0
    cpu_seconds: float = 0.0
    threads: int = 1
    lock_seconds: float = 0.0
    pause_every: int = 0
    pause_seconds: float = 0.0
    growth_bytes: float = 0.0
    growth_steps: int = 10

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If one is none that a trainer can have.
        """
        checks = Checks("trainer", self)
        checks.amounts("device_seconds", "cpu_seconds", "lock_seconds", "pause_seconds", "growth_bytes")
        checks.counts("threads", "growth_steps")
        checks.counts("pause_every", least=0)

    @property
    def takes_time(self) -> bool:
        """Whether a step takes any."""
        return any((self.device_seconds, self.cpu_seconds, self.lock_seconds))


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changes while the run goes on.

    Attributes:
        seconds: When.
        what: "cost" (all seconds of a stage, times `value`), "bytes" (its row_bytes, times `value`), "cpus" (the quota
            is `value` from now on), "memory" (the limit is `value` bytes), "trainer" (its device seconds, times
            `value`), or "neighbours" (`value` other threads compute on the machine).
        value: The factor or the new value. Factors are relative to the start, not to the change before.
        stage: The stage, for "cost" and "bytes".
    """

    seconds: float
    what: What
    value: float
    stage: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If it is no known change, its time or value is none that it can have, or there is a stage where
                it is of none, or none where it is of one.
        """
        checks = Checks(f"change of {self.what!r}", self)
        checks.one_of("what", get_args(What))
        checks.amounts("seconds")
        checks.amounts("value", above=self.what != "neighbours")
        of_a_stage = self.what in ("cost", "bytes")
        if of_a_stage != (self.stage is not None):
            raise checks.wrong("stage", "the name of a stage" if of_a_stage else "None, as it is of no stage")


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that one simulated run is.

    Attributes:
        name: Names it in results: "wild-17".
        stages: Source first.
        machine: What they share.
        trainer: Who consumes.
        changes: What changes; they must stand in order of time, and are refused where they do not.
        epoch_items: Items of the source an epoch.
        seed: Where costs and sizes of items are drawn from: the same item costs the same under every tuner.
    """

    name: str
    stages: tuple[SimStage, ...]
    machine: SimMachine = field(default_factory=SimMachine)
    trainer: SimTrainer = field(default_factory=SimTrainer)
    changes: tuple[Change, ...] = ()
    epoch_items: int = 1_000_000
    seed: int = 0

    @property
    def through_seconds(self) -> float:
        """What an item takes from end to end where nothing is in its way, serial parts and devices left out."""
        return sum(stage.wait_seconds + stage.cpu_seconds + stage.lock_seconds for stage in self.stages)

    @property
    def starting_seconds(self) -> float:
        """What it takes until each stage in processes has one for each CPU, as more and more start at once."""
        rounds = 1 + math.ceil(math.log2(max(1, self.machine.cpus)))
        return rounds * sum(
            stage.start_seconds + stage.start_cpu_seconds + stage.cpu_seconds + stage.lock_seconds + stage.wait_seconds
            for stage in self.stages
            if stage.executor == "process"
        )

    def __post_init__(self) -> None:
        """Check that it can be run.

        Raises:
            ValueError: If a name is used twice or is not the one that a shuffle or batch has, or the source is missing,
                not first, or not the only one, or nothing takes any time, so that it would never pass, or changes are
                not in order of time.
        """
        checks = Checks(f"scenario {self.name!r}", self)
        checks.counts("epoch_items")
        checks.counts("seed", least=0)
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.name}: stages {names} need names that differ, at least one")
        kinds = [stage.kind for stage in self.stages]
        if kinds[0] != "source" or "source" in kinds[1:]:
            raise ValueError(f"{self.name}: the first stage, and no other, is the source; got kinds {kinds}")
        if not (self.trainer.takes_time or any(stage.takes_time for stage in self.stages)):
            raise ValueError(f"{self.name}: neither a stage nor the trainer takes any time, so none would ever pass")
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            number = kinds[: place + 1].count(kind)
            own = kind if number == 1 else f"{kind}_{number}"
            if kind in ("shuffle", "batch") and name != own:
                raise ValueError(f"{self.name}: a {kind} cannot be named {name!r}: in a pipeline it is {own!r}")
        for change in self.changes:
            if change.what in ("cost", "bytes") and change.stage not in names:
                raise ValueError(f"{self.name}: a change of {change.stage!r}, which is no stage of {names}")
        for before, after in itertools.pairwise(self.changes):
            if after.seconds < before.seconds:
                times = [change.seconds for change in self.changes]
                raise ValueError(f"{self.name}: changes must be in order of time, got them at {times} s")
