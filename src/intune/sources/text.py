"""Text with one row a line and fields between delimiters, read in ranges of bytes."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from intune._errors import SourceError
from intune.sources._fields import BadLineError, FieldParser
from intune.sources._files import Paths, find_files, reading
from intune.sources._lines import Lines, count_lines, read_lines

_MOST_UNIT_BYTES = 1 << 30  # so that no column of strings outgrows its 32-bit offsets
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")


class TextSource:
    """Rows of delimited text without quoting; a `BlockSource` with one block a unit.

    A unit is a range of `unit_bytes` of a file and has the lines that begin in it. A line ends with LF or CRLF,
    the last one of a file perhaps with nothing. A byte order mark at the start of a file is skipped. An empty
    line is ignored, except that it is a row where the schema has only one column; a line of empty fields
    between delimiters is always a row.

    Nothing is guessed: each line has exactly the fields of the schema, and each field is what the schema says.
    Quotes and backslashes are part of a value. A field equal to `null` is null, in columns of strings too.

    All methods may be called from several threads at once.
    """

    kind = "read_tsv"
    max_concurrency: int | None = None

    def __init__(
        self,
        paths: Paths,
        *,
        schema: pa.Schema,
        delimiter: str = "\t",
        header: bool = False,
        null: str = "",
        unit_bytes: int = 8 << 20,
        hex_columns: Sequence[str] = (),
        filesystem: Any = None,
    ) -> None:
        """List the files; none is read.

        Args:
            paths: Files, folders or patterns, see `find_files`.
            schema: Names and types of the fields, in their order in a line, as they come out.
            delimiter: One ASCII character.
            header: The first line of each file has the names of the schema and is no row.
            null: The text of a missing value.
            unit_bytes: Bytes of a unit, 1 to 1 GiB.
            hex_columns: Columns that are int64 in the schema and 1 to 8 hexadecimal digits, unsigned, in the text.
            filesystem: A pyarrow or fsspec filesystem. None: the local one, or what a URI says.

        Raises:
            SourceError: If an option is not allowed, a path is missing, or a file is compressed.
        """
        if not 1 <= unit_bytes <= _MOST_UNIT_BYTES:
            raise SourceError(f"unit_bytes must be from 1 to {_MOST_UNIT_BYTES:,}, not {unit_bytes:,}")
        self.schema: pa.Schema = schema
        self._parser = FieldParser(schema, delimiter, null, hex_columns)
        self._header = header
        self._unit_bytes = unit_bytes
        self._options = {
            "schema": [[field.name, str(field.type), field.nullable] for field in schema],
            "delimiter": delimiter,
            "header": header,
            "null": null,
            "unit_bytes": unit_bytes,
            "hex_columns": sorted(hex_columns),
        }
        self._files = find_files(paths, filesystem)
        for file, name in enumerate(self._files.names):
            if name.lower().endswith(_COMPRESSED):
                raise SourceError(
                    f"{self._files.path(file)}: compressed text is not supported yet; decompress it first"
                )
        self._ends = np.cumsum(-(-self._files.sizes // unit_bytes))  # the unit after the last one of each file
        self._counting = threading.Lock()
        self._counts: list[int] | None = None

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another: files by relative path and size, options, never contents."""
        return {"kind": self.kind, "files": self._files.identity(), **self._options}

    def unit_count(self) -> int:
        """Number of byte ranges, files sorted by path; a range in which no line begins has no rows."""
        return int(self._ends[-1])

    def unit_rows(self) -> None:
        """None: how many rows there are is not known before reading."""
        return None

    def count_unit_rows(self) -> Sequence[int]:
        """Rows of each unit, from the line ends alone; reads every file once and keeps the result.

        Raises:
            SourceError: If a file cannot be read, has changed, or has another header.
        """
        with self._counting:
            if self._counts is None:
                units = range(self.unit_count())
                self._counts = [int(self._parser.row_lines(self._lines(unit)).size) for unit in units]
            return list(self._counts)

    def read_bound(self, unit: int) -> int:
        """Bytes that reading this unit needs at most: text, what is parsed at once, columns before and after joining.

        Rows are not known before reading: 2 bytes a field on average, delimiter included, are assumed. Text
        of which nearly every field is empty needs up to twice as much.
        """
        _, start, stop = self._range(unit)
        text = stop - start
        columns = text + self._parser.fixed_bytes(rows=text // (2 * len(self.schema)) + 1)
        return 2 * text + 2 * columns + (1 << 16)

    def describe(self, unit: int) -> str:
        """Path and bytes: "/data/day_0.tsv, bytes 8388608 to 16777216"."""
        file, start, stop = self._range(unit)
        return f"{self._files.path(file)}, bytes {start} to {stop}"

    def open(self, unit: int) -> Iterator[pa.RecordBatch]:
        """Read one unit: one block with all its rows, or none if it has no rows.

        Raises:
            SourceError: If the file cannot be read, has changed, or a line is not as declared; the message
                has the path, the number of the line in the file and, for a value, its column.
        """
        block = self._block(unit)
        if block is not None:
            yield block

    def _range(self, unit: int) -> tuple[int, int, int]:
        """File, its first byte, the byte after the last."""
        if not 0 <= unit < self.unit_count():
            raise IndexError(f"there is no unit {unit}, only {self.unit_count()}")
        file = int(np.searchsorted(self._ends, unit, side="right"))
        size = int(self._files.sizes[file])
        start = (unit - int(self._ends[file]) - (-size // self._unit_bytes)) * self._unit_bytes
        return file, start, min(start + self._unit_bytes, size)

    def _lines(self, unit: int) -> Lines:
        """The lines of a unit, without mark and header."""
        file, start, stop = self._range(unit)
        with reading(partial(self.describe, unit)), self._files.open(file) as stream:
            lines = read_lines(stream, int(self._files.sizes[file]), start, stop)
        if start:
            return lines
        lines = lines.without_mark()
        if not self._header:
            return lines
        try:
            self._parser.check_header(lines)
        except BadLineError as error:
            raise self._located(unit, lines, error) from None
        return lines.slice(1, len(lines))

    def _block(self, unit: int) -> pa.RecordBatch | None:
        lines = self._lines(unit)
        try:
            return self._parser.parse(lines)
        except BadLineError as error:
            raise self._located(unit, lines, error) from None

    def _located(self, unit: int, lines: Lines, error: BadLineError) -> SourceError:
        file, _, _ = self._range(unit)
        with reading(partial(self.describe, unit)), self._files.open(file) as stream:
            before = count_lines(stream, lines.offset)
        return SourceError(f"{self._files.path(file)}:{before + error.line + 1}: {error.reason}")
