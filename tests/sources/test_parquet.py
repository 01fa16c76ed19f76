import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import intune
from intune._errors import SourceError
from intune.pipeline.footprint import footprint
from intune.pipeline.source import BlockSource
from intune.sources import parquet
from intune.sources._footers import FooterCache
from intune.sources.parquet import ParquetSource


def write(path: Path, *groups: pa.Table, **options: Any) -> Path:
    """One file, each table a row group."""
    with pq.ParquetWriter(path, groups[0].schema, **options) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(1, len(group)))
    return path


def ids(start: int, stop: int) -> pa.Table:
    numbers = np.arange(start, stop)
    return pa.table({"id": numbers, "odd": numbers % 2 == 1})


def groups_of(path: Path, sizes: list[int]) -> Path:
    ends = np.cumsum([0, *sizes]).tolist()
    return write(path, *(ids(start, stop) for start, stop in pairwise(ends)))


def blocks(source: ParquetSource) -> list[pa.RecordBatch]:
    found = [block for unit in range(source.unit_count()) for block in source.open(unit)]
    for block in found:
        assert isinstance(block, pa.RecordBatch)
        assert block.schema.equals(source.schema, check_metadata=True)
        assert block.num_rows > 0
        block.validate(full=True)
    return found


def column(source: ParquetSource, name: str) -> list[Any]:
    return [value for block in blocks(source) for value in block.column(name).to_pylist()]


def test_row_groups_are_units(tmp_path: Path) -> None:
    file = groups_of(tmp_path / "a.parquet", [7, 13, 1, 29])
    source = ParquetSource(file)
    assert isinstance(source, BlockSource)
    assert (source.kind, source.max_concurrency, source.unit_count()) == ("read_parquet", None, 4)
    assert source.unit_rows() == source.count_unit_rows() == [7, 13, 1, 29]
    assert source.describe(3) == f"{file}, row group 3"
    assert [block.num_rows for block in blocks(source)] == [7, 13, 1, 29]
    assert column(source, "id") == list(range(50))


@pytest.mark.parametrize("block_rows", [1, 7, 13, 29, 30, 65_536])
def test_larger_groups_are_streamed_in_blocks_of_exact_size(tmp_path: Path, block_rows: int) -> None:
    source = ParquetSource(groups_of(tmp_path / "a.parquet", [7, 13, 1, 29]), block_rows=block_rows)
    for unit, rows in enumerate([7, 13, 1, 29]):
        expected = [block_rows] * (rows // block_rows) + ([rows % block_rows] if rows % block_rows else [])
        assert [block.num_rows for block in source.open(unit)] == expected
    assert column(source, "id") == list(range(50))
    assert source.unit_rows() == [7, 13, 1, 29]


@pytest.mark.parametrize("block_rows", [999, 1000, 4096, 10_000])
@pytest.mark.parametrize("page", [1, 100_000])
def test_blocks_do_not_depend_on_pages_and_dictionaries(tmp_path: Path, block_rows: int, page: int) -> None:
    rng = np.random.default_rng(0)
    strings = [f"{value:x}" for value in rng.integers(0, 3000, 10_000)]
    table = pa.table(
        {
            "s": strings,
            "d": pa.chunked_array([pa.array(part).dictionary_encode() for part in (strings[:6000], strings[6000:])]),
            "l": [list(range(value % 5)) if value % 7 else None for value in range(10_000)],
            "n": rng.normal(size=10_000),
        }
    )  # fmt: skip
    file = tmp_path / "a.parquet"
    pq.write_table(
        table, file, row_group_size=10_000, data_page_size=page, dictionary_pagesize_limit=5000, write_batch_size=64
    )
    source = ParquetSource(file, block_rows=block_rows)
    assert source.schema.field("d").type == table.schema.field("d").type
    found = blocks(source)
    assert [block.num_rows for block in found[:-1]] == [block_rows] * (len(found) - 1)
    together = pa.Table.from_batches(found)
    for name in table.column_names:
        assert together.column(name).to_pylist() == table.column(name).to_pylist()


def test_columns_come_in_the_order_asked_for_and_others_are_not_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({f"x{index}": rng.integers(0, 2**62, 50_000) for index in range(8)})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, use_dictionary=False)
    system = CountingFiles(str(tmp_path))
    source = ParquetSource("a.parquet", columns=["x5", "x2"], filesystem=system.filesystem, block_rows=10_000)
    found = pa.Table.from_batches(blocks(source))
    assert found.equals(table.select(["x5", "x2"]))
    assert system.bytes_read < 0.35 * file.stat().st_size
    assert ParquetSource(file).schema.names == table.column_names


