"""Model, optimizer and data position together, in one file that is safe to load and survives a kill.

The file is numpy's npz without pickled objects: an array for each tensor, and JSON for what is no tensor, with a list
of the arrays. It is written beside its place, flushed to disk and renamed, so that there is always a whole one.

A small file can unpack to any size. So names, dtypes and shapes are read from the headers first, and arrays only where
all of these are what the model and the optimizer hold.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from intune._errors import StateError
from intune.recsys.whole import whole_file

SCHEMA = 2
_JSON = "json"

MOST_JSON_BYTES = 64 * 2**20
"""More than any position and list of arrays takes."""

MOST_STATE_BYTES = 16
"""Bytes for each element of a parameter that an array of an optimizer's state may take, at most: a complex128."""

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


class _Header(NamedTuple):
    """What an array is, known without reading it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Mapping[str, Any]
) -> None:
    """Replace the checkpoint at `path`, or leave the one that is there as it was.

    Args:
        path: The file; a temporary one beside it is used meanwhile (`whole_file`).
        model: Parameters and buffers of all dtypes that numpy has.
        optimizer: Its state by parameter; the options it was made with are not kept.
        position: JSON: where the run stands.

    Raises:
        OSError: If it cannot be written, as on a full disk; an older checkpoint stays.
    """
    arrays = {**_of_model(model), **_of_optimizer(optimizer)}
    about = {"schema": SCHEMA, "position": dict(position), "optimizer": _kind(optimizer), "arrays": _shapes(arrays)}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with whole_file(path, replace=True) as file:
        np.savez(file, allow_pickle=False, **{_JSON: text}, **arrays)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bring model and optimizer to where they were, and give the position that was saved with them.

    Args:
        path: A file of `save_checkpoint`. No code in it is ever run.
        model: Made as the saved one was; changed in place, on whatever device it is.
        optimizer: The same.

    Raises:
        StateError: If there is no such file, it is damaged, or it belongs to another model or optimizer; both are as
            they were then.
    """
    about, arrays = _read(path, partial(_check_fits, path, model, optimizer))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in _below("model/", arrays).items()})
    state: dict[int, dict[str, Any]] = {}
    for name, value in _below("optimizer/", arrays).items():
        number, key = name.split("/", 1)
        state.setdefault(int(number), {})[key] = torch.from_numpy(value)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    position: dict[str, Any] = about["position"]
    return position


def load_position(path: Path) -> dict[str, Any]:
    """The position alone; the tensors are not read.

    Raises:
        StateError: If there is no such file, or it is damaged.
    """
    position: dict[str, Any] = _read(path, None)[0]["position"]
    return position


def _check_fits(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    headers: Mapping[str, _Header],
) -> None:
    """See that a checkpoint is whole and belongs to model and optimizer, before its arrays are read.

    Raises:
        StateError: If not; it names what differs.
    """
    found = {name: str(header) for name, header in headers.items()}
    _refuse(f"{path} is no whole checkpoint", _differences(found, about["arrays"], "in it", "in its list"))
    theirs, ours = {**about["arrays"], "optimizer": about["optimizer"]}, {"optimizer": _kind(optimizer)}
    ours |= _shapes({**_of_model(model), **_of_optimizer(optimizer)})
    if not _of_optimizer(optimizer):  # some have no state before their first step
        theirs = {name: value for name, value in theirs.items() if not name.startswith("optimizer/")}
        _refuse(f"{path} belongs to another model", _too_large(headers, optimizer))
    _refuse(f"{path} belongs to another model", _differences(theirs, ours, "there", "here"))


def _too_large(headers: Mapping[str, _Header], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """State of an optimizer that cannot be that of its parameters; a state is of their shape, or smaller."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name, header in headers.items():
        kind, _, rest = name.partition("/")
        if kind != "optimizer":
            continue
        number = rest.partition("/")[0]
        known = parameters[int(number)].numel() if number.isdecimal() and int(number) < len(parameters) else 0
        if header.size_bytes > MOST_STATE_BYTES * max(1, known):
            yield f"{name} is {header} there and for a parameter of {known} elements here"


Check: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, _Header]], None]


def _read(path: Path, check: Check | None) -> tuple[dict[str, Any], Arrays]:
    """What a checkpoint says of itself, and its arrays; whatever is wrong with it is a `StateError`.

    Args:
        path: The file.
        check: Called with what it says of itself and the headers, before arrays are read; None = they are not.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            headers = _headers(file)
            json_bytes = headers.pop(_JSON).size_bytes
            if json_bytes > MOST_JSON_BYTES:
                raise ValueError(f"the array {_JSON} takes {json_bytes:,} bytes, at most {MOST_JSON_BYTES:,} are read")
            about = json.loads(arrays[_JSON].tobytes())
            if isinstance(about, dict) and about.get("schema") != SCHEMA:
                raise StateError(f"{path} has schema {about.get('schema')!r}; this version reads {SCHEMA}")
            kinds = {name: type(about[name]) for name in ("position", "optimizer", "arrays")}
            if kinds != {"position": dict, "optimizer": str, "arrays": dict}:
                raise TypeError(f"it describes itself by {kinds}")
            if check is None:
                return about, {}
            check(about, headers)
            return about, {name: arrays[name] for name in headers}
    except StateError:
        raise
    except FileNotFoundError:
        raise StateError(f"there is no checkpoint {path}") from None
    # By where a file is damaged, zipfile, zlib and numpy raise errors of a dozen classes, NotImplementedError and
    # RuntimeError among them.
    except Exception as error:
        raise StateError(f"{path} is no whole checkpoint: {error or type(error).__name__}") from error


def _headers(file: IO[bytes]) -> dict[str, _Header]:
    """The arrays of an npz by name, each as large as its header says.

    Raises:
        ValueError: If one is not.
    """
    found = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version != (1, 0):  # headers of later versions may be of any size
                    raise ValueError(f"the array {name} is of npy version {version}, only (1, 0) is read")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                header = _Header(dtype, shape)
                if info.file_size != member.tell() + header.size_bytes:
                    raise ValueError(f"the array {name} takes {info.file_size:,} bytes, which is not {header}")
            found[name] = header
    return found


def _of_model(model: nn.Module) -> Arrays:
    return {f"model/{name}": _array(tensor) for name, tensor in model.state_dict().items()}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Arrays:
    return {
        f"optimizer/{number}/{name}": _array(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _array(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _shapes(arrays: Arrays) -> dict[str, str]:
    return {name: f"{value.dtype} {list(value.shape)}" for name, value in arrays.items()}


def _below(prefix: str, arrays: Arrays) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _refuse(why: str, differences: Iterator[str]) -> None:
    if differ := list(differences):
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise StateError(f"{why}: {'; '.join(differ[:3])}{more}")


def _differences(one: Mapping[str, str], other: Mapping[str, str], place: str, elsewhere: str) -> Iterator[str]:
    for name in {**one, **other}:
        this, that = one.get(name, "missing"), other.get(name, "missing")
        if this != that:
            yield f"{name.removeprefix('model/')} is {this} {place} and {that} {elsewhere}"
