"""The sequence of allocations of a sweep: how it rises, how long it holds, how it fills the space."""

import statistics
from collections.abc import Mapping
from dataclasses import replace

import pytest

from intune._errors import PipelineError
from intune._values import CROWDS, Allocation, Budget, Snapshot, StageInfo
from intune.sim.calibration.sweep import CYCLE, Sweep
from intune.testing import blank_snapshot, check_tuner

INFOS = (
    StageInfo("read", "source", max_concurrency=1, waits=False),
    StageInfo("wait", "map", waits=True),
    StageInfo("work", "map", waits=False),
    StageInfo("apart", "map", "process", waits=False),
)
BUDGET = Budget(cpus=16, max_threads=48, max_processes=6)
MOST = {"read": 1, "wait": 48, "work": 16, "apart": 6}


def window(
    levels: Mapping[str, int | None],
    *,
    seconds: float = 1.0,
    wall: float = 0.1,
    slowed: Mapping[str, int] | None = None,
) -> Snapshot:
    """One in which each stage was as busy as it might be; `slowed` take ten times as long from so many at once on."""
    blank = blank_snapshot(INFOS)
    stages = []
    for stage in blank.stages:
        at_once = levels.get(stage.name) or MOST[stage.name]
        took = wall * (10 if at_once >= (slowed or {}).get(stage.name, 1000) else 1)
        crowd = max(each for each in CROWDS if each <= at_once)
        crowds = ((crowd, 5, took),)
        stages.append(replace(stage, items_out=5, wall_seconds_mean=took, wall_seconds_by_crowd=crowds))
    return replace(blank, window_seconds=seconds, stages=tuple(stages))


def proposals(sweep: Sweep, count: int, **said: object) -> list[Allocation]:
    """What it proposes one after another, for windows in which that was in force."""
    found = [sweep.propose(replace(blank_snapshot(INFOS), window_seconds=0.0), BUDGET)]
    for _ in range(count - 1):
        found.append(sweep.propose(window(found[-1].concurrency, **said), BUDGET))  # type: ignore[arg-type]
    return found


def test_it_rises_from_one_at_once_to_all_that_is_of_use() -> None:
    found = [each.concurrency for each in proposals(Sweep(1.0), 7)]
    assert [each["work"] for each in found] == [1, 2, 4, 8, None, None, None]
    assert [each["wait"] for each in found] == [1, 2, 4, 8, 16, 32, None]
    assert [each["apart"] for each in found] == [1, 2, 4, None, None, None, None]
    assert {each["read"] for each in found} == {None}


def test_a_stage_that_may_yet_turn_out_to_wait_is_not_opened() -> None:
    """Open, it would work on as many items as there are threads, and what that does to it would be all that is seen."""
    unknown = StageInfo("work", "map")
    first = Sweep(1.0).propose(blank_snapshot((INFOS[0], unknown)), Budget(cpus=1))
    assert first.concurrency["work"] == 1


def test_a_stage_that_hinders_itself_gets_no_more() -> None:
    found = [each.concurrency["work"] for each in proposals(Sweep(1.0), 60, slowed={"work": 8})]
    assert max(level or 16 for level in found) == 8


def test_a_point_is_held_for_its_time() -> None:
    found = proposals(Sweep(3.0), 60)[20:]
    lengths = [found.count(each) for each in found[3:-3]]
    assert statistics.mode(lengths) == 3
    assert {each.slots for each in found} == {16}


def test_windows_count_by_their_length() -> None:
    found = proposals(Sweep(1.0), 5, seconds=0.25)
    assert [each == found[0] for each in found] == [True, True, True, True, False]


def test_where_items_take_long_it_is_held_for_longer_but_not_for_ever() -> None:
    short, long, endless = (proposals(Sweep(2.0), 20, wall=wall) for wall in (0.1, 0.5, 50.0))
    assert [found.count(found[0]) for found in (short, long, endless)] == [2, 4, 8]


def test_it_is_held_until_every_stage_has_finished_something_but_not_for_ever() -> None:
    sweep = Sweep(2.0)
    held = [sweep.propose(blank_snapshot(INFOS), BUDGET) for _ in range(9)]
    assert held[:7] == [held[0]] * 7
    assert held[8] != held[0]


def test_time_counts_from_when_its_processes_are_up_but_not_for_ever() -> None:
    sweep = Sweep(2.0)
    still = window({})
    starting = replace(still, stages=(*still.stages[:3], replace(still.stages[3], processes_starting=1)))
    first = sweep.propose(starting, BUDGET)
    assert [sweep.propose(each, BUDGET) == first for each in (starting, starting, still, still)] == [True] * 3 + [False]
    held = sweep.propose(starting, BUDGET)
    assert [sweep.propose(starting, BUDGET) == held for _ in range(7)] == [True] * 6 + [False]


def test_points_fill_the_space_and_come_again() -> None:
    found = [each.concurrency for each in proposals(Sweep(1.0), 8 + 4 * CYCLE)[8:]]
    assert found[:CYCLE] == found[CYCLE : 2 * CYCLE] == found[2 * CYCLE : 3 * CYCLE]
    for name in ("wait", "work", "apart"):
        levels = [each[name] for each in found[:CYCLE]]
        limited = [level for level in levels if level is not None]
        assert 2 <= levels.count(None) <= 5, name
        assert min(limited) <= 2, name
        assert MOST[name] / 3 <= max(limited) <= MOST[name], name
    assert dict.fromkeys(MOST) in found  # all open


def test_it_is_a_tuner() -> None:
    check_tuner(Sweep())


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_what_is_no_length_is_refused(wrong: float) -> None:
    with pytest.raises(PipelineError, match="hold_seconds must be above 0"):
        Sweep(wrong)
