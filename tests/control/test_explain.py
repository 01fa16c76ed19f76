from dataclasses import replace

import pytest

from intune._values import (
    Allocation,
    ConsumerSnapshot,
    Event,
    MachineSnapshot,
    MemoryUse,
    Snapshot,
    StageInfo,
    StageSnapshot,
)
from intune.control.explain import explain, limit
from intune.control.outcome import Change, Outcome
from intune.testing.scenes import Scene, scenes
from intune.testing.scenes import window as scene_window

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


def test_all_slots_busy_is_cpu_and_the_stage_that_uses_them_is_named() -> None:
    found = limit(window(source(slot=0.8, input=0.1), stage("work", busy_seconds=7.2), starved()))
    assert (found.kind, found.stage) == ("cpu", "work")
    assert found.sentence == (
        "CPU is the limit: all slots are busy, and stage work takes 64 % of that (8 slots of 8 CPUs, 7.6 CPUs used)."
    )


def test_a_stage_that_waits_for_a_slot_is_not_named_for_what_another_one_uses() -> None:
    busy = stage("work", busy_seconds=4.5, wait_share={"input": 0.6})
    found = limit(window(replace(source(slot=0.8), busy_seconds=0.1), busy, replace(starved(), busy_seconds=0.1)))
    assert (found.kind, found.stage) == ("cpu", "work")
    assert "stage read waited for a slot 80 % of the time; stage work uses most of them (8 slots" in found.sentence


def test_a_stage_that_waits_for_a_slot_while_most_are_free_waits_for_something_else() -> None:
    lazy = replace(source(slot=0.8), busy_seconds=0.1)
    found = limit(on(window(lazy, stage("work", wait_share={"input": 0.6})), cpu_seconds_used=2.0))
    assert (found.kind, found.stage) == ("unknown", "work")


def test_cpu_figures_name_other_programs_and_the_quota() -> None:
    snapshot = on(window(source(slot=0.8)), cpu_seconds_used=3.0, cpu_seconds_all=7.5, throttled_seconds=0.25)
    assert "3.0 CPUs used, 4.5 by other programs, held back by the CPU quota for 250 ms" in limit(snapshot).sentence


def test_an_open_stage_that_fills_every_slot_is_cpu() -> None:
    assert limit(window(source(input=0.1))).kind == "cpu"


def test_a_stage_at_its_own_limit_is_named_not_the_starved_ones_behind_it() -> None:
    narrow = stage("work", concurrency=4, max_concurrency=4, wait_share={"input": 0.05}, busy_seconds=3.8)
    found = limit(window(source(room=0.9), narrow, starved("cast"), starved()))
    assert (found.kind, found.stage) == ("concurrency", "work")
    assert "works on 4 at once nearly all the time; its max_concurrency is 4 (20 ms an item)" in found.sentence


def test_processes_that_are_fewer_than_slots_and_all_busy_are_concurrency() -> None:
    few = stage("work", executor="process", processes_live=2, busy_seconds=1.9)
    found = limit(window(replace(source(room=0.9), busy_seconds=0.1), few))
    assert (found.kind, found.stage) == ("concurrency", "work")
    assert "works on 2 at once" in found.sentence


@pytest.mark.parametrize(
    ("concurrency", "words"), [(16, "all 16 that it may have"), (None, "as many as threads allow")]
)
def test_a_stage_that_waits_and_is_full_is_named_so(concurrency: int | None, words: str) -> None:
    fetch = stage("read", kind="source", waits=True, concurrency=concurrency, wall_seconds_mean=1.5, busy_seconds=15.9)
    found = limit(window(fetch, starved()))
    assert (found.kind, found.stage) == ("waits", "read")
    assert f"{words} under way (1.5 s an item)" in found.sentence


def one_at_a_time(**figures: object) -> StageSnapshot:
    """A source that draws one item after another, in some 95 % of the window."""
    usual = {"max_concurrency": 1, "busy_seconds": 0.95, "wall_seconds_mean": 0.0095, "cpu_seconds_mean": 0.0095}
    return stage("read", kind="source", **{**usual, "wall_seconds_p99": 0.01, **figures})


