"""The environment of Gymnasium: its contract, what actions do, rewards, and ends."""

import math
import sys
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium.utils.env_checker import check_env

from intune._errors import PipelineError
from intune.sim import Change, Scenario, SimMachine, SimStage
from intune.sim.env import DEATH, ID, MOVES, PLACES, SIZE, PipelineEnv, register

PLAIN = Scenario("plain", (SimStage("read", "source"), SimStage("work", cpu_seconds=0.04)), SimMachine(cpus=8))
KEEP = np.zeros(PLACES, dtype=np.int64)


def move(**by_place: str) -> np.ndarray:
    """An action: p1="+k" moves the stage at place 1."""
    action = KEEP.copy()
    for place, name in by_place.items():
        action[int(place[1:])] = MOVES.index(name)
    return action


def begun(drawn: Scenario = PLAIN, **options: object) -> PipelineEnv:
    env = PipelineEnv(**options)  # type: ignore[arg-type]
    env.reset(seed=0, options={"scenario": drawn})
    return env


@pytest.mark.slow
def test_it_keeps_the_contract_without_a_warning() -> None:
    register()
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(ID, decisions=5)
        check_env(env.unwrapped)
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["wild", "memory", "many-stages"])
def test_twins_with_the_same_seed_are_equal(family: str) -> None:
    def rollout() -> list[object]:
        env, found = PipelineEnv(family, decisions=8), list[object]()
        env.action_space.seed(5)
        for episode in range(2):
            seen, info = env.reset(seed=3 if episode == 0 else None)
            found += [seen.tolist(), info]
            ended = False
            while not ended:
                seen, reward, died, truncated, info = env.step(env.action_space.sample())
                assert env.observation_space.contains(seen)
                found += [seen.tolist(), reward, died, info]
                ended = died or truncated
        return found

    first = rollout()
    assert first == rollout()
    assert first[1] != first[-1]


@pytest.mark.parametrize(
    ("moves", "asked"),
    [
        (["-1"], 7),
        (["-k"], 6),
        (["-k", "-k", "-k"], 2),
        (["-k"] * 6, 1),
        (["-k", "-k", "-k", "+1"], 3),
        (["-k", "-k", "+k"], 6),
        (["-1", "keep"], 7),
        (["keep"], None),
        (["-1", "open"], None),
        (["-1", "+k"], 8),
    ],
)
def test_moves(moves: list[str], asked: int | None) -> None:
    env = begun()
    for each in moves:
        *_, info = env.step(move(p1=each, p7="open"))
    assert dict(info["allocation"].concurrency) == {"read": None, "work": asked}
    env.close()


def test_a_reward_is_the_share_of_the_best_so_far() -> None:
    env = begun()
    rewards, rates = [], []
    for action in (KEEP, KEEP, move(p1="-k"), move(p1="-k"), move(p1="-k"), KEEP):
        _, reward, *_, info = env.step(action)
        rewards.append(reward)
        rates.append(info["rows_per_second"])
    best = np.maximum.accumulate(rates)
    assert rewards == pytest.approx(np.log(np.array(rates) / best).tolist())
    assert rewards[-1] == pytest.approx(math.log(2 / 8), abs=0.05)
    env.close()


def test_memory_costs_a_tenth_of_its_share() -> None:
    env = begun(replace(PLAIN, machine=SimMachine(cpus=8, memory_bytes=1e9)))
    env.step(KEEP)
    _, reward, *_ = env.step(KEEP)
    assert reward == pytest.approx(-0.05, abs=0.02)  # 500 MB of baseline
    env.close()


def test_another_number_of_cpus_begins_the_best_anew() -> None:
    env = begun(replace(PLAIN, changes=(Change(3.5, "cpus", 2),)))
    rewards = [env.step(KEEP)[1] for _ in range(6)]
    assert rewards[4] == pytest.approx(0, abs=0.1)
    env.close()


def test_out_of_memory_terminates() -> None:
    env = begun(replace(PLAIN, changes=(Change(0.0, "memory", 490e6),)))
    seen, reward, terminated, truncated, info = env.step(KEEP)
    assert (reward, terminated, truncated) == (DEATH, True, False)
    assert seen.shape == (SIZE,)
    assert "490 MB" in info["died"]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(KEEP)


def test_so_many_decisions_truncate() -> None:
    env = begun(decisions=3)
    assert [env.step(KEEP)[3] for _ in range(3)] == [False, False, True]


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(PipelineError, match="no family 'wlid'"):
        PipelineEnv("wlid")
    many = replace(PLAIN, stages=(*PLAIN.stages, *(SimStage(f"more{n}") for n in range(11))))
    with pytest.raises(ValueError, match="plain has 13 stages, but there are places for 12"):
        begun(many)


def test_without_gymnasium_the_extra_is_named() -> None:
    with mock.patch.dict(sys.modules, {"gymnasium": None}):
        sys.modules.pop("intune.sim.env", None)
        with pytest.raises(ModuleNotFoundError, match=r'needs gymnasium: pip install "intune\[sim\]"'):
            import intune.sim.env  # noqa: F401
