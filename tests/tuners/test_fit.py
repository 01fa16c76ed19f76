import random

import pytest

from intune.tuners._fit import StageFit


def fit(forgetting: float = 0.97, noise: float = 0.05) -> StageFit:
    return StageFit(8, forgetting=forgetting, noise=noise)


def bent(busy: float, base: float = 0.02, slope: float = 0.0, bend: float = 1 / 9) -> float:
    return base * (1 + slope * (busy - 1) + bend * busy * (busy - 1))


def test_one_level_says_nothing_about_others_and_no_dependence_is_expected() -> None:
    one = fit()
    for _ in range(5):
        one.observe(8.0, 0.1, 1000)
    base, slope, bend = one.curve
    assert base == pytest.approx(0.1, rel=0.01)
    assert (slope, bend) == (0, 0)
    assert one.deviation(8.0) < 0.05 < 0.25 < one.deviation(4.0) < one.deviation(1.0)


def test_three_levels_give_the_curve() -> None:
    three = fit()
    for _ in range(20):
        for busy in (8.0, 4.0, 2.0):
            three.observe(busy, bent(busy, slope=0.2), 1000)
    base, slope, bend = three.curve
    assert base == pytest.approx(0.02, rel=0.03)
    assert slope == pytest.approx(0.2 * 0.02, rel=0.2)
    assert bend == pytest.approx(0.02 / 9, rel=0.05)
    assert max(three.deviation(busy) for busy in (1, 2, 4, 8)) < 0.1


def test_what_was_learnt_elsewhere_stays_while_a_stage_stays_at_one_level() -> None:
    stays = fit()
    for busy in (8.0, 4.0, 2.0):
        stays.observe(busy, bent(busy), 1000)
    before = stays.deviation(8.0)
    for _ in range(500):
        stays.observe(3.0, bent(3.0), 1000)
    assert stays.deviation(8.0) < 1.3 * before
    base, slope, bend = stays.curve
    assert base + 7 * slope + 56 * bend == pytest.approx(bent(8.0), rel=0.1)


def test_curves_that_cannot_be_are_not_given() -> None:
    faster = fit()
    for _ in range(10):
        faster.observe(8.0, 0.01, 1000)
        faster.observe(2.0, 0.02, 1000)  # it would be faster with more at once
    base, slope, bend = faster.curve
    assert slope == bend == 0
    assert 0.01 <= base <= 0.02
    steep = fit()
    for busy in (8.0, 4.0, 2.0):
        steep.observe(busy, 0.001 * busy**4, 1000)
    assert min(steep.curve) >= 0 < steep.curve[0]


def test_few_items_weigh_less() -> None:
    def level(items: int) -> float:
        both = fit()
        for _ in range(10):
            both.observe(4.0, 0.02, 1000)
        both.observe(4.0, 0.022, items)
        return both.curve[0] + 3 * both.curve[1] + 12 * both.curve[2]

    assert 0.02 <= level(4) < level(1000) < 0.022


def test_one_window_that_is_far_off_changes_nothing_two_change_all() -> None:
    both = fit()
    for busy in (8.0, 4.0, 2.0, 3.0, 3.0):
        both.observe(busy, bent(busy), 1000)
    known = both.curve
    assert not both.observe(3.0, 2 * bent(3.0), 1000)
    assert both.curve == known
    assert not both.observe(3.0, bent(3.0), 1000)  # it was chance
    assert not both.observe(3.0, 2 * bent(3.0), 1000)
    assert both.observe(3.0, 2 * bent(3.0), 1000)
    # The level is new, the shape is kept as a guess, and uncertain.
    assert [new / old for new, old in zip(both.curve, known, strict=True) if old] == pytest.approx(
        [2.0] * sum(map(bool, known)), rel=0.15
    )
    assert both.deviation(6.0) > 0.25


def test_above_and_below_in_turn_is_noise_and_no_change() -> None:
    noisy = fit()
    for _ in range(5):
        noisy.observe(4.0, 0.02, 1000)
    assert not any(noisy.observe(4.0, seconds, 1000) for seconds in (0.03, 0.012) * 10)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_it_gets_used_to_noise(noise: float) -> None:
    draw, noisy = random.Random(1), fit()
    changes = [noisy.observe(4.0, 0.02 * draw.uniform(1 - noise, 1 + noise), 100) for _ in range(400)]
    assert sum(changes) <= 2
    assert noisy.curve[0] == pytest.approx(0.02, rel=0.1)


def test_zero_seconds_are_a_curve_too() -> None:
    nothing = fit()
    for _ in range(3):
        nothing.observe(1.0, 0.0, 10)
    assert 0 < nothing.curve[0] < 1e-12
