"""Stages that do less with more at once are named, with figures, and only those."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune
from intune._values import CROWDS, Allocation, Budget, Snapshot
from intune.control.slowdown import Crowds, slowdowns


def test_it_says_how_long_items_took_and_how_much_less_was_done() -> None:
    crowds: Crowds = ((1, 40, 0.020), (2, 50, 0.026), (8, 20, 0.188), (16, 100, 0.740))
    assert slowdowns({"bend": crowds}) == [
        "Stage bend slows down with concurrency: 2 items at once took 26 ms each, 16 at once 740 ms each, which is "
        '72 % fewer items a second. The tuner "model" limits such stages; max_concurrency= does it by hand.'
    ]


def test_a_few_items_say_nothing() -> None:
    assert slowdowns({"bend": ((1, 9, 0.020), (16, 100, 0.740))}) == []
    assert slowdowns({"bend": ((1, 100, 0.020), (16, 9, 0.740))}) == []


def test_the_best_number_may_lie_in_the_middle() -> None:
    (found,) = slowdowns({"read": ((1, 50, 0.01), (3, 50, 0.012), (12, 50, 0.1))})
    assert "3 items at once took 12 ms each, 12 at once 100 ms each" in found


@given(
    st.lists(st.tuples(st.sampled_from(CROWDS), st.integers(1, 1000)), unique_by=lambda each: each[0]),
    st.floats(1e-6, 10),
    st.floats(0, 1),
)
def test_who_only_takes_turns_is_not_named(counts: list[tuple[int, int]], seconds: float, turns: float) -> None:
    """With a lock n at once take up to n times as long: more gains nothing, but loses nothing either."""
    crowds = tuple((crowd, items, seconds * (1 + turns * (crowd - 1))) for crowd, items in sorted(counts))
    assert slowdowns({"lock": crowds}) == []


class Level:
    """A tuner that gives the second stage what a test says."""

    at_once = 1

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """That."""
        return Allocation({"from_iterable": None, "hindered": self.at_once}, budget.cpus)


@pytest.mark.timeout(60)
def test_a_loader_says_it_of_its_own_run() -> None:
    """Each item takes the longer the more are at work: the square of their number, in milliseconds."""
    at_work, lock, tuner = 0, threading.Lock(), Level()

    def hindered(value: int) -> int:
        nonlocal at_work
        with lock:
            at_work += 1
        for _ in range(at_work):
            threading.Event().wait(0.001 * at_work)
        with lock:
            at_work -= 1
        return value

    pipe = intune.from_iterable(itertools.count()).map(hindered, name="hindered", waits=True)
    with pipe.loader(cpus=2, max_ahead=40, tuner=tuner) as loader:
        samples = iter(loader)
        for _ in range(60):
            next(samples)
        assert "slows down" not in loader.explain()
        tuner.at_once = 16
        while "Stage hindered slows down with concurrency: 1 item at once took" not in loader.explain():
            next(samples)
