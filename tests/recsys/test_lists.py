"""Multi-hot lists and sequences, of every list type, against plain Python."""

import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune import PipelineError, SourceError
from intune.recsys import Hash, Hex, Modulo, MultiHot, Padded, Vocabulary, list_parts, pad, padding_mask, truncate

EXACT = Modulo(2**62)  # row = 1 + id, for ids that are not negative
IDS = st.integers(0, 2**61)
LISTS = st.lists(st.none() | st.lists(st.none() | IDS, max_size=6), max_size=12)
KINDS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def encoded(row: list[int | None] | None) -> list[int]:
    return [0 if value is None else 1 + value for value in row or []]


def masked() -> pa.Array:
    """[1, 2], null, [3], with 98 and 99 under the null."""
    values, offsets = pa.array([1, 2, 98, 99, 3]), pa.array([0, 2, 4, 5], pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))


@given(LISTS, st.sampled_from(KINDS), st.integers(0, 2))
def test_lists_of_every_kind_become_values_and_offsets(rows: list[Any], kind: Any, before: int) -> None:
    column = pa.array([[5, None]] * before + rows + [[9]], kind(pa.int64())).slice(before, len(rows))
    values, offsets = list_parts(column)
    assert offsets.dtype == np.int64
    assert [values[start:end].to_pylist() for start, end in pairwise(offsets)] == [row or [] for row in rows]
    out = MultiHot("ids", EXACT)(batch(ids=column))["ids"]
    assert out.type == pa.large_list(pa.int64())
    assert out.to_pylist() == [encoded(row) for row in rows]


@given(st.lists(st.none() | st.lists(st.none() | IDS, min_size=2, max_size=2), max_size=9), st.integers(0, 2))
def test_lists_of_fixed_size_too(rows: list[Any], before: int) -> None:
    column = pa.array([None, [3, 4]] * before + rows, pa.list_(pa.int64(), 2)).slice(2 * before)
    assert MultiHot("ids", EXACT)(batch(ids=column))["ids"].to_pylist() == [encoded(row) for row in rows]


def test_bytes_under_a_null_list_never_show() -> None:
    values, offsets = list_parts(masked())
    assert values.to_pylist() == [1, 2, 3]
    assert offsets.tolist() == [0, 2, 2, 3]
    assert MultiHot("ids", EXACT)(batch(ids=masked()))["ids"].to_pylist() == [[2, 3], [], [4]]
    padded = Padded("ids", EXACT, 2)(batch(ids=masked()))
    assert padded["ids"].tolist() == [[2, 3], [0, 0], [4, 0]]
    assert padded["ids_lengths"].tolist() == [2, 0, 1]
    assert padding_mask(padded["ids_lengths"], 2).tolist() == [[True, True], [False, False], [True, False]]


@pytest.mark.parametrize(
    "column", [pa.array([[], None, []], pa.list_(pa.int32())), pa.nulls(3), pa.array([[], [], None])]
)
def test_a_feature_that_is_empty_in_all_rows(column: pa.Array) -> None:
    out = MultiHot("ids", EXACT, weights="w")(batch(ids=column, w=pa.nulls(3)))
    assert out["ids"].flatten().to_numpy().dtype == np.int64
    assert out["ids_weights"].type == pa.large_list(pa.float32())
    assert out["ids"].to_pylist() == out["ids_weights"].to_pylist() == [[], [], []]
    padded = Padded("ids", EXACT, 3)(batch(ids=column))
    assert padded["ids"].tolist() == [[0] * 3] * 3
    assert padded["ids_lengths"].tolist() == [0, 0, 0]


def test_lists_of_nothing_but_nulls_and_of_dictionaries() -> None:
    assert MultiHot("ids", EXACT)(batch(ids=pa.array([[None, None], []])))["ids"].to_pylist() == [[0, 0], []]
    words = pa.array(["b", None, "a", "b"]).dictionary_encode()
    column = pa.ListArray.from_arrays(pa.array([0, 3, 3, 4], pa.int32()), words)
    feature = MultiHot("ids", Vocabulary(["a", "b"]))
    assert feature.problems(batch(ids=column).schema) == []
    assert feature(batch(ids=column))["ids"].to_pylist() == [[3, 0, 2], [], [3]]


