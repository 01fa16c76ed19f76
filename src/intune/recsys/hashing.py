"""Hashing of integers and texts into tables, the same on every machine and in every version of Python and numpy.

The hash is of 64 bits, all arithmetic modulo 2**64, and built on the output function of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):

    mix(x):         x += 0x9E3779B97F4A7C15
                    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
                    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
                    return x ^ (x >> 31)
    base          = mix(seed)
    integer v     : mix(v ^ base), with v in two's complement of 64 bits, whatever the width of the column
    text of L bytes: words w[0], w[1], ... are 8 bytes each, little-endian, the last one filled up with zero bytes
                    mix(base ^ (L + sum over k of mix(w[k] ^ mix(base + k))))
    cross of values a, b, c: h = base; then for each value: h = mix(h ^ hash(value))

`mix` is one-to-one: two integers, or two texts of equal length that differ in one word only (all of up to 8 bytes),
never have the same hash. It spreads data; it does not stop somebody who looks for collisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import PipelineError
from intune.recsys._columns import (
    Column,
    Missing,
    check_count,
    check_kind,
    into_rows,
    is_text,
    missing_in,
    plain,
    spans,
    values_and_missing,
)
from intune.recsys.features import Encoder

Words: TypeAlias = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_EXPECTED = "integers, dates, times, strings or bytes"


@dataclass(frozen=True)
class Hash(Encoder):
    """Integers or texts to rows 1 + hash modulo (rows - 1); missing is row 0.

    An integer has the same row in columns of every width, a text in strings, bytes and dictionaries; an empty text is
    a text. Dates and times count as integers in the column's own unit. Floats are refused.

    Attributes:
        rows: Rows of the table, at least 2.
        seed: 0..2**64-1; other seeds give independent rows.
    """

    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("rows", self.rows, 2)
        _check_seed(self.seed)

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self.rows

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return _EXPECTED

    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Integers and texts."""
        return bool(pa.types.is_integer(kind)) or is_text(kind)

    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table: int64[n]."""
        hashes, missing = hash64(column, self.seed)
        return into_rows(hashes, self.rows, missing)


@dataclass(frozen=True)
class Cross:
    """Two columns or more to one row for each combination of values: 1 + hash modulo (rows - 1).

    The order of the columns counts: (1, 2) and (2, 1) are two combinations. Where any of the values is missing, the
    combination is, and has row 0.

    Attributes:
        rows: Rows of the table, at least 2.
        seed: 0..2**64-1; other seeds give independent rows.
        encoders: One a column, or none at all: what makes integers of a column first (`Buckets` for floats, say), or
            None to hash its values as they are.
    """

    rows: int
    seed: int = 0
    encoders: Sequence[Encoder | None] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("rows", self.rows, 2)
        _check_seed(self.seed)
        object.__setattr__(self, "encoders", tuple(self.encoders))
        for encoder in self.encoders:
            check_kind("each of the encoders of Cross", encoder, Encoder, type(None))

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self.rows

    def encoder_of(self, place: int) -> Encoder:
        """What says which types the column at a place may have."""
        encoder = self.encoders[place] if self.encoders else None
        return Hash(self.rows, self.seed) if encoder is None else encoder

    def __call__(self, columns: Sequence[Column]) -> npt.NDArray[np.int64]:
        """Encode columns of n values each.

        Returns:
            int64[n] in 0..rows-1.

        Raises:
            SourceError: If an encoder of a column refuses a value.
            TypeError: If a column is of a type that cannot be hashed.
            ValueError: If there are fewer than two columns, or not one for each encoder.
        """
        if len(columns) < 2 or (self.encoders and len(columns) != len(self.encoders)):
            raise ValueError(f"expected {len(self.encoders) or 'two or more'} columns to cross, got {len(columns)}")
        combined = np.full(len(columns[0]), _base(self.seed))
        absent = np.zeros(len(columns[0]), np.bool_)
        for column, encoder in zip(columns, self.encoders or (None,) * len(columns), strict=True):
            if encoder is not None:
                column = encoder(column)
                absent |= column == 0
            hashes, missing = hash64(column, self.seed)
            if missing is not None:
                absent |= missing
            combined ^= hashes
            combined = _mix(combined)
        return into_rows(combined, self.rows, absent)


def hash64(column: Column, seed: int = 0) -> tuple[Words, Missing]:
    """Hash a column of n integers or texts.

    Args:
        column: Integers of any width, booleans, dates, times, strings or bytes; of a dictionary its values.
        seed: 0..2**64-1.

    Returns:
        uint64[n] (anything where missing), and bool[n], true where missing, or None where nothing is.

    Raises:
        TypeError: If the column is of another type.
    """
    if isinstance(column, pa.Array) and pa.types.is_null(column.type):
        return np.zeros(len(column), np.uint64), np.ones(len(column), np.bool_)
    column = plain(column)
    if isinstance(column, pa.Array) and is_text(column.type):
        return _hash_texts(column.cast(pa.large_binary()), _base(seed)), missing_in(column)
    values, missing = values_and_missing(column, "iu", _EXPECTED)
    if values.dtype != np.uint64:
        values = values.astype(np.int64, copy=False).view(np.uint64)
    return _mix(values ^ _base(seed)), missing


def _hash_texts(texts: pa.Array, base: Words) -> Words:
    """All words of all texts side by side, so that long texts cost no more passes than short ones."""
    if not len(texts):
        return np.empty(0, np.uint64)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(offsets)
    counts = (lengths + 7) >> 3
    ends = np.cumsum(counts)
    sums = lengths.astype(np.uint64)
    if ends[-1]:
        starts = ends - counts
        words = _words(data_buffer, offsets, counts)
        filled = counts > 0
        words[ends[filled] - 1] &= np.uint64(_ALL_BITS) >> ((-lengths[filled] & 7) << 3).astype(np.uint64)
        keys = _mix(np.arange(counts.max(), dtype=np.uint64) + base)
        words ^= keys[spans(np.zeros_like(counts), counts)]
        sums[filled] += np.add.reduceat(_mix(words), starts[filled])
    sums ^= base
    return _mix(sums)


def _words(data_buffer: pa.Buffer, offsets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Words:
    """Every 8 bytes of every text; the last ones of a text go on into whatever follows."""
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + 8, np.uint8)  # the last word may end behind the data
    data[: last - first] = np.frombuffer(data_buffer, np.uint8)[first:last]
    windows: Words = np.ndarray((last - first + 1,), "<u8", data, strides=(1,))
    return windows[spans(offsets[:-1] - first, counts, step=8)].astype(np.uint64, copy=False)


def _mix(words: Words) -> Words:
    """The function `mix` above, of every word."""
    mixed = words + np.uint64(_GAMMA)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _base(seed: int) -> Words:
    """mix(seed), an array of one: scalars of numpy would warn where they wrap."""
    return _mix(np.array([seed], np.uint64))


def _check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _ALL_BITS:
        raise PipelineError(f"seed must be an int in 0..2**64-1, got {seed!r}")
