"""Trains the network of the tuner `dqn`: python -m intune.sim.train_dqn --out FILE --seed 0.

Plain deep Q-learning (Mnih et al., Nature 2015): one network that acts, a copy of it as the target, replayed
transitions, fewer random actions as it goes on. Pipelines are of the trained families, in the fluid level.

The reward is the throughput, as a share of what a search finds possible on the pipeline at its start, times the share
of the memory that is free. As a share of the best seen so far, doing nothing would always be worth most; a share of
what is possible differs from the rate itself only by a factor that is fixed for each pipeline.

Needs torch. About two minutes on one core; the same seed gives the same weights on the same machine and versions.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune.sim.families import TRAINED, scenario
from intune.sim.fluid import Fluid
from intune.sim.networks import layers_of, rectified
from intune.tuners import _weights
from intune.tuners.dqn import (
    ACTIONS,
    FIGURES,
    FORMAT,
    PLACES,
    SIZES,
    allowed,
    best_action,
    even_split,
    figures,
    is_split,
    moved,
)
from intune.tuners.view import Bools, Floats

Ints = npt.NDArray[np.int64]
MOST_REWARD = 1.5
"""What a throughput counts at most: after a change for the better it may be far above what was possible before."""


@dataclass(frozen=True, slots=True)
class Options:
    """How it is trained.

    Attributes:
        seed: Of everything that is drawn.
        scenarios: Pipelines of each family, seeds from 0 on.
        environments: Pipelines that run at once.
        decisions: Decisions of an episode.
        steps: Decisions of each environment in all.
        replay: Transitions that are remembered.
        batch: Transitions that an update learns from.
        updates: Updates after each step of all environments.
        rate: Learning rate at the start; it falls to a tenth, linearly.
        discount: Weight of the future.
        copied_every: Updates after which the target becomes the network.
        random_until: Share of the steps over which random actions become fewer, from all to `random_least`.
        random_least: Share of them from then on.
    """

    seed: int = 0
    scenarios: int = 48
    environments: int = 128
    decisions: int = 60
    steps: int = 5000
    replay: int = 200_000
    batch: int = 256
    updates: int = 2
    rate: float = 1e-3
    discount: float = 0.95
    copied_every: int = 500
    random_until: float = 0.4
    random_least: float = 0.05


class Games:
    """Pipelines that are steered side by side, each from an even split on; all are drawn anew at once."""

    def __init__(self, options: Options, random: np.random.Generator) -> None:
        self._options, self._random = options, random
        self._pool = [scenario(family, seed) for family in TRAINED for seed in range(options.scenarios)]
        fluid = Fluid(self._pool, options.seed, PLACES)
        self._possible = fluid.best(sweeps=1)[2]
        self._begun = fluid.step(np.ones(fluid.shape), np.ones(len(self._pool)))
        self.begin()

    def begin(self) -> None:
        """Draw new ones and let an interval of them pass."""
        self._playing = self._random.integers(0, len(self._pool), self._options.environments)
        chosen = [self._pool[each] for each in self._playing]
        self._fluid = Fluid(chosen, int(self._random.integers(2**31)), PLACES)
        self.alive = self._fluid.alive.copy()
        self._best = np.zeros(len(chosen))
        self._pass(even_split(self._begun)[self._playing], self._begun.cpus[self._playing])

    def look(self) -> tuple[Floats, Bools]:
        """What the network sees, and what is allowed."""
        return figures(self._seen, self._best), allowed(self._seen)

    def step(self, action: Ints) -> tuple[Floats, Bools]:
        """Take a decision in each: the reward, and for which of them that was the end."""
        split = np.where(is_split(self._seen)[:, None], moved(self._seen, action), even_split(self._seen))
        self._pass(split, self._seen.cpus)
        reward = np.minimum(np.nan_to_num(self._seen.rate) / self._possible[self._playing], MOST_REWARD)
        reward *= 1 - np.clip(np.nan_to_num(self._seen.memory), 0.0, 1.0)
        dead, self.alive = self.alive & ~self._fluid.alive, self._fluid.alive.copy()
        return np.where(self.alive, reward, 0.0), dead

    def _pass(self, split: Floats, slots: Floats) -> None:
        self._seen = self._fluid.step(np.nan_to_num(split, nan=1.0), slots)
        self._best = np.maximum(self._best, np.nan_to_num(self._seen.rate))


class Replay:
    """The newest transitions, each with the figures and the allowed actions that it led to."""

    def __init__(self, size: int) -> None:
        self._from, self._to = (np.zeros((size, FIGURES), np.float32) for _ in range(2))
        self._action, self._reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self._may, self._over = np.zeros((size, ACTIONS), np.bool_), np.zeros(size, np.bool_)
        self._next = self.count = 0

    def add(self, came: Floats, action: Ints, reward: Floats, to: Floats, may: Bools, over: Bools) -> None:
        """Remember transitions, in place of the oldest if it is full."""
        places = (self._next + np.arange(len(action))) % len(self._action)
        self._from[places], self._action[places], self._reward[places] = came, action, reward
        self._to[places], self._may[places], self._over[places] = to, may, over
        self._next = (self._next + len(action)) % len(self._action)
        self.count = min(len(self._action), self.count + len(action))

    def some(self, random: np.random.Generator, number: int) -> tuple[torch.Tensor, ...]:
        """So many of them, drawn."""
        rows = random.integers(0, self.count, number)
        arrays = self._from, self._action, self._reward, self._to, self._may, self._over
        return tuple(torch.from_numpy(each[rows]) for each in arrays)


class Learner:
    """The network that acts, its target, and what moves it."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self._options, self._updates = options, 0
        self.network, self._target = rectified(SIZES), rectified(SIZES)
        self._target.load_state_dict(self.network.state_dict())
        self._optimizer = torch.optim.Adam(self.network.parameters(), options.rate)
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1.0, 0.1, max(1, options.steps * options.updates)
        )

    def act(self, seen: Floats, may: Bools) -> Ints:
        """The actions that it thinks best."""
        with torch.no_grad():
            return best_action(self.network(torch.from_numpy(np.float32(seen))).numpy(), may)

    def update(self, came: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, *led_to: torch.Tensor) -> None:
        """One step towards the reward plus what the target thinks of what comes then."""
        to, may, over = led_to
        with torch.no_grad():
            best = self._target(to).masked_fill(~may, -torch.inf).max(1).values
            wanted = reward + self._options.discount * best * ~over
        thought = self.network(came).gather(1, action[:, None])[:, 0]
        self._optimizer.zero_grad()
        nn.functional.smooth_l1_loss(thought, wanted).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        self._updates += 1
        if self._updates % self._options.copied_every == 0:
            self._target.load_state_dict(self.network.state_dict())


