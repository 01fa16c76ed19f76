from dataclasses import replace

import numpy as np
import pytest

from intune._errors import PipelineError
from intune._values import CROWDS, Allocation, Budget, Snapshot, StageInfo
from intune.control.allocation import check_complete
from intune.sim import Scenario, SimMachine, SimStage, play, scenario
from intune.testing import ScriptedWorkload, blank_snapshot, check_tuner
from intune.testing.scenes import Scene, window
from intune.tuners import LearnedModel
from intune.tuners.learned_model import SIZES, History, curves, points_of

STAGES = (StageInfo("source", "source"), StageInfo("work", "map"), StageInfo("last", "map"))


def seen(number: int, allocation: Allocation | None = None, cpus: int = 8) -> Snapshot:
    scene = Scene(STAGES, "measured", (Budget(cpus),) * 40, seed=3)
    return window(scene, number, allocation or Allocation(dict.fromkeys(["source", "work", "last"]), cpus), ())


def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(LearnedModel())


@pytest.mark.parametrize("number", [1, 5, 16])
@pytest.mark.parametrize("cpus", [1, 8, 16])
def test_any_number_of_stages_and_cpus_is_legal(number: int, cpus: int) -> None:
    infos = tuple(StageInfo(f"s{place}", "map" if place else "source", max_concurrency=3) for place in range(number))
    names = [info.name for info in infos]
    scene, tuner = Scene(infos, "measured", (Budget(cpus),) * 12, 5), LearnedModel()
    allocation = Allocation(dict.fromkeys(names), cpus)
    for decision in range(12):
        allocation = check_complete(tuner.propose(window(scene, decision, allocation, ()), Budget(cpus)), names)
        assert allocation.slots == cpus
        assert all(value is None or value <= min(3, cpus) for value in allocation.concurrency.values())


def test_stages_begin_with_few_at_once_and_what_was_not_measured_after_that_is_open() -> None:
    tuner = LearnedModel()
    found = tuner.propose(blank_snapshot(STAGES), Budget(16))
    assert found.concurrency == dict.fromkeys(("source", "work", "last"), 2)
    assert set(found.reasons.values()) == {"few at first, then more: it shows how the stage scales"}
    worked = tuple(replace(stage, items_in=50) for stage in blank_snapshot(STAGES).stages)
    counts = []
    for _ in range(3):
        found = tuner.propose(replace(blank_snapshot(STAGES), stages=worked), Budget(16))
        counts.append(found.concurrency["work"])
    assert counts == [8, None, None]
    assert set(found.reasons.values()) == {"open: not measured yet"}


def test_a_pause_of_a_user_is_not_proposed_again() -> None:
    tuner = LearnedModel()
    found = tuner.propose(seen(2, Allocation({"source": 0, "work": 2, "last": 1}, 8)), Budget(8))
    assert 0 not in found.concurrency.values()


def test_the_same_windows_give_the_same_decisions_whatever_the_unit_of_time() -> None:
    """All that the network is told is free of scale: a machine half as fast gets the same allocation."""

    def slower(snapshot: Snapshot) -> Snapshot:
        stages = tuple(
            replace(
                stage,
                **{
                    name: 2 * getattr(stage, name)
                    for name in ("wall_seconds_mean", "wall_seconds_p99", "cpu_seconds_mean", "busy_seconds")
                },
                wall_seconds_by_crowd=tuple((n, items, 2 * wall) for n, items, wall in stage.wall_seconds_by_crowd),
            )
            for stage in snapshot.stages
        )
        machine, own = snapshot.machine, snapshot.consumer
        machine = replace(machine, cpu_seconds_used=2 * (machine.cpu_seconds_used or 0.0))
        return replace(snapshot, window_seconds=2.0, stages=stages, machine=machine, consumer=own)

    def decided(twice: bool) -> list[tuple[object, ...]]:
        tuner, workload = LearnedModel(), ScriptedWorkload(STAGES, [seen(number) for number in range(1, 20)])
        for _ in range(19):
            shown = workload.snapshot()
            workload.apply(tuner.propose(slower(shown) if twice else shown, Budget(8)))
        return [tuple(each.concurrency.values()) for each in workload.applied]

    assert decided(False) == decided(False) == decided(True)


