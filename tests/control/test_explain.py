from dataclasses import replace

import pytest

from intune._values import Allocation, ConsumerSnapshot, Event, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.control.explain import explain, limit

GIB = 2**30


def stage(name: str, *, kind: str = "map", **figures: object) -> StageSnapshot:
    """A stage that did 100 items of 20 ms in the window; names of `StageInfo` fields go there."""
    info = {key: figures.pop(key) for key in ("executor", "max_concurrency", "waits") if key in figures}
    usual = {
        "concurrency": None,
        "running": 1,
        "items_in": 100,
        "items_out": 100,
        "wall_seconds_mean": 0.02,
        "wall_seconds_p50": 0.019,
        "wall_seconds_p99": 0.03,
        "cpu_seconds_mean": 0.02,
        "busy_seconds": 2.0,
    }
    return StageSnapshot(StageInfo(name, kind, **info), **{**usual, **figures})


def window(*stages: StageSnapshot, wait: float = 0.6, steps: int = 10, ready: int = 0, **changes: object) -> Snapshot:
    snapshot = Snapshot(
        window_seconds=1.0,
        warm=True,
        stages=stages,
        consumer=ConsumerSnapshot(steps, steps * 64, 0.1, wait, ready=ready),
        machine=MachineSnapshot(cpus=8, cpu_seconds_used=7.6, memory_bytes=3 * GIB, memory_limit_bytes=8 * GIB),
        allocation=Allocation({stage.name: stage.concurrency for stage in stages}, slots=8),
        in_flight_items=12,
        in_flight_bytes=GIB,
        in_flight_bytes_limit=2 * GIB,
    )
    return replace(snapshot, **changes)


def starved(name: str = "batch") -> StageSnapshot:
    return stage(name, kind="batch", wait_share={"input": 0.9})


def source(**shares: float) -> StageSnapshot:
    return stage("read", kind="source", wait_share=shares)


def on(snapshot: Snapshot, **machine: object) -> Snapshot:
    return replace(snapshot, machine=replace(snapshot.machine, **machine))


def test_a_trainer_that_hardly_waits_is_the_limit() -> None:
    found = limit(window(source(room=0.9), starved(), wait=0.012, ready=2))
    assert (found.kind, found.stage) == ("trainer", None)
    assert "waited for data 1 % of the time, and 2 batches lay ready" in found.sentence


def test_a_trainer_that_asked_for_nothing_while_batches_lie_ready_is_the_limit() -> None:
    found = limit(window(source(room=0.9), wait=0.0, steps=0, ready=1))
    assert found.kind == "trainer"
    assert "1 batch lay" in found.sentence


def test_a_paused_stage_is_the_limit_unless_the_trainer_is() -> None:
    stages = source(slot=0.9), stage("work", concurrency=0, wait_share={"input": 0.9})
    assert (limit(window(*stages)).kind, limit(window(*stages)).stage) == ("paused", "work")
    assert limit(window(*stages, wait=0.0)).kind == "trainer"


@pytest.mark.parametrize("stages", [(), (stage("read", running=0, items_in=0),)])
def test_nothing_measured_is_said(stages: tuple[StageSnapshot, ...]) -> None:
    assert limit(window(*stages, steps=0)).kind == "unknown"


def test_all_slots_busy_is_cpu() -> None:
    found = limit(window(source(slot=0.8, input=0.1), starved("work"), starved()))
    assert (found.kind, found.stage) == ("cpu", "read")
    assert found.sentence == (
        "CPU is the limit: stage read waited for one 80 % of the time (8 slots of 8 CPUs, 7.6 CPUs used)."
    )


def test_cpu_figures_name_other_programs_and_the_quota() -> None:
    snapshot = on(window(source(slot=0.8)), cpu_seconds_used=3.0, cpu_seconds_all=7.5, throttled_seconds=0.25)
    assert "3.0 CPUs used, 4.5 by other programs, held back by the CPU quota for 250 ms" in limit(snapshot).sentence


def test_an_open_stage_that_fills_every_slot_is_cpu() -> None:
    assert limit(window(source(input=0.1))).kind == "cpu"


def test_a_stage_at_its_own_limit_is_named_not_the_starved_ones_behind_it() -> None:
    narrow = stage("work", concurrency=4, max_concurrency=4, wait_share={"input": 0.05})
    found = limit(window(source(room=0.9), narrow, starved("cast"), starved()))
    assert (found.kind, found.stage) == ("concurrency", "work")
    assert "works on 4 at once nearly all the time; its max_concurrency is 4 (20 ms an item)" in found.sentence


def test_an_open_process_stage_at_its_limit_is_concurrency() -> None:
    found = limit(window(source(room=0.9), stage("work", executor="process", processes_live=8)))
    assert (found.kind, found.stage) == ("concurrency", "work")


