"""Looking at columns: their values, what is missing in them, and what types they may have.

Integers never pass through floats: with a null in the column, Arrow's own way to numpy would lose digits above 2**53.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import PipelineError, SourceError
from intune.pipeline.blocks import Array

Column: TypeAlias = pa.Array | Array
"""One column of a block, n rows: Arrow (null = missing) or numpy (nothing is missing)."""

Missing: TypeAlias = npt.NDArray[np.bool_] | None
"""bool[n], true where a value is missing; None where none is."""


class Taker(Protocol):
    """What takes a column and says which types it may have."""

    @property
    def expects(self) -> str:
        """The types, for a message."""
        ...

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column may have the type."""
        ...


def values_and_missing(column: Column, kinds: str, expected: str) -> tuple[Array, Missing]:
    """Look at numbers without copying: the values (anything where missing), and where they are missing, if anywhere.

    Args:
        column: n numbers.
        kinds: The allowed kinds of numpy types, of "biuf"; booleans of Arrow are never allowed.
        expected: What is allowed, for the message.

    Raises:
        TypeError: If the column holds anything else.
    """
    if not isinstance(column, pa.Array):
        if column.dtype.kind not in kinds or column.ndim != 1:
            raise TypeError(f"expected {expected}, got {column.dtype} of shape {column.shape}")
        return column, None
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise TypeError(f"expected {expected}, got {column.type}")
    dtype = number_dtype(column.type)
    if dtype.kind not in kinds:
        raise TypeError(f"expected {expected}, got {column.type}")
    end = column.offset + len(column)
    if not end:
        return np.empty(0, dtype), None  # there may be no buffer
    values = np.frombuffer(column.buffers()[1], dtype, count=end)[column.offset :]
    return values, missing_in(column)


def number_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """The numpy type of an Arrow type of integers or floats."""
    # pyarrow before 21 needs pandas to be asked for it.
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def missing_in(column: Column) -> Missing:
    """Where a column is missing, if anywhere; Arrow's type `null` excepted, which has no bits that say so."""
    if not isinstance(column, pa.Array) or not column.null_count:
        return None
    bits = np.frombuffer(column.buffers()[0], np.uint8)
    valid = np.unpackbits(bits, count=column.offset + len(column), bitorder="little")
    return np.equal(valid[column.offset :], 0)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of `plain`: that of the values of a dictionary, uint8, int32 or int64, float64, or the same."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_boolean(kind):
        return pa.uint8()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if is_time(kind):
        return pa.int64()
    return pa.float64() if types.is_decimal(kind) else kind


def plain(column: Column) -> Column:
    """The column as numbers, or as texts of Arrow.

    Booleans become 0 and 1; dates, times and durations integers in the column's own unit (days or milliseconds for
    dates), time zones UTC; decimals float64; dictionaries their values. What is missing stays missing, NaT too.

    Raises:
        TypeError: If a numpy array has more than one dimension.
    """
    if not isinstance(column, pa.Array):
        if column.ndim != 1:
            raise TypeError(f"expected one value a row, got an array of shape {column.shape}")
        if column.dtype.kind in "iuf":
            return column
        column = pa.array(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = plain_type(column.type)
    return column if kind == column.type else column.cast(kind)


def is_time(kind: pa.DataType) -> bool:
    """Whether values are dates, times, timestamps or durations."""
    types = pa.types
    return any(test(kind) for test in (types.is_timestamp, types.is_date, types.is_time, types.is_duration))


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings or bytes of any of Arrow's kinds."""
    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    blobs = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in (*texts, *blobs))


def into_rows(values: npt.NDArray[np.int64] | npt.NDArray[np.uint64], rows: int, missing: Missing) -> Array:
    """1 + value modulo (rows - 1), and 0 where missing: int64[n]."""
    # Division by one number has a vector form in numpy, the remainder has none: 3 times faster so.
    index = np.floor_divide(values, rows - 1)
    index *= rows - 1
    np.subtract(values, index, out=index)
    index += 1
    if missing is not None:
        np.copyto(index, 0, where=missing)
    return index.view(np.int64)


def spans(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], step: int = 1) -> npt.NDArray[np.int64]:
    """start, start + step, ... (count numbers of each span), span after span: int64[sum of counts].

    By a running sum, which releases the interpreter lock; `numpy.repeat` would hold it.
    """
    filled = counts > 0
    starts, counts = starts[filled], counts[filled]
    ends = np.cumsum(counts)
    if not len(ends):
        return np.empty(0, np.int64)
    places = np.full(ends[-1], step, np.int64)
    places[0] = starts[0]
    places[ends[:-1]] = starts[1:] - (starts[:-1] + (counts[:-1] - 1) * step)
    return np.cumsum(places, out=places)


def labels(column: Column, name: str) -> npt.NDArray[np.float32]:
    """Labels as float32[n].

    Raises:
        SourceError: If one is missing, or neither 0 nor 1; the message has the first such row.
        TypeError: If they are not numbers.
    """
    values, missing = values_and_missing(column, "biuf", "0 or 1")
    bad = (values != 0) & (values != 1)
    if missing is not None:
        bad |= missing
    if bad.any():
        row = int(np.argmax(bad))
        value = "missing" if missing is not None and missing[row] else values[row]
        raise SourceError(f"column {name!r}, row {row} of the block: must be 0 or 1, is {value}")
    return values.astype(np.float32)


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is not an int of at least `least`, or does not fit int64.

    Raises:
        PipelineError: With the name and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PipelineError(f"{name} must be an int of at least {least}, got {value!r}")
    if value >= 1 << 63:
        raise PipelineError(f"{name} must be an int of at most 2**63-1, got {value!r}")


def check_kind(what: str, value: object, *kinds: type) -> None:
    """Refuse what is of none of some classes.

    Raises:
        PipelineError: With what it is for, what is allowed and the value.
    """
    if not isinstance(value, kinds):
        allowed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise PipelineError(f"{what} must be {allowed}, got {value!r}")


def problems_with(schema: pa.Schema, name: str, taker: Taker) -> list[str]:
    """What is wrong with a column of a schema for what takes it: nothing, or one sentence."""
    times = len(schema.get_all_field_indices(name))
    if not times:
        similar = difflib.get_close_matches(name, schema.names, n=3)
        return [f"column {name!r} is not there; there are {similar or schema.names}"]
    if times > 1:
        return [f"column {name!r} is there {times} times: give columns distinct names"]
    kind = schema.field(name).type
    return [] if taker.accepts(kind) else [f"column {name!r} is {kind}; allowed are {taker.expects}"]


@contextmanager
def naming(column: str) -> Iterator[None]:
    """Let errors about values say which column they are in."""
    try:
        yield
    except (TypeError, ValueError) as error:  # SourceError and Arrow's errors of values are among them
        raise SourceError(f"column {column!r}: {error}") from error
