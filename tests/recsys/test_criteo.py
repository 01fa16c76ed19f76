"""Criteo files under all their names and types, and what is not one of them."""

import gzip
import pickle
import re
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import intune
from intune import PipelineError, SourceError
from intune.recsys.criteo import (
    ALL_COLUMNS,
    CATEGORY_COLUMNS,
    COUNT_COLUMNS,
    CriteoColumns,
    criteo_schema,
    read_criteo,
)
from intune.recsys.generate import write_criteo

SAMPLE = "criteo1tb/day_11_head3k.tsv"

INT_CAT_NAMES = ("label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26)))
SPARK_NAMES = tuple(f"_c{i}" for i in range(40))


def line(label: str = "0", count: str = "7", category: str = "80e26c9b", fields: int = 40) -> bytes:
    """One row of text."""
    return "\t".join([label, *[count] * 13, *[category] * 26][:fields]).encode() + b"\n"


def rows_of(pipe: intune.Pipeline) -> pa.Table:
    with pipe.loader(cpus=2) as loader:
        return pa.Table.from_batches(list(loader))


def expected_rows(*files: Path) -> pa.Table:
    """The rows of plain text files by plain Python."""
    rows = [text.split("\t") for file in files for text in file.read_text(encoding="ascii").split("\n")[:-1]]
    assert all(len(row) == 40 for row in rows)
    columns = [
        [int(value, 16 if j > 13 else 10) if value else None for value in column]
        for j, column in enumerate(zip(*rows, strict=True))
    ]
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, criteo_schema(), strict=True)], schema=criteo_schema()
    )


def as_hex(category: int | None) -> str | None:
    return None if category is None else f"{category:08x}"


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_gives_typed_columns_and_null_where_missing(shared_data: Path) -> None:
    file = shared_data / SAMPLE
    assert rows_of(read_criteo(file)).equals(expected_rows(file))


def test_days_of_a_folder_come_in_the_order_of_their_names(shared_data: Path, tmp_path: Path) -> None:
    lines = (shared_data / SAMPLE).read_bytes().splitlines(keepends=True)
    (tmp_path / "day_0").write_bytes(b"".join(lines[:100]))
    (tmp_path / "day_1").write_bytes(b"".join(lines[100:250]))
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".hidden").write_bytes(b"PAR1")
    expected = expected_rows(shared_data / SAMPLE).slice(0, 250)
    assert rows_of(read_criteo(tmp_path)).equals(expected)
    assert rows_of(read_criteo([tmp_path / "day_0", str(tmp_path / "day_[1-9]")])).equals(expected)


@pytest.mark.parametrize("name", ["day_0", "train.txt"])
def test_compressed_text_is_read_like_plain(tmp_path: Path, name: str) -> None:
    text = line() * 3 + line(category="80000000")
    (tmp_path / f"{name}").write_bytes(text)
    expected = rows_of(read_criteo(tmp_path))
    (tmp_path / f"{name}").unlink()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]))
    assert rows_of(read_criteo(tmp_path)).equals(expected)
    (tmp_path / f"{name}.gz").unlink()
    (tmp_path / f"{name}.zst").write_bytes(bytes(pa.Codec("zstd").compress(text)))
    assert rows_of(read_criteo(tmp_path)).equals(expected)


def test_compressed_text_that_is_cut_short_or_has_too_few_fields(tmp_path: Path) -> None:
    file = tmp_path / "day_0.gz"
    file.write_bytes(gzip.compress(line())[:-4])
    with pytest.raises(SourceError, match=rf"day_0\.gz: .*byte {file.stat().st_size} of .*Truncated"):
        read_criteo(tmp_path)
    file.write_bytes(gzip.compress(line()[2:]))
    with pytest.raises(SourceError, match=r"day_0\.gz:1: expected 40 .* got 39"):
        read_criteo(tmp_path)


def test_hex_is_unsigned(tmp_path: Path) -> None:
    words = ["00000000", "7fffffff", "80000000", "80e26c9b", "FFFFFFFF", "", "ff"]
    (tmp_path / "train.txt").write_bytes(b"".join(line(category=word) for word in words))
    rows = rows_of(read_criteo(tmp_path / "train.txt"))
    for name in CATEGORY_COLUMNS:
        assert rows[name].to_pylist() == [0, 2147483647, 2147483648, 2162322587, 4294967295, None, 255]


def test_negative_and_missing_counts_stay_what_they_are(tmp_path: Path) -> None:
    counts = [-3, -2, -1, 0, 1, 2147483647, None]
    text = b"".join(line(count="" if count is None else str(count)) for count in counts)
    (tmp_path / "train.txt").write_bytes(text)
    rows = rows_of(read_criteo(tmp_path / "train.txt"))
    for name in COUNT_COLUMNS:
        assert rows[name].to_pylist() == counts


