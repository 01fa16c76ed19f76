from dataclasses import replace

from intune._values import Snapshot
from intune.control.whole_run import SeenCrowds, WholeRun, went_on

from .test_explain import source, stage, starved, window


def of(seconds: float, snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, window_seconds=seconds)


CPU = window(source(slot=0.8), stage("work", busy_seconds=72.0))
ENDED = window(source(input=0.9), starved(), machine=replace(CPU.machine, cpu_seconds_used=0.1))
TRAINER = window(source(room=0.9), starved(), wait=0.01)
QUIET = window(stage("work", running=0, items_in=0, items_out=0), steps=0)


def test_what_limited_it_for_longest_is_told_with_the_last_window_of_it() -> None:
    run = WholeRun()
    assert run.most() is None
    cpu = of(9.0, CPU), of(1.0, replace(CPU, epoch=7))
    for snapshot in (of(2.0, TRAINER), *cpu, of(100.0, QUIET), of(3.0, TRAINER)):
        run.see(snapshot)
    most = run.most()
    assert most is not None
    assert (most.window.epoch, most.share, most.seconds) == (7, 10 / 15, 15.0)


def test_that_a_source_had_no_more_is_told_only_where_nothing_else_is() -> None:
    run = WholeRun()
    run.see(of(9.0, ENDED))
    most = run.most()
    assert most is not None
    assert most.window.stages == ENDED.stages
    run.see(of(1.0, TRAINER))
    most = run.most()
    assert most is not None
    assert (most.window.consumer, most.share) == (TRAINER.consumer, 0.1)


def test_a_window_in_which_nothing_went_on_does_not_count() -> None:
    assert not went_on(QUIET)
    assert went_on(TRAINER)
    run = WholeRun()
    run.see(QUIET)
    assert run.most() is None


def test_a_window_in_which_nobody_asked_says_nothing_of_what_limits_a_run() -> None:
    """The training loop evaluates, or is between two epochs; workers fill what may lie ready meanwhile."""
    paused = window(source(room=0.9), stage("work"), steps=0, wait=0.0, ready=5)
    assert not went_on(paused)
    assert went_on(replace(paused, consumer=replace(paused.consumer, wait_share=0.3)))
    run = WholeRun()
    run.see(CPU)
    run.see(of(50.0, paused))
    assert run.last == CPU
    most = run.most()
    assert most is not None
    assert most.seconds == 1.0


def test_the_last_window_that_tells_is_not_one_whose_source_had_no_more() -> None:
    run = WholeRun()
    run.see(ENDED)
    assert run.last == ENDED
    for snapshot in (TRAINER, CPU, QUIET, ENDED):
        run.see(snapshot)
    assert run.last == CPU


def test_seconds_by_crowd_are_summed_over_windows() -> None:
    crowds = SeenCrowds()
    first = crowds.add(window(stage("work", wall_seconds_by_crowd=((1, 10, 0.1), (4, 30, 0.4)))))
    assert first.stages[0].wall_seconds_by_crowd == ((1, 10, 0.1), (4, 30, 0.4))
    second = crowds.add(window(stage("work", wall_seconds_by_crowd=((2, 5, 0.2), (4, 10, 0.8)))))
    assert second.stages[0].wall_seconds_by_crowd == ((1, 10, 0.1), (2, 5, 0.2), (4, 40, 0.5))
