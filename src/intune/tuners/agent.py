"""The learned agent: a fitted model decides, and a learned policy on top of it how a run begins.

Each decision:

1. `Model` learns from the window and proposes an allocation. It begins with few items at once, as a stage that hinders
   itself would go deep into that before anything was learnt of it. That costs the others their first seconds.
2. `Senses` turns the window, and what the model makes of it, into numbers that are free of scale: for each stage
   what it does, what it waits for, what the model says of it and how sure it is, and what changed lately.
3. In the first `BEGINNING` decisions, a network with weights that all stages share says for each stage how much each
   of `ACTIONS` would gain over doing as the model says. It sees the others by their mean and maximum, so any number of
   stages will do.
4. A stage departs from the model only where the gain is beyond doubt: several networks, trained side by side, must
   agree on it. Later the model decides alone: by then it has seen what it needs, and departures were found to gain
   nothing any more (docs/decisions/0010).
5. Where predictions of the model are off for long (`_trust`), the pipeline is unlike those of training. Then the policy
   is not asked, and experiments are made on the pipeline itself (`_switchback`): what they show to be faster is kept.

Trained by `intune.sim.train`: Q-learning in simulated time. The value of a joint action is taken to be what following
the model is worth, plus the gain of each stage that departs (a sum over branches as in value decomposition, Sunehag et
al. 2018; duelling branches as in Tavakoli et al. 2018, with the model's proposal as the zero of each). numpy only.
"""

import hashlib
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.tuners._beliefs import STARVED
from intune.tuners._rows import in_force, most_useful
from intune.tuners._senses import ACTIONS, BEGINNING, GLOBAL_FEATURES, STAGE_FEATURES, Seen, Senses
from intune.tuners._switchback import LEAST, MOST, Switchback
from intune.tuners._trust import Detector
from intune.tuners.model import Model

Weights = Mapping[str, npt.NDArray[np.float32]]

LEAST_GAIN = 0.02
"""Gain over the model, in seconds of full speed, from which a stage departs from it."""

CAUTION = 1.5
"""Deviations of the networks by which the gain must be above that."""

UNLIKE = "the pipeline is unlike those that the policy was trained on, so the model decides alone"

FORMAT = f"intune agent 1: {STAGE_FEATURES} + {GLOBAL_FEATURES} features; {', '.join(ACTIONS)}"
"""What a file of weights says of itself. Raised with each change of what a feature or an action means."""

LAYERS = tuple(f"{layer}.{part}" for layer in ("in", "mid", "out", "gain") for part in "wb")


def gains(weights: Weights, seen: Seen) -> npt.NDArray[np.float32]:
    """float32[K, S, A]: by each of K networks, what each action of each stage gains over following the model."""
    stages = len(seen.stages)
    whole = np.broadcast_to(seen.whole, (stages, GLOBAL_FEATURES))
    first = np.concatenate([seen.stages, whole], axis=-1) @ weights["in.w"] + weights["in.b"]
    hidden = np.maximum(np.maximum(first, 0) @ weights["mid.w"] + weights["mid.b"], 0)
    pool = np.concatenate([hidden.mean(axis=1, keepdims=True), hidden.max(axis=1, keepdims=True)], axis=-1)
    around = np.broadcast_to(pool, (len(hidden), stages, pool.shape[-1]))
    last = np.maximum(np.concatenate([hidden, around], axis=-1) @ weights["out.w"] + weights["out.b"], 0)
    found = last @ weights["gain.w"] + weights["gain.b"]
    return np.asarray(found - found[..., :1], dtype=np.float32)


def _blank() -> Seen:
    """A stage of which nothing is known."""
    options: list[list[int | None]] = [[None] * len(ACTIONS)]
    return Seen(
        np.zeros((1, STAGE_FEATURES), np.float32),
        np.zeros(GLOBAL_FEATURES, np.float32),
        options,
        np.ones((1, len(ACTIONS)), np.bool_),
    )


def save_weights(path: Path, weights: Weights, recipe: str) -> None:
    """Write weights, with the recipe that made them, into an npz file."""
    with path.open("wb") as file:
        np.savez_compressed(file, format=np.array(FORMAT), recipe=np.array(recipe), **dict(weights))  # type: ignore[arg-type]


def load_weights(path: Path | None = None) -> dict[str, npt.NDArray[np.float32]]:
    """Weights from an npz file; nothing in it is ever executed.

    Args:
        path: The file; None = the one in the package.

    Raises:
        PipelineError: If it holds no weights, or those of another version.
    """
    try:
        where = resources.files("intune.tuners").joinpath("agent.npz") if path is None else path
        with where.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise PipelineError(f"{path or 'agent.npz of the package'} holds no weights of an agent: {error}") from error
    made_for = str(found.get("format", "nothing that it says"))
    if made_for != FORMAT:
        raise PipelineError(
            f"{path} was made for {made_for!r}, this agent is {FORMAT!r}: train one with intune pretrain"
        )
    weights = {name: found[name].astype(np.float32) for name in LAYERS if name in found}
    try:
        usable = bool(np.isfinite(gains(weights, _blank())).all())
    except (KeyError, ValueError):
        usable = False
    if not usable:
        shapes = {name: each.shape for name, each in weights.items()}
        raise PipelineError(f"{path} holds layers that do not fit together or are no numbers: {shapes}")
    return weights


