"""Criteo click logs: what their files look like, and a pipeline that reads them.

Kaggle's `train.txt` and the days of the 1 TB set (`day_0` .. `day_23`) have the same 40 tab-separated fields:
a label (0 or 1), 13 counts, 26 categories of up to eight hex digits; an empty field is missing. Kaggle's
`test.txt` has no label: 39 fields. None of them has a header. Parquet copies come under several column names.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import intune
from intune._errors import PipelineError, SourceError
from intune._words import count
from intune.sources._files import FileSet, Paths, find_files, reading
from intune.sources._hex import hex_to_int64
from intune.sources._retries import Retries
from intune.sources._schema import is_text
from intune.sources._streams import first_line, look_at_all
from intune.sources.parquet import BLOCK_ROWS
from intune.sources.text import TextSource

LABEL_COLUMN = "label"
COUNT_COLUMNS = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_COLUMNS = tuple(f"C{i}" for i in range(1, 27))
ALL_COLUMNS = (LABEL_COLUMN, *COUNT_COLUMNS, *CATEGORY_COLUMNS)

PARQUET_LAYOUTS = ("label, I1..I13, C1..C26", "label, int_0..int_12, cat_0..cat_25", "_c0, _c1, ...")
"""Column names that Parquet copies have, in the order of the fields; unlabelled ones lack `label`, or `_c39`."""

Format: TypeAlias = Literal["auto", "tsv", "parquet"]
_STORED_BYTES = 12  # 8 digits and their length
_TEXT_NAME = re.compile(r"(day_\d+|.*\.(tsv|txt))(\.(gz|zst))?", re.IGNORECASE)
_PARQUET_NAME = re.compile(r".*\.(parquet|parq|pq)", re.IGNORECASE)


def criteo_schema(*, label: bool = True) -> pa.Schema:
    """Schema of the blocks of `read_criteo`: label int32, never null; I1..I13 and C1..C26 int64, null = missing."""
    numbers = [pa.field(name, pa.int64()) for name in (*COUNT_COLUMNS, *CATEGORY_COLUMNS)]
    return pa.schema([pa.field(LABEL_COLUMN, pa.int32(), nullable=False), *numbers] if label else numbers)


def read_criteo(
    paths: Paths,
    *,
    format: Format = "auto",
    label: bool = True,
    executor: Literal["thread", "process"] = "thread",
) -> "intune.Pipeline":
    """Read Criteo files as blocks with the columns of `criteo_schema`.

    Args:
        paths: Files, folders, glob patterns or URIs, as for `intune.read_parquet`. A folder stands for the files in
            it and below it.
        format: "tsv" or "parquet", or "auto": told by file names and first bytes, the same for all files.
        label: Whether the files have a label; False for Kaggle's `test.txt` (39 fields).
        executor: Where Parquet columns are turned into those of `criteo_schema`: hex strings into integers,
            other integers, floats and strings of digits into int64. Text needs no such stage.

    Returns:
        A pipeline of record batches.

    Raises:
        SourceError: If a path is missing, the format cannot be told, files of both kinds are given, a first line has
            a header or another number of fields, or Parquet columns have other names than `PARQUET_LAYOUTS` lists.
    """
    if format not in ("auto", "tsv", "parquet"):
        raise PipelineError(f"format must be 'auto', 'tsv' or 'parquet', got {format!r}")
    files = find_files(paths)
    if format != "parquet":
        looks = _looks(files, format)
        if looks[0].format == "tsv":
            for index, look in enumerate(looks):
                _check_first_line(files.path(index), look.line, label)
            codecs = [look.codec for look in looks]
            schema = criteo_schema(label=label)
            return intune.Pipeline(TextSource(files, schema=schema, hex_columns=CATEGORY_COLUMNS, codecs=codecs))
    path = files.path(0)
    with reading(lambda: f"{path} ({count(files.sizes[0], 'byte')})"), files.open(0) as stream:
        first = pq.ParquetFile(stream)
        names = _parquet_names(path, first.schema_arrow.names, label)
        repeated = _repeated_texts(first, names[-len(CATEGORY_COLUMNS) :])
    pipeline = intune.read_parquet(paths, columns=list(names), dictionary_columns=repeated, partitioning=None)
    return pipeline.map(CriteoColumns(names), name="criteo_columns", executor=executor)


@dataclass(frozen=True)
class _Look:
    """What a first look at a file says; codec and first line of text only."""

    format: Literal["tsv", "parquet"]
    codec: str | None = None
    line: bytes = b""


def _looks(files: FileSet, format: Literal["auto", "tsv"]) -> list[_Look]:
    """Open each file once: tell text from Parquet by name and first bytes, and read the first line of text.

    Raises:
        SourceError: If a file is neither by its name, its first bytes contradict its name, or both kinds are there.
    """
    retries = Retries()

    def look_at(index: int) -> _Look:
        with reading(lambda: files.path(index)):
            return retries.call(partial(_look, files, index, format))

    looks = look_at_all(files, look_at)
    first: dict[str, str] = {}
    for index, look in enumerate(looks):
        first.setdefault(look.format, files.path(index))
    if len(first) > 1:
        raise SourceError(
            f"both kinds of files are given: text ({first['tsv']}) and Parquet ({first['parquet']}); "
            "give files of one kind"
        )
    return looks


@dataclass(frozen=True)
class CriteoColumns:
    """A block function: columns of a Parquet copy, under whatever names and types, into those of `criteo_schema`.

    Attributes:
        names: The names in the file of label (where labelled), I1..I13, C1..C26, in this order.
    """

    names: tuple[str, ...]

    def __call__(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """Convert one block.

        Raises:
            SourceError: If a value does not fit: a missing label, a count that is not an integer, a category that is
                neither hex nor a non-negative integer. The message names the column and the value.
        """
        schema = criteo_schema(label=len(self.names) == len(ALL_COLUMNS))
        columns = []
        for name, field in zip(self.names, schema, strict=True):
            column = block[name]
            try:
                columns.append(_category(column) if field.name in CATEGORY_COLUMNS else _number(column, field.type))
            except ValueError as error:  # Arrow's own errors of values are among them
                raise SourceError(f"column {name!r} ({column.type}) as {field.name}: {error}") from error
            if not field.nullable and column.null_count:
                row = pc.index(column.is_null(), True).as_py()
                raise SourceError(f"column {name!r}, row {row} of the block: the label is missing")
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _category(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        if is_text(column.type.value_type):
            try:
                return hex_to_int64(column.dictionary.cast(pa.string())).take(column.indices)
            except SourceError:  # a value that perhaps no row has; else the message is to say which row
                pass
        column = column.dictionary_decode()
    if is_text(column.type):
        return hex_to_int64(column.cast(pa.string()))
    if not pa.types.is_integer(column.type):
        raise ValueError("expected hex strings or integers")
    lowest = pc.min(column).as_py()
    if lowest is not None and lowest < 0:
        raise ValueError(
            f"{lowest} is negative; a category is 0 to 4294967295, and one above 2147483647 does not fit the int32 "
            "that it may once have been written as"
        )
    return column.cast(pa.int64())


def _number(column: pa.Array, kind: pa.DataType) -> pa.Array:
    types = pa.types
    if not (is_text(column.type) or types.is_integer(column.type) or types.is_floating(column.type)):
        raise ValueError("expected integers, whole floats or strings of digits")
    return column.cast(kind)


def _look(files: FileSet, index: int, format: Literal["auto", "tsv"]) -> _Look:
    with files.open(index) as stream:
        if format == "auto" and _format_of(files, index, stream.read(4) == b"PAR1") == "parquet":
            return _Look("parquet")
        stream.seek(0)
        return _Look("tsv", *first_line(files, index, stream))


def _format_of(files: FileSet, index: int, parquet: bool) -> Literal["tsv", "parquet"]:
    path = files.path(index)
    name = path.rsplit("/", 1)[-1]
    if parquet and _TEXT_NAME.fullmatch(name):
        raise SourceError(f"{path} has the name of a text file, but the content of a Parquet file")
    if parquet:
        return "parquet"
    if _PARQUET_NAME.fullmatch(name):
        raise SourceError(
            f"{path} ({count(files.sizes[index], 'byte')}) has the name of a Parquet file, but not the content"
        )
    if _TEXT_NAME.fullmatch(name):
        return "tsv"
    raise SourceError(
        f"cannot tell the format of {path}: known names are day_<n>, *.tsv, *.txt and *.parquet; "
        "say format='tsv' or format='parquet'"
    )


def _check_first_line(path: str, line: bytes, label: bool) -> None:
    if not line:
        return  # an empty file has no rows; a blank first line is the reader's to judge
    fields = line.split(b"\t")
    expected = len(criteo_schema(label=label))
    if len(fields) != expected:
        hint = {
            39: "; files without a label need label=False, and cannot be trained on",
            40: "; label=False is for files without one",
        }
        raise SourceError(
            f"{path}:1: expected {expected} tab-separated fields ({'label, ' if label else ''}I1..I13, C1..C26), "
            f"got {len(fields)}: {line[:60]!r}{hint.get(len(fields), '')}"
        )
    if fields[0] and not fields[0].lstrip(b"-").isdigit():
        raise SourceError(f"{path}:1: expected an integer in the first field and no header, got {fields[0]!r}")


def _parquet_names(path: str, there: list[str], label: bool) -> tuple[str, ...]:
    first = (LABEL_COLUMN,) if label else ()
    for names in (
        (*first, *COUNT_COLUMNS, *CATEGORY_COLUMNS),
        (*first, *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))),
        tuple(f"_c{i}" for i in range(39 + label)),
    ):
        if set(names) <= set(there):
            return names
    raise SourceError(
        f"{path} has the columns {there}; expected {'; or '.join(PARQUET_LAYOUTS)}{'' if label else ' (without label)'}"
    )


def _repeated_texts(file: pq.ParquetFile, names: tuple[str, ...]) -> list[str]:
    """Columns of texts with so few distinct ones that reading those once and an index a row is the faster way.

    Judged by the first row group: if all of the column were values of 8 digits (12 bytes each, as stored), they would
    still be fewer than half of the rows of a block.
    """
    footer = file.metadata
    texts = {name for name in names if is_text(file.schema_arrow.field(name).type)}
    if not texts or not footer.num_row_groups:
        return []
    group = footer.row_group(0)
    chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
    most = _STORED_BYTES * min(group.num_rows, BLOCK_ROWS) / 2
    return [name for name in names if name in texts and chunks[name].total_uncompressed_size < most]