@pytest.mark.parametrize("wait", [0.0001, 0.005], ids=["lets go of the lock", "holds it"])
@pytest.mark.parametrize("slots", [1, 8])
def test_a_source_that_draws_one_at_a_time_all_the_time_is_the_limit(wait: float, slots: int) -> None:
    quiet = stage("batch", kind="batch", wait_share={"input": 1.0}, busy_seconds=0.02)
    snapshot = on(window(one_at_a_time(), quiet, allocation=Allocation({}, slots)), lock_wait_seconds=wait)
    assert (limit(snapshot).kind, limit(snapshot).stage) == ("concurrency", "read")
    assert "one item at a time nearly all the time; its max_concurrency is 1" in limit(snapshot).sentence


def test_a_source_with_gaps_between_its_items_is_the_limit_where_nothing_else_works() -> None:
    quiet = stage("batch", kind="batch", wait_share={"input": 1.0}, busy_seconds=0.02)
    found = limit(window(one_at_a_time(busy_seconds=0.6), quiet))
    assert (found.kind, found.stage) == ("concurrency", "read")


def test_a_source_that_draws_items_longer_than_the_window_is_the_limit() -> None:
    drawing = one_at_a_time(items_out=0, busy_seconds=0.0, wall_seconds_p99=None)
    found = limit(window(drawing, stage("batch", kind="batch", wait_share={"input": 1.0}, busy_seconds=0.0)))
    assert (found.kind, found.stage) == ("concurrency", "read")


def test_a_source_that_only_holds_an_item_without_working_on_it_is_not_the_limit() -> None:
    idle = one_at_a_time(busy_seconds=0.006)
    work = stage("work", busy_seconds=3.0, wait_share={"input": 0.9})
    found = limit(on(window(idle, work, starved()), cpu_seconds_used=3.1))
    assert (found.kind, found.stage) == ("unknown", "work")
    assert "no stage is busy all the time; work is worked on most (it has 3.0 items in hand" in found.sentence


def test_such_a_source_on_a_machine_that_others_use_is_cpu() -> None:
    idle = one_at_a_time(busy_seconds=0.006)
    snapshot = window(idle, stage("work", busy_seconds=3.0, wait_share={"input": 0.9}), starved())
    others = on(snapshot, cpu_seconds_used=3.1, cpu_seconds_all=7.9)
    assert (limit(others).kind, limit(others).stage) == ("cpu", None)
    assert "other programs use what is missing (8 slots of 8 CPUs, 3.1 CPUs used, 4.8 by" in limit(others).sentence
    of_a_larger_machine = on(snapshot, cpu_seconds_used=3.1, cpu_seconds_all=60.0)
    assert limit(of_a_larger_machine).kind == "unknown"


def test_cpus_that_are_used_up_without_busy_slots_are_cpu() -> None:
    idle = one_at_a_time(busy_seconds=0.006)
    found = limit(window(idle, stage("work", busy_seconds=3.0, wait_share={"input": 0.9})))
    assert (found.kind, found.stage) == ("cpu", "work")
    assert "stage work uses most of it (8 slots of 8 CPUs, 7.6 CPUs used)" in found.sentence


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ({"cpu_seconds_used": 0.5}, "waits"),
        ({"cpu_seconds_used": 0.5, "cpu_seconds_all": 7.8}, "cpu"),
        ({"cpu_seconds_used": 0.5, "cpu_seconds_all": 64.0}, "waits"),
        ({"cpu_seconds_used": 0.5, "lock_wait_seconds": 0.02}, "cpu"),
    ],
    ids=str,
)
def test_slots_held_without_computing_are_waits_unless_others_or_the_lock_took_that_time(
    machine: dict[str, float], kind: str
) -> None:
    asleep = stage("work", busy_seconds=7.9, cpu_seconds_mean=0.001, wait_share={"input": 0.1})
    found = limit(on(window(replace(source(slot=0.9), busy_seconds=0.0), asleep), **machine))
    assert (found.kind, found.stage) == (kind, "work")
    assert ("computes for 5 % of that" in found.sentence) == (kind == "waits")
    assert "waits=True" not in found.sentence


def test_a_window_in_which_nothing_was_finished_says_so() -> None:
    begun = stage("read", items_out=0, running=0, busy_seconds=0.0)
    found = limit(on(window(begun), cpu_seconds_used=0.1))
    assert (found.kind, found.stage) == ("unknown", None)
    assert "no stage finished an item" in found.sentence


def test_items_that_are_not_admitted_are_memory() -> None:
    found = limit(window(source(memory=0.7, slot=0.1), starved()))
    assert (found.kind, found.stage) == ("memory", "read")
    assert "waited 70 % of the time for bytes to become free; items in flight hold 1.0 GiB of 2.0 GiB" in found.sentence