class Agent:
    """A tuner that corrects the fitted model by learned weights.

    Args:
        weights: By layer, the first axis of each being the network, as `load_weights` gives them; or a file of them.
            None = those of the package. Where a file cannot be used, a warning says why, and the model decides alone:
            training never stops because of it.
    """

    def __init__(self, weights: Weights | Path | None = None) -> None:
        self._weights = weights if isinstance(weights, Mapping) else _loaded(weights)
        self._model = Model()
        self._senses = Senses()
        self._detector = Detector()
        self._expected: float | None = None
        self._switchback = Switchback()
        self._stages: tuple[str, ...] = ()
        self._found = "nothing"

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What the model proposes, but for stages that are surely better off otherwise."""
        starved = snapshot.consumer.wait_share > STARVED
        rate = snapshot.consumer.rows / snapshot.window_seconds if snapshot.window_seconds > 0 else 0.0
        self._detector.observe(self._expected, rate, starved)
        proposal = self._model.propose(snapshot, budget)
        seen = self._senses.look(snapshot, budget, proposal, self._model)
        wanted = self._decide(proposal, seen, snapshot)
        wanted = self._corrected(wanted, rate if starved else None, snapshot, budget)
        self._senses.decided(snapshot, budget, wanted.concurrency)
        expected = proposal.expected_rows_per_second
        if wanted.concurrency != proposal.concurrency:
            expected = self._model.expected(wanted, snapshot, budget)
        self._expected = None if self._model.opinion.begins else expected
        return replace(wanted, expected_rows_per_second=expected)

    @property
    def version(self) -> str:
        """Which weights it has: results of others are not its own."""
        parts = [self._weights[name].tobytes() for name in LAYERS] if self._weights is not None else []
        return hashlib.sha256(b"".join([FORMAT.encode(), *parts])).hexdigest()[:12]

    def state_dict(self) -> dict[str, object]:
        """What was learnt on this pipeline beyond what a window shows, for `load_state_dict` of the next run: JSON."""
        return {"stages": list(self._stages), "factors": dict(self._switchback.factors)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Begin with what an earlier run learnt; it counts only if the stages turn out to be the same.

        Raises:
            PipelineError: If it is nothing that `state_dict` gave.
        """
        stages, factors = state.get("stages"), state.get("factors")
        if not isinstance(stages, list) or not isinstance(factors, Mapping):
            raise PipelineError(f"expected what Agent.state_dict() gave, got {state!r}")
        if not all(isinstance(value, int | float) and LEAST <= value <= MOST for value in factors.values()):
            raise PipelineError(f"factors must lie between {LEAST} and {MOST}, got {factors!r}")
        self._stages = tuple(map(str, stages))
        self._switchback = Switchback({str(name): float(value) for name, value in factors.items()})

    def _decide(self, proposal: Allocation, seen: Seen, snapshot: Snapshot) -> Allocation:
        """By the policy while the run begins, else by the model."""
        if not self._detector.fits:
            return _because(proposal, UNLIKE)
        if self._weights is None or self._senses.step >= BEGINNING:
            return proposal
        levels, reasons = dict(proposal.concurrency), dict(proposal.reasons)
        for place, (stage, action) in enumerate(zip(snapshot.stages, self.choose(seen), strict=True)):
            if action:
                model = levels[stage.name] or "open"
                levels[stage.name] = seen.options[place][action]
                reasons[stage.name] = f"{ACTIONS[action]}, by what was learnt; the model would say {model}"
        return replace(proposal, concurrency=levels, reasons=reasons)

    def _corrected(self, wanted: Allocation, rate: float | None, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The same with what experiments on this pipeline have found, or are about to."""
        names = tuple(stage.name for stage in snapshot.stages)
        if self._stages != names:
            if self._switchback.factors:
                warnings.warn(f"what was learnt is of stages {self._stages}, not of {names}: left out", stacklevel=3)
            self._stages, self._switchback = names, Switchback()
        if any(event.kind == "budget" for event in snapshot.events):
            self._switchback = Switchback()
        limits = {stage.name: most_useful(stage.info, budget) for stage in snapshot.stages}
        if self._detector.fits:
            self._switchback.stop()
        elif rate is not None:
            found = self._switchback.observe(rate, _by_fullness(snapshot, limits))
            if found is not None:
                self._found = found
        levels, reasons = dict(wanted.concurrency), dict(wanted.reasons)
        for name in names:
            if (multiple := self._switchback.multiple(name)) != 1:
                level = max(1, min(limits[name], round((wanted.concurrency[name] or limits[name]) * multiple)))
                levels[name] = level if level < limits[name] else None
                reasons[name] = f"{multiple:g} times as many as without what is tried here; last found: {self._found}"
        return replace(wanted, concurrency=levels, reasons=reasons)

    def choose(self, seen: Seen) -> npt.NDArray[np.int64]:
        """int[S]: places in `ACTIONS`; 0 = as the model says."""
        assert self._weights is not None
        found = gains(self._weights, seen)
        sure = found.mean(axis=0) - CAUTION * found.std(axis=0)
        sure = np.where(seen.allowed, sure, -np.inf)
        sure[:, 0] = LEAST_GAIN
        return np.asarray(sure.argmax(axis=-1))


def _loaded(path: Path | None) -> Weights | None:
    try:
        return load_weights(path)
    except PipelineError as error:
        warnings.warn(f"{error}; the fitted model decides alone", stacklevel=3)
        return None


def _by_fullness(snapshot: Snapshot, limits: Mapping[str, int]) -> list[str]:
    """The stages that may have another concurrency, those that use most of theirs first."""
    now = in_force(snapshot)
    full = {
        stage.name: stage.in_hand_mean / min(now[stage.name] or limits[stage.name], limits[stage.name])
        for stage in snapshot.stages
        if limits[stage.name] > 1
    }
    return sorted(full, key=lambda name: -full[name])


def _because(proposal: Allocation, why: str) -> Allocation:
    return replace(proposal, reasons={name: f"{reason}; {why}" for name, reason in proposal.reasons.items()})