def test_names_with_dots_and_nested_columns(tmp_path: Path) -> None:
    table = pa.table({"a.b": [1], "a": pa.array([{"b": 2, "c": [3]}]), "b": [4], "a.c": [5]})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file)
    for columns in (["a"], ["a.b"], ["a.c", "a"], ["b", "a.b"], None):
        source = ParquetSource(file, columns=columns)
        assert pa.Table.from_batches(blocks(source)).equals(table.select(columns) if columns else table)


# Files with nothing in them, and files that are not Parquet.


def test_empty_files_and_groups_contribute_nothing_but_their_schema(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ids(0, 0))
    write(tmp_path / "b.parquet", ids(0, 3), ids(0, 0), ids(3, 6))
    write(tmp_path / "c.parquet", ids(6, 11))
    source = ParquetSource(tmp_path)
    assert source.unit_rows() == [3, 3, 5]
    assert [source.describe(unit).rsplit("/", 1)[1] for unit in range(3)] == [
        "b.parquet, row group 0", "b.parquet, row group 2", "c.parquet, row group 0"
    ]  # fmt: skip
    assert column(source, "id") == list(range(11))
    only_empty = ParquetSource(tmp_path / "a.parquet")
    assert (only_empty.unit_count(), only_empty.unit_rows(), blocks(only_empty)) == (0, [], [])
    assert only_empty.schema.names == ["id", "odd"]
    write(tmp_path / "d.parquet", pa.table({"id": pa.array([], pa.string()), "odd": pa.array([], pa.bool_())}))
    with pytest.raises(SourceError, match=r"'id' is int64 in .*a\.parquet and string in .*d\.parquet"):
        ParquetSource(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: b"id\tx\n1\t2\n" * 50,
        lambda content: content[:3],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-30] + b"\xff" * 22 + content[-8:],
    ],
    ids=["0 bytes", "cut", "text", "3 bytes", "half", "footer overwritten"],
)
def test_what_is_not_a_whole_file_is_named_with_its_size(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    for index in range(5):
        write(tmp_path / f"good{index}.parquet", ids(0, 10))
    for name in ("_SUCCESS", ".x.crc", "p.tmp"):
        (tmp_path / name).touch()
    assert ParquetSource(tmp_path).unit_count() == 5
    bad = damage((tmp_path / "good0.parquet").read_bytes())
    (tmp_path / "good2b.parquet").write_bytes(bad)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/good2b.parquet ({len(bad)} bytes): cannot be read: ")):
        ParquetSource(tmp_path)


def test_the_first_bad_file_in_order_is_named_and_no_thread_stays(tmp_path: Path) -> None:
    for index in range(50):
        (tmp_path / f"{index:02}.parquet").write_bytes(b"junk" * 10)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/00.parquet (40 bytes)")):
        ParquetSource(tmp_path)
    assert not [thread for thread in threading.enumerate() if "footers" in thread.name]


def test_a_damaged_page_is_named_with_its_row_group(tmp_path: Path) -> None:
    file = groups_of(tmp_path / "a.parquet", [5000, 5000])
    metadata = pq.read_metadata(file)
    content = bytearray(file.read_bytes())
    start = metadata.row_group(1).column(0).dictionary_page_offset or metadata.row_group(1).column(0).data_page_offset
    content[start : start + 200] = b"\xff" * 200
    file.write_bytes(content)
    source = ParquetSource(file)
    assert sum(block.num_rows for block in source.open(0)) == 5000
    with pytest.raises(SourceError, match=re.escape(f"{file}, row group 1: cannot be read: ")):
        list(source.open(1))


@pytest.mark.parametrize("change", ["vanish", "grow"])
def test_a_file_that_changes_after_it_was_listed(tmp_path: Path, change: str) -> None:
    file = groups_of(tmp_path / "a.parquet", [5])
    source = ParquetSource(file)
    if change == "vanish":
        file.unlink()
        expected = f"{file}, row group 0: cannot be read: "
    else:
        groups_of(file, [5, 5])
        expected = f"{file} has changed while it is in use"
    with pytest.raises(SourceError, match=re.escape(expected)):
        next(source.open(0))


# Schemas that differ.


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_widths_that_differ_are_joined_whatever_the_order(tmp_path: Path, order: tuple[str, str]) -> None:
    write(
        tmp_path / f"{order[0]}.parquet", pa.table({"x": pa.array([1], pa.int32()), "y": pa.array([1.5], pa.float32())})
    )
    write(tmp_path / f"{order[1]}.parquet", pa.table({"y": pa.array([0.1]), "x": pa.array([2**40], pa.int64())}))
    source = ParquetSource(tmp_path, columns=["x", "y"])
    assert source.schema == pa.schema([("x", pa.int64()), ("y", pa.float64())])
    assert sorted(column(source, "x")) == [1, 1099511627776]
    assert sorted(column(source, "y")) == [0.1, 1.5]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("other", [pa.array([3.5]), pa.array(["x"]), pa.array([True])])
def test_types_that_cannot_be_joined_are_refused_before_reading(
    tmp_path: Path, order: tuple[str, str], other: pa.Array
) -> None:
    write(tmp_path / f"{order[0]}.parquet", pa.table({"x": pa.array([1], pa.int32())}))
    write(tmp_path / f"{order[1]}.parquet", pa.table({"x": other}))
    with pytest.raises(SourceError, match="column 'x' is ") as caught:
        ParquetSource(tmp_path)
    for part in ("a.parquet", "b.parquet", "int32", str(other.type)):
        assert part in str(caught.value)
    assert ParquetSource(tmp_path / "a.parquet").unit_count() == 1


def test_missing_and_unknown_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"user": [1], "item": [2]}))
    write(tmp_path / "b.parquet", pa.table({"user": [1], "itm": [2]}))
    with pytest.raises(SourceError, match=r"b\.parquet has no column 'item' \(similar: itm\); it has itm, user"):
        ParquetSource(tmp_path, columns=["item"])
    with pytest.raises(SourceError, match=r"b\.parquet has no column 'item' \(similar: itm\) as .*a\.parquet has"):
        ParquetSource(tmp_path)
    with pytest.raises(SourceError, match=r"a\.parquet has no columns 'usr' \(.*\), 'x', 'y'; it has user, item"):
        ParquetSource(tmp_path, columns=["usr", "x", "item", "y"])
    assert column(ParquetSource(tmp_path, columns=["user"]), "user") == [1, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"block_rows": 0}, "at least 1, not 0"), ({"columns": []}, "empty"), ({"columns": "id"}, "not the string 'id'")],
)
def test_options_that_are_not_allowed(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    write(tmp_path / "a.parquet", ids(0, 1))
    with pytest.raises(SourceError, match=reason):
        ParquetSource(tmp_path, **options)


def test_pandas_metadata_does_not_make_schemas_differ(tmp_path: Path) -> None:
    table = ids(0, 3)
    write(tmp_path / "a.parquet", table.replace_schema_metadata({"pandas": "one"}))
    write(tmp_path / "b.parquet", table.replace_schema_metadata({"pandas": "two"}))
    assert ParquetSource(tmp_path).schema.metadata is None
    assert column(ParquetSource(tmp_path), "id") == [0, 1, 2] * 2


# Open files, threads, identity.


class CountingFiles:
    """Files of a folder through Python; counts what is opened and read."""

    def __init__(self, folder: str) -> None:
        self.bytes_read = 0
        self.opened: list[Any] = []
        self._local = pafs.SubTreeFileSystem(folder, pafs.LocalFileSystem())
        self.filesystem = pafs.PyFileSystem(_Handler(self, self._local))

    def file(self, path: str) -> pa.NativeFile:
        counter = self

        class File:
            closed = False

            def __init__(self) -> None:
                self._inner = counter._local.open_input_file(path)

            def read(self, size: int = -1) -> bytes:
                content: bytes = self._inner.read(None if size < 0 else size)
                counter.bytes_read += len(content)
                return content

            def seek(self, to: int, whence: int = 0) -> int:
                return int(self._inner.seek(to, whence))

            def tell(self) -> int:
                return int(self._inner.tell())

            def size(self) -> int:
                return int(self._inner.size())

            def close(self) -> None:
                self._inner.close()
                self.closed = True

        self.opened.append(File())
        return pa.PythonFile(self.opened[-1], mode="r")


class _Handler(pafs.FileSystemHandler):  # type: ignore[misc]
    def __init__(self, counter: CountingFiles, local: pafs.FileSystem) -> None:
        self._counter, self._local = counter, local

    def get_type_name(self) -> str:
        return "counting"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        return self._local.get_file_info(selector)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self._counter.file(path)

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _unused
    open_input_stream = open_output_stream = open_append_stream = _unused


def test_a_file_is_open_only_while_its_unit_is_read(tmp_path: Path) -> None:
    groups_of(tmp_path / "a.parquet", [30, 30])
    system = CountingFiles(str(tmp_path))
    source = ParquetSource("a.parquet", filesystem=system.filesystem, block_rows=10)
    assert [file.closed for file in system.opened] == [True]
    reading = source.open(0)
    assert len(system.opened) == 1
    next(reading)
    assert [file.closed for file in system.opened] == [True, False]
    reading.close()  # type: ignore[attr-defined]
    assert [file.closed for file in system.opened] == [True, True]
    assert len(list(source.open(1))) == 3
    assert all(file.closed for file in system.opened)


def test_a_footer_is_parsed_once(tmp_path: Path) -> None:
    groups_of(tmp_path / "a.parquet", [100] * 20)
    system = CountingFiles(str(tmp_path))
    source = ParquetSource("a.parquet", columns=["id"], filesystem=system.filesystem)
    footer = system.bytes_read
    assert footer >= pq.read_metadata(tmp_path / "a.parquet").serialized_size
    list(source.open(3))
    assert system.bytes_read - footer < footer / 2


def test_kept_footers_are_bounded_and_the_last_one_stays() -> None:
    class Footer:
        serialized_size = 5 << 20

    cache = FooterCache()
    footers = [Footer(), Footer(), Footer()]
    assert cache.get(0) is None
    for file, footer in enumerate(footers):
        cache.put(file, footer)
        cache.put(file, Footer())  # already there
        assert cache.get(file) is footer
        assert file == 0 or cache.get(file - 1) is None
    small = [Footer(), Footer()]
    for footer in small:
        footer.serialized_size = 1 << 20
    cache.put(7, small[0])
    cache.put(8, small[1])
    assert (cache.get(2), cache.get(7), cache.get(8)) == (footers[2], *small)
    cache.get(2)
    cache.put(9, footers[0])  # 7 and 8 were used before 2 was
    assert cache.get(7) is None
    assert cache.get(9) is footers[0]


def test_many_threads_read_the_same_file(tmp_path: Path) -> None:
    source = ParquetSource(groups_of(tmp_path / "a.parquet", [50] * 40), block_rows=20)
    found: dict[int, list[int]] = {}
    barrier = threading.Barrier(4)

    def read(first: int) -> None:
        barrier.wait(30)
        for unit in range(first, 40, 4):
            found[unit] = [value for block in source.open(unit) for value in block.column("id").to_pylist()]

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [value for unit in sorted(found) for value in found[unit]] == list(range(2000))


def test_many_small_files(tmp_path: Path) -> None:
    for index in range(103):
        write(tmp_path / f"{index:03}.parquet", ids(index, index + 1))
    source = ParquetSource(tmp_path)
    assert source.unit_rows() == [1] * 103
    assert column(source, "id") == list(range(103))


def test_identity(tmp_path: Path) -> None:
    groups_of(tmp_path / "a.parquet", [5])
    identity = ParquetSource(tmp_path).identity()
    assert identity == ParquetSource(str(tmp_path / "*.parquet"), columns=["id", "odd"]).identity()
    assert identity != ParquetSource(tmp_path, columns=["odd", "id"]).identity()
    assert identity != ParquetSource(tmp_path, block_rows=5).identity()
    groups_of(tmp_path / "b.parquet", [5])
    assert identity != ParquetSource(tmp_path).identity()


def test_a_block_that_comes_in_pieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrow cuts a batch where a column of strings outgrows 2 GiB; here the reader cuts at 4 rows.
    file = groups_of(tmp_path / "a.parquet", [10])
    source = ParquetSource(file)

    class Cutting(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, **options: Any) -> Iterator[pa.RecordBatch]:
            for batch in super().iter_batches(**options):
                yield from (batch.slice(0, 4), batch.slice(4))

    class Short(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, **options: Any) -> Iterator[pa.RecordBatch]:
            return iter(())

    for reader, reason in [(Cutting, "got 4 rows instead of 10"), (Short, "got 0 rows instead of 10")]:
        monkeypatch.setattr(parquet.pq, "ParquetFile", reader)
        with pytest.raises(SourceError, match=re.escape(f"{file}, row group 0: {reason}")) as caught:
            list(source.open(0))
        assert "lower block_rows" in str(caught.value)


# Memory.

MEASURE = """
import collections, sys, pyarrow as pa
from intune.sources.parquet import ParquetSource
source = ParquetSource(sys.argv[1], block_rows=int(sys.argv[2]), columns=sys.argv[3:] or None)
pool = pa.default_memory_pool()
before = pool.bytes_allocated()
for unit in range(source.unit_count()):
    collections.deque(source.open(unit), maxlen=0)
print(pool.max_memory() - before, max(map(source.read_bound, range(source.unit_count()))))
"""


def measured(file: Path, block_rows: int, *columns: str) -> tuple[int, int]:
    """Peak of Arrow's memory while a fresh process reads a file, and the bound that the source gave."""
    command = [sys.executable, "-c", MEASURE, str(file), str(block_rows), *columns]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    peak, bound = map(int, run.stdout.split())
    return peak, bound


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 50])
def test_memory_follows_the_block_not_the_file(tmp_path: Path, groups: int) -> None:
    rng = np.random.default_rng(0)
    rows = 1_000_000
    table = pa.table({f"x{index}": rng.integers(0, 2**45, rows) for index in range(8)})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, row_group_size=rows // groups, compression="zstd", use_dictionary=False)
    assert file.stat().st_size > 40_000_000
    peak, bound = measured(file, 65_536)
    assert peak <= 25_000_000
    assert peak <= bound <= 4 * peak
    peak, bound = measured(file, 65_536, "x1", "x6")
    assert peak <= bound <= 10_000_000


