"""Columns that stand in the names of folders."""

import datetime
import pickle
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import intune
from intune._errors import SourceError, StateError
from intune.sources.parquet import ParquetSource

WORDS = pa.dictionary(pa.int32(), pa.string())


def put(file: Path, *values: int, **more: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": pa.array(values, pa.int64()), **more}), file, row_group_size=2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "clicks"
    put(folder / "day=3/country=de/part-0.parquet", 1, 2, 3)
    put(folder / "day=3/country=fr/part-0.parquet", 4)
    put(folder / "day=12/country=de/part-0.parquet", 5, 6)
    return folder


def rows(source: ParquetSource) -> list[dict[str, Any]]:
    found = [block for unit in range(source.unit_count()) for block in source.open(unit)]
    for block in found:
        assert block.schema.equals(source.schema, check_metadata=True)
        block.validate(full=True)
    return [row for block in found for row in block.to_pylist()]


def test_folders_are_columns_behind_those_of_the_files(tree: Path) -> None:
    source = ParquetSource(tree, block_rows=1)
    assert source.schema == pa.schema([("x", pa.int64()), ("day", pa.int32()), ("country", WORDS)])
    expected = [(5, 12, "de"), (6, 12, "de"), (1, 3, "de"), (2, 3, "de"), (3, 3, "de"), (4, 3, "fr")]
    assert [tuple(row.values()) for row in rows(source)] == expected
    assert sorted(pq.read_table(tree, partitioning="hive").to_pylist(), key=repr) == sorted(rows(source), key=repr)


@pytest.mark.parametrize(
    "given",
    ["{}", "{}/**/*.parquet", "{}/day=3", "{}/day=3/country=de/part-0.parquet", "{}/day=3/*", "file://{}/day=3"],
)
def test_folders_above_what_was_given_count_too(tree: Path, given: str) -> None:
    found = rows(ParquetSource(given.format(tree)))
    assert {"x": 2, "day": 3, "country": "de"} in found


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["x"], {"x": 5}),
        (["day", "x"], {"day": 12, "x": 5}),
        (["country"], {"country": "de"}),
        (["country", "day"], {"country": "de", "day": 12}),
    ],
)
def test_columns_name_them_or_leave_them_out(tree: Path, columns: list[str], expected: dict[str, Any]) -> None:
    source = ParquetSource(tree, columns=columns)
    assert source.schema.names == columns
    assert rows(source)[0] == expected
    assert len(rows(source)) == sum(source.unit_rows()) == 6
    assert source.read_bound(0) > 0


def test_none_leaves_folders_alone(tree: Path) -> None:
    source = ParquetSource(tree, partitioning=None)
    assert source.schema.names == ["x"]
    with pytest.raises(SourceError, match="has no column 'day'; it has x"):
        ParquetSource(tree, partitioning=None, columns=["day"])


@pytest.mark.parametrize("declare", [lambda s: s, lambda s: pads.partitioning(s, flavor="hive")])
@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (pa.int64(), "99999999999", 99999999999),
        (pa.int8(), "007", 7),
        (pa.string(), "007", "007"),
        (pa.date32(), "2026-11-30", datetime.date(2026, 11, 30)),
        (pa.timestamp("us"), "2026-11-30%2010%3A15%3A06", datetime.datetime(2026, 11, 30, 10, 15, 6)),
        (pa.float64(), "0.25", 0.25),
        (pa.bool_(), "true", True),
        (pa.float32(), "__HIVE_DEFAULT_PARTITION__", None),
    ],
)
def test_declared_types(tmp_path: Path, declare: Any, kind: pa.DataType, written: str, value: Any) -> None:
    put(tmp_path / f"other=1/key={written}/a.parquet", 1, 2, 3)
    source = ParquetSource(tmp_path, partitioning=declare(pa.schema([("key", kind)])))
    assert source.schema == pa.schema([("x", pa.int64()), ("key", kind)])
    assert [row["key"] for row in rows(source)] == [value] * 3


