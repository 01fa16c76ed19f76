"""Blocks cut, picked and put together: always the rows that a plain list would give."""

import math
from datetime import UTC
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.blocks import (
    Block,
    as_block,
    block_bytes,
    block_concat,
    block_copy,
    block_mask,
    block_rows,
    block_slice,
    block_take,
    block_to_rows,
    gather_arrays,
    rows_to_block,
    table_to_batch,
)
from intune.pipeline.footprint import footprint

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("lists", pa.list_(pa.float32())),
        ("pair", pa.list_(pa.int16(), 2)),
        ("word", pa.dictionary(pa.int8(), pa.string())),
        ("record", pa.struct([("x", pa.int8()), ("y", pa.large_string())])),
        ("when", pa.timestamp("us", "UTC")),
        ("yes", pa.bool_()),
    ]
)

numbers = st.integers(-(2**15), 2**15 - 1)
rows_of_arrow = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.none() | numbers,
            "text": st.none() | st.text(max_size=4),
            "lists": st.none() | st.lists(st.none() | st.floats(width=32, allow_nan=False), max_size=3),
            "pair": st.none() | st.lists(numbers, min_size=2, max_size=2),
            "word": st.none() | st.sampled_from(["a", "b", "", "long word"]),
            "record": st.none() | st.fixed_dictionaries({"x": st.integers(-9, 9), "y": st.text(max_size=3)}),
            "when": st.none() | st.datetimes(timezones=st.just(UTC)),
            "yes": st.none() | st.booleans(),
        }
    ),
    max_size=5,
)
rows_of_arrays = st.lists(
    st.tuples(numbers, st.lists(st.floats(width=32), min_size=6, max_size=6), st.text("abc", min_size=1, max_size=4)),
    max_size=5,
)

Row = dict[str, Any]


