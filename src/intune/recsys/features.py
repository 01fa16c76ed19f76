"""Column functions: numbers to float32, categories to rows of an embedding table.

Each takes a whole column (Arrow, or a numpy array) and gives one array. They hold no state, travel to other processes
and may run in several threads at once; the work is done in numpy and Arrow calls that release the interpreter lock.

Everywhere, a column of Arrow's type `null` is missing in every row, booleans are 0 and 1, and dictionary-encoded
columns are worth what their values are worth.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import PipelineError, SourceError
from intune.recsys._columns import (
    Column,
    check_count,
    check_kind,
    is_text,
    is_time,
    plain,
    plain_type,
    values_and_missing,
)
from intune.recsys.transforms import clamp_log1p, fill_missing, table_index
from intune.sources._hex import hex_to_int64


@dataclass(frozen=True)
class Number:
    """Numbers to float32: fill what is missing, then clamp, then take the logarithm.

    Integers, floats, decimals and booleans. Dates and times are refused: a float32 has 24 bits, so that seconds since
    1970 would be off by minutes.

    Attributes:
        fill: Stands for a missing number; in the column's unit, finite as float32, and within `low` and `high`.
        low: Lesser numbers become this one; None: no limit.
        high: Greater numbers become this one; None: no limit.
        log: Whether to give log(1 + max(x, 0)) (`clamp_log1p`) in place of x.
        non_finite: What to do with NaN, infinities, and numbers beyond the range of float32: "raise", or "fill" as
            if they were missing.
    """

    fill: float = 0.0
    low: float | None = None
    high: float | None = None
    log: bool = False
    non_finite: Literal["raise", "fill"] = "raise"

    def __post_init__(self) -> None:
        """Check the options."""
        low, fill, high = self._low_fill_high
        if not (np.isfinite(fill) and low <= fill <= high):
            raise PipelineError(
                f"fill must be finite (as float32) and within low={self.low} and high={self.high}, got {self.fill}"
            )
        if self.non_finite not in ("raise", "fill"):
            raise PipelineError(f"non_finite must be 'raise' or 'fill', got {self.non_finite!r}")

    @property
    def _low_fill_high(self) -> list[np.float32]:
        """The options as float32, as numbers are compared with them; infinite where there is no limit."""
        given = (-math.inf if self.low is None else self.low, self.fill, math.inf if self.high is None else self.high)
        try:
            with np.errstate(over="ignore"):  # what does not fit becomes infinite
                return [np.float32(math.ldexp(value, 0)) for value in given]  # float() would take texts
        except (TypeError, ValueError, OverflowError) as error:
            raise PipelineError(
                f"low, fill and high must be numbers, got low={self.low!r}, fill={self.fill!r}, high={self.high!r}"
            ) from error

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return "integers, floats, decimals and booleans"

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column may have the type."""
        return not is_time(kind) and (pa.types.is_null(kind) or _is_number(plain_type(kind)))

    def __call__(self, column: Column) -> npt.NDArray[np.float32]:
        """Convert a column of n numbers.

        Returns:
            float32[n], finite.

        Raises:
            SourceError: If a number is not finite and `non_finite` is "raise"; the message has the first such row and
                says how to fill it.
            TypeError: If the column holds something else than numbers.
        """
        if is_time(column.type) if isinstance(column, pa.Array) else column.dtype.kind in "mM":
            raise TypeError(f"expected {self.expects}, got dates or times")
        low, fill, high = self._low_fill_high
        numbers = np.full(len(column), fill)
        if not (isinstance(column, pa.Array) and pa.types.is_null(column.type)):
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is found below
                fill_missing(plain(column), float(fill), numbers)
        finite = np.isfinite(numbers)
        if not finite.all():
            if self.non_finite == "raise":
                row = int(np.argmin(finite))
                raise SourceError(
                    f"row {row} of the block: {column[row]} is not finite as float32; "
                    f"Number(non_finite='fill') takes such values for missing ones and gives {self.fill:g}"
                )
            numbers[~finite] = fill
        if self.low is not None or self.high is not None:
            np.clip(numbers, low, high, out=numbers)
        return clamp_log1p(numbers) if self.log else numbers