def test_a_history_knows_seconds_of_late_and_says_all_else_in_proportion() -> None:
    history, again = History(), History()
    assert history.seconds == 0
    stage = seen(1).stages[1]
    for times, each in ((1.0, history), (7.0, again)):
        by_crowd = ((1, 10, times * 0.01), (8, 30, times * 0.03))
        rows = stage.source_rows_per_item or 1.0
        measured = replace(stage, wall_seconds_by_crowd=by_crowd)
        each.add(measured, seen(1), Budget(8))
        assert each.seconds == pytest.approx(times * 0.025 / rows)
        assert points_of(measured)[1] == (CROWDS.index(8), 30, pytest.approx(times * 0.03 / rows))
    assert history.features().shape == (SIZES[0],)
    assert history.features() == pytest.approx(again.features())
    before = history.features()
    history.add(replace(stage, items_out=0), seen(1), Budget(8))
    assert (history.features() == before).all()


def test_between_numbers_at_work_that_occurred_seconds_are_interpolated_and_old_ones_fade() -> None:
    history, stage, count = History(), replace(seen(1).stages[1], source_rows_per_item=1.0), len(CROWDS)
    history.add(replace(stage, wall_seconds_by_crowd=((2, 10, 0.01), (8, 10, 0.04))), seen(1), Budget(8))
    told = history.features()[:count]
    mean, at = 0.025, {crowd: told[place] for place, crowd in enumerate(CROWDS)}
    assert [at[1], at[2], at[8], at[64]] == pytest.approx(np.log([0.01, 0.01, 0.04, 0.04]) - np.log(mean))
    assert at[4] == pytest.approx(np.log(0.02 / mean))  # as a power of the number at work
    for _ in range(20):
        history.add(replace(stage, wall_seconds_by_crowd=((2, 10, 0.01),)), seen(1), Budget(8))
    short, long = history.features()[:count], history.features()[count : 2 * count]
    assert short == pytest.approx(0)  # all that it remembers is what items take beside one other
    assert long[CROWDS.index(8)] == pytest.approx(np.log(0.04 / 0.01))


def test_without_figures_by_crowd_the_mean_stands_for_what_was_in_hand() -> None:
    stage = replace(seen(1).stages[1], wall_seconds_by_crowd=(), in_hand_mean=5.7, source_rows_per_item=2.0)
    stage = replace(stage, wall_seconds_mean=0.5, items_out=9)
    assert points_of(stage) == [(CROWDS.index(5), 9, 0.25)]
    assert points_of(replace(stage, wall_seconds_mean=None)) == []


def test_curves_never_fall_and_stay_in_proportion_to_what_was_seen() -> None:
    outputs = np.random.default_rng(0).normal(0, 30, (100, 3))
    found = curves(outputs, np.full(100, 0.02))
    assert (found > 0).all()
    assert found == pytest.approx(2 * curves(outputs, np.full(100, 0.01)))
    assert (found[:, 0] <= 0.02 * np.exp(3) * 1.001).all()


@pytest.mark.slow
def test_it_limits_a_stage_that_slows_down_and_leaves_alone_what_scales() -> None:
    clean = play(scenario("clean", 3), LearnedModel(), 25)
    assert clean.tuner_failed is None
    assert set(clean.intervals[-1].concurrency.values()) == {None}
    stages = (
        SimStage("read", "source", cpu_seconds=0.002),
        SimStage("work", cpu_seconds=0.05, coherency=0.05),
        SimStage("last", cpu_seconds=0.002),
    )
    drawn = Scenario("one that hinders itself", stages, SimMachine(cpus=16))
    bending = play(drawn, LearnedModel(), 25)
    assert bending.intervals[-1].concurrency["work"] in range(2, 10)  # the best is 4 or 5
    assert bending.rows_per_second(15) > 1.5 * play(drawn, "shared", 25).rows_per_second(15)


def test_options_are_checked() -> None:
    with pytest.raises(PipelineError, match=r"margin -0\.1 must not be below 0"):
        LearnedModel(margin=-0.1)
    with pytest.raises(PipelineError, match="keep 0 must be above 0 and at most 1"):
        LearnedModel(keep=0)