@given(LISTS, st.integers(1, 4), st.sampled_from(["first", "last"]))
def test_rows_are_cut_and_padded(rows: list[Any], most: int, keep: Any) -> None:
    column = batch(ids=pa.array(rows, pa.list_(pa.int64())))
    cut = [encoded(row)[:most] if keep == "first" else encoded(row)[-most:] for row in rows]
    assert MultiHot("ids", EXACT, most=most, keep=keep)(column)["ids"].to_pylist() == cut
    padded = Padded("ids", EXACT, most, keep, name="seen")(column)
    assert padded["seen"].shape == (len(rows), most)
    assert padded["seen"].dtype == np.int64
    assert padded["seen"].tolist() == [row + [0] * (most - len(row)) for row in cut]
    assert padded["seen_lengths"].tolist() == [len(row) for row in cut]


@given(LISTS, st.integers(1, 3), st.sampled_from(["first", "last"]))
def test_weights_go_with_their_values(rows: list[Any], most: int, keep: Any) -> None:
    weights = [None if row is None else [i + j / 8 for j in range(len(row))] for i, row in enumerate(rows)]
    columns = batch(ids=pa.array(rows, pa.list_(pa.int64())), w=pa.array(weights, pa.large_list(pa.float64())))
    out = MultiHot("ids", EXACT, "w", most, keep)(columns)
    part = slice(None, most) if keep == "first" else slice(-most, None)
    assert out["ids"].to_pylist() == [encoded(row)[part] for row in rows]
    assert out["ids_weights"].to_pylist() == [(row or [])[part] for row in weights]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0], None, [1.0]], "column 'w': row 0 of the block: 1 weight for 2 values"),
        ([[1.0, 2.0], None, [1.0, 2.0]], "column 'w': row 2 of the block: 2 weights for 1 value"),
        ([[1.0, None], None, [1.0]], "column 'w': row 0 of the block: weight None is missing or not finite"),
        ([[1.0, 1.0], [], [float("nan")]], "column 'w': row 2 of the block: weight nan is missing or not finite"),
        ([[1.0, 1e300], [], [1.0]], "column 'w': row 0 of the block: weight 1e+300 is missing or not finite"),
        ([[None, None], [], [None]], "column 'w': row 0 of the block: weight None is missing or not finite"),
    ],
)
def test_weights_must_be_there_and_finite(weights: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        MultiHot("ids", EXACT, weights="w")(batch(ids=masked(), w=pa.array(weights)))


def test_an_error_of_a_value_names_column_and_row() -> None:
    strict = Vocabulary([1, 2], unknown_rows=0)
    for feature in (MultiHot("ids", strict), Padded("ids", strict, 2)):
        with pytest.raises(
            SourceError, match=r"^column 'ids': row 2 of the block: 3 is not in the vocabulary of 2 keys$"
        ):
            feature(batch(ids=masked()))
    assert MultiHot("ids", strict, most=2)(batch(ids=pa.array([[2, 1, 77]])))["ids"].to_pylist() == [[2, 1]]


@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 12), max_size=6), max_size=30),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(["first", "last"]),
    st.booleans(),
)
def test_the_row_is_that_of_the_first_list_with_a_bad_value(
    rows: list[Any], most: int | None, keep: Any, dictionary: bool
) -> None:
    strict = Vocabulary(list(range(10)), unknown_rows=0)
    column = pa.array(rows, pa.list_(pa.int64()))
    if dictionary:
        values, offsets = list_parts(column)
        column = pa.LargeListArray.from_arrays(pa.array(offsets), values.dictionary_encode())
    part = slice(None) if most is None else slice(None, most) if keep == "first" else slice(-most, None)
    bad = [(i, value) for i, row in enumerate(rows) for value in (row or [])[part] if value is not None and value > 9]
    feature = MultiHot("ids", strict, most=most, keep=keep)
    features = [feature] if most is None else [feature, Padded("ids", strict, most, keep)]
    for one in features:
        if not bad:
            one(batch(ids=column))
            continue
        with pytest.raises(SourceError) as caught:
            one(batch(ids=column))
        row, value = bad[0]
        assert str(caught.value).startswith(f"column 'ids': row {row} of the block: {value} is not in the vocabulary")


def test_words_that_are_not_hexadecimal_in_a_list() -> None:
    column = pa.array([["ff", None], [], None, ["1", "xyz", "0"], ["zz"]])
    for feature in (MultiHot("ids", Hex(EXACT)), Padded("ids", Hex(EXACT), 3)):
        with pytest.raises(SourceError, match=r"^column 'ids': row 3 of the block: 'xyz' is not a hexadecimal number"):
            feature(batch(ids=column))