class Encoder(ABC):
    """Values of a column to rows of one embedding table; row 0 is kept for missing ones.

    To write one: a frozen dataclass with the four members below. It is called with columns of any form, and `encode`
    gets them plain.
    """

    @property
    @abstractmethod
    def table_rows(self) -> int:
        """Rows of the table: every encoded value is in 0..table_rows-1."""

    @property
    @abstractmethod
    def expects(self) -> str:
        """The types, for a message."""

    @abstractmethod
    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Whether `encode` takes the type: of integers, floats or texts, or one that has no plain form."""

    @abstractmethod
    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table for a column of numbers (Arrow or numpy) or texts (Arrow): int64[n]."""

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column may have the type."""
        return bool(pa.types.is_null(kind)) or self.accepts_plain(plain_type(kind))

    def __call__(self, column: Column) -> npt.NDArray[np.int64]:
        """Encode a column of n values.

        Of a dictionary-encoded column each distinct value is encoded once.

        Returns:
            int64[n] in 0..table_rows-1.

        Raises:
            SourceError: If a value cannot be encoded; the message has its row.
            TypeError: If the column is of a type that is not taken.
        """
        if isinstance(column, pa.Array) and pa.types.is_null(column.type):
            return np.zeros(len(column), np.int64)
        if isinstance(column, pa.DictionaryArray) and len(column.dictionary) <= len(column):
            try:
                return _taken(self(column.dictionary), column.indices)
            except SourceError:  # a value that perhaps no row has; else the message is to say which row
                pass
        return self.encode(plain(column))


@dataclass(frozen=True)
class Modulo(Encoder):
    """Integers to rows 1 + value modulo (rows - 1) (`table_index`): exact for all 64 bits, negative ones too.

    For ids that are spread already, such as hashes. Dates and times count as integers in the column's own unit.

    Attributes:
        rows: Rows of the table, at least 2.
    """

    rows: int

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("rows", self.rows, 2)

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self.rows

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return "integers that fit int64, dates and times (for strings: Hash, Hex or Vocabulary)"

    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Integers but uint64."""
        return bool(pa.types.is_integer(kind)) and kind != pa.uint64()

    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table: int64[n]."""
        return table_index(column, self.rows)


@dataclass(frozen=True)
class Hex(Encoder):
    """Strings of 1 to 8 hexadecimal digits, read as integers and then encoded; an empty string is missing.

    Attributes:
        encoder: What encodes the integers 0..2**32-1.
    """

    encoder: Encoder

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("the encoder of Hex", self.encoder, Encoder)
        if not self.encoder.accepts(pa.int64()):
            raise PipelineError(f"Hex gives int64, but {type(self.encoder).__name__} takes {self.encoder.expects}")

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self.encoder.table_rows

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return "strings or bytes of 1 to 8 hexadecimal digits"

    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Texts of every kind."""
        return is_text(kind)

    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table: int64[n]; a SourceError names the first value that is not hexadecimal."""
        if not isinstance(column, pa.Array) or not is_text(column.type):
            kind = column.type if isinstance(column, pa.Array) else column.dtype
            raise TypeError(f"expected {self.expects}, got {kind}")
        texts = column if column.type in (pa.string(), pa.binary()) else column.cast(pa.binary())
        return self.encoder(hex_to_int64(texts))


@dataclass(frozen=True)
class Buckets(Encoder):
    """Numbers to the bucket that they are in: row 1 + the count of boundaries that are not above the number.

    With boundaries (18, 65): missing 0; below 18 1; 18 and below 65 2; 65 and above 3. NaN is missing; infinities are
    in the first and last bucket. Integers of 64 bits are compared exactly. Dates and times count as integers in the
    column's own unit, decimals as float64.

    Attributes:
        boundaries: Finite, in rising order, at least one.
    """

    boundaries: Sequence[float]

    def __post_init__(self) -> None:
        """Check the options."""
        given = tuple(self.boundaries)
        rising = all(low < high for low, high in pairwise(given))
        if not given or not rising or not all(map(math.isfinite, given)):
            raise PipelineError(f"boundaries must be finite and rise, and there must be one at least, got {given}")
        object.__setattr__(self, "boundaries", given)

    @property
    def table_rows(self) -> int:
        """Rows of the table: one for missing, one a bucket."""
        return len(self.boundaries) + 2

    @property
    def expects(self) -> str:
        """The types, for a message."""
        return "integers, floats, decimals, dates and times"

    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Numbers."""
        return _is_number(kind)

    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table: int64[n]."""
        values, missing = values_and_missing(column, "iuf", self.expects)
        below = 0
        if values.dtype.kind == "f":
            bounds = np.array(self.boundaries, np.float64)
            nan = np.isnan(values)
            missing = nan if missing is None else missing | nan
        else:
            # An integer reaches a boundary if it reaches the integer above; no detour through floats.
            least, most = np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
            ceilings = [math.ceil(boundary) for boundary in self.boundaries]
            below = sum(ceiling < least for ceiling in ceilings)
            bounds = np.array([ceiling for ceiling in ceilings if least <= ceiling <= most], values.dtype)
        rows = np.searchsorted(bounds, values, side="right").astype(np.int64, copy=False)
        rows += 1 + below
        if missing is not None:
            rows[missing] = 0
        return rows


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _taken(rows: npt.NDArray[np.int64], indices: pa.Array) -> npt.NDArray[np.int64]:
    """Rows of the dictionary's values by the column's indices, 0 where there is none."""
    places, missing = values_and_missing(indices, "iu", "integers")
    if missing is None:
        return rows.take(places)
    taken = np.zeros(len(places), np.int64)
    taken[~missing] = rows.take(places[~missing])
    return taken