def arrow(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def arrays(rows: list[tuple[int, list[float], str]]) -> dict[str, np.ndarray]:
    return {
        "id": np.array([row[0] for row in rows], np.int32),
        "matrix": np.array([row[1] for row in rows], np.float32).reshape(len(rows), 2, 3),
        "text": np.array([row[2] for row in rows], "U4" if not rows else None),
        "object": np.array([row[2] for row in rows], object),
    }


blocks = st.one_of(
    st.lists(rows_of_arrow.map(arrow), min_size=1, max_size=4),
    st.lists(rows_of_arrays.map(arrays), min_size=1, max_size=4),
)


def plain(block: Block) -> list[Row]:
    """Rows as Python values, for comparison."""
    if isinstance(block, dict):
        return [
            dict(zip(block, map(repr, row), strict=True))
            for row in zip(*map(np.ndarray.tolist, block.values()), strict=True)
        ]
    return block.to_pylist()  # type: ignore[no-any-return]


def check(block: Block, expected: list[Row], like: Block) -> None:
    assert block_rows(block) == len(expected)
    assert plain(block) == expected
    if isinstance(like, dict):
        assert isinstance(block, dict)
        assert [(column.shape[1:], column.dtype.kind) for column in block.values()] == [
            (column.shape[1:], column.dtype.kind) for column in like.values()
        ]
    else:
        assert block.schema == like.schema
        block.validate(full=True)


@pytest.mark.slow
def gathered(pieces: list[Any], wanted: Any) -> Any:
    """Rows by their position in the whole, through `gather_arrays`."""
    rows = [block_rows(piece) for piece in pieces]
    piece_of = np.repeat(np.arange(len(pieces), dtype=np.uint16), rows)
    local = np.concatenate([np.arange(count) for count in rows])
    chosen = np.array(wanted, np.int64)
    return gather_arrays(pieces, piece_of[chosen], local[chosen])


class TestRows:
    @given(blocks, st.data())
    def test_slice(self, several: list[Block], data: st.DataObject) -> None:
        block = several[0]
        start = data.draw(st.integers(0, block_rows(block)))
        stop = data.draw(st.integers(start, block_rows(block)))
        part = block_slice(block, start, stop)
        check(part, plain(block)[start:stop], block)
        if not isinstance(block, dict):
            assert footprint(part) == footprint(block)

    @given(blocks, st.data())
    def test_take_and_copy(self, several: list[Block], data: st.DataObject) -> None:
        block = several[0]
        rows = plain(block)
        wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
        check(block_take(block, np.array(wanted, np.int64)), [rows[place] for place in wanted], block)
        check(block_copy(block), rows, block)

    @given(blocks, st.data())
    def test_mask(self, several: list[Block], data: st.DataObject) -> None:
        block = several[0]
        rows = plain(block)
        keep = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        picked = block_mask(block, np.array(keep, np.bool_))
        check(picked, [row for row, kept in zip(rows, keep, strict=True) if kept], block)
        assert not all(keep) or picked is block

    @given(blocks)
    def test_concat(self, several: list[Block]) -> None:
        check(block_concat(several), [row for block in several for row in plain(block)], several[0])

    @given(blocks, st.data())
    def test_gather(self, several: list[Block], data: st.DataObject) -> None:
        if not isinstance(several[0], dict):
            return
        rows = [row for block in several for row in plain(block)]
        wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
        check(gathered(several, wanted), [rows[place] for place in wanted], several[0])

    @given(blocks)
    def test_to_rows_and_back(self, several: list[Block]) -> None:
        block = several[0]
        rows = block_to_rows(block)
        assert len(rows) == block_rows(block)
        if rows:
            check(rows_to_block(rows, block), plain(block), block)

    def test_copies_let_go_of_what_they_came_from(self) -> None:
        for block in (pa.RecordBatch.from_pydict({"a": np.arange(10_000)}), {"a": np.arange(10_000)}):
            part = block_slice(block, 5, 10)  # type: ignore[arg-type]
            assert block_bytes(part) == 40
            assert sum(footprint(part).values()) >= 80_000
            for copied in (block_copy(part), block_take(part, np.array([4, 0]))):
                assert sum(footprint(copied).values()) < 1000

    def test_many_rows_from_many_pieces(self) -> None:
        rng = np.random.default_rng(0)
        pieces: list[Block] = [{"x": rng.integers(0, 9, (n, 3)), "i": rng.random(n)} for n in rng.integers(0, 50, 200)]
        whole = block_concat(pieces)
        assert isinstance(whole, dict)
        wanted = rng.permutation(block_rows(whole))
        got = gathered(pieces, wanted)
        for name in whole:
            np.testing.assert_array_equal(got[name], whole[name][wanted])


class TestDifferentBlocks:
    ONE: ClassVar[dict[str, np.ndarray]] = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int64)}

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            ({"a": ONE["a"]}, r"'b' is int64\[n\] and missing"),
            ({**ONE, "c": np.zeros(2)}, r"'c' is missing and float64\[n\]"),
            ({**ONE, "b": np.zeros(2, np.int32)}, r"'b' is int64\[n\] and int32\[n\]"),
            ({**ONE, "b": np.zeros(2)}, r"'b' is int64\[n\] and float64\[n\]"),
            ({**ONE, "b": np.array(["x", "y"])}, r"'b' is int64\[n\] and <U1\[n\]"),
            ({**ONE, "a": np.zeros((2, 4), np.float32)}, r"'a' is float32\[n, 3\] and float32\[n, 4\]"),
            (pa.RecordBatch.from_pydict({"a": [1, 2]}), r"a dict and a RecordBatch"),
        ],
    )
    def test_of_arrays_are_named(self, other: Any, says: str) -> None:
        for pair in ([self.ONE, other], [self.ONE, self.ONE, other]):
            with pytest.raises(ValueError, match=says):
                block_concat(pair)
        with pytest.raises(ValueError, match=says):
            gathered([self.ONE, other], [0, 3])
        with pytest.raises(ValueError, match="blocks to be put together differ"):
            gathered([other, self.ONE], [3])

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (pa.schema([("a", pa.int64())]), r"'b' is string and missing"),
            (pa.schema([("a", pa.int32()), ("b", pa.string())]), r"'a' is int64 and int32"),
            (
                pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())]),
                r"'a' is int64 and int64 not null",
            ),
        ],
    )
    def test_of_arrow_are_named(self, other: pa.Schema, says: str) -> None:
        one = pa.RecordBatch.from_pylist([{"a": 1, "b": "x"}], pa.schema([("a", pa.int64()), ("b", pa.string())]))
        two = pa.RecordBatch.from_pylist([{"a": 1, "b": "x"}], other)
        with pytest.raises(ValueError, match=says):
            block_concat([one, two])

    def test_only_a_few_columns_are_shown(self) -> None:
        many = {f"c{i}": np.zeros(1) for i in range(100)}
        with pytest.raises(ValueError, match=r"'c4' is float64\[n\] and missing and 94 more;"):
            block_concat([{**many, "x": np.zeros(1)}, {"x": np.zeros(1), "c99": np.zeros(1)}])

    def test_columns_may_stand_in_another_order_and_texts_be_longer(self) -> None:
        one = {"a": np.array(["x"]), "b": np.array([1])}
        other = {"b": np.array([2]), "a": np.array(["long"])}
        for block in (block_concat([one, other]), gathered([one, other], [0, 1])):
            assert isinstance(block, dict)
            assert {name: column.tolist() for name, column in block.items()} == {"a": ["x", "long"], "b": [1, 2]}

    def test_metadata_of_a_schema_makes_no_difference(self) -> None:
        one = pa.RecordBatch.from_pydict({"a": [1]})
        other = one.replace_schema_metadata({"written": "yesterday"})
        assert block_concat([one, other]).to_pydict() == {"a": [1, 1]}

    def test_dictionaries_may_differ(self) -> None:
        one, other = (pa.RecordBatch.from_pydict({"a": pa.array(words).dictionary_encode()}) for words in ("xy", "zx"))
        assert block_concat([one, other]).to_pydict() == {"a": ["x", "y", "z", "x"]}


