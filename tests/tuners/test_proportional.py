import random
from dataclasses import replace

import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot, check_tuner
from intune.tuners import Proportional


def stage(name: str, seconds: float | None, *, rows: float | None = 1.0, wall: float | None = None, **info: object):
    """A measured stage: CPU seconds an item; wall seconds the same unless given."""
    return StageSnapshot(
        StageInfo(name, "map", **info),
        None,
        1,
        items_out=10,
        source_rows_per_item=rows,
        cpu_seconds_mean=seconds,
        wall_seconds_mean=seconds if wall is None else wall,
    )


def window(*stages: StageSnapshot, now: dict[str, int | None] | None = None, slots: int = 8, **changes) -> Snapshot:
    blank = blank_snapshot([stage.info for stage in stages])
    allocation = Allocation({stage.name: None for stage in stages} if now is None else now, slots)
    return replace(blank, warm=True, stages=stages, allocation=allocation, **changes)


def exact(**options: float) -> Proportional:
    """Without a margin, and quick to lower and to change, so that what it proposes is easily told."""
    return Proportional(**{"keep": 0.97, "margin": 0.0, "spare": 0.5, **options})


def propose(*stages: StageSnapshot, cpus: int = 8, **changes) -> dict[str, int | None]:
    allocation = exact().propose(window(*stages, **changes), Budget(cpus=cpus))
    assert allocation.slots == cpus
    return dict(allocation.concurrency)


def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(Proportional())


@pytest.mark.parametrize(
    ("costs", "cpus", "split"),
    [((10, 30), 8, [2, 6]), ((30, 10), 8, [6, 2]), ((17, 21), 38, [17, 21]), ((4, 2, 20, 6), 16, [2, 1, 10, 3])],
)
def test_cpus_are_divided_by_cost(costs: tuple[int, ...], cpus: int, split: list[int]) -> None:
    stages = [stage(f"s{place}", cost / 1000) for place, cost in enumerate(costs)]
    assert list(propose(*stages, cpus=cpus).values()) == split


def test_a_stage_gets_one_at_least() -> None:
    assert propose(stage("a", 1e-6), stage("b", 1.0)) == {"a": 1, "b": 8}
    assert propose(stage("a", 0.0), stage("b", 1.0)) == {"a": 1, "b": 8}


def test_costs_are_compared_by_source_row() -> None:
    # The same service for each source row: an item of b stands for ten of a.
    assert propose(stage("a", 0.01, rows=1.0), stage("b", 0.1, rows=10.0)) == {"a": 4, "b": 4}
    # A filter that keeps one in ten: an item behind it stands for ten source rows.
    assert propose(stage("a", 0.01), stage("b", 0.01, rows=10.0), cpus=11) == {"a": 10, "b": 1}


def test_a_narrow_stage_holds_the_others_down() -> None:
    narrow = stage("b", 0.010, max_concurrency=1)
    assert propose(stage("a", 0.030), narrow, stage("c", 0.005), cpus=32) == {"a": 3, "b": 1, "c": 1}


def test_threads_are_measured_by_cpu_and_processes_by_wall_seconds() -> None:
    assert propose(stage("a", 0.01), stage("b", 0.01, wall=0.03)) == {"a": 4, "b": 4}
    assert propose(stage("a", 0.01), stage("b", 0.01, wall=0.03, executor="process")) == {"a": 2, "b": 6}


def test_waiting_stages_need_places_but_no_cpu() -> None:
    fetch = stage("fetch", 0.0001, wall=0.1, waits=True)
    assert propose(fetch, stage("work", 0.01)) == {"fetch": 80, "work": 8}
    # Where the waiting stage is the narrow one, the others need no more than it gives: 20 rows/s.
    assert propose(replace(fetch, info=replace(fetch.info, max_concurrency=2)), stage("work", 0.1)) == {
        "fetch": 2,
        "work": 2,
    }


@pytest.mark.parametrize("missing", [stage("b", None), stage("b", 0.01, rows=None), stage("b", 0.01, rows=0.0)])
def test_a_stage_without_figures_stays_open_and_takes_no_part(missing: StageSnapshot) -> None:
    allocation = exact().propose(window(stage("a", 0.01), missing, stage("c", 0.03)), Budget(cpus=8))
    assert allocation.concurrency == {"a": 2, "b": None, "c": 6}
    assert allocation.reasons == {
        "a": "busy on 2.00 items at once at 200 source rows/s",
        "b": "open: not measured",
        "c": "busy on 6.00 items at once at 200 source rows/s",
    }


