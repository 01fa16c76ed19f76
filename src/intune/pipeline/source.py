"""What a pipeline can read from: three protocols, all immutable once made.

A source says what there is, in an order that depends on files and options only. Which of it is read when,
by which rank and in which order of an epoch is the plan's business, not the source's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@runtime_checkable
class BlockSource(Protocol):
    """Units that are read on their own, each giving blocks: Parquet row groups, byte ranges of text.

    All methods may be called from several threads at once. Units that are known to be empty are not listed.
    """

    kind: str
    """Name of the reader, also the name of its stage: "read_parquet"."""

    schema: pa.Schema
    """Schema of every block."""

    max_concurrency: int | None
    """The most units that may be read at once; None = no limit of its own."""

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another: files by relative path and size, options, never contents."""
        ...

    def unit_count(self) -> int:
        """Number of units, in the canonical order (files sorted by path)."""
        ...

    def unit_rows(self) -> Sequence[int] | None:
        """Exact rows of each unit where that costs no reading of data (footers), else None."""
        ...

    def count_unit_rows(self) -> Sequence[int]:
        """Exact rows of each unit, reading the data once where needed; the result is kept."""
        ...

    def read_bound(self, unit: int) -> int:
        """Bytes that reading one block of this unit needs at most, known before reading."""
        ...

    def kept_bytes(self, unit: int) -> int:
        """Bytes, of those of `read_bound`, that an open unit keeps between two blocks beside the last one it gave."""
        ...

    def describe(self, unit: int) -> str:
        """Where the unit comes from, for messages: "clicks/a.parquet, row group 3"."""
        ...

    def open(self, unit: int) -> Iterator[pa.RecordBatch]:
        """Draw the blocks of one unit in order; the cut into blocks depends on file and options only."""
        ...


@runtime_checkable
class IndexedSource(Protocol):
    """Samples that can be had by number: a map-style dataset."""

    kind: str
    max_concurrency: int | None

    executor: Literal["thread", "process", "auto"]
    """Where `get` runs; in processes it is sent there by cloudpickle, with all that it holds."""

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def order(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """The order that a sampler fixes for an epoch, else None: the plan decides."""
        ...

    def get(self, index: int) -> Any:
        """The sample with this number; may be called from several threads at once."""
        ...


@runtime_checkable
class SequentialSource(Protocol):
    """Samples that come one after another: any iterable."""

    kind: str

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another."""
        ...

    def length(self) -> int | None:
        """Number of samples where it is known, else None."""
        ...

    def iterate(self) -> Iterator[Any]:
        """A new pass over the samples.

        Raises:
            SourceError: If a second pass is not possible (a generator that was already drawn from).
        """
        ...


Source = BlockSource | IndexedSource | SequentialSource
