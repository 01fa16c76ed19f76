from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune.sim import HELD_OUT, train_dqn  # noqa: E402
from intune.sim.families import scenario  # noqa: E402
from intune.sim.networks import layers_of, rectified  # noqa: E402
from intune.sim.train_dqn import Games, Learner, Options, Replay, main, train  # noqa: E402
from intune.tuners import DQN, _weights  # noqa: E402
from intune.tuners.dqn import ACTIONS, FIGURES, FORMAT, SIZES  # noqa: E402

TINY = Options(scenarios=1, environments=8, decisions=10, steps=40, batch=32, replay=500, copied_every=10)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More of them only get into each other's way in networks so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(some: list[tuple[np.ndarray, np.ndarray]], others: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    return all((a == b).all() for one, two in zip(some, others, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_the_seed_decides() -> None:
    first, told = train(TINY), []
    assert same(first, train(replace(TINY, steps=40), told.append))
    assert not same(first, train(replace(TINY, seed=1)))
    assert [matrix.shape for matrix, _ in first] == list(pairwise(SIZES))
    assert told == []  # shorter than what lies between two lines


@pytest.mark.slow
def test_the_command_writes_a_file_that_the_tuner_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_dqn, "Options", lambda *given, **named: replace(TINY, steps=named.get("steps", 40)))
    main(["--out", str(tmp_path / "dqn.npz"), "--seed", "3", "--steps", "12"])
    DQN(tmp_path / "dqn.npz")
    with pytest.raises(SystemExit):
        main(["--seed", "3"])


@pytest.mark.slow
def test_nothing_is_ever_drawn_from_families_that_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()

    def noted(family: str, seed: int) -> object:
        drawn.add(family)
        return scenario(family, seed)

    monkeypatch.setattr(train_dqn, "scenario", noted)
    Games(TINY, np.random.default_rng(0))
    assert drawn
    assert not drawn & set(HELD_OUT)


@pytest.mark.slow
def test_games_pay_for_throughput_and_free_memory_and_keep_to_the_budget() -> None:
    games = Games(replace(TINY, environments=32), np.random.default_rng(1))
    for _ in range(15):
        told, may = games.look()
        assert told.shape == (32, FIGURES)
        assert may.shape == (32, ACTIONS)
        assert may[:, 0].all()
        assert np.isfinite(told).all()
        assert ((told >= 0) & (told <= 1)).all()
        shares = told[:, 1:-2:3]
        stages = told[:, :-2:3].sum(1)
        assert (shares.sum(1) <= np.maximum(1, stages * shares.max(1)) + 1e-9).all()
        reward, over = games.step(may.argmax(1))
        assert ((reward >= 0) & (reward <= train_dqn.MOST_REWARD)).all()
        assert (reward[over] == 0).all()
    assert reward.max() > 0.3


def test_the_replay_forgets_the_oldest() -> None:
    replay = Replay(4)
    for number in range(3):
        came = np.full((2, FIGURES), number, float)
        may, over = np.ones((2, ACTIONS), bool), np.array([False, True])
        replay.add(came, np.array([number, number]), np.array([0.0, 1.0]), came + 0.5, may, over)
        assert replay.count == min(4, 2 * number + 2)
    came, action, reward, to, may, over = replay.some(np.random.default_rng(0), 50)
    assert set(action.tolist()) == {1, 2}
    assert (came[:, 0] == action).all()
    assert (to == came + 0.5).all()
    assert (over == (reward == 1)).all()


@pytest.mark.slow
def test_it_learns_that_one_action_is_worth_more_and_what_is_not_allowed_is_worth_nothing() -> None:
    """A game of one state: action 3 pays 1, others 0; action 5 is never allowed, whatever the network thinks of it."""
    options = replace(TINY, steps=1000, updates=1, rate=3e-3, discount=0.5, copied_every=20)
    learner, random = Learner(options), np.random.default_rng(0)
    state, may = torch.ones(64, FIGURES), torch.ones(64, ACTIONS, dtype=torch.bool)
    may[:, 5] = False
    with torch.no_grad():
        learner.network[-1].bias[5] = 50.0
    for _ in range(600):
        action = torch.from_numpy(random.choice([n for n in range(ACTIONS) if n != 5], 64))
        learner.update(state, action, (action == 3).float(), state, may, torch.zeros(64, dtype=torch.bool))
    with torch.no_grad():
        values = learner.network(state[:1])[0]
    assert learner.act(np.ones((1, FIGURES)), may[:1].numpy()).tolist() == [3]
    assert float(values[3]) == pytest.approx(2.0, abs=0.2)  # 1 + 1/2 + 1/4 ...
    assert float(values[4]) == pytest.approx(1.0, abs=0.2)


def test_numpy_and_torch_say_the_same(tmp_path: Path) -> None:
    network = rectified(SIZES)
    _weights.write(tmp_path / "w.npz", FORMAT, layers_of(network))
    shown = np.random.default_rng(0).random((5, FIGURES))
    with torch.no_grad():
        wanted = network(torch.from_numpy(np.float32(shown))).numpy()
    assert _weights.forward(_weights.read(tmp_path / "w.npz", FORMAT, SIZES), shown) == pytest.approx(wanted, abs=1e-5)
