"""Compressed text: every member, every row, and an error with its place where something is missing."""

import gzip
import re
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import intune
from intune._errors import SourceError
from intune.sources.text import TextSource

AB = pa.schema([("a", pa.string()), ("b", pa.int32())])
LINES = [f"row {index}\t{index * 7919 % 100_003}" for index in range(5_000)]
ROWS = [(line.split("\t")[0], int(line.split("\t")[1])) for line in LINES]


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data))


PACK = pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
Pack = Callable[[bytes], bytes]


def rows(source: TextSource) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for unit in range(source.unit_count()):
        for block in source.open(unit):
            assert block.schema.equals(source.schema)
            assert block.num_rows > 0
            found.extend(zip(*(column.to_pylist() for column in block.columns), strict=True))
    return found


def until_failure(source: TextSource) -> tuple[list[tuple[Any, ...]], str]:
    """Rows that were given before the error, and its message."""
    found: list[tuple[Any, ...]] = []
    with pytest.raises(SourceError) as caught:  # noqa: PT012
        for block in source.open(0):
            found.extend(zip(*(column.to_pylist() for column in block.columns), strict=True))
    return found, str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "day_0.tsv"


@PACK
@pytest.mark.parametrize("unit_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("ended", ["\n", ""])
def test_a_compressed_file_is_one_unit_of_consecutive_blocks(
    file: Path, pack: Pack, unit_bytes: int, ended: str
) -> None:
    lines = LINES[:60] if unit_bytes == 1 else LINES
    text = ("\r\n".join(lines) + ended).encode()
    file.write_bytes(pack(text))  # nothing but the content says that it is compressed
    source = TextSource(file, schema=AB, unit_bytes=unit_bytes)
    assert rows(source) == ROWS[: len(lines)]
    assert (source.unit_count(), source.unit_rows(), source.count_unit_rows()) == (1, None, [len(lines)])
    sizes = [block.num_rows for block in source.open(0)]
    assert len(sizes) >= len(text) // (unit_bytes + 20)
    assert sizes == [block.num_rows for block in source.open(0)]
    assert source.describe(0) == f"{file}, bytes 0 to {file.stat().st_size}"


@PACK
@pytest.mark.parametrize("borders", [[40_000], [7, 8, 9], [20, 20, 20, 60_000], [0, 0, 70_000, 70_001]])
def test_all_members_are_read_wherever_they_meet(file: Path, pack: Pack, borders: list[int]) -> None:
    text = "\n".join(LINES).encode()
    assert borders[-1] < len(text)
    file.write_bytes(b"".join(pack(text[start:stop]) for start, stop in pairwise([0, *borders, len(text)])))
    source = TextSource(file, schema=AB, unit_bytes=10_000)
    assert rows(source) == ROWS
    assert source.count_unit_rows() == [len(ROWS)]


def test_plain_and_compressed_files_side_by_side(tmp_path: Path) -> None:
    parts = ["\n".join(LINES[start : start + 100]).encode() for start in range(0, 400, 100)]
    for name, data in zip("abcd", [parts[0], gzip.compress(parts[1]), parts[2], zstd(parts[3])], strict=True):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "e").touch()
    source = TextSource(tmp_path, schema=AB, unit_bytes=500)
    assert rows(source) == ROWS[:400]
    counts = source.count_unit_rows()
    assert counts == [sum(block.num_rows for block in source.open(unit)) for unit in range(source.unit_count())]
    assert counts.count(100) == 2
    assert all(source.read_bound(unit) > 500 for unit in range(source.unit_count()))


@PACK
def test_a_member_without_content(file: Path, pack: Pack) -> None:
    file.write_bytes(pack(b""))
    source = TextSource(file, schema=AB)
    assert (source.unit_count(), rows(source), source.count_unit_rows()) == (1, [], [0])
    source = TextSource(file, schema=AB, header=True)
    for read in (lambda: rows(source), source.count_unit_rows):
        with pytest.raises(SourceError, match=re.escape(f"{file} has no text in it ({file.stat().st_size} bytes)")):
            read()
    file.write_bytes(pack(b"x\t1\n") + pack(b"") + pack(b"y\t2"))
    assert rows(TextSource(file, schema=AB)) == [("x", 1), ("y", 2)]
    file.write_bytes(b"\x57\x2a\x4d\x18\x03\0\0\0any" + zstd(b"x\t1\n"))  # a frame that is to be skipped
    assert rows(TextSource(file, schema=AB)) == [("x", 1)]


