"""What the footers of Parquet files say: schema, row groups, rows, and what reading them takes in memory."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from intune._words import count
from intune.sources._files import FileSet, reading
from intune.sources._retries import Retries

READ_AHEAD = 1 << 18
"""Bytes that are read at once of each column of a streamed row group."""

_THREADS = 8
_MOST_FILES_A_TASK = 64
_KEPT_BYTES = 8 << 20  # as stored; parsed footers take about 8 times as much
_PAGE = 17 << 16  # writers aim at 1 MiB for pages and dictionaries, and pass it by some values
_SMALL = 1 << 15  # what else there is of each column
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_PAGE_ROWS = 21_000  # writers that count rows too aim at 20,000, and pass it by some
_AS_THEY_ARE = ("INT_32", "INT_64")
_COUNTS_ROWS = re.compile(r"parquet-cpp-arrow version (2[2-9]|[3-9]\d|\d{3})\.")


@dataclass(frozen=True, slots=True)
class Group:
    """A row group that has rows.

    Attributes:
        index: Its number in the file.
        rows: Rows in it.
        bytes_needed: High estimate of what reading one of its blocks takes.
        bytes_kept: High estimate of the part of it that stays between two blocks, beside the last one.
    """

    index: int
    rows: int
    bytes_needed: int
    bytes_kept: int


@dataclass(frozen=True, slots=True)
class Footer:
    """Schema of a file, and its row groups that have rows."""

    schema: pa.Schema
    groups: tuple[Group, ...]


class FooterCache:
    """Parsed footers of the files that were opened last, so that a large one is not parsed for every row group.

    May be used from several threads at once: a parsed footer is never changed.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins with none."""
        return FooterCache, ()

    def get(self, file: int) -> pq.FileMetaData | None:
        """The footer of a file if it is still here."""
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
            return self._kept.get(file)

    def put(self, file: int, footer: pq.FileMetaData) -> None:
        """Keep a footer, and drop what was used longest ago beyond 8 MiB; the newest one always stays."""
        with self._lock:
            if file in self._kept:
                return
            self._kept[file] = footer
            self._bytes += footer.serialized_size
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.serialized_size


def read_footers(
    files: FileSet,
    columns: Sequence[str] | None,
    dictionaries: Sequence[str],
    block_rows: int,
    cache: FooterCache,
    retries: Retries,
) -> Iterator[Footer]:
    """Read each footer once, in the order of the files, with a few threads that end with this call.

    Args:
        files: The list.
        columns: What is read of them; None = all.
        dictionaries: Columns that come out as dictionary arrays, beside those that were written as such.
        block_rows: Rows of a block.
        cache: Keeps the footers.
        retries: How reads that fail for a moment are repeated.

    Raises:
        SourceError: For the first file in order that is not a whole Parquet file; with its path and size.
    """
    scan = partial(_read_task, files, columns, dictionaries, block_rows, cache, retries)
    size = max(1, min(_MOST_FILES_A_TASK, len(files) // _THREADS))
    tasks = [range(start, min(start + size, len(files))) for start in range(0, len(files), size)]
    if len(tasks) == 1:
        yield from scan(tasks[0])
        return
    pool = ThreadPoolExecutor(min(_THREADS, len(tasks)), thread_name_prefix="intune-footers")
    try:
        for footers in pool.map(scan, tasks):
            yield from footers
    finally:
        pool.shutdown(cancel_futures=True)


def _read_task(
    files: FileSet,
    columns: Sequence[str] | None,
    dictionaries: Sequence[str],
    block_rows: int,
    cache: FooterCache,
    retries: Retries,
    task: range,
) -> list[Footer]:
    footers: list[Footer] = []
    leaves: list[_Leaf] = []
    for file in task:
        with reading(partial(_named, files, file)):
            schema, metadata = retries.call(partial(_read_footer, files, file))
            cache.put(file, metadata)
            if not footers or not schema.equals(footers[-1].schema):
                leaves = _leaves(metadata, schema, columns, dictionaries)
            most_rows = _PAGE_ROWS if _COUNTS_ROWS.match(metadata.created_by or "") else None
            groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
            footers.append(
                Footer(
                    schema,
                    tuple(
                        Group(
                            index,
                            group.num_rows,
                            *_bytes_of(group, leaves, block_rows, most_rows),
                        )
                        for index, group in enumerate(groups)
                        if group.num_rows
                    ),
                )
            )
    return footers


def _read_footer(files: FileSet, file: int) -> tuple[pa.Schema, pq.FileMetaData]:
    with files.open(file) as stream:
        parquet = pq.ParquetFile(stream, pre_buffer=False)
        return parquet.schema_arrow, parquet.metadata


def _named(files: FileSet, file: int) -> str:
    return f"{files.path(file)} ({count(files.sizes[file], 'byte')})"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A stored column.

    Attributes:
        index: Its number.
        width: Bytes of a decoded value; None = strings.
        nested: Whether it lies in a list or struct.
        optional: Whether values may be missing.
        repeated: Whether a row may have several.
        stored_width: Bytes of a value as it is stored, where that is a fixed number.
        converted: Whether Arrow makes its values of others, in whose memory they were read: dates, small numbers.
        as_dictionary: Whether it comes out as dictionary arrays.
    """

    index: int
    width: int | None
    nested: bool
    optional: bool
    repeated: bool
    stored_width: int
    converted: bool
    as_dictionary: bool


