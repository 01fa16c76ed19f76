"""What an item costs, fitted to levels that follow from known costs; and costs that may be true as well."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from intune.sim.calibration.costs import Cost, drawn, fit
from intune.sim.calibration.levels import Level, StageLevels

CROWDS = (1, 2, 3, 4, 6, 8, 12, 16)
NOISE = 0.02


def queue(places: int, inside: float, outside: float) -> Callable[[float], float]:
    """Seconds to wait for so long with one of so many places, and then outside: items queue, those outside do not."""
    return lambda n: max(inside + outside, n * inside / places)


def seen(
    computing: Callable[[float], float],
    waiting: Callable[[float], float],
    at: Sequence[float] = CROWDS,
    seed: int = 0,
    noise: float = NOISE,
) -> StageLevels:
    """Levels as they would have been measured, with this much noise."""
    random = np.random.default_rng(seed)

    def level(n: float, seconds: float) -> Level:
        return Level(float(n), seconds * math.exp(noise * random.standard_normal()), noise, 100)

    cpu = tuple(level(n, computing(n)) for n in at)
    return StageLevels(tuple(level(n, computing(n) + waiting(n)) for n in at), cpu)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("computing", "waiting"),
    [
        (lambda n: 0.05, lambda n: 0.0),
        (lambda n: 0.05 * (1 + 0.05 * (n - 1)), lambda n: 0.0),
        (lambda n: 0.05 * (1 + 0.02 * n * (n - 1)), lambda n: 0.0),
        (lambda n: 0.02 * (1 + 0.03 * n * (n - 1)), lambda n: 0.05),
        (lambda n: 0.0001, lambda n: 0.2),
        (lambda n: 0.0001, lambda n: 0.02 * (1 + 0.02 * n * (n - 1))),
        (lambda n: 0.0001, queue(3, 0.02, 0.03)),
        (lambda n: 0.0001, queue(1, 0.01, 0.0)),
        (lambda n: 0.01, queue(4, 0.03, 0.01)),
        (lambda n: 0.01, lambda n: 0.01 * (n - 1)),  # all of it under one lock: alone nobody is waited for
    ],
)
def test_a_cost_is_found_again(
    computing: Callable[[float], float], waiting: Callable[[float], float], seed: int
) -> None:
    found = fit(seen(computing, waiting, seed=seed))
    for n in CROWDS:
        assert found.computing(n) == pytest.approx(computing(n), rel=0.1, abs=1e-4)
        assert found.computing(n) + found.waiting(n) == pytest.approx(computing(n) + waiting(n), rel=0.12)


def test_chance_makes_no_stage_slow_down() -> None:
    bent = 0
    for seed in range(40):
        found = fit(seen(lambda n: 0.05, lambda n: 0.1, seed=seed, noise=0.1))
        bent += bool(found.contention or found.coherency or found.waiting(16) > 1.02 * found.waiting(1))
    assert bent <= 6


def test_one_level_is_enough() -> None:
    level = (Level(1.0, 0.5, NOISE, 3),)
    found = fit(StageLevels(level, level))
    assert (found.cpu, found.contention, found.coherency) == (pytest.approx(0.5), 0.0, 0.0)
    assert found.waiting(2) == pytest.approx(0.0, abs=1e-9)


def draws(levels: StageLevels, n: float, count: int = 40) -> list[float]:
    """Seconds at so many at once by costs that may be true as well."""
    random = np.random.default_rng(0)
    found: list[Cost] = [drawn(levels, random) for _ in range(count)]
    return sorted(each.computing(n) + each.waiting(n) for each in found)


class TestWhatMayBeTrueAsWell:
    """Beyond what was seen it is less and less sure, and never faster than it was."""

    @pytest.mark.parametrize(("computing", "waiting"), [(0.05, 0.0), (0.0001, 0.05)])
    def test_at_levels_that_were_seen_it_is_near(self, computing: float, waiting: float) -> None:
        found = draws(seen(lambda n: computing, lambda n: waiting), 8)
        assert 0.046 < found[2] <= found[-3] < 0.056

    @pytest.mark.parametrize(("computing", "waiting"), [(0.05, 0.0), (0.0001, 0.05)])
    def test_at_twice_the_largest_it_may_take_longer(self, computing: float, waiting: float) -> None:
        found = draws(seen(lambda n: computing, lambda n: waiting), 32)
        assert found[2] > 0.046
        assert 0.055 < found[-3] < 0.12

    @pytest.mark.parametrize(("computing", "waiting"), [(0.05, 0.0), (0.0001, 0.05)])
    def test_one_level_says_little_of_twice_as_many(self, computing: float, waiting: float) -> None:
        found = draws(seen(lambda n: computing, lambda n: waiting, at=(1,)), 2)
        assert found[2] < 0.055
        assert found[-5] > 0.09

    def test_below_the_smallest_the_others_may_be_all_that_is_waited_for(self) -> None:
        """Two at once that each take 20 ms: 10 ms alone, if they hold one lock, or 20 ms."""
        found = draws(seen(lambda n: 0.0001, lambda n: 0.01 * n, at=(2, 4, 8)), 1)
        assert found[5] == pytest.approx(0.01, rel=0.1)
        assert found[-6] == pytest.approx(0.02, rel=0.1)