@pytest.mark.parametrize("cause", ["order", "room"])
def test_a_slow_item_that_holds_others_back_is_order_and_its_stage_is_named(cause: str) -> None:
    slow = stage("work", wait_share={"input": 0.9}, wall_seconds_p50=0.02, wall_seconds_p99=2.5)
    found = limit(window(source(**{cause: 0.7}), slow, starved()))
    assert (found.kind, found.stage) == ("order", "work")
    assert "stage read waited 70 % of the time for one that comes before" in found.sentence
    assert "the slowest are in stage work: 2.5 s (99th percentile) against 20 ms (median)" in found.sentence


def test_order_without_times_still_has_its_sentence() -> None:
    found = limit(window(replace(source(order=0.7), wall_seconds_p99=None)))
    assert found.stage is None
    assert found.sentence.endswith("waited 70 % of the time for one that comes before.")


def test_batches_that_lie_ready_while_the_trainer_waits_are_no_slow_item() -> None:
    last = stage("batch", wait_share={"room": 0.6}, wall_seconds_p50=0.001, wall_seconds_p99=0.1)
    torch = stage("to_torch", kind="to_torch", wait_share={"input": 0.9})
    found = limit(on(window(source(room=0.9), last, torch), cpu_seconds_used=1.0))
    assert found.kind == "unknown"


@pytest.mark.parametrize("behind", [(), (starved("to_torch"),), (starved("again"),)])
def test_a_trainer_that_waits_now_and_then_while_stages_lack_room_is_nearly_the_limit(
    behind: tuple[StageSnapshot, ...],
) -> None:
    last = stage("batch", wait_share={"room": 0.6}, wall_seconds_p99=2.0)
    found = limit(on(window(source(room=0.9), last, *behind, wait=0.2), cpu_seconds_used=1.0))
    assert (found.kind, found.stage) == ("trainer", None)
    assert "waited for data 20 % of the time, and stage batch 60 % for room" in found.sentence


def test_items_of_even_cost_are_no_slow_item() -> None:
    found = limit(on(window(source(order=0.7), starved()), cpu_seconds_used=1.0))
    assert found.kind == "unknown"


def test_a_source_without_input_has_ended() -> None:
    found = limit(window(source(input=0.95), starved()))
    assert (found.kind, found.stage) == ("source", "read")


def test_a_lock_in_use_is_put_into_words_where_it_is_not_the_limit() -> None:
    snapshot = window(source(room=0.9), stage("work", busy_seconds=7.0, wait_share={"input": 0.1}))
    line = "Interpreter lock: Python code holds it {}; a thread waits {} for it."
    assert line.format("part of the time", "0.5 ms") in explain(on(snapshot, lock_wait_seconds=0.0005))
    assert line.format("much of the time", "5 ms") in explain(on(snapshot, lock_wait_seconds=0.005))
    assert "Interpreter lock" not in explain(on(snapshot, lock_wait_seconds=0.0002))
    assert "Interpreter lock" not in explain(snapshot)


@pytest.mark.parametrize("scene", scenes(), ids=lambda scene: f"{scene.mood}-{len(scene.stages)}")
def test_whatever_was_measured_is_explained_and_no_idle_stage_is_blamed_for_what_others_use(scene: Scene) -> None:
    for number, budget in enumerate(scene.budgets):
        allocation = Allocation({stage.name: None for stage in scene.stages}, budget.cpus)
        snapshot = scene_window(scene, number, allocation, ())
        found = limit(snapshot)
        assert explain(snapshot).splitlines()[0].endswith(found.sentence)
        stages = {stage.name: stage for stage in snapshot.stages}
        if found.stage is not None and found.kind in ("cpu", "lock"):
            assert stages[found.stage].busy_seconds > 0


def test_the_explanation_has_the_limit_first_and_then_figures_of_everything() -> None:
    work = stage("work", executor="process", concurrency=3, processes_live=3, wait_share={"input": 0.2, "slot": 0.001})
    snapshot = window(source(slot=0.8), work, events=(Event("vetoed", "work", "no room"), Event("epoch_end")))
    assert explain(snapshot).splitlines() == [
        limit(snapshot).sentence,
        "What would help: a higher memory limit (up to 2.0 times as fast); as it is, stage work has no room.",
        "Trainer: 10 steps/s, waited for data 60 % of the time, so it could take up to 2.5 times as much.",
        "Stage read: concurrency open; 100 items/s; 20 ms an item (20 ms CPU); lacked slot 80 % of the time.",
        "Stage work: concurrency 3; 3 processes; 100 items/s; 20 ms an item (20 ms CPU); lacked input 20 % of the time.",  # noqa: E501
        "Memory: 3.0 GiB of 8.0 GiB; 12 items in flight with 1.0 GiB of 2.0 GiB.",
        "Event: vetoed at stage work: no room",
        "Event: epoch_end: ",
    ]