def train(options: Options, told: Callable[[str], None] = lambda line: None) -> list[tuple[Floats, Floats]]:
    """Train one.

    Args:
        options: How.
        told: Called with a line now and then.

    Returns:
        Matrix and bias of each layer.
    """
    random = np.random.default_rng(options.seed)
    games, learner, replay = Games(options, random), Learner(options), Replay(options.replay)
    earned: list[float] = []
    for number in range(options.steps):
        if number and number % options.decisions == 0:
            games.begin()
        came, may = games.look()
        share = max(options.random_least, 1 - number / max(1.0, options.random_until * options.steps))
        action = learner.act(came, may)
        drawn = best_action(random.random(may.shape), may)
        action = np.where(random.random(len(action)) < share, drawn, action)
        alive = games.alive
        reward, over = games.step(action)
        to, may = games.look()
        replay.add(came[alive], action[alive], reward[alive], to[alive], may[alive], over[alive])
        earned.append(float(reward.mean()))
        if replay.count >= options.batch:
            for _ in range(options.updates):
                learner.update(*replay.some(random, options.batch))
        if (number + 1) % 500 == 0:
            told(f"{number + 1} of {options.steps} steps, reward {np.mean(earned[-500:]):.4f}, random {share:.2f}")
    return layers_of(learner.network)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says and write the file."""
    parser = argparse.ArgumentParser(prog="python -m intune.sim.train_dqn", description="Train the tuner dqn.")
    parser.add_argument("--out", type=Path, required=True, help="file that the weights are written to (.npz)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--steps", type=int, default=Options().steps, help="decisions of each of the pipelines")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is too small for more to be of use
    _weights.write(given.out, FORMAT, train(Options(given.seed, steps=given.steps), print))


if __name__ == "__main__":
    main()
