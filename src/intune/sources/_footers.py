"""What the footers of Parquet files say: schema, row groups, rows, and what reading them takes in memory."""

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
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


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
    files: FileSet, columns: Sequence[str] | None, block_rows: int, cache: FooterCache, retries: Retries
) -> Iterator[Footer]:
    """Read each footer once, in the order of the files, with a few threads that end with this call.

    Raises:
        SourceError: For the first file in order that is not a whole Parquet file; with its path and size.
    """
    scan = partial(_read_task, files, columns, block_rows, cache, retries)
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
                leaves = _leaves(metadata, columns)
            groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
            footers.append(
                Footer(
                    schema,
                    tuple(
                        Group(
                            index,
                            group.num_rows,
                            _bytes_needed(group, leaves, block_rows),
                            _bytes_kept(group, leaves) if group.num_rows > block_rows else 0,
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
    """A stored column: its number, bytes of a decoded value (None: strings), whether it lies in a list or struct.

    `optional`: whether values may be missing.
    """

    index: int
    width: int | None
    nested: bool
    optional: bool


def _leaves(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> list[_Leaf]:
    leaves = []
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        wanted = columns is None or any(column.path == name or column.path.startswith(f"{name}.") for name in columns)
        if wanted:
            width = _WIDTHS.get(column.physical_type)
            if column.physical_type == "FIXED_LEN_BYTE_ARRAY" or column.logical_type.type == "DECIMAL":
                width = max(column.length, 16)
            leaves.append(_Leaf(index, width, "." in column.path, column.max_definition_level > 0))
    return leaves


def _bytes_needed(group: pq.RowGroupMetaData, leaves: list[_Leaf], block_rows: int) -> int:
    """Blocks and buffers of reading one block.

    A group larger than a block is streamed: one block is decoded while the last one is still held, from
    `READ_AHEAD` stored bytes, a page and a dictionary of each column. A smaller group is read whole. Of each
    column a page and a dictionary are held decompressed, the dictionary decoded too, and a number for each value that
    may be missing. Values are put together one column at a time, in memory that grows to up to twice of what they take.
    """
    streamed = group.num_rows > block_rows
    share = min(1.0, block_rows / group.num_rows)
    rows = min(group.num_rows, block_rows)
    needed = largest = 0.0
    for leaf in leaves:
        column = group.column(leaf.index)
        stored = column.total_compressed_size
        plain = column.total_uncompressed_size
        # Lists may be longer in one block than in another.
        decoded = _decoded_bytes(column, leaf) * (min(1.0, 4 * share) if leaf.nested else share)
        if not leaf.nested:  # of lists, and of texts in a dictionary, the guess is high enough
            largest = max(largest, min(decoded, plain * share) if leaf.width is None else decoded)
        needed += decoded * (2 if streamed else 1) + (min(stored, READ_AHEAD) if streamed else stored)
        needed += min(plain, _PAGE)
        if column.has_dictionary_page:  # decoded, each text in it takes 16 bytes more
            needed += min(plain, 2 * _PAGE) * (2 if leaf.width is None else 1)
        if leaf.optional and not leaf.nested:
            needed += 2 << rows.bit_length()
    return int(needed + largest)


def _bytes_kept(group: pq.RowGroupMetaData, leaves: list[_Leaf]) -> int:
    """What a streamed group keeps between two blocks, beside the last one.

    Of each column what was read ahead, a page and the dictionary, of texts decoded too. The footer says how large the
    dictionary is as stored; texts may be a quarter of their size there.
    """
    kept = 0.0
    for leaf in leaves:
        column = group.column(leaf.index)
        stored, plain = column.total_compressed_size, column.total_uncompressed_size
        kept += min(stored, READ_AHEAD) + min(plain, _PAGE)
        if column.has_dictionary_page:
            begin, end = column.dictionary_page_offset, column.data_page_offset
            packed = max(plain / max(1, stored), 4.0 if leaf.width is None else 1.0)
            known = (end - begin) * packed if begin is not None and begin < end else plain
            kept += min(known, plain, 2 * _PAGE) * (2 if leaf.width is None else 1)
    return int(kept)


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