def test_declared_dictionaries(tree: Path) -> None:
    large = pa.dictionary(pa.int8(), pa.large_string())
    source = ParquetSource(tree, partitioning=pa.schema([("country", large)]))
    assert source.schema.field("country").type == large
    assert [row["country"] for row in rows(source)] == ["de"] * 5 + ["fr"]


def test_undeclared_types(tmp_path: Path) -> None:
    put(tmp_path / "a=1/b=007/c=2147483648/d=x/e=1/a.parquet", 1)
    put(tmp_path / "a=-1/b=8/c=1/d=2/e=__HIVE_DEFAULT_PARTITION__/a.parquet", 2)
    source = ParquetSource(tmp_path)
    kinds = {field.name: field.type for field in source.schema}
    assert kinds == {"x": pa.int64(), "a": pa.int32(), "b": WORDS, "c": WORDS, "d": WORDS, "e": pa.int32()}
    assert rows(source) == [
        {"x": 2, "a": -1, "b": "8", "c": "1", "d": "2", "e": None},
        {"x": 1, "a": 1, "b": "007", "c": "2147483648", "d": "x", "e": 1},
    ]


@pytest.mark.parametrize("value", ["01", "00", "-01", "-0", "%301"])
def test_leading_zeros_beside_fewer_digits_make_text_unless_a_number_is_declared(tmp_path: Path, value: str) -> None:
    put(tmp_path / f"a={value}/b=0/a.parquet", 1)
    put(tmp_path / "a=1/b=10/a.parquet", 2)
    source = ParquetSource(tmp_path)
    assert (source.schema.field("a").type, source.schema.field("b").type) == (WORDS, pa.int32())
    found = {row["x"]: (row["a"], row["b"]) for row in rows(source)}
    assert found == {1: (unquote(value), 0), 2: ("1", 10)}
    declared = ParquetSource(tmp_path, partitioning=pa.schema([("a", pa.int16())]))
    assert {row["x"]: row["a"] for row in rows(declared)} == {1: int(unquote(value)), 2: 1}


def test_numbers_padded_to_one_width_are_numbers(tmp_path: Path) -> None:
    """Months and hours are written so everywhere."""
    for number, month in enumerate(["01", "09", "12"]):
        put(tmp_path / f"month={month}/a.parquet", number)
    source = ParquetSource(tmp_path)
    assert source.schema.field("month").type == pa.int32()
    assert {row["x"]: row["month"] for row in rows(source)} == {0: 1, 1: 9, 2: 12}


@pytest.mark.parametrize("value", ["a/b", "50 %", "größe", "x=y", "a+b", ""])
def test_names_and_values_are_percent_decoded(tmp_path: Path, value: str) -> None:
    put(tmp_path / f"{quote('my key')}={quote(value, safe='')}/a.parquet", 1)
    put(tmp_path / f"{quote('my key')}=__HIVE_DEFAULT_PARTITION__/a.parquet", 2)
    found = {row["x"]: row["my key"] for row in rows(ParquetSource(tmp_path))}
    assert found == {1: value, 2: None}


def test_a_column_of_the_files_too(tmp_path: Path) -> None:
    put(tmp_path / "day=3/a.parquet", 1, day=[4])
    for columns in (None, ["day"], ["x", "day"]):
        with pytest.raises(SourceError, match=r"day=3/a\.parquet has a column 'day', and so have its folders.*None"):
            ParquetSource(tmp_path, columns=columns)
        assert rows(ParquetSource(tmp_path, columns=columns, partitioning=None))[0]["day"] == 4
    assert rows(ParquetSource(tmp_path, columns=["x"])) == [{"x": 1}]


def test_a_file_outside_of_the_folders(tree: Path) -> None:
    put(tree / "loose.parquet", 7)
    with pytest.raises(SourceError, match=r"loose\.parquet has no column.* 'day', 'country' as .*has; it has x"):
        ParquetSource(tree)
    with pytest.raises(SourceError, match=r"loose\.parquet has no column 'day'; it has x"):
        ParquetSource(tree, columns=["x", "day"])
    assert [row["x"] for row in rows(ParquetSource(tree, columns=["x"]))] == [5, 6, 1, 2, 3, 4, 7]