def test_a_file_without_label(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_bytes(line()[2:] * 3)
    rows = rows_of(read_criteo(tmp_path / "test.txt", label=False))
    assert rows.schema.equals(criteo_schema(label=False))
    assert rows.num_rows == 3


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        (line()[2:], True, "day_0:1: expected 40 tab-separated fields (label, I1..I13, C1..C26), got 39"),
        (line()[2:], True, "need label=False"),
        (line(), False, "day_0:1: expected 39 tab-separated fields (I1..I13, C1..C26), got 40"),
        (line().replace(b"\t", b","), True, "got 1: b'0,7,7,"),
        (line(label="label"), True, "expected an integer in the first field and no header, got b'label'"),
        (b"\xef\xbb\xbf" + line(fields=12), True, "got 12: b'0\\t7"),
    ],
)
def test_a_first_line_of_another_kind_is_refused(tmp_path: Path, content: bytes, label: bool, message: str) -> None:
    (tmp_path / "day_0").write_bytes(content)
    with pytest.raises(SourceError, match=re.escape(message)):
        read_criteo(tmp_path, label=label)


def test_the_second_file_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(line())
    (tmp_path / "day_1").write_bytes(line(fields=38))
    with pytest.raises(SourceError, match=r"day_1:1: expected 40 .* got 38"):
        read_criteo(tmp_path)


class CountingFiles(pafs.FSSpecHandler):
    """Local files; notes the path of each that is opened."""

    def __init__(self) -> None:
        super().__init__(pytest.importorskip("fsspec").filesystem("file"))
        self.opened: list[str] = []

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.opened.append(path.rsplit("/", 1)[-1])
        return super().open_input_file(path)


@pytest.mark.parametrize("format", ["auto", "tsv"])
def test_each_text_file_is_opened_once_before_it_is_read(tmp_path: Path, format: Any) -> None:
    for day in range(3):
        (tmp_path / f"day_{day}").write_bytes(line(category=f"{day + 1:x}") * 5)
    (tmp_path / "day_3.gz").write_bytes(gzip.compress(line(category="f") * 5))
    (tmp_path / "day_4").touch()
    handler = CountingFiles()
    pipe = read_criteo((pafs.PyFileSystem(handler), tmp_path), format=format)
    assert sorted(handler.opened) == ["day_0", "day_1", "day_2", "day_3.gz", "day_4"]
    assert rows_of(pipe)["C1"].to_pylist() == [1] * 5 + [2] * 5 + [3] * 5 + [15] * 5
    assert sorted(handler.opened)[:3] == ["day_0", "day_0", "day_1"]
    assert len(handler.opened) == 9  # the empty one is never read


def test_folders_of_partitions_do_not_come_between(tmp_path: Path) -> None:
    (tmp_path / "label=1").mkdir()
    (tmp_path / "label=1" / "day_0").write_bytes(line() * 3)
    write_parquet(rows_of(read_criteo(tmp_path)), tmp_path / "label=1" / "a.parquet", ALL_COLUMNS, "int64")
    assert rows_of(read_criteo(tmp_path / "label=1" / "a.parquet"))["label"].to_pylist() == [0] * 3


def test_text_that_went_through_another_tool_is_refused(shared_data: Path) -> None:
    with pytest.raises(SourceError, match=r"pandas_decimal\.tsv:1: expected 40 tab-separated fields .* got 41"):
        read_criteo(shared_data / "criteo1tb" / "day_11_head3k_pandas_decimal.tsv")


# ---- Parquet --------------------------------------------------------------------------------------------------------


def write_parquet(rows: pa.Table, file: Path, names: tuple[str, ...], categories: str) -> None:
    """Write Criteo rows under other column names, and categories as hex strings, a dictionary of them, or integers."""

    def converted(name: str) -> Any:
        column = rows[name]
        if name not in CATEGORY_COLUMNS or categories == "int64":
            return column
        if categories in ("uint32", "large_string", "dictionary", "string"):
            words = pa.chunked_array([[as_hex(value) for value in column.to_pylist()]], pa.string())
            return {
                "uint32": lambda: column.cast(pa.uint32()),
                "string": lambda: words,
                "large_string": lambda: words.cast(pa.large_string()),
                "dictionary": words.dictionary_encode,
            }[categories]()
        raise AssertionError(categories)

    pq.write_table(
        pa.Table.from_arrays([converted(name) for name in ALL_COLUMNS], names=list(names)), file, row_group_size=700
    )


@pytest.mark.parametrize(
    ("names", "categories"),
    [
        (ALL_COLUMNS, "int64"),
        (ALL_COLUMNS, "string"),
        (INT_CAT_NAMES, "uint32"),
        (INT_CAT_NAMES, "dictionary"),
        (SPARK_NAMES, "large_string"),
    ],
)
def test_parquet_gives_the_rows_of_the_text(
    shared_data: Path, tmp_path: Path, names: tuple[str, ...], categories: str
) -> None:
    expected = expected_rows(shared_data / SAMPLE)
    write_parquet(expected, tmp_path / "rows.parquet", names, categories)
    assert rows_of(read_criteo(tmp_path)).equals(expected)


