"""The learned agent: it departs from what a fitted model proposes where it has learnt that the model errs.

Each decision:

1. `Model` learns from the window and proposes an allocation.
2. `Senses` turns the window, and what the model makes of it, into numbers that are free of scale.
3. `moves` lists a dozen joint departures from the proposal: all open, half of the fullest stage, ...
4. A network whose weights all stages share says how much each of them would gain over following the model, in shares
   of its rate over the next `HORIZON` decisions. It sees any number of stages, by their mean and maximum.
5. The move that surely gains most is made and stays for `HOLD` decisions: several networks, each trained on a part of
   the scenarios, must agree on it. Where none does, the model is followed.

What the networks say is the advantage Q(s, a) - Q(s, follow) of a move. It is learned in simulated time by policy
iteration with paired rollouts (Lagoudakis & Parr 2003; Dimitrakakis & Lagoudakis 2008): `intune.sim.train`. numpy only.
"""

import hashlib
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.tuners._moves import MOVE_FEATURES, Move, move_features, moves
from intune.tuners._senses import GLOBAL_FEATURES, STAGE_FEATURES, Seen, Senses
from intune.tuners.model import Model

Weights = Mapping[str, npt.NDArray[np.float32]]

HOLD, HORIZON = 3, 6
"""Decisions for which a move stays, and over which its gain is counted."""

LEAST_GAIN = 0.02
"""Gain over the model, as a share of its rate, from which a move is made."""

CAUTION = 1.0
"""Deviations of the networks by which the gain must be above that."""

FORMAT = f"intune agent 2: {STAGE_FEATURES} + {MOVE_FEATURES} + {GLOBAL_FEATURES} features"
"""What a file of weights says of itself. Raised with each change of what a feature or a move means."""

LAYERS = tuple(f"{layer}.{part}" for layer in ("stage", "hidden", "whole", "gain") for part in "wb")


def gains(weights: Weights, seen: Seen, departures: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32[K, C]: by each of K networks, the gain of each of C departures over the first of them.

    Args:
        weights: By layer; the first axis is the network.
        seen: The state.
        departures: float32[C, S, MOVE_FEATURES], as `move_features` gives them.
    """
    first = weights["stage.w"][:, None]
    of_stages, of_moves, of_whole = np.split(first, (STAGE_FEATURES, STAGE_FEATURES + MOVE_FEATURES), axis=2)
    same = seen.stages @ of_stages + seen.whole[None] @ of_whole + weights["stage.b"][:, None]
    hidden = np.maximum(same + departures @ of_moves, 0)
    hidden = np.maximum(hidden @ weights["hidden.w"][:, None] + weights["hidden.b"][:, None], 0)
    whole = np.broadcast_to(seen.whole, (*hidden.shape[:2], GLOBAL_FEATURES))
    pool = np.concatenate([hidden.mean(axis=2), hidden.max(axis=2), whole], axis=-1)
    last = np.maximum(pool @ weights["whole.w"] + weights["whole.b"], 0)
    found = (last @ weights["gain.w"] + weights["gain.b"])[..., 0]
    return np.asarray(found - found[:, :1], dtype=np.float32)


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
        usable = bool(np.isfinite(gains(weights, *_blank())).all())
    except (KeyError, ValueError):
        usable = False
    if not usable:
        shapes = {name: each.shape for name, each in weights.items()}
        raise PipelineError(f"{path} holds layers that do not fit together or are no numbers: {shapes}")
    return weights


def _blank() -> tuple[Seen, npt.NDArray[np.float32]]:
    """A stage of which nothing is known, and nothing to be done."""
    seen = Seen(np.zeros((1, STAGE_FEATURES), np.float32), np.zeros(GLOBAL_FEATURES, np.float32))
    return seen, np.zeros((1, 1, MOVE_FEATURES), np.float32)


class Agent:
    """A tuner that departs from the fitted model by learned weights.

    Args:
        weights: By layer, the first axis of each being the network, as `load_weights` gives them; or a file of them.
            None = those of the package. Where a file cannot be used, a warning says why, and the model decides alone:
            training never stops because of it.
    """

    def __init__(self, weights: Weights | Path | None = None) -> None:
        self._weights = weights if isinstance(weights, Mapping) else _loaded(weights)
        self._model = Model()
        self._senses = Senses()
        self._move: Move | None = None
        self._gain = 0.0
        self._left = 0

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What the model proposes, but for a move that surely gains."""
        proposal = self._model.propose(snapshot, budget)
        seen = self._senses.look(snapshot, budget, proposal, self._model)
        if self._left > 0 and not any(event.kind == "budget" for event in snapshot.events):
            self._left -= 1
        else:
            self._move = self._choose(seen, snapshot, budget, proposal)
            self._left = HOLD - 1 if self._move is not None else 0
        wanted = proposal if self._move is None else self._departing(proposal, self._move)
        self._senses.decided(snapshot, budget, wanted.concurrency)
        return wanted

    @property
    def version(self) -> str:
        """Which weights it has: results of others are not its own."""
        parts = [self._weights[name].tobytes() for name in LAYERS] if self._weights is not None else []
        return hashlib.sha256(b"".join([FORMAT.encode(), *parts])).hexdigest()[:12]

    def _choose(self, seen: Seen, snapshot: Snapshot, budget: Budget, proposal: Allocation) -> Move | None:
        if self._weights is None or not (choices := moves(snapshot, budget, proposal)):
            return None
        return self.choose(seen, choices, move_features(snapshot, budget, proposal, [{}, *(m.levels for m in choices)]))

    def choose(self, seen: Seen, choices: Sequence[Move], features: npt.NDArray[np.float32]) -> Move | None:
        """The move that surely gains most; None = as the model says."""
        assert self._weights is not None
        found = gains(self._weights, seen, features)[:, 1:]
        sure = found.mean(axis=0) - CAUTION * found.std(axis=0)
        best = int(sure.argmax())
        self._gain = float(found[:, best].mean())
        return choices[best] if sure[best] > LEAST_GAIN else None

    def _departing(self, proposal: Allocation, move: Move) -> Allocation:
        names = list(proposal.concurrency)
        reasons = dict(proposal.reasons)
        for name in move.levels:
            model = proposal.concurrency[name] or "open"
            reasons[name] = f"{move.name}, by what was learnt (gains {self._gain:+.0%}); the model would say {model}"
        levels = {name: move.levels.get(name, proposal.concurrency[name]) for name in names}
        wanted = replace(proposal, concurrency=levels, reasons=reasons)
        return replace(wanted, expected_rows_per_second=None)


def _loaded(path: Path | None) -> Weights | None:
    try:
        return load_weights(path)
    except PipelineError as error:
        warnings.warn(f"{error}; the fitted model decides alone", stacklevel=3)
        return None
