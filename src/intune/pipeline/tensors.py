"""Batches as tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


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
        grouped = {group: _side_by_side(group, [columns[n] for n in names]) for group, names in self.groups.items()}
        inside = {name for names in self.groups.values() for name in names}
        rest = {name: column for name, column in columns.items() if name not in inside}
        bad = [name for name, column in rest.items() if isinstance(column, np.ndarray) and column.dtype.kind in "OUSMm"]
        if bad:
            kinds = {name: str(rest[name].dtype) for name in bad}
            raise TypeError(f"columns {kinds} cannot be tensors: map them to numbers before to_torch, or drop them")
        return self._move({name: _nested(column) for name, column in {**grouped, **rest}.items()})

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


def _nested(value: Any) -> Any:
    """Arrays of a structure as tensors; what is neither passes through."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUSMm":
            return value
        if not value.flags.writeable or not value.flags.c_contiguous:
            value = value.copy()  # torch cannot promise not to write, and cannot hold negative strides
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _nested(element) for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_nested(element) for element in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_nested(element) for element in value)
    if isinstance(value, (np.number, np.bool_)):
        return torch.as_tensor(value)
    return value


def _side_by_side(group: str, columns: list[Any]) -> Any:
    if any(isinstance(column, tuple) for column in columns):
        raise ValueError(f"group {group!r} has a list column: list columns stay (values, offsets) of their own")
    flat = [column[:, None] if column.ndim == 1 else column for column in columns]
    return np.concatenate(flat, axis=1)


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
        f"column {name!r} has {array.null_count} missing values, the first in row {row} of the batch: "
        "fill them before to_torch (an integer column with missing values would lose digits as float)"
    )