@pytest.mark.parametrize(
    ("concurrency", "words"), [(16, "all 16 that it may have"), (None, "as many as threads allow")]
)
def test_a_stage_that_waits_and_is_full_is_named_so(concurrency: int | None, words: str) -> None:
    fetch = stage("read", kind="source", waits=True, concurrency=concurrency, wall_seconds_mean=1.5)
    found = limit(window(fetch, starved()))
    assert (found.kind, found.stage) == ("waits", "read")
    assert f"{words} under way (1.5 s an item)" in found.sentence


LOCKED = stage("parse", cpu_seconds_mean=0.005, run_queue_seconds=0.1, wait_share={"slot": 0.7})


def test_low_cpu_and_a_long_wait_for_the_lock_is_the_lock() -> None:
    found = limit(on(window(source(slot=0.8), LOCKED), lock_wait_seconds=0.015))
    assert (found.kind, found.stage) == ("lock", "parse")
    assert "a thread waits 15 ms for it, and stage parse loses 70 % of its working time" in found.sentence


@pytest.mark.parametrize("wait", [None, 0.0001])
def test_low_cpu_without_a_wait_for_the_lock_is_not_the_lock(wait: float | None) -> None:
    assert limit(on(window(source(slot=0.8), LOCKED), lock_wait_seconds=wait)).kind == "cpu"


@pytest.mark.parametrize(
    "figures",
    [
        {"cpu_seconds_mean": 0.019},
        {"run_queue_seconds": 1.5},
        {"cpu_seconds_mean": None},
        {"wall_seconds_mean": None},
        {"waits": True},
        {"executor": "process"},
        {"busy_seconds": 0.0},
    ],
    ids=str,
)
def test_time_that_is_lost_otherwise_is_not_the_lock(figures: dict[str, object]) -> None:
    usual = {"cpu_seconds_mean": 0.005, "run_queue_seconds": 0.1, "wait_share": {"slot": 0.7}}
    quiet = replace(source(slot=0.8), busy_seconds=0.5)
    snapshot = on(window(quiet, stage("parse", **{**usual, **figures})), lock_wait_seconds=0.015)
    assert limit(snapshot).kind == "cpu"


def test_items_that_are_not_admitted_are_memory() -> None:
    found = limit(window(source(memory=0.7, slot=0.1), starved()))
    assert (found.kind, found.stage) == ("memory", "read")
    assert (
        "waited 70 % of the time for bytes to become free; items in flight hold 1,024 MiB of 2,048 MiB"
        in found.sentence
    )


@pytest.mark.parametrize("cause", ["order", "room"])
def test_a_slow_item_that_holds_others_back_is_order_and_its_stage_is_said(cause: str) -> None:
    slow = stage("work", wait_share={"input": 0.9}, wall_seconds_p50=0.02, wall_seconds_p99=2.5)
    found = limit(window(source(**{cause: 0.7}), slow, starved()))
    assert (found.kind, found.stage) == ("order", "read")
    assert "the slowest are in stage work: 2.5 s (99th percentile) against 20 ms (median)" in found.sentence


def test_order_without_times_still_has_its_sentence() -> None:
    found = limit(window(replace(source(order=0.7), wall_seconds_p99=None)))
    assert found.sentence.endswith("waited 70 % of the time for one that comes before.")


def test_a_source_without_input_has_ended() -> None:
    found = limit(window(source(input=0.95), starved()))
    assert (found.kind, found.stage) == ("source", "read")


def test_the_explanation_has_the_limit_first_and_then_figures_of_everything() -> None:
    work = stage("work", executor="process", concurrency=3, processes_live=3, wait_share={"input": 0.2, "slot": 0.001})
    snapshot = window(source(slot=0.8), work, events=(Event("vetoed", "work", "no room"), Event("epoch_end")))
    assert explain(snapshot).splitlines() == [
        limit(snapshot).sentence,
        "Trainer: 10 steps/s, waited for data 60 % of the time.",
        "Stage read: concurrency open; 100 items/s; 20 ms an item (20 ms CPU); lacked slot 80 % of the time.",
        "Stage work: concurrency 3; 3 processes; 100 items/s; 20 ms an item (20 ms CPU); lacked input 20 % of the time.",  # noqa: E501
        "Memory: 3,072 MiB of 8,192 MiB; 12 items in flight with 1,024 MiB of 2,048 MiB.",
        "Event: vetoed at stage work: no room",
        "Event: epoch_end: ",
    ]


def test_an_empty_window_is_explained_without_figures() -> None:
    bare = StageSnapshot(StageInfo("read", "source"), None, 0)
    empty = window(bare, steps=0, wait=1.0, window_seconds=0.0, in_flight_items=1, in_flight_bytes=None)
    text = explain(on(empty, memory_bytes=None))
    assert "Stage read: concurrency open.\n" in text
    assert "1 item in flight with an unknown amount" in text
    assert "steps/s" not in text