def test_parquet_is_converted_in_processes_as_well(shared_data: Path, tmp_path: Path) -> None:
    expected = expected_rows(shared_data / SAMPLE)
    write_parquet(expected, tmp_path / "rows.parquet", ALL_COLUMNS, "string")
    assert rows_of(read_criteo(tmp_path, executor="process")).equals(expected)


@pytest.mark.parametrize("format", ["parquet", "tsv"])
def test_made_up_rows_are_read_back(tmp_path: Path, format: Literal["parquet", "tsv"]) -> None:
    write_criteo(tmp_path / f"rows.{format}", 400, format=format, seed=2)
    write_criteo(tmp_path / "plain" / "rows.tsv", 400, format="tsv", seed=2)
    assert rows_of(read_criteo(tmp_path / f"rows.{format}")).equals(expected_rows(tmp_path / "plain" / "rows.tsv"))


def test_repeated_texts_come_as_dictionaries_and_others_as_texts(tmp_path: Path) -> None:
    """Few distinct values are turned to numbers once each; the rows are the same."""
    count = 4000
    few, many = [f"{i % 50:08x}" for i in range(count)], [f"{i:08x}" for i in range(count)]
    columns = {name: few if name in ("C1", "C26") else many for name in CATEGORY_COLUMNS}
    table = pa.table({"label": [0] * count, **{name: [1] * count for name in COUNT_COLUMNS}, **columns})
    pq.write_table(table, tmp_path / "a.parquet")
    pipe = read_criteo(tmp_path)
    kinds = pipe.source.schema  # type: ignore[union-attr]
    assert [name for name in CATEGORY_COLUMNS if pa.types.is_dictionary(kinds.field(name).type)] == ["C1", "C26"]
    rows = rows_of(pipe)
    assert rows["C26"].to_pylist() == [i % 50 for i in range(count)]
    assert rows["C2"].to_pylist() == list(range(count))


def converted(**columns: pa.Array) -> pa.RecordBatch:
    """A block of two rows through `CriteoColumns`, zeros but for the given columns."""
    arrays = [columns.get(name, pa.array([0, 0])) for name in ALL_COLUMNS]
    return CriteoColumns(ALL_COLUMNS)(pa.RecordBatch.from_arrays(arrays, names=list(ALL_COLUMNS)))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["80e26c9b", None]), [2162322587, None]),
        (pa.array(["", "FFFFFFFF"]), [None, 4294967295]),
        (pa.array([b"0a", b"00000000"]), [10, 0]),
        (pa.array([2**32 - 1, None], pa.uint32()), [4294967295, None]),
        (pa.array([5, None], pa.int32()), [5, None]),
        (pa.array([2**32 - 1, 0], pa.uint64()), [4294967295, 0]),
        (pa.array(["ff", None]).dictionary_encode(), [255, None]),
        (pa.array(["ff", ""], pa.large_string()).dictionary_encode(), [255, None]),
        (pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["0a", "no row has this"])), [10, None]),
        (pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["0a", None])), [None, 10]),
        (pa.array([7, None]).dictionary_encode(), [7, None]),
        (pa.nulls(2, pa.string()), [None, None]),
        (pa.nulls(2, pa.int64()), [None, None]),
    ],
)
def test_categories_of_many_types(column: pa.Array, expected: list[int | None]) -> None:
    block = converted(C9=column)
    assert block.schema.equals(criteo_schema())
    assert block["C9"].to_pylist() == expected


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([118.0, None]), [118, None]),
        (pa.array(["-2", None]), [-2, None]),
        (pa.array([2147483647, -3], pa.int32()), [2147483647, -3]),
        (pa.array([2**40, None]), [2**40, None]),
    ],
)
def test_counts_of_many_types(column: pa.Array, expected: list[int | None]) -> None:
    assert converted(I8=column)["I8"].to_pylist() == expected


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("C3", pa.array(["0a", "xyz"]), "column 'C3' (string) as C3: row 1: 'xyz' is not a hexadecimal number"),
        ("C3", pa.array(["0a", "123456789"]), "'123456789' is not"),
        ("C3", pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["xyz", "0a"])), "as C3: row 1: 'xyz' is not"),
        ("C3", pa.array([1, -2132644709], pa.int32()), "-2132644709 is negative; a category is 0 to 4294967295"),
        ("C3", pa.array([1, 2**63], pa.uint64()), "column 'C3' (uint64) as C3: Integer value 9223372036854775808"),
        ("C3", pa.array([118.0, 2.0]), "column 'C3' (double) as C3: expected hex strings or integers"),
        ("C3", pa.array([True, False]), "column 'C3' (bool) as C3: expected hex strings or integers"),
        ("I3", pa.array([1, 2], pa.timestamp("s")), "column 'I3' (timestamp[s]) as I3: expected integers, whole"),
        ("I3", pa.array([1.0, 2.5]), "column 'I3' (double) as I3: Float value 2.5"),
        ("I3", pa.array([1.0, float("nan")]), "column 'I3' (double) as I3: Float value nan"),
        ("I3", pa.array(["1", "x"]), "column 'I3' (string) as I3"),
        ("I3", pa.array([[1], [2]]), "column 'I3' (list<item: int64>) as I3"),
        ("label", pa.array([1, None]), "column 'label', row 1 of the block: the label is missing"),
    ],
)
def test_a_value_that_does_not_fit_is_named(name: str, column: pa.Array, message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        converted(**{name: column})


def test_the_names_of_the_file_stand_in_messages() -> None:
    columns = CriteoColumns(SPARK_NAMES)
    block = pa.RecordBatch.from_arrays([pa.array([0])] * 39 + [pa.array(["no"])], names=list(SPARK_NAMES))
    with pytest.raises(SourceError, match=re.escape("column '_c39' (string) as C26: row 0: 'no'")):
        columns(block)
    assert pickle.loads(pickle.dumps(columns)) == columns


def test_parquet_without_label(tmp_path: Path) -> None:
    rows = {name: pa.array([1, 2]) for name in (*COUNT_COLUMNS, *CATEGORY_COLUMNS)}
    pq.write_table(pa.table(rows), tmp_path / "test.parquet")
    with pytest.raises(SourceError, match=r"expected label, I1\.\.I13"):
        read_criteo(tmp_path)
    assert rows_of(read_criteo(tmp_path, label=False)).equals(pa.table(rows))


def test_columns_of_other_names_are_listed_with_what_was_expected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1], "I1": [1], "price": [2]}), tmp_path / "rows.parquet")
    message = (
        "rows.parquet has the columns ['label', 'I1', 'price']; expected label, I1..I13, C1..C26; or label, "
        "int_0..int_12, cat_0..cat_25; or _c0, _c1, ..."
    )
    with pytest.raises(SourceError, match=re.escape(message)):
        read_criteo(tmp_path)


