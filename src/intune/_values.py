"""The values and protocols that pipelines, tuners, control and the simulator share.

All values are frozen. Units stand in the names. What could not be measured is None, never 0. Interval
figures (of one window) and lifetime figures never share a field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

Cause = Literal["input", "order", "room", "memory", "slot"]
"""Why a stage ran fewer items than it may, in the order in which the reasons are asked for."""

CAUSES: tuple[Cause, ...] = ("input", "order", "room", "memory", "slot")

CROWDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Numbers of items at once by which the seconds of an item are told apart; others count as the next lower one."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What all stages together may use.

    Attributes:
        cpus: Slots for running CPU work, at least 1.
        max_threads: Threads that the loader may own, waiting stages included.
        max_processes: Worker processes that may live at once over all process stages.
        memory_bytes: Limit for the whole process tree in bytes; None = no limit known.
    """

    cpus: int
    max_threads: int = 64
    max_processes: int = 64
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """A complete decision: one entry in `concurrency` for each stage of the workload.

    Attributes:
        concurrency: By stage, the most items it works on at once: an int of at least 1, or None = open
            (all slots for CPU threads; min(max_concurrency, slots) processes; for waiting stages an
            equal share of the thread limit). 0 pauses a stage and comes from users only.
        slots: CPU slots in use, at least 1 and at most `Budget.cpus`.
        in_flight_bytes: Bytes that items in flight may hold; None = as the workload finds right.
        reasons: By stage, one sentence a person understands.
        expected_rows_per_second: Rows a second that the training loop is expected to take under it, once it has
            settled; None = the tuner does not say.
    """

    concurrency: Mapping[str, int | None]
    slots: int
    in_flight_bytes: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    expected_rows_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a stage is; fixed when the loader is made.

    Attributes:
        name: Unique in its pipeline.
        kind: "source", "map", "map_rows", "filter", "flat_map", "shuffle", "batch", "unbatch", "to_torch".
        executor: "thread" or "process".
        max_concurrency: The most items that it may ever work on at once; None = no limit of its own.
        waits: Whether it waits instead of computing and so holds no slot; None = not yet decided.
    """

    name: str
    kind: str
    executor: Literal["thread", "process"] = "thread"
    max_concurrency: int | None = None
    waits: bool | None = None


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """One stage over one window.

    Attributes:
        info: What the stage is.
        concurrency: Limit now in force; None = open.
        running: Items in hand at the end of the window.
        processes_live: Worker processes ready to work; None for thread stages.
        processes_starting: Worker processes being started; None for thread stages.
        processes_leaving: Worker processes asked to end that have not yet; None for thread stages.
        items_in: Items begun in the window.
        items_out: Items finished in the window (children, for one-to-many stages).
        rows_out: Rows in the items that were finished in the window.
        source_rows_per_item: Source rows that one finished item stands for; compare stages in source rows.
        wall_seconds_mean: Mean wall seconds an item.
        wall_seconds_p50: Median wall seconds an item.
        wall_seconds_p99: 99th percentile of wall seconds an item.
        wall_seconds_by_crowd: How an item's seconds depend on how many were worked on at once: (one of `CROWDS`, items,
            mean wall seconds an item), for those that occurred, in rising order.
        cpu_seconds_mean: Mean CPU seconds an item.
        busy_seconds: Wall seconds for which the items that were finished in the window were worked on.
        in_hand_mean: Items in hand on average over the window, from being begun to being booked.
        run_queue_seconds: Seconds of the busy ones in which its threads were runnable but had no CPU, estimated
            from a sample of its tasks; None for process stages.
        wait_share: By cause, the share of the window in which it ran fewer than its concurrency, by the
            first unmet of input, order, room, memory, slot. Shares sum to at most 1.
        item_bytes_mean: Mean bytes of a finished item.
        item_bytes_p99: 99th percentile of the bytes of a finished item.
        item_bytes_max: Largest finished item in bytes.
        waiting_items: Items that wait before it at the end of the window.
        waiting_bytes: Bytes of those items.
        process_resident_bytes: Mean resident bytes of one of its worker processes that has done an item.
        process_growth_bytes: Bytes that those will hold more that have done none yet. None = not known.
        saturated_concurrency: Largest concurrency at which it was seen fully used in its lifetime.
    """

    info: StageInfo
    concurrency: int | None
    running: int
    processes_live: int | None = None
    processes_starting: int | None = None
    processes_leaving: int | None = None
    items_in: int = 0
    items_out: int = 0
    rows_out: int = 0
    source_rows_per_item: float | None = None
    wall_seconds_mean: float | None = None
    wall_seconds_p50: float | None = None
    wall_seconds_p99: float | None = None
    wall_seconds_by_crowd: tuple[tuple[int, int, float], ...] = ()
    cpu_seconds_mean: float | None = None
    busy_seconds: float = 0.0
    in_hand_mean: float = 0.0
    run_queue_seconds: float | None = None
    wait_share: Mapping[Cause, float] = field(default_factory=dict)
    item_bytes_mean: float | None = None
    item_bytes_p99: float | None = None
    item_bytes_max: int | None = None
    waiting_items: int = 0
    waiting_bytes: int | None = None
    process_resident_bytes: int | None = None
    process_growth_bytes: int | None = None
    saturated_concurrency: int | None = None

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.info.name


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """The training loop over one window.

    Attributes:
        steps: Batches (or samples) that it took.
        rows: Rows in them.
        seconds_per_step: Mean seconds from one call of `next` to the following one.
        wait_share: Share of the window that it was blocked in `next`: "loader wait", not "GPU idle".
        gpu_starved_share: Share of steps at which the GPU had run out of work; None without CUDA events.
        ready: Batches finished and waiting for it at the end of the window.
    """

    steps: int
    rows: int
    seconds_per_step: float | None
    wait_share: float
    gpu_starved_share: float | None = None
    ready: int = 0


class InFlight(NamedTuple):
    """Bytes of items in flight, at one moment.

    Attributes:
        held_bytes: What they hold; each buffer counts once.
        charged_bytes: The same with what is reserved beyond that.
        working_bytes: What is needed for those that are worked on while that lasts: what came in and what will go out.
        waiting_bytes: Of what they hold, what belongs to items that are not worked on.
    """

    held_bytes: int = 0
    charged_bytes: int = 0
    working_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A memory limit, and what is used of it by all that it is for.

    Attributes:
        limit_bytes: The limit.
        used_bytes: What is used of it; None = not measured.
        limit_from: What sets it: the file or call that it was read from, or that the user chose it.
        used_from: The file or call that `used_bytes` was read from.
        rest_bytes: Of what is used, what items in flight do not explain: the least of the last ten seconds. None = not
            known.
        chosen: Whether it is that of the budget, which a user chose for this process and its descendants.
        with_processes: Whether it is for worker processes too.
        used_by: Whose use it is, in words; "" = not said.
    """

    limit_bytes: int
    used_bytes: int | None
    limit_from: str = ""
    used_from: str = ""
    rest_bytes: int | None = None
    chosen: bool = False
    with_processes: bool = True
    used_by: str = ""


