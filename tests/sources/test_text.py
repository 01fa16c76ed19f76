import gzip
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from intune._errors import SourceError
from intune.pipeline.source import BlockSource
from intune.sources.text import TextSource

NAMES = ["label", *(f"i{index}" for index in range(1, 14)), *(f"c{index}" for index in range(1, 27))]
CRITEO = pa.schema([(name, pa.int64()) for name in NAMES])
HEX = NAMES[14:]
LONE_RETURN = "a carriage return that no line feed follows; lines end with LF or CRLF"
AB = pa.schema([("a", pa.string()), ("b", pa.int32())])


def rows(source: TextSource) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for unit in range(source.unit_count()):
        for block in source.open(unit):
            assert isinstance(block, pa.RecordBatch)
            assert block.schema.equals(source.schema, check_metadata=True)
            assert block.num_rows > 0
            block.validate(full=True)
            found.extend(zip(*(column.to_pylist() for column in block.columns), strict=True))
    return found


def failure(source: TextSource) -> str:
    with pytest.raises(SourceError) as caught:
        rows(source)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.tsv"


def test_is_a_block_source(file: Path) -> None:
    file.write_bytes(b"x\t1\n")
    source = TextSource(file, schema=AB)
    assert isinstance(source, BlockSource)
    assert (source.kind, source.max_concurrency, source.unit_rows()) == ("read_tsv", None, None)
    assert source.describe(0) == f"{file}, bytes 0 to 4"
    for unit in (-1, 1):
        with pytest.raises(IndexError, match=str(unit)):
            source.describe(unit)


# Hand-made rows of 40 fields.

FULL = "1\t" + "\t".join(str(index) for index in range(13)) + "\t" + "\t".join(["80e26c9b"] * 26)
FULL_ROW = (1, *range(13), *[2162322587] * 26)
ALL_EMPTY = "0" + "\t" * 39
LAST_EMPTY = FULL.rsplit("\t", 1)[0] + "\t"
NOTHING = "\t" * 39
LINES = [FULL, ALL_EMPTY, LAST_EMPTY, NOTHING, FULL, LAST_EMPTY]
EXPECTED = [
    FULL_ROW, (0, *[None] * 39), (*FULL_ROW[:-1], None), (None,) * 40, FULL_ROW, (*FULL_ROW[:-1], None)
]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["end", "no end", "empty line", "two empty lines"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("unit_bytes", [37, 1 << 20])
def test_missing_fields_line_ends_and_mark(file: Path, end: str, tail: str, mark: bytes, unit_bytes: int) -> None:
    text = end.join(LINES) + {"end": end, "no end": "", "empty line": end * 2, "two empty lines": end * 3}[tail]
    file.write_bytes(mark + text.encode())
    source = TextSource(file, schema=CRITEO, hex_columns=HEX, unit_bytes=unit_bytes)
    assert rows(source) == EXPECTED
    assert sum(source.count_unit_rows()) == len(EXPECTED)


def test_without_hex_columns_the_strings_come_verbatim(file: Path) -> None:
    schema = pa.schema([(name, pa.int32() if name not in HEX else pa.string()) for name in NAMES])
    file.write_text("\r\n".join(LINES), newline="")
    assert rows(TextSource(file, schema=schema))[2] == (*FULL_ROW[:14], *["80e26c9b"] * 25, None)


@pytest.mark.parametrize("unit_bytes", [50, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("bad", "found"), [(FULL.rsplit("\t", 1)[0], 39), (FULL + "\t", 41), ("x", 1), (NOTHING + "\t", 41)]
)
def test_a_wrong_number_of_fields(file: Path, bad: str, found: int, end: str, unit_bytes: int) -> None:
    file.write_text(end.join([*LINES, "", bad, FULL]), newline="")
    source = TextSource(file, schema=CRITEO, hex_columns=HEX, unit_bytes=unit_bytes)
    assert failure(source) == f"{file}:8: found {found} fields, expected 40"


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_bad_value_has_line_column_and_value(file: Path, unit_bytes: int, mark: bytes) -> None:
    lines = [f"s{index}\t{index}" for index in range(90)]
    lines[70] = "s\t12.5"
    lines[80] = "s\tx"
    file.write_bytes(mark + "\n".join(lines).encode())
    source = TextSource(file, schema=AB, unit_bytes=unit_bytes)
    assert failure(source) == f"{file}:71: column 'b': '12.5' is not a valid int32"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x\t3000000000", "column 'b': '3000000000' is not a valid int32"),
        (b"\xff\t1", "column 'a': '\\\\xff' is not a valid string"),
        (b"x\t" + b"9" * 200, "column 'b': '" + "9" * 80 + "...' is not a valid int32"),
        (b"x\r\t1", LONE_RETURN),
        (b"\rx\t1", LONE_RETURN),
        (b"x\t1\r\r", LONE_RETURN),
    ],
)
def test_other_bad_lines(file: Path, line: bytes, reason: str) -> None:
    file.write_bytes(b"a\t1\r\n\r\n" + line + b"\r\nb\t2\r\n")
    assert failure(TextSource(file, schema=AB)) == f"{file}:3: {reason}"


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.duration("s"), pa.dictionary(pa.int32(), pa.int64())])
@pytest.mark.parametrize("bad", ["0x10", "0X1f", " 0x1 "])
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_a_prefix_makes_no_number(file: Path, kind: pa.DataType, bad: str, unit_bytes: int) -> None:
    schema = pa.schema([("a", pa.string()), ("b", kind)])
    file.write_text("\n".join([*["0x10\t16", "", "x\t"] * 10, f"x\t{bad}", "y\t0x2"]))
    source = TextSource(file, schema=schema, unit_bytes=unit_bytes)
    assert failure(source) == f"{file}:31: column 'b': {bad!r} is not a valid {kind}"
    file.write_text("0x10\t16\nx\t010\n")  # of text it is a part, and leading zeros are what they look like
    assert rows(TextSource(file, schema=pa.schema([("a", pa.string()), ("b", pa.int8())]), unit_bytes=unit_bytes)) == [
        ("0x10", 16),
        ("x", 10),
    ]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_prefix_is_seen_wherever_the_text_is_scanned_in_parts(file: Path, at: int) -> None:
    file.write_bytes(b"y" * ((1 << 18) - at) + b"\t1\nz\t0x1\n")
    assert failure(TextSource(file, schema=AB)) == f"{file}:2: column 'b': '0x1' is not a valid int32"
    file.write_bytes(b"y" * ((1 << 18) - at) + b"\n0x1\n")
    assert failure(TextSource(file, schema=pa.schema([("n", pa.int32())]))).startswith(f"{file}:1: column 'n'")