def strings(rows: int, distinct: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"c{index}": [f"{value:08x}" for value in rng.integers(0, distinct, rows)] for index in range(4)}


def lists(rows: int) -> dict[str, Any]:
    lengths = np.random.default_rng(0).integers(0, 9, rows)
    return {"l": [list(range(length)) for length in lengths], "x": lengths}


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns",
    [
        strings(100_000, 1000),
        strings(100_000, 2**32),
        lists(100_000),
        {"u": ["https://example.com/a/long/path"] * 100_000},
        {"b": [True, None] * 50_000, "f": np.arange(100_000, dtype=np.float32)},
    ],
    ids=["few strings", "many strings", "lists", "one string", "narrow"],
)
@pytest.mark.parametrize("block_rows", [10_000, 100_000])
def test_the_bound_holds_what_reading_takes(tmp_path: Path, columns: dict[str, Any], block_rows: int) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=100_000)
    peak, bound = measured(file, block_rows)
    assert peak <= bound <= 8 * peak + 4_000_000


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("pages", ["usual", "large"])
@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("block_rows", [65_536, 1_000_000])
def test_the_bound_of_large_groups_is_near_to_what_reading_takes(
    tmp_path: Path, compression: str, pages: str, dictionary: bool, block_rows: int
) -> None:
    """Numbers, few and many of them distinct, some missing, and texts that are all different."""
    rng, rows = np.random.default_rng(0), 300_000
    columns: dict[str, Any] = {f"i{index}": rng.integers(0, 2**40, rows) for index in range(4)}
    columns |= {f"s{index}": rng.integers(0, 100, rows) for index in range(4)}
    columns["f"] = pa.array(rng.random(rows), mask=rng.random(rows) < 0.2)
    columns["t"] = [f"{value:032x}" for value in rng.integers(0, 2**62, rows)]
    file = tmp_path / "a.parquet"
    most = 10**8 if pages == "large" else None
    pq.write_table(
        pa.table(columns),
        file,
        row_group_size=rows,
        compression=compression,
        use_dictionary=dictionary,
        max_rows_per_page=most,
    )
    peak, bound = measured(file, block_rows)
    assert peak <= bound <= 1.75 * peak