@PACK
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("unit_bytes", [1, 64, 1 << 20])
def test_header_mark_and_line_numbers(file: Path, pack: Pack, mark: bytes, unit_bytes: int) -> None:
    lines = ["a\tb", *LINES[:50], "", "x\t12.5", "y\t1"]
    file.write_bytes(pack(mark + "\n".join(lines).encode()))
    source = TextSource(file, schema=AB, header=True, unit_bytes=unit_bytes)
    found, message = until_failure(source)
    assert message == f"{file}:53: column 'b': '12.5' is not a valid int32"
    assert found == ROWS[: len(found)]
    assert source.count_unit_rows() == [52]
    other = TextSource(file, schema=pa.schema([("a", pa.string()), ("c", pa.int32())]), header=True)
    for read in (lambda: list(other.open(0)), other.count_unit_rows):
        with pytest.raises(SourceError, match=r"day_0\.tsv:1: the header has the names \['a', 'b'\]"):
            read()


@PACK
def test_hex_columns(file: Path, pack: Pack) -> None:
    file.write_bytes(pack(b"\t80e26c9b\nx\tFF\ny\t\n"))
    schema = pa.schema([("a", pa.string()), ("b", pa.int64())])
    source = TextSource(file, schema=schema, hex_columns=["b"], unit_bytes=4)
    assert rows(source) == [(None, 2162322587), ("x", 255), ("y", None)]
    file.write_bytes(pack(b"x\t1\ny\tg\n"))
    source = TextSource(file, schema=schema, hex_columns=["b"])
    assert until_failure(source)[1].startswith(f"{file}:2: column 'b': 'g' is not a hexadecimal number")


# What is missing, damaged, or something else.


