"""Trains the agent's weights in simulated time: to be read from top to bottom.

* *Where.* The discrete-event level, whose windows are made by the loader's own engine, so that the agent is trained on
  what it will see. Scenarios come from `TRAINED`, half of them from "wild"; `HELD_OUT` is never touched.
* *What is learned*: the advantage of each move of `intune.tuners._moves` over following the fitted model, in shares of
  the items that then go through in the next decisions. It is not bootstrapped: `intune.sim.explore` tries all moves
  from the same state, and they differ by nothing but the move.
* *Policy iteration.* The first round tries moves where the model alone has led, and lets it go on after them. Each
  further round tries them where the present agent has led, and lets that go on. A round learns from all states so far.
* *Several networks* side by side, each from a part of the scenarios: where they disagree the agent does nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune.sim.explore import Example, Job, explore
from intune.sim.families import TRAINED
from intune.sim.workers import carry_out
from intune.tuners._moves import MOVE_FEATURES
from intune.tuners._senses import GLOBAL_FEATURES, STAGE_FEATURES

FIRST_SEED = 1_000_000
"""Scenarios of lower seeds are for comparisons."""

STAGES = 8
"""No trained family has more stages."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        seed: Of scenarios, weights and exploration.
        rounds: Of trying moves and learning from them.
        scenarios: New ones in each round.
        moments: Decisions of each at which moves are tried.
        wild: Share of the scenarios from the family "wild", the others in equal parts.
        chance: Of a move at random, from the second round on.
        networks: Side by side.
        heard: Share of the scenarios that each network learns from.
        hidden: Width of the layers.
        epochs: Times that each state is learned from.
        batch: Moves a batch.
        rate: Learning rate at the start; it falls to 0.
        decay: Of the weights.
        jitter: Deviation of the noise that features are multiplied by.
    """

    seed: int = 0
    rounds: int = 3
    scenarios: int = 150
    moments: int = 6
    wild: float = 0.5
    chance: float = 0.1
    networks: int = 5
    heard: float = 0.75
    hidden: int = 48
    epochs: int = 25
    batch: int = 256
    rate: float = 2e-3
    decay: float = 1e-3
    jitter: float = 0.05
    beta: float = 1.0


class Networks(nn.Module):
    """Those of `intune.tuners.agent.gains`, several at once."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        shapes = {
            "stage": (STAGE_FEATURES + MOVE_FEATURES + GLOBAL_FEATURES, width),
            "hidden": (width, width),
            "whole": (2 * width + GLOBAL_FEATURES, width),
            "gain": (width, 1),
        }
        self.layers = nn.ParameterDict()
        for name, (inputs, outputs) in shapes.items():
            scale = (1.5 / inputs) ** 0.5 * (0.1 if name == "gain" else 1.0)
            self.layers[f"{name}_w"] = nn.Parameter(scale * torch.randn(count, inputs, outputs))
            self.layers[f"{name}_b"] = nn.Parameter(torch.zeros(count, 1, outputs))

    def forward(self, stages: torch.Tensor, whole: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Worth [K, B] of [B, S, F], [B, G] and bool[B, S]."""
        count, (batch, width, _) = len(self.layers["gain_b"]), stages.shape
        beside = whole[:, None].expand(-1, width, -1)
        flat = torch.cat([stages, beside], -1).reshape(1, batch * width, -1)
        hidden = torch.relu(self._layer("hidden", torch.relu(self._layer("stage", flat.expand(count, -1, -1)))))
        hidden = hidden.view(count, batch, width, -1) * present[..., None]
        pool = [hidden.sum(2) / present.sum(1)[:, None], hidden.amax(2), whole.expand(count, -1, -1)]
        last = torch.relu(self._layer("whole", torch.cat(pool, -1)))
        return self._layer("gain", last)[..., 0]

    def _layer(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.layers[f"{name}_b"], values, self.layers[f"{name}_w"])

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """By the names that the agent knows."""
        return {name.replace("_", "."): each.detach().numpy().copy() for name, each in self.layers.items()}


@dataclass
class Moves:
    """All moves that were tried, flat, each beside following the model in the same state.

    Attributes:
        state: int[N]; place of the state of each.
        move: float32[N, STAGES, MOVE_FEATURES].
        follow: float32[N, STAGES, MOVE_FEATURES].
        gain: float32[N].
        weight: float32[N]; little where little went through, as chance decides there.
        scenario: int[N].
        stages: float32[states, STAGES, STAGE_FEATURES].
        whole: float32[states, GLOBAL_FEATURES].
        present: bool[states, STAGES].
    """

    state: npt.NDArray[np.int64]
    move: npt.NDArray[np.float32]
    follow: npt.NDArray[np.float32]
    gain: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32]
    scenario: npt.NDArray[np.int64]
    stages: npt.NDArray[np.float32]
    whole: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]

    def chosen(self, places: npt.NDArray[np.int64], jitter: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Stages with the move, stages following, whole, present."""
        states = self.state[places]
        stages, present = torch.from_numpy(self.stages[states]), torch.from_numpy(self.present[states])
        if jitter is not None:
            stages = stages * jitter
        moved, follows = (torch.from_numpy(each[places]) for each in (self.move, self.follow))
        whole = torch.from_numpy(self.whole[states])
        return torch.cat([stages, moved], -1), torch.cat([stages, follows], -1), whole, present


ENOUGH_ITEMS, LEAST_WEIGHT = 10.0, 0.02
"""Items from which a state counts half; the least that one counts."""


def flat(examples: Sequence[Example]) -> Moves:
    """Examples in arrays; those with more stages than any trained family are left out."""
    kept = [each for each in examples if len(each.seen.stages) <= STAGES]
    scenarios = {key: n for n, key in enumerate(sorted({(each.family, each.seed) for each in kept}))}
    counts = [len(each.gains) - 1 for each in kept]

    def repeated(values: Sequence[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.array(values, np.float32), counts)

    return Moves(
        np.repeat(np.arange(len(kept)), counts),
        np.concatenate([_padded(move) for each in kept for move in each.moves[1:, None]]),
        np.repeat(np.concatenate([_padded(each.moves[:1]) for each in kept]), counts, axis=0),
        np.concatenate([each.gains[1:] for each in kept]),
        repeated([each.items / (each.items + ENOUGH_ITEMS) + LEAST_WEIGHT for each in kept]),
        np.repeat(np.array([scenarios[each.family, each.seed] for each in kept]), counts),
        np.concatenate([_padded(each.seen.stages[None]) for each in kept]),
        np.stack([each.seen.whole for each in kept]),
        np.array([[place < len(each.seen.stages) for place in range(STAGES)] for each in kept]),
    )


def _padded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.pad(values, ((0, 0), (0, STAGES - values.shape[1]), (0, 0)))


def learn(moves: Moves, recipe: Recipe) -> Networks:
    """Networks that foretell gains."""
    torch.manual_seed(recipe.seed)
    random = np.random.default_rng([recipe.seed, 2])
    networks = Networks(recipe.networks, recipe.hidden)
    optimizer = torch.optim.AdamW(networks.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    hears = random.random((moves.scenario.max() + 1, recipe.networks)) < recipe.heard
    steps = max(1, recipe.epochs * len(moves.gain) // recipe.batch)
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        places = random.integers(0, len(moves.gain), recipe.batch)
        jitter = 1 + recipe.jitter * torch.randn(recipe.batch, STAGES, STAGE_FEATURES)
        moved, follows, whole, present = moves.chosen(places, jitter)
        foretold = networks(moved, whole, present) - networks(follows, whole, present)
        wanted = torch.from_numpy(moves.gain[places]).expand(recipe.networks, -1)
        errors = nn.functional.smooth_l1_loss(foretold, wanted, beta=recipe.beta, reduction="none")
        counts = torch.from_numpy((hears[moves.scenario[places]].T * moves.weight[places]).astype(np.float32))
        loss = (errors * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(networks.parameters(), 5.0)
        optimizer.step()
        falls.step()
    return networks


def train(
    recipe: Recipe, jobs: int = 1, tell: Callable[[str], None] = lambda line: None
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for `intune.tuners.Agent`.

    Args:
        recipe: How; the same gives the same weights on the same machine.
        jobs: Processes that play.
        tell: Called after each round with a line about how far it is.
    """
    weights: dict[str, npt.NDArray[np.float32]] | None = None
    examples: list[Example] = []
    for number in range(recipe.rounds):
        with closing(carry_out(_drawn(recipe, number), partial(explore, weights), jobs)) as played:
            new = [example for each in played for example in each]
        # In an order of their own, whichever came first.
        examples += sorted(new, key=lambda each: (each.family, each.seed, each.at))
        weights = learn(flat(examples), recipe).weights()
        tell(f"round {number + 1} of {recipe.rounds}: {len(examples):,} states, {sum(len(e.gains) for e in examples):,} moves")
    assert weights is not None
    return weights


def _drawn(recipe: Recipe, number: int) -> list[Job]:
    """The scenarios of a round."""
    random = np.random.default_rng([recipe.seed, number])
    others = [family for family in TRAINED if family != "wild"]
    first = FIRST_SEED * (1 + recipe.seed) + number * recipe.scenarios
    return [
        Job(
            "wild" if random.random() < recipe.wild else str(random.choice(others)),
            first + place,
            moments=recipe.moments,
            chance=recipe.chance if number else 0.0,
        )
        for place in range(recipe.scenarios)
    ]