# ---- which of the two -----------------------------------------------------------------------------------------------


def test_a_folder_of_both_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(line())
    write_criteo(tmp_path / "rows.parquet", 1)
    message = f"both kinds of files are given: text ({tmp_path}/day_0) and Parquet ({tmp_path}/rows.parquet)"
    with pytest.raises(SourceError, match=re.escape(message)):
        read_criteo(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", line(), "rows.parquet (262 bytes) has the name of a Parquet file, but not the content"),
        ("rows.parquet", b"", "rows.parquet (0 bytes) has the name of a Parquet file"),
        ("day_7", b"PAR1....", "day_7 has the name of a text file, but the content of a Parquet file"),
        ("clicks.csv", line(), "clicks.csv: known names are day_<n>"),
        ("day_x", line(), "day_x: known names are day_<n>"),
    ],
)
def test_the_kind_of_a_file_is_never_guessed(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=re.escape(message)):
        read_criteo(tmp_path)


def test_saying_the_format_overrides_the_name(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_bytes(line() * 2)
    assert rows_of(read_criteo(tmp_path, format="tsv")).num_rows == 2
    with pytest.raises(SourceError, match=r"clicks\.csv \(524 bytes\): cannot be read: .*"):
        read_criteo(tmp_path, format="parquet")


def test_parquet_is_known_by_its_content_under_any_other_name(tmp_path: Path) -> None:
    write_criteo(tmp_path / "part-00000", 3)
    assert rows_of(read_criteo(tmp_path)).num_rows == 3


def test_other_formats_and_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file or folder"):
        read_criteo(tmp_path / "nowhere")
    (tmp_path / "day_0").write_bytes(line())
    with pytest.raises(PipelineError, match="format must be 'auto', 'tsv' or 'parquet', got 'csv'"):
        read_criteo(tmp_path, format="csv")  # type: ignore[arg-type]


def test_the_plain_reader_agrees_with_arrows(tmp_path: Path) -> None:
    # One look at the helper above: Arrow's own reader sees the same counts in a made-up file.
    write_criteo(tmp_path / "rows.tsv", 50, format="tsv")
    options = pacsv.ReadOptions(column_names=list(ALL_COLUMNS))
    read = pacsv.read_csv(tmp_path / "rows.tsv", options, pacsv.ParseOptions(delimiter="\t"))
    for name in ("label", *COUNT_COLUMNS):
        assert read[name].to_pylist() == expected_rows(tmp_path / "rows.tsv")[name].to_pylist()