@PACK
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("where", ["half", "trailer", "last byte", "header"])
def test_a_file_cut_short_gives_whole_rows_and_then_an_error(file: Path, pack: Pack, members: int, where: str) -> None:
    step = -(-len(LINES) // members)
    packed = [pack(("\n".join(LINES[start : start + step]) + "\n").encode()) for start in range(0, len(LINES), step)]
    last = {"half": len(packed[-1]) // 2, "trailer": len(packed[-1]) - 6, "last byte": len(packed[-1]) - 1, "header": 5}
    data = b"".join(packed[:-1]) + packed[-1][: last[where]]
    file.write_bytes(data)
    source = TextSource(file, schema=AB, unit_bytes=1000)
    found, message = until_failure(source)
    assert found == ROWS[: len(found)]
    assert len(found) < len(ROWS)
    assert message == (
        f"{file}: cannot be read up to byte {len(data):,} of {len(data):,}, after {len(found):,} whole lines: "
        "Truncated compressed stream"
    )
    with pytest.raises(SourceError, match="Truncated"):
        source.count_unit_rows()


@PACK
@pytest.mark.parametrize("tail", [b"\0", b"\0" * 600, b"some text\t1\n", b"\x1f\x8b", b"\x28\xb5\x2f"])
def test_what_follows_the_last_member_is_an_error(file: Path, pack: Pack, tail: bytes) -> None:
    file.write_bytes(pack(b"x\t1\n") + tail)
    source = TextSource(file, schema=AB)
    assert re.search(r"day_0\.tsv: cannot be read up to byte \d+ of \d+, after 0 whole lines", until_failure(source)[1])


@pytest.mark.parametrize(("pack", "at"), [(gzip.compress, 0.5), (gzip.compress, -5), (gzip.compress, -1), (zstd, 4)])
def test_a_damaged_byte_is_an_error(file: Path, pack: Pack, at: float) -> None:
    data = bytearray(pack("\n".join(LINES).encode()))
    data[int(at * len(data)) if isinstance(at, float) else at] ^= 0xD5
    file.write_bytes(data)
    assert "cannot be read up to byte" in until_failure(TextSource(file, schema=AB, unit_bytes=1000))[1]


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.zst", "A.GZ"])
@pytest.mark.parametrize("content", [b"", b"\x1f", b"\x1f\x8b\x00\x00", b"x\t1\n", b"\x28\xb5\x2f"])
def test_a_name_that_promises_what_the_content_is_not(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{re.escape(name)}, byte 0: its name says (gzip|zstd), but the file"):
        TextSource(tmp_path, schema=AB)


def test_content_outranks_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(zstd(b"x\t1\n"))
    assert rows(TextSource(tmp_path, schema=AB)) == [("x", 1)]


@pytest.mark.parametrize(("name", "content"), [("day.bz2", b"BZh9"), ("day.xz", b""), ("day_0", b"\xfd7zXZ\0")])
def test_other_compressions_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{re.escape(name)}: compressed in a way that is not supported; use gzip"):
        TextSource(tmp_path, schema=AB)


def test_a_line_without_end_is_not_read_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune.sources._streams.LONGEST_LINE", 1 << 16)
    file.write_bytes(zstd(b"x\t1\n" + b"0" * (64 << 20)))
    assert "no line end in" in until_failure(TextSource(file, schema=AB, unit_bytes=1000))[1]


@PACK
def test_memory_follows_the_block_and_not_the_file(file: Path, pack: Pack) -> None:
    peaks = []
    for repeats in (4, 32):
        file.write_bytes(pack(("\n".join(LINES) + "\n").encode() * repeats))
        source = TextSource(file, schema=AB, unit_bytes=50_000)
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        most = 0
        for _ in source.open(0):
            most = max(most, pa.total_allocated_bytes() - before)
        peaks.append(most + tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert peaks[-1] <= source.read_bound(0)
    assert peaks[1] < 1.5 * peaks[0]


@PACK
def test_through_a_pipeline_every_row_comes_once_and_resumes(file: Path, pack: Pack) -> None:
    file.write_bytes(pack("\n".join(LINES).encode()))

    def loader() -> intune.Loader:
        return intune.read_tsv(file, schema=AB, unit_bytes=5_000).batch(128).loader(memory="4GiB")

    with loader() as whole:
        batches = [batch.to_pydict() for batch in whole]
    assert [row for batch in batches for row in zip(batch["a"], batch["b"], strict=True)] == ROWS
    with loader() as first:
        stream = iter(first)
        begun = [next(stream).to_pydict() for _ in range(11)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert begun + [batch.to_pydict() for batch in second] == batches


@PACK
@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_of_a_file_cut_short_the_rows_before_come_and_the_rest_is_an_error_or_left_out(
    tmp_path: Path, pack: Pack, mode: Any
) -> None:
    data = pack("\n".join(LINES).encode())
    (tmp_path / "a").write_bytes(data[: len(data) // 2])
    (tmp_path / "b").write_text("x\t1\ny\t2\n")
    names: list[str] = []
    pipeline = intune.read_tsv(tmp_path, schema=AB, unit_bytes=2_000).batch(100)
    with pipeline.loader(memory="4GiB", on_error=mode) as loader:
        try:
            for batch in loader:
                names += batch.column("a").to_pylist()
            assert mode == "skip"
            assert names[-2:] == ["x", "y"]
            (message,) = loader.stats().skipped
            whole = len(names) - 2
        except SourceError as error:
            assert mode == "raise"
            message = str(error)
            whole = len(names)
    assert "Truncated compressed stream" in message
    assert names[:whole] == [name for name, _ in ROWS[:whole]]
    found = re.search(r"after ([\d,]+) whole lines", message)
    assert found
    told = int(found[1].replace(",", ""))
    assert whole == told if mode == "skip" else told - 100 < whole <= told


@PACK
def test_two_ranks_share_the_rows_of_one_file(file: Path, pack: Pack) -> None:
    file.write_bytes(pack("\n".join(LINES).encode()))
    shares = []
    for rank in range(2):
        pipeline = intune.read_tsv(file, schema=AB, unit_bytes=5_000).batch(100)
        with pipeline.loader(memory="4GiB", rank=rank, world_size=2) as loader:
            shares.append([value for batch in loader for value in batch.column("a").to_pylist()])
    assert [len(share) for share in shares] == [2_500, 2_500]
    assert set(shares[0]) | set(shares[1]) == {name for name, _ in ROWS}


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 80), st.sampled_from([gzip.compress, zstd]))
def test_any_cut_into_members_any_block(tmp_path: Path, data: st.DataObject, unit_bytes: int, pack: Pack) -> None:
    text = ("\r\n".join(LINES[:20]) + data.draw(st.sampled_from(["", "\n", "\r\n\r\n"]))).encode()
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    file = tmp_path / "any"
    file.write_bytes(b"".join(pack(text[start:stop]) for start, stop in pairwise([0, *borders, len(text)])))
    source = TextSource(file, schema=AB, unit_bytes=unit_bytes)
    assert rows(source) == ROWS[:20]
    assert source.count_unit_rows() == [20]