@pytest.mark.parametrize("bad", ["12345678g", "zz", "0x1"])
@pytest.mark.parametrize("unit_bytes", [1, 100, 1 << 20])
def test_bad_hexadecimal(file: Path, bad: str, unit_bytes: int) -> None:
    schema = pa.schema([("n", pa.int64()), ("h", pa.int64())])
    file.write_text("\n".join([*["1\tff", "", "2\t"] * 10, f"3\t{bad}", "4\tzz"]))
    source = TextSource(file, schema=schema, hex_columns=["h"], unit_bytes=unit_bytes)
    message = f"{file}:31: column 'h': '{bad}' is not a hexadecimal number of 1 to 8 digits"
    assert failure(source) == message


def test_hexadecimal_of_any_length(file: Path) -> None:
    values = ["00000000", "7fffffff", "80000000", "80e26c9b", "FFFFFFFF", "", "a", "0B"]
    file.write_text("".join(f"{value}\tx\n" for value in values))
    source = TextSource(file, schema=pa.schema([("h", pa.int64()), ("s", pa.string())]), hex_columns=["h"])
    expected = [0, 2147483647, 2147483648, 2162322587, 4294967295, None, 10, 11]
    assert [row[0] for row in rows(source)] == expected


@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_a_column_that_may_not_be_null(file: Path, unit_bytes: int) -> None:
    schema = pa.schema([pa.field("a", pa.string()), pa.field("b", pa.int32(), nullable=False)])
    file.write_text("\t1\n\nx\t2\n\t\n\t\n")
    message = failure(TextSource(file, schema=schema, unit_bytes=unit_bytes))
    assert message == f"{file}:4: column 'b' is empty, and the schema says not null"


def test_the_declared_type_holds_where_a_guess_would_fail(file: Path) -> None:
    file.write_text("x\t\n" * 2000 + "x\t7\n")
    assert [row[1] for row in rows(TextSource(file, schema=AB, unit_bytes=1000))] == [None] * 2000 + [7]


