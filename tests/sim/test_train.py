"""Training of the agent: what an episode says, what is learned from it, and that a seed decides."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from intune._values import Allocation, Budget, ConsumerSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.sim import Scenario, SimMachine, SimStage, play
from intune.sim.explore import CHANGE_COST, STAGES, Episode, Explorer, Job, Recipe, flow, play_job
from intune.testing import blank_snapshot
from intune.tuners._senses import ACTIONS, BEGINNING, GLOBAL_FEATURES, STAGE_FEATURES, Seen
from intune.tuners.agent import Agent, gains

torch = pytest.importorskip("torch")

from intune.sim.train import Networks, Store, _learn, train  # noqa: E402

TINY = Recipe(rounds=2, scenarios=2, episodes=2, decisions=6, networks=2, hidden=8, batch=16, batches=3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine threads of small sums wait for each other for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(recipe: Recipe = TINY) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    return Networks(recipe).weights()


def test_what_flows_is_counted_in_source_rows_over_all_stages() -> None:
    """A source of 64 rows an item; a batch of 128 that had none in this window; a map behind it that had one."""
    infos = [StageInfo("read", "source"), StageInfo("batch", "batch"), StageInfo("map", "map")]
    allocation = Allocation({info.name: None for info in infos}, 4)
    items = zip(infos, (3, 0, 1), (64.0, 128.0, 128.0), strict=True)
    stages = tuple(StageSnapshot(i, None, 0, items_out=n, source_rows_per_item=rows) for i, n, rows in items)
    assert flow(replace(blank_snapshot(infos, allocation), stages=stages)) == pytest.approx((3 * 64 + 0 + 128) / 3)


SHORT = replace(TINY, decisions=14, steps=3, discount=0.5)


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    found = play_job(SHORT, weights(), Job("bending", 1_000_003, (None, 1)))
    assert len(found) == 2
    return found


class TestEpisodes:
    recipe = SHORT

    def test_shapes(self, episodes: list[Episode]) -> None:
        for each in episodes:
            count = len(each.rewards)
            assert count == BEGINNING
            assert each.stages.shape == (count + 1, STAGES, STAGE_FEATURES)
            assert each.whole.shape == (count + 1, GLOBAL_FEATURES)
            assert each.allowed.shape == (count + 1, STAGES, len(ACTIONS))
            assert each.actions.shape == (count, STAGES)
            assert (each.ahead == np.minimum(self.recipe.steps, count - np.arange(count))).all()
            assert each.ends.tolist() == [False] * (count - 3) + [True] * 3

    def test_seconds_reach_to_the_decision_ahead(self, episodes: list[Episode]) -> None:
        # Decisions stand at 0, .25, .5, 1 s, then each second; after the last one it is counted to the end.
        for each in episodes:
            assert each.seconds.tolist() == pytest.approx([1, 1.75, 2.5, *[3.0] * 7, *[4.0, 3.0]], abs=0.01)

    def test_where_nothing_departs_there_is_nothing_gained(self) -> None:
        careful = replace(self.recipe, chances=(0.0,))
        (episode,) = play_job(careful, weights(), Job("clean", 1_000_001, (None,)))
        # Only changes cost a little, whoever makes them.
        assert episode.rewards.max() <= 0
        assert episode.rewards.min() > -SHORT.steps * STAGES * CHANGE_COST
        assert (episode.actions <= 0).all()
        assert episode.gained == 0

    def test_a_scenario_in_which_little_happens_teaches_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = Scenario("slow", (SimStage("read", "source", cpu_seconds=5.0), SimStage("map", cpu_seconds=5.0)))
        monkeypatch.setattr("intune.sim.explore.scenario", lambda family, seed: slow)
        assert play_job(TINY, weights(), Job("clean", 0, (None,))) == []


def test_what_was_executed_is_learned_from_not_what_was_asked_for() -> None:
    infos = [StageInfo("read", "source"), StageInfo("map", "map")]
    before = Allocation({"read": None, "map": 6}, 8)
    window = replace(blank_snapshot(infos, before), window_seconds=1.0)

    def executed(level: int) -> tuple[list[int | None], int]:
        explorer = Explorer(weights(), None, 1.0, np.random.default_rng(0))
        explorer.propose(window, Budget(8))
        # The guard made something else of it.
        explorer.propose(replace(window, allocation=Allocation({"read": None, "map": level}, 8)), Budget(8))
        first = explorer.decisions[0]
        return first.seen.options[1], int(first.actions[1])

    options, action = executed(3)
    assert action == ACTIONS.index("half")
    assert options[action] == 3
    assert executed(7)[1] == -1


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_chance_tries_only_what_differs_from_the_model(chance: float) -> None:
    infos = [StageInfo("read", "source", max_concurrency=1), StageInfo("map", "map")]
    window = replace(blank_snapshot(infos, Allocation({"read": None, "map": None}, 8)), window_seconds=1.0)
    explorer = Explorer(weights(), None, chance, np.random.default_rng(0))
    for _ in range(BEGINNING):
        explorer.propose(window, Budget(8))
    actions = np.array([each.actions for each in explorer.decisions])
    assert len(actions) == BEGINNING
    assert (actions[:, 0] <= 0).all()
    assert (actions[:, 1] != 0).any() == bool(chance)


def test_networks_follow_the_model_before_they_have_learned() -> None:
    scenario = Scenario("two", (SimStage("read", "source", cpu_seconds=0.01), SimStage("map", cpu_seconds=0.02)))
    scenario = replace(scenario, machine=SimMachine(cpus=4))
    alone, agent = play(scenario, "model", 8), play(scenario, Agent(weights()), 8)
    assert [each.rows for each in alone.intervals] == [each.rows for each in agent.intervals]


def test_networks_learn_what_gains() -> None:
    """Whoever doubles a stage gains a second, whoever opens it loses one."""
    recipe = replace(TINY, networks=3, hidden=16, batch=128, discount=0.5, rate=3e-3)
    random = np.random.default_rng(0)
    store = Store(recipe.networks)
    store.add([invented(random) for _ in range(60)])
    torch.manual_seed(0)
    networks, target = Networks(recipe), Networks(recipe)
    optimizer = torch.optim.Adam(networks.parameters(), lr=recipe.rate)
    for _ in range(200):
        _learn(networks, target, optimizer, store, random, recipe)
    blank = Seen(
        np.zeros((2, STAGE_FEATURES), np.float32),
        np.zeros(GLOBAL_FEATURES, np.float32),
        [[None] * len(ACTIONS)] * 2,
        np.ones((2, len(ACTIONS)), np.bool_),
    )
    found = gains(networks.weights(), blank).mean(axis=0)
    assert found[:, ACTIONS.index("twice the model's")] > 0.4
    assert found[:, ACTIONS.index("open")] < -0.4
    assert (Agent(networks.weights()).choose(blank) == ACTIONS.index("twice the model's")).all()


def invented(random: np.random.Generator, count: int = 20) -> Episode:
    actions = np.zeros((count, STAGES), np.int8)
    actions[:, :2] = random.integers(0, len(ACTIONS), (count, 2))
    worth = np.zeros(len(ACTIONS))
    worth[ACTIONS.index("twice the model's")], worth[ACTIONS.index("open")] = 1.0, -1.0
    allowed = np.zeros((count + 1, STAGES, len(ACTIONS)), np.bool_)
    allowed[:, :2] = True
    rewards = worth[actions[:, :2]].sum(axis=1).astype(np.float32)
    return Episode(
        np.zeros((count + 1, STAGES, STAGE_FEATURES), np.float16),
        np.zeros((count + 1, GLOBAL_FEATURES), np.float16),
        allowed,
        actions,
        rewards,
        np.full(count, 20.0, np.float32),
        np.ones(count, np.int64),
        np.zeros(count, np.bool_),
        0.0,
    )


@pytest.mark.slow
def test_a_seed_decides_and_processes_change_nothing() -> None:
    lines: list[str] = []
    one, other = train(TINY, tell=lines.append), train(TINY, jobs=2)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert len(lines) == TINY.rounds
    assert "against the model" in lines[-1]
    third = train(replace(TINY, seed=1))
    assert not np.array_equal(one["in.w"], third["in.w"])
    Agent(one)


def test_a_window_without_figures_flows_nothing() -> None:
    infos = [StageInfo("read", "source")]
    blank: Snapshot = blank_snapshot(infos, Allocation({"read": None}, 1))
    assert flow(replace(blank, consumer=ConsumerSnapshot(0, 0, None, 0.0))) == 0
