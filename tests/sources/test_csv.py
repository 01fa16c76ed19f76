"""Quoted text: values with delimiters, quotes and line ends in them, wherever blocks are cut."""

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import intune
from intune._errors import SourceError
from intune.pipeline.source import BlockSource
from intune.sources.text import CsvSource

AB = pa.schema([("a", pa.string()), ("b", pa.int32())])
ABC = pa.schema([("a", pa.string()), ("b", pa.int32()), ("c", pa.string())])


def source_of(file: Path, schema: pa.Schema = AB, **options: Any) -> CsvSource:
    return CsvSource(file, schema=schema, **{"delimiter": ",", "quote": '"', **options})


def rows(source: CsvSource) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for unit in range(source.unit_count()):
        for block in source.open(unit):
            assert block.schema.equals(source.schema)
            assert block.num_rows > 0
            block.validate(full=True)
            found.extend(zip(*(column.to_pylist() for column in block.columns), strict=True))
    assert sum(source.count_unit_rows()) == len(found)
    return found


def failure(source: CsvSource) -> str:
    with pytest.raises(SourceError) as caught:  # noqa: PT012
        for unit in range(source.unit_count()):
            list(source.open(unit))
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


def test_is_a_block_source_whose_units_are_whole_files(file: Path) -> None:
    file.write_text('"x",1\n' * 1000)
    source = source_of(file, unit_bytes=100)
    assert isinstance(source, BlockSource)
    assert (source.kind, source.unit_count()) == ("read_csv", 1)
    assert len(list(source.open(0))) > 10
    assert source.describe(0) == f"{file}, bytes 0 to 6000"
    assert source.identity() != source_of(file, unit_bytes=100, quote="'").identity()


def test_without_a_quote_units_are_byte_ranges_and_quotes_are_text(file: Path) -> None:
    file.write_text('"x",1\n' * 1000)
    source = source_of(file, quote=None, unit_bytes=100)
    assert (source.kind, source.unit_count()) == ("read_csv", 60)
    assert rows(source) == [('"x"', 1)] * 1000


@pytest.mark.parametrize("unit_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["end", "no end"])
def test_what_quotes_are_for(file: Path, unit_bytes: int, end: str, tail: str) -> None:
    lines = ['"a, b",1', '"say ""hi""",2', '"two\nlines",3', '"cr\r, crlf\r\n",4', '"""",5', '"\n\n",6', "plain,7"]
    file.write_bytes((end.join(lines) + (end if tail == "end" else "")).encode())
    assert rows(source_of(file, unit_bytes=unit_bytes)) == [
        ("a, b", 1), ('say "hi"', 2), ("two\nlines", 3), ("cr\r, crlf\r\n", 4), ('"', 5), ("\n\n", 6), ("plain", 7)
    ]  # fmt: skip


def test_missing_is_what_is_not_quoted(file: Path) -> None:
    file.write_text('"",1\n,2\n,\n\n"NA",3\nNA,4\n"x","5"\n')
    assert rows(source_of(file)) == [("", 1), (None, 2), (None, None), ("NA", 3), ("NA", 4), ("x", 5)]
    file.write_text('"",1\n"NA",3\nNA,NA\n')
    assert rows(source_of(file, null="NA")) == [("", 1), ("NA", 3), (None, None)]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
@pytest.mark.parametrize("compressed", [False, True])
def test_header_mark_and_compression(file: Path, mark: bytes, unit_bytes: int, compressed: bool) -> None:
    schema = pa.schema([("a\nb", pa.string()), ("c,d", pa.int32())])
    text = mark + b'"a\nb","c,d"\r\n"x\ny",1\r\n"z",2'
    file.write_bytes(gzip.compress(text[:17]) + gzip.compress(text[17:]) if compressed else text)
    assert rows(source_of(file, schema, header=True, unit_bytes=unit_bytes)) == [("x\ny", 1), ("z", 2)]
    message = failure(source_of(file, AB, header=True, unit_bytes=unit_bytes))
    assert message.startswith(f"{file}:1: the header has the names ['a\\nb', 'c,d'], the schema has ['a', 'b']")


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('"x",12.5', "column 'b': '12.5' is not a valid int32"),
        ('"x","y"', "column 'b': 'y' is not a valid int32"),
        ('"x,1",2,3', "found 3 fields, expected 2"),
        ('"x",""', "column 'b': '' is not a valid int32"),
        ('"x,1"', "found 1 fields, expected 2"),
        ('x "quoted" y,1', 'a " that neither opens nor closes a whole value; in a quoted value it is doubled'),
        ('"x"y,1', 'a " that neither opens'),
        ('"x" ,1', 'a " that neither opens'),
        (' "x",1', 'a " that neither opens'),
        ('"x"y"",1', 'a " that neither opens'),
        ("x\ry,1", "a carriage return that no line feed follows"),
    ],
)
def test_bad_lines_have_their_number_in_the_file(file: Path, line: str, reason: str, unit_bytes: int) -> None:
    file.write_text('a,b\n"two\nlines",1\n"x",2\n' + line + '\n"z",3\n', newline="")
    assert failure(source_of(file, header=True, unit_bytes=unit_bytes)).startswith(f"{file}:5: {reason}")


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize("text", ['x,1\n5" pipe,2\ny,3\n', 'x,1\ny,2"', 'x,1\n5" pipe,"2\ny"\n"z,3\n'])
def test_a_quote_without_its_partner_is_never_taken_as_it_stands(file: Path, text: str, unit_bytes: int) -> None:
    file.write_text(text)
    assert failure(source_of(file, unit_bytes=unit_bytes)).startswith(f'{file}:2: a " that neither opens nor closes')


