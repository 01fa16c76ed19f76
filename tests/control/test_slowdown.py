"""Stages that do less with more at once are named, with figures, and only those."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import intune
from intune._values import CROWDS, Allocation, Snapshot, StageInfo, StageSnapshot
from intune.control.slowdown import Watch
from intune.testing import blank_snapshot

STAGE = StageInfo("bend", "map")


def window(crowds: tuple[tuple[int, int, float], ...], concurrency: int | None = None) -> Snapshot:
    allocation = Allocation({"bend": concurrency}, 16)
    stage = StageSnapshot(STAGE, concurrency, 1, wall_seconds_by_crowd=crowds)
    return replace(blank_snapshot([STAGE]), stages=(stage,), allocation=allocation)


def said(crowds: tuple[tuple[int, int, float], ...], windows: int = 4) -> list[str]:
    watch = Watch()
    for _ in range(windows):
        watch.add(window(crowds))
    return watch.sentences()


def test_it_says_how_long_items_took_and_how_much_less_was_done() -> None:
    assert said(((1, 40, 0.020), (2, 50, 0.026), (8, 20, 0.188), (16, 100, 0.740))) == [
        "Stage bend slows down with concurrency: 2 items at once took 26 ms each, 16 at once 740 ms each, which is "
        '72 % fewer items a second. The tuner "model" limits such stages; max_concurrency= does it by hand.'
    ]


def test_a_few_items_say_nothing() -> None:
    assert said(((1, 9, 0.020), (16, 100, 0.740))) == []
    assert said(((1, 100, 0.020), (16, 9, 0.740))) == []


def test_the_best_number_may_lie_in_the_middle() -> None:
    (found,) = said(((1, 50, 0.01), (3, 50, 0.012), (12, 50, 0.1)))
    assert "3 items at once took 12 ms each, 12 at once 100 ms each" in found


def test_windows_soon_after_a_change_of_the_limit_do_not_count() -> None:
    """Items that began beside few and end beside many would be taken for items among those in between."""
    watch = Watch()
    for number in range(30):
        watch.add(window(((2, 50, 0.026), (16, 100, 0.740)), concurrency=16 + number // 3))
    assert watch.sentences() == []


def test_old_windows_fade() -> None:
    watch = Watch()
    for _ in range(10):
        watch.add(window(((2, 5, 0.026), (16, 10, 0.740))))
    assert watch.sentences()
    for _ in range(60):
        watch.add(window(((16, 10, 0.740),)))
    assert watch.sentences() == []


@given(
    st.lists(st.tuples(st.sampled_from(CROWDS), st.integers(1, 1000)), unique_by=lambda each: each[0]),
    st.floats(1e-6, 10),
    st.floats(0, 1),
)
def test_who_only_takes_turns_is_not_named(counts: list[tuple[int, int]], seconds: float, turns: float) -> None:
    """With a lock n at once take up to n times as long: more gains nothing, but loses nothing either."""
    assert said(tuple((crowd, items, seconds * (1 + turns * (crowd - 1))) for crowd, items in sorted(counts))) == []


def test_a_loader_says_why_a_stage_has_a_limit() -> None:
    pipe = intune.from_iterable(range(400)).map(lambda value: value + 1, name="work")
    with pipe.loader(cpus=4, tuner="even") as loader:
        assert sum(1 for _ in loader) == 400
        assert "Stage work: concurrency 2 (4 CPUs over 2 stages);" in loader.explain()