@pytest.mark.parametrize("block_rows", [10_000, 4000])
def test_nothing_of_a_row_group_is_held_any_more_with_its_last_block(tmp_path: Path, block_rows: int) -> None:
    """Neither its pages, which take more than a block, nor the file."""
    rng = np.random.default_rng(0)
    file = tmp_path / "a.parquet"
    columns = {f"x{index}": rng.integers(0, 2**40, 10_000) for index in range(20)}
    pq.write_table(pa.table(columns), file)
    source = ParquetSource(file, block_rows=block_rows)
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    opened = source.open(0)
    while True:
        block = next(opened)
        held = pool.bytes_allocated() - before
        is_open = any(os.path.realpath(f"/proc/self/fd/{fd}") == str(file) for fd in os.listdir("/proc/self/fd"))
        if np.array_equal(block["x3"], columns["x3"][10_000 - len(block) :]):
            break
        assert is_open
        assert held > 1.5 * block.nbytes
    assert not is_open
    assert held <= 1.05 * block.get_total_buffer_size()
    assert next(opened, None) is None


def measured_kept(source: ParquetSource) -> int:
    """Arrow's memory between two blocks, less the block."""
    pool = pa.default_memory_pool()
    gc.collect()
    before = pool.bytes_allocated()
    opened = source.open(0)
    found = []
    for _ in range(2):
        block = next(opened)
        found.append(pool.bytes_allocated() - before - sum(footprint(block).values()))
    return max(found)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("number", {"use_dictionary": False}),
        ("number", {}),
        ("few", {}),
        ("text", {}),
        ("text", {"use_dictionary": False}),
        ("text", {"compression": "zstd"}),
    ],
)
def test_what_an_open_row_group_keeps_is_foreseen(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    rng, rows = np.random.default_rng(0), 200_000
    made = {"number": rng.random(rows, np.float32), "few": rng.integers(0, 1000, rows)}
    values = [f"text {number:08d}" for number in rng.integers(0, 30_000, rows)] if kind == "text" else made[kind]
    table = pa.table(dict.fromkeys("abcdef", pa.array(values)))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, **options)
    source = ParquetSource(tmp_path / "a.parquet")
    kept = measured_kept(source)
    assert kept > 500_000
    assert 0.9 * kept <= source.kept_bytes(0) <= 2 * kept
    assert source.kept_bytes(0) < source.read_bound(0)
    assert ParquetSource(tmp_path / "a.parquet", columns=["c"]).kept_bytes(0) == source.kept_bytes(0) // 6
    assert ParquetSource(tmp_path / "a.parquet", block_rows=rows).kept_bytes(0) == 0