def test_values_are_verbatim(file: Path) -> None:
    values = ['"quoted"', 'half "', "back\\slash", "NULL", "nan", " space ", "\ufeff", "#", "é", "\x00", "'", ","]
    file.write_text("".join(f"{value}\t1\n" for value in values), newline="")
    for unit_bytes in (1, 5, 1000):
        source = TextSource(file, schema=AB, unit_bytes=unit_bytes)
        # A mark is part of the value everywhere but at the start of the file.
        assert [row[0] for row in rows(source)] == values


def test_a_mark_at_the_start_of_a_range_or_block_is_a_value(file: Path) -> None:
    lines = ["\ufeff\t1", "\ufeffx\t2", "\ufeff\ufeff\t3"]
    file.write_text("\n".join(["\ufeff\ufeff\t0", *lines]))
    for unit_bytes in range(1, 30):
        values = [row[0] for row in rows(TextSource(file, schema=AB, unit_bytes=unit_bytes))]
        assert values == ["\ufeff", "\ufeff", "\ufeffx", "\ufeff\ufeff"]


def test_another_null_and_delimiter(file: Path) -> None:
    file.write_text("\\N|1\n|2\nx|\\N\n")
    assert rows(TextSource(file, schema=AB, delimiter="|", null="\\N")) == [(None, 1), ("", 2), ("x", None)]
    file.write_text("x|1\nx|\n")
    source = TextSource(file, schema=AB, delimiter="|", null="\\N")
    assert failure(source) == f"{file}:2: column 'b': '' is not a valid int32"


def test_one_column_has_rows_that_are_empty_lines(file: Path) -> None:
    for schema, text, expected in [
        (pa.schema([("a", pa.string())]), "x\n\n\ny", ["x", None, None, "y"]),
        (pa.schema([("a", pa.int64())]), "\n1\r\n\r\n2\n\n", [None, 1, None, 2, None]),
        (pa.schema([("a", pa.int64())]), "", []),
    ]:
        file.write_text(text, newline="")
        for unit_bytes in (1, 2, 100):
            source = TextSource(file, schema=schema, unit_bytes=unit_bytes)
            assert [row[0] for row in rows(source)] == expected
            assert sum(source.count_unit_rows()) == len(expected)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("unit_bytes", [1, 3, 100])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_header(tmp_path: Path, end: str, unit_bytes: int, mark: str) -> None:
    for name, lines in [("1.tsv", ["a\tb", "x\t1", "y\t2"]), ("2.tsv", ["a\tb"]), ("3.tsv", ["a\tb", "z\t3"])]:
        (tmp_path / name).write_text(mark + end.join(lines), newline="")
    source = TextSource(tmp_path, schema=AB, header=True, unit_bytes=unit_bytes)
    assert rows(source) == [("x", 1), ("y", 2), ("z", 3)]
    assert sum(source.count_unit_rows()) == 3


@pytest.mark.parametrize("header", ["a\tc", "b\ta", "a", "a\tb\tc", "x\t1", " a\tb", ""])
def test_another_header_is_an_error_that_shows_both(tmp_path: Path, header: str) -> None:
    (tmp_path / "1.tsv").write_text("a\tb\nx\t1\n")
    (tmp_path / "2.tsv").write_text(f"{header}\nx\t1\n")
    source = TextSource(tmp_path, schema=AB, header=True)
    assert [row for block in source.open(0) for row in block.to_pylist()] == [{"a": "x", "b": 1}]
    for read in (lambda: list(source.open(1)), source.count_unit_rows):
        with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/2.tsv:1: ")) as caught:
            read()
        assert str(header.split("\t")) in str(caught.value)
        assert "['a', 'b']" in str(caught.value)


def test_an_empty_file_has_no_header(tmp_path: Path) -> None:
    (tmp_path / "1.tsv").write_text("a\tb\nx\t1\n")
    (tmp_path / "2.tsv").touch()
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/2.tsv has no text in it (0 bytes), but header=True")):
        TextSource(tmp_path, schema=AB, header=True)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/1.tsv:1: ")):
        list(TextSource(tmp_path, schema=AB).open(0))
    (tmp_path / "1.tsv").write_text("x\t1\n")
    assert rows(TextSource(tmp_path, schema=AB)) == [("x", 1)]


# Any table, any line ends, any cut.

FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\r\n"), max_size=6)
ROW = st.tuples(FIELD, st.none() | st.integers(-(2**63), 2**63 - 1), FIELD)
ENDS = st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\n"])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ROW, ENDS), max_size=12), st.integers(1, 60), st.booleans(), st.booleans())
@example([(("\ufeff", 1, ""), "\n"), (("\ufeff", None, "\ufeff"), "\n")], 1, False, False)
def test_any_rows_any_line_ends_any_cut(
    tmp_path: Path, lines: list[tuple[tuple[Any, ...], str]], unit_bytes: int, mark: bool, ended: bool
) -> None:
    schema = pa.schema([("s", pa.string()), ("n", pa.int64()), ("t", pa.string())])
    text = "".join("\t".join("" if field is None else str(field) for field in row) + end for row, end in lines)
    if not ended:
        text = text.rstrip("\r\n")
    file = tmp_path / "any.tsv"
    file.write_bytes((("\ufeff" if mark or text.startswith("\ufeff") else "") + text).encode())
    source = TextSource(file, schema=schema, unit_bytes=unit_bytes)
    assert rows(source) == [(s or None, n, t or None) for (s, n, t), _ in lines]
    by_unit = [sum(block.num_rows for block in source.open(unit)) for unit in range(source.unit_count())]
    assert source.count_unit_rows() == by_unit


# Units, counts, bounds, identity.


def test_units_depend_on_sizes_and_options_only(tmp_path: Path) -> None:
    for name, size in [("c", 10), ("a", 21), ("b", 0), ("d", 1)]:
        (tmp_path / name).write_bytes(b"x" * size)
    source = TextSource(tmp_path, schema=AB, unit_bytes=10)
    described = [source.describe(unit).removeprefix(f"{tmp_path}/") for unit in range(source.unit_count())]
    assert described == [
        "a, bytes 0 to 10", "a, bytes 10 to 20", "a, bytes 20 to 21", "c, bytes 0 to 10", "d, bytes 0 to 1"
    ]  # fmt: skip


def test_only_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    source = TextSource(tmp_path, schema=AB)
    assert (source.unit_count(), source.count_unit_rows(), rows(source)) == (0, [], [])


def test_rows_of_several_files_are_counted_once(tmp_path: Path) -> None:
    for name, count in [("a", 700), ("b", 200), ("c", 103)]:
        (tmp_path / name).write_text("".join(f"{name}\t{index}\n" for index in range(count)))
    source = TextSource(tmp_path, schema=AB, unit_bytes=1 << 20)
    assert source.count_unit_rows() == [700, 200, 103]
    for name in "abc":
        (tmp_path / name).unlink()
    assert source.count_unit_rows() == [700, 200, 103]


