"""Where pipelines begin: one function for each source."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from intune.pipeline.chain import Executor, Pipeline
from intune.sources._files import Paths
from intune.sources._partitions import Partitioning
from intune.sources.parquet import BLOCK_ROWS, ParquetSource
from intune.sources.samples import DatasetSource, IterableSource
from intune.sources.text import CsvSource, TextSource


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    dictionary_columns: Sequence[str] = (),
    filesystem: Any = None,
    block_rows: int = BLOCK_ROWS,
    partitioning: Partitioning = "hive",
) -> Pipeline:
    """Read Parquet files as blocks (`pyarrow.RecordBatch`).

    A unit of work is a row group; a larger one is streamed as consecutive blocks of `block_rows` rows. Empty
    files and row groups contribute nothing. A read that fails for a moment (a timeout, a lost connection) is repeated
    up to three times, here and by the other readers of files.

    Folders called `name=value` are columns, as in Hive: the rows of "clicks/day=3/country=de/part-0.parquet" have
    `day` 3 and `country` "de". A column whose values are whole numbers that fit it is int32, any other a dictionary of
    strings, also one with leading zeros beside fewer digits ("01", "1"), unless `partitioning` declares its type. Names
    and values are percent-decoded, `__HIVE_DEFAULT_PARTITION__` is null. All of the path counts, also the folders above
    a given one.

    Args:
        paths: A path, glob ("clicks/**/*.parquet"), folder or URI ("s3://clicks/2026"), or a list of them; read in the
            order of paths. Paths may be on several file systems, by their URIs or as pairs (file system, path); they
            are then read one file system after the other, as first given. Links are followed; a file that would come
            twice by way of one is an error, and so is a link to nothing.
        columns: Columns to read, in this order, those of folders too; None = all, those of folders last. Others are
            not read from disk.
        dictionary_columns: Columns of strings or bytes to be given as dictionary arrays: each distinct value once,
            and an index a row. Faster where the file stores few distinct values, slower where it stores many.
        filesystem: A pyarrow or fsspec file system that all paths are on, for object stores.
        block_rows: The most rows of a block.
        partitioning: "hive"; a `pyarrow.Schema` with names and types of the folders that are columns (or
            `pyarrow.dataset.partitioning(schema, flavor="hive")`), then no others are; None: no folder is a column.

    Raises:
        SourceError: If a path is missing or no Parquet file, columns are unknown, files' schemas do not fit, a folder's
            value does not fit its type, or a wanted column is both in a file and in the names of folders. While
            reading, by this reader and the others of files: if a file has changed since it was listed here.
    """
    source = ParquetSource(
        paths,
        columns=columns,
        dictionary_columns=dictionary_columns,
        filesystem=filesystem,
        block_rows=block_rows,
        partitioning=partitioning,
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
        paths: A path, glob, folder or URI, or a list of them, as for `read_parquet`.
        schema: Names and types of the columns.
        delimiter: One character between fields.
        header: Whether the first line of each file has the names; they must be those of the schema.
        hex_columns: Columns of hexadecimal numbers, given as int64.
        unit_bytes: Size of a byte range.
        filesystem: A pyarrow or fsspec file system that all paths are on, for object stores.

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
        paths: A path, glob, folder or URI, or a list of them, as for `read_parquet`. Files may be compressed with
            gzip or Zstandard.
        schema: Names and types of the columns.
        delimiter: One character between fields.
        quote: One character around values that have delimiters, quotes or line ends in them; None: there are none.
        header: Whether the first line of each file has the names; they must be those of the schema.
        hex_columns: Columns of hexadecimal numbers, given as int64.
        unit_bytes: Size of the text of a block.
        filesystem: A pyarrow or fsspec file system that all paths are on, for object stores.

    Raises:
        SourceError: If a path is missing, a file with a header is empty, a line has another number of fields, a quote
            is out of place or has no partner, or a value does not fit its type; the message names file, line (for a
            quote that in which it opens) and column.
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


def from_dataset(
    dataset: Any, *, sampler: Any = None, executor: Executor = "thread", max_concurrency: int | None = None
) -> Pipeline:
    """Take samples from a map-style dataset (torch), several at once.

    With a shuffle in the chain the numbers are permuted over the whole dataset each epoch.

    Args:
        dataset: Has `__getitem__` and `__len__`. For processes it is sent by cloudpickle, and each of them holds its
            own copy: what cannot be sent (an open file, a connection) is best made at the first `__getitem__`.
        sampler: Fixes the order: gives the numbers of this rank, anew each epoch (after `set_epoch(epoch)`). To go on
            in the middle of an epoch, it must give that epoch the same order again, which is checked.
        executor: Where `__getitem__` runs, as for `Pipeline.map`: "thread" for what releases the interpreter lock
            (reading, numpy), "process" for what holds it (plain Python), "auto" to have that measured on the first
            samples. In processes `random`, numpy and torch are seeded anew for each sample.
        max_concurrency: The most samples read at once; 1 where `__getitem__` is not safe in parallel.

    Raises:
        PipelineError: If the dataset cannot be read by number, or an option is not allowed.
    """
    return Pipeline(DatasetSource(dataset, sampler, executor, max_concurrency))
