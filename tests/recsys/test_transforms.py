"""Counts, categories and labels of Criteo blocks, turned into arrays."""

import math
import pickle
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune import PipelineError, SourceError
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, criteo_schema
from intune.recsys.transforms import CriteoTransform, clamp_log1p, fill_missing, table_index

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def block(rows: int = 3, **columns: Any) -> pa.RecordBatch:
    """A block of Criteo columns, zeros but for the given ones."""
    arrays = [
        columns[field.name] if field.name in columns else pa.array([0] * rows, field.type) for field in criteo_schema()
    ]
    return pa.RecordBatch.from_arrays(arrays, names=criteo_schema().names)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.float64()])
def test_counts_are_clamped_and_their_logarithm_taken(kind: pa.DataType) -> None:
    counts = pa.array([-3, -2, -1, 0, 1, 2147483647, None], kind)
    dense = CriteoTransform()(block(7, I4=counts))["dense"]
    assert dense.dtype == np.float32
    np.testing.assert_allclose(dense[:, 3], [0, 0, 0, 0, 0.693147, 21.487562, 0], rtol=0, atol=1e-6)
    assert not dense[:, [j for j in range(13) if j != 3]].any()


@given(st.lists(st.none() | INT32, min_size=1, max_size=50), st.integers(0, 100))
def test_dense_values_of_any_int32_are_finite_and_right(counts: list[int | None], missing_count: int) -> None:
    transform = CriteoTransform(missing_count=missing_count)
    dense = transform(block(len(counts), I13=pa.array(counts, pa.int32())))["dense"][:, 12]
    expected = [math.log1p(max(missing_count if count is None else count, 0)) for count in counts]
    np.testing.assert_allclose(dense, expected, rtol=2e-7, atol=1e-7)


def test_clamp_log1p_works_in_place_and_keeps_nan() -> None:
    counts = np.array([[np.nan, -np.inf], [np.inf, 3]], np.float32)
    result = clamp_log1p(counts)
    assert result is counts
    np.testing.assert_allclose(result, [[np.nan, 0], [np.inf, math.log(4)]], rtol=1e-6)