@pytest.mark.parametrize(
    ("folder", "partitioning", "message"),
    [
        ("day=x", pa.schema([("day", pa.int32())]), "/day=x/a.parquet cannot be read as partitions: .*'x'.*int32"),
        ("day=%C3%28", "hive", "UTF-8.*partitioning=None"),
        ("day=__HIVE_DEFAULT_PARTITION__", "hive", "'day'.*declare other types with partitioning="),
        ("day=1/day=2", "hive", "is in two folders day="),
        ("day=1", ["day"], "partitioning must be 'hive', None, a pyarrow.Schema"),
        ("1", pads.partitioning(pa.schema([("day", pa.int32())])), "partitioning must be 'hive', None"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, folder: str, partitioning: Any, message: str) -> None:
    put(tmp_path / folder / "a.parquet", 1)
    with pytest.raises(SourceError, match=message):
        ParquetSource(tmp_path, partitioning=partitioning)


def test_identity_is_about_folders_below_and_above_the_files(tree: Path, tmp_path: Path) -> None:
    identity = ParquetSource(tree).identity()
    shutil.copytree(tree, tmp_path / "elsewhere")
    assert ParquetSource(tmp_path / "elsewhere").identity() == identity
    assert ParquetSource(tree, partitioning=None).identity() != identity
    assert ParquetSource(tree, partitioning=pa.schema([("day", pa.int64()), ("country", WORDS)])).identity() != identity
    (tree / "day=3").rename(tree / "day=4")
    assert ParquetSource(tree).identity() != identity
    one = ParquetSource(tree / "day=4/country=fr").identity()
    (tree / "day=4").rename(tree / "day=5")
    assert ParquetSource(tree / "day=5/country=fr").identity() != one
    unused = ParquetSource(tree / "day=5/country=fr", columns=["x"]).identity()
    assert unused == ParquetSource(tree / "day=5/country=fr", columns=["x"], partitioning=None).identity()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_through_a_pipeline_and_resumed(tree: Path, executor: Any) -> None:
    for part in range(20):
        put(tree / f"day={part}/country={'abc'[part % 3]}/more.parquet", *range(100 * part, 100 * part + 7))
    pipe = intune.read_parquet(tree).map(_same, executor=executor).shuffle(rows=40, seed=3).batch(8)
    with pipe.loader(memory="4GiB") as loader:
        whole = [block.to_pylist() for block in loader]
        state = None
        for number, _ in enumerate(loader):
            if number == 4:
                state = loader.state_dict()
                break
    with pipe.loader(memory="4GiB") as loader:
        first = [block.to_pylist() for block in loader]
    assert first == whole
    found = sorted((row["x"], row["day"], row["country"]) for batch in whole for row in batch if row["x"] >= 100)
    assert found == [(100 * part + i, part, "abc"[part % 3]) for part in range(1, 20) for i in range(7)]
    (tree / "day=12/country=a").rename(tree / "day=12/country=zz")
    with intune.read_parquet(tree).map(_same).shuffle(40, seed=3).batch(8).loader(memory="4GiB") as loader:
        assert state is not None
        with pytest.raises(StateError, match="files"):
            loader.load_state_dict(state)


def _same(block: pa.RecordBatch) -> pa.RecordBatch:
    return block


def test_a_copy_in_another_process_knows_them(tree: Path) -> None:
    source = ParquetSource(tree)
    assert rows(pickle.loads(pickle.dumps(source))) == rows(source)


def test_many_folders_are_read_once_each(tmp_path: Path) -> None:
    for part in range(120):
        put(tmp_path / f"part={part}" / "a.parquet", part)
        put(tmp_path / f"part={part}" / "b.parquet", part)
    found = rows(ParquetSource(tmp_path))
    assert len(found) == 240
    assert all(row["x"] == row["part"] for row in found)
    assert re.fullmatch(r".*part=0/a\.parquet, row group 0", ParquetSource(tmp_path).describe(0))
