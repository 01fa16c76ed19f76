"""Trains the network of the tuner `learned-model`: python -m intune.sim.train_learned_model --out FILE --seed 0.

Pipelines of the trained families run in the discrete-event level under allocations drawn at random, each for a few
windows. From what was seen of a stage up to one window, the network learns to predict what its items take in the next
ones, by how many are at work: a regression, in logarithms, on what windows said and never on what a scenario holds.

Needs torch. About four minutes on one core; the same seed gives the same weights on the same machine and versions.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune._errors import PipelineError
from intune._values import CROWDS, Allocation, Budget, Snapshot
from intune.sim.families import TRAINED, scenario
from intune.sim.networks import layers_of, rectified
from intune.sim.play import play
from intune.sim.scenario import Scenario
from intune.tuners import _weights
from intune.tuners._rows import most_useful
from intune.tuners._trials import Ramp
from intune.tuners.learned_model import FORMAT, LEAST, MOST, SIZES, History, points_of
from intune.tuners.view import Floats

CERTAIN = 10
"""Items from which on a mean of them counts in full."""


@dataclass(frozen=True, slots=True)
class Options:
    """How it is trained.

    Attributes:
        seed: Of everything that is drawn.
        scenarios: Pipelines of each family, seeds from 0 on.
        decisions: Windows of each.
        ahead: Windows from which what is to be predicted is taken.
        rounds: How often all samples are gone through.
        batch: Samples that a step learns from.
        noise: Deviation of what is added to all that it is told, so that it does not learn single samples by heart.
        rate: Learning rate at the start; it falls to a hundredth, linearly.
        decay: Of the weights.
        tested: One seed of so many is not learnt from, in any family, but tells how good the network is.
    """

    seed: int = 0
    scenarios: int = 24
    decisions: int = 14
    ahead: int = 8
    rounds: int = 8
    batch: int = 512
    noise: float = 0.1
    rate: float = 2e-3
    decay: float = 1e-3
    tested: int = 8


class Wanderer:
    """Draws an allocation now and then, and keeps what it was shown.

    Attributes:
        seen: All windows, with the budgets that held.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ramp = Ramp()
        self._now: dict[str, int | None] = {}
        self.seen: list[tuple[Snapshot, Budget]] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """At first what the tuner begins with; then, every other time, anything for some of the stages."""
        self.seen.append((snapshot, budget))
        opened: dict[str, int | None] = dict.fromkeys(stage.name for stage in snapshot.stages)
        if ramped := self._ramp.levels(snapshot, budget, {}, frozenset()):
            return Allocation(opened | ramped, budget.cpus)
        self._now = self._now or opened
        if self._random.random() < 1 / 2:
            for stage in snapshot.stages:
                if self._random.random() < 0.6:
                    level = round(most_useful(stage.info, budget) ** self._random.random())
                    self._now[stage.name] = self._random.choice((None, level, level))
        return Allocation(dict(self._now), budget.cpus)


class Samples(NamedTuple):
    """What the network learns from.

    Attributes:
        told: float32[n, SIZES[0]]; what it is told.
        at_once: float32[n]; with how many at work it has to predict.
        answer: float32[n]; the right answer, the logarithm of the seconds over the mean.
        weight: float32[n]; how much that counts, up to 1.
    """

    told: npt.NDArray[np.float32]
    at_once: npt.NDArray[np.float32]
    answer: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32]


def samples(drawn: Scenario, options: Options) -> Samples:
    """All samples of one run."""
    wanderer = Wanderer(options.seed + drawn.seed)
    play(drawn, wanderer, options.decisions)
    told: list[Floats] = []
    asked: list[tuple[float, float, float]] = []
    for place in range(len(drawn.stages)):
        windows = [(snapshot.stages[place], snapshot, budget) for snapshot, budget in wanderer.seen]
        points = [points_of(stage) for stage, *_ in windows]
        history = History()
        for number, window in enumerate(windows):
            history.add(*window)
            later = itertools.chain.from_iterable(points[number + 1 : number + 1 + options.ahead])
            if not history.seconds or not (merged := _merged(later)):
                continue
            told += [history.features()] * len(merged)
            asked += [
                (CROWDS[crowd], np.log(seconds / history.seconds), min(items, CERTAIN) / CERTAIN)
                for crowd, (items, seconds) in merged.items()
            ]
    columns = np.array(asked, np.float32).reshape(-1, 3).T
    return Samples(np.array(told, np.float32).reshape(-1, SIZES[0]), *columns)


