"""Simulated pipelines as an environment of Gymnasium: a decision a step, on the engine itself, behind guard and brake.

Needs gymnasium, of the extra `sim`. `register` makes "intune/Pipeline-v0" known to `gymnasium.make`.

*Observation*: float32[12 * 2 * F + 2 * G]: F figures of each of 12 places for stages (source first, the rest zeros), G
of the whole, made of `intune.tuners.view`; each figure is followed, in a second half of its group, by 1 where it was
not measured and 0 where it was. Amounts are logarithms, shares are as they are; all lie within -20 and 20.

*Action*: for each of 12 places keep, -k, -1, +1, +k or open, with k = max(2, now // 3); what goes to places without a
stage is ignored. Where a stage is open, `now` is what that amounts to. The guard lowers what memory does not allow.

*Reward*: log(rate / best) - 0.1 * memory share. The rate is of rows in the step, at least a thousandth of the best; the
best is the largest one so far, this step included, since the episode began or the CPUs of the budget last changed. The
memory share is that of the limit, 0 without one. Running out of memory gives -10 and terminates the episode. After so
many decisions it is truncated.

What a version measures does not change: where observation, action, reward or engine do so that returns are not to be
compared any more, the number in the id rises.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from intune._values import Allocation, Budget, Event, Snapshot
from intune.control import Guard
from intune.sim.discrete import OutOfMemory, Simulation
from intune.sim.families import scenario
from intune.sim.scenario import Scenario
from intune.tuners.view import View, view

try:
    import gymnasium
    from gymnasium import spaces
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        'the environment needs gymnasium: pip install "intune[sim]"', name="gymnasium"
    ) from missing

ID = "intune/Pipeline-v0"

PLACES = 12
MOVES = ("keep", "-k", "-1", "+1", "+k", "open")
BOUND = 20.0
DEATH = -10.0
LEAST_SHARE = 1e-3
MEMORY_WEIGHT = 0.1
SEEDS = 1000
"""Seeds of a family that episodes are drawn from, unless said otherwise."""

Observation = npt.NDArray[np.float32]

STAGE_FIGURES = ("present", "process", "waits", "gathers", "resident", "ready", "starting")
STAGE_AMOUNTS = ("most", "asked", "cap", "busy", "items", "visits", "wall", "cpu", "queue")
WHOLE_FIGURES = ("starved", "memory", "held_back", "vetoed", "changed")
WHOLE_AMOUNTS = (
    "seconds",
    "rate",
    "ready_batches",
    "cpus",
    "slots",
    "threads",
    "used",
    "others",
    "lock_wait",
    "read_rate",
)
CAUSES = 5
F = len(STAGE_FIGURES) + len(STAGE_AMOUNTS) + CAUSES
G = len(WHOLE_FIGURES) + len(WHOLE_AMOUNTS)
SIZE = 2 * (PLACES * F + G)


def register() -> None:
    """Make the environment known to `gymnasium.make`; may be called again."""
    if ID not in gymnasium.registry:
        gymnasium.register(ID, entry_point="intune.sim.env:PipelineEnv")


class PipelineEnv(gymnasium.Env[Observation, npt.NDArray[np.int64]]):
    """One episode steers one scenario, drawn anew at each `reset`.

    `reset(options={"scenario": ...})` takes a scenario instead of drawing one.

    Args:
        family: The family that scenarios are drawn from.
        seeds: They have seeds below this.
        decisions: Decisions of an episode.
        interval_seconds: Simulated seconds of a step.

    Raises:
        PipelineError: If there is no such family.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium has it

    def __init__(
        self, family: str = "wild", *, seeds: int = SEEDS, decisions: int = 60, interval_seconds: float = 1.0
    ) -> None:
        scenario(family, 0)  # an unknown one is told at once
        self.observation_space = spaces.Box(-BOUND, BOUND, (SIZE,), np.float32)
        self.action_space = spaces.MultiDiscrete([len(MOVES)] * PLACES)
        self._family, self._seeds, self._decisions, self._interval = family, seeds, decisions, interval_seconds
        self._guard = Guard()
        self._simulation: Simulation | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode with every stage open and nothing measured."""
        super().reset(seed=seed)
        drawn = (options or {}).get("scenario")
        if drawn is None:
            drawn = scenario(self._family, int(self.np_random.integers(self._seeds)))
        self._begin(drawn)
        return self._look(()), {"scenario": drawn.name}

    def step(self, action: npt.NDArray[np.int64]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take one decision and let an interval pass.

        Raises:
            gymnasium.error.ResetNeeded: If no episode is under way.
        """
        simulation = self._simulation
        if simulation is None:
            raise gymnasium.error.ResetNeeded("step was called before reset, or after the end of an episode")
        budget = simulation.budget()
        wanted = moved(self._seen, self._view, budget, action)
        allocation, vetoes = self._guard.check(wanted, self._seen, budget)
        simulation.apply(allocation)
        rows = simulation.rows
        info: dict[str, Any] = {"vetoed": [event.detail for event in vetoes], "allocation": allocation}
        try:
            simulation.advance(self._interval)
        except OutOfMemory as error:
            self.close()
            return self._seen_as, DEATH, True, False, {**info, "died": str(error)}
        self._taken += 1
        rate = info["rows_per_second"] = (simulation.rows - rows) / self._interval
        now = simulation.budget()
        changed = () if now == budget else (Event("budget", None, f"{budget} -> {now}"),)
        seen_as, reward = self._look((*vetoes, *changed)), self._reward(rate)
        if now.cpus != budget.cpus:
            self._best = 0.0
        truncated = self._taken >= self._decisions
        if truncated:
            self.close()
        return seen_as, reward, False, truncated, info

    def close(self) -> None:
        """Let go of the simulation."""
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    def _begin(self, drawn: Scenario) -> None:
        self.close()
        if len(drawn.stages) > PLACES:
            raise ValueError(f"{drawn.name} has {len(drawn.stages)} stages, but there are places for {PLACES}")
        self._simulation = Simulation(drawn)
        self._taken, self._best = 0, 0.0

    def _look(self, news: tuple[Event, ...]) -> Observation:
        """Close the window; what came of the decision stands among its events, as for a tuner."""
        assert self._simulation is not None
        seen = self._simulation.snapshot()
        self._seen = replace(seen, events=(*seen.events, *news))
        self._view = view(self._seen, self._simulation.budget())
        self._seen_as = observed(self._view)
        return self._seen_as

    def _reward(self, rate: float) -> float:
        self._best = max(self._best, rate)
        share = max(rate / self._best, LEAST_SHARE) if self._best else LEAST_SHARE
        memory = float(self._view.memory[0])
        return math.log(share) - MEMORY_WEIGHT * (0.0 if math.isnan(memory) else memory)


