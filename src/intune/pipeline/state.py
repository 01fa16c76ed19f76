"""Saved positions: what identifies a loader, and the state from which another one goes on."""

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from intune._errors import StateError
from intune._words import count
from intune.pipeline.chain import Pipeline, Stage
from intune.pipeline.run import Position, Share

STATE_VERSION = 1
PLAN_VERSION = 1
"""Changes whenever the same options would give another order of rows."""


@runtime_checkable
class Sampled(Protocol):
    """A source whose order may be fixed by something that an identity cannot see into: a sampler."""

    def order(self, epoch: int) -> Any:
        """The order of an epoch, as the next run of it will have it; None = the plan decides on it."""
        ...

    def order_digest(self, epoch: int) -> str | None:
        """What tells the order that an epoch was given last from every other one; None = the plan decides on it."""
        ...


@runtime_checkable
class Dated(Protocol):
    """A source of files that may know when they were last changed."""

    def modified(self) -> list[int | None] | str | None:
        """Nanoseconds since 1970 of each file, or a digest where there are many; None = not known."""
        ...


class Identity(dict[str, Any]):
    """JSON of everything that the order of rows depends on; free of machine, tuner and executors.

    Attributes:
        source: Says the rest, which a state has beside it: the order of an epoch, times of files.
    """

    def __init__(self, parts: Mapping[str, Any], source: Any = None) -> None:
        super().__init__(parts)
        self.source = source


def identity(pipeline: Pipeline, share: Share) -> Identity:
    """What tells a loader from one that gives other rows, or the same in another order."""
    source = pipeline.source.identity()
    parts = {
        "source": {"kind": pipeline.source.kind, **source},
        "chain": [_stage(stage) for stage in pipeline.stages],
        "seed": share.seed,
        "rank": share.rank,
        "world_size": share.world_size,
        "on_uneven": share.on_uneven,
    }
    return Identity(parts, pipeline.source)


def digest(value: Any) -> str:
    """A short digest of JSON, the same everywhere."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def make_state(known: Mapping[str, Any], epoch: int, position: Position) -> dict[str, Any]:
    """The state of a loader as JSON.

    In the middle of an epoch it has a digest of the order that a sampler gave it.
    """
    order, modified = _order(known, epoch, position), _modified(known)
    return {
        "version": STATE_VERSION,
        "plan_version": PLAN_VERSION,
        "identity": json.loads(json.dumps(known)),
        "epoch": epoch,
        "source": position.source,
        "sequencers": [{"emission": emission, "row": row} for emission, row in position.levels],
        "drop": position.drop,
        **({} if order is None else {"order": order}),
        **({} if modified is None else {"modified": modified}),
    }


def read_state(state: Any, known: Mapping[str, Any], levels: int) -> tuple[int, Position]:
    """Epoch and position of a saved state.

    Files that have the same size and another time are said in a warning only: copies have, and other machines.

    Raises:
        StateError: If it is not a state, or was saved by a loader that gives other rows, or whose sampler gave the
            epoch another order; the message names the first difference.
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
    epoch, position = numbers[0], Position(numbers[1], tuple(sequencers), numbers[2])
    if isinstance(known, Identity) and isinstance(known.source, Sampled) and position != Position():
        known.source.order(epoch)  # read the sampler again if another epoch has come since
    if state.get("order") != _order(known, epoch, position):
        raise StateError(
            f"the sampler gives epoch {epoch} in another order than the one that the state was saved in, so that some "
            "samples would come twice and others never: make its order follow from the epoch alone, by a generator "
            "that it seeds anew in set_epoch(epoch), or leave sampler= out and say .shuffle(rows, seed=)"
        )
    _warn_of_times(state.get("modified"), known)
    return epoch, position


def _order(known: Mapping[str, Any], epoch: int, position: Position) -> str | None:
    """The digest of the epoch's order, where a part of it was given and a sampler made it."""
    source = known.source if isinstance(known, Identity) else None
    return source.order_digest(epoch) if isinstance(source, Sampled) and position != Position() else None


def _modified(known: Mapping[str, Any]) -> list[int | None] | str | None:
    source = known.source if isinstance(known, Identity) else None
    return source.modified() if isinstance(source, Dated) else None


def _warn_of_times(saved: Any, known: Mapping[str, Any]) -> None:
    ours = _modified(known)
    if saved is None or ours is None or saved == ours:
        return
    which = "files"
    if isinstance(saved, list) and isinstance(ours, list) and len(saved) == len(ours):
        names = [name for name, _ in known["source"]["files"]["files"]]
        other = [name for name, was, now in zip(names, saved, ours, strict=True) if was != now]
        which = ", ".join(other[:5]) + (f" and {count(len(other) - 5, 'more file', 'more files')}" if other[5:] else "")
    logging.getLogger("intune").warning(
        "%s: changed at another time than when the state was saved, with the same size. Copies of the same content "
        "are fine; if the content is another, start the epoch anew",
        which,
    )


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
