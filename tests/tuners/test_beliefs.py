from dataclasses import replace

import pytest

from intune._values import Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot
from intune.tuners._beliefs import Beliefs


def stage(name: str, busy: float, cpu_share: float, *, queued: float = 0.0, **info: object) -> StageSnapshot:
    """One second of a stage on threads: items at once, and shares of that time on a CPU and waiting for one."""
    return StageSnapshot(
        StageInfo(name, "map", **info),
        None,
        1,
        items_out=100,
        source_rows_per_item=2.0,
        wall_seconds_mean=0.08,
        cpu_seconds_mean=0.08 * cpu_share,
        busy_seconds=busy,
        run_queue_seconds=queued * busy,
        saturated_concurrency=4,
    )


def window(*stages: StageSnapshot, lock_wait: float | None = 0.01) -> Snapshot:
    blank = blank_snapshot([each.info for each in stages])
    machine = replace(blank.machine, cpus=8, lock_wait_seconds=lock_wait)
    return replace(blank, warm=True, stages=stages, machine=machine, allocation=replace(blank.allocation, slots=8))


def learnt(*stages: StageSnapshot, lock_wait: float | None = 0.01) -> Beliefs:
    beliefs = Beliefs(forgetting=0.97, noise=0.05, least_items=4)
    assert not beliefs.learn(window(*stages, lock_wait=lock_wait))
    return beliefs


def test_figures_are_by_source_row() -> None:
    belief = learnt(stage("a", 4.0, 1.0)).stages["a"]
    assert belief.fit.curve[0] == pytest.approx(0.04)
    assert belief.cpu_seconds == pytest.approx(0.04)
    assert (belief.busy, belief.saturated) == (4.0, 4)


def test_threads_that_wait_for_the_lock_hold_it_and_are_as_fast_as_one_alone() -> None:
    belief = learnt(stage("py", 4.0, 0.25), stage("free", 3.0, 1.0)).stages
    assert belief["py"].lock_share == pytest.approx(1.0)
    assert belief["py"].fit.curve[0] == pytest.approx(0.01)
    assert belief["free"].lock_share == 0
    assert belief["free"].fit.curve[0] == pytest.approx(0.04)


def test_all_together_hold_the_lock_for_no_longer_than_the_window() -> None:
    # They compute for 2 seconds of one; of the lock's time each had half.
    belief = learnt(stage("py", 4.0, 0.25), stage("py too", 4.0, 0.25)).stages
    assert belief["py"].lock_share == pytest.approx(0.5, abs=0.1)


def test_threads_that_wait_for_a_cpu_or_for_something_else_hold_nothing() -> None:
    queue = learnt(stage("a", 4.0, 0.25, queued=0.75)).stages["a"]
    assert queue.lock_share is None  # nobody contended
    assert queue.fit.curve[0] == pytest.approx(0.04)
    disk = learnt(stage("a", 4.0, 0.25), lock_wait=1e-4).stages["a"]
    assert disk.lock_share is None
    assert disk.fit.curve[0] == pytest.approx(0.04)
    assert learnt(stage("a", 4.0, 0.25), lock_wait=None).stages["a"].lock_share is None
    waits = learnt(stage("a", 4.0, 0.01, waits=True)).stages["a"]
    assert (waits.lock_share, waits.fit.curve[0]) == (None, pytest.approx(0.04))


def test_what_the_lock_was_seen_to_do_stays_when_one_thread_is_left() -> None:
    beliefs = learnt(stage("py", 4.0, 0.25))
    for _ in range(20):
        beliefs.learn(window(stage("py", 1.0, 1.0)))
    assert beliefs.stages["py"].lock_share == pytest.approx(1.0)


def test_the_training_loop_is_timed_without_its_waiting() -> None:
    seen = window(stage("a", 4.0, 1.0))
    beliefs = Beliefs(forgetting=0.97, noise=0.05, least_items=4)
    beliefs.learn(replace(seen, consumer=replace(seen.consumer, steps=25, wait_share=0.5)))
    assert beliefs.trainer_seconds == pytest.approx(0.5 / 50)


def test_a_stage_that_changes_is_reported() -> None:
    beliefs = learnt(stage("a", 4.0, 1.0))
    for _ in range(5):
        beliefs.learn(window(stage("a", 4.0, 1.0)))
    slower = window(replace(stage("a", 4.0, 1.0), wall_seconds_mean=0.2, cpu_seconds_mean=0.2))
    assert [beliefs.learn(slower) for _ in range(3)] == [set(), {"a"}, set()]


def test_each_number_at_once_is_a_point_of_the_curve() -> None:
    crowds = ((1, 50, 0.04), (4, 50, 0.12))
    belief = learnt(replace(stage("a", 2.0, 1.0), wall_seconds_by_crowd=crowds)).stages["a"]
    base, slope, bend = belief.fit.curve
    assert base == pytest.approx(0.02, rel=0.1)
    assert base + 3 * slope + 12 * bend == pytest.approx(0.06, rel=0.1)


def test_what_threads_lose_to_the_lock_is_no_slowness_of_their_own() -> None:
    crowds = ((4, 100, 0.08),)
    belief = learnt(replace(stage("py", 4.0, 0.25), wall_seconds_by_crowd=crowds)).stages["py"]
    assert belief.fit.curve[0] == pytest.approx(0.01)


def test_stages_that_start_processes_teach_too() -> None:
    starts = replace(stage("a", 1.0, 1.0, executor="process"), processes_live=1, processes_starting=1)
    assert learnt(starts).stages["a"].fit.curve[0] == pytest.approx(0.04)


@pytest.mark.parametrize(("starved", "held_up"), [(1.0, 0.7), (0.0, 0.0)])
def test_a_stage_is_held_up_only_while_the_training_loop_waits(starved: float, held_up: float) -> None:
    held = replace(stage("a", 4.0, 1.0), wait_share={"order": 0.5, "room": 0.2, "input": 0.3})
    beliefs = Beliefs(forgetting=0.97, noise=0.05, least_items=4)
    for _ in range(30):
        seen = window(held)
        beliefs.learn(replace(seen, consumer=replace(seen.consumer, wait_share=starved)))
    assert beliefs.stages["a"].held_up == pytest.approx(held_up, abs=0.01)