def test_an_encoder_of_ones_own_that_counts_nothing() -> None:
    class Even(Modulo):
        def encode(self, column: Any) -> Any:
            if any(value is not None and value % 2 for value in column.to_pylist()):
                raise ValueError("odd numbers are not taken")
            return super().encode(column)

    with pytest.raises(SourceError, match=r"^column 'ids': row 4 of the block: odd numbers are not taken$"):
        MultiHot("ids", Even(100))(batch(ids=pa.array([[2, 4], [], [8], None, [6, 7, 9], [1]])))


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.list_(pa.list_(pa.int64())), pa.list_(pa.float32()), pa.map_(pa.int64(), pa.int64())]
)
def test_only_lists_of_one_level_are_taken(kind: pa.DataType) -> None:
    schema = pa.schema([("ids", kind)])
    values = pa.array([[None]] if pa.types.is_list(kind) else [None], kind)
    for feature in (MultiHot("ids", Hash(10)), Padded("ids", Hash(10), 3)):
        assert feature.problems(schema) == [
            f"column 'ids' is {kind}; allowed are lists (one level deep) of integers, dates, times, strings or bytes"
        ]
        with pytest.raises(SourceError, match="column 'ids': expected"):
            feature(batch(ids=values))


def test_cutting_and_padding_arrays_by_hand() -> None:
    values, offsets = np.array([1.5, 2, 3, 4]), np.array([0, 3, 3, 4])
    kept, places = truncate(values, offsets, 2, "last")
    assert (kept.tolist(), places.tolist()) == ([2, 3, 4], [0, 2, 2, 3])
    assert truncate(values, offsets, 3)[0] is values
    padded, lengths = pad(kept, places, 3, fill=-1)
    assert padded.tolist() == [[2, 3, -1], [-1, -1, -1], [4, -1, -1]]
    assert lengths.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="row 0 has 3 values, more than the length 2: truncate first"):
        pad(values, offsets, 2)
    with pytest.raises(TypeError, match="expected lists, got int64"):
        list_parts(pa.array([1]))


def test_contradictions_are_refused() -> None:
    with pytest.raises(PipelineError, match="most must be an int of at least 1, got 0"):
        MultiHot("ids", EXACT, most=0)
    with pytest.raises(PipelineError, match="length must be an int of at least 1, got 0"):
        Padded("ids", EXACT, 0)
    for make in (lambda: MultiHot("ids", EXACT, keep="middle"), lambda: Padded("ids", EXACT, 3, keep="all")):  # type: ignore[arg-type]
        with pytest.raises(PipelineError, match="keep must be 'first' or 'last', got"):
            make()


def test_features_of_lists_travel() -> None:
    for feature in (MultiHot("ids", Vocabulary(["a"]), "w", 3, "last", "n"), Padded("ids", Hash(5), 3)):
        assert pickle.loads(pickle.dumps(feature)) == feature


@pytest.mark.parametrize(
    ("name", "column", "feature", "expected"),
    [
        ("list_columns", "int64_list", MultiHot("c", EXACT), [[2, 3, 4], [0, 2], [5]]),
        ("list_columns", "utf8_list", MultiHot("c", Vocabulary(["efg", "abc"])), [[3, 2, 1], [], [2, 0, 1, 1]]),
        ("null_list", "emptylist", MultiHot("c", Hash(10)), [[]]),
        ("repeated_primitive_no_list", "Int32_list", MultiHot("c", EXACT, most=2), [[1, 2], [], [5], [6, 7]]),
        ("nullable.impala", "int_array", MultiHot("c", EXACT), None),
    ],
)
def test_lists_of_real_files(shared_data: Path, name: str, column: str, feature: MultiHot, expected: Any) -> None:
    table = pq.read_table(shared_data / "parquet_testing" / f"{name}.parquet", columns=[column], use_threads=False)
    (block,) = table.rename_columns(["c"]).combine_chunks().to_batches()
    assert feature.problems(block.schema) == []
    if expected is None:
        expected = [encoded(row) for row in block["c"].to_pylist()]
    assert feature(block)["c"].to_pylist() == expected


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("nested_lists.snappy", "a"),
        ("old_list_structure", "a"),
        ("repeated_no_annotation", "phoneNumbers"),
        ("nullable.impala", "int_array_Array"),
        ("nullable.impala", "int_map"),
        ("nullable.impala", "nested_struct"),
    ],
)
def test_nests_of_real_files_are_refused_by_their_schema(shared_data: Path, name: str, column: str) -> None:
    schema = pq.read_schema(shared_data / "parquet_testing" / f"{name}.parquet")
    (problem,) = MultiHot(column, Hash(10)).problems(schema)
    assert problem.startswith(f"column {column!r} is {schema.field(column).type}; allowed are lists (one level deep)")
