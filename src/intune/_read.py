"""Where pipelines begin: one function for each source."""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import pyarrow as pa

from intune.pipeline.chain import Pipeline
from intune.sources.parquet import BLOCK_ROWS, ParquetSource
from intune.sources.samples import DatasetSource, IterableSource
from intune.sources.text import CsvSource, TextSource

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    dictionary_columns: Sequence[str] = (),
    filesystem: Any = None,
    block_rows: int = BLOCK_ROWS,
) -> Pipeline:
    """Read Parquet files as blocks (`pyarrow.RecordBatch`).

    A unit of work is a row group; a larger one is streamed as consecutive blocks of `block_rows` rows. Empty
    files and row groups contribute nothing. A read that fails for a moment (a timeout, a lost connection) is repeated
    up to three times, here and by the other readers of files.

    Args:
        paths: A path, glob ("clicks/**/*.parquet") or folder, or a list of them; read in the order of paths.
        columns: Columns to read, in this order; None = all. Others are not read from disk.
        dictionary_columns: Columns of strings or bytes to be given as dictionary arrays: each distinct value once,
            and an index a row. Faster where the file stores few distinct values, slower where it stores many.
        filesystem: A pyarrow or fsspec file system, for object stores.
        block_rows: The most rows of a block.

    Raises:
        SourceError: If a path is missing or no Parquet file, a column is unknown, or files' schemas do not fit.
    """
    source = ParquetSource(
        paths,
        columns=columns,
        dictionary_columns=dictionary_columns,
        filesystem=filesystem,
        block_rows=block_rows,
    )
    return Pipeline(source)


def read_tsv(
    paths: Paths,
    *,
    schema: pa.Schema,
    delimiter: str = "\t",
    header: bool = False,
    hex_columns: Sequence[str] = (),
    unit_bytes: int = 8 << 20,
    filesystem: Any = None,
) -> Pipeline:
    """Read delimited text without quoting as blocks (`pyarrow.RecordBatch`); types are declared, never guessed.

    A unit of work is a byte range of a file, cut at line ends. A file compressed with gzip or Zstandard (told by its
    first bytes) is one unit, streamed as blocks of about `unit_bytes` of text. The empty field is missing, everything
    else is taken as it stands.

    Args:
        paths: A path, glob or folder, or a list of them; read in the order of paths.
        schema: Names and types of the columns.
        delimiter: One character between fields.
        header: Whether the first line of each file has the names; they must be those of the schema.
        hex_columns: Columns of hexadecimal numbers, given as int64.
        unit_bytes: Size of a byte range.
        filesystem: A pyarrow or fsspec file system, for object stores.

    Raises:
        SourceError: If a path is missing, a line has another number of fields, or a value does not fit its type;
            the message names file, line and column. If a compressed file is cut short or damaged; the message names
            file and byte.
    """
    return Pipeline(
        TextSource(
            paths,
            schema=schema,
            delimiter=delimiter,
            header=header,
            hex_columns=hex_columns,
            unit_bytes=unit_bytes,
            filesystem=filesystem,
        )
    )


def read_csv(
    paths: Paths,
    *,
    schema: pa.Schema,
    delimiter: str = ",",
    quote: str | None = '"',
    header: bool = True,
    hex_columns: Sequence[str] = (),
    unit_bytes: int = 8 << 20,
    filesystem: Any = None,
) -> Pipeline:
    """Read delimited text with quoting as blocks (`pyarrow.RecordBatch`); types are declared, never guessed.

    With a quote, a value may have line ends, so that nothing but reading from the beginning tells which line feed
    ends a row: a unit of work is a whole file, streamed as blocks of about `unit_bytes` of text, and files are what is
    read in parallel. With `quote=None` no line feed can be part of a value: a unit is a byte range, as in `read_tsv`.

    The empty field is missing; a quoted empty one is an empty string. Quotes stand around a whole value and are doubled
    within it; anything else is an error, not taken as it stands.

    Args:
        paths: A path, glob or folder, or a list of them; read in the order of paths. Files may be compressed with gzip
            or Zstandard.
        schema: Names and types of the columns.
        delimiter: One character between fields.
        quote: One character around values that have delimiters, quotes or line ends in them; None: there are none.
        header: Whether the first line of each file has the names; they must be those of the schema.
        hex_columns: Columns of hexadecimal numbers, given as int64.
        unit_bytes: Size of the text of a block.
        filesystem: A pyarrow or fsspec file system, for object stores.

    Raises:
        SourceError: If a path is missing, a line has another number of fields, a quote is out of place, or a value does
            not fit its type; the message names file, line and column.
    """
    return Pipeline(
        CsvSource(
            paths,
            schema=schema,
            delimiter=delimiter,
            quote=quote,
            header=header,
            hex_columns=hex_columns,
            unit_bytes=unit_bytes,
            filesystem=filesystem,
        )
    )


def from_iterable(iterable: Iterable[Any]) -> Pipeline:
    """Take samples from any iterable, one pass an epoch.

    With several ranks sample i goes to rank i % world_size.

    Args:
        iterable: A list, or an object whose `__iter__` begins anew; a generator serves for one epoch.

    Raises:
        PipelineError: If it cannot be iterated.
    """
    return Pipeline(IterableSource(iterable))


def from_dataset(dataset: Any, *, sampler: Any = None, max_concurrency: int | None = None) -> Pipeline:
    """Take samples from a map-style dataset (torch), several at once.

    With a shuffle in the chain the numbers are permuted over the whole dataset each epoch.

    Args:
        dataset: Has `__getitem__` and `__len__`.
        sampler: Fixes the order: gives the numbers of this rank, anew each epoch (after `set_epoch(epoch)`).
        max_concurrency: The most samples read at once; 1 where `__getitem__` is not safe in parallel.

    Raises:
        PipelineError: If the dataset cannot be read by number.
    """
    return Pipeline(DatasetSource(dataset, sampler, max_concurrency))
