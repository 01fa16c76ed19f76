"""A stage whose items take turns is told from one with slow items, and no order or concurrency is advised for it."""

from dataclasses import replace

import pytest

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.control.advice import advice
from intune.control.explain import explain, limit
from intune.control.turns import may_take_turns, more_at_once, takes_turns
from intune.control.whole_run import SeenCrowds
from intune.sim import Scenario, SimMachine, SimStage
from intune.sim.discrete import Simulation
from intune.tuners import Shared

TURNS = ((1, 20, 0.008), (4, 30, 0.032), (16, 125, 0.128))
"""An item has what it waits for to itself for 8 ms, so 125 go through it in a second, however many there are."""

SCALES = ((1, 20, 0.128), (4, 30, 0.128), (16, 125, 0.128))


def serial(**more: object) -> StageSnapshot:
    """16 at once on average, of 128 ms each, of which some are far slower: 125 a second."""
    usual = {
        "concurrency": None,
        "running": 16,
        "items_in": 125,
        "items_out": 125,
        "wall_seconds_mean": 0.128,
        "wall_seconds_p50": 0.1,
        "wall_seconds_p99": 0.7,
        "wall_seconds_by_crowd": TURNS,
        "cpu_seconds_mean": 0.0001,
        "run_queue_seconds": 0.0,
        "busy_seconds": 16.0,
        "wait_share": {"input": 0.6},
    }
    return StageSnapshot(StageInfo("serial", "map", waits=True), **{**usual, **more})  # type: ignore[arg-type]


def window(stage: StageSnapshot, **machine: object) -> Snapshot:
    """The source waits for the lowest unfinished item, as others passed it."""
    read = StageSnapshot(StageInfo("read", "source"), None, 0, items_in=125, items_out=125, busy_seconds=0.01)
    read = replace(read, wait_share={"order": 0.9})
    known = {"cpu_seconds_used": 0.1, "cpu_seconds_all": 0.2, "lock_wait_seconds": 1e-4, **machine}
    return Snapshot(
        window_seconds=1.0,
        warm=True,
        stages=(read, stage),
        consumer=ConsumerSnapshot(15, 125, 0.066, 0.99),
        machine=MachineSnapshot(4, **known),  # type: ignore[arg-type]
        allocation=Allocation({"read": None, "serial": stage.concurrency}, 4),
    )


def test_a_stage_that_takes_turns_is_the_limit_itself_and_order_is_not_to_blame() -> None:
    said = explain(window(serial())).splitlines()
    assert said[:2] == [
        "Stage serial is the limit: its items take turns (a lock, a disk, a connection), as it gives hardly more a "
        "second with 16.0 at once than with 2.8 (128 ms an item).",
        "What would help: less time in what the items of stage serial take turns for, or more of that; more at once, "
        "more CPUs or another order gain nothing.",
    ]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("most", [None, 16])
def test_so_it_is_where_it_holds_slots_or_is_full(waits: bool, most: int | None) -> None:
    stage = serial(concurrency=most)
    stage = replace(stage, info=replace(stage.info, waits=waits, max_concurrency=most))
    snapshot = replace(window(stage), allocation=Allocation({"read": None, "serial": most}, 16))
    assert (limit(snapshot).kind, limit(snapshot).stage) == ("turns", "serial")


def test_slow_items_of_a_stage_that_scales_are_order() -> None:
    snapshot = window(serial(wall_seconds_by_crowd=SCALES))
    assert (limit(snapshot).kind, limit(snapshot).stage) == ("order", "serial")
    said = explain(snapshot).splitlines()[1]
    assert said.startswith("What would help: ordered=False where order does not matter")


@pytest.mark.parametrize("levels", [(), ((16, 125, 0.128),), ((1, 19, 0.128), (16, 125, 0.128))])
def test_where_only_many_at_once_were_seen_order_is_no_more_than_perhaps(
    levels: tuple[tuple[int, int, float], ...],
) -> None:
    snapshot = window(serial(wall_seconds_by_crowd=levels))
    assert limit(snapshot).kind == "order"
    said = explain(snapshot).splitlines()[1]
    assert said.startswith("What would help: perhaps ordered=False")
    assert said.endswith("are slow by themselves, not where its items take turns (a lock, a disk).")


