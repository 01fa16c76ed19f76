"""Parquet files, read a row group at a time; larger row groups as a stream of blocks."""

from array import array
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from intune._errors import SourceError
from intune._words import count
from intune.sources._files import Paths, find_files, reading
from intune.sources._footers import READ_AHEAD, FooterCache, read_footers
from intune.sources._partitions import Partitioning, Partitions
from intune.sources._retries import Retries
from intune.sources._schema import check_columns, is_text, merge_schemas

BLOCK_ROWS = 65_536
"""Rows of a block, unless said otherwise."""


class ParquetSource:
    """Row groups of Parquet files; a `BlockSource`.

    A unit is one row group that has rows. It is read as blocks of `block_rows` rows, the last one perhaps with
    fewer; a row group of no more than that is one block. Memory follows the block and, for groups that are
    larger than one, not the group. All blocks have `schema`, whatever the file they come from.

    All methods may be called from several threads at once.
    """

    kind = "read_parquet"
    max_concurrency: int | None = None

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        dictionary_columns: Sequence[str] = (),
        filesystem: Any = None,
        block_rows: int = BLOCK_ROWS,
        partitioning: Partitioning = "hive",
        retries: Retries | None = None,
    ) -> None:
        """List the files and read their footers; no data is read.

        Args:
            paths: Files, folders or patterns, see `find_files`.
            columns: Names of top-level and partition columns, in the order in which they come out; None: all, those
                of partitions last.
            dictionary_columns: Columns of strings or bytes that come out as dictionary arrays, which saves making
                every string anew where the file stores them through a dictionary, and costs time where it doesn't.
            filesystem: A pyarrow or fsspec filesystem. None: the local one, or what a URI says.
            block_rows: Most rows of a block, at least 1.
            partitioning: Which folders are columns, see `Partitions`; None: none.
            retries: How reads that fail for a moment are repeated; None: three times.

        Raises:
            SourceError: If a path is missing, a file is not a whole Parquet file, a column is missing, the
                files have types that cannot be joined without loss (see `merge_schemas`), a dictionary column has
                another type, or a wanted column is both in a file and in the names of its folders.
        """
        check_columns(columns)
        if block_rows < 1:
            raise SourceError(f"block_rows must be at least 1, not {block_rows}")
        self._block_rows = block_rows
        self._files = find_files(paths, filesystem)
        self._partitions = Partitions(self._files, partitioning)
        outside = self._partitions.schema.names
        self._outside = [name for name in outside if columns is None or name in columns]
        self._columns = None if columns is None else [name for name in columns if name not in outside]
        self._retries = Retries() if retries is None else retries
        self._footers = FooterCache()
        self._unit_files, self._unit_groups, self._unit_rows, self._bounds = (array("q") for _ in range(4))
        self._kept = array("q")
        self._dictionary = [name for name in dictionary_columns if name not in self._outside]
        self.file_schemas: list[tuple[str, pa.Schema]] = self._scan()
        """Each distinct schema of a file, partition columns included, with the path of the first file that has it."""
        joined = merge_schemas(self.file_schemas, columns)
        self._width = sum(_cast_width(field, self.file_schemas) for field in joined)
        self._width += sum(map(self._partitions.width, self._outside))
        self.schema: pa.Schema = _with_dictionaries(joined, dictionary_columns)

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another: files by relative path and size, options, never contents."""
        identity = {
            "kind": self.kind,
            "files": self._files.identity(),
            "columns": self.schema.names,
            "block_rows": self._block_rows,
        }
        if self._outside:
            identity["partitions"] = self._partitions.identity(self._outside)
        return identity

    def modified(self) -> list[int | None] | str | None:
        """When the files were changed, see `FileSet.modified`."""
        return self._files.modified()

    def unit_count(self) -> int:
        """Number of row groups that have rows, files sorted by path."""
        return len(self._unit_rows)

    def unit_rows(self) -> Sequence[int]:
        """Rows of each unit, from the footers."""
        return self._unit_rows.tolist()

    def count_unit_rows(self) -> Sequence[int]:
        """Rows of each unit, from the footers."""
        return self._unit_rows.tolist()

    def read_bound(self, unit: int) -> int:
        """Bytes that reading one block of this unit needs at most, blocks and buffers, from its footer.

        Sound for numbers. For strings stored through a dictionary it is a high guess, since no footer says
        how long they are together, and for lists in streamed groups it allows blocks of 4 times the mean.
        """
        rows = min(self._unit_rows[unit], self._block_rows)
        return self._bounds[unit] + rows * self._width

    def kept_bytes(self, unit: int) -> int:
        """Bytes that an open row group keeps between two blocks, from its footer; 0 where it is one block."""
        return self._kept[unit]

    def describe(self, unit: int) -> str:
        """Path and row group: "/data/clicks/a.parquet, row group 3"."""
        return f"{self._files.path(self._unit_files[unit])}, row group {self._unit_groups[unit]}"

    def open(self, unit: int) -> Iterator[pa.RecordBatch]:
        """Read one row group as blocks; the file is open until the iterator ends or is closed.

        What fails for a moment is tried again, from the block on that was being read.

        Raises:
            SourceError: If the file cannot be read or has changed; the message has path and row group.
        """
        with reading(partial(self.describe, unit)):
            for batch in self._retries.resume(partial(self._batches, unit)):
                yield self._conform(self._unit_files[unit], batch)

    def _batches(self, unit: int) -> Generator[pa.RecordBatch, None, None]:
        """The blocks as they are in the file; nothing of it is held any more with the last one."""
        file, left = self._unit_files[unit], self._unit_rows[unit]
        with self._files.open(file) as stream:
            parquet = pq.ParquetFile(
                stream,
                metadata=self._footers.get(file),
                read_dictionary=self._dictionary,
                pre_buffer=False,
                buffer_size=READ_AHEAD if left > self._block_rows else 0,  # without: whole columns of the group
            )
            self._footers.put(file, parquet.metadata)
            batches = parquet.iter_batches(
                batch_size=self._block_rows,
                row_groups=[self._unit_groups[unit]],
                columns=self._columns,
                use_threads=False,
            )
            while True:
                batch, expected = next(batches, None), min(left, self._block_rows)
                rows = 0 if batch is None else batch.num_rows
                if rows != expected:
                    raise self._wrong_rows(unit, rows, expected)
                left -= rows
                if not left:
                    break
                yield batch
            if (more := next(batches, None)) is not None:
                raise self._wrong_rows(unit, more.num_rows, 0)
            del batches, parquet  # pages and dictionaries: more than a block
        yield batch

    def _scan(self) -> list[tuple[str, pa.Schema]]:
        """Note all units; the distinct schemas with the first file that has each."""
        schemas: list[tuple[str, pa.Schema]] = []
        footers = read_footers(
            self._files, self._columns, self._dictionary, self._block_rows, self._footers, self._retries
        )
        for file, footer in enumerate(footers):
            whole = self._with_partitions(file, footer.schema)
            if not any(whole.equals(schema) for _, schema in schemas):
                schemas.append((self._files.path(file), whole))
            for group in footer.groups:
                self._unit_files.append(file)
                self._unit_groups.append(group.index)
                self._unit_rows.append(group.rows)
                self._bounds.append(group.bytes_needed)
                self._kept.append(group.bytes_kept)
        return schemas

    def _with_partitions(self, file: int, schema: pa.Schema) -> pa.Schema:
        for name in self._outside:
            if name in schema.names:
                raise SourceError(
                    f"{self._files.path(file)} has a column {name!r}, and so have its folders or those of other files: "
                    "say partitioning=None to take that of the files, or leave it out of columns="
                )
            if self._partitions.has(file, name):
                schema = schema.append(self._partitions.schema.field(name))
        return schema

    def _conform(self, file: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns in the order and the types of the common schema."""
        columns = []
        for field in self.schema:
            if field.name in self._outside:
                columns.append(self._partitions.column(file, field.name, batch.num_rows))
                continue
            column = batch.column(field.name)
            if column.type != field.type:
                if pa.types.is_dictionary(field.type):
                    column = column.cast(field.type.value_type).dictionary_encode()
                else:
                    column = column.cast(field.type)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _wrong_rows(self, unit: int, found: int, expected: int) -> SourceError:
        return SourceError(
            f"{self.describe(unit)}: got {count(found, 'row')} instead of {expected:,} in a block. If a column has "
            f"more than 2 GiB of text in {self._block_rows:,} rows, lower block_rows; else the file has changed or is "
            "damaged"
        )


def _with_dictionaries(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    for name in names:
        if name not in schema.names:
            raise SourceError(f"dictionary column {name!r} is not read; the columns are {schema.names}")
        position = schema.get_field_index(name)
        field = schema.field(position)
        kind = field.type
        if pa.types.is_dictionary(kind):
            continue
        if not is_text(kind):
            raise SourceError(f"dictionary columns must be strings or bytes, but {name!r} is {kind}")
        schema = schema.set(position, field.with_type(pa.dictionary(pa.int32(), kind)))
    return schema


def _cast_width(field: pa.Field, schemas: list[tuple[str, pa.Schema]]) -> int:
    """Bytes a row that casting a column to the common type adds in some file."""
    return field.type.bit_width // 8 if any(schema.field(field.name).type != field.type for _, schema in schemas) else 0
