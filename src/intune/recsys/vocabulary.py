"""Look-up of known values: a row for each, by its place in a list or a Parquet file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from intune._errors import PipelineError, SourceError
from intune.recsys._columns import Column, check_count, into_rows, is_text, missing_in, number_dtype, plain
from intune.recsys._lookup import KeyIndex
from intune.recsys.features import Encoder
from intune.recsys.hashing import hash64
from intune.sources._files import Paths, find_files, reading

_FEW_KEYS = 10_000
"""So many keys `index_in` of Arrow puts into a table anew for every block, in half a millisecond."""


@dataclass(frozen=True)
class Vocabulary(Encoder):
    """Known integers or texts to rows by their place among the keys.

    Row 0 is for missing values, then come `unknown_rows` for values that are no key, then one a key. Integers are
    compared exactly at 64 bits; texts by their bytes, so that strings and bytes are alike and case counts.

    Attributes:
        keys: Integers or texts, distinct, none missing: a list or an Arrow array. Kept as int64, uint64 (where a key
            exceeds int64) or large_binary.
        unknown_rows: 1: all unknown values share row 1. More: they are hashed into that many rows (`hash64`).
            0: an unknown value is an error.
    """

    keys: Sequence[int] | Sequence[str] | Sequence[bytes] | pa.Array = field(repr=False)
    unknown_rows: int = 1
    _index: KeyIndex | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("unknown_rows", self.unknown_rows, 0)
        keys = _checked_keys(self.keys)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "_index", KeyIndex(keys) if len(keys) > _FEW_KEYS else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the keys travel; the index is built again where they arrive."""
        return type(self), (self.keys, self.unknown_rows)

    @classmethod
    def from_parquet(cls, paths: Paths, column: str, unknown_rows: int = 1) -> "Vocabulary":
        """Read the keys from a column of Parquet files, in the order of paths and rows.

        Args:
            paths: Files, folders or glob patterns.
            column: Its name.
            unknown_rows: As of the class.

        Raises:
            PipelineError: If keys repeat, are missing or of another type, or there are none.
            SourceError: If a path is missing or no Parquet file, or has no such column.
        """
        files = find_files(paths)
        chunks: list[pa.Array] = []
        for index in range(len(files)):
            path = files.path(index)
            with reading(lambda path=path: path), files.open(index) as stream:  # type: ignore[misc]
                file = pq.ParquetFile(stream)
                if column not in file.schema_arrow.names:
                    raise SourceError(f"{path} has no column {column!r}; it has {file.schema_arrow.names}")
                chunks += file.read([column], use_threads=False)[column].chunks
        return cls(pa.chunked_array(chunks).combine_chunks() if chunks else [], unknown_rows)

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return 1 + self.unknown_rows + len(self.keys)

    @property
    def expects(self) -> str:
        """The types, for a message."""
        if is_text(self._kind):
            return "strings or bytes, as the keys are"
        return f"integers that fit {self._kind}, dates and times, as the keys are integers"

    def accepts_plain(self, kind: pa.DataType) -> bool:
        """Texts, or integers that fit the keys' type, as the keys are."""
        if is_text(self._kind) or not pa.types.is_integer(kind):
            return is_text(self._kind) and is_text(kind)
        return np.can_cast(number_dtype(kind), number_dtype(self._kind))

    def encode(self, column: Column) -> npt.NDArray[np.int64]:
        """Rows of the table: int64[n]; a SourceError names the first unknown value where `unknown_rows` is 0."""
        values = column if isinstance(column, pa.Array) else pa.array(column)
        if not self.accepts_plain(values.type):
            raise TypeError(f"expected {self.expects}, got {values.type}")
        missing = missing_in(values)
        places = self._places(values.cast(self._kind))
        unknown = places < 0
        if missing is not None:
            unknown &= ~missing
        places += 1 + self.unknown_rows
        if unknown.any():
            places[unknown] = self._unknown(values, unknown)
        if missing is not None:
            places[missing] = 0
        return places

    def _places(self, values: pa.Array) -> npt.NDArray[np.int64]:
        """Places among the keys, -1 for none: int64[n]; anything where missing."""
        if self._index is not None:
            return self._index.find(values)
        places: npt.NDArray[np.int32] = pc.fill_null(pc.index_in(values, value_set=self.keys), -1).to_numpy()
        return places.astype(np.int64)

    def _unknown(self, values: pa.Array, unknown: npt.NDArray[np.bool_]) -> Any:
        """Rows of the values that are no key."""
        if self.unknown_rows == 1:
            return 1
        if not self.unknown_rows:
            row = int(np.argmax(unknown))
            raise SourceError(f"row {row}: {values[row].as_py()!r} is not in the vocabulary of {len(self.keys)} keys")
        hashes, _ = hash64(values.filter(pa.array(unknown)))
        return into_rows(hashes, self.unknown_rows + 1, None)

    @property
    def _kind(self) -> pa.DataType:
        kind: pa.DataType = self.keys.type  # type: ignore[union-attr]
        return kind


def _as_array(given: Any) -> pa.Array:
    try:
        return pa.array(given)
    except OverflowError:  # beyond int64
        return pa.array(given, pa.uint64())


def _checked_keys(given: Any) -> pa.Array:
    try:
        keys: pa.Array = plain(given if isinstance(given, pa.Array) else _as_array(given))
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise PipelineError(f"keys must be integers, or strings, or bytes: {error}") from error
    if not len(keys):
        raise PipelineError("a vocabulary needs at least one key")
    if keys.null_count:
        raise PipelineError(f"keys must not be missing; key {pc.index(keys.is_null(), True).as_py()} is")
    if not is_text(keys.type) and not pa.types.is_integer(keys.type):
        raise PipelineError(f"keys must be integers, or strings, or bytes, got {keys.type}")
    if is_text(keys.type):
        keys = keys.cast(pa.large_binary())
    elif keys.type != pa.uint64() or pc.max(keys).as_py() < 1 << 63:
        keys = keys.cast(pa.int64())
    distinct = len(pc.unique(keys))
    if distinct < len(keys):
        first = next(entry for entry in pc.value_counts(keys).to_pylist() if entry["counts"] > 1)
        raise PipelineError(f"keys must be distinct; {first['values']!r} is there {first['counts']} times")
    return keys
