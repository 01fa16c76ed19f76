"""List columns: several values a row, of varying number, as values + offsets or padded to one length.

A null list and an empty one both have no values, and bytes under a null list never show. A null inside a list is a
missing value: row 0 of the table. Every list type of Arrow is taken (list, large_list, fixed_size_list, list_view,
large_list_view), one level deep.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from intune._errors import PipelineError, SourceError
from intune._words import count
from intune.pipeline.blocks import Array
from intune.recsys._columns import Column, check_count, check_kind, naming, plain, problems_with, spans
from intune.recsys.features import Encoder, Number
from intune.recsys.transforms import fill_missing

Offsets: TypeAlias = npt.NDArray[np.int64]
"""int64[n + 1]: row i has the values offsets[i] to offsets[i + 1]; the first is 0."""

Keep: TypeAlias = Literal["first", "last"]


def list_parts(column: pa.Array) -> tuple[pa.Array, Offsets]:
    """Take a column of n lists apart.

    Args:
        column: Lists of any of Arrow's types, or type `null`: no values.

    Returns:
        All values, row after row, those of null lists left out; and their offsets.

    Raises:
        TypeError: If the column has no lists.
    """
    offsets = np.zeros(len(column) + 1, np.int64)
    if pa.types.is_null(column.type):
        return pa.nulls(0), offsets
    if not is_list(column.type):
        raise TypeError(f"expected lists, got {column.type}")
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    return column.flatten(), offsets


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists of any of Arrow's types."""
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def truncate(values: Column, offsets: Offsets, most: int, keep: Keep = "first") -> tuple[Column, Offsets]:
    """Keep at most so many values of each row.

    Args:
        values: [offsets[-1]], Arrow or numpy.
        offsets: int64[n + 1].
        most: The most values of a row, at least 0.
        keep: Which ones of a longer row.

    Returns:
        The kept values in their order, and their offsets: the arguments themselves where nothing is too long.
    """
    lengths = np.diff(offsets)
    if not (lengths > most).any():
        return values, offsets
    np.minimum(lengths, most, out=lengths)
    kept = np.zeros_like(offsets)
    np.cumsum(lengths, out=kept[1:])
    starts = offsets[:-1] if keep == "first" else offsets[1:] - lengths
    places = spans(starts, lengths)
    return values.take(pa.array(places) if isinstance(values, pa.Array) else places), kept


def pad(values: Array, offsets: Offsets, length: int, fill: float = 0) -> tuple[Array, npt.NDArray[np.int64]]:
    """Values of n rows in one array, each row from the left, `fill` behind them.

    Args:
        values: [offsets[-1]].
        offsets: int64[n + 1], no row longer than `length`; `truncate` sees to that.
        length: Columns of the result.
        fill: Stands where a row has no value.

    Returns:
        [n, length] of the values' dtype, and int64[n]: how many values each row has.

    Raises:
        ValueError: If a row is longer.
    """
    lengths = np.diff(offsets)
    if (lengths > length).any():
        row = int(np.argmax(lengths > length))
        raise ValueError(f"row {row} has {count(lengths[row], 'value')}, more than the length {length}: truncate first")
    padded = np.full((len(lengths), length), fill, values.dtype)
    padded[padding_mask(lengths, length)] = values
    return padded, lengths