def _leaves(
    metadata: pq.FileMetaData, schema: pa.Schema, columns: Sequence[str] | None, dictionaries: Sequence[str]
) -> list[_Leaf]:
    leaves = []
    coded = {field.name for field in schema if pa.types.is_dictionary(field.type)} | set(dictionaries)
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        wanted = columns is None or any(column.path == name or column.path.startswith(f"{name}.") for name in columns)
        if wanted:
            width = _WIDTHS.get(column.physical_type)
            if column.physical_type == "FIXED_LEN_BYTE_ARRAY" or column.logical_type.type == "DECIMAL":
                width = max(column.length, 16)
            stored = 12 if column.physical_type == "INT96" else _WIDTHS.get(column.physical_type) or column.length
            optional, repeated = column.max_definition_level > 0, column.max_repetition_level > 0
            leaves.append(
                _Leaf(
                    index,
                    width,
                    "." in column.path,
                    optional,
                    repeated,
                    max(1, stored),
                    _is_converted(column),
                    column.path in coded,
                )
            )
    return leaves


def _is_converted(column: pq.ColumnSchema) -> bool:
    if column.physical_type in ("INT32", "INT64"):
        return column.logical_type.type not in ("NONE", "TIMESTAMP") and column.converted_type not in _AS_THEY_ARE
    return column.physical_type in ("INT96", "BOOLEAN")


def _bytes_of(
    group: pq.RowGroupMetaData, leaves: list[_Leaf], block_rows: int, most_rows: int | None
) -> tuple[int, int]:
    """Blocks and buffers of reading one block; and what of them is kept until the next, beside the last one.

    A group larger than a block is streamed: one block is decoded while the last one is still held, from
    `READ_AHEAD` stored bytes, a page and a dictionary of each column. A smaller group is read whole. Of each
    column a page and a dictionary are held decompressed, the dictionary decoded too, and a number for each value that
    may be missing. Values are put together one column at a time, in memory that grows to up to twice of what they take.
    """
    streamed = group.num_rows > block_rows
    share = min(1.0, block_rows / group.num_rows)
    rows = min(group.num_rows, block_rows)
    needed = largest = 0.0
    kept = 0
    for leaf in leaves:
        column = group.column(leaf.index)
        stored = column.total_compressed_size
        plain = column.total_uncompressed_size
        # Lists may be longer in one block than in another.
        decoded = _decoded_bytes(column, leaf) * (min(1.0, 4 * share) if leaf.nested else share)
        if not leaf.nested:  # of lists, and of texts in a dictionary, the guess is high enough
            largest = max(largest, min(decoded, plain * share) if leaf.width is None else decoded)
        needed += decoded * (2 if streamed else 1)
        buffers = (min(stored, READ_AHEAD) if streamed else stored) + min(plain, _PAGE)
        if column.has_dictionary_page:  # decoded, each text in it takes 16 bytes more
            buffers += min(plain, 2 * _PAGE) * (2 if leaf.width is None else 1)
        if leaf.optional and not leaf.nested:
            buffers += 2 << rows.bit_length()
        stays = _bytes_kept(column, leaf, group.num_rows, block_rows, most_rows) if streamed else 0
        needed += max(buffers, stays)
        kept += stays
    return int(needed + largest), kept


