"""How many items were in hand, and how an item's seconds depend on that."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._values import CROWDS
from intune.metrics.counters import Crowds, Load
from intune.sim import Scenario, SimMachine, SimStage
from intune.sim.discrete import Simulation


class TestLoad:
    def test_the_area_is_items_times_seconds(self) -> None:
        load = Load()
        load.change(10.0, 1)
        load.change(12.0, 1)
        assert load.change(13.0, -1) == 2.0 + 2.0
        assert load.change(15.0, 0) == 4.0 + 2.0

    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=20))
    def test_what_an_item_saw_is_between_one_and_all(self, items: list[tuple[float, float]]) -> None:
        """Items with a begin and a duration: the mean number in hand over the life of each, itself included."""
        changes = sorted(
            [(begin, 1, number) for number, (begin, _) in enumerate(items)]
            + [(begin + seconds, -1, number) for number, (begin, seconds) in enumerate(items)],
            key=lambda change: (change[0], -change[1]),
        )
        load, begun = Load(), {}
        for now, by, number in changes:
            area = load.change(now, by)
            if by > 0:
                begun[number] = area
            elif items[number][1] > 1e-6:
                assert 1 - 1e-6 <= (area - begun[number]) / items[number][1] <= len(items) + 1e-6
        assert load.area == pytest.approx(sum(seconds for _, seconds in items))

    def test_a_copy_goes_its_own_way(self) -> None:
        load = Load()
        load.change(0.0, 2)
        copy = load.copy()
        load.change(1.0, 0)
        assert (copy.area, load.area) == (0.0, 2.0)


class TestCrowds:
    def test_items_are_told_apart_by_the_next_lower_of_the_listed_numbers(self) -> None:
        crowds = Crowds()
        for at_once, items, seconds in ((1.0, 1, 0.1), (6.9, 2, 0.6), (7.2, 1, 0.4), (900.0, 1, 9.0), (0.3, 1, 0.3)):
            crowds.add(at_once, items, seconds)
        assert crowds.since(Crowds()) == ((1, 2, 0.2), (6, 3, pytest.approx(1 / 3)), (64, 1, 9.0))

    def test_a_number_that_is_whole_but_for_the_gaps_between_items_counts_as_whole(self) -> None:
        crowds = Crowds()
        for at_once in (2.9999, 2.9, 2.8):
            crowds.add(at_once, 1, 0.1)
        assert [row[:2] for row in crowds.since(Crowds())] == [(2, 1), (3, 2)]

    def test_a_window_has_only_what_was_added_in_it(self) -> None:
        crowds = Crowds()
        crowds.add(2.0, 3, 3.0)
        before = crowds.copy()
        crowds.add(2.0, 1, 5.0)
        crowds.add(3.0, 1, 7.0)
        assert crowds.since(before) == ((2, 1, 5.0), (3, 1, 7.0))

    def test_the_numbers_rise_from_one(self) -> None:
        assert CROWDS[0] == 1
        assert all(first < second for first, second in itertools.pairwise(CROWDS))


def test_a_stage_that_slows_down_shows_by_how_much_at_each_number_at_once() -> None:
    """Without variation of costs each figure is what the law of the stage says, wherever one number held throughout."""
    sigma, kappa = 0.1, 0.05
    work = SimStage("work", cpu_seconds=0.01, contention=sigma, coherency=kappa, max_concurrency=4)
    simulation = Simulation(
        Scenario("bent", (SimStage("read", "source", cpu_seconds=0.0001), work), SimMachine(cpus=8))
    )
    simulation.advance(5.0)
    stage = simulation.snapshot().stages[1]
    simulation.close()
    found = {crowd: seconds for crowd, _, seconds in stage.wall_seconds_by_crowd}
    assert found[4] == pytest.approx(0.01 * (1 + sigma * 3 + kappa * 4 * 3), rel=0.02)
    assert stage.in_hand_mean == pytest.approx(4, rel=0.02)