@dataclass(frozen=True, slots=True)
class MachineSnapshot:
    """The machine over one window. `read_from` says where each figure came from.

    Attributes:
        cpus: CPUs that this process may use.
        cpu_seconds_used: CPU seconds of this process tree in the window.
        cpu_seconds_all: CPU seconds of everything on the machine in the window.
        throttled_seconds: Seconds in which the CPU quota held the group back, summed over CPUs.
        pressure_share: Share of the window in which some task waited for a CPU (PSI some).
        lock_wait_seconds: Mean seconds that a thread waits for the interpreter lock (probe thread).
        read_bytes: Bytes read from storage by this process tree in the window.
        memory_bytes: Memory of the process tree, or of its cgroup (anonymous + shared): of what the limit is for.
        memory_limit_bytes: The limit on it that is nearest to being reached.
        memory_used_by: Whose use `memory_bytes` is, in words: on a machine without other limits that of all programs.
            "" = not said.
        own_memory_bytes: Memory of this process alone (anonymous + shared), its worker processes left out.
        read_from: By field name, the file or call that it was read from.
        memory: Every limit with what is used of it; empty where only the nearest is told.
    """

    cpus: int
    cpu_seconds_used: float | None = None
    cpu_seconds_all: float | None = None
    throttled_seconds: float | None = None
    pressure_share: float | None = None
    lock_wait_seconds: float | None = None
    read_bytes: int | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_by: str = ""
    own_memory_bytes: int | None = None
    read_from: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the window.

    Attributes:
        kind: "resize", "epoch_start", "epoch_end", "pause", "waits", "executor", "clamped", "vetoed", "tuner_failed",
            "worker_died", "skipped", "budget", "braked", "over_limit", "outcome".
        stage: The stage that it concerns, or None.
        detail: One sentence a person understands.
    """

    kind: str
    stage: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a tuner sees: one window of a workload.

    Attributes:
        window_seconds: Length of the window.
        warm: Whether every stage has finished items in it, so that its figures can be trusted.
        stages: One entry for each stage, source first.
        consumer: The training loop.
        machine: The machine.
        allocation: The allocation that was in force at the end of the window.
        in_flight_items: Items in the pipeline at the end of the window.
        in_flight_bytes: Bytes that they hold, each buffer once.
        in_flight_bytes_limit: The limit on those bytes that was in force; None = none.
        rest_bytes: Of the machine's `memory_bytes` what those bytes do not explain, the least of the last ten seconds:
            what would remain without items in flight. None = not measured.
        held_back_share: Share of the window in which a CPU slot was free and only memory kept an item from going on.
        epoch: The epoch being delivered; None before the first.
        events: What happened in it, what became of the tuner's last proposal included.
    """

    window_seconds: float
    warm: bool
    stages: tuple[StageSnapshot, ...]
    consumer: ConsumerSnapshot
    machine: MachineSnapshot
    allocation: Allocation
    in_flight_items: int = 0
    in_flight_bytes: int | None = None
    in_flight_bytes_limit: int | None = None
    rest_bytes: int | None = None
    held_back_share: float = 0.0
    epoch: int | None = None
    events: tuple[Event, ...] = ()