def _bytes_kept(column: pq.ColumnChunkMetaData, leaf: _Leaf, rows: int, block_rows: int, most_rows: int | None) -> int:
    """What reading a column of a streamed group keeps between two blocks, beside the last one.

    * What was read ahead.
    * The page; where it was compressed it lies in memory that the dictionary was in before.
    * The dictionary decoded: beside bytes there are addresses, and for texts lengths and offsets.
    * Levels of 2 bytes, two a value in lists and one where values may be missing, of a block and some more; in memory
      that doubles as it grows. Values that Arrow converts lie beside what it makes of them, in as many places.
    * For what comes out as a dictionary a table to look values up in, which quadruples as it grows, the values, and
      numbers of a block.

    Args:
        column: Of the footer.
        leaf: What is read.
        rows: Rows of the group.
        block_rows: Rows of a block.
        most_rows: The most rows of a page; None = only its bytes are limited.
    """
    stored, plain = column.total_compressed_size, column.total_uncompressed_size
    size, entries = _dictionary(column, leaf)
    page = min(_PAGE, plain - size) if most_rows is None else min(_PAGE, (plain - size) * min(1.0, most_rows / rows))
    kept = _SMALL + min(stored, READ_AHEAD) + (page if column.compression == "UNCOMPRESSED" else max(page, size))
    kept += size + entries * {"BYTE_ARRAY": 16, "FIXED_LEN_BYTE_ARRAY": 8}.get(column.physical_type, 0)
    values = int(1.1 * column.num_values * block_rows / rows) + block_rows if leaf.repeated else block_rows
    many = 1 << values.bit_length()
    kept += many * (4 if leaf.repeated else 2 if leaf.optional else 0) + many * leaf.stored_width * leaf.converted
    if leaf.as_dictionary:
        distinct = entries or column.num_values // 10  # what hardly repeats is seldom written as a dictionary
        table = 32
        while table <= 2 * distinct:
            table *= 4
        kept += 16 * table + (1 << (size or plain).bit_length()) + (4 << distinct.bit_length()) + 4 * block_rows
    return int(kept)


def _dictionary(column: pq.ColumnChunkMetaData, leaf: _Leaf) -> tuple[int, int]:
    """Bytes and entries of a column's dictionary as it was before it was compressed; 0 where there is none.

    Nothing says so, but where nothing is compressed. All that is known is how large it is compressed, which may be a
    quarter of its size or less, and what it takes together with numbers into it. Where equal values lie together those
    take fewer bits than reckoned here, and the dictionary is larger.
    """
    if not column.has_dictionary_page:
        return 0, 0
    stored, plain, statistics = column.total_compressed_size, column.total_uncompressed_size, column.statistics
    begin, end = column.dictionary_page_offset, column.data_page_offset
    is_text = column.physical_type == "BYTE_ARRAY"
    each = 4 + _usual_length(statistics) if is_text else leaf.stored_width
    size = float(end - begin) if begin is not None and begin < end else 0.0
    if not size or column.compression != "UNCOMPRESSED":
        missing = statistics.null_count or 0 if statistics is not None else 0
        beside = _dictionary_beside(plain, column.num_values - missing, each)
        size = max(beside, size * max(plain / max(1, stored), 4.0 if is_text else 1.0))
    size = min(size, plain, _PAGE)
    return int(size), int(size / each)


def _dictionary_beside(plain: int, values: int, each: int) -> float:
    """Bytes of a dictionary that take so many together with a number into it for each value, by as few bits as do."""
    for bits in range(33):
        left = plain - values * bits / 8
        if left <= each << bits:
            break
    return max(0.0, left)


def _usual_length(statistics: Any) -> int:
    """Bytes of a text that is neither short nor long."""
    if statistics is None or not statistics.has_min_max:
        return 12
    return max(1, (len(statistics.min_raw) + len(statistics.max_raw)) // 2)


def _decoded_bytes(column: pq.ColumnChunkMetaData, leaf: _Leaf) -> int:
    """Bytes of all values of a stored column as Arrow holds them: exact for numbers, a high guess for strings.

    Where strings are stored as numbers into a dictionary, nothing says how long all of them are together: the
    stored size is no bound. Twice the longer one of the smallest and the largest string is taken for the
    mean, at least 16 bytes, and 64 bytes where the file has no such statistics.
    """
    values = int(column.num_values)
    levels = 12 * values if leaf.nested else 0  # offsets of lists, and levels while decoding
    if leaf.width is not None:
        return values * leaf.width + values // 8 + 1 + levels
    text = int(column.total_uncompressed_size)
    if column.has_dictionary_page or "DELTA_BYTE_ARRAY" in column.encodings:
        text = max(text, values * _mean_guess(column.statistics))
    return text + 5 * values + levels


def _mean_guess(statistics: Any) -> int:
    if statistics is None or not statistics.has_min_max:
        return 64
    return max(16, 2 * max(len(statistics.min_raw), len(statistics.max_raw)))