def moved(seen: Snapshot, now: View, budget: Budget, action: npt.NDArray[np.int64]) -> Allocation:
    """The allocation that an action asks for: int[12], a move for each place."""
    wanted: dict[str, int | None] = {}
    for place, stage in enumerate(seen.stages):
        move = MOVES[int(action[place])]
        value = stage.concurrency or max(1, int(now.cap[0, place]))
        step = max(2, value // 3) if move.endswith("k") else 1
        most = min(float(now.most[0, place]), budget.max_threads if stage.info.waits else budget.cpus)
        if move == "keep":
            wanted[stage.name] = stage.concurrency or None
        elif move == "open":
            wanted[stage.name] = None
        else:
            wanted[stage.name] = int(max(1, min(value + step if move[0] == "+" else value - step, most)))
    return Allocation(wanted, budget.cpus, reasons={name: "as the environment was told" for name in wanted})


def observed(now: View) -> Observation:
    """A window of one workload as float32[SIZE]."""
    stages = np.zeros((PLACES, F))
    count = now.present.shape[1]
    places = [np.asarray(getattr(now, name)[0], dtype=np.float64) for name in STAGE_FIGURES]
    places += [_log(getattr(now, name)[0]) for name in STAGE_AMOUNTS]
    stages[:count] = np.column_stack([*places, now.wait[0]])
    whole = np.concatenate(
        [
            np.array([getattr(now, name)[0] for name in WHOLE_FIGURES]),
            _log(np.array([getattr(now, name)[0] for name in WHOLE_AMOUNTS])),
        ]
    )
    parts = [half for group in (stages.ravel(), whole) for half in (np.nan_to_num(group), np.isnan(group))]
    seen: Observation = np.clip(np.concatenate(parts), -BOUND, BOUND).astype(np.float32)
    return seen


def _log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logarithms, of nothing and of what has no limit too: 1e-6 and 1e6 stand for these."""
    logarithms: npt.NDArray[np.float64] = np.log(np.clip(values, 1e-6, 1e6))
    return logarithms