@given(st.lists(st.none() | INT64, max_size=50), st.integers(2, 2**40), st.integers(0, 9), st.integers(0, 9))
def test_a_category_maps_into_its_table_whatever_it_is(
    categories: list[int | None], rows: int, before: int, after: int
) -> None:
    # A slice has its offset inside the buffers, for values and for the bits that say what is missing.
    column = pa.array([None] * before + categories + [7] * after, pa.int64()).slice(before, len(categories))
    index = table_index(column, rows)
    assert index.dtype == np.int64
    assert index.tolist() == [0 if category is None else 1 + category % (rows - 1) for category in categories]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_every_integer_that_fits_is_a_category(dtype: type) -> None:
    values = np.array([0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    expected = [1 + int(value) % 999 for value in values]
    assert table_index(values, 1000).tolist() == expected
    assert table_index(pa.array(values), 1000).tolist() == expected


@pytest.mark.parametrize(
    "column",
    [
        np.array([2**63], np.uint64),
        np.array([1.0]),
        np.array([[1]]),
        pa.array([1], pa.uint64()),
        pa.array([1.5]),
        pa.array(["0a"]),
        pa.array([True]),
        pa.array([1], pa.timestamp("s")),
        pa.nulls(1),
    ],
)
def test_what_is_no_category_is_refused(column: Any) -> None:
    with pytest.raises(TypeError, match="expected integers that fit int64, got"):
        table_index(column, 1000)


@given(st.lists(st.none() | st.floats(width=32), max_size=30), st.integers(0, 5))
def test_filling_keeps_nan_apart_from_missing(values: list[float | None], before: int) -> None:
    column = pa.array([1.0] * before + values, pa.float32()).slice(before)
    out = np.zeros((len(values), 2), np.float32)
    fill_missing(column, -7, out[:, 1])
    np.testing.assert_array_equal(out[:, 1], np.array([-7 if v is None else v for v in values], np.float32))
    assert not out[:, 0].any()


def test_the_arrays_have_their_shapes_and_places() -> None:
    columns = {name: pa.array([j, 100 + j], pa.int64()) for j, name in enumerate((*COUNT_COLUMNS, *CATEGORY_COLUMNS))}
    arrays = CriteoTransform(1000)(block(2, label=pa.array([1, 0], pa.int32()), **columns))
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "label": ((2,), "float32"),
        "dense": ((2, 13), "float32"),
        "sparse": ((2, 26), "int64"),
    }
    assert arrays["label"].tolist() == [1, 0]
    np.testing.assert_allclose(arrays["dense"], np.log1p([range(13), range(100, 113)]), rtol=1e-6)
    assert arrays["sparse"].tolist() == [[1 + 13 + j for j in range(26)], [1 + 113 + j for j in range(26)]]
    assert all(array.flags.c_contiguous and array.flags.owndata for array in arrays.values())


def test_each_table_may_have_its_own_rows() -> None:
    rows = tuple(range(2, 28))
    arrays = CriteoTransform(rows)(block(1, **{name: pa.array([12345]) for name in CATEGORY_COLUMNS}))
    assert arrays["sparse"].tolist() == [[1 + 12345 % (r - 1) for r in rows]]


def test_a_dict_of_arrays_gives_the_same() -> None:
    random = np.random.default_rng(1)
    columns = {name: random.integers(0, 2**32, 5) for name in criteo_schema().names} | {
        "label": np.array([0, 1, 1, 0, 1])
    }
    of_dict = CriteoTransform()(columns)
    of_batch = CriteoTransform()(pa.RecordBatch.from_pydict(columns))
    for name in ("label", "dense", "sparse"):
        np.testing.assert_array_equal(of_dict[name], of_batch[name])


def test_a_block_without_label_gives_none() -> None:
    assert set(CriteoTransform()(block().drop_columns(["label"]))) == {"dense", "sparse"}


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (pa.array([0, 1, None], pa.int32()), "column 'label', row 2 of the block: must be 0 or 1, is missing"),
        (pa.array([0, 7, 9], pa.int32()), "column 'label', row 1 of the block: must be 0 or 1, is 7"),
        (pa.array([-1, 1, 1], pa.int8()), "row 0 of the block: must be 0 or 1, is -1"),
        (pa.array([1, math.nan, 0]), "row 1 of the block: must be 0 or 1, is nan"),
    ],
)
def test_a_label_is_0_or_1(label: pa.Array, message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        CriteoTransform()(block(label=label))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_named_with_column_and_first_row(bad: float) -> None:
    columns = {"I2": pa.array([1.0, 2.0, bad]), "I7": pa.array([None, bad, bad], pa.float64())}
    with pytest.raises(SourceError, match=re.escape(f"column 'I7', row 1 of the block: {bad} is not finite")):
        CriteoTransform()(block(**columns))
    dense = CriteoTransform(fail_on_non_finite=False)(block(**columns))["dense"]
    assert np.isfinite(dense).sum() == dense.size - 3


def test_absent_columns_are_named_and_what_is_there() -> None:
    with pytest.raises(SourceError, match=re.escape("lacks the columns ['I3', 'C26']; it has ['label', 'I1'")):
        CriteoTransform()(block().drop_columns(["I3", "C26"]))


def test_a_column_of_another_type_is_named() -> None:
    with pytest.raises(
        SourceError, match="column 'C5': expected integers that fit int64, got string; read_criteo turns"
    ):
        CriteoTransform()(block(C5=pa.array(["0a", "0b", "0c"])))
    with pytest.raises(SourceError, match="column 'I5': expected integers or floats, got string"):
        CriteoTransform()(block(I5=pa.array(["1", "2", "3"])))


@pytest.mark.parametrize("rows", [1, 0, -5, (), (100,) * 25, (100,) * 25 + (1,)])
def test_tables_need_two_rows_and_26_of_them(rows: Any) -> None:
    with pytest.raises(
        PipelineError,
        match=r"rows_per_table must be an int of at least 2, or a tuple of 26 of them; all below 2\*\*63, got",
    ):
        CriteoTransform(rows)


def test_rows_of_tables_fit_int64() -> None:
    assert CriteoTransform(2**63 - 1).table_rows == (2**63 - 1,) * 26
    with pytest.raises(PipelineError, match=r"all below 2\*\*63, got 9223372036854775808"):
        CriteoTransform(2**63)


def test_a_transform_travels_to_another_process() -> None:
    transform = CriteoTransform(77, missing_count=2.0, fail_on_non_finite=False)
    assert pickle.loads(pickle.dumps(transform)) == transform