def memory_uses(snapshot: Snapshot, budget: Budget) -> tuple[MemoryUse, ...]:
    """Each memory limit that holds now, with its own use and rest; empty where the budget has none.

    The one that a user chose is as the budget now says. Of a workload that tells of one limit only, that or the
    budget's holds, whichever is tighter. A rest that is not known is what is used less what items in flight hold, never
    below 0; None only where the use is not known either.
    """
    machine, limit = snapshot.machine, budget.memory_bytes
    if limit is None:
        return ()
    if machine.memory:
        found = tuple(replace(use, limit_bytes=limit) if use.chosen else use for use in machine.memory)
    else:
        nearest = limit if machine.memory_limit_bytes is None else min(limit, machine.memory_limit_bytes)
        found = (MemoryUse(nearest, machine.memory_bytes, rest_bytes=snapshot.rest_bytes),)
    return tuple(_with_rest(use, snapshot.in_flight_bytes or 0) for use in found)


def _with_rest(use: MemoryUse, in_flight_bytes: int) -> MemoryUse:
    if use.rest_bytes is not None or use.used_bytes is None:
        return use
    return replace(use, rest_bytes=max(0, use.used_bytes - in_flight_bytes))


class Workload(Protocol):
    """What can be tuned: a running loader, the simulator, an application. Tuners cannot tell which."""

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The stages, source first."""
        ...

    def snapshot(self) -> Snapshot:
        """Close the window that began at the last call and say what happened in it."""
        ...

    def apply(self, allocation: Allocation) -> None:
        """Put an allocation into force and return at once.

        Raises:
            AllocationError: If an entry is unknown, missing or not allowed; nothing is clamped.
        """
        ...


class Tuner(Protocol):
    """A decision without clock, sleep, thread or I/O."""

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The allocation that it wants next, complete for every stage in the snapshot."""
        ...
