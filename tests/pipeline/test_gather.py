"""What workers put together for batch and shuffle."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.blocks import Block, block_rows, block_to_rows
from intune.pipeline.footprint import footprint
from intune.pipeline.gather import Gather, cut, put_together, source_rows, stack
from intune.pipeline.order import generator
from intune.pipeline.sequence import BatchSequencer, Order, Piece, Sequencer, ShuffleSequencer


@dataclass
class Token:
    """What a gather sees of an item."""

    payload: Any
    rows: int
    source_rows: float
    first: int = 0


def token(rows: list[int], kind: str, each: float = 1.0) -> Token:
    payload: Any = rows
    if kind == "arrays":
        payload = {"id": np.array(rows, np.int64), "pair": np.array([[r, -r] for r in rows]).reshape(len(rows), 2)}
    elif kind == "arrow":
        payload = pa.RecordBatch.from_pydict({"id": pa.array(rows, pa.int64()), "text": [f"row {r}" for r in rows]})
    return Token(payload, len(rows), each * len(rows), rows[0])


def ids(payload: Any, kind: str) -> list[int]:
    if kind == "samples":
        return list(payload)
    rows = block_to_rows(payload)
    for row in rows:
        if kind == "arrays":
            assert row["pair"].tolist() == [row["id"], -row["id"]]
        else:
            assert row["text"] == f"row {row['id']}"
    return [int(row["id"]) for row in rows]


def orders(sequencer: Sequencer, counts: list[int], kind: str) -> list[Order]:
    start, found = 0, list[Order]()
    for count in counts:
        found += sequencer.push(token(list(range(start, start + count)), kind), count)
        start += count
    return found + sequencer.finish()


kinds = st.sampled_from(["samples", "arrays", "arrow"])
counts = st.lists(st.integers(1, 12), min_size=1, max_size=10)


class TestOrders:
    @given(kinds, counts, st.integers(1, 20))
    def test_of_a_batch(self, kind: str, counts: list[int], size: int) -> None:
        flow: Any = "sample" if kind == "samples" else "block"
        gather = Gather(flow, size, False, None)
        got = [ids(gather(order), kind) for order in orders(BatchSequencer(size), counts, kind)]
        total = sum(counts)
        assert got == [list(range(start, min(total, start + size))) for start in range(0, total, size)]

    @given(kinds, counts, st.integers(1, 40), st.integers(1, 20), st.randoms(use_true_random=False))
    def test_of_a_shuffle_in_any_order(self, kind: str, counts: list[int], size: int, emit: int, rng: Any) -> None:
        flow: Any = "sample" if kind == "samples" else "block"
        gather, key = Gather(flow, emit, False, None), (1, 2)
        found = orders(ShuffleSequencer(size, emit, key), counts, kind)
        for order in found:
            gather.prepare(order)
        rng.shuffle(found)
        for order in found:
            window = order.window
            assert window is not None
            start = window.pieces[0].token.first + window.pieces[0].start
            mixed = start + generator(*key, window.number).permutation(window.rows)
            assert ids(gather(order), kind) == mixed[order.start : order.start + order.rows].tolist()

    @pytest.mark.parametrize("emit", [10, 5000])
    @pytest.mark.parametrize("kind", ["arrays", "arrow"])
    def test_of_a_shuffle_with_few_or_many_rows_a_piece(self, kind: str, emit: int) -> None:
        gather = Gather("block", emit, False, None)
        found = orders(ShuffleSequencer(5000, emit, (3,)), [1000] * 12, kind)
        for order in found:
            gather.prepare(order)
        got = [row for order in found for row in ids(gather(order), kind)]
        assert sorted(got) == list(range(12_000))

    def test_prepare_keeps_what_a_window_has(self) -> None:
        gather = Gather("sample", 1, False, None)
        one, other = ShuffleSequencer(32, 1, (1,)).push(token([5, 6], "samples"), 2)
        gather.prepare(one)
        assert one.window is not None
        data = one.window.data
        gather.prepare(other)
        assert one.window.data is data

    @given(counts, st.integers(1, 20))
    def test_stand_for_all_source_rows_once(self, counts: list[int], size: int) -> None:
        tokens = [token([0] * count, "samples", each=2.5) for count in counts]
        sequencer = BatchSequencer(size)
        found = [order for each in tokens for order in sequencer.push(each, each.rows)] + sequencer.finish()
        assert sum(source_rows(order.pieces) for order in found) == pytest.approx(2.5 * sum(counts))


class TestMemory:
    def test_a_window_is_held_once(self) -> None:
        """Its pieces are put together; what they were made of goes, but for blocks that the next window needs too."""
        sequencer, gather, rows = ShuffleSequencer(100_000, 5000, (1,)), Gather("block", 5000, False, None), 3000
        before = pa.total_allocated_bytes()
        tokens = [token(list(range(n * rows, (n + 1) * rows)), "arrow") for n in range(3)]
        found = [order for each in tokens for order in sequencer.push(each, rows)]
        held = pa.total_allocated_bytes() - before
        for order in found:
            gather.prepare(order)
            gather(order)
            assert order.window is not None
            for each in order.window.give_back(order.window.data.taken().let_go):
                each.payload = None
        assert {order.window.rows for order in found if order.window is not None} == {6250}
        assert [each.payload is None for each in tokens] == [True, True, False]
        assert pa.total_allocated_bytes() - before <= held * 1.1

    @pytest.mark.parametrize("kind", ["arrays", "arrow"])
    def test_a_small_batch_does_not_keep_a_large_block_alive(self, kind: str) -> None:
        whole = token(list(range(10_000)), kind)
        small, large = (put_together(Order(0, stop, (Piece(whole, 0, stop),)), "block") for stop in (10, 9000))
        assert sum(footprint(small).values()) < 3000
        assert (
            footprint(large[next(iter(large))] if kind == "arrays" else large).items()
            <= footprint(whole.payload).items()
        )

    def test_a_whole_piece_is_the_block_itself(self) -> None:
        for kind in ("arrays", "arrow"):
            whole = token([1, 2, 3], kind)
            assert cut(Piece(whole, 0, 3), "block") is whole.payload
            part = cut(Piece(whole, 1, 3), "block")
            assert block_rows(part) == 2


Pair = namedtuple("Pair", ["x", "y"])


class TestStack:
    @pytest.mark.parametrize(
        ("samples", "expected"),
        [
            ([1, 2, 3], np.array([1, 2, 3])),
            ([1.5, 2], np.array([1.5, 2.0])),
            ([True, False], np.array([True, False])),
            ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
            (
                [np.zeros((2, 3), np.int8), np.ones((2, 3), np.int8)],
                np.stack([np.zeros((2, 3)), np.ones((2, 3))]).astype(np.int8),
            ),
            (
                [np.datetime64("2020-01-01"), np.datetime64("2021-01-01")],
                np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
            ),
        ],
    )
    def test_numbers_and_arrays(self, samples: list[Any], expected: np.ndarray) -> None:
        got = stack(samples)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)

    def test_texts_stay_a_list(self) -> None:
        assert stack(["a", "b"]) == ["a", "b"]
        assert stack([b"a", b"b"]) == [b"a", b"b"]

    def test_structures_stay_as_they_are(self) -> None:
        batch = stack(
            [{"a": (1, [2.0, "x"]), "b": Pair(1, np.zeros(2))}, {"b": Pair(3, np.ones(2)), "a": (5, [6.0, "y"])}]
        )
        assert list(batch) == ["a", "b"]
        assert type(batch["a"]) is tuple
        assert type(batch["a"][1]) is list
        assert type(batch["b"]) is Pair
        assert batch["a"][0].tolist() == [1, 5]
        assert batch["a"][1][0].tolist() == [2.0, 6.0]
        assert batch["a"][1][1] == ["x", "y"]
        assert batch["b"].x.tolist() == [1, 3]
        assert batch["b"].y.tolist() == [[0, 0], [1, 1]]

    def test_tensors_are_stacked_by_torch(self) -> None:
        torch = pytest.importorskip("torch")
        batch = stack([{"t": torch.zeros(3)}, {"t": torch.ones(3)}])
        assert isinstance(batch["t"], torch.Tensor)
        assert batch["t"].tolist() == [[0, 0, 0], [1, 1, 1]]

    @pytest.mark.parametrize(
        ("samples", "error", "says"),
        [
            ([None, None], TypeError, "cannot stack samples of type NoneType"),
            ([{1}, {2}], TypeError, "cannot stack samples of type set.*pass collate="),
            ([1, None], TypeError, r"values of one kind.*\['NoneType', 'int'\]"),
            ([1, "x"], TypeError, r"values of one kind.*\['int', 'str'\]"),
            ([1, 2**70], TypeError, "values of one kind, or numbers that fit 64 bits"),
            ([{"a": 1}, {"b": 1}], ValueError, r"same keys, got \['a'\] and \['b'\]"),
            ([{"a": 1}, 5], ValueError, r"same keys, got \['a'\] and int"),
            ([(1, 2), (1,)], ValueError, r"need 2 elements each, got \(1,\)"),
            ([[1], 2], ValueError, "need 1 elements each, got 2"),
            ([np.zeros(2), np.zeros(3)], ValueError, "same shape"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, samples: list[Any], error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            stack(samples)

    def test_an_error_says_where(self) -> None:
        with pytest.raises(ValueError, match="same shape") as caught:
            stack([{"outer": {"inner": np.zeros(2)}}, {"outer": {"inner": np.zeros(3)}}])
        assert caught.value.__notes__ == [
            "intune: in 'inner' of the samples of a batch",
            "intune: in 'outer' of the samples of a batch",
        ]


class TestGather:
    def order(self, samples: list[Any]) -> Order:
        return BatchSequencer(len(samples)).push(Token(samples, len(samples), 1.0), len(samples))[0]

    def test_stacks_samples(self) -> None:
        assert Gather("sample", 3, True, None)(self.order([1, 2, 3])).tolist() == [1, 2, 3]

    def test_collate_gets_the_samples(self) -> None:
        assert Gather("sample", 3, True, tuple)(self.order([1, 2, 3])) == (1, 2, 3)

    def test_collate_has_to_give_something(self) -> None:
        with pytest.raises(TypeError, match="collate gave None: did you forget `return`"):
            Gather("sample", 3, True, lambda samples: None)(self.order([1, 2, 3]))

    def test_blocks_are_not_stacked(self) -> None:
        block: Block = {"a": np.arange(1000)}
        order = BatchSequencer(1000).push(Token(block, 1000, 1000.0), 1000)[0]
        assert Gather("block", 3, True, None)(order) is block