def _merged(points: itertools.chain[tuple[int, int, float]]) -> dict[int, tuple[int, float]]:
    """By place in `CROWDS`, all items and their mean seconds."""
    found: dict[int, tuple[int, float]] = {}
    for place, items, seconds in points:
        before, mean = found.get(place, (0, 0.0))
        found[place] = before + items, mean + (seconds - mean) * items / (before + items)
    return found


def train(options: Options, told: Callable[[str], None] = lambda line: None) -> list[tuple[Floats, Floats]]:
    """Train one.

    Args:
        options: How.
        told: Called with a line now and then.

    Returns:
        Matrix and bias of each layer.

    Raises:
        PipelineError: If there are too few scenarios to learn from some and test with others.
    """
    if options.scenarios < 2:
        raise PipelineError(
            f"scenarios is {options.scenarios}, must be at least 2: one to learn from, one to test with"
        )
    runs: tuple[list[Samples], list[Samples]] = [], []
    for seed in range(options.scenarios):
        runs[bool(seed % options.tested)].extend(samples(scenario(family, seed), options) for family in TRAINED)
    tested, learnt = map(_joined, runs)
    told(f"{len(learnt[0])} samples to learn from, {len(tested[0])} to test with")
    torch.manual_seed(options.seed)
    network = _made()
    with torch.no_grad():
        told(f"off by {_loss(torch.zeros(len(tested[0])), tested):.4f} where nothing depends on how many are at work")
    steps = options.rounds * -(-len(learnt[0]) // options.batch)
    optimizer = torch.optim.AdamW(network.parameters(), options.rate, weight_decay=options.decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for number in range(options.rounds):
        order = torch.randperm(len(learnt[0]))
        for first in range(0, len(order), options.batch):
            shown, *asked = (each[order[first : first + options.batch]] for each in learnt)
            some = shown + options.noise * torch.randn_like(shown), *asked
            optimizer.zero_grad()
            _loss(_predicted(network, some), some).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            told(f"round {number + 1} of {options.rounds}, off by {_loss(_predicted(network, tested), tested):.4f}")
    return layers_of(network)


def _joined(runs: Sequence[Samples]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.concatenate(columns)) for columns in zip(*runs, strict=True))


def _made() -> nn.Sequential:
    network = rectified(SIZES)
    last = network[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.bias.copy_(torch.tensor([0.0, -4.0, -7.0]))  # nearly flat to begin with
    return network


def _predicted(network: nn.Module, some: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logarithm of the predicted seconds over the mean."""
    told, at_once, *_ = some
    within = network(told).clamp(torch.from_numpy(np.float32(LEAST)), torch.from_numpy(np.float32(MOST)))
    base, slope, bend = within.unbind(1)
    seconds: torch.Tensor = base + torch.log1p(slope.exp() * (at_once - 1) + bend.exp() * at_once * (at_once - 1))
    return seconds


def _loss(predicted: torch.Tensor, some: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean distance, squared where it is small: a few windows are far off for reasons of their own."""
    *_, answer, weight = some
    each = nn.functional.huber_loss(predicted, answer, reduction="none", delta=0.3)
    mean: torch.Tensor = (each * weight).sum() / weight.sum()
    return mean


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m intune.sim.train_learned_model", description="Train the tuner learned-model."
    )
    parser.add_argument("--out", type=Path, required=True, help="file that the weights are written to (.npz)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--scenarios", type=int, default=Options().scenarios, help="pipelines of each family")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is too small for more to be of use
    _weights.write(given.out, FORMAT, train(Options(given.seed, scenarios=given.scenarios), print))


if __name__ == "__main__":
    main()
