"""Lines of fields to typed columns: pyarrow's parser, held to the letter, and errors that say which line."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from intune._errors import SourceError
from intune._words import count
from intune.sources._hex import first_non_hex, hex_to_int64
from intune.sources._lines import BYTE_ORDER_MARK, Lines, unclosed

_PARSED_AT_ONCE = 2 << 20
"""Bytes; the parser leaves the cache with more: 0.54 against 0.66 us for a row of 40 fields."""

_LONGEST_SHOWN = 80
_NAMES_SHOWN = 100
_LONE_RETURN = "a carriage return that no line feed follows; lines end with LF or CRLF"


class BadLineError(Exception):
    """A line is not as declared.

    Attributes:
        line: Its index in the lines that were given.
        reason: What is wrong with it.
        further: Line feeds within it before what is wrong.
    """

    def __init__(self, line: int, reason: str, further: int = 0) -> None:
        """Remember what is wrong where."""
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason
        self.further = further


class FieldParser:
    """Turns lines into a record batch of a declared schema; immutable."""

    def __init__(
        self, schema: pa.Schema, delimiter: str, null: str, hex_columns: Sequence[str], quote: str | None = None
    ) -> None:
        """Check that the schema can be read from text.

        With a `quote`, a value may stand between two of these and then have delimiters and line ends in it, and
        two quotes for each of its own; a quoted value is never null.

        Raises:
            SourceError: If it cannot be.
        """
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in "\r\n\0":
            raise SourceError(f"delimiter must be one ASCII character that ends no line, not {delimiter!r}")
        if quote is not None and (len(quote) != 1 or not quote.isascii() or quote in f"\r\n\0{delimiter}"):
            raise SourceError(f"quote must be one ASCII character apart from the delimiter, or None, not {quote!r}")
        if any(mark in null for mark in (delimiter, "\r", "\n", quote or delimiter)):
            raise SourceError(f"null must be the text of one field, not {null!r}")
        self.schema: pa.Schema = schema
        self._hex_columns = _checked_hex_columns(schema, hex_columns)
        self._delimiter = delimiter
        self._null = null
        self._quote = quote
        self._types = {field.name: pa.binary() if field.name in self._hex_columns else field.type for field in schema}
        self._options = pacsv.ParseOptions(
            delimiter=delimiter,
            quote_char=False if quote is None else quote,
            double_quote=quote is not None,
            escape_char=False,
            newlines_in_values=quote is not None,
            ignore_empty_lines=len(schema) > 1,  # of one column, an empty line is a row with an empty field
        )
        self._all = self._convert_options(schema.names)
        self._whole = [field.name for field in schema if field.name not in self._hex_columns and _is_whole(field.type)]
        self._whole_as_text = self._convert_options(self._whole)
        self._whole_as_text.column_types = dict.fromkeys(self._whole, pa.binary())
        self._check_types()

    def fixed_bytes(self, rows: int) -> int:
        """Bytes that so many rows need apart from the text of strings: values, offsets, validity."""
        return rows * sum(_bytes_a_value(field.type) for field in self.schema)

    def row_lines(self, lines: Lines) -> npt.NDArray[np.int64]:
        """int64 [rows]: which of the lines are rows."""
        if len(self.schema) == 1:
            return np.arange(len(lines))
        return np.flatnonzero(~lines.is_empty())

    def check_header(self, lines: Lines) -> None:
        """Compare the first line with the names of the schema.

        Raises:
            BadLineError: If they differ.
        """
        first = lines.slice(0, min(len(lines), 1))
        self._check_marks(first)
        names = self._split(first, 0) if len(first) else []
        if names != self.schema.names:
            raise BadLineError(0, f"the header has the names {_listed(names)}, the schema has {self.schema.names}")

    def parse(self, lines: Lines) -> pa.RecordBatch | None:
        """One batch with all rows in the lines, or None if there are none.

        Raises:
            BadLineError: For the first line that is not as declared.
        """
        self._check_marks(lines)
        rows = self.row_lines(lines)
        if not rows.size:
            return None
        try:
            table = self._read(lines, self._all)
        except pa.ArrowInvalid as error:
            raise self._first_bad(lines, error) from None
        self._check_prefixes(lines, rows)
        columns = []
        for field, column in zip(self.schema, table.columns, strict=True):
            array = self._hex(field, column, rows) if field.name in self._hex_columns else _joined(column)
            if array.null_count and not field.nullable:
                row = array.is_null().index(True).as_py()
                raise BadLineError(int(rows[row]), f"column {field.name!r} is empty, and the schema says not null")
            columns.append(array)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(self, lines: Lines, convert: pacsv.ConvertOptions) -> pa.Table:
        data = lines.data
        if lines.begins_with_mark():
            # pyarrow skips a mark wherever it starts to read, but this one is the beginning of a value.
            data = pa.py_buffer(BYTE_ORDER_MARK + data.to_pybytes())
        read = pacsv.ReadOptions(
            use_threads=False,
            block_size=max(_PARSED_AT_ONCE, lines.longest() + len(BYTE_ORDER_MARK) + 1),
            column_names=self.schema.names,
        )
        return pacsv.read_csv(pa.BufferReader(data), read, self._options, convert)

    def _convert_options(self, names: list[str]) -> pacsv.ConvertOptions:
        return pacsv.ConvertOptions(
            column_types=self._types,
            null_values=[self._null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            include_columns=names,
        )

    def _check_types(self) -> None:
        line = self._delimiter.join([self._null] * len(self.schema)).encode() + b"\n"
        lines = Lines(pa.py_buffer(line), np.array([len(line)]), 0)
        for field in self.schema:
            try:
                self._read(lines, self._convert_options([field.name]))
            except pa.ArrowNotImplementedError:
                raise SourceError(
                    f"column {field.name!r}: {field.type} cannot be read from text; declare a string and map it"
                ) from None

    def _split(self, lines: Lines, line: int) -> list[str]:
        text = lines.text(line).decode(errors="backslashreplace")
        if self._quote is None:
            return text.split(self._delimiter)
        return _split_quoted(text, self._delimiter, self._quote)

    def _check_marks(self, lines: Lines) -> None:
        """Quotes and carriage returns only where they may be."""
        if self._quote is not None:
            self._check_quotes(lines)
        stray = lines.stray_return(self._quote)
        if stray is not None:  # pyarrow would begin a new row there
            raise BadLineError(stray, _LONE_RETURN)

    def _check_prefixes(self, lines: Lines, rows: npt.NDArray[np.int64]) -> None:
        """Refuse 0x10 in a column of whole numbers, which pyarrow takes for 16."""
        if not self._whole or not lines.has_hex_prefix():
            return
        texts = self._read(lines, self._whole_as_text)
        for name in self._whole:
            prefixed = pc.index(pc.match_substring_regex(texts[name], r"^\s*0[xX]"), True).as_py()
            if prefixed >= 0:
                raise self._no_value(int(rows[prefixed]), self.schema.field(name), texts[name][prefixed].as_py())

    def _check_quotes(self, lines: Lines) -> None:
        """Quotes only around whole values and doubled in them; pyarrow takes others in ways that depend on the cut.

        Counted from the beginning of a line, every first quote opens and every second one closes, where a doubled
        one closes and opens again.
        """
        array = np.frombuffer(lines.data, np.uint8)
        quotes = np.flatnonzero(array == ord(self._quote or ""))
        if not quotes.size:
            return
        opening, closing = quotes[0::2], quotes[1::2]
        before = array[np.maximum(opening - 1, 0)]
        first = (opening == 0) | np.isin(opening, lines.ends)
        opens = first | (before == ord(self._delimiter))
        opens[1:] |= opening[1:] - 1 == closing[: opening.size - 1]
        after = array[np.minimum(closing + 1, array.size - 1)]
        closes = (closing + 1 == array.size) | np.isin(after, [ord(self._delimiter), 10, 13])
        following = opening[1:] if opening.size > closing.size else np.append(opening[1:], -1)
        closes |= following == closing + 1
        bad = np.concatenate([opening[~opens], closing[~closes], opening[closing.size :]])
        if bad.size:
            raise self._bad_quote(lines, array, quotes, int(np.searchsorted(quotes, bad.min())))

    def _bad_quote(
        self, lines: Lines, array: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64], bad: int
    ) -> BadLineError:
        """What to say of the first quote that is out of place: it, or one that it was to close."""
        opening = bad - bad % 2
        while opening and quotes[opening] - 1 == quotes[opening - 1]:  # doubled: the value opened before
            opening -= 2
        feeds = int(np.count_nonzero(array[quotes[opening] : quotes[bad]] == 10))
        place, quote = int(quotes[opening]), self._quote or ""
        if bad + 1 == quotes.size and bad % 2 == 0 and self._opens(array, lines, place):
            reason = unclosed(quote, "by the end of the file")
        elif feeds and self._opens(array, lines, place):
            reason = unclosed(quote, f"by the next {quote}, {count(feeds, 'line')} further down")
        else:
            reason = f"a {quote} that neither opens nor closes a whole value; in a quoted value it is doubled"
            place = int(quotes[bad])
        line = int(np.searchsorted(lines.ends, place, side="right"))
        start = int(lines.ends[line - 1]) if line else 0
        return BadLineError(line, reason, int(np.count_nonzero(array[start:place] == 10)))

    def _opens(self, array: npt.NDArray[np.uint8], lines: Lines, place: int) -> bool:
        """Whether a value begins at a place."""
        return place == 0 or array[place - 1] == ord(self._delimiter) or bool(np.isin(place, lines.ends))

    def _hex(self, field: pa.Field, column: pa.ChunkedArray, rows: npt.NDArray[np.int64]) -> pa.Array:
        # Joined first: a call for each chunk would take the interpreter lock thousands of times a unit.
        strings = _joined(column)
        try:
            return hex_to_int64(strings)
        except SourceError:
            row = first_non_hex(strings)
            if row is None:
                raise
            value = _shown(strings[row].as_py().decode(errors="backslashreplace"))
            reason = f"column {field.name!r}: {value} is not a hexadecimal number of 1 to 8 digits"
            raise BadLineError(int(rows[row]), reason) from None

    def _first_bad(self, lines: Lines, error: pa.ArrowInvalid) -> BadLineError:
        """Find the line by halving: a prefix of the lines fails exactly if it has the bad one."""
        good, bad = 0, len(lines)
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._fails(lines.slice(0, middle), self._all):
                bad = middle
            else:
                good = middle
        line = lines.slice(bad - 1, bad)
        fields = self._split(line, 0)
        if len(fields) != len(self.schema):
            return BadLineError(bad - 1, f"found {len(fields)} fields, expected {len(self.schema)}")
        for field, value in zip(self.schema, fields, strict=True):
            if self._fails(line, self._convert_options([field.name])):
                return self._no_value(bad - 1, field, value)
        return BadLineError(bad - 1, str(error))

    def _no_value(self, line: int, field: pa.Field, value: str | bytes) -> BadLineError:
        text = value if isinstance(value, str) else value.decode(errors="backslashreplace")
        return BadLineError(line, f"column {field.name!r}: {_shown(text)} is not a valid {field.type}")

    def _fails(self, lines: Lines, convert: pacsv.ConvertOptions) -> bool:
        try:
            self._read(lines, convert)
        except pa.ArrowInvalid:
            return bool(self.row_lines(lines).size)  # no rows at all is an error for pyarrow, but not for us
        return False


def _checked_hex_columns(schema: pa.Schema, hex_columns: Sequence[str]) -> frozenset[str]:
    if not isinstance(schema, pa.Schema) or not len(schema):
        raise SourceError(f"schema must be a pyarrow.Schema with at least one field, not {schema!r}")
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SourceError(f"schema has names more than once: {', '.join(twice)}")
    if isinstance(hex_columns, str):
        raise SourceError(f"hex_columns must be a list of names, not the string {hex_columns!r}")
    for name in hex_columns:
        if name not in schema.names:
            raise SourceError(f"hex column {name!r} is not in the schema, which has {', '.join(schema.names)}")
        if schema.field(name).type != pa.int64():
            raise SourceError(f"hex column {name!r} must be declared int64, not {schema.field(name).type}")
    return frozenset(hex_columns)


def _is_whole(kind: pa.DataType) -> bool:
    """Whether pyarrow reads values as whole numbers."""
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_integer(inner) or pa.types.is_duration(inner))


def _split_quoted(text: str, delimiter: str, quote: str) -> list[str]:
    """The values of a line whose quotes are in their places; as long as they may be."""
    values: list[str] = []
    parts: list[str] = []  # of a value with delimiters in it
    quotes = 0
    for part in text.split(delimiter):
        parts.append(part)
        quotes += part.count(quote)
        if quotes % 2 == 0:
            value = delimiter.join(parts)
            values.append(value[1:-1].replace(2 * quote, quote) if value.startswith(quote) else value)
            parts, quotes = [], 0
    return values


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return f"[{', '.join(map(_shown, names[:_NAMES_SHOWN]))}]{more}"


def _bytes_a_value(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width) // 8 + 1
    except ValueError:  # strings: an offset
        return 9 if kind in (pa.large_string(), pa.large_binary()) else 5


def _joined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _shown(value: str) -> str:
    return repr(value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "...")
