"""What an item costs, fitted to seconds by crowd that follow from known costs."""

import numpy as np
import pytest

from intune.sim.costs import Cost, Point, Turn, fit

CROWDS = (1, 2, 3, 4, 6, 8, 12, 16)
SPREAD = 0.1


def points(cost: Cost, seed: int = 0, items: int = 40) -> list[Point]:
    """Windows of three crowds each, as items of this cost would have given them."""
    random = np.random.default_rng(seed)
    found = []
    for window in range(20):
        chosen = random.choice(CROWDS, 3, replace=False)
        beside = {int(n): float(random.lognormal(0, SPREAD / items**0.5)) for n in chosen}
        cpu = {n: float(cost.computing(np.array([float(n)]))[0]) * noise for n, noise in beside.items()}
        mean = sum(cpu.values()) / len(cpu)
        found += [Point(window, n, items, cpu[n] + beside[n] * off(cost, n), mean) for n in beside]
    return found


def off(cost: Cost, n: int) -> float:
    """Seconds in which an item beside n - 1 others does not compute."""
    if cost.turn is None:
        return cost.wait
    seconds, places, computes = cost.turn
    inside = seconds if computes else 0.0
    computing = float(cost.computing(np.array([float(n)]))[0])
    return cost.wait - inside + max(seconds, n * seconds / places - (computing - inside + cost.wait))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "cost",
    [
        Cost(0.05, 0.0, 0.0, 0.0, None),
        Cost(0.05, 0.05, 0.0, 0.0, None),
        Cost(0.05, 0.0, 0.02, 0.0, None),
        Cost(0.02, 0.0, 0.03, 0.05, None),
        Cost(0.0001, 0.0, 0.0, 0.2, None),
        Cost(0.05, 0.0, 0.0, 0.0, Turn(0.01, 1.0, True)),
        Cost(0.04, 0.0, 0.0, 0.0, Turn(0.02, 3.0, False)),
    ],
)
def test_a_cost_is_found_again(cost: Cost, seed: int) -> None:
    found = fit(points(cost, seed), SPREAD)
    assert (found.turn is None) == (cost.turn is None)
    if cost.turn is not None and found.turn is not None:
        assert found.turn.seconds / found.turn.places == pytest.approx(cost.turn.seconds / cost.turn.places, rel=0.1)
    for n in CROWDS:
        at = np.array([float(n)])
        assert found.computing(at)[0] == pytest.approx(cost.computing(at)[0], rel=0.1, abs=1e-4)
        # Queueing begins more softly than at once, as items differ.
        assert off(found, n) == pytest.approx(off(cost, n), rel=0.15, abs=0.1 * (off(cost, n) + cost.cpu))


def test_chance_makes_no_stage_slow_down() -> None:
    plain = Cost(0.05, 0.0, 0.0, 0.0, None)
    bent = [seed for seed in range(20) if (found := fit(points(plain, seed, 5), 0.5)).contention or found.coherency]
    assert len(bent) <= 1


def test_one_point_is_enough() -> None:
    assert fit([Point(0, 1.0, 3, 0.5, 0.5)], SPREAD) == Cost(pytest.approx(0.5), 0.0, 0.0, 0.0, None)
