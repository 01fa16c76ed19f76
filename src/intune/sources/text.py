"""Text with one row a line and fields between delimiters, read in ranges of bytes or as streams."""

import threading
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from intune._errors import SourceError
from intune._words import count
from intune.sources._fields import BadLineError, FieldParser
from intune.sources._files import FileSet, Paths, find_files, reading
from intune.sources._lines import Lines, count_lines, read_lines
from intune.sources._retries import Retries
from intune.sources._streams import codec_of, first_bytes, look_at_all, stream_lines

_MOST_UNIT_BYTES = 1 << 30  # so that no column of strings outgrows its 32-bit offsets
_WINDOW = 8 << 20  # what a Zstandard frame may look back at, but for those of the ultra levels
_BUFFERS = 2 << 20  # of reading ahead, decompressing and parsing
_GZIP_RATIO = 1032  # the most that gzip can make of a byte


class TextSource:
    """Rows of delimited text; a `BlockSource`.

    A unit is a range of `unit_bytes` of a file and has the lines that begin in it, as one block. A file that can
    only be read from its beginning is one unit, which gives consecutive blocks of about `unit_bytes` of text:
    one compressed with gzip or Zstandard, told by its first bytes, and any file if there is a `quote`.

    A line ends with LF or CRLF, the last one of a file perhaps with nothing. A byte order mark at the start of
    a file is skipped. An empty line is ignored, except that it is a row where the schema has only one column; a
    line of empty fields between delimiters is always a row.

    Nothing is guessed: each line has exactly the fields of the schema, and each field is what the schema says.
    Without a `quote`, quotes and backslashes are part of a value. A field equal to `null` is null, in columns of
    strings too, but not within quotes.

    All methods may be called from several threads at once.
    """

    kind = "read_tsv"
    max_concurrency: int | None = None

    def __init__(
        self,
        paths: Paths | FileSet,
        *,
        schema: pa.Schema,
        delimiter: str = "\t",
        header: bool = False,
        null: str = "",
        unit_bytes: int = 8 << 20,
        hex_columns: Sequence[str] = (),
        quote: str | None = None,
        filesystem: Any = None,
        codecs: Sequence[str | None] | None = None,
        retries: Retries | None = None,
    ) -> None:
        """List the files and look at their first bytes.

        Args:
            paths: Files, folders or patterns, see `find_files`; or what that gave.
            schema: Names and types of the fields, in their order in a line, as they come out.
            delimiter: One ASCII character.
            header: The first line of each file has the names of the schema and is no row.
            null: The text of a missing value.
            unit_bytes: Bytes of a unit, or of the text of a block of a larger unit; 1 to 1 GiB.
            hex_columns: Columns that are int64 in the schema and 1 to 8 hexadecimal digits, unsigned, in the text.
            quote: One ASCII character that may stand around a value, and then twice for each that is part of it.
            filesystem: A pyarrow or fsspec filesystem. None: the local one, or what a URI says.
            codecs: What `codec_of` says of each file, where that is known; None: the files are looked at.
            retries: How reads that fail for a moment are repeated; None: three times.

        Raises:
            SourceError: If an option is not allowed, a path is missing, or a file is compressed in another way, or
                not although its name says so; or is empty where the first line is to have names.
        """
        if not 1 <= unit_bytes <= _MOST_UNIT_BYTES:
            raise SourceError(f"unit_bytes must be from 1 to {_MOST_UNIT_BYTES:,}, not {unit_bytes:,}")
        self.schema: pa.Schema = schema
        self._parser = FieldParser(schema, delimiter, null, hex_columns, quote)
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
        if quote is not None:
            self._options["quote"] = quote
        self._quote = quote
        self._retries = Retries() if retries is None else retries
        self._files = paths if isinstance(paths, FileSet) else find_files(paths, filesystem)
        self._codecs = look_at_all(self._files, self._look_at) if codecs is None else list(codecs)
        if header and not self._files.sizes.all():
            raise self._empty(int(np.argmin(self._files.sizes)))
        whole = np.array([quote is not None or codec is not None for codec in self._codecs])
        ranges = -(-self._files.sizes // unit_bytes)
        self._units = np.where(whole, np.minimum(ranges, 1), ranges)  # of each file; none of an empty one
        self._ends = np.cumsum(self._units)  # the unit after the last one of each file
        self._counting = threading.Lock()
        self._counts: list[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_counting"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _counting=threading.Lock())

    def identity(self) -> dict[str, Any]:
        """JSON that tells this source from another: files by relative path and size, options, never contents."""
        return {"kind": self.kind, "files": self._files.identity(), **self._options}

    def modified(self) -> list[int | None] | str | None:
        """When the files were changed, see `FileSet.modified`."""
        return self._files.modified()

    def unit_count(self) -> int:
        """Number of byte ranges and streams, files sorted by path; a range in which no line begins has no rows."""
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
                self._counts = [self._count(unit) for unit in range(self.unit_count())]
            return list(self._counts)

    def read_bound(self, unit: int) -> int:
        """Bytes that reading one block needs at most: text, what is parsed at once, columns before and after joining.

        Rows are not known before reading: 2 bytes a field on average, delimiter included, are assumed. Text
        of which nearly every field is empty needs up to twice as much.
        """
        file, start, stop = self._range(unit)
        text, beside = stop - start, 1 << 16
        if self._is_stream(file):
            text, beside = self._stream_text(file), self.kept_bytes(unit)
        columns = text + self._parser.fixed_bytes(rows=text // (2 * len(self.schema)) + 1)
        return 2 * text + 2 * columns + beside

    def kept_bytes(self, unit: int) -> int:
        """Bytes that an open stream keeps: the last text, to which what is read is joined, and what decompresses it."""
        file, _, _ = self._range(unit)
        if not self._is_stream(file):
            return 0
        return self._stream_text(file) + _BUFFERS + (_WINDOW if self._codecs[file] == "zstd" else 0)

    def _stream_text(self, file: int) -> int:
        """Bytes of text in a block of a stream."""
        codec, size = self._codecs[file], int(self._files.sizes[file])
        return self._unit_bytes if codec == "zstd" else min(size * (_GZIP_RATIO if codec else 1), self._unit_bytes)

    def describe(self, unit: int) -> str:
        """Path and bytes: "/data/day_0.tsv, bytes 8388608 to 16777216"."""
        file, start, stop = self._range(unit)
        return f"{self._files.path(file)}, bytes {start} to {stop}"

    def open(self, unit: int) -> Iterator[pa.RecordBatch]:
        """Read one unit: one block with all its rows, or several of a stream; none has no rows.

        What fails for a moment is tried again, from the block on that was being read.

        Raises:
            SourceError: If the file cannot be read, has changed, or a line is not as declared; the message
                has the path, the number of the line in the file and, for a value, its column.
        """
        for lines in self._lines(unit):
            try:
                block = self._parser.parse(lines)
            except BadLineError as error:
                raise self._located(unit, lines, error) from None
            if block is not None:
                yield block

    def _look_at(self, file: int) -> str | None:
        """How a file is compressed."""
        path = self._files.path(file)
        with reading(lambda: path):
            return codec_of(path, self._retries.call(partial(first_bytes, self._files, file)))

    def _is_stream(self, file: int) -> bool:
        return self._quote is not None or self._codecs[file] is not None

    def _count(self, unit: int) -> int:
        return sum(int(self._parser.row_lines(lines).size) for lines in self._lines(unit))

    def _range(self, unit: int) -> tuple[int, int, int]:
        """File, its first byte, the byte after the last."""
        if not 0 <= unit < self.unit_count():
            raise IndexError(f"there is no unit {unit}, only {self.unit_count()}")
        file = int(np.searchsorted(self._ends, unit, side="right"))
        size = int(self._files.sizes[file])
        if self._is_stream(file):
            return file, 0, size
        start = (unit - int(self._ends[file] - self._units[file])) * self._unit_bytes
        return file, start, min(start + self._unit_bytes, size)

    def _lines(self, unit: int) -> Iterator[Lines]:
        """The lines of a unit in blocks, without mark and header."""
        lines = None
        for lines in self._all_lines(unit):
            yield lines if lines.offset else self._without_header(unit, lines)
        if lines is None and self._header:
            raise self._empty(self._range(unit)[0])

    def _all_lines(self, unit: int) -> Iterator[Lines]:
        file, start, stop = self._range(unit)
        with reading(partial(self.describe, unit)):
            if self._is_stream(file):
                yield from self._retries.resume(partial(self._stream, file))
            else:
                yield self._retries.call(partial(self._read_range, file, start, stop))

    def _read_range(self, file: int, start: int, stop: int) -> Lines:
        with self._files.open(file) as stream:
            return read_lines(stream, int(self._files.sizes[file]), start, stop)

    def _stream(self, file: int) -> Generator[Lines, None, None]:
        return stream_lines(self._files, file, self._codecs[file], self._unit_bytes, self._quote)

    def _without_header(self, unit: int, lines: Lines) -> Lines:
        lines = lines.without_mark()
        if not self._header:
            return lines
        try:
            self._parser.check_header(lines)
        except BadLineError as error:
            raise self._located(unit, lines, error) from None
        return lines.slice(1, len(lines))

    def _located(self, unit: int, lines: Lines, error: BadLineError) -> SourceError:
        """The error with path and line; lines before a range are counted only now."""
        file, _, _ = self._range(unit)
        before = lines.before
        if before is None:
            with reading(partial(self.describe, unit)):
                before = self._retries.call(partial(self._lines_before, file, lines.offset))
        line = before + lines.slice(0, error.line).line_feeds() + error.further + 1
        return SourceError(f"{self._files.path(file)}:{line}: {error.reason}")

    def _empty(self, file: int) -> SourceError:
        return SourceError(
            f"{self._files.path(file)} has no text in it ({count(self._files.sizes[file], 'byte')}), but header=True "
            "says that its first line has the names of the columns: leave it out, or is it cut short?"
        )

    def _lines_before(self, file: int, offset: int) -> int:
        with self._files.open(file) as stream:
            return count_lines(stream, offset)


class CsvSource(TextSource):
    """The same under the name that its stage has for a reader of quoted text."""

    kind = "read_csv"
