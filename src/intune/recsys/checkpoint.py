"""Model, optimizer and data position together, in one file that is safe to load and survives a kill.

The file is numpy's npz without pickled objects: an array for each tensor, and JSON for what is no tensor. It is
written beside its place, flushed to disk and renamed, so that there is always a whole one.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from intune._errors import StateError
from intune.recsys.whole import whole_file

SCHEMA = 1
_JSON = "json"


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Mapping[str, Any]
) -> None:
    """Replace the checkpoint at `path`, or leave the one that is there as it was.

    Args:
        path: The file; `path` + ".part" beside it is used meanwhile.
        model: Parameters and buffers of all dtypes that numpy has.
        optimizer: Its state by parameter; the options it was made with are not kept.
        position: JSON: where the run stands.

    Raises:
        OSError: If it cannot be written, as on a full disk; an older checkpoint stays.
    """
    arrays = {f"model/{name}": _array(tensor) for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer/{number}/{name}": _array(value) for name, value in values.items() if value is not None}
    text = json.dumps({"schema": SCHEMA, "position": dict(position)}).encode()
    with whole_file(path, suffix=".part", replace=True) as file:
        np.savez(file, allow_pickle=False, **{_JSON: np.frombuffer(text, np.uint8)}, **arrays)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bring model and optimizer to where they were, and give the position that was saved with them.

    Args:
        path: A file of `save_checkpoint`. No code in it is ever run.
        model: Made as the saved one was; changed in place, on whatever device it is.
        optimizer: The same.

    Raises:
        StateError: If there is no such file, it is damaged, or it belongs to another model.
    """
    with _opened(path) as (arrays, position):
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != _JSON}
    weights = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    _check_alike(path, model.state_dict(), weights)
    model.load_state_dict(weights)
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            _, number, key = name.split("/", 2)
            state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return position


def load_position(path: Path) -> dict[str, Any]:
    """The position alone; the tensors are not read.

    Raises:
        StateError: If there is no such file, or it is damaged.
    """
    with _opened(path) as (_, position):
        return position


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The arrays of a checkpoint, each read when it is asked for, and the position; faults become `StateError`."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays[_JSON].tobytes())
            if about.get("schema") != SCHEMA:
                raise StateError(f"{path} has schema {about.get('schema')!r}; this version reads {SCHEMA}")
            yield arrays, about["position"]
    except FileNotFoundError:
        raise StateError(f"there is no checkpoint {path}") from None
    except (OSError, EOFError, KeyError, AttributeError, TypeError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{path} is no whole checkpoint: {error}") from error


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _check_alike(path: Path, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    differ = list(_differences(ours, theirs))
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise StateError(f"{path} belongs to another model: {'; '.join(differ[:3])}{more}")


def _differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name in {**ours, **theirs}:
        one, other = (
            f"{side[name].dtype} {list(side[name].shape)}" if name in side else "missing" for side in (ours, theirs)
        )
        if one != other:
            yield f"{name} is {other} there and {one} here"