# Real files.


@pytest.mark.parametrize("block_rows", [1, 2, 65_536])
def test_nested_files(shared_data: Path, block_rows: int) -> None:
    for file in sorted((shared_data / "parquet_testing").glob("*.parquet")):
        source = ParquetSource(file, block_rows=block_rows)
        assert pa.Table.from_batches(blocks(source)).equals(pq.read_table(file, partitioning=None)), file.name
        assert all(source.read_bound(unit) > 0 for unit in range(source.unit_count()))


def test_a_real_log_with_lists(shared_data: Path) -> None:
    file = shared_data / "open_bandit" / "obd_60k_nested.parquet"
    source = ParquetSource(file, columns=["aff_items", "label"], block_rows=4096)
    assert sum(source.unit_rows()) == 60_000
    assert source.unit_count() == 6
    assert pa.Table.from_batches(blocks(source)).equals(pq.read_table(file, columns=["aff_items", "label"]))


def test_an_fsspec_filesystem(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/here/a.parquet", groups_of(tmp_path / "a.parquet", [5, 5]).read_bytes())
    try:
        source = ParquetSource("/here/*.parquet", filesystem=memory, block_rows=3)
        assert column(source, "id") == list(range(10))
    finally:
        memory.store.clear()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_one_pipeline_of_two_stores(tmp_path: Path, executor: Literal["thread", "process"]) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/here/day=2/a.parquet", groups_of(tmp_path / "a.parquet", [5, 5]).read_bytes())
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "day=1" / "a.parquet", ids(10, 30))
    try:
        paths = [(memory, "/here/**/*.parquet"), (tmp_path / "day=1").as_uri()]
        with intune.read_parquet(paths).map(_as_it_is, executor=executor).batch(7).loader(cpus=2) as loader:
            found = [row for batch in loader for row in batch.to_pylist()]
        assert [(row["id"], row["day"]) for row in found] == [(n, 2 if n < 10 else 1) for n in range(30)]
        memory.pipe("/here/day=2/a.parquet", b"no")
        with pytest.raises(SourceError, match=r"^py::fsspec\+memory:/here/day=2/a.parquet \(2 bytes\): cannot be read"):
            intune.read_parquet(paths)
    finally:
        memory.store.clear()


