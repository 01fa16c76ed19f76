"""The model steers pipelines whose best allocation is known, run by the loader's own engine in simulated time."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from intune.sim import Change, Scenario, SimMachine, SimStage, SimTrainer
from intune.sim.play import Trace, play
from intune.tuners import Model, Shared, Static

pytestmark = pytest.mark.slow

READ = SimStage("read", "source", cpu_seconds=0.02, rows=64, spread=0.1)
LAST = SimStage("last", cpu_seconds=0.05, spread=0.1)
MACHINE = SimMachine(cpus=8)


def scenario(*stages: SimStage, **changes: object) -> Scenario:
    return replace(Scenario("test", (READ, *stages, LAST), MACHINE), **changes)  # type: ignore[arg-type]


def bends(best: float = 3.0) -> SimStage:
    """Fastest with so many at once, at `best` 16 items/s."""
    return SimStage("bends", cpu_seconds=0.1, coherency=1 / best**2, spread=0.1)


def rate(trace: Trace, first: int = 12, last: int | None = None) -> float:
    """Items a second."""
    assert trace.died is None
    return trace.rows_per_second(first, last) / 64


def changed_share(trace: Trace, cpus: int, first: int) -> float:
    """Share of the CPUs by which limits and slots change, a decision."""

    def moved(before: int | None, after: int | None) -> int:
        return abs(min(before or cpus, cpus) - min(after or cpus, cpus))

    chosen = trace.intervals[first:]
    total = 0
    for one, two in pairwise(chosen):
        total += sum(moved(one.concurrency[name], two.concurrency[name]) for name in one.concurrency)
        total += abs(one.slots - two.slots)
    return total / cpus / (len(chosen) - 1)


@pytest.mark.parametrize("cpus", [8, 32])
def test_a_stage_that_bends_comes_to_its_best(cpus: int) -> None:
    pipeline = scenario(bends(), machine=SimMachine(cpus=cpus))
    trace, best = play(pipeline, Model(), 40), play(pipeline, Static({"bends": 3}), 40)
    assert rate(trace) >= 0.95 * rate(best)
    assert rate(trace) > 1.4 * rate(play(pipeline, Shared(), 40))
    given = [each.concurrency["bends"] for each in trace.intervals[12:]]
    assert sum(value in (2, 3, 4) for value in given) == len(given)
    assert {each.concurrency["last"] for each in trace.intervals[12:]} == {None}


def test_a_stage_that_would_stand_still_with_all_at_once_does_not() -> None:
    pipeline = scenario(bends(1.5), machine=SimMachine(cpus=32))
    best = rate(play(pipeline, Static({"bends": 2}), 40))
    assert rate(play(pipeline, Model(), 40)) >= 0.9 * best
    assert rate(play(pipeline, Shared(), 40)) < 0.2 * best


def test_threads_that_hold_the_interpreter_lock_get_no_more_than_they_can_use() -> None:
    python = SimStage("python", lock_seconds=0.05, spread=0.1)
    trace = play(scenario(python), Model(), 40)
    assert rate(trace) >= 0.97 * rate(play(scenario(python), Shared(), 40))
    assert {each.concurrency["python"] for each in trace.intervals[12:]} <= {2, 3}


def test_worker_processes_are_as_many_as_are_needed() -> None:
    work = SimStage("work", executor="process", lock_seconds=0.06, spread=0.1)
    trace, shared = play(scenario(work), Model(), 40), play(scenario(work), Shared(), 40)
    assert rate(trace) >= 0.98 * rate(shared)
    assert shared.intervals[-1].processes == 8
    assert max(each.processes for each in trace.intervals[12:]) <= 6


def test_a_slow_training_loop_gets_its_rate_with_fewer_slots() -> None:
    slow = scenario(SimStage("work", cpu_seconds=0.03, spread=0.1), trainer=SimTrainer(device_seconds=1 / 25))
    slow = replace(slow, machine=SimMachine(cpus=16))
    trace, shared = play(slow, Model(), 40), play(slow, Shared(), 40)
    assert rate(trace) >= 0.99 * rate(shared)
    assert {each.slots for each in trace.intervals[12:]} <= {4, 5, 6}  # 2.5 are needed


def test_a_training_loop_that_gets_faster_gets_all() -> None:
    slow = scenario(
        SimStage("work", cpu_seconds=0.03, spread=0.1),
        trainer=SimTrainer(device_seconds=1 / 20),
        changes=(Change(20.0, "trainer", 0.1),),
    )
    trace = play(slow, Model(), 35)
    assert trace.intervals[18].slots < 8
    assert trace.intervals[25].slots == 8
    assert rate(trace, 25) >= 0.97 * rate(play(slow, Shared(), 35), 25)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_ten_decisions_after_a_cost_changed_it_is_at_the_best_again(factor: float) -> None:
    pipeline = scenario(bends(), changes=(Change(20.0, "cost", factor, "bends"),))
    trace, best = play(pipeline, Model(), 45), play(pipeline, Static({"bends": 3}), 45)
    assert rate(trace, 30) >= 0.93 * rate(best, 30)


def test_a_stage_that_scales_and_changes_loses_nothing_for_long() -> None:
    pipeline = scenario(SimStage("work", cpu_seconds=0.1, spread=0.1), changes=(Change(20.0, "cost", 3.0, "work"),))
    trace, shared = play(pipeline, Model(), 45), play(pipeline, Shared(), 45)
    assert rate(trace, 20, 30) >= 0.9 * rate(shared, 20, 30)
    assert rate(trace, 30) >= 0.97 * rate(shared, 30)
    assert set(trace.intervals[-1].concurrency.values()) == {None}


def test_a_quota_is_obeyed_at_the_next_decision() -> None:
    changes = (Change(15.5, "cpus", 3), Change(30.5, "cpus", 8))
    trace = play(scenario(bends(), changes=changes), Model(), 45)
    assert max(each.slots for each in trace.intervals if 17 <= each.seconds <= 30) == 3
    assert {each.slots for each in trace.intervals if each.seconds >= 33} == {8}
    assert rate(trace, 35) >= 0.93 * rate(play(scenario(bends(), changes=changes), Static({"bends": 3}), 45), 35)


def test_figures_that_cannot_be_had_are_not_needed() -> None:
    lacking = frozenset(("run_queue_seconds", "lock_wait_seconds", "read_bytes", "cpu_seconds_all"))
    pipeline = scenario(bends(), machine=replace(MACHINE, unmeasured=lacking))
    trace, best = play(pipeline, Model(), 40), play(pipeline, Static({"bends": 3}), 40)
    assert rate(trace) >= 0.95 * rate(best)


@pytest.mark.parametrize("tail", [0.0, 0.05])
@pytest.mark.parametrize("best", [3.0, math.inf])
def test_it_comes_to_rest(tail: float, best: float) -> None:
    work = replace(bends(best), tail_share=tail, tail_factor=8.0, spread=0.4)
    trace = play(scenario(work), Model(), 100)
    assert changed_share(trace, 8, 30) < 0.01


def test_stages_that_scale_are_left_alone() -> None:
    stages = [SimStage(f"map{place}", cpu_seconds=0.04, spread=0.4) for place in range(4)]
    trace = play(scenario(*stages), Model(), 60)
    assert all(set(each.concurrency.values()) == {None} for each in trace.intervals[12:])
    assert {each.slots for each in trace.intervals} == {8}
    assert rate(trace) >= 0.98 * rate(play(scenario(*stages), Shared(), 60))


def test_worker_processes_do_not_crowd_out_the_items_they_are_to_work_on() -> None:
    """Each process more costs memory in which items could be, and those set the rate."""
    heavy = SimStage("work", executor="process", lock_seconds=0.05, cpu_seconds=0.0, resident_bytes=2e8, row_bytes=2e5)
    stages = (replace(READ, row_bytes=1.3e5), SimStage("map", cpu_seconds=0.08, row_bytes=2e5), heavy)
    machine = SimMachine(cpus=32, memory_bytes=3.2e9, baseline_bytes=5e8)
    pipeline = scenario(*stages[1:], machine=machine)
    pipeline = replace(pipeline, stages=(stages[0], *pipeline.stages[1:]))
    rates = {number: rate(play(pipeline, Static({"work": number}), 45)) for number in (1, 2, 3, 4, 5, 6, 8, 11)}
    trace = play(pipeline, Model(), 45)
    assert max(rates.values()) > 1.3 * rates[11]
    assert rate(trace, 20) >= 0.93 * max(rates.values())
    limit = machine.memory_bytes
    assert limit is not None
    assert trace.peak_bytes <= limit


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_source_that_order_holds_up_makes_up_for_it_in_the_rest_of_the_time(seed: int) -> None:
    """A network that all fetches share, and behind it items of which some take ten times as long."""
    fetch = SimStage("read", "source", network_bytes=10e6, wait_seconds=0.06, cpu_seconds=0.002)
    work = SimStage("work", cpu_seconds=0.07, spread=0.5, tail_share=0.05, tail_factor=10.0)
    machine = SimMachine(cpus=8, network_stream_bytes_per_second=200e6)
    pipeline = Scenario("held up", (fetch, work), machine, seed=seed)
    trace = play(pipeline, Model(), 34)
    assert rate(trace) >= 0.85 * rate(play(pipeline, Shared(), 34))
    assert "those behind it hold it up" in str([line["reasons"] for line in trace.lines if "reasons" in line])


def test_a_stage_that_one_alone_is_enough_for_gets_one_where_two_would_take_slots_from_others() -> None:
    hinders = SimStage("hinders", cpu_seconds=0.0047, contention=0.1, coherency=0.4, spread=0.1)
    work = SimStage("work", cpu_seconds=0.008, spread=0.3)
    pipeline = Scenario("two", (replace(READ, cpu_seconds=0.004), work, hinders), SimMachine(cpus=2))
    trace = play(pipeline, Model(), 30)
    assert rate(trace) >= 0.97 * rate(play(pipeline, Static({"hinders": 1}), 30))
    assert rate(trace) > 1.05 * rate(play(pipeline, Shared(), 30))
    assert {each.concurrency["hinders"] for each in trace.intervals[16:]} == {1}
