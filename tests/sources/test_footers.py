"""What footers say that open row groups keep, held against what Arrow's pool has."""

import gc
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intune.pipeline.footprint import footprint
from intune.sources.parquet import ParquetSource

pytestmark = pytest.mark.slow

ROWS = 50_000
SMALL = 1 << 16
"""Bytes that make no difference: a column of a handful of values."""


def kept(source: ParquetSource) -> int:
    """Arrow's memory between two blocks, less the block: the most of the first group."""
    pool = pa.default_memory_pool()
    gc.collect()
    before, found = pool.bytes_allocated(), []
    for block in source.open(0):
        found.append(pool.bytes_allocated() - before - sum(footprint(block).values()))
    return max(found[:-1])  # with the last one the file is closed


def plain(kind: str, count: int, distinct: int, rng: np.random.Generator) -> pa.Array:
    """So many values of a kind, about as many of them distinct."""
    numbers = rng.integers(0, distinct, count)
    if kind == "int64":
        return pa.array(rng.integers(0, 2**40, distinct)[numbers])
    if kind == "float":
        return pa.array(rng.random(distinct, np.float32)[numbers])
    if kind == "bool":
        return pa.array(numbers % 2 == 0)
    if kind == "date":
        return pa.array(numbers.astype(np.int32)).cast(pa.date32())
    if kind == "decimal":
        return pa.array(numbers).cast(pa.decimal128(20, 0))
    if kind == "int16":
        return pa.array((numbers % 2**15).astype(np.int16))
    words = [f"{number * 2654435761 % 2**32:x}".rjust(int(rng.integers(8, 30)), "q") for number in range(distinct)]
    return pa.array(words).take(pa.array(numbers))


def lists(values: Any, mean: int, rng: np.random.Generator, count: int = ROWS) -> pa.Array:
    """Lists of so many values on average; `values` makes them."""
    offsets = np.concatenate([[0], np.cumsum(rng.poisson(mean, count))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values(int(offsets[-1])))


def column(shape: str, kind: str, mean: int, distinct: int, rng: np.random.Generator) -> pa.Array:
    """`ROWS` rows."""

    def values(count: int) -> pa.Array:
        return plain(kind, count, distinct, rng)

    if shape == "list":
        return lists(values, mean, rng)
    if shape == "nested":
        return lists(lambda count: lists(values, mean, rng, count), 2, rng)
    if shape == "struct":
        return pa.StructArray.from_arrays([values(ROWS), lists(values, mean, rng)], ["a", "b"])
    if shape == "fixed":
        return pa.FixedSizeListArray.from_arrays(values(8 * ROWS), 8)
    if shape == "missing":
        made = values(ROWS)
        return pc.if_else(pa.array(rng.random(ROWS) < 0.3), pa.scalar(None, made.type), made)
    return values(ROWS)


@given(
    st.sampled_from(["flat", "missing", "list", "list", "nested", "struct", "fixed"]),
    st.sampled_from(["int64", "float", "bool", "date", "decimal", "int16", "text", "text"]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([100, 2000, 30_000]),
    st.sampled_from(["snappy", "zstd", "none"]),
    st.booleans(),
    st.sampled_from([4096, 16_384]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_never_much_less_than_what_arrow_holds_nor_twice_as_much(
    tmp_path: Path,
    shape: str,
    kind: str,
    mean: int,
    distinct: int,
    compression: str,
    use_dictionary: bool,
    block_rows: int,
    seed: int,
) -> None:
    file = tmp_path / "a.parquet"
    made = pa.table({"x": column(shape, kind, mean, distinct, np.random.default_rng(seed))})
    pq.write_table(made, file, row_group_size=ROWS, compression=compression, use_dictionary=use_dictionary)
    source = ParquetSource(file, block_rows=block_rows)
    measured, said = kept(source), source.kept_bytes(0)
    assert 0.9 * measured <= said <= 2 * measured + SMALL
    assert said < source.read_bound(0)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(np.arange(ROWS) % 200, pa.uint32()),
        pa.array(np.arange(ROWS) % 200, pa.timestamp("us")),
        pa.array(np.arange(ROWS) % 200, pa.time64("us")),
        pa.array([Decimal(number % 200) for number in range(ROWS)], pa.decimal128(12)),
        pa.array([b"%05d" % (number % 200) for number in range(ROWS)], pa.binary(5)),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize(
    "options", [{}, {"use_deprecated_int96_timestamps": True}, {"store_decimal_as_integer": True}], ids=str
)
def test_values_that_arrow_converts(tmp_path: Path, column: pa.Array, options: dict[str, bool]) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": column}), file, row_group_size=ROWS, use_dictionary=False, **options)
    source = ParquetSource(file, block_rows=16_384)
    measured = kept(source)
    assert 0.9 * measured <= source.kept_bytes(0) <= 1.2 * measured + SMALL


@pytest.mark.parametrize("as_written", [True, False])
@pytest.mark.parametrize("distinct", [100, 5000])
def test_columns_that_come_out_as_dictionaries(tmp_path: Path, as_written: bool, distinct: int) -> None:
    file, texts = tmp_path / "a.parquet", plain("text", ROWS, distinct, np.random.default_rng(0))
    pq.write_table(pa.table({"x": texts.dictionary_encode() if as_written else texts}), file, row_group_size=ROWS)
    chosen = [] if as_written else ["x"]
    source = ParquetSource(file, block_rows=16_384, dictionary_columns=chosen)
    assert pa.types.is_dictionary(source.schema.field("x").type)
    measured = kept(source)
    assert 0.9 * measured <= source.kept_bytes(0) <= 2 * measured + SMALL


@pytest.mark.parametrize(("options", "most"), [({}, 2.0), ({"max_rows_per_page": ROWS}, 1.1)])
def test_pages_of_writers_that_do_not_count_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], most: float
) -> None:
    """Then a page may have all that fits a MiB."""
    file = tmp_path / "a.parquet"
    numbers = np.random.default_rng(0).integers(0, 2**40, ROWS)
    pq.write_table(pa.table({"x": numbers}), file, row_group_size=ROWS, use_dictionary=False, **options)
    monkeypatch.setattr("intune.sources._footers._COUNTS_ROWS", re.compile("nobody"))
    source = ParquetSource(file, block_rows=16_384)
    measured = kept(source)
    assert 0.9 * measured <= source.kept_bytes(0) <= most * measured + SMALL