TEXTS = ["a", None, "bb", "a", "", "bb", "ccc"] * 9


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
@pytest.mark.parametrize("block_rows", [5, 65_536])
def test_dictionary_columns_have_the_same_values(tmp_path: Path, kind: pa.DataType, block_rows: int) -> None:
    values = pa.array(TEXTS).cast(kind)
    file = write(tmp_path / "a.parquet", pa.table({"text": values, "plain": values, "id": range(len(TEXTS))}))
    source = ParquetSource(file, dictionary_columns=["text"], block_rows=block_rows)
    assert source.schema.field("text").type == pa.dictionary(pa.int32(), kind)
    assert source.schema.field("plain").type == kind
    assert column(source, "text") == column(source, "plain") == values.to_pylist()


def test_dictionary_columns_of_files_that_differ(tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS})
    write(tmp_path / "a.parquet", table)
    write(tmp_path / "b.parquet", table, use_dictionary=False)
    source = ParquetSource(tmp_path, dictionary_columns=["text"])
    assert pa.types.is_dictionary(source.schema.field("text").type)
    assert column(source, "text") == TEXTS * 2
    write(tmp_path / "c.parquet", pa.table({"text": pa.array(TEXTS).dictionary_encode()}))
    assert column(ParquetSource(tmp_path / "c.parquet", dictionary_columns=["text"]), "text") == TEXTS


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["id"], "dictionary columns must be strings or bytes, but 'id' is int64"),
        (["nope"], "dictionary column 'nope' is not read; the columns are ['id', 'odd']"),
    ],
)
def test_dictionary_columns_that_cannot_be(tmp_path: Path, names: list[str], message: str) -> None:
    file = groups_of(tmp_path / "a.parquet", [3])
    with pytest.raises(SourceError, match=re.escape(message)):
        ParquetSource(file, dictionary_columns=names)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_dictionary_columns_are_shuffled_and_batched(tmp_path: Path, executor: Literal["thread", "process"]) -> None:
    for part in range(3):  # other dictionaries in other files
        values = [f"{part}-{i % 7}" for i in range(40)]
        write(tmp_path / f"{part}.parquet", pa.table({"text": values, "id": range(part * 40, part * 40 + 40)}))
    pipe = intune.read_parquet(tmp_path, dictionary_columns=["text"]).map(_as_it_is, executor=executor)
    with pipe.shuffle(rows=100, seed=1).batch(16).loader(cpus=2) as loader:
        rows = [row for batch in loader for row in batch.to_pylist()]
    assert sorted((row["id"], row["text"]) for row in rows) == [(i, f"{i // 40}-{i % 40 % 7}") for i in range(120)]


def _as_it_is(block: pa.RecordBatch) -> pa.RecordBatch:
    return block