def padding_mask(lengths: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    """bool[n, length], true where a padded row has a value, for lengths int64[n]."""
    return np.arange(length) < lengths[:, None]


@dataclass(frozen=True)
class MultiHot:
    """A list column as encoded values + offsets, with one weight a value where wanted.

    Attributes:
        column: The list column.
        encoder: What makes rows of a table of the values.
        weights: A list column with as many numbers in each row; they must be there and finite.
        most: The most values of a row, at least 1; None: all.
        keep: Which values of a longer row are kept.
        name: What the output is called; None: as the column.
    """

    column: str
    encoder: Encoder
    weights: str | None = None
    most: int | None = None
    keep: Keep = "first"
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("the column", self.column, str)
        check_kind(f"the encoder of {self.column!r}", self.encoder, Encoder)
        check_kind("weights", self.weights, str, type(None))
        if self.most is not None:
            check_count("most", self.most, 1)
        _check_keep(self.keep)

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads."""
        return (self.column,) if self.weights is None else (self.column, self.weights)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it gives: `name` and, with weights, `name_weights`."""
        name = self.name or self.column
        return (name,) if self.weights is None else (name, f"{name}_weights")

    def problems(self, schema: pa.Schema) -> list[str]:
        """What is wrong with the columns of a schema, a sentence each."""
        found = problems_with(schema, self.column, _ListsOf(self.encoder))
        return found if self.weights is None else found + problems_with(schema, self.weights, _ListsOf(Number()))

    def __call__(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Encode the lists of n rows.

        Returns:
            `name`: large_list<int64>[n], no nulls; with weights `name_weights`: large_list<float>[n] of equal lengths.
            `to_torch` makes (values, offsets) of each.

        Raises:
            SourceError: If a value or a weight is not allowed, or the lengths differ; the message has column and row.
        """
        with naming(self.column):
            values, offsets = list_parts(batch.column(self.column))
            parts: list[Column] = [values]
        if self.weights is not None:
            with naming(self.weights):
                parts.append(self._weights(batch.column(self.weights), offsets))
        kept = offsets
        if self.most is not None:
            cut = [truncate(part, offsets, self.most, self.keep) for part in parts]
            parts, kept = [part for part, _ in cut], cut[0][1]
        with naming(self.column):
            parts[0] = _encoded(self.encoder, parts[0], kept)
        return {name: _as_lists(part, kept) for name, part in zip(self.outputs, parts, strict=True)}

    def _weights(self, column: pa.Array, offsets: Offsets) -> npt.NDArray[np.float32]:
        given, places = list_parts(column)
        if not np.array_equal(places, offsets):
            lengths, wanted = np.diff(places), np.diff(offsets)
            row = int(np.argmax(lengths != wanted))
            raise SourceError(
                f"row {row} of the block: {count(lengths[row], 'weight')} for {count(wanted[row], 'value')}"
            )
        weights = np.zeros(len(given), np.float32)
        if len(given) and not pa.types.is_null(given.type):
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
                fill_missing(plain(given), np.nan, weights)
        bad = ~np.isfinite(weights) if not pa.types.is_null(given.type) else np.ones(len(given), np.bool_)
        if bad.any():
            place = int(np.argmax(bad))
            row = int(np.searchsorted(offsets, place, side="right")) - 1
            raise SourceError(f"row {row} of the block: weight {given[place]} is missing or not finite")
        return weights


@dataclass(frozen=True)
class Padded:
    """A list column as an array of one length, for models of sequences.

    Attributes:
        column: The list column.
        encoder: What makes rows of a table of the values.
        length: Values of a row, at least 1: longer rows are cut, shorter ones filled with row 0 behind their values.
        keep: Which values of a longer row are kept.
        name: What the output is called; None: as the column.
    """

    column: str
    encoder: Encoder
    length: int
    keep: Keep = "last"
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("the column", self.column, str)
        check_kind(f"the encoder of {self.column!r}", self.encoder, Encoder)
        check_count("length", self.length, 1)
        _check_keep(self.keep)

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads."""
        return (self.column,)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it gives: `name` and `name_lengths`."""
        name = self.name or self.column
        return name, f"{name}_lengths"

    def problems(self, schema: pa.Schema) -> list[str]:
        """What is wrong with the column of a schema, a sentence each."""
        return problems_with(schema, self.column, _ListsOf(self.encoder))

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Array]:
        """Encode and pad the lists of n rows.

        Returns:
            `name`: int64[n, length]; `name_lengths`: int64[n], values that each row has (see `padding_mask`): a value
            that is missing counts, what is filled up does not.

        Raises:
            SourceError: If a value is not allowed; the message has column and row.
        """
        with naming(self.column):
            values, offsets = truncate(*list_parts(batch.column(self.column)), self.length, self.keep)
            padded, lengths = pad(_encoded(self.encoder, values, offsets), offsets, self.length)
        return dict(zip(self.outputs, (padded, lengths), strict=True))


@dataclass(frozen=True)
class _ListsOf:
    """Lists, one level deep, of what an encoder or `Number` takes."""

    values: Encoder | Number

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return f"lists (one level deep) of {self.values.expects}"

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column may have the type."""
        return bool(pa.types.is_null(kind)) or (is_list(kind) and self.values.accepts(kind.value_type))


def _encoded(encoder: Encoder, values: Column, offsets: Offsets) -> npt.NDArray[np.int64]:
    """What an encoder makes of all values; a value that it refuses is named with the row of its list."""
    try:
        return encoder(values)
    except ValueError as error:  # SourceError and Arrow's errors of values
        good, bad = 0, len(values)  # so many values from the first on are taken, and so many are not
        while bad - good > 1:
            middle = (good + bad) // 2
            refused = _refused(encoder, values[:middle])
            good, bad = (good, middle) if refused else (middle, bad)
        reason = _refused(encoder, values[bad - 1 : bad]) or error
        row = int(np.searchsorted(offsets, bad - 1, side="right")) - 1
        # An encoder counts what it is given: the values, of which this was the only one.
        text = re.sub(r"^row \d+( of the block)?: ", "", str(reason))
        raise SourceError(f"row {row} of the block: {text}") from error


def _refused(encoder: Encoder, values: Column) -> ValueError | None:
    try:
        encoder(values)
    except ValueError as error:
        return error
    return None


def _as_lists(values: Column, offsets: Offsets) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _check_keep(keep: object) -> None:
    if keep not in ("first", "last"):
        raise PipelineError(f"keep must be 'first' or 'last', got {keep!r}")
