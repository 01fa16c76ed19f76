"""Episodes for the training of the agent: played in simulated time, with chance, against the fitted model alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from intune._values import Allocation, Budget, Snapshot
from intune.sim.families import scenario
from intune.sim.play import Trace, play
from intune.tuners._rows import rows_finished
from intune.tuners._senses import ACTIONS, Seen
from intune.tuners._trust import Detector
from intune.tuners.agent import LEAST_GAIN, Agent, Weights, gains
from intune.tuners.model import Model

STAGES = 8
"""Columns of a batch: no trained family has more stages."""

DEATH, LEAST, MOST = -5.0, -1.5, 3.0
"""Reward of a death; bounds of the reward of a second."""

AS_BEFORE = ACTIONS.index("as before")

LEAST_FLOW = 3.0
"""Source items a second and stage below which a scenario teaches nothing: chance decides what its windows say."""

CHANGE_COST, PROCESS_COST = 0.003, 0.02
"""Seconds of full speed that a change of a stage costs; and, each second, a process for each CPU more than before."""

TOGETHER, STICKS = 0.3, 0.5
"""Chance that all stages begin an exploring episode with the same; and that a stage which tried something stays so."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        seed: Of scenarios, weights and exploration.
        rounds: Of playing and learning.
        scenarios: New ones in each round.
        episodes: Of each scenario.
        decisions: Of each episode.
        wild: Share of the scenarios from the family "wild", the others in equal parts.
        networks: Side by side.
        hidden: Width of the layers.
        discount: Worth of a second later.
        rate: Learning rate at the start; it falls to a tenth.
        batch: Decisions a batch.
        batches: Batches a round.
        steps: Decisions from one that is learned from to the one whose value stands for what follows.
        polyak: How fast the target weights follow.
        chances: Of something else, for each stage at each decision; by episode of a scenario, and again from the first.
    """

    seed: int = 0
    rounds: int = 48
    scenarios: int = 36
    episodes: int = 4
    decisions: int = 18
    wild: float = 0.5
    networks: int = 5
    hidden: int = 48
    discount: float = 0.9
    rate: float = 1e-3
    batch: int = 256
    batches: int = 160
    steps: int = 4
    polyak: float = 0.01
    chances: tuple[float, ...] = (0.02, 0.1, 0.1, 0.3)


@dataclass(slots=True)
class Decision:
    """One decision of an episode.

    Attributes:
        at: Number of the interval that it began.
        seen: What it was made from.
        actions: int[S]; what was executed; -1 = none of the actions.
    """

    at: int
    seen: Seen
    actions: npt.NDArray[np.int64]


class _Trusting(Detector):
    """Trusts whatever happens: what is not tried is not learned."""

    def observe(self, expected: float | None, got: float, starved: bool) -> None:
        """Nothing is judged."""


class Explorer(Agent):
    """The agent, with chance and a memory.

    Args:
        weights: Of the networks.
        network: The one that decides alone; None = all, as in a real run.
        chance: Of something else, for each stage at each decision.
        random: What is drawn from.
    """

    def __init__(self, weights: Weights, network: int | None, chance: float, random: np.random.Generator) -> None:
        super().__init__(weights)
        self._policy = weights
        self._network, self._chance, self._random = network, chance, random
        self._detector = _Trusting()
        self._calls = 0
        self._tries = np.zeros(0, np.bool_)
        self._wanted: Allocation | None = None
        self.decisions: list[Decision] = []
        self.flow: list[float] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """As the agent, keeping what was decided and what became of it."""
        self.flow.append(flow(snapshot))
        self._what_was_executed(snapshot)
        self._wanted = super().propose(snapshot, budget)
        self._calls += 1
        return self._wanted

    def choose(self, seen: Seen) -> npt.NDArray[np.int64]:
        """What one network or all think best, or something else."""
        if self._network is None:
            actions = super().choose(seen)
        else:
            alone = gains(self._policy, seen)[self._network]
            alone = np.where(seen.allowed, alone, -np.inf)
            alone[:, 0] = LEAST_GAIN
            actions = alone.argmax(axis=-1)
        count = len(actions)
        draws = self._random.random((count, len(ACTIONS)))
        if not self.decisions and self._random.random() < TOGETHER * (self._chance > 0):
            draws[:] = draws[0]
            self._tries = np.ones(count, np.bool_)
        else:
            stays = self._tries & (self._random.random(count) < STICKS) if self.decisions else np.zeros(count, np.bool_)
            draws[stays, AS_BEFORE] = 2.0  # above all chance
            self._tries = stays | (self._random.random(count) < self._chance)
        draws = np.where(seen.allowed, draws, -1.0)
        draws[:, 0] = 0.0  # only where nothing else is allowed
        actions = np.where(self._tries, draws.argmax(axis=-1), actions)
        self.decisions.append(Decision(self._calls, seen, actions))
        return np.asarray(actions)

    def _what_was_executed(self, snapshot: Snapshot) -> None:
        if self._wanted is None or not self.decisions or self.decisions[-1].at != self._calls - 1:
            return
        last = self.decisions[-1]
        for place, stage in enumerate(snapshot.stages):
            have = snapshot.allocation.concurrency[stage.name]
            if have != self._wanted.concurrency[stage.name]:
                row = last.seen.options[place]
                last.actions[place] = row.index(have) if have in row else -1


@dataclass(frozen=True)
class Episode:
    """What is learned from: arrays over its decisions, the state after the last one included.

    Attributes:
        stages: float16[N + 1, STAGES, STAGE_FEATURES].
        whole: float16[N + 1, GLOBAL_FEATURES].
        allowed: bool[N + 1, STAGES, A]; no stage, nothing allowed.
        actions: int8[N, STAGES]; -1 = none of the actions.
        rewards: float32[N]; from a decision on, up to the one that is `ahead`.
        seconds: float32[N]; until then.
        ahead: int[N]; by how many decisions.
        ends: bool[N]; whether that is the end of the episode.
        gained: Rows over those of the model, less 1.
    """

    stages: npt.NDArray[np.float16]
    whole: npt.NDArray[np.float16]
    allowed: npt.NDArray[np.bool_]
    actions: npt.NDArray[np.int8]
    rewards: npt.NDArray[np.float32]
    seconds: npt.NDArray[np.float32]
    ahead: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_]
    gained: float


@dataclass(frozen=True)
class Job:
    """A scenario to be played.

    Attributes:
        family: Its family.
        seed: Its seed.
        networks: For each episode the network that decides alone; None = all.
    """

    family: str
    seed: int
    networks: tuple[int | None, ...]


def play_job(recipe: Recipe, weights: Weights, job: Job) -> list[Episode]:
    """Play a scenario under the model, then under explorers; empty where too little happens to learn from."""
    drawn = scenario(job.family, job.seed)
    model = _Watched()
    plain = play(drawn, model, recipe.decisions)
    if (
        plain.died
        or not plain.rows_per_second()
        or sum(model.flow) < LEAST_FLOW * drawn.stages[0].rows * plain.intervals[-1].seconds
    ):
        return []
    found = []
    for number, network in enumerate(job.networks):
        random = np.random.default_rng([job.seed, number])
        explorer = Explorer(weights, network, recipe.chances[number % len(recipe.chances)], random)
        trace = play(drawn, explorer, recipe.decisions)
        if trace.tuner_failed:
            raise RuntimeError(f"the agent failed in {drawn.name}: {trace.tuner_failed}")
        rewards, seconds = _rewards(trace, plain, explorer.flow, model.flow)
        found.append(_episode(recipe, explorer.decisions, rewards, seconds, trace, plain))
    return [each for each in found if len(each.rewards)]


class _Watched(Model):
    """The model alone, and what flowed."""

    def __init__(self) -> None:
        super().__init__()
        self.flow: list[float] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """As the model."""
        self.flow.append(flow(snapshot))
        return super().propose(snapshot, budget)


def flow(snapshot: Snapshot) -> float:
    """Source rows that went through a stage in a window, on average over the stages.

    What the training loop takes comes in few large pieces; this says the same over time with less noise, as no more
    items can lie between stages than there is room for.
    """
    return float(np.mean([rows_finished(stage) or 0.0 for stage in snapshot.stages]))


def _rewards(
    trace: Trace, plain: Trace, flowed: Sequence[float], as_model: Sequence[float]
) -> tuple[list[float], list[float]]:
    """By interval, what was gained over the model, and how long it was."""
    speed = sum(as_model) / plain.intervals[-1].seconds
    ends = [0.0, *(each.seconds for each in plain.intervals)]
    rewards, seconds = [], []
    for number, (one, other) in enumerate(zip(trace.intervals, plain.intervals, strict=False)):
        if number + 1 >= len(flowed):
            break  # it died in the next one
        length = ends[number + 1] - ends[number]
        more = (flowed[number + 1] - as_model[number + 1]) / speed / length
        reward = min(MOST, max(LEAST, more)) * length
        reward -= PROCESS_COST * length * (one.processes - other.processes) / one.slots
        rewards.append(reward - CHANGE_COST * _changes(trace, number))
        seconds.append(length)
    if trace.died is not None:
        rewards.append(DEATH)
        seconds.append(1.0)
    return rewards, seconds


def _episode(
    recipe: Recipe,
    decisions: Sequence[Decision],
    rewards: Sequence[float],
    seconds: Sequence[float],
    trace: Trace,
    plain: Trace,
) -> Episode:
    chosen = [each for each in decisions if each.at < len(rewards)]
    count = len(chosen)
    # Nothing departs after the last of them: what follows is counted to the end.
    marks = [*(each.at for each in chosen), len(rewards)]
    ahead = np.minimum(np.arange(count) + recipe.steps, count)
    summed, passed = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for number in range(count):
        for at in range(marks[number], marks[ahead[number]]):
            summed[number] += recipe.discount ** passed[number] * rewards[at]
            passed[number] += seconds[at]
    states = [*chosen, *chosen[-1:]]
    rows = sum(each.rows for each in trace.intervals) / max(1, sum(each.rows for each in plain.intervals))
    return Episode(
        np.stack([_padded(each.seen.stages) for each in states]).astype(np.float16),
        np.stack([each.seen.whole for each in states]).astype(np.float16),
        np.stack([_padded(each.seen.allowed) for each in states]),
        np.stack([_padded(each.actions) for each in chosen]).astype(np.int8).reshape(count, STAGES),
        summed,
        passed,
        ahead - np.arange(count),
        ahead == count,
        rows - 1,
    )


def _changes(trace: Trace, number: int) -> int:
    if not number:
        return 0
    before, after = trace.intervals[number - 1].concurrency, trace.intervals[number].concurrency
    return sum(before[name] != after[name] for name in after)


def _padded(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The same with `STAGES` rows."""
    return np.concatenate([values, np.zeros((STAGES - len(values), *values.shape[1:]), values.dtype)])