class TestAsBlock:
    def test_takes_batches_tables_and_dicts(self) -> None:
        batch = pa.RecordBatch.from_pydict({"a": [1, 2]})
        assert as_block(batch) is batch
        assert as_block(pa.table({"a": [1, 2]})).equals(batch)
        block = as_block({"a": [1, 2], "b": np.zeros((2, 3))})
        assert isinstance(block, dict)
        assert [column.shape for column in block.values()] == [(2,), (2, 3)]

    def test_takes_0_rows(self) -> None:
        assert block_rows(as_block({"a": np.zeros((0, 3))})) == 0
        assert block_rows(as_block(SCHEMA.empty_table())) == 0
        assert as_block(SCHEMA.empty_table()).schema == SCHEMA  # type: ignore[union-attr]

    @pytest.mark.parametrize("value", [5, [1, 2], "text", np.zeros(3), pa.array([1]), None])
    def test_refuses_what_is_no_block(self, value: Any) -> None:
        with pytest.raises(TypeError, match=r"expected a block \(pyarrow.RecordBatch or dict of arrays\), got"):
            as_block(value)

    @pytest.mark.parametrize("value", [{"a": [1], "b": [1, 2]}, {"a": np.float32(1), "b": [1]}, {"a": 5}])
    def test_refuses_arrays_of_different_length(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"same first length, got \{'a'"):
            as_block(value)

    def test_refuses_no_columns(self) -> None:
        with pytest.raises(ValueError, match="at least one column"):
            as_block({})

    @pytest.mark.parametrize("chunks", [[], [[]], [[1]], [[1], [], [2, 3]]])
    def test_a_table_becomes_one_batch(self, chunks: list[list[int]]) -> None:
        table = pa.table({"a": pa.chunked_array(chunks, pa.int64())})
        batch = table_to_batch(table)
        assert batch.schema == table.schema
        assert batch.to_pydict() == {"a": [value for chunk in chunks for value in chunk]}


class TestRowsToBlock:
    ARROW = pa.RecordBatch.from_pydict({"a": pa.array([1], pa.int16()), "b": ["x"]})

    def test_columns_keep_their_type_and_new_ones_get_one(self) -> None:
        block = rows_to_block([{"a": 5, "c": 0.5}, {"c": None, "a": None}], self.ARROW)
        assert block.schema == pa.schema([("a", pa.int16()), ("c", pa.float64())])  # type: ignore[union-attr]
        assert block.to_pydict() == {"a": [5, None], "c": [0.5, None]}  # type: ignore[union-attr]

    @pytest.mark.parametrize("value", [0.5, "x", 10**5, [1]])
    def test_a_value_that_does_not_fit_its_column_is_named(self, value: Any) -> None:
        with pytest.raises(ValueError, match="column 'a' keeps its type int16: give new values another name"):
            rows_to_block([{"a": 1}, {"a": value}], self.ARROW)

    def test_fractions_are_not_cut_off_in_lists_either(self) -> None:
        like = pa.RecordBatch.from_pydict({"a": [[1], [2]]})
        assert rows_to_block([{"a": [3, 4]}, {"a": None}], like).to_pydict() == {"a": [[3, 4], None]}  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"'a' keeps its type list<.*got list<item: double>"):
            rows_to_block([{"a": [1, 2.5]}], like)

    def test_a_new_column_needs_one_type(self) -> None:
        with pytest.raises(ValueError, match="'c' needs one type"):
            rows_to_block([{"c": 1}, {"c": "x"}], self.ARROW)

    @pytest.mark.parametrize("like", [ARROW, {"a": np.zeros(1)}])
    def test_rows_that_differ_are_named(self, like: Any) -> None:
        with pytest.raises(ValueError, match=r"same columns, got \['a'\] and \['a', 'b'\]"):
            rows_to_block([{"a": 1}, {"a": 1, "b": 2}], like)

    def test_objects_stay_objects(self) -> None:
        like = {"a": np.array([None, None], object)}
        block = rows_to_block([{"a": [1, 2]}, {"a": [3, 4]}], like)
        assert isinstance(block, dict)
        assert (block["a"].dtype, block["a"].tolist()) == (np.dtype(object), [[1, 2], [3, 4]])

    def test_arrays_of_rows_are_stacked(self) -> None:
        block = rows_to_block([{"a": np.ones(3)}, {"a": np.zeros(3)}], {"a": np.zeros((2, 3))})
        assert isinstance(block, dict)
        assert block["a"].shape == (2, 3)


def test_bytes_are_those_of_the_rows() -> None:
    block = {"a": np.zeros((10, 3), np.float32), "b": np.zeros(10, np.int8)}
    assert block_bytes(block) == 130
    assert block_bytes(block_slice(block, 2, 4)) == 26
    batch = pa.RecordBatch.from_pydict({"a": np.arange(100, dtype=np.int32)})
    assert block_bytes(batch.slice(10, 5)) == 20
    assert math.isclose(block_bytes(batch), 400)
