"""Experiments that alternate blocks with and without a change, and keep what is surely faster."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune.tuners._switchback import ARMS, BLOCK, LEAST, MOST, PAUSE, STUDENT, Experiment, Switchback


def drive(
    switchback: Switchback, rate: Callable[[float, float], float], decisions: int, stages: tuple[str, ...] = ("a", "b")
) -> tuple[list[float], list[str]]:
    """Rates and findings, where the rate depends on what the concurrency of two stages is multiplied by."""
    rates, found = [], []
    for _ in range(decisions):
        rates.append(rate(switchback.multiple("a"), switchback.multiple("b")))
        said = switchback.observe(rates[-1], stages)
        found += [said] if said else []
    return rates, found


def test_nothing_happens_before_a_pause_is_over() -> None:
    switchback = Switchback()
    drive(switchback, lambda a, b: 1.0, PAUSE - 1)
    assert switchback.experiment is None
    drive(switchback, lambda a, b: 1.0, 1)
    assert switchback.experiment is not None


def test_what_is_faster_is_kept() -> None:
    """More of b is faster, up to four times; nothing of a matters."""
    noise = np.random.default_rng(0)
    switchback = Switchback()
    _, found = drive(switchback, lambda a, b: min(b, 4.0) ** 0.5 * noise.normal(1, 0.03), 3000)
    assert switchback.factors["b"] == 4.0
    assert "b with 2 times its concurrency" in " ".join(found)
    assert any(each.endswith("kept") for each in found)
    assert any(each.endswith("rolled back") for each in found)


def test_what_is_slower_costs_little() -> None:
    """Any change halves the rate: each block of it is ended as soon as it has settled, ever more seldom."""
    switchback = Switchback()
    rates, found = drive(switchback, lambda a, b: 1.0 if a == b == 1 else 0.5, 3000)
    assert switchback.factors == {}
    assert found
    assert not any(each.endswith("kept") for each in found)
    assert np.mean(rates) > 0.97


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.3))
@settings(max_examples=25, deadline=None)
def test_chance_alone_is_hardly_ever_kept(seed: int, noise: float) -> None:
    """Of experiments without an effect at most 2.5 % look faster in the end, some more as they may end early."""
    random = np.random.default_rng(seed)
    kept = 0
    for _ in range(40):
        experiment = Experiment("a", 2.0)
        verdict = None
        while verdict is None:
            experiment.observe(math.exp(random.normal(0, noise)))
            verdict = experiment.verdict()
        kept += verdict
    assert kept <= 8


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=400), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_whatever_the_rates_are_it_stays_within_bounds(rates: list[float], stages: int) -> None:
    switchback = Switchback()
    names = tuple("abc"[:stages])
    for rate in rates * 10:
        switchback.observe(rate, names)
        for name in names:
            assert LEAST <= switchback.factors.get(name, 1.0) <= MOST
            assert switchback.multiple(name) / switchback.factors.get(name, 1.0) in (1.0, *ARMS)


def test_an_experiment_begins_without_the_change_and_ends_with_a_whole_pair() -> None:
    experiment = Experiment("a", 2.0)
    seen = []
    while experiment.verdict() is None:
        seen.append(experiment.treated)
        experiment.observe(2.0 if experiment.treated else 1.0)
    assert seen == ([False] * BLOCK + [True] * BLOCK) * min(STUDENT)
    assert experiment.verdict() is True
    assert experiment.differences == pytest.approx([math.log(2)] * min(STUDENT))
