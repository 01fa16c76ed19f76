"""From columns of counts and categories to the arrays that a model takes.

Every function works on whole columns in numpy calls that release the interpreter lock, so the stage that
runs them scales with threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import PipelineError, SourceError
from intune.pipeline.blocks import Array, Block
from intune.recsys._columns import Column, into_rows, labels, values_and_missing
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, LABEL_COLUMN


def fill_missing(column: Column, fill: float, out: npt.NDArray[np.float32]) -> None:
    """Write a numeric column as float32, `fill` where it is missing.

    Args:
        column: n integers or floats. A NaN is a value, not a missing one, and is kept.
        fill: The number that stands for a missing one.
        out: float32[n], also strided.

    Raises:
        TypeError: If the column holds neither integers nor floats.
    """
    values, missing = values_and_missing(column, "iuf", "integers or floats")
    out[:] = values
    if missing is not None:
        out[missing] = fill


def clamp_log1p(counts: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Turn counts into log(1 + max(count, 0)), in place.

    Args:
        counts: float32 of any shape; overwritten.

    Returns:
        The same array. Finite for every finite count: -3, -1, 0 -> 0; 1 -> 0.693147; 2147483647 ->
        21.487562. NaN stays NaN.
    """
    np.maximum(counts, 0, out=counts)
    # log(1 + x) and not log1p(x): for counts 1 + x is exact to 6e-8 of itself, and numpy has a vector form of
    # log on every x86-64 with AVX2 but of log1p only with AVX-512 (25 times slower without).
    counts += 1
    return np.log(counts, out=counts)


def table_index(column: Column, rows: int) -> npt.NDArray[np.int64]:
    """Map categories to rows of an embedding table: 1 + category modulo (rows - 1); missing is row 0.

    Args:
        column: n integers of any width but uint64. Negative ones are ids as well and land in 1..rows-1.
        rows: Rows of the table, at least 2; row 0 is kept for missing.

    Returns:
        int64[n] in 0..rows-1.

    Raises:
        TypeError: If the column holds anything else.
    """
    values, missing = values_and_missing(column, "iu", "integers that fit int64")
    if values.dtype == np.uint64:
        raise TypeError("expected integers that fit int64, got uint64")
    return into_rows(values.astype(np.int64, copy=False), rows, missing)


@dataclass(frozen=True)
class CriteoTransform:
    """A block function: Criteo columns in, arrays for the model out.

    Counts become log(1 + max(count, 0)) (`clamp_log1p`), categories become rows of embedding tables
    (`table_index`). Picklable, without state, safe in several threads at once.

    Attributes:
        rows_per_table: Rows of each of the 26 embedding tables, at least 2: an int for all, or 26 of them.
        missing_count: The count that stands for a missing one.
        fail_on_non_finite: Whether a dense value that is NaN or infinite is an error. Integer counts never
            give one; files that hold floats may.
    """

    rows_per_table: int | tuple[int, ...] = 100_000
    missing_count: float = 0.0
    fail_on_non_finite: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        rows = self.table_rows
        if len(rows) != len(CATEGORY_COLUMNS) or min(rows) < 2 or max(rows) >= 1 << 63:
            allowed = f"an int of at least 2, or a tuple of {len(CATEGORY_COLUMNS)} of them; all below 2**63"
            raise PipelineError(f"rows_per_table must be {allowed}, got {self.rows_per_table!r}")

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        rows = self.rows_per_table
        return (rows,) * len(CATEGORY_COLUMNS) if isinstance(rows, int) else rows

    def __call__(self, block: Block) -> dict[str, Array]:
        """Transform one block of n rows.

        Args:
            block: Columns I1..I13 (integers or floats), C1..C26 (integers) and, where labelled, label (0 or 1).

        Returns:
            `dense` float32[n, 13], `sparse` int64[n, 26] and, where the block has it, `label` float32[n].

        Raises:
            SourceError: If a column is absent or of another type, a label is missing or neither 0 nor 1, or a
                dense value is not finite; the message names the column and its first such row in the block.
        """
        columns: Mapping[str, Column] = block
        if isinstance(block, pa.RecordBatch):
            columns = dict(zip(block.schema.names, block.columns, strict=True))
        absent = [name for name in (*COUNT_COLUMNS, *CATEGORY_COLUMNS) if name not in columns]
        if absent:
            raise SourceError(f"the block lacks the columns {absent}; it has {list(columns)}")
        rows = len(columns[COUNT_COLUMNS[0]])
        arrays: dict[str, Array] = {}
        if LABEL_COLUMN in columns:
            arrays["label"] = labels(columns[LABEL_COLUMN], LABEL_COLUMN)
        arrays["dense"] = self._dense(columns, rows)
        arrays["sparse"] = self._sparse(columns, rows)
        return arrays

    def _dense(self, columns: Mapping[str, Column], rows: int) -> npt.NDArray[np.float32]:
        dense = np.empty((rows, len(COUNT_COLUMNS)), np.float32)
        name = ""
        try:
            for j, name in enumerate(COUNT_COLUMNS):
                fill_missing(columns[name], self.missing_count, dense[:, j])
        except TypeError as error:
            raise SourceError(f"column {name!r}: {error}") from None
        clamp_log1p(dense)
        if self.fail_on_non_finite and not (finite := np.isfinite(dense)).all():
            row, j = np.argwhere(~finite)[0]
            value = columns[COUNT_COLUMNS[j]][int(row)]
            raise SourceError(f"column {COUNT_COLUMNS[j]!r}, row {row} of the block: {value} is not finite")
        return dense

    def _sparse(self, columns: Mapping[str, Column], rows: int) -> npt.NDArray[np.int64]:
        sparse = np.empty((rows, len(CATEGORY_COLUMNS)), np.int64)
        name = ""
        try:
            for j, (name, table_rows) in enumerate(zip(CATEGORY_COLUMNS, self.table_rows, strict=True)):
                sparse[:, j] = table_index(columns[name], table_rows)
        except TypeError as error:
            raise SourceError(f"column {name!r}: {error}; read_criteo turns hex strings into integers") from None
        return sparse