def test_many_threads(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text("".join(f"s\t{index}\n" for index in range(2000)))
    source = TextSource(file, schema=AB, unit_bytes=100)
    found: dict[int, list[int]] = {}
    counts: list[Sequence[int]] = []
    barrier = threading.Barrier(4)

    def read(first: int) -> None:
        barrier.wait(30)
        counts.append(source.count_unit_rows())
        for unit in range(first, source.unit_count(), 4):
            found[unit] = [value for block in source.open(unit) for value in block.column("b").to_pylist()]

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [value for unit in sorted(found) for value in found[unit]] == list(range(2000))
    assert all(count == [len(found[unit]) for unit in sorted(found)] for count in counts)
    assert len(counts) == 4


def test_identity(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\t1\n")
    base: dict[str, Any] = {"schema": AB}
    identity = TextSource(tmp_path, **base).identity()
    assert identity == TextSource([tmp_path / "a"], **base).identity()
    hexadecimal = pa.schema([("a", pa.string()), ("b", pa.int64())])
    for other in (
        {"schema": pa.schema([("a", pa.string()), ("b", pa.int64())])},
        {"schema": hexadecimal, "hex_columns": ["b"]},
        {"unit_bytes": 7},
        {"delimiter": ","},
        {"null": "x"},
        {"header": True},
    ):
        assert TextSource(tmp_path, **{**base, **other}).identity() != identity
    (tmp_path / "b").touch()
    assert TextSource(tmp_path, **base).identity() != identity


@pytest.mark.parametrize("schema", [AB, CRITEO])
def test_the_bound_holds_what_reading_takes(tmp_path: Path, schema: pa.Schema) -> None:
    file = tmp_path / "a.tsv"
    line = "some text\t123\n" if schema is AB else FULL + "\n"
    file.write_text(line * (3_000_000 // len(line)))
    source = TextSource(file, schema=schema, hex_columns=HEX if schema is CRITEO else (), unit_bytes=1 << 20)
    (block,) = source.open(1)
    assert block.nbytes + (1 << 20) <= source.read_bound(1) <= 12 * (block.nbytes + (1 << 20))
    assert source.read_bound(source.unit_count() - 1) < source.read_bound(0)
    assert source.kept_bytes(1) == 0  # it is read at once
    with gzip.open(tmp_path / "a.tsv.gz", "wt") as packed:
        packed.write(line * (3_000_000 // len(line)))
    stream = TextSource(tmp_path / "a.tsv.gz", schema=schema, unit_bytes=1 << 20)
    assert 1 << 20 <= stream.kept_bytes(0) < stream.read_bound(0)


# Refusals.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"delimiter": ""}, "delimiter must be one ASCII character"),
        ({"delimiter": "\t\t"}, "delimiter must be one ASCII character"),
        ({"delimiter": "\n"}, "delimiter must be one ASCII character"),
        ({"delimiter": "é"}, "delimiter must be one ASCII character"),
        ({"null": "a\tb"}, "null must be the text of one field"),
        ({"unit_bytes": 0}, "unit_bytes must be from 1 to 1,073,741,824, not 0"),
        ({"unit_bytes": 1 << 31}, "unit_bytes must be from 1 to"),
        ({"schema": pa.schema([])}, "at least one field"),
        ({"schema": ["a", "b"]}, "schema must be a pyarrow.Schema"),
        ({"schema": pa.schema([("a", pa.int8()), ("a", pa.int8())])}, "more than once: a"),
        ({"schema": pa.schema([("a", pa.list_(pa.int8()))])}, "column 'a': list<item: int8> cannot be read from text"),
        ({"hex_columns": ["c"]}, "hex column 'c' is not in the schema, which has a, b"),
        ({"hex_columns": ["b"]}, "hex column 'b' must be declared int64, not int32"),
        ({"hex_columns": "b"}, "hex_columns must be a list of names"),
    ],
)
def test_options_that_are_not_allowed(file: Path, options: dict[str, Any], reason: str) -> None:
    file.write_text("x\t1\n")
    with pytest.raises(SourceError, match=re.escape(reason)):
        TextSource(file, **{"schema": AB, **options})


def test_a_file_that_vanishes_or_grows(file: Path) -> None:
    file.write_text("x\t1\n")
    source = TextSource(file, schema=AB)
    file.write_text("x\t1\ny\t2\n")
    assert re.search(r"data\.tsv has changed.*4 bytes.*8 now", failure(source))
    file.unlink()
    assert failure(source).startswith(f"{file}, bytes 0 to 4: cannot be read: ")


@pytest.mark.parametrize("name", ["memory", "local"])
def test_other_filesystems(tmp_path: Path, name: str) -> None:
    if name == "memory":
        fsspec = pytest.importorskip("fsspec")
        system = fsspec.filesystem("memory")
        system.pipe("/here/a.tsv", b"x\t1\ny\t2\n")
        folder = "/here"
    else:
        system, folder = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem()), "here"
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "a.tsv").write_bytes(b"x\t1\ny\t2\n")
    try:
        for unit_bytes in (1, 100):
            source = TextSource(f"{folder}/*.tsv", schema=AB, filesystem=system, unit_bytes=unit_bytes)
            assert rows(source) == [("x", 1), ("y", 2)]
            assert sum(source.count_unit_rows()) == 2
    finally:
        if name == "memory":
            system.store.clear()


# Real files.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["day_11_head3k.tsv", "head1k.tsv"])
def test_real_click_logs(shared_data: Path, name: str) -> None:
    path = shared_data / "criteo1tb" / name
    split = [line.split("\t") for line in path.read_text().removesuffix("\n").split("\n")]
    expected = [
        tuple(int(field, 16 if index >= 14 else 10) if field else None for index, field in enumerate(line))
        for line in split
    ]
    for unit_bytes in (10_000, 8 << 20):
        source = TextSource(path, schema=CRITEO, hex_columns=HEX, unit_bytes=unit_bytes)
        assert rows(source) == expected
        assert sum(source.count_unit_rows()) == len(expected)


def test_a_file_that_went_through_another_program_is_refused_with_its_line(shared_data: Path) -> None:
    path = shared_data / "criteo1tb" / "day_11_head3k_pandas_decimal.tsv"
    assert failure(TextSource(path, schema=CRITEO, hex_columns=HEX)) == f"{path}:1: found 41 fields, expected 40"
    message = failure(TextSource(path, schema=CRITEO, hex_columns=HEX, header=True))
    assert message.startswith(f"{path}:1: the header has the names ['', 'label', 'int_0', ")
