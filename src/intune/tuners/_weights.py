"""Weights of small networks in files: arrays of numbers only, with a word that says what they are for."""

import itertools
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intune._errors import PipelineError

Floats = NDArray[np.float64]
Layers = tuple[tuple[Floats, Floats], ...]


HEADER = 4096
"""Bytes that an array takes in a file beside its numbers, at most."""


def shipped(name: str) -> Traversable:
    """A file of weights that comes with the library."""
    return files("intune.tuners") / name


def write(path: Path, kind: str, layers: Sequence[tuple[Floats, Floats]]) -> None:
    """Write layers as float32 arrays `matrix_0` [inputs, outputs], `bias_0` [outputs] and so on, and `format`.

    Raises:
        OSError: If it cannot be written.
    """
    arrays: dict[str, Any] = {"format": np.array(kind)}
    for number, (matrix, bias) in enumerate(layers):
        arrays[f"matrix_{number}"], arrays[f"bias_{number}"] = np.float32(matrix), np.float32(bias)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def read(path: Path | Traversable, kind: str, sizes: Sequence[int]) -> Layers:
    """Layers that were written by `write`.

    Args:
        path: The file.
        kind: What must stand in it as its format.
        sizes: Inputs, sizes of the layers between, outputs.

    Raises:
        PipelineError: If the file cannot be read, is for something else, or its arrays are of other shapes or hold
            what is no finite number.
    """
    shapes = dict(_shapes(sizes))
    try:
        with path.open("rb") as opened:
            members = {info.filename: info.file_size for info in zipfile.ZipFile(opened).infolist()}
            most = {"format": HEADER} | {name: HEADER + 4 * math.prod(shape) for name, shape in shapes.items()}
            # Only what is wanted is read, and only if it has the right size: a small file can hold gigabytes.
            wanted = [name for name in most if members.get(f"{name}.npy", math.inf) <= most[name]]
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name]) for name in wanted}
    # By where a file is damaged, zipfile, zlib and numpy raise errors of a dozen classes.
    except Exception as error:
        raise PipelineError(f"{path} holds no weights that can be read: {error}") from error
    found = str(arrays["format"]) if "format" in arrays else None
    if found != kind:
        raise PipelineError(f"{path} is of the format {found!r}, wanted {kind!r}: give a file made for this tuner")
    flat = [_array(arrays, name, shape, path) for name, shape in shapes.items()]
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _shapes(sizes: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each array, matrix and bias of each layer in turn."""
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        yield f"matrix_{number}", (inputs, outputs)
        yield f"bias_{number}", (outputs,)


def forward(layers: Layers, inputs: Floats) -> Floats:
    """What a network of such layers gives, with rectified units between them: float64[n, outputs] of [n, inputs]."""
    *hidden, (matrix, bias) = layers
    for weights, offset in hidden:
        inputs = np.maximum(0.0, inputs @ weights + offset)
    given: Floats = inputs @ matrix + bias
    return given


def _array(
    arrays: Mapping[str, NDArray[np.generic]], name: str, shape: tuple[int, ...], path: Path | Traversable
) -> Floats:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != np.float32:
        has = "none" if array is None else f"{array.dtype}{list(array.shape)}"
        raise PipelineError(f"{path}: {name} must be float32{list(shape)}, the file has {has}")
    if not np.isfinite(array).all():
        raise PipelineError(f"{path}: {name} holds what is no finite number")
    return array.astype(np.float64)
