"""Scenarios as arrays: one row for each of E environments, one column for each of S stages.

Everything is said for one source row, so that stages can be compared: a stage's `visits` are its items for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from intune.sim.scenario import Scenario, SimStage
from intune.tuners.view import Bools, Floats

Ints = npt.NDArray[np.int64]

SHUFFLED_ROWS, SHUFFLED_FOR_BATCH_ROWS = 65_536, 4_096
"""Rows that a shuffle puts together at once, and before a batch at least."""


@dataclass(slots=True)
class Tables:
    """What is fixed about E environments; [E, S] by stage, [E] otherwise. Columns without a stage are all zeros.

    Attributes:
        present: bool[E, S].
        process: bool[E, S]; it runs in processes.
        gathers: bool[E, S]; it is a shuffle or batch.
        opens: bool[E, S]; order is restored before it: it is the source, or gathers.
        segment: Number of the place of order before it, the source being 0; -1 without a stage.
        most: Its max_concurrency, or inf.
        declared: Whether it waits: 1, 0, or NaN = to be found out.
        visits: Items for each source row.
        rows_out: Rows of an item that comes out.
        source_rows: Source rows of an item that comes out.
        wait: Seconds asleep.
        latency: Seconds asleep that do not grow with an item's cost: of disk and network.
        disk: Bytes read from disk.
        network: Bytes fetched.
        serial: Seconds in the serial section.
        lock: Seconds with the interpreter lock.
        cpu: Seconds without it.
        moved: Bytes of memory traffic.
        contention: Sigma of the scalability law.
        coherency: Kappa of the same.
        spread: Standard deviation of the logarithm of an item's cost, without the tail.
        tail: Share of items in the tail.
        tail_factor: How many times the mean those cost.
        rest_factor: How many times the mean the others cost.
        variation: Standard deviation of an item's cost over its mean, tail included.
        in_bytes: Bytes of what comes in.
        out_bytes: Bytes of what comes out.
        bytes_spread: Standard deviation of the logarithm of an item's bytes a row.
        scratch: Bytes needed besides, while an item is worked on.
        resident: Bytes of a process; 0 for threads.
        start_wait: Seconds asleep of a process's start.
        start_cpu: And computing.
        cpus: CPUs at the beginning.
        disk_rate: Bytes a second of the disk.
        disk_stream: Of one read.
        network_rate: Bytes a second of the network.
        network_stream: Of one fetch.
        traffic_rate: Bytes a second of memory bandwidth.
        limit: Memory limit at the beginning; inf = none.
        baseline: Bytes of trainer and interpreter.
        kept: Share of bytes given back that allocators keep.
        max_threads: Threads of the loader.
        max_processes: Worker processes.
        batch_rows: Source rows that the trainer takes at once.
        device: Device seconds of a step at the beginning.
        pause: Pause seconds of a step, on average.
        trainer_cpu: Computing seconds of a step in each thread.
        trainer_threads: How many threads that are.
        trainer_lock: Seconds of a step with the interpreter lock.
        growth: Bytes that the trainer takes in its first steps.
        growth_steps: How many steps that takes.
        epoch_rows: Source rows of an epoch.
        measured: bool[E, 4]; whether run queue, lock wait, bytes read and everybody's CPU seconds are measured.
        sees_used: bool[E, 2]; whether used CPU seconds and memory are.
    """

    present: Bools
    process: Bools
    gathers: Bools
    opens: Bools
    segment: Ints
    most: Floats
    declared: Floats
    visits: Floats
    rows_out: Floats
    source_rows: Floats
    wait: Floats
    latency: Floats
    disk: Floats
    network: Floats
    serial: Floats
    lock: Floats
    cpu: Floats
    moved: Floats
    contention: Floats
    coherency: Floats
    spread: Floats
    tail: Floats
    tail_factor: Floats
    rest_factor: Floats
    variation: Floats
    in_bytes: Floats
    out_bytes: Floats
    bytes_spread: Floats
    scratch: Floats
    resident: Floats
    start_wait: Floats
    start_cpu: Floats
    cpus: Floats
    disk_rate: Floats
    disk_stream: Floats
    network_rate: Floats
    network_stream: Floats
    traffic_rate: Floats
    limit: Floats
    baseline: Floats
    kept: Floats
    max_threads: Floats
    max_processes: Floats
    batch_rows: Floats
    device: Floats
    pause: Floats
    trainer_cpu: Floats
    trainer_threads: Floats
    trainer_lock: Floats
    growth: Floats
    growth_steps: Floats
    epoch_rows: Floats
    measured: Bools
    sees_used: Bools

    @classmethod
    def empty(cls, workloads: int, stages: int) -> "Tables":
        """Zeros, to be filled."""
        by_stage, types = (workloads, stages), {"segment": np.int64}
        flags = {"present", "process", "gathers", "opens"}
        made: dict[str, Any] = {}
        for number, each in enumerate(fields(cls)):
            if each.name in ("measured", "sees_used"):
                made[each.name] = np.ones((workloads, 4 if each.name == "measured" else 2), dtype=np.bool_)
            else:
                shape = by_stage if number < _BY_STAGE else (workloads,)
                made[each.name] = np.zeros(shape, dtype=np.bool_ if each.name in flags else types.get(each.name, float))
        return cls(**made)

    def take(self, rows: Ints) -> "Tables":
        """The environments with these numbers, copied."""
        return Tables(*(getattr(self, each.name)[rows] for each in fields(self)))

    def put(self, row: int, scenario: Scenario) -> None:
        """Let an environment be that of a scenario.

        Raises:
            ValueError: If it has more stages than there are columns.
        """
        stages, columns = scenario.stages, self.present.shape[1]
        if len(stages) > columns:
            raise ValueError(f"{scenario.name}: {len(stages)} stages, but these environments have at most {columns}")
        for name, value in _whole(scenario).items():
            getattr(self, name)[row] = value
        for each in fields(self)[:_BY_STAGE]:
            getattr(self, each.name)[row] = -1 if each.name == "segment" else 0
        flow = _Flow(float(stages[0].rows), 0.0, -1)
        for place in range(len(stages)):
            for name, value in _stage(scenario, place, flow).items():
                getattr(self, name)[row, place] = value
        self.batch_rows[row] = flow.source_rows


@dataclass(slots=True)
class _Flow:
    """What flows between two stages: rows and bytes of an item, the segment, and source rows of an item."""

    rows: float
    item_bytes: float
    segment: int
    source_rows: float = 0.0

    def through(self, stage: SimStage, batch: int | None) -> None:
        """Let it pass a stage; `batch` = rows of the batches into which the next one cuts."""
        if stage.kind == "source":
            self.source_rows = self.rows
        elif stage.kind in ("shuffle", "batch"):
            rows = float(stage.rows) if stage.kind == "batch" else _shuffled_at_once(stage.rows, batch)
            self.source_rows *= rows / self.rows
            self.rows = rows
        elif stage.kind == "flat_map":
            self.source_rows /= stage.children
            self.rows = max(1.0, round(self.rows * stage.kept / stage.children))
        else:
            self.rows = max(1.0, round(self.rows * stage.kept))
        self.item_bytes = self.rows * max(1, round(stage.row_bytes))
        self.segment += stage.kind in ("source", "shuffle", "batch")


def _shuffled_at_once(window: int, batch: int | None) -> float:
    """Rows that a shuffle puts together at once, on average: some whole batches, where these follow, and the rest."""
    most = SHUFFLED_ROWS if batch is None else batch * -(-SHUFFLED_FOR_BATCH_ROWS // batch)
    return window / -(-window // most)


def _stage(scenario: Scenario, place: int, flow: _Flow) -> dict[str, float]:
    machine, stage, following = scenario.machine, scenario.stages[place], scenario.stages[place + 1 : place + 2]
    if stage.wait_by_crowd:
        raise ValueError(f"stage {stage.name!r}: wait_by_crowd is not known to the fluid level; use intune.sim.play")
    process = stage.executor == "process"
    in_bytes, rows_in = flow.item_bytes, flow.rows
    flow.through(stage, next((each.rows for each in following if each.kind == "batch"), None))
    if stage.kind in ("shuffle", "batch"):
        in_bytes *= flow.rows / rows_in
    tail = stage.tail_share
    rest = 1 / (1 + tail * (stage.tail_factor - 1))
    second = rest**2 * (1 - tail + tail * stage.tail_factor**2) * np.exp(stage.spread**2)
    latency = machine.disk_seconds if stage.disk_bytes else 0.0
    latency += machine.network_seconds if stage.network_bytes else 0.0
    return {
        "present": True,
        "process": process,
        "gathers": stage.kind in ("shuffle", "batch"),
        "opens": stage.kind in ("source", "shuffle", "batch"),
        "segment": flow.segment,
        "most": np.inf if stage.max_concurrency is None else stage.max_concurrency,
        "declared": 0.0 if process else np.nan if stage.waits is None else float(stage.waits),
        "visits": 1 / flow.source_rows,
        "rows_out": flow.rows,
        "source_rows": flow.source_rows,
        "wait": stage.wait_seconds,
        "latency": latency,
        "disk": stage.disk_bytes,
        "network": stage.network_bytes,
        "serial": stage.serial_seconds,
        "lock": stage.lock_seconds,
        "cpu": stage.cpu_seconds,
        "moved": stage.moved_bytes if stage.cpu_seconds else 0.0,
        "contention": stage.contention,
        "coherency": stage.coherency,
        "spread": stage.spread,
        "tail": tail,
        "tail_factor": rest * stage.tail_factor,
        "rest_factor": rest,
        "variation": float(np.sqrt(max(0.0, second - 1))),
        "in_bytes": in_bytes,
        "out_bytes": flow.item_bytes,
        "bytes_spread": stage.bytes_spread,
        "scratch": stage.scratch_bytes,
        "resident": stage.resident_bytes if process else 0.0,
        "start_wait": stage.start_seconds,
        "start_cpu": stage.start_cpu_seconds,
    }


def _whole(scenario: Scenario) -> dict[str, object]:
    machine, trainer = scenario.machine, scenario.trainer
    pause = trainer.pause_seconds / trainer.pause_every if trainer.pause_every else 0.0
    names = ("run_queue_seconds", "lock_wait_seconds", "read_bytes", "cpu_seconds_all")
    used = ("cpu_seconds_used", "memory_bytes")
    return {
        "cpus": machine.cpus,
        "disk_rate": machine.disk_bytes_per_second,
        "disk_stream": machine.disk_stream_bytes_per_second,
        "network_rate": machine.network_bytes_per_second,
        "network_stream": machine.network_stream_bytes_per_second,
        "traffic_rate": machine.memory_bytes_per_second,
        "limit": np.inf if machine.memory_bytes is None else machine.memory_bytes,
        "baseline": machine.baseline_bytes,
        "kept": machine.kept_share,
        "max_threads": machine.max_threads,
        "max_processes": machine.max_processes,
        "device": trainer.device_seconds,
        "pause": pause,
        "trainer_cpu": trainer.cpu_seconds,
        "trainer_threads": trainer.threads,
        "trainer_lock": trainer.lock_seconds,
        "growth": trainer.growth_bytes,
        "growth_steps": max(1, trainer.growth_steps),
        "epoch_rows": float(scenario.epoch_items) * scenario.stages[0].rows,
        "measured": [name not in machine.unmeasured for name in names],
        "sees_used": [name not in machine.unmeasured for name in used],
    }


_BY_STAGE = [each.name for each in fields(Tables)].index("cpus")


def last_of(tables: Tables) -> Ints:
    """int64[E]: the column of the last stage."""
    return np.asarray(tables.present.sum(1) - 1)


def tables(scenarios: Sequence[Scenario]) -> Tables:
    """Tables of scenarios, with as many columns as the largest needs."""
    made = Tables.empty(len(scenarios), max(len(scenario.stages) for scenario in scenarios))
    for row, scenario in enumerate(scenarios):
        made.put(row, scenario)
    return made