@pytest.mark.parametrize(
    ("changed", "machine"),
    [
        ({"cpu_seconds_mean": 0.12}, {"cpu_seconds_used": 3.9}),
        ({"run_queue_seconds": 15.0}, {"cpu_seconds_all": 4.0}),
        ({"run_queue_seconds": None}, {"cpu_seconds_all": 4.0}),
        ({"run_queue_seconds": None}, {"cpu_seconds_used": None}),
        ({}, {"lock_wait_seconds": 0.02, "cpu_seconds_used": 1.0}),
        ({"busy_seconds": 1.4, "items_out": 11}, {}),
        ({"wall_seconds_by_crowd": ((1, 20, 0.003), (16, 125, 0.128))}, {}),
    ],
    ids=["computes", "queues for a CPU", "may queue", "not known", "interpreter lock", "one at once", "idle lock"],
)
def test_time_that_goes_elsewhere_is_no_turns(changed: dict[str, object], machine: dict[str, object]) -> None:
    snapshot = window(serial(**changed), **machine)
    assert takes_turns(snapshot, snapshot.stages[1]) is None


def test_a_probe_that_only_waited_for_a_cpu_does_not_hide_it() -> None:
    snapshot = window(serial(), lock_wait_seconds=0.02)
    assert takes_turns(snapshot, snapshot.stages[1]) is not None


def test_another_stage_that_is_full_is_the_limit() -> None:
    snapshot = window(serial())
    full = replace(
        serial(busy_seconds=2.0, cpu_seconds_mean=0.12, wall_seconds_p99=0.13, wall_seconds_by_crowd=()),
        info=StageInfo("full", "map", max_concurrency=2),
    )
    found = limit(replace(snapshot, stages=(*snapshot.stages, full)))
    assert (found.kind, found.stage) == ("concurrency", "full")


def test_the_largest_numbers_that_are_clearly_fewer_count() -> None:
    levels = ((1, 1000, 0.1), (6, 40, 0.05), (8, 40, 0.06), (10, 100, 0.08), (12, 500, 0.1))
    snapshot = window(serial(wall_seconds_by_crowd=levels))
    more = more_at_once(snapshot, snapshot.stages[1])
    assert more is not None
    # Of 10 at once there are enough: 125 a second then, and now 16 / 0.128.
    assert tuple(more) == pytest.approx((10.0, 16.0, 1.0))


def test_two_at_once_are_told_from_one() -> None:
    pair = {"busy_seconds": 1.9, "wall_seconds_mean": 0.0152, "items_out": 125}
    turns = window(serial(**pair, wall_seconds_by_crowd=((1, 20, 0.008), (2, 105, 0.0152))))
    scales = window(serial(**pair, wall_seconds_by_crowd=((1, 20, 0.0150), (2, 105, 0.0152))))
    assert takes_turns(turns, turns.stages[1]) is not None
    assert takes_turns(scales, scales.stages[1]) is None
    assert may_take_turns(turns, turns.stages[1])
    assert not may_take_turns(scales, scales.stages[1])


def test_more_at_once_is_no_promise_where_items_may_take_turns() -> None:
    stage = serial(concurrency=None, wall_seconds_by_crowd=(), busy_seconds=1.9, wall_seconds_mean=0.0152)
    stage = replace(stage, info=replace(stage.info, waits=False, max_concurrency=2))
    snapshot = replace(window(stage), allocation=Allocation({"read": None, "serial": None}, 16))
    said = advice(snapshot, "concurrency", "serial") or ""
    assert said.endswith("as fast, not where its items take turns (a lock, a disk)).")


def test_a_simulated_serial_part_is_found() -> None:
    """Simulated: dear and cheap items in front, so that the run has seen few and many of them at once."""
    stages = (
        SimStage("feed", "source", cpu_seconds=0.001, spread=0.1),
        SimStage("first", cpu_seconds=0.02, spread=1.0, tail_share=0.1, tail_factor=10),
        SimStage("serial", serial_seconds=0.02, spread=0.1),
    )
    kinds = {}
    for name, last in {"turns": stages[2], "computes": replace(stages[2], serial_seconds=0, cpu_seconds=0.02)}.items():
        simulation = Simulation(Scenario("turns", (*stages[:2], last), SimMachine(cpus=8)))
        crowds = SeenCrowds()
        for _ in range(20):
            snapshot = crowds.add(simulation.snapshot())
            simulation.apply(Shared().propose(snapshot, simulation.budget()))
            simulation.advance(1.0)
        simulation.close()
        kinds[name] = limit(snapshot)
    assert (kinds["turns"].kind, kinds["turns"].stage) == ("turns", "serial")
    assert kinds["computes"].kind != "turns"