def test_a_cold_window_changes_nothing() -> None:
    now = {"a": 3, "b": None}
    cold = window(stage("a", 0.01), stage("b", 0.03), now=now)
    allocation = exact().propose(replace(cold, warm=False), Budget(cpus=8))
    assert allocation.concurrency == now
    assert allocation.reasons["a"].startswith("as before")
    assert propose(stage("a", None), stage("b", None), now=now) == now


def test_it_stays_within_three_percent_and_moves_beyond() -> None:
    now = {"a": 2, "b": 6}
    assert propose(stage("a", 0.01), stage("b", 0.0306), now=now) == now
    assert propose(stage("a", 0.01), stage("b", 0.04), now=now) == {"a": 2, "b": 7}
    # A stage that is no longer measured is opened all the same.
    assert propose(stage("a", 0.01), stage("b", 0.03), stage("c", None), now={**now, "c": 4}) == {**now, "c": None}


def test_it_moves_from_open_from_a_pause_and_from_far_too_much() -> None:
    best = {"a": 2, "b": 6}
    stages = stage("a", 0.01), stage("b", 0.03)
    for now in ({"a": None, "b": 6}, {"a": 0, "b": 6}, {"a": 5, "b": 6}, {"a": 1, "b": 6}):
        assert propose(*stages, now=now) == best
    assert propose(*stages, now={"a": 4, "b": 6}) == best
    assert propose(*stages, now={"a": 3, "b": 9}) == {"a": 3, "b": 9}


def test_a_move_leaves_the_stages_that_have_enough_as_they_are() -> None:
    stages = stage("a", 0.01), stage("b", 0.03)
    assert propose(*stages, now={"a": 3, "b": 5}) == {"a": 3, "b": 6}
    assert propose(*stages, now={"a": 1, "b": 10}) == {"a": 2, "b": 6}


def test_other_slots_are_a_reason_to_propose_all_of_the_cpus() -> None:
    assert propose(stage("a", 0.01), stage("b", 0.03), now={"a": 3, "b": 9}, slots=4) == {"a": 3, "b": 9}


@pytest.mark.parametrize("tuner", [exact(), Proportional()], ids=["exact", "default"])
def test_noise_moves_it_seldom_once_it_has_settled(tuner: Proportional) -> None:
    draw = random.Random(0)
    now, moves = None, 0
    for step in range(600):
        stages = [stage(f"s{place}", 0.01 * draw.uniform(0.9, 1.1)) for place in range(4)]
        new = dict(tuner.propose(window(*stages, now=now), Budget(cpus=8)).concurrency)
        moves += step > 20 and new != now
        now = new
    assert moves <= 0.05 * 600


def test_a_margin_is_given_beyond_the_need_as_far_as_it_can_be_of_use() -> None:
    stages = stage("a", 0.01), stage("b", 0.03)
    assert exact(margin=0.3).propose(window(*stages), Budget(8)).concurrency == {"a": 3, "b": 8}
    fetch = stage("fetch", 0.0001, wall=0.1, waits=True)
    assert exact(margin=0.3).propose(window(fetch, stages[0]), Budget(8)).concurrency == {"fetch": 80, "a": 8}
    narrow = stage("c", 0.010, max_concurrency=1)
    assert exact(margin=1.0).propose(window(stages[1], narrow), Budget(8)).concurrency == {"b": 6, "c": 1}


def test_what_is_worth_a_change_can_be_set() -> None:
    found, now = window(stage("a", 0.01), stage("b", 0.04), now={"a": 2, "b": 6}), {"a": 2, "b": 6}
    assert exact().propose(found, Budget(8)).concurrency == {"a": 2, "b": 7}
    kept = exact(keep=0.9).propose(found, Budget(8))
    assert kept.concurrency == now
    assert kept.reasons["a"] == "as before: within 10% of the best, 160 source rows/s"
    roomy = window(stage("a", 0.01), stage("b", 0.03), now={"a": 5, "b": 6})
    assert exact().propose(roomy, Budget(8)).concurrency == {"a": 2, "b": 6}
    assert exact(spare=1.5).propose(roomy, Budget(8)).concurrency == {"a": 5, "b": 6}


@pytest.mark.parametrize("wrong", [{"keep": 0.0}, {"keep": 1.1}, {"margin": -0.1}, {"spare": -1.0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(PipelineError, match="must be above 0 and at most 1, margin"):
        Proportional(**wrong)
