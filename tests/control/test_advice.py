"""What explain() says would help: what the figures carry, checked against what it brings in simulated time."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.control.advice import advice
from intune.control.bounds import crowding
from intune.control.explain import explain, limit
from intune.sim import Scenario, SimMachine, SimStage, SimTrainer
from intune.sim.discrete import Simulation
from intune.tuners import Shared, Static

FREE_LOCK = 1e-4


def stage(name: str, busy: float, cpu_share: float = 1.0, kind: str = "map", **more: object) -> StageSnapshot:
    """A stage with seconds of work in a window of 1 s, of which it computes a share, in items of 10 ms."""
    info = {key: more.pop(key) for key in ("executor", "max_concurrency", "waits") if key in more}
    usual = {"items_in": 100, "items_out": 100, "wall_seconds_p99": 0.01, "run_queue_seconds": 0.0, "wait_share": {}}
    return StageSnapshot(
        StageInfo(name, kind, **info),  # type: ignore[arg-type]
        running=1,
        busy_seconds=busy,
        wall_seconds_mean=0.01,
        cpu_seconds_mean=0.01 * cpu_share,
        **{"concurrency": None, **usual, **more},  # type: ignore[arg-type]
    )


def window(*stages: StageSnapshot, wait: float = 0.6, slots: int = 8, **machine: object) -> Snapshot:
    known = {"lock_wait_seconds": FREE_LOCK, "cpu_seconds_used": 2.0, **machine}
    return Snapshot(
        window_seconds=1.0,
        warm=True,
        stages=stages,
        consumer=ConsumerSnapshot(50, 3200, 0.02, wait),
        machine=MachineSnapshot(8, **known),  # type: ignore[arg-type]
        allocation=Allocation({each.name: each.concurrency for each in stages}, slots),
    )


def help_of(snapshot: Snapshot) -> str:
    found = limit(snapshot)
    said = advice(snapshot, found.kind, found.stage)
    assert said is not None
    assert explain(snapshot).splitlines()[1] == said
    return said


READ = stage("read", 0.05, kind="source")


def asleep(**more: object) -> StageSnapshot:
    """Holds all slots, hardly computes."""
    return stage("work", 7.9, 0.05, **more)


SAME = ((1, 30, 0.0098), (8, 70, 0.0101))
LONGER = ((1, 30, 0.003), (8, 70, 0.013))


def test_waiting_without_a_slot_is_advised_where_items_took_no_longer_with_many_at_once() -> None:
    said = help_of(window(READ, asleep(wall_seconds_by_crowd=SAME)))
    assert said == (
        "What would help: waits=True on stage work in the next run, so that it waits without a slot (up to 2.5 times "
        "as fast): with more than 1 at once its items took no longer than with fewer."
    )


@pytest.mark.parametrize(
    ("snapshot", "why"),
    [
        (window(READ, asleep(wall_seconds_by_crowd=LONGER)), "either dear items came together, or they take turns"),
        (
            window(READ, asleep(wall_seconds_by_crowd=((8, 100, 0.01),))),
            "not where its items take turns (a lock, a disk)",
        ),
        (window(READ, asleep(wall_seconds_by_crowd=((1, 3, 0.01), (8, 97, 0.01)))), "not where its items take turns"),
        (window(READ, asleep()), "not where its items take turns"),
        (window(READ, asleep(wall_seconds_by_crowd=SAME), lock_wait_seconds=1e-3), "may wait for the interpreter lock"),
        (window(stage("read", 7.9, 0.05, "source", wall_seconds_by_crowd=SAME)), "more slots than CPUs (cpus=)"),
    ],
    ids=["longer", "always full", "few items", "not measured", "lock in use", "source"],
)
def test_waiting_without_a_slot_is_not_advised_where_the_figures_do_not_carry_it(snapshot: Snapshot, why: str) -> None:
    assert limit(snapshot).kind == "waits"
    said = help_of(snapshot)
    assert why in said
    assert "waits=True" not in said or said.startswith("What would help: perhaps waits=True")


@pytest.mark.parametrize(
    ("levels", "ratio"),
    [
        (((2, 50, 0.01), (4, 50, 0.02)), 2.0),
        (((1, 10, 0.01), (2, 10, 0.03), (3, 30, 0.02), (8, 10, 0.03)), 1.5),
        (((4, 50, 0.01), (6, 50, 0.02)), None),
        (((1, 9, 0.01), (8, 50, 0.02)), None),
        (((1, 50, 0.01), (8, 9, 0.02)), None),
        ((), None),
    ],
)
def test_few_and_many_at_once_are_compared_where_there_are_items_of_both(
    levels: tuple[tuple[int, int, float], ...], ratio: float | None
) -> None:
    found = crowding(stage("work", 1.0, wall_seconds_by_crowd=levels))
    assert (found and found.ratio) == (None if ratio is None else pytest.approx(ratio))


def test_a_source_that_reads_from_storage_and_does_not_compute_is_limited_by_reading() -> None:
    reading = stage("read", 7.9, 0.1, "source", wall_seconds_by_crowd=LONGER)
    found = limit(window(reading, stage("work", 0.05), read_bytes=180 * 2**20))
    assert (found.kind, found.stage) == ("disk", "read")
    assert "spends 90 % of its time neither computing nor in want of a CPU, and 180 MiB/s come" in found.sentence
    said = help_of(window(reading, stage("work", 0.05), read_bytes=180 * 2**20))
    assert "faster storage, or less to read" in said
    assert "its items took 4.3 times as long as with fewer, so that more at once may gain nothing" in said
    scales = replace(reading, wall_seconds_by_crowd=SAME)
    assert "more at once in stage read" in help_of(window(scales, stage("work", 0.05), read_bytes=180 * 2**20))
    assert limit(window(reading, stage("work", 0.05), read_bytes=1000)).kind == "waits"
    assert limit(window(stage("read", 7.9, 0.9, "source"), stage("work", 0.05), read_bytes=2**30)).kind == "cpu"


def test_a_source_that_waits_without_a_slot_is_limited_by_reading_too() -> None:
    reading = stage("read", 15.9, 0.1, "source", waits=True, concurrency=16)
    assert limit(window(reading, stage("work", 0.05), read_bytes=10**8)).kind == "disk"
    assert limit(window(reading, stage("work", 0.05), read_bytes=0)).kind == "waits"


def test_more_of_a_stage_at_its_own_limit_is_worth_what_slots_and_the_training_loop_allow() -> None:
    narrow = stage("work", 1.95, max_concurrency=2, concurrency=None)
    assert help_of(window(READ, narrow)) == (
        "What would help: a larger max_concurrency of stage work in the next run, if what it does allows that "
        "(up to 2.5 times as fast)."
    )
    assert "(up to 1.4 times as fast)" in help_of(window(READ, narrow, wait=0.3))
    assert "(up to 1.6 times as fast)" in help_of(window(stage("read", 3.0, kind="source"), narrow))
    holding = window(READ, narrow, lock_wait_seconds=0.01)
    assert "unless they only wait for the interpreter lock" in help_of(holding)
    assert help_of(window(READ, stage("work", 0.95, max_concurrency=1), wait=0.98, slots=64)).endswith("allows that.")
    full = window(stage("read", 0.05, kind="source"), stage("more", 5.9), narrow)
    assert "more at once would gain little" in help_of(full)


def test_a_source_that_draws_one_at_a_time_is_to_do_less() -> None:
    drawing = stage("read", 0.97, kind="source", max_concurrency=1)
    assert "a map behind it does several at once (up to 2.5 times as fast)" in help_of(window(drawing, stage("b", 0.1)))


def test_a_limit_that_the_tuner_set_is_given_with_its_reason() -> None:
    held = stage("work", 2.9, concurrency=3)
    snapshot = window(READ, held)
    reasons = replace(snapshot.allocation, reasons={"work": "slows down with concurrency"})
    said = help_of(replace(snapshot, allocation=reasons))
    assert said.endswith("less work in stage work; it was given 3 (slows down with concurrency).")


def test_a_limit_on_a_stage_that_waits_is_given_with_its_reason_too() -> None:
    """It was limited because more at once are slower: then more at once is no advice."""
    snapshot = window(stage("read", 1.0), stage("work", 3.0, 0.0, waits=True, concurrency=3))
    reasons = replace(snapshot.allocation, reasons={"work": "slows down with concurrency"})
    said = advice(replace(snapshot, allocation=reasons), "waits", "work")
    assert said == "What would help: less waiting in stage work; it was given 3 (slows down with concurrency)."
    assert advice(snapshot, "waits", "work") != said


def test_processes_that_are_not_up_yet_are_named() -> None:
    few = stage("work", 1.95, executor="process", concurrency=4, processes_live=2)
    assert "it may have more than the 2 that are up" in help_of(window(READ, few))


def test_cpu_names_the_cheaper_stage_more_cpus_others_and_the_quota() -> None:
    said = help_of(window(stage("read", 1.9, kind="source"), stage("work", 6.0), cpu_seconds_used=7.8))
    assert said == (
        "What would help: stage work at half its cost (up to 1.6 times as fast), or twice the CPUs (up to 2.0 times as "
        "fast, if its stages scale)."
    )
    assert "up to 1.1 times" in help_of(window(stage("read", 1.9), stage("work", 6.0), wait=0.1, cpu_seconds_used=7.8))
    crowded = stage("work", 6.0, wall_seconds_by_crowd=LONGER)
    longer = help_of(window(stage("read", 1.9, kind="source"), crowded, cpu_seconds_used=7.8))
    assert "with more than 1 at once its items took 4.3 times as long as with fewer: if not because dear ones" in longer
    four = window(stage("read", 1.0, kind="source"), stage("work", 2.9), slots=4, cpu_seconds_used=3.9)
    assert "the 8 CPUs that there are (up to 2.0 times as fast" in help_of(four)
    throttled = window(stage("work", 7.9), cpu_seconds_used=4.0, throttled_seconds=3.0)
    assert help_of(throttled).startswith("What would help: a higher CPU quota, or stage work")
    idle = stage("read", 0.006, kind="source"), stage("work", 3.0, wait_share={"input": 0.9})
    others = window(*idle, cpu_seconds_used=3.1, cpu_seconds_all=7.9)
    assert help_of(others) == "What would help: CPUs that other programs leave alone."
    beside = window(stage("work", 7.9), cpu_seconds_used=4.0, cpu_seconds_all=7.9)
    assert help_of(beside).startswith("What would help: CPUs that other programs leave alone, or stage work at half")
    larger = window(stage("work", 7.9), cpu_seconds_used=4.0, cpu_seconds_all=30.0)
    assert "other programs" not in help_of(larger)


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        (2.1, "a faster step; the loader is busy on 2.1 of 8 slots only."),
        (7.8, "and a faster loader too: 7.8 of 8 slots"),
    ],
)
def test_a_training_loop_that_hardly_waits_is_told_what_the_loader_has_to_spare(busy: float, said: str) -> None:
    assert said in help_of(window(stage("work", busy), wait=0.01))


def test_the_rest() -> None:
    late = stage("work", 2.0, wall_seconds_p50=0.01, wall_seconds_p99=0.2, wait_share={"input": 0.9})
    ordered = window(stage("read", 0.5, kind="source", wait_share={"order": 0.7}), late)
    assert "ordered=False where order does not matter" in help_of(ordered)
    assert "(up to 2.5 times as fast)" in help_of(ordered)
    empty = stage("batch", 0.1, kind="batch", wait_share={"input": 0.9})
    full = window(stage("read", 0.5, kind="source", wait_share={"memory": 0.7}), empty)
    assert help_of(full) == "What would help: a smaller batch, or a higher memory limit."
    paused = window(READ, stage("work", 0.0, concurrency=0, items_in=0, items_out=0))
    assert help_of(paused) == "What would help: to resume stage work."
    ended = window(stage("read", 0.5, kind="source", wait_share={"input": 0.9}))
    assert advice(ended, "source", "read") is None


# --- what it says comes true in simulated time


def measured(scenario: Scenario, tuner: Shared | Static | None = None, seconds: float = 6.0) -> tuple[Snapshot, float]:
    """The last window of a run, of a third of it, and the rows a second in it."""
    simulation = Simulation(scenario)
    for part in (2 / 3, 1 / 3):
        snapshot = simulation.snapshot()
        simulation.apply((tuner or Shared()).propose(snapshot, simulation.budget()))
        simulation.advance(part * seconds)
    snapshot = simulation.snapshot()
    simulation.close()
    return snapshot, snapshot.consumer.rows / snapshot.window_seconds


def said_factor(pattern: str, text: str) -> float:
    found = re.search(pattern + r"[^;:]*?up to ([0-9.]+) times as fast", text)
    assert found is not None, text
    return float(found.group(1))


FEED = SimStage("feed", "source", cpu_seconds=0.001, spread=0.1)
WORK = SimStage("work", cpu_seconds=0.03, spread=0.1)
MORE = SimStage("more", cpu_seconds=0.01, spread=0.1)


def pipeline(*stages: SimStage, cpus: int = 4, **more: object) -> Scenario:
    return Scenario("advised", (FEED, *stages), SimMachine(cpus=cpus), **more)  # type: ignore[arg-type]


TRUE: dict[str, tuple[Scenario, Scenario, str]] = {
    "half the cost": (
        pipeline(WORK, MORE),
        pipeline(replace(WORK, cpu_seconds=0.015), MORE),
        "stage work at half its cost",
    ),
    "twice the CPUs": (pipeline(WORK, MORE), pipeline(WORK, MORE, cpus=8), "twice the CPUs"),
    "twice the CPUs, a trainer": (
        pipeline(WORK, MORE, trainer=SimTrainer(device_seconds=0.0075)),
        pipeline(WORK, MORE, cpus=8, trainer=SimTrainer(device_seconds=0.0075)),
        "twice the CPUs",
    ),
    "processes": (
        pipeline(SimStage("work", lock_seconds=0.02, spread=0.1), MORE),
        pipeline(SimStage("work", lock_seconds=0.02, spread=0.1, executor="process", start_seconds=0.1), MORE),
        'executor="process" on stages work and more',
    ),
    "max_concurrency": (
        pipeline(replace(WORK, max_concurrency=1), MORE),
        pipeline(WORK, MORE),
        "a larger max_concurrency of stage work",
    ),
}
"""Before, after, and what was advised."""


@pytest.mark.parametrize("name", TRUE)
def test_what_would_help_does_and_by_no_more_than_was_said(name: str) -> None:
    before, after, pattern = TRUE[name]
    snapshot, rate = measured(before)
    said = said_factor(re.escape(pattern), explain(snapshot))
    _, faster = measured(after)
    assert 0.8 * said <= faster / rate <= 1.07 * said


def test_a_function_that_sleeps_is_told_from_one_whose_items_take_turns() -> None:
    found: dict[str, str] = {}
    turns: dict[str, Callable[[], SimStage]] = {
        "sleeps": lambda: SimStage("work", wait_seconds=0.03, cpu_seconds=0.001, spread=0.1, waits=False),
        "takes turns": lambda: SimStage("work", network_bytes=3e6, cpu_seconds=0.001, spread=0.1, waits=False),
    }
    for name, make in turns.items():
        machine = SimMachine(cpus=4, network_bytes_per_second=1e8, network_stream_bytes_per_second=1e8)
        # Dear and cheap items in front of it, so that now few and now many are at work in it.
        first = SimStage("first", cpu_seconds=0.01, spread=1.0, tail_share=0.1, tail_factor=10)
        scenario = Scenario("waits", (FEED, first, make()), machine)
        snapshot, _ = measured(scenario, seconds=30.0)
        work = snapshot.stages[2]
        found[name] = advice(snapshot, "waits", work.name) or ""
    assert found["sleeps"].startswith("What would help: waits=True on stage work")
    assert "cannot be told" in found["takes turns"]
