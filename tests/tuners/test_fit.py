import random

import pytest

from intune.tuners._fit import Point, StageFit


def fit(forgetting: float = 0.97, noise: float = 0.05) -> StageFit:
    return StageFit(forgetting=forgetting, noise=noise)


def bent(busy: float, base: float = 0.02, slope: float = 0.0, bend: float = 1 / 9) -> float:
    return base * (1 + slope * (busy - 1) + bend * busy * (busy - 1))


def seconds(fit: StageFit, busy: float) -> float:
    base, slope, bend = fit.curve
    return base + slope * (busy - 1) + bend * busy * (busy - 1)


def test_one_level_says_nothing_about_others_and_no_dependence_is_expected() -> None:
    one = fit()
    for _ in range(5):
        one.observe([Point(8.0, 1000, 0.1)])
    base, slope, bend = one.curve
    assert base == pytest.approx(0.1, rel=0.01)
    assert (slope, bend) == (0, 0)
    assert one.deviation(8.0) < 0.05 < 0.25 < min(one.deviation(4.0), one.deviation(1.0))


def test_three_levels_give_the_curve() -> None:
    three = fit()
    for _ in range(20):
        for busy in (8.0, 4.0, 2.0):
            three.observe([Point(busy, 1000, bent(busy, slope=0.2))])
    base, slope, bend = three.curve
    assert base == pytest.approx(0.02, rel=0.03)
    assert slope == pytest.approx(0.2 * 0.02, rel=0.2)
    assert bend == pytest.approx(0.02 / 9, rel=0.05)
    assert max(three.deviation(busy) for busy in (1, 2, 4, 8)) < 0.1


def test_what_was_learnt_elsewhere_stays_while_a_stage_stays_at_one_level() -> None:
    stays = fit()
    for busy in (8.0, 4.0, 2.0):
        stays.observe([Point(busy, 1000, bent(busy))])
    before = stays.deviation(8.0)
    for _ in range(500):
        stays.observe([Point(3.0, 1000, bent(3.0))])
    assert stays.deviation(8.0) < 1.3 * before
    base, slope, bend = stays.curve
    assert base + 7 * slope + 56 * bend == pytest.approx(bent(8.0), rel=0.1)


def test_curves_that_cannot_be_are_not_given() -> None:
    faster = fit()
    for _ in range(10):
        faster.observe([Point(8.0, 1000, 0.01)])
        faster.observe([Point(2.0, 1000, 0.02)])  # it would be faster with more at once
    base, slope, bend = faster.curve
    assert slope == bend == 0
    assert 0.01 <= base <= 0.02
    steep = fit()
    for busy in (8.0, 4.0, 2.0):
        steep.observe([Point(busy, 1000, 0.001 * busy**4)])
    assert min(steep.curve) >= 0 < steep.curve[0]


def test_few_items_weigh_less() -> None:
    def level(items: int) -> float:
        both = fit()
        for _ in range(10):
            both.observe([Point(4.0, 1000, 0.02)])
        both.observe([Point(4.0, items, 0.022)])
        return both.curve[0] + 3 * both.curve[1] + 12 * both.curve[2]

    assert 0.02 <= level(4) < level(1000) < 0.022


def test_one_window_that_is_far_off_changes_nothing_two_change_all() -> None:
    both = fit()
    for busy in (8.0, 4.0, 2.0, 3.0, 3.0):
        both.observe([Point(busy, 1000, bent(busy))])
    known = both.curve
    assert not both.observe([Point(3.0, 1000, 2 * bent(3.0))])
    assert both.curve == known
    assert not both.observe([Point(3.0, 1000, bent(3.0))])  # it was chance
    assert not both.observe([Point(3.0, 1000, 2 * bent(3.0))])
    assert both.observe([Point(3.0, 1000, 2 * bent(3.0))])
    # The level is new, the shape is kept as a guess, and uncertain.
    assert [new / old for new, old in zip(both.curve, known, strict=True) if old] == pytest.approx(
        [2.0] * sum(map(bool, known)), rel=0.15
    )
    assert both.deviation(6.0) > 0.25


def test_above_and_below_in_turn_is_noise_and_no_change() -> None:
    noisy = fit()
    for _ in range(5):
        noisy.observe([Point(4.0, 1000, 0.02)])
    assert not any(noisy.observe([Point(4.0, 1000, seconds)]) for seconds in (0.03, 0.012) * 10)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_it_gets_used_to_noise(noise: float) -> None:
    draw, noisy = random.Random(1), fit()
    changes = [noisy.observe([Point(4.0, 100, 0.02 * draw.uniform(1 - noise, 1 + noise))]) for _ in range(400)]
    assert sum(changes) <= 2
    assert seconds(noisy, 4.0) == pytest.approx(0.02, rel=0.1)


