"""What a scenario is made of: values that make no sense are refused where they are given."""

import math
from typing import Any

import numpy as np
import pytest

from intune.sim import Change, Scenario, SimMachine, SimStage, SimTrainer

AMOUNTS = [-0.5, math.nan, math.inf, "1", None, True]
COUNTS = [0, -1, 1.5, math.nan, "2", True]
LEAST_0 = "a finite number of at least 0"
ABOVE_0 = "a finite number above 0"
LEAST_1 = "a whole number of at least 1"
READ = SimStage("read", "source", cpu_seconds=0.01)


def said(make: Any, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(ValueError, match=" must be ") as error:
        make(*arguments, **fields)
    return str(error.value)


@pytest.mark.parametrize("value", AMOUNTS)
@pytest.mark.parametrize(
    "name",
    [
        *(
            "wait_seconds",
            "disk_bytes",
            "network_bytes",
            "serial_seconds",
            "lock_seconds",
            "cpu_seconds",
            "moved_bytes",
        ),
        *("contention", "coherency", "spread", "row_bytes", "bytes_spread", "scratch_bytes", "start_seconds"),
        *("start_cpu_seconds", "resident_bytes"),
    ],
)
def test_amounts_of_a_stage(name: str, value: object) -> None:
    assert said(SimStage, "work", **{name: value}) == f"stage 'work': {name} must be {LEAST_0}, got {value!r}"
    SimStage("work", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, *AMOUNTS])
@pytest.mark.parametrize("name", ["kept", "tail_factor"])
def test_factors_of_a_stage(name: str, value: object) -> None:
    assert said(SimStage, "work", **{name: value}) == f"stage 'work': {name} must be {ABOVE_0}, got {value!r}"


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "0"])
def test_shares(value: object) -> None:
    assert said(SimStage, "work", tail_share=value) == (
        f"stage 'work': tail_share must be a number from 0 to 1, got {value!r}"
    )
    assert said(SimMachine, kept_share=value) == f"machine: kept_share must be a number from 0 to 1, got {value!r}"


@pytest.mark.parametrize("value", COUNTS)
def test_counts(value: object) -> None:
    for name in ("rows", "children"):
        assert said(SimStage, "work", **{name: value}) == f"stage 'work': {name} must be {LEAST_1}, got {value!r}"
    assert said(SimStage, "work", max_concurrency=value) == (
        f"stage 'work': max_concurrency must be {LEAST_1} or None, got {value!r}"
    )
    for name in ("cpus", "max_threads", "max_processes"):
        assert said(SimMachine, **{name: value}) == f"machine: {name} must be {LEAST_1}, got {value!r}"
    for name in ("threads", "growth_steps"):
        assert said(SimTrainer, **{name: value}) == f"trainer: {name} must be {LEAST_1}, got {value!r}"
    assert said(Scenario, "x", (READ,), epoch_items=value) == (
        f"scenario 'x': epoch_items must be {LEAST_1}, got {value!r}"
    )


@pytest.mark.parametrize("value", [-1, 0.5, None])
def test_counts_that_may_be_nothing(value: object) -> None:
    allowed = "a whole number of at least 0"
    assert said(SimTrainer, pause_every=value) == f"trainer: pause_every must be {allowed}, got {value!r}"
    assert said(Scenario, "x", (READ,), seed=value) == f"scenario 'x': seed must be {allowed}, got {value!r}"


def test_words() -> None:
    kinds = "'source', 'map', 'flat_map', 'shuffle', 'batch'"
    assert said(SimStage, "work", "mapp") == f"stage 'work': kind must be one of {kinds}, got 'mapp'"
    assert said(SimStage, "work", executor="gpu") == (
        "stage 'work': executor must be one of 'thread', 'process', got 'gpu'"
    )
    assert said(SimStage, "work", waits=1) == "stage 'work': waits must be one of True, False, None, got 1"
    assert said(SimStage, "") == "stage '': name must be a text that is not empty, got ''"
    assert said(SimMachine, unmeasured="read_bytes") == (
        "machine: unmeasured must be a frozenset of names, got 'read_bytes'"
    )


@pytest.mark.parametrize("value", [0, *AMOUNTS])
@pytest.mark.parametrize("what", ["disk", "disk_stream", "network", "network_stream", "memory"])
def test_rates_of_a_machine(what: str, value: object) -> None:
    name = f"{what}_bytes_per_second"
    assert said(SimMachine, **{name: value}) == f"machine: {name} must be {ABOVE_0}, got {value!r}"


@pytest.mark.parametrize("value", AMOUNTS)
def test_other_amounts(value: object) -> None:
    for name in ("disk_seconds", "network_seconds", "baseline_bytes"):
        assert said(SimMachine, **{name: value}) == f"machine: {name} must be {LEAST_0}, got {value!r}"
    for name in ("device_seconds", "cpu_seconds", "lock_seconds", "pause_seconds", "growth_bytes"):
        assert said(SimTrainer, **{name: value}) == f"trainer: {name} must be {LEAST_0}, got {value!r}"


@pytest.mark.parametrize("value", ["4GiB", 5e8, 1, -1.0, math.nan, math.inf])
def test_a_memory_limit_leaves_room(value: object) -> None:
    allowed = "a number of bytes above baseline_bytes = 5e+08, or None for no limit"
    assert said(SimMachine, memory_bytes=value) == f"machine: memory_bytes must be {allowed}, got {value!r}"


@pytest.mark.parametrize("what", ["cost", "bytes", "cpus", "memory", "trainer"])
@pytest.mark.parametrize("value", [0, *AMOUNTS])
def test_values_of_changes(what: str, value: object) -> None:
    stage = "read" if what in ("cost", "bytes") else None
    assert said(Change, 1.0, what, value, stage) == f"change of {what!r}: value must be {ABOVE_0}, got {value!r}"


def test_changes() -> None:
    known = "'cost', 'bytes', 'cpus', 'memory', 'trainer', 'neighbours'"
    assert said(Change, 1.0, "cpu", 2) == f"change of 'cpu': what must be one of {known}, got 'cpu'"
    assert said(Change, -1.0, "cpus", 2) == f"change of 'cpus': seconds must be {LEAST_0}, got -1.0"
    assert said(Change, 1.0, "neighbours", -1) == f"change of 'neighbours': value must be {LEAST_0}, got -1"
    assert said(Change, 1.0, "cost", 2.0) == "change of 'cost': stage must be the name of a stage, got None"
    assert said(Change, 1.0, "cpus", 2, "read") == (
        "change of 'cpus': stage must be None, as it is of no stage, got 'read'"
    )
    assert Change(1.0, "neighbours", 0).value == 0


def test_changes_are_in_order_of_time() -> None:
    early, late = Change(1.0, "cpus", 2), Change(2.0, "neighbours", 2)
    assert said(Scenario, "x", (READ,), changes=(late, early)) == (
        "x: changes must be in order of time, got them at [2.0, 1.0] s"
    )
    assert Scenario("x", (READ,), changes=(early, early, late)).changes == (early, early, late)


def test_numbers_of_numpy_are_numbers() -> None:
    assert SimStage("work", rows=np.int64(3), cpu_seconds=np.float32(0.5)).rows == 3  # type: ignore[arg-type]
