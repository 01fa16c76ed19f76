"""Windows brought to one point for each level, with its own uncertainty."""

import math
from dataclasses import replace

import numpy as np
import pytest

from intune._values import Allocation, Budget, StageInfo, StageSnapshot
from intune.sim.calibration.levels import LEAST_ITEMS, Sample, StageLevels, levels, stage_levels
from intune.sim.calibration.seen import Window
from intune.testing import blank_snapshot

INFOS = (StageInfo("read", "source", max_concurrency=1), StageInfo("work", "map", waits=True))
Crowds = tuple[tuple[int, int, float], ...]


def window(
    crowds: Crowds, *, limit: int | None = None, held: float = 10.0, in_hand: float = 0.0, cpu: float = 1e-4
) -> Window:
    """One second of the stage `work`."""
    blank = blank_snapshot(INFOS)
    items = sum(count for _, count, _ in crowds)
    busy = sum(count * wall for _, count, wall in crowds)
    work = StageSnapshot(
        INFOS[1],
        limit,
        0,
        items_out=items,
        wall_seconds_by_crowd=crowds,
        wall_seconds_mean=busy / items,
        cpu_seconds_mean=cpu,
        busy_seconds=busy,
        in_hand_mean=in_hand or busy,
        run_queue_seconds=0.0,
    )
    allocation = Allocation({"read": None, "work": limit}, 2)
    stages = (blank.stages[0], work)
    snapshot = type(blank)(1.0, True, stages, blank.consumer, blank.machine, allocation)
    return Window(snapshot, Budget(2), held)


def walls(found: StageLevels) -> dict[int, float]:
    return {round(level.at_once): level.seconds for level in found.wall}


def test_a_level_is_one_point_however_often_it_was_seen() -> None:
    """Three hundred windows alone, two beside another one: as sure as they are, and no surer."""
    many = [window(((1, 100, 0.01),), limit=1)] * 300
    few = [window(((2, 80, 0.024),), limit=2, in_hand=2.0)] * 2
    found = stage_levels([*many, *few], 1, 0.1, 0.0)
    assert walls(found) == {1: pytest.approx(0.01), 2: pytest.approx(0.024)}
    assert [level.deviation < 0.1 for level in found.wall] == [True, True]


def test_a_window_in_which_something_else_happened_counts_little() -> None:
    usual = [Sample(4.0, 100, 0.01)] * 9
    (found,) = levels([*usual, Sample(4.0, 100, 0.1)], 0.0)
    assert found.seconds == pytest.approx(0.01, rel=0.05)


def test_scatter_between_windows_makes_a_level_less_sure_and_more_of_them_surer() -> None:
    random = np.random.default_rng(0)
    noisy = [Sample(4.0, 1000, 0.01 * math.exp(0.3 * each)) for each in random.standard_normal(64)]
    (few,), (many,) = levels(noisy[:8], 0.0), levels(noisy, 0.0)
    (calm,) = levels([Sample(4.0, 1000, 0.01)] * 8, 0.0)
    assert calm.deviation < 0.03 < many.deviation < few.deviation < 0.3


def test_items_that_differ_make_it_less_sure() -> None:
    (found,) = levels([Sample(1.0, 4, 0.01)], 0.5)
    assert found.deviation == pytest.approx(math.sqrt(0.02**2 + 0.1**2 + 0.5**2 / 4), rel=0.01)


def test_a_level_with_next_to_no_items_was_not_seen() -> None:
    found = levels([Sample(1.0, 100, 0.01), Sample(8.0, LEAST_ITEMS - 1, 0.5)], 0.0)
    assert [level.at_once for level in found] == [1.0]
    assert len(levels([Sample(8.0, 1, 0.5)], 0.0)) == 1  # all there is


def test_what_was_begun_under_another_allocation_is_left_out() -> None:
    """A burst of 24 at once that ends under a limit of 2."""
    found = stage_levels([window(((2, 80, 0.02), (24, 30, 1.0)), limit=2, in_hand=2.0)], 1, 0.1, 0.0)
    assert walls(found) == {2: pytest.approx(0.02)}


def test_what_is_on_the_way_from_one_level_to_the_next_is_left_out() -> None:
    found = stage_levels([window(((12, 6, 0.04), (16, 130, 0.1)), limit=16, in_hand=16.0)], 1, 0.1, 0.0)
    assert walls(found) == {16: pytest.approx(0.1)}


def test_what_was_seen_in_passing_only_is_less_sure() -> None:
    settled = window(((1, 100, 0.01),), limit=1)
    passing = window(((4, 100, 0.04),), held=0.2, in_hand=4.0)
    also = window(((1, 100, 0.09),), limit=1, held=0.05)
    found = stage_levels([settled, passing, also], 1, 0.1, 0.0)
    assert walls(found) == {1: pytest.approx(0.01), 4: pytest.approx(0.04)}
    assert found.wall[0].deviation < 0.15 < 0.3 < found.wall[1].deviation


@pytest.mark.parametrize(("in_hand", "at_once"), [(9.0, 9.0), (7.7, 7.7), (20.0, math.sqrt(72)), (3.0, math.sqrt(72))])
def test_where_in_its_class_a_level_lies(in_hand: float, at_once: float) -> None:
    (found,) = stage_levels([window(((8, 80, 0.1),), in_hand=in_hand)], 1, 0.1, 0.0).wall
    assert found.at_once == pytest.approx(at_once)


def uneven(crowds: Crowds, limit: int, times: float = 5.0, cpu: float = 1e-4) -> Window:
    """The same, where some items wait for so many times as long as half of them do."""
    found = window(crowds, limit=limit, cpu=cpu)
    read, work = found.snapshot.stages
    work = replace(work, wall_seconds_p50=0.01, wall_seconds_p99=0.01 * times)
    return found._replace(snapshot=replace(found.snapshot, stages=(read, work)))


LUCK: Crowds = ((4, 90, 0.01), (8, 10, 0.71))
"""Of 8 that take turns at 10 ms, most pass the others: 100 a second all the same."""


def test_items_that_queue_and_are_passed_by_others_count_together() -> None:
    few = [uneven(((1, 100, 0.01),), 1)] * 4
    found = stage_levels([*few, *[uneven(LUCK, 8)] * 4], 1, 0.1, 0.0)
    assert walls(found) == {1: pytest.approx(0.01), 8: pytest.approx(0.08)}


@pytest.mark.parametrize(
    "many",
    [uneven(LUCK, 8, times=1.5), uneven(LUCK, 8, cpu=0.05)],
    ids=["all wait as long", "they compute"],
)
def test_else_each_counts_by_the_crowd_that_it_met(many: Window) -> None:
    found = stage_levels([many] * 4, 1, 0.1, 0.0)
    assert walls(found)[4] == pytest.approx(0.01)


def test_where_all_windows_are_alike_crowds_are_all_that_there_is() -> None:
    assert walls(stage_levels([uneven(LUCK, 8)] * 4, 1, 0.1, 0.0))[4] == pytest.approx(0.01)
