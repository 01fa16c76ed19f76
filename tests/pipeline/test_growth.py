"""How large what a stage gives is predicted to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.growth import Growth

sizes = st.floats(0.01, 1e9)


def grown(*items: tuple[float, float]) -> Growth:
    """After items of which (came, gave) bytes are known."""
    growth = Growth()
    for came, gave in items:
        growth.add(came, gave)
    return growth


def test_before_an_item_has_passed_nothing_is_predicted() -> None:
    growth = Growth()
    assert (growth.usual, growth.predict(0), growth.predict(1e9)) == (0, 0, 0)


@given(came=sizes, gave=sizes)
def test_one_item_says_what_is_usual(came: float, gave: float) -> None:
    growth = grown((came, gave))
    assert growth.usual == pytest.approx(gave)
    assert growth.predict(came) == pytest.approx(gave)


@given(
    ratio=st.floats(0.01, 100), came=st.lists(st.integers(1, 10**6), min_size=3, max_size=40, unique=True), then=sizes
)
def test_a_stage_that_gives_in_proportion(ratio: float, came: list[int], then: float) -> None:
    growth = grown(*[(size, ratio * size) for size in came])
    assert growth.predict(then) == pytest.approx(ratio * then, rel=1e-6)


@given(gave=st.floats(1, 1e6), came=st.lists(st.integers(1, 10**6), min_size=3, max_size=40, unique=True), then=sizes)
def test_a_stage_that_gives_the_same_whatever_comes_in(gave: float, came: list[int], then: float) -> None:
    growth = grown(*[(size, gave) for size in came])
    assert growth.predict(then) == pytest.approx(gave, rel=1e-6)


def test_a_source_like_stage_to_which_nothing_comes_in() -> None:
    growth = grown((0, 100), (0, 200), (0, 300))
    assert growth.predict(0) == pytest.approx(200)


def test_items_three_times_as_large_are_seen_where_they_come_in() -> None:
    """A burst: what comes into a stage that copies tells what it will give, before it has given it."""
    growth = grown(*[(size, size + 1.0) for size in (90.0, 100.0, 110.0) * 20])
    assert growth.predict(300) == pytest.approx(303, rel=0.01)
    assert growth.usual == pytest.approx(101, rel=0.05)


def test_it_changes_its_mind_when_the_stage_does() -> None:
    rng = np.random.default_rng(0)
    growth = Growth()
    for came in rng.uniform(50, 150, 200):
        growth.add(came, 1000)
    assert growth.predict(500) == pytest.approx(1000)
    for came in rng.uniform(50, 150, 300):
        growth.add(came, 2 * came)
    assert growth.predict(500) == pytest.approx(1000, rel=0.05)
    assert growth.predict(50) == pytest.approx(100, rel=0.05)
    for came in rng.uniform(50, 150, 300):
        growth.add(came, 700)
    assert growth.predict(500) == pytest.approx(700, rel=0.05)


def test_one_outlier_moves_it_by_a_thirty_second() -> None:
    growth = grown(*[(100, 100)] * 64, (100, 3300))
    assert growth.usual == pytest.approx(200)
    assert grown(*[(100, 100)] * 64, (100, 3300), *[(100, 100)] * 200).usual == pytest.approx(100, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=60), sizes)
def test_never_outside_of_what_was_seen(items: list[tuple[int, int]], came: float) -> None:
    growth = grown(*items)
    gave = [after for _, after in items]
    ratios = [after / before for before, after in items if before]
    most = max([*gave, *(ratio * came for ratio in ratios)])
    assert min(gave) * 0.999 <= growth.usual <= max(gave) * 1.001
    assert 0 <= growth.predict(came) <= most * 1.001
