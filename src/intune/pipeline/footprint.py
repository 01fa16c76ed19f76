"""How much memory a payload keeps alive, buffer by buffer.

A slice is charged what it keeps alive, and two payloads that share a buffer share its key, so that a
ledger can charge it once.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

Footprint = dict[int, int]
"""Bytes by key of a buffer: its address, or the id of an object."""

_SCALAR_BYTES = {int: 32, float: 24, bool: 0, type(None): 0, complex: 32}
_SLOT_BYTES = 8
_NESTING = 4
"""Containers deeper than this are charged by their own size: a cap on the cost, and a guard against cycles."""


def footprint(payload: Any) -> Footprint:
    """Distinct buffers that the payload keeps alive."""
    found: Footprint = {}
    _add(payload, found, _NESTING)
    return found


def run_bytes(samples: list[Any]) -> int:
    """Bytes of a run of samples, cheap for plain numbers; what samples share is counted once."""
    total, found = _SLOT_BYTES * len(samples), Footprint()
    for sample in samples:
        known = _SCALAR_BYTES.get(type(sample))
        if known is not None:
            total += known
        else:
            _add(sample, found, _NESTING)
    return total + sum(found.values())


def _add(value: Any, found: Footprint, depth: int) -> None:
    if isinstance(value, np.ndarray):
        _add_ndarray(value, found)
        if value.dtype.hasobject and depth:
            for element in value.flat:
                _add(element, found, depth - 1)
    elif isinstance(value, pa.RecordBatch):
        for column in value.columns:
            _add_array(column, found)
    elif isinstance(value, pa.Array):
        _add_array(value, found)
    elif isinstance(value, pa.Buffer):
        _add_buffer(value, found)
    elif isinstance(value, (pa.Table, pa.ChunkedArray)):
        for part in value.to_batches() if isinstance(value, pa.Table) else value.chunks:
            _add(part, found, depth)
    elif isinstance(value, (str, bytes, bytearray)):
        found[id(value)] = sys.getsizeof(value)
    elif type(value) in _SCALAR_BYTES:
        found[id(value)] = _SCALAR_BYTES[type(value)]
    elif id(value) in found:
        return  # a container that was met before
    elif isinstance(value, dict):
        found[id(value)] = sys.getsizeof(value)
        if depth:
            for key, element in value.items():
                if not isinstance(key, str):
                    _add(key, found, depth - 1)
                _add(element, found, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        found[id(value)] = sys.getsizeof(value)
        if depth:
            for element in value:
                _add(element, found, depth - 1)
    else:
        _add_other(value, found, depth)


def _add_ndarray(array: np.ndarray[Any, Any], found: Footprint) -> None:
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    owner = base.base
    if isinstance(owner, memoryview) and isinstance(owner.obj, (bytes, bytearray)):
        owner = owner.obj
    if isinstance(owner, (bytes, bytearray, pa.Array, pa.Buffer)) or hasattr(owner, "untyped_storage"):
        _add(owner, found, 0)
    else:  # its own memory, or a part of something that is not ours to charge, such as a file
        found[base.__array_interface__["data"][0]] = max(int(base.nbytes), int(getattr(owner, "nbytes", 0)))


def _add_buffer(buffer: pa.Buffer, found: Footprint) -> None:
    while buffer.parent is not None:  # a slice of a larger allocation keeps all of that alive
        buffer = buffer.parent
    found[buffer.address] = buffer.size


def _add_array(array: pa.Array, found: Footprint) -> None:
    for buffer in array.buffers():
        if buffer is not None:
            _add_buffer(buffer, found)
    for dictionary in _dictionaries(array):
        _add_array(dictionary, found)


def _dictionaries(array: pa.Array) -> Iterator[pa.Array]:
    """Dictionaries of an array, at whatever depth: its buffers do not include theirs."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield array.dictionary
    elif isinstance(array, pa.ExtensionArray):
        yield from _dictionaries(array.storage)
    elif pa.types.is_struct(kind) or pa.types.is_union(kind):
        for number in range(kind.num_fields):
            yield from _dictionaries(array.field(number))
    elif pa.types.is_nested(kind):
        yield from _dictionaries(array.values)


def _add_other(value: Any, found: Footprint, depth: int) -> None:
    if hasattr(value, "untyped_storage") and value.device.type == "cpu":
        _add_tensor(value, found)
        return
    found[id(value)] = sys.getsizeof(value)
    fields = getattr(value, "__dict__", None)
    if fields and depth:
        for element in fields.values():
            _add(element, found, depth - 1)


def _add_tensor(tensor: Any, found: Footprint) -> None:
    try:
        memory = tensor.untyped_storage()
    except NotImplementedError:  # a sparse one: values, and at most one index a dimension
        found[id(tensor)] = int(tensor._nnz() * (tensor.element_size() + 8 * tensor.ndim))
        return
    found[memory.data_ptr()] = int(memory.nbytes())
