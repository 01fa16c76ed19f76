"""The learned agent: a fitted model inside, a policy trained by Q-learning on simulated pipelines on top.

Each decision:

1. `Fit` learns from the window how long items of each stage take by how many are worked on at once, and solves for
   the best rate: a target for each stage.
2. Features, free of scale, are made for each stage: what it is doing, what it waits for, what the fit says of it and
   how sure it is, what changed lately.
3. A network with weights that all stages share scores the `ACTIONS` of each stage, in view of the others (their mean
   and maximum). Each stage takes its best one. Any number of stages will do.

The network is a branching duelling Q-network (Tavakoli et al. 2018), trained by `intune.sim.train` in the fluid level of
the simulator. Everything here works on arrays of many workloads at once, [E, S], so that training and live use share
every line; live, E is 1. numpy only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.tuners.fit import Fit
from intune.tuners.view import Floats, View, view

Weights = Mapping[str, npt.NDArray[np.float32]]
Choice = npt.NDArray[np.int64]

ACTIONS = ("keep", "target", "hopeful", "one less", "one more", "half", "a third less", "half more", "open")
"""What a stage may do with its concurrency. `target` is the fit's, `hopeful` the fit's if what it does not know is good."""

OPTIMISM = 1.0
"""Deviations by which `hopeful` takes a stage to be faster than it seems."""

STAGE_FEATURES, GLOBAL_FEATURES = 41, 17
"""Numbers for each stage, and for the workload as a whole."""


@dataclass(slots=True)
class Memory:
    """What is remembered of each workload from window to window; arrays [E] and [E, S].

    Attributes:
        best: The best rate seen, fading; 0 = none.
        rate: The rate of the window before.
        step: Decisions so far.
        quiet: Windows since any stage was changed.
        own: Windows since the stage was changed.
        moved: Logarithm of its last change.
        before: The rate before that.
        slow: Its wall seconds, a slow running mean; NaN = never measured.
    """

    best: Floats
    rate: Floats
    step: Floats
    quiet: Floats
    own: Floats
    moved: Floats
    before: Floats
    slow: Floats

    @classmethod
    def of(cls, workloads: int, stages: int) -> "Memory":
        """A blank one."""
        best, rate, step, quiet = np.zeros((4, workloads))
        own, moved, before = np.zeros((3, workloads, stages))
        return cls(best, rate, step, quiet, own, moved, before, np.full((workloads, stages), np.nan))

    def reset(self, rows: Choice) -> None:
        """Forget these workloads."""
        for each in fields(self):
            getattr(self, each.name)[rows] = np.nan if each.name == "slow" else 0.0


@dataclass(slots=True)
class Seen:
    """What a decision is made from.

    Attributes:
        stages: float32[E, S, STAGE_FEATURES].
        whole: float32[E, GLOBAL_FEATURES].
        present: bool[E, S].
        options: float[E, S, len(ACTIONS)]; the concurrency that each action gives; inf = open.
    """

    stages: npt.NDArray[np.float32]
    whole: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]
    options: Floats


class Senses:
    """Turns windows into features; keeps the fit and the memory of E workloads."""

    def __init__(self, workloads: int, stages: int) -> None:
        self.fit, self.memory = Fit(workloads, stages), Memory.of(workloads, stages)

    def reset(self, rows: Choice) -> None:
        """These workloads begin anew."""
        self.fit.reset(rows)
        self.memory.reset(rows)

    def look(self, seen: View) -> Seen:
        """Learn from a window and say what there is to decide on."""
        memory, fit = self.memory, self.fit
        fit.update(seen)
        rate = np.nan_to_num(seen.rate)
        memory.best = np.where(seen.changed > 0, rate, np.maximum(0.99 * memory.best, rate))
        enough = np.where(seen.starved < 0.05, rate / np.maximum(1 - seen.starved, 0.05) * 1.02, np.inf)
        predicted, needs, target = fit.solve(seen, enough)
        _, _, hopeful = fit.solve(seen, enough, OPTIMISM)
        limit = fit.most(seen)
        now = np.minimum(np.where(np.isinf(seen.asked), limit, seen.asked), limit)
        stages = self._stage_features(seen, rate, predicted, needs, target, hopeful, now, limit)
        whole = self._whole_features(seen, rate, predicted)
        memory.slow = np.where(
            np.isnan(memory.slow),
            seen.wall,
            np.where(np.isnan(seen.wall), memory.slow, 0.8 * memory.slow + 0.2 * seen.wall),
        )
        memory.rate = rate
        options = _options(seen.asked, now, limit, target, hopeful)
        return Seen(
            np.clip(np.nan_to_num(stages), -4, 4).astype(np.float32),
            np.clip(np.nan_to_num(whole), -4, 4).astype(np.float32),
            seen.present,
            options,
        )

    def decided(self, seen: View, asked: Floats) -> None:
        """This was asked for: inf = open."""
        memory, limit = self.memory, self.fit.most(seen)
        old, new = (np.minimum(np.where(np.isinf(each), limit, each), limit) for each in (seen.asked, asked))
        moved = seen.present & (old != new)
        memory.step += 1
        memory.own = np.where(moved, 0.0, memory.own + 1)
        memory.moved = np.where(moved, np.log(new / np.maximum(old, 1)), memory.moved)
        memory.before = np.where(moved, memory.rate[:, None], memory.before)
        memory.quiet = np.where(moved.any(axis=1), 0.0, memory.quiet + 1)

    def _stage_features(
        self,
        seen: View,
        rate: Floats,
        predicted: Floats,
        needs: Floats,
        target: Floats,
        hopeful: Floats,
        now: Floats,
        limit: Floats,
    ) -> Floats:
        memory, fit = self.memory, self.fit
        busy, wall = np.maximum(seen.busy, 0.0), seen.wall
        holding = np.where(seen.present & ~seen.waits, busy, 0.0)
        scale = np.maximum(fit.coefficients[..., 0], 1e-3)
        others = np.maximum(now - 1, 0.0)
        growth = 1 + (fit.coefficients[..., 1] * others + fit.coefficients[..., 2] * others**2) / scale
        idle = np.clip((wall - seen.cpu - np.nan_to_num(seen.queue)) / wall, 0, 1)
        known = fit.known.astype(float)
        x = rate[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            columns = [
                np.log(now) / 2,
                np.log(limit) / 2,
                np.log(limit / now),
                np.isinf(seen.asked).astype(float),
                busy / now,
                np.log1p(busy) / 2,
                holding / np.maximum(holding.sum(axis=1, keepdims=True), 1e-6),
                idle,
                np.nan_to_num(seen.queue) / wall,
                seen.cpu / wall,
                np.log1p(np.nan_to_num(seen.items)) / 4,
                *np.moveaxis(seen.wait, -1, 0),
                known,
                np.log(growth),
                fit.coefficients[..., 1] / scale,
                fit.coefficients[..., 2] / scale * 10,
                np.log1p(fit.deviations[..., 0] / scale),
                fit.deviations[..., 1] / scale,
                fit.deviations[..., 2] / scale * 10,
                known
                * np.log(np.maximum(predicted[:, None], 1e-9) * np.maximum(needs, 1) / np.maximum(x * now, 1e-9))
                / 2,
                np.log(needs / now),
                np.log(np.minimum(target, limit) / now),
                np.log(np.minimum(hopeful, limit) / now),
                np.isinf(target).astype(float),
                np.isinf(hopeful).astype(float),
                fit.surprised.astype(float),
                np.log(wall / memory.slow),
                np.minimum(memory.own, 10) / 10,
                memory.moved,
                np.where(memory.before > 0, np.log(np.maximum(x, 1e-9) / np.maximum(memory.before, 1e-9)), 0.0),
                seen.process.astype(float),
                seen.waits.astype(float),
                seen.gathers.astype(float),
                np.nan_to_num(seen.starting),
                np.nan_to_num(seen.resident) * now,
                (np.arange(now.shape[1]) == 0) * np.ones_like(now),
                seen.present.astype(float),
            ]
        return np.stack([np.where(seen.present, np.where(np.isfinite(c), c, 0.0), 0.0) for c in columns], axis=-1)

    def _whole_features(self, seen: View, rate: Floats, predicted: Floats) -> Floats:
        memory, count = self.memory, seen.present.sum(axis=1)
        holding = np.where(seen.present & ~seen.waits, np.nan_to_num(seen.busy), 0.0).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            columns = [
                np.log(seen.cpus) / 3,
                seen.slots / seen.cpus,
                holding / seen.slots,
                seen.starved,
                np.nan_to_num(seen.held_back),
                np.nan_to_num(seen.memory),
                np.isnan(seen.memory).astype(float),
                seen.vetoed,
                seen.changed,
                np.nan_to_num(seen.used / seen.cpus),
                np.nan_to_num(seen.others / seen.cpus),
                np.nan_to_num(seen.lock_wait) * 100,
                np.log(np.maximum(rate, 1e-9) / np.maximum(memory.best, 1e-9)),
                np.where(memory.rate > 0, np.log(np.maximum(rate, 1e-9) / np.maximum(memory.rate, 1e-9)), 0.0),
                np.where(rate > 0, np.log(np.minimum(predicted, 1e12) / np.maximum(rate, 1e-9)), 0.0) / 2,
                np.minimum(memory.quiet, 10) / 10,
                np.minimum(memory.step, 20) / 20 + 0 * count,
            ]
        return np.stack([np.where(np.isfinite(c), c, 0.0) for c in columns], axis=-1)


def _options(asked: Floats, now: Floats, limit: Floats, target: Floats, hopeful: Floats) -> Floats:
    """float[E, S, A]: what each action asks for; all that there is counts as open."""
    found = np.stack(
        [
            asked,
            target,
            hopeful,
            np.maximum(1, now - 1),
            now + 1,
            np.maximum(1, np.floor(now / 2)),
            np.maximum(1, np.ceil(now * 2 / 3)),
            np.ceil(now * 1.5),
            np.full_like(now, np.inf),
        ],
        axis=-1,
    )
    return np.where(found >= limit[..., None], np.inf, found)


def scores(weights: Weights, seen: Seen) -> npt.NDArray[np.float32]:
    """float32[E, S, A]: the value of each action of each stage."""
    count = seen.present.sum(axis=1, keepdims=True)
    whole = np.broadcast_to(seen.whole[:, None], (*seen.present.shape, GLOBAL_FEATURES))
    first = np.concatenate([seen.stages, whole], axis=-1) @ weights["in.w"] + weights["in.b"]
    hidden = np.maximum(np.maximum(first, 0) @ weights["mid.w"] + weights["mid.b"], 0)
    mask = seen.present[..., None]
    mean = np.where(mask, hidden, 0).sum(axis=1) / count
    most = np.where(mask, hidden, 0).max(axis=1)
    pool = np.concatenate([mean, most], axis=-1)
    value = np.maximum(pool @ weights["pool.w"] + weights["pool.b"], 0) @ weights["value.w"] + weights["value.b"]
    beside = np.broadcast_to(pool[:, None], (*seen.present.shape, pool.shape[-1]))
    last = np.maximum(np.concatenate([hidden, beside], axis=-1) @ weights["out.w"] + weights["out.b"], 0)
    advantages = last @ weights["adv.w"] + weights["adv.b"]
    return np.asarray(value[:, None] + advantages - advantages.mean(axis=-1, keepdims=True), dtype=np.float32)


def load_weights(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Weights from an npz file.

    Raises:
        PipelineError: If it is not one of this agent's.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name].astype(np.float32) for name in file.files}
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} holds no weights of an agent ({error}); make one with intune pretrain") from error
    if "in.w" not in found or found["in.w"].shape[0] != STAGE_FEATURES + GLOBAL_FEATURES:
        raise PipelineError(f"{path} is of another version: this agent has {STAGE_FEATURES + GLOBAL_FEATURES} inputs")
    return found


class Agent:
    """A tuner that decides by learned weights.

    Args:
        weights: By layer; see `load_weights`.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._senses: Senses | None = None

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The best action of each stage."""
        seen = view(snapshot, budget)
        seen.slots = np.minimum(seen.slots, seen.cpus)
        if self._senses is None:
            self._senses = Senses(*seen.shape)
        features = self._senses.look(seen)
        values = scores(self._weights, features)
        chosen = values.argmax(axis=-1)
        asked = np.take_along_axis(features.options, chosen[..., None], -1)[..., 0]
        self._senses.decided(seen, asked)
        concurrency: dict[str, int | None] = {}
        reasons = {}
        for place, stage in enumerate(snapshot.stages):
            wanted, action = float(asked[0, place]), ACTIONS[int(chosen[0, place])]
            most = stage.info.max_concurrency
            concurrency[stage.name] = None if math.isinf(wanted) else int(min(wanted, most or wanted))
            reasons[stage.name] = action
        return Allocation(concurrency, budget.cpus, reasons=reasons)