def test_the_last_change_stands_below_what_limits_with_what_came_of_it() -> None:
    change = Change({"work": (3, 5)}, (8, 6), {"work": "12 items waited before it"}, 0.18)
    snapshot = window(source(slot=0.8), stage("work"), events=(Event("outcome", "work", "3 -> 5"),))
    assert "Last change" not in explain(snapshot)
    text = explain(snapshot, Outcome(change, 0.15, 45, 3.0, 2))
    assert text.splitlines()[2] == (
        "Last change, 2 decisions ago: work 3 -> 5, slots 8 -> 6 (work: 12 items waited before it); estimated +18 %, "
        "got +15 % (45 steps in 3.0 s)."
    )
    assert "Event: outcome" not in text
    bare = Outcome(Change({}, (8, 6), {}, None), None, 0, 0.0, 0)
    assert "Last change: slots 8 -> 6.\n" in explain(snapshot, bare)


def test_what_is_held_by_items_stands_without_a_limit_of_nothing_while_the_brake_holds() -> None:
    said = explain(window(source(memory=0.8), starved(), in_flight_bytes=3 * 2**20, in_flight_bytes_limit=0))
    assert "items in flight hold 3 MiB, and no more for now" in said
    assert "12 items in flight with 3 MiB, and no more for now." in said
    assert "0 bytes" not in said


@pytest.mark.parametrize(("seconds", "first"), [(0.5, "A first look at 500 ms only: "), (1.0, "")])
def test_a_short_window_is_told_as_a_first_look_without_advice(seconds: float, first: str) -> None:
    snapshot = window(source(slot=0.8), stage("work", busy_seconds=7.5 * seconds), window_seconds=seconds)
    said = explain(snapshot)
    assert said.startswith(first + limit(snapshot).sentence)
    assert ("What would help" in said) is (not first)


def test_an_empty_window_is_explained_without_figures() -> None:
    bare = StageSnapshot(StageInfo("read", "source"), None, 0)
    empty = window(bare, steps=0, wait=1.0, window_seconds=0.0, in_flight_items=1, in_flight_bytes=None)
    text = explain(on(empty, memory_bytes=None))
    assert "Stage read: concurrency open.\n" in text
    assert "1 item in flight with an unknown amount" in text
    assert "steps/s" not in text


ALL = "all programs on this machine"
OWN = MemoryUse(6 * GIB, GIB // 2, "the loader's memory=", chosen=True, used_by="this process and its workers")


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({}, "3.0 GiB of 8.0 GiB; "),
        ({"memory_used_by": ALL}, f"3.0 GiB of 8.0 GiB used by {ALL}; "),
        (
            {"memory_used_by": ALL, "own_memory_bytes": GIB},
            f"3.0 GiB of 8.0 GiB used by {ALL}, of which 1.0 GiB by this process and 512 MiB by its 2 workers; ",
        ),
        (
            {"memory_used_by": ALL, "own_memory_bytes": GIB, "memory": (OWN,)},
            f"3.0 GiB of 8.0 GiB used by {ALL}, of which 512 MiB by this process and its workers; ",
        ),
        (
            {"memory_used_by": OWN.used_by, "own_memory_bytes": GIB, "memory": (OWN,)},
            "3.0 GiB of 8.0 GiB used by this process and its workers; ",
        ),
    ],
)
def test_whose_memory_it_is_is_said(machine: dict[str, object], said: str) -> None:
    workers = stage("work", executor="process", processes_live=2, process_resident_bytes=GIB // 4)
    assert f"\nMemory: {said}12 items in flight" in explain(on(window(source(), workers), **machine))


def test_without_workers_only_this_process_is_named() -> None:
    alone = on(window(source()), memory_used_by=ALL, own_memory_bytes=GIB)
    assert f"used by {ALL}, of which 1.0 GiB by this process; " in explain(alone)