END, NEXT = "by the end of the file", 'by the next ", 1 line further down'


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("text", "line", "where"),
    [
        ('x,1\n"open,2\ny,3\n', 2, END),
        ('x,1\n"a""b,2\ny,3', 2, END),
        ('x,1\n""",2\ny,3', 2, END),
        ('x,1\n"y,2\n"z",3\n', 2, NEXT),
        ('x,1\n"a""b,2\n"z",3\n', 2, NEXT),
        ('x,1\n"a,2\n\n"z",3\n', 2, 'by the next ", 2 lines further down'),
        ('"x\n\ny",1\n"z\nz","2\n', 5, END),  # the row begins in line 4
        ('"x\n\ny",1\nz,2\n"u\nu","3\n"v",4\n', 6, NEXT),
        ('"', 1, END),
        ('x,1\n\n"', 3, END),
    ],
)
def test_a_quote_that_is_not_closed_is_named_with_the_line_in_which_it_opens(
    file: Path, text: str, line: int, where: str, packed: bool, unit_bytes: int
) -> None:
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    message = failure(source_of(file, unit_bytes=unit_bytes))
    assert message == (
        f'{file}:{line}: a " opens a value in this line that is not closed {where}: '
        'close it, double a " that is part of a value, or say quote=None if they are text like any other'
    )


LONG = "y" * 200_000  # more than the standard library's reader takes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'1,"{LONG}"\nzz,"{LONG}"\n', "3: column 'a': 'zz' is not a valid int64"),
        (f'1,"{LONG}",9\n', "2: found 3 fields, expected 2"),
        (f'1,"x\n{LONG},"\n"{LONG}",x\n', f"4: column 'a': '{'y' * 80}...' is not a valid int64"),
        ('1,"x,""y"""\n"1,""2",z\n', "3: column 'a': '1,\"2' is not a valid int64"),
        ("1,x\n0x1f,y\n", "3: column 'a': '0x1f' is not a valid int64"),
        ('1,x\n"0x1f",y\n', "3: column 'a': '0x1f' is not a valid int64"),
    ],
)
def test_what_is_wrong_is_said_however_long_the_values(file: Path, text: str, reason: str) -> None:
    file.write_text("a,s\n" + text)
    schema = pa.schema([("a", pa.int64()), ("s", pa.string())])
    assert failure(source_of(file, schema, header=True)) == f"{file}:{reason}"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (f'a,"{LONG}"', f"the header has the names ['a', '{'y' * 80}...'], the schema has ['a', 'b']"),
        (",".join("x" * 102), f"the header has the names [{', '.join([repr('x')] * 100)}] and 2 more, the schema has"),
        ('"a,"",b",b', "the header has the names ['a,\",b', 'b'], the schema has ['a', 'b']"),
        ("a\rb", "a carriage return that no line feed follows; lines end with LF or CRLF"),
        ("a,b\r1,2\r3,4", "a carriage return that no line feed follows; lines end with LF or CRLF"),
    ],
)
def test_other_headers_are_said(file: Path, header: str, reason: str) -> None:
    file.write_text(f"{header}\nx,1\n", newline="")
    assert failure(source_of(file, header=True)).startswith(f"{file}:1: {reason}")


