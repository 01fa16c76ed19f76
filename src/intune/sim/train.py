"""Trains the agent's weights on simulated pipelines: a branching duelling double Q-network, in one file to be read.

Many environments of the fluid level go on side by side. Each decision of each of them is kept with what followed, and
batches of those are learned from:

* state: the features of `intune.tuners.agent.Senses`, which live use computes by the same code;
* action: one of `ACTIONS` for each stage, drawn at random with a chance that falls, else the best by the weights so far;
* reward: log(rate / best static rate at the start) - 0.1 x memory share, at least -3; a death counts -5 and ends the
  episode;
* the value of a decision is the mean of its stages' (Tavakoli et al. 2018), the target two steps ahead by the double
  rule (van Hasselt et al. 2016).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune.sim.families import TRAINED, scenario
from intune.sim.fluid import Fluid
from intune.sim.scenario import Scenario
from intune.tuners.agent import ACTIONS, GLOBAL_FEATURES, STAGE_FEATURES, Seen, Senses
from intune.tuners.view import Floats

STAGES = 8
"""Columns: no trained family has more stages."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        seed: Of scenarios, weights and exploration.
        environments: Side by side.
        scenarios: Different ones to draw from.
        wild: Share of these from the family "wild"; the others in equal parts.
        episode: Decisions of an episode.
        rounds: Decisions of each environment in all.
        hidden: Width of the layers.
        discount: A decision later.
        rate: Learning rate at the start; it falls to a tenth.
        batch: Decisions a batch.
        batches: Batches a round.
        replay: Rounds that are kept.
        polyak: How fast the target weights follow.
        explore: Chance of a random action of a stage, at the start and at the end.
    """

    seed: int = 0
    environments: int = 256
    scenarios: int = 2048
    wild: float = 0.5
    episode: int = 60
    rounds: int = 6000
    hidden: int = 64
    discount: float = 0.93
    rate: float = 7e-4
    batch: int = 256
    batches: int = 2
    replay: int = 600
    polyak: float = 0.005
    explore: tuple[float, float] = (0.5, 0.02)


class Network(nn.Module):
    """The network of `intune.tuners.agent.scores`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                "in": nn.Linear(STAGE_FEATURES + GLOBAL_FEATURES, hidden),
                "mid": nn.Linear(hidden, hidden),
                "pool": nn.Linear(2 * hidden, hidden),
                "value": nn.Linear(hidden, 1),
                "out": nn.Linear(3 * hidden, hidden),
                "adv": nn.Linear(hidden, len(ACTIONS)),
            }
        )

    def forward(self, stages: torch.Tensor, whole: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Values [B, S, A] of features [B, S, F], [B, G] and present bool[B, S]."""
        beside = whole[:, None].expand(-1, stages.shape[1], -1)
        hidden = torch.relu(self.layers["in"](torch.cat([stages, beside], -1)))
        hidden = torch.relu(self.layers["mid"](hidden)) * present[..., None]
        pool = torch.cat([hidden.sum(1) / present.sum(1, keepdim=True), hidden.amax(1)], -1)
        value = self.layers["value"](torch.relu(self.layers["pool"](pool)))
        around = pool[:, None].expand(-1, stages.shape[1], -1)
        advantages = self.layers["adv"](torch.relu(self.layers["out"](torch.cat([hidden, around], -1))))
        found: torch.Tensor = value[:, None] + advantages - advantages.mean(-1, keepdim=True)
        return found

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """By the names that the agent loads."""
        found = {}
        for name, layer in self.layers.items():
            assert isinstance(layer, nn.Linear)
            found[f"{name}.w"] = layer.weight.detach().numpy().T.copy()
            found[f"{name}.b"] = layer.bias.detach().numpy().copy()
        return found


class Replay:
    """The last rounds of all environments."""

    def __init__(self, rounds: int, environments: int) -> None:
        shape = (rounds, environments)
        self.stages = np.zeros((*shape, STAGES, STAGE_FEATURES), np.float16)
        self.whole = np.zeros((*shape, GLOBAL_FEATURES), np.float16)
        self.present = np.zeros((*shape, STAGES), np.bool_)
        self.actions = np.zeros((*shape, STAGES), np.int64)
        self.rewards = np.zeros(shape, np.float32)
        self.ends = np.zeros(shape, np.bool_)
        self.cuts = np.zeros(shape, np.bool_)
        self.round = 0

    def add(self, seen: Seen, actions: npt.NDArray[np.int64]) -> int:
        """A decision of each environment; its place, for `follow`."""
        at = self.round % len(self.rewards)
        self.stages[at], self.whole[at], self.present[at], self.actions[at] = (
            seen.stages,
            seen.whole,
            seen.present,
            actions,
        )
        self.round += 1
        return at

    def follow(self, at: int, rewards: Floats, ends: npt.NDArray[np.bool_], cuts: npt.NDArray[np.bool_]) -> None:
        """What came of it: `ends` after a death, `cuts` where another episode follows."""
        self.rewards[at], self.ends[at], self.cuts[at] = rewards, ends, cuts

    def draw(self, random: np.random.Generator, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(round, environment) of decisions that have two rounds after them."""
        size = len(self.rewards)
        have = min(self.round - 1, size - 1)
        back = random.integers(3, have, count)
        return (self.round - back) % size, random.integers(0, self.rewards.shape[1], count)


def pool(recipe: Recipe, random: np.random.Generator) -> list[Scenario]:
    """Scenarios to train on; `HELD_OUT` families are never among them."""
    others = [family for family in TRAINED if family != "wild"]
    families = [
        "wild" if random.random() < recipe.wild else str(random.choice(others)) for _ in range(recipe.scenarios)
    ]
    return [scenario(family, 1_000_000 + recipe.seed * 100_000 + number) for number, family in enumerate(families)]


def best_rates(scenarios: Sequence[Scenario], seed: int) -> Floats:
    """float[n]: about the best static rate of each, before anything changes."""
    found = []
    for start in range(0, len(scenarios), 512):
        part = list(scenarios[start : start + 512])
        found.append(Fluid(part, seed, stages=STAGES).best(sweeps=1)[2])
    return np.maximum(np.concatenate(found), 1e-9)


def train(recipe: Recipe, tell: Callable[[str], None] = lambda line: None) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for `intune.tuners.agent.Agent`.

    Args:
        recipe: How.
        tell: Called now and then with a line about how far it is.
    """
    torch.manual_seed(recipe.seed)
    random = np.random.default_rng(recipe.seed)
    scenarios = pool(recipe, random)
    bests = best_rates(scenarios, recipe.seed)
    network, target = Network(recipe.hidden), Network(recipe.hidden)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, recipe.rounds)
    count = recipe.environments
    chosen = random.integers(0, len(scenarios), count)
    fluid = Fluid([scenarios[n] for n in chosen], recipe.seed, stages=STAGES)
    senses = Senses(count, STAGES)
    best = bests[chosen]
    age = random.integers(0, recipe.episode, count)  # so that not all episodes end at once
    window = fluid.step(np.full((count, STAGES), np.inf), fluid.budget()).unmeasured()
    replay = Replay(recipe.replay, count)
    recent: list[float] = []
    for number in range(recipe.rounds):
        seen = senses.look(window)
        share = number / recipe.rounds
        chance = recipe.explore[1] + (recipe.explore[0] - recipe.explore[1]) * max(0.0, 1 - 2 * share)
        actions = _act(network, seen, random, chance)
        at = replay.add(seen, actions)
        asked = np.take_along_axis(seen.options, actions[..., None], -1)[..., 0]
        senses.decided(window, asked)
        slots = fluid.budget()
        window = fluid.step(asked, slots)
        rate = np.nan_to_num(window.rate)
        rewards = np.maximum(np.log(np.maximum(rate, 1e-9) / best), -3) - 0.1 * np.nan_to_num(window.memory)
        dead = ~fluid.alive
        rewards = np.where(dead, -5.0, rewards)
        age += 1
        over = dead | (age >= recipe.episode)
        replay.follow(at, rewards, dead, over)
        recent.append(float(rewards[~dead].mean()))
        if over.any():
            rows = np.nonzero(over)[0]
            drawn = random.integers(0, len(scenarios), len(rows))
            fluid.reset(rows, [scenarios[n] for n in drawn])
            senses.reset(rows)
            best[rows], age[rows] = bests[drawn], 0
            fresh = Fluid([scenarios[n] for n in drawn], number, stages=STAGES)
            window.put(rows, fresh.step(np.full((len(rows), STAGES), np.inf), fresh.budget()).unmeasured())
        if replay.round > 20:
            for _ in range(recipe.batches):
                _learn(network, target, optimizer, replay, random, recipe)
        schedule.step()
        if number % 200 == 199:
            tell(
                f"round {number + 1} of {recipe.rounds}: mean reward {np.mean(recent[-200:]):.3f}, chance {chance:.2f}"
            )
    return network.weights()


def _act(network: Network, seen: Seen, random: np.random.Generator, chance: float) -> npt.NDArray[np.int64]:
    with torch.no_grad():
        values = network(torch.from_numpy(seen.stages), torch.from_numpy(seen.whole), torch.from_numpy(seen.present))
    best = values.argmax(-1).numpy()
    explores = random.random(best.shape) < chance * (random.random((len(best), 1)) < 0.7)
    return np.asarray(np.where(explores, random.integers(0, len(ACTIONS), best.shape), best))


def _learn(
    network: Network,
    target: Network,
    optimizer: torch.optim.Optimizer,
    replay: Replay,
    random: np.random.Generator,
    recipe: Recipe,
) -> None:
    at, env = replay.draw(random, recipe.batch)
    size = len(replay.rewards)
    second, third = (at + 1) % size, (at + 2) % size

    def features(place: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.from_numpy(replay.stages[place, env].astype(np.float32)),
            torch.from_numpy(replay.whole[place, env].astype(np.float32)),
            torch.from_numpy(replay.present[place, env]),
        )

    stops = torch.from_numpy(replay.cuts[at, env])
    with torch.no_grad():
        # After the first step where another episode follows, else after the second.
        ahead = [
            torch.where(stops.view(-1, *[1] * (a.dim() - 1)), a, b)
            for a, b in zip(features(second), features(third), strict=True)
        ]
        choice = network(*ahead).argmax(-1, keepdim=True)
        values = _mean(target(*ahead).gather(-1, choice)[..., 0], ahead[2])
        one, two = (torch.from_numpy(replay.rewards[place, env]) for place in (at, second))
        ended = torch.from_numpy(replay.ends[at, env])
        ended2 = torch.from_numpy(replay.ends[second, env]) & ~stops
        cut2 = torch.from_numpy(replay.cuts[second, env]) & ~stops
        later = two + recipe.discount * values * ~(ended2 | cut2)
        wanted = one + recipe.discount * torch.where(stops, torch.zeros_like(values), later)
    known = ~(stops & ~ended) & ~(cut2 & ~ended2)
    here = features(at)
    found = network(*here).gather(-1, torch.from_numpy(replay.actions[at, env])[..., None])[..., 0]
    error = nn.functional.smooth_l1_loss(_mean(found, here[2]), wanted, reduction="none")
    loss = (error * known).sum() / known.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 5.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, recipe.polyak)


def _mean(values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    return (values * present).sum(1) / present.sum(1)