def test_zero_seconds_are_a_curve_too() -> None:
    nothing = fit()
    for _ in range(3):
        nothing.observe([Point(1.0, 10, 0.0)])
    assert 0 < nothing.curve[0] < 1e-12


def test_one_window_with_different_numbers_at_once_gives_the_curve() -> None:
    watched = fit()
    for _ in range(3):
        watched.observe([Point(float(busy), 100, bent(busy)) for busy in (1, 2, 3, 6, 8)])
    assert [seconds(watched, busy) / bent(busy) for busy in (1, 2, 4, 8)] == pytest.approx([1] * 4, rel=0.05)
    assert seconds(watched, 32) == pytest.approx(bent(32), rel=0.2)  # never seen


def test_a_stage_that_slows_down_twentyfold_is_understood_at_once() -> None:
    steep = fit()
    steep.observe([Point(1.0, 3, 0.15), Point(2.0, 7, 0.14)])
    steep.observe([Point(8.0, 8, 2.3)])
    assert seconds(steep, 8) == pytest.approx(2.3, rel=0.5)
    assert steep.slows(2, 32, 0.25, 2.5)


def test_it_slows_down_surely_where_two_levels_differ_by_more_than_chance() -> None:
    known, rough, flat = fit(), fit(), fit()
    draw = random.Random(3)
    for _ in range(20):
        known.observe([Point(4.0, 50, bent(4.0)), Point(8.0, 50, bent(8.0))])
        flat.observe([Point(float(busy), 50, 0.02 * draw.uniform(0.9, 1.1)) for busy in (1, 2, 4, 8)])
    rough.observe([Point(1.0, 1, 0.02), Point(2.0, 1, 0.03)])
    assert known.slows(1, 64, 0.25, 2.5)  # 1 and 64 were never seen, but no curve falls
    assert known.slows(4, 8, 0.25, 2.5)
    assert not known.slows(4, 8, 2.0, 2.5)  # 3.1 times as long, not more than 3 for sure
    assert rough.slows(1, 8, 0.25, 0.0)
    assert not rough.slows(1, 8, 0.25, 2.5)
    assert not flat.slows(1, 8, 0.25, 2.5)


def test_no_more_than_a_deviation_less_is_hoped_for() -> None:
    one = fit()
    one.observe([Point(4.0, 100, 0.02)])
    assert 0.018 < one.at_least(4.0) < 0.02
    assert 0 < one.at_least(1.0) < 0.015


def test_what_is_forgotten_does_not_depend_on_how_many_points_a_window_has() -> None:
    together, apart = fit(0.9), fit(0.9)
    for _ in range(200):
        together.observe([Point(4.0, 1000, 0.02)])
        apart.observe([Point(4.0, 100, 0.02)] * 10)
    assert apart.deviation(4.0) == pytest.approx(together.deviation(4.0), rel=0.6)


@pytest.mark.slow
def test_after_hours_a_stage_whose_shape_changes_is_still_followed() -> None:
    draw, old = random.Random(5), fit()

    def watch(windows: int, bend: float) -> None:
        for _ in range(windows):
            wall = [bent(busy, bend=bend) * draw.uniform(0.9, 1.1) for busy in range(1, 6)]
            old.observe([Point(float(place + 1), 50, each) for place, each in enumerate(wall)])

    watch(5_000, 1 / 400)
    watch(200, 1 / 20)
    assert seconds(old, 5) == pytest.approx(bent(5, bend=1 / 20), rel=0.1)


@pytest.mark.parametrize(("items", "factor"), [(5, 0.05), (5, 1 / 7), (50, 1 / 7), (50, 0.4), (50, 3.0), (50, 20.0)])
def test_a_change_is_noticed_at_its_second_window_however_large_it_is(items: int, factor: float) -> None:
    """The first window of a large change must not be taken for so much noise that the second one hides in it."""
    fit = StageFit(forgetting=0.97, noise=0.05)
    for _ in range(20):
        assert not fit.observe([Point(3.0, items, 0.02)])
    assert not fit.observe([Point(3.0, items, 0.02 * factor)])
    assert fit.observe([Point(3.0, items, 0.02 * factor)])
    assert fit.curve[0] + 2 * fit.curve[1] + 6 * fit.curve[2] == pytest.approx(0.02 * factor, rel=0.02)


def test_noise_that_is_larger_than_thought_is_no_change_for_long() -> None:
    draw = random.Random(0)
    fit = StageFit(forgetting=0.97, noise=0.01)
    changes = [fit.observe([Point(2.0, 10_000, 0.02 * draw.lognormvariate(0, 0.2))]) for _ in range(300)]
    assert sum(changes[100:]) <= 2