def test_a_header_with_a_quote_that_is_not_closed(file: Path) -> None:
    file.write_text('a,"b\n' + "x,1\n" * 1000)
    message = failure(source_of(file, header=True))
    assert message.startswith(f'{file}:1: a " opens a value in this line that is not closed by the end of the file')
    assert len(message) < 400


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_file_with_a_header(tmp_path: Path, packed: bool) -> None:
    (tmp_path / "1.csv").write_text("a,b\nx,1\n")
    (tmp_path / "2.csv").write_bytes(gzip.compress(b"") if packed else b"")
    size = (tmp_path / "2.csv").stat().st_size
    message = re.escape(f"{tmp_path}/2.csv has no text in it ({size} bytes), but header=True says that its first line")
    if not packed:
        with pytest.raises(SourceError, match=message):
            intune.read_csv(tmp_path, schema=AB)
    else:
        pipe = intune.read_csv(tmp_path, schema=AB).batch(4)
        with pipe.loader(memory="4GiB") as loader, pytest.raises(SourceError, match=message):
            list(loader)
    (tmp_path / "1.csv").write_text("x,1\n")
    with intune.read_csv(tmp_path, schema=AB, header=False).batch(4).loader(memory="4GiB") as loader:
        assert [batch.num_rows for batch in loader] == [1]


def test_a_quote_that_opens_a_file_without_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune.sources._streams.LONGEST_LINE", 1 << 16)
    file.write_text('"x\nx",1\n"y,2\n' + "z,3\n" * 100_000)
    message = failure(source_of(file, unit_bytes=1000))
    assert re.match(rf'{file}:3: a " opens a value in this line that is not closed in .* from byte 8 on: ', message)
    file.write_text('x,1\n"y,2' + "z,3" * 100_000)
    assert "from byte 4 on; is this a text file?" in failure(source_of(file, unit_bytes=1000))


@pytest.mark.parametrize("quote", ["", '""', ",", "\n", "é"])
def test_quotes_that_are_not_allowed(file: Path, quote: str) -> None:
    file.write_text("x,1\n")
    with pytest.raises(SourceError, match="quote must be one ASCII character apart from the delimiter, or None"):
        source_of(file, quote=quote)


def test_other_delimiters_and_quotes(file: Path) -> None:
    file.write_text("'x;\"y';1\n'it''s';2\n")
    assert rows(source_of(file, delimiter=";", quote="'")) == [('x;"y', 1), ("it's", 2)]


def test_as_users_call_it(file: Path) -> None:
    file.write_text('a,b\n"x\ny",1\n' + "z,2\n" * 300)
    with intune.read_csv(file, schema=AB, unit_bytes=50).batch(64).loader(memory="4GiB") as loader:
        values = [value for batch in loader for value in batch.column("a").to_pylist()]
    assert values == ["x\ny"] + ["z"] * 300
    with intune.read_csv(file, schema=AB).batch(64).loader(memory="4GiB") as loader:
        assert loader.stats().stages.keys() >= {"read_csv"}


FIELD = st.text(st.sampled_from('a"\n\r,é \ufeff'), max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(FIELD, st.integers(-9, 9), FIELD), max_size=8),
    st.integers(1, 40),
    # With another line end it leaves a carriage return without quotes where it may.
    st.sampled_from([("\n", csv.QUOTE_ALL), ("\n", csv.QUOTE_NONNUMERIC), ("\r\n", csv.QUOTE_MINIMAL)]),
)
def test_what_the_standard_library_wrote(
    tmp_path: Path, table: list[tuple[Any, ...]], unit_bytes: int, style: tuple[str, Any]
) -> None:
    end, quoting = style
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=end, quoting=quoting).writerows([ABC.names, *table])
    file = tmp_path / "any.csv"
    file.write_bytes(out.getvalue().encode())
    found = rows(source_of(file, ABC, header=True, unit_bytes=unit_bytes))
    assert [(a or "", b, c or "") for a, b, c in found] == table


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(['"a"', '"a\n"', '"",""\n', "a", '"', "\n", "\r", ",", "a,a\n", '""']), max_size=14))
def test_any_text_gives_the_same_however_it_is_cut(tmp_path: Path, parts: list[str]) -> None:
    text = "".join(parts)
    file = tmp_path / "any.csv"
    file.write_bytes(text.encode())
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    outcomes: list[list[tuple[Any, ...]] | None] = []
    for unit_bytes in (1, 3, 1000):
        try:
            outcomes.append(rows(source_of(file, schema, unit_bytes=unit_bytes)))
        except SourceError:
            outcomes.append(None)  # which of several bad lines is named may differ
    assert outcomes[0] == outcomes[1] == outcomes[2]
    if outcomes[0] is not None:
        read = csv.reader(io.StringIO(text, newline=""), strict=True)
        assert [(a or "", b or "") for a, b in outcomes[0]] == [tuple(line) for line in read if line]
