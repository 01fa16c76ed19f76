"""Saved positions: what identifies a loader, and the state from which another one goes on."""

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

from intune._errors import StateError
from intune.pipeline.chain import Pipeline, Stage
from intune.pipeline.run import Position, Share

STATE_VERSION = 1
PLAN_VERSION = 1
"""Changes whenever the same options would give another order of rows."""


def identity(pipeline: Pipeline, share: Share) -> dict[str, Any]:
    """JSON of everything that the order of rows depends on; free of machine, tuner and executors."""
    source = pipeline.source.identity()
    return {
        "source": {"kind": pipeline.source.kind, **source},
        "chain": [_stage(stage) for stage in pipeline.stages],
        "seed": share.seed,
        "rank": share.rank,
        "world_size": share.world_size,
        "on_uneven": share.on_uneven,
    }


def digest(value: Any) -> str:
    """A short digest of JSON, the same everywhere."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def make_state(known: Mapping[str, Any], epoch: int, position: Position) -> dict[str, Any]:
    """The state of a loader as JSON."""
    return {
        "version": STATE_VERSION,
        "plan_version": PLAN_VERSION,
        "identity": json.loads(json.dumps(known)),
        "epoch": epoch,
        "source": position.source,
        "sequencers": [{"emission": emission, "row": row} for emission, row in position.levels],
        "drop": position.drop,
    }


def read_state(state: Any, known: Mapping[str, Any], levels: int) -> tuple[int, Position]:
    """Epoch and position of a saved state.

    Raises:
        StateError: If it is not a state, or was saved by a loader that gives other rows; the message names
            the first difference.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"expected what state_dict() gave, got {type(state).__name__}")
    if "version" not in state:
        raise StateError(
            f"expected what state_dict() gave, got a dict without 'version', with keys {list(state)!r:.200}"
        )
    for name, ours in (("version", STATE_VERSION), ("plan_version", PLAN_VERSION)):
        if state.get(name) != ours:
            raise StateError(
                f"the state has {name} {state.get(name)!r}, this release reads {ours}: start the epoch anew"
            )
    difference = _difference(state.get("identity"), json.loads(json.dumps(known)), "identity")
    if difference is not None:
        raise StateError(f"the state was saved by another loader: {difference}")
    try:
        sequencers = [(_number(entry["emission"]), _number(entry["row"])) for entry in state["sequencers"]]
        numbers = [_number(state[name]) for name in ("epoch", "source", "drop")]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {error!r}") from error
    if sequencers and len(sequencers) != levels:
        raise StateError(f"the state is damaged: it has {len(sequencers)} sequencers, the chain has {levels}")
    return numbers[0], Position(numbers[1], tuple(sequencers), numbers[2])


def _number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"expected a number >= 0, got {value!r:.80}")


def _stage(stage: Stage) -> dict[str, Any]:
    named = {"kind": stage.kind, "function": _function(stage.function), "name": stage.name, "rng": stage.rng}
    options = {name: value for name, value in stage.options.items() if name != "device"}  # that is the machine's
    return {**named, **options}


def _function(function: Any) -> str | None:
    """Module and qualified name: functions are told apart by name, not by their code."""
    if function is None:
        return None
    inner = function.func if isinstance(function, functools.partial) else function
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    module = "__main__" if named.__module__ == "__mp_main__" else named.__module__
    return f"{module}.{named.__qualname__}"


def _difference(saved: Any, ours: Any, where: str) -> str | None:
    if isinstance(saved, Mapping) and isinstance(ours, Mapping):
        names = {**ours, **saved}
        pairs = [(f"{where}.{name}", saved.get(name, _MISSING), ours.get(name, _MISSING)) for name in names]
    elif isinstance(saved, list) and isinstance(ours, list):
        longest = itertools.zip_longest(saved, ours, fillvalue=_MISSING)
        pairs = [(f"{where}[{number}]", *pair) for number, pair in enumerate(longest)]
    else:
        same = type(saved) is type(ours) and saved == ours
        return None if same else f"{where} is {saved!r:.200} in the state and {ours!r:.200} here"
    return next((found for path, left, right in pairs if (found := _difference(left, right, path))), None)


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()
