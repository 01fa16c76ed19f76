"""Families of scenarios, each drawn from a seed.

`TRAINED` are those that agents are trained and baselines are tuned on, "wild" being all of them drawn together.
`HELD_OUT` were named before the first training; nothing is ever trained or tuned on them.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from intune._errors import PipelineError
from intune.sim.scenario import LARGEST, Change, Scenario, SimMachine, SimStage

Random = np.random.Generator
Modifier = Callable[[Scenario, Random], Scenario]

CPUS = (2, 4, 8, 16, 32)
UNIT_ROWS = 64
LEAST_RATE, MOST_RATE = 15.0, 150.0
"""Source items a second that all CPUs together could work on."""


def scenario(family: str, seed: int) -> Scenario:
    """The scenario of a family that belongs to a seed.

    Raises:
        PipelineError: If there is no such family; it names the one that may have been meant.
    """
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise PipelineError(f"no family {family!r}: there are {sorted(FAMILIES)}{meant}")
    random = np.random.default_rng([seed, *family.encode()])
    return replace(FAMILIES[family](random), name=f"{family}-{seed}", seed=seed)


def _log(random: Random, low: float, high: float) -> float:
    return float(math.exp(random.uniform(math.log(low), math.log(high))))


def _some(random: Random, stages: tuple[SimStage, ...], most: int = 2) -> list[int]:
    """Places of one to `most` stages that are maps; dearer ones come first more often."""
    maps = [place for place, stage in enumerate(stages) if stage.kind == "map"]
    costs = np.array([stages[place].cpu_seconds + 1e-9 for place in maps])
    count = min(len(maps), int(random.integers(1, most + 1)))
    return [int(place) for place in random.choice(maps, count, replace=False, p=costs / costs.sum())]


def _with(scenario: Scenario, place: int, **fields: object) -> Scenario:
    stages = list(scenario.stages)
    stages[place] = replace(stages[place], **fields)  # type: ignore[arg-type]
    return replace(scenario, stages=tuple(stages))


def base(random: Random, least: int = 2, most: int = 8) -> Scenario:
    """Stages that scale perfectly, with costs that vary a little, and a trainer that takes all it can get."""
    count = int(random.integers(least, most + 1))
    cpus = int(random.choice(CPUS))
    total = cpus / _log(random, LEAST_RATE, MOST_RATE)
    shares = random.dirichlet([0.8] * count)
    batch = int(random.integers(1, count)) if count > 2 else 0
    stages: list[SimStage] = []
    for place in range(count):
        cost = max(total * float(shares[place]), total * 0.01)
        kind = "source" if place == 0 else "batch" if place == batch else "map"
        items = 1.0
        if batch and place >= batch:
            rows = int(UNIT_ROWS * 2.0 ** random.integers(-1, 3)) if place == batch else stages[batch].rows
            items = rows / UNIT_ROWS
        else:
            rows = UNIT_ROWS
        stages.append(
            SimStage(
                name={"source": "read", "batch": "batch"}.get(kind, f"map{place}"),
                kind=kind,  # type: ignore[arg-type]
                cpu_seconds=cost * items,
                spread=float(random.uniform(0.02, 0.3)),
                rows=rows,
                row_bytes=_log(random, 500, 20_000),
                max_concurrency=None,
            )
        )
    return Scenario("", tuple(stages), SimMachine(cpus=cpus))


# --- what is added to the base


def bending(scenario: Scenario, random: Random, strength: float = 1.0) -> Scenario:
    """One or two stages slow down with concurrency, so that the best is below what is allowed."""
    for place in _some(random, scenario.stages):
        best = _log(random, 1.5, max(2.0, scenario.machine.cpus))
        kappa = strength / (best * best)
        scenario = _with(scenario, place, coherency=kappa, contention=float(random.uniform(0, 0.1)))
    return scenario


def serial(scenario: Scenario, random: Random, strength: float = 1.0) -> Scenario:
    """A stage computes in part where only one item may be: more at once give less and less."""
    for place in _some(random, scenario.stages):
        cost = scenario.stages[place].cpu_seconds
        part = float(random.uniform(0.05, 0.5)) * min(1.0, strength)
        scenario = _with(scenario, place, serial_seconds=cost * part, cpu_seconds=cost * (1 - part))
    return scenario


def bandwidth(scenario: Scenario, random: Random, strength: float = 1.0) -> Scenario:
    """Stages move memory, and all of them together want more than there is."""
    demand = _log(random, 0.7, 2.0) * strength
    machine = scenario.machine
    for place in _some(random, scenario.stages, 3):
        rate = demand * machine.memory_bytes_per_second / machine.cpus
        scenario = _with(scenario, place, moved_bytes=scenario.stages[place].cpu_seconds * rate)
    return scenario


def network(scenario: Scenario, random: Random) -> Scenario:
    """The source fetches over a network with latency: it waits, and many fetches share the bandwidth."""
    machine = scenario.machine
    cost = sum(stage.cpu_seconds for stage in scenario.stages) / machine.cpus
    share = _log(random, 0.3, 1.5)
    size = share * cost * machine.network_bytes_per_second
    seconds = cost * _log(random, 2, 20)
    machine = replace(machine, network_stream_bytes_per_second=size / max(seconds, 1e-6))
    scenario = replace(scenario, machine=machine)
    return _with(scenario, 0, network_bytes=size, wait_seconds=seconds, cpu_seconds=cost * 0.1)


def processes(scenario: Scenario, random: Random, start: tuple[float, float] = (0.05, 2.0)) -> Scenario:
    """One or two stages run in processes, as they hold the interpreter lock."""
    for place in _some(random, scenario.stages):
        stage = scenario.stages[place]
        scenario = _with(
            scenario,
            place,
            executor="process",
            lock_seconds=stage.cpu_seconds,
            cpu_seconds=0.0,
            moved_bytes=0.0,
            start_seconds=_log(random, *start),
            start_cpu_seconds=_log(random, 0.05, 1.0),
            resident_bytes=_log(random, 50e6, 500e6),
        )
    return scenario


def memory(scenario: Scenario, random: Random) -> Scenario:
    """Items are large, of different sizes, and the limit allows for some of them only."""
    machine, cpus = scenario.machine, scenario.machine.cpus
    scenario = replace(
        scenario,
        stages=tuple(
            replace(
                stage,
                row_bytes=stage.row_bytes * 20,
                bytes_spread=float(random.uniform(0, 0.8)),
                scratch_bytes=_log(random, 1e5, 5e6),
            )
            for stage in scenario.stages
        ),
    )
    largest = max(stage.row_bytes * stage.rows for stage in scenario.stages)
    resident = sum(stage.resident_bytes * cpus for stage in scenario.stages if stage.executor == "process")
    need = cpus * largest * 1.5 + 0.6 * resident
    least = sum(stage.resident_bytes for stage in scenario.stages if stage.executor == "process")
    room = max(300e6, 12 * largest, need * _log(random, 0.4, 2.0))
    limit = machine.baseline_bytes + 1.3 * least + room
    # Nobody knows of the largest item before it is there: it must fit into the tenth that is left free.
    limit = max(limit, 10 * max(_excess(stage) for stage in scenario.stages))
    return replace(scenario, machine=replace(machine, memory_bytes=limit))


def _excess(stage: SimStage) -> float:
    """Bytes by which the largest item may be above the mean."""
    return stage.rows * stage.row_bytes * (math.exp(LARGEST * stage.bytes_spread - stage.bytes_spread**2 / 2) - 1)


def slow_trainer(scenario: Scenario, random: Random) -> Scenario:
    """The trainer takes less than the CPUs could give."""
    per_row = _seconds_per_row(scenario)
    device = per_row * _batch_rows(scenario) * _log(random, 1.1, 4.0)
    return replace(scenario, trainer=replace(scenario.trainer, device_seconds=device))


def sharing_trainer(scenario: Scenario, random: Random) -> Scenario:
    """The trainer computes on the CPUs that the loader uses."""
    cpus = scenario.machine.cpus
    threads = max(1, int(cpus * random.uniform(0.2, 0.6)))
    seconds = _seconds_per_row(scenario) * _batch_rows(scenario) * _log(random, 0.4, 1.2)
    trainer = replace(scenario.trainer, cpu_seconds=seconds, threads=threads)
    return replace(scenario, trainer=trainer)


def tails(scenario: Scenario, random: Random) -> Scenario:
    """Few items cost much more than the others."""
    for place in _some(random, scenario.stages):
        share = _log(random, 0.01, 0.1)
        scenario = _with(scenario, place, tail_share=share, tail_factor=_log(random, 3, 20), spread=0.5)
    return scenario


def noisy(scenario: Scenario, random: Random) -> Scenario:
    """Few large items a window, of costs that vary: measurements are rough."""
    factor = _log(random, 2, 8)
    return replace(
        scenario,
        stages=tuple(
            replace(
                stage,
                cpu_seconds=stage.cpu_seconds * factor,
                lock_seconds=stage.lock_seconds * factor,
                serial_seconds=stage.serial_seconds * factor,
                spread=float(random.uniform(0.2, 0.6)),
            )
            for stage in scenario.stages
        ),
        trainer=replace(scenario.trainer, device_seconds=scenario.trainer.device_seconds * factor),
    )


def rows_change(scenario: Scenario, random: Random) -> Scenario:
    """A map filters or makes rows; where a batch follows, fewer or more batches come of it."""
    places = [place for place in _some(random, scenario.stages) if place < _batch_place(scenario)]
    for place in places:
        scenario = _with(scenario, place, kept=_log(random, 0.3, 2.0))
    return scenario


def drift(scenario: Scenario, random: Random) -> Scenario:
    """What a stage costs changes in the middle, for good."""
    place = _some(random, scenario.stages, 1)[0]
    change = Change(float(random.uniform(20, 30)), "cost", _log(random, 0.25, 4.0), scenario.stages[place].name)
    return replace(scenario, changes=(*scenario.changes, change))


def quota(scenario: Scenario, random: Random) -> Scenario:
    """The quota of CPUs is cut in the middle, and sometimes given back."""
    cpus = scenario.machine.cpus
    less = max(1, int(cpus * random.uniform(0.3, 0.8)))
    changes = [Change(float(random.uniform(20, 30)), "cpus", less)]
    if random.random() < 0.5:
        changes.append(Change(float(random.uniform(42, 48)), "cpus", cpus))
    return replace(scenario, changes=tuple(sorted((*scenario.changes, *changes), key=lambda change: change.seconds)))


def neighbours(scenario: Scenario, random: Random) -> Scenario:
    """Others begin to compute on the same machine."""
    threads = max(1.0, float(random.uniform(0.1, 0.5)) * scenario.machine.cpus)
    change = Change(float(random.uniform(15, 30)), "neighbours", threads)
    return replace(scenario, changes=tuple(sorted((*scenario.changes, change), key=lambda change: change.seconds)))


def unmeasured(scenario: Scenario, random: Random) -> Scenario:
    """Some figures cannot be had."""
    names = ("run_queue_seconds", "lock_wait_seconds", "read_bytes", "cpu_seconds_all")
    lacking = frozenset(name for name in names if random.random() < 0.5)
    return replace(scenario, machine=replace(scenario.machine, unmeasured=lacking))


def lock(scenario: Scenario, random: Random) -> Scenario:
    """Functions on threads hold the interpreter lock for most of their time."""
    for place in _some(random, scenario.stages, 3):
        cost = scenario.stages[place].cpu_seconds
        part = float(random.uniform(0.4, 1.0))
        scenario = _with(scenario, place, lock_seconds=cost * part, cpu_seconds=cost * (1 - part))
    return scenario


def disk(scenario: Scenario, random: Random) -> Scenario:
    """The source reads from a disk that gives less than the CPUs could work on; more readers gain nothing."""
    machine = scenario.machine
    per_item = _seconds_per_row(scenario) * UNIT_ROWS
    size = per_item * machine.disk_bytes_per_second * _log(random, 0.8, 2.5)
    streams = _log(random, 1.5, 4)
    machine = replace(
        machine, disk_stream_bytes_per_second=machine.disk_bytes_per_second / streams, disk_seconds=per_item * 0.1
    )
    scenario = replace(scenario, machine=machine)
    return _with(scenario, 0, disk_bytes=size, coherency=float(random.uniform(0, 0.01)))


def stragglers(scenario: Scenario, random: Random) -> Scenario:
    """Now and then an item takes so long that order holds all others back."""
    place = _some(random, scenario.stages, 1)[0]
    return _with(scenario, place, tail_share=_log(random, 0.005, 0.03), tail_factor=_log(random, 20, 100), spread=0.3)


def _batch_place(scenario: Scenario) -> int:
    return next((n for n, stage in enumerate(scenario.stages) if stage.kind == "batch"), len(scenario.stages))


def _batch_rows(scenario: Scenario) -> float:
    return next((float(stage.rows) for stage in scenario.stages if stage.kind == "batch"), float(UNIT_ROWS))


def _seconds_per_row(scenario: Scenario) -> float:
    """Seconds a row if all CPUs computed all the time."""
    total = 0.0
    for place, stage in enumerate(scenario.stages):
        rows = stage.rows if stage.kind == "batch" else UNIT_ROWS
        if place > _batch_place(scenario):
            rows = int(_batch_rows(scenario))
        total += (stage.cpu_seconds + stage.lock_seconds + stage.serial_seconds) / rows
    return total / scenario.machine.cpus


# --- families


def _of(*modifiers: Modifier, least: int = 2, most: int = 8) -> Callable[[Random], Scenario]:
    def draw(random: Random) -> Scenario:
        found = base(random, max(least, 2 if not modifiers else 3), most)
        for modify in modifiers:
            found = modify(found, random)
        return found

    return draw


def _each(chance: float, modify: Modifier) -> Modifier:
    return lambda scenario, random: modify(scenario, random) if random.random() < chance else scenario


def _wild(strength: float) -> tuple[Modifier, ...]:
    return (
        _each(0.35, network),
        _each(0.4, processes),
        _each(0.5, lambda scenario, random: bending(scenario, random, strength)),
        _each(0.35, lambda scenario, random: serial(scenario, random, strength)),
        _each(0.35, lambda scenario, random: bandwidth(scenario, random, strength)),
        _each(0.3, tails),
        _each(0.3, rows_change),
        _each(0.2, slow_trainer),
        _each(0.2, sharing_trainer),
        _each(0.4, noisy),
        _each(0.4, memory),
        _each(0.25, drift),
        _each(0.2, quota),
        _each(0.2, neighbours),
        _each(0.3, unmeasured),
    )


TRAINED: Mapping[str, Callable[[Random], Scenario]] = {
    "clean": _of(),
    "bending": _of(bending),
    "serial": _of(serial),
    "bandwidth": _of(bandwidth),
    "network": _of(network),
    "processes": _of(processes),
    "memory": _of(memory),
    "slow-trainer": _of(slow_trainer),
    "sharing-trainer": _of(sharing_trainer),
    "tails": _of(tails),
    "noisy": _of(noisy),
    "rows": _of(rows_change),
    "drift": _of(drift),
    "quota": _of(quota),
    "neighbours": _of(neighbours),
    "wild": _of(*_wild(1.0)),
}

HELD_OUT: Mapping[str, Callable[[Random], Scenario]] = {
    "interpreter-lock": _of(lock),
    "disk-limited": _of(disk),
    "ordered-stragglers": _of(stragglers),
    "slow-process-start": _of(lambda scenario, random: processes(scenario, random, (5.0, 10.0))),
    "many-stages": _of(*_wild(1.0), least=9, most=12),
    "strong-contention": _of(*_wild(4.0)),
}

FAMILIES = {**TRAINED, **HELD_OUT}
