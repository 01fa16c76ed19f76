"""Trains the agent's weights: Q-learning in simulated time, in one file to be read from top to bottom.

* *Where.* The discrete-event level, whose windows are made by the loader's own engine, so that the agent is trained on
  what it will see. Scenarios come from `TRAINED`, half of them from "wild"; `HELD_OUT` is never touched.
* *State, action*: `intune.tuners.agent`, by the code that decides in a real run. What was executed after clamp and
  guard is learned from, not what was asked for.
* *Reward*: what flowed through the stages, less what flowed in the same seconds of the same scenario under the fitted
  model alone, in seconds of the model's mean speed. The costs of items are the same in both runs, so that most
  of the noise falls out; it needs no oracle; and the value of following the model is near 0 by construction. A little
  is taken off for each change and each process. A death costs `DEATH` and ends the episode.
* *Time.* A decision lasts until the next one; a second later counts `Recipe.discount` (semi-Markov). Rewards of
  `Recipe.steps` decisions are summed before a value stands for the rest.
* *Learning*: several networks side by side, each with weights, a target network and a part of the episodes of its own,
  those of all rounds so far. The target evaluates the policy that will be used, caution included, so that nothing is
  hoped for that would not be done.
* *Exploring*: in some episodes one of the networks decides alone (bootstrapped DQN, Osband et al. 2016); in all
  of them, stages do something else by chance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune.sim.explore import Episode, Job, Recipe, play_job
from intune.sim.families import TRAINED
from intune.sim.workers import carry_out
from intune.tuners._senses import ACTIONS, GLOBAL_FEATURES, STAGE_FEATURES
from intune.tuners.agent import CAUTION, LEAST_GAIN

HEARD = 0.7
"""Share of the episodes that each network learns from."""

FIRST_SEED = 1_000_000
"""Scenarios of lower seeds are for comparisons."""


class Networks(nn.Module):
    """Several networks of `intune.tuners.agent.gains` at once, with the value of following the model beside them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, count = recipe.hidden, recipe.networks
        shapes = {
            "in": (STAGE_FEATURES + GLOBAL_FEATURES, width),
            "mid": (width, width),
            "out": (3 * width, width),
            "gain": (width, len(ACTIONS)),
            "pool": (2 * width, width),
            "value": (width, 1),
        }
        self.layers = nn.ParameterDict()
        for name, (inputs, outputs) in shapes.items():
            weight = torch.randn(count, inputs, outputs) * (2 / inputs) ** 0.5
            # Follows the model at first: no action gains anything.
            self.layers[f"{name}_w"] = nn.Parameter(weight * (0.01 if name in ("gain", "value") else 1.0))
            self.layers[f"{name}_b"] = nn.Parameter(torch.zeros(count, 1, outputs))

    def forward(
        self, stages: torch.Tensor, whole: torch.Tensor, present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gains [K, B, S, A] and values [K, B] of [K, B, S, F], [K, B, G] and bool[K, B, S]."""
        networks, batch, count, _ = stages.shape
        beside = whole[:, :, None].expand(-1, -1, count, -1)
        flat = torch.cat([stages, beside], -1).flatten(1, 2)
        hidden = torch.relu(self._layer("mid", torch.relu(self._layer("in", flat))))
        hidden = hidden.view(networks, batch, count, -1) * present[..., None]
        pool = torch.cat([hidden.sum(2) / present.sum(2, keepdim=True).clamp(min=1), hidden.amax(2)], -1)
        around = pool[:, :, None].expand(-1, -1, count, -1)
        last = torch.relu(self._layer("out", torch.cat([hidden, around], -1).flatten(1, 2)))
        gain = self._layer("gain", last).view(networks, batch, count, -1)
        value = self._layer("value", torch.relu(self._layer("pool", pool)))[..., 0]
        return gain - gain[..., :1], value

    def _layer(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.layers[f"{name}_b"], values, self.layers[f"{name}_w"])

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """By the names that the agent knows; the value is needed for training only."""
        names = ("in", "mid", "out", "gain")
        return {f"{n}.{k}": self.layers[f"{n}_{k}"].detach().numpy().copy() for n in names for k in ("w", "b")}


@dataclass
class Store:
    """All decisions so far, flat; the state after a decision stands one place after it.

    Attributes:
        networks: How many learn from it, each from a part of the episodes of its own.
        episodes: What was put in.
    """

    networks: int
    episodes: list[Episode] = field(default_factory=list)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Put more in."""
        self.episodes.extend(episodes)
        have = self.episodes
        self.stages, self.whole, self.allowed = (
            np.concatenate([getattr(each, name) for each in have]) for name in ("stages", "whole", "allowed")
        )
        starts = np.cumsum([0, *(len(each.whole) for each in have)])
        self.at = np.concatenate(
            [start + np.arange(len(each.rewards)) for start, each in zip(starts, have, strict=False)]
        )
        names = ("actions", "rewards", "seconds", "ahead", "ends")
        self.actions, self.rewards, self.seconds, self.ahead, self.ends = (
            np.concatenate([getattr(each, name) for each in have]) for name in names
        )
        hears = np.random.default_rng(0).random((len(have), self.networks)) < HEARD
        self.heard = np.repeat(hears, [len(each.rewards) for each in have], axis=0).T
        self.good = np.nonzero((self.actions >= 0).all(axis=1))[0]

    def state(self, places: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stages, whole and allowed at these places."""
        return (
            torch.from_numpy(self.stages[places].astype(np.float32)),
            torch.from_numpy(self.whole[places].astype(np.float32)),
            torch.from_numpy(self.allowed[places]),
        )


def train(
    recipe: Recipe, jobs: int = 1, tell: Callable[[str], None] = lambda line: None
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for `intune.tuners.Agent`.

    Args:
        recipe: How; the same gives the same weights on the same machine.
        jobs: Processes that play.
        tell: Called after each round with a line about how far it is.
    """
    torch.manual_seed(recipe.seed)
    random = np.random.default_rng(recipe.seed)
    networks, target = Networks(recipe), Networks(recipe)
    target.load_state_dict(networks.state_dict())
    optimizer = torch.optim.Adam(networks.parameters(), lr=recipe.rate)
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, recipe.rounds)
    store = Store(recipe.networks)
    for number in range(recipe.rounds):
        work = list(_drawn(recipe, number, random))
        with closing(carry_out(work, partial(play_job, recipe, networks.weights()), jobs)) as played:
            # In the order of seeds, whichever came first.
            episodes = [episode for found in sorted(played, key=_first_rewards) for episode in found]
        store.add(episodes)
        losses = [_learn(networks, target, optimizer, store, random, recipe) for _ in range(recipe.batches)]
        falls.step()
        gained = np.array([each.gained for each in episodes])
        tell(
            f"round {number + 1} of {recipe.rounds}: {len(store.at):,} decisions, rows against the model "
            f"{np.mean(gained):+.2%} (p10 {np.percentile(gained, 10):+.2%}, p90 {np.percentile(gained, 90):+.2%}), "
            f"loss {np.mean(losses):.4f}"
        )
    return networks.weights()


def _first_rewards(episodes: Sequence[Episode]) -> tuple[float, ...]:
    return tuple(float(each.rewards.sum()) for each in episodes)


def _drawn(recipe: Recipe, number: int, random: np.random.Generator) -> Iterator[Job]:
    """The scenarios of a round."""
    others = [family for family in TRAINED if family != "wild"]
    for place in range(recipe.scenarios):
        family = "wild" if random.random() < recipe.wild else str(random.choice(others))
        seed = FIRST_SEED * (1 + recipe.seed) + number * recipe.scenarios + place
        alone = random.integers(0, recipe.networks, recipe.episodes)
        networks = [int(k) if n == 1 else None for n, k in enumerate(alone)]
        yield Job(family, seed, tuple(networks))


def _learn(
    networks: Networks,
    target: Networks,
    optimizer: torch.optim.Optimizer,
    store: Store,
    random: np.random.Generator,
    recipe: Recipe,
) -> float:
    """One step of all networks, each on a minibatch of its own."""
    chosen = random.choice(store.good, recipe.batch)
    heard = torch.from_numpy(store.heard[:, chosen])
    here, there = store.state(store.at[chosen]), store.state(store.at[chosen] + store.ahead[chosen])
    with torch.no_grad():
        gain, _ = _of_all(networks, there)
        action = _policy(gain, there[2]).expand(recipe.networks, -1, -1)
        later = _worth(target, there, action)
        fading = torch.from_numpy(recipe.discount ** store.seconds[chosen] * ~store.ends[chosen])
        wanted = torch.from_numpy(store.rewards[chosen]) + fading * later
    taken = torch.from_numpy(store.actions[chosen].astype(np.int64)).expand(recipe.networks, -1, -1)
    errors = nn.functional.smooth_l1_loss(_worth(networks, here, taken), wanted, beta=0.3, reduction="none")
    loss = (errors * heard).sum() / heard.sum()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(networks.parameters(), 5.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), networks.parameters(), strict=True):
            slow.lerp_(fast, recipe.polyak)
    return loss.item()


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _of_all(networks: Networks, state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains and values by each network of the same states."""
    count = len(networks.layers["in_w"])
    stages, whole, allowed = (each.expand(count, *each.shape) for each in state)
    found: tuple[torch.Tensor, torch.Tensor] = networks(stages, whole, allowed.any(-1))
    return found


def _worth(networks: Networks, state: State, action: torch.Tensor) -> torch.Tensor:
    """float[K, B]; what following the model is worth, and what each stage gains by its action."""
    gain, value = _of_all(networks, state)
    return value + (gain.gather(-1, action[..., None])[..., 0] * state[2].any(-1)).sum(-1)


def _policy(gain: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """int[B, S]: what all networks together do there, as `Agent.choose`."""
    sure = gain.mean(0) - CAUTION * gain.std(0, correction=0)
    sure = sure.masked_fill(~allowed, -torch.inf)
    sure[..., 0] = LEAST_GAIN
    return sure.argmax(-1)
