"""Batches as tensors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from intune._words import count

_NO_NUMBERS = "OUSMmV"
"""Kinds of arrays that are no numbers: objects, texts, bytes, times, records."""

_SWAP = "one in foreign byte order (> or <) becomes native by array.astype(array.dtype.newbyteorder('='))"


class ToTorch:
    """Gives a batch as a dict of tensors, grouped on request; torch is imported with the first batch.

    Numbers and booleans of n rows become tensors [n]; list columns become a pair (values, offsets) with
    offsets int64[n + 1]; fixed-size lists become [n, size]. Tensors share memory with the batch where they can.

    Args:
        device: "cpu", or where the tensors are copied through pinned memory.
        groups: By name, columns put side by side in one tensor [n, columns].
    """

    def __init__(self, device: str, groups: Mapping[str, Sequence[str]]) -> None:
        self.device, self.groups = device, dict(groups)

    def __call__(self, batch: Any) -> Any:
        """Convert one batch.

        Raises:
            TypeError: If a column cannot be a tensor; all such columns are named.
            ValueError: If a group names a column that is not there, or a column has missing values.
        """
        if isinstance(batch, pa.RecordBatch):
            columns: Any = {name: _arrow(name, batch.column(name)) for name in batch.schema.names}
        elif isinstance(batch, dict):
            columns = dict(batch)
        else:
            return self._move(_nested(batch))
        for group, names in self.groups.items():
            missing = [name for name in names if name not in columns]
            if missing:
                raise ValueError(f"group {group!r} names columns {missing}, but the batch has {list(columns)}")
        inside = {name for names in self.groups.values() for name in names}
        _check_columns(columns, inside)
        grouped = {group: _side_by_side(group, [columns[n] for n in names]) for group, names in self.groups.items()}
        rest = {name: column for name, column in columns.items() if name not in inside}
        return self._move({name: _nested(column, f"column {name!r}") for name, column in {**grouped, **rest}.items()})

    def _move(self, value: Any) -> Any:
        if self.device == "cpu":
            return value
        if isinstance(value, dict):
            return {key: self._move(element) for key, element in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._move(element) for element in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._move(element) for element in value)
        if hasattr(value, "untyped_storage"):
            pinned = value.pin_memory() if self.device.startswith("cuda") else value
            return pinned.to(self.device, non_blocking=True)
        return value


def _check_columns(columns: Mapping[str, Any], inside: Collection[str]) -> None:
    """Refuse columns that cannot be tensors, all of them at once; those `inside` groups become native when copied.

    Raises:
        TypeError: With the names.
    """
    arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    bad = {
        name: array.dtype
        for name, array in arrays.items()
        if array.dtype.kind in _NO_NUMBERS or not (name in inside or _known(array.dtype))
    }
    if bad:
        kinds = {name: str(dtype) for name, dtype in bad.items()}
        swap = "" if all(dtype.isnative for dtype in bad.values()) else f"; {_SWAP}"
        raise TypeError(f"columns {kinds} cannot be tensors: map them to numbers before to_torch, or drop them{swap}")


def _known(dtype: np.dtype[Any]) -> bool:
    """Whether torch has numbers of this kind: in native byte order, and no floats wider than 64 bits."""
    return dtype.isnative and dtype.char not in "gG"


def _nested(value: Any, where: str = "the batch") -> Any:
    """Arrays of a structure as tensors; what is neither passes through.

    Raises:
        TypeError: If an array has numbers that torch does not know; the message says where it is.
    """
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind in _NO_NUMBERS:
            return value
        if not _known(value.dtype):
            how = "map it to float64 or narrower" if value.dtype.isnative else _SWAP
            raise TypeError(f"{where} is an array of {value.dtype}, which cannot be a tensor: {how}")
        if not value.flags.writeable or not value.flags.c_contiguous:
            value = value.copy()  # torch cannot promise not to write, and cannot hold negative strides
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _nested(element, f"{where}[{key!r}]") for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = value._fields
        return type(value)(*(_nested(each, f"{where}.{name}") for name, each in zip(names, value, strict=True)))
    if isinstance(value, (tuple, list)):
        return type(value)(_nested(element, f"{where}[{number}]") for number, element in enumerate(value))
    if isinstance(value, (np.number, np.bool_)):
        return torch.as_tensor(value)
    return value


def _side_by_side(group: str, columns: list[Any]) -> Any:
    if any(isinstance(column, tuple) for column in columns):
        raise ValueError(f"group {group!r} has a list column: list columns stay (values, offsets) of their own")
    flat = [column[:, None] if column.ndim == 1 else column for column in columns]
    joined = np.concatenate(flat, axis=1)
    return joined if joined.dtype.isnative else joined.astype(joined.dtype.newbyteorder("="))


def _arrow(name: str, array: pa.Array) -> Any:
    """A column of Arrow as an array, or a pair (values, offsets) for lists."""
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return _arrow(name, array.flatten()), offsets
    if pa.types.is_fixed_size_list(kind):
        if array.null_count:
            raise _missing(name, array)
        return _arrow(name, array.flatten()).reshape(len(array), kind.list_size)
    if array.null_count:
        raise _missing(name, array)
    if pa.types.is_dictionary(kind):
        return _arrow(name, array.dictionary_decode())
    return array.to_numpy(zero_copy_only=False)


def _missing(name: str, array: pa.Array) -> ValueError:
    row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
    return ValueError(
        f"column {name!r} has {count(array.null_count, 'missing value')}, the first in row {row} of the batch: "
        "fill them before to_torch (an integer column with missing values would lose digits as float)"
    )
