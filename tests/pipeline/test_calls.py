"""What a stage does to one item: errors, skips and random numbers belong to samples, however they are cut into runs."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.blocks import block_to_rows
from intune.pipeline.calls import Failure, Keys, Output, StageCall, key_at, pick_keys
from intune.pipeline.order import generator

BATCH = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})
ARRAYS = {"a": np.array([1, 2, 3])}


def call(kind: str, function: Callable[..., Any], flow: Any = "sample", **options: Any) -> StageCall:
    return StageCall(kind, flow, function, **options)


def sevens_fail(value: int) -> int:
    if value % 7 == 0:
        raise KeyError(value)
    return value * 10


def in_runs(stage: StageCall, samples: list[Any], cuts: list[int], epoch: int = 0) -> list[Output]:
    """Apply a stage to consecutive runs, until one fails."""
    outputs, start = list[Output](), 0
    for length in [*cuts, len(samples)]:
        if start < len(samples):
            run = samples[start : start + length]
            outputs.append(stage(run, range(start, start + len(run)), epoch))
            start += len(run)
            if outputs[-1].failure is not None:
                break
    return outputs


def merged(outputs: list[Output]) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Samples that came out, with their sequence numbers."""
    samples, keys = list[Any](), list[tuple[int, ...]]()
    for output in outputs:
        assert output.keys is not None
        assert len(output.keys) == len(output.payload)
        samples += output.payload
        keys += [key_at(output.keys, place) for place in range(len(output.keys))]
    return samples, keys


runs = st.lists(st.integers(1, 9), max_size=20)
values = st.lists(st.integers(1, 60), min_size=1, max_size=30)


class TestRuns:
    @given(values, runs)
    def test_map(self, samples: list[int], cuts: list[int]) -> None:
        outputs = in_runs(call("map", lambda value: value + 1), samples, cuts)
        assert merged(outputs) == ([value + 1 for value in samples], [(i,) for i in range(len(samples))])

    @given(values, runs)
    def test_filter_keeps_sequence_numbers(self, samples: list[int], cuts: list[int]) -> None:
        outputs = in_runs(call("filter", lambda value: value % 3 > 0), samples, cuts)
        kept = [(value, (place,)) for place, value in enumerate(samples) if value % 3]
        assert list(zip(*merged(outputs), strict=True)) == kept

    @given(values, runs)
    def test_a_failure_ends_it_after_the_samples_before(self, samples: list[int], cuts: list[int]) -> None:
        outputs = in_runs(call("map", sevens_fail), samples, cuts)
        first = next((place for place, value in enumerate(samples) if value % 7 == 0), None)
        assert merged(outputs)[0] == [value * 10 for value in samples[:first]]
        failure = outputs[-1].failure
        assert (failure is None) == (first is None)
        if failure is not None and first is not None:
            assert isinstance(failure.error, KeyError)
            assert (failure.key, failure.line()) == ((first,), f"KeyError: {samples[first]}")
            assert failure.error.__traceback__ is not None

    @given(values, runs, st.sampled_from(["map", "filter"]))
    def test_failures_that_are_skipped_are_named(self, samples: list[int], cuts: list[int], kind: str) -> None:
        function = sevens_fail if kind == "map" else lambda value: bool(sevens_fail(value))
        outputs = in_runs(call(kind, function, skip=True), samples, cuts)
        good = [(value, (place,)) for place, value in enumerate(samples) if value % 7]
        expected = [(value * 10 if kind == "map" else value, key) for value, key in good]
        assert list(zip(*merged(outputs), strict=True)) == expected
        assert all(output.failure is None for output in outputs)
        skipped = [failure.key for output in outputs for failure in output.skipped]
        assert skipped == [(place,) for place, value in enumerate(samples) if value % 7 == 0]

    def test_paths_are_kept(self) -> None:
        output = call("filter", lambda value: value > 1)([1, 2, 3], [(4, 0), (4, 1), (5, 0)], 0)
        assert (output.payload, output.keys) == ([2, 3], [(4, 1), (5, 0)])

    def test_all_kept_are_all_kept(self) -> None:
        keys: Keys = range(5, 8)
        assert pick_keys(keys, [0, 1, 2]) is keys
        assert pick_keys(keys, [0, 2]) == [(5,), (7,)]
        assert key_at(range(0, 30, 10), 2) == (20,)

    @pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), GeneratorExit])
    def test_errors_that_mean_something_to_loops(self, error: Any) -> None:
        """They neither end the run early nor pass for its end; what is no `Exception` is never skipped."""

        def fail(value: int) -> int:
            if value == 2:
                raise error
            return value

        output = call("map", fail)([1, 2, 3], range(3), 0)
        assert output.payload == [1]
        assert output.failure is not None
        assert output.failure.error is error or type(output.failure.error) is error
        left = call("map", fail, skip=True)([1, 2, 3], range(3), 0)
        assert (left.payload, left.failure is None) == (([1], False) if error is GeneratorExit else ([1, 3], True))


class TestResults:
    """What a function may give, by kind."""

    @pytest.mark.parametrize(
        ("kind", "flow", "payload"),
        [("map", "sample", [1]), ("map", "block", BATCH), ("map", "opaque", 5), ("map_rows", "block", BATCH)],
    )
    def test_none_is_an_error_that_helps(self, kind: str, flow: str, payload: Any) -> None:
        output = call(kind, lambda value: None, flow)(payload, range(1) if flow == "sample" else (0,), 0)
        assert output.failure is not None
        assert output.failure.line() == "TypeError: the function gave None: did you forget `return`?"

    @pytest.mark.parametrize("value", [1, 0, "yes", None, np.array([True]), [], pa.scalar(True)])
    def test_a_filter_of_samples_gives_a_bool(self, value: Any) -> None:
        output = call("filter", lambda sample: value)([1], range(1), 0)
        assert output.failure is not None
        assert "a filter gives True or False for each sample, got" in output.failure.line()

    @pytest.mark.parametrize("value", [True, np.bool_(True)])
    def test_also_one_of_numpy(self, value: Any) -> None:
        assert call("filter", lambda sample: value)([1], range(1), 0).payload == [1]

    @pytest.mark.parametrize(
        ("value", "got"),
        [
            (True, r"bool[]"),
            ([True], r"bool[1]"),
            (np.array([1, 0, 1]), r"int64[3]"),
            (np.ones((3, 1), bool), r"bool[3, 1]"),
            (pa.array([True, None, False]), r"object[3]"),
            (None, r"object[]"),
        ],
    )
    def test_a_filter_of_blocks_gives_a_bool_a_row(self, value: Any, got: str) -> None:
        for block in (BATCH, ARRAYS):
            output = call("filter", lambda block: value, "block")(block, (0,), 0)
            assert output.failure is not None
            line = output.failure.line()
            assert line == f"TypeError: a filter of blocks gives one bool a row: expected bool[3], got {got}"
            assert (output.payload, output.failure.rows, output.failure.key) == (None, 3, (0,))

    @pytest.mark.parametrize(
        "keep", [[True, False, True], np.array([True, False, True]), pa.array([True, False, True])]
    )
    def test_in_any_form(self, keep: Any) -> None:
        chunked = pa.chunked_array([keep]) if isinstance(keep, pa.Array) else keep
        for block in (BATCH, ARRAYS):
            for value in (keep, chunked):
                output = call("filter", lambda block, value=value: value, "block")(block, (0,), 0)
                assert [row["a"] for row in block_to_rows(output.payload)] == [1, 3]

    def test_a_map_of_blocks_gives_a_block(self) -> None:
        stage = call("map", lambda block: pa.table({"b": [1.5]}), "block")
        assert stage(BATCH, (0,), 0).payload.to_pydict() == {"b": [1.5]}
        output = call("map", lambda block: 5, "block")(BATCH, (3, 1), 0)
        assert output.failure is not None
        assert output.failure.line() == ("TypeError: expected a block (pyarrow.RecordBatch or dict of arrays), got int")
        assert output.failure.key == (3, 1)

    def test_a_failed_block_is_left_out_on_skip(self) -> None:
        output = call("map", lambda block: 1 / 0, "block", skip=True)(BATCH, (3,), 0)
        assert (output.payload, output.failure) == (None, None)
        assert [(failure.key, failure.rows, failure.line()) for failure in output.skipped] == [
            ((3,), 3, "ZeroDivisionError: division by zero")
        ]

    def test_objects_pass_as_they_are(self) -> None:
        assert call("map", lambda value: [value], "opaque")({"x": 1}, (0,), 0).payload == [{"x": 1}]

    def test_unbatch_gives_rows_with_their_numbers(self) -> None:
        for block in (BATCH, ARRAYS):
            output = call("unbatch", abs, "block")(block, (4, 2), 0)
            assert output.payload == [{"a": 1}, {"a": 2}, {"a": 3}]
            assert output.keys == [(4, 2, 0), (4, 2, 1), (4, 2, 2)]


class TestRows:
    def test_of_blocks_become_blocks(self) -> None:
        for block in (BATCH, ARRAYS):
            output = call("map_rows", lambda row: {"a": int(row["a"]) + 1, "b": 0.5}, "block")(block, (0,), 0)
            assert block_to_rows(output.payload) == [{"a": value, "b": 0.5} for value in (2, 3, 4)]

    def test_before_one_that_fails_come_out(self) -> None:
        output = call("map_rows", lambda row: {"a": 1 // (2 - row["a"])}, "block")(BATCH, (9, 4), 0)
        assert output.payload.to_pydict() == {"a": [1]}
        assert output.failure is not None
        assert (output.failure.key, type(output.failure.error)) == ((9, 4, 1), ZeroDivisionError)

    def test_that_fail_are_left_out_on_skip(self) -> None:
        stage = call("map_rows", lambda row: {"a": 1 // (2 - row["a"])}, "block", skip=True)
        output = stage(BATCH, (9,), 0)
        assert (output.payload.to_pydict(), output.failure) == ({"a": [1, -1]}, None)
        assert [failure.key for failure in output.skipped] == [(9, 1)]

    def test_all_of_which_fail_leave_nothing(self) -> None:
        output = call("map_rows", lambda row: 1 // 0, "block", skip=True)(BATCH, (9,), 0)
        assert (output.payload, output.failure, len(output.skipped)) == (None, None, 3)

    @pytest.mark.parametrize("value", [5, "text", [1, 2]])
    def test_are_dicts(self, value: Any) -> None:
        output = call("map_rows", lambda row: value, "block")(BATCH, (0,), 0)
        assert output.failure is not None
        assert output.failure.line().startswith(
            f"TypeError: map_rows gives a dict for each row, got {type(value).__name__}"
        )

    def test_that_do_not_fit_together_fail_the_block(self) -> None:
        output = call("map_rows", lambda row: {"a": 1, f"b{row['a']}": 1}, "block")(BATCH, (7,), 0)
        assert output.failure is not None
        assert output.failure.line().startswith("ValueError: all rows need the same columns")


def drawn(value: Any, rng: np.random.Generator) -> tuple[Any, float]:
    return value, float(rng.random())


class TestRandomNumbers:
    @given(values, runs, runs, st.integers(0, 3))
    def test_belong_to_the_sample_not_to_its_run(
        self, samples: list[int], cuts: list[int], other_cuts: list[int], epoch: int
    ) -> None:
        stage = call("map", drawn, rng=True, seed=(7, 1), stage=3)
        whole = merged(in_runs(stage, samples, cuts, epoch))
        assert whole == merged(in_runs(stage, samples, other_cuts, epoch))
        assert [number for _, number in whole[0]] == [
            float(generator(7, 1, epoch, 3, place).random()) for place in range(len(samples))
        ]

    def test_differ_by_sample_epoch_seed_rank_and_stage(self) -> None:
        seen = set[float]()
        for seed, rank, number, epoch in [(7, 0, 1, 0), (8, 0, 1, 0), (7, 1, 1, 0), (7, 0, 2, 0), (7, 0, 1, 1)]:
            stage = call("map", drawn, rng=True, seed=(seed, rank), stage=number)
            seen |= {number for _, number in stage([0] * 10, range(10), epoch).payload}
        assert len(seen) == 50

    def test_go_on_at_the_same_numbers_after_skips_and_filters(self) -> None:
        stage = call("map", drawn, rng=True, seed=(7, 1), stage=3)
        all_of_them = stage([1, 2, 3], range(3), 0).payload
        assert stage([1, 3], [(0,), (2,)], 0).payload == [all_of_them[0], all_of_them[2]]

    @pytest.mark.parametrize("kind", ["map", "map_rows", "filter"])
    def test_of_blocks_follow_path_and_row(self, kind: str) -> None:
        results = list[Any]()

        def function(value: Any, rng: np.random.Generator) -> Any:
            results.append(float(rng.random()))
            return np.ones(3, bool) if kind == "filter" else value

        call(kind, function, "block", rng=True, seed=(1,), stage=2)(BATCH, (5, 6), 4)
        paths = [(5, 6, row) for row in range(3)] if kind == "map_rows" else [(5, 6)]
        assert results == [float(generator(1, 4, 2, *path).random()) for path in paths]

    def test_of_the_whole_process_follow_too_where_nobody_else_draws(self) -> None:
        torch = pytest.importorskip("torch")
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:

            def function(value: int) -> tuple[float, ...]:
                return random.random(), float(np.random.random()), float(torch.rand(1))

            stage = call("map", function, seed=(7,), stage=1, reseed=True)
            whole = stage([0, 0, 0, 0], range(4), 0).payload
            assert len(set(whole)) == 4
            assert stage([0, 0], range(2, 4), 0).payload == whole[2:]
            assert stage([0, 0], range(2, 4), 1).payload != whole[2:]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


class TestFlatMap:
    def test_children_get_numbers_below_their_parents(self) -> None:
        stage = call("flat_map", lambda value: range(value))
        drawn = list(stage.draw([2, 0, 3], range(10, 13), 0))
        assert drawn == [((10, 0), 0), ((10, 1), 1), ((12, 0), 0), ((12, 1), 1), ((12, 2), 2)]

    def test_are_drawn_one_by_one(self) -> None:
        log = list[str]()

        def function(value: int) -> Iterator[int]:
            for number in range(2):
                log.append(f"{value}.{number}")
                yield number

        drawing = call("flat_map", function).draw([1, 2], range(2), 0)
        assert log == []
        next(drawing)
        assert log == ["1.0"]
        next(drawing)
        next(drawing)
        assert log == ["1.0", "1.1", "2.0"]

    def test_blocks_give_blocks(self) -> None:
        stage = call("flat_map", lambda block: [block, pa.table({"a": [9]})], "block")
        (first, one), (second, other) = stage.draw(BATCH, (3, 1), 0)
        assert (first, second) == ((3, 1, 0), (3, 1, 1))
        assert one is BATCH
        assert isinstance(other, pa.RecordBatch)

    def failing(self, value: int) -> Iterator[int]:
        yield 1
        if value == 2:
            raise KeyError(value)
        yield 2

    def test_a_failure_comes_in_its_place_and_ends_it(self) -> None:
        drawn = list(call("flat_map", self.failing).draw([1, 2, 3], range(3), 0))
        assert drawn[:3] == [((0, 0), 1), ((0, 1), 2), ((1, 0), 1)]
        key, failure = drawn[3]
        assert (len(drawn), key, failure.key, type(failure.error)) == (4, (1, 1), (1,), KeyError)

    def test_or_is_skipped_with_the_rest_of_that_parent(self) -> None:
        drawn = list(call("flat_map", self.failing, skip=True).draw([1, 2, 3], range(3), 0))
        assert [key for key, child in drawn if not isinstance(child, Failure)] == [
            (0, 0),
            (0, 1),
            (1, 0),
            (2, 0),
            (2, 1),
        ]
        assert [child.key for _, child in drawn if isinstance(child, Failure)] == [(1,)]

    @pytest.mark.parametrize("result", [None, "text", b"bytes", {"a": 1}, 5])
    def test_needs_something_to_iterate(self, result: Any) -> None:
        ((_, failure),) = call("flat_map", lambda value: result).draw([1], range(1), 0)
        assert failure.line() == (
            f"TypeError: flat_map needs a function that gives an iterable of items, got {type(result).__name__}"
        )

    def test_a_child_that_is_no_block_is_a_failure(self) -> None:
        (_, one), (_, failure) = call("flat_map", lambda block: [block, 5], "block").draw(BATCH, (0,), 0)
        assert one is BATCH
        assert "expected a block" in failure.line()

    def test_gets_a_generator_of_the_parents_number(self) -> None:
        stage = call("flat_map", lambda value, rng: [float(rng.random())], rng=True, seed=(7,), stage=2)
        assert [child for _, child in stage.draw([0, 0], [(3, 1), (4, 0)], 5)] == [
            float(generator(7, 5, 2, 3, 1).random()),
            float(generator(7, 5, 2, 4, 0).random()),
        ]


class TestClasses:
    class Adder:
        made: list["TestClasses.Adder"] = []  # noqa: RUF012

        def __init__(self) -> None:
            self.made.append(self)
            self.closed = 0

        def __call__(self, value: int) -> int:
            return value + 1

        def close(self) -> None:
            self.closed += 1

    @pytest.fixture(autouse=True)
    def _none_made(self) -> None:
        self.Adder.made.clear()

    def test_are_made_with_the_first_item_and_closed_once(self) -> None:
        stage = call("map", self.Adder)
        stage.close()  # nothing to close
        assert self.Adder.made == []
        for _ in range(3):
            assert stage([1], range(1), 0).payload == [2]
        assert len(self.Adder.made) == 1
        stage.close()
        assert self.Adder.made[0].closed == 1

    def test_serve_flat_map_too(self) -> None:
        class Twice:
            def __call__(self, value: int) -> list[int]:
                return [value, value]

        stage = call("flat_map", Twice)
        assert [child for _, child in stage.draw([1], range(1), 0)] == [1, 1]
        stage.close()  # it has nothing to close

    def test_that_cannot_be_made_say_so_with_each_item(self) -> None:
        class Broken:
            def __init__(self) -> None:
                raise OSError("no such file")

        stage = call("map", Broken, skip=True)  # skipping must not hide that no item can ever pass
        for _ in range(2):
            failure = stage([1], range(1), 0).failure
            assert failure is not None
            assert failure.fatal
            assert isinstance(failure.error, OSError)
        ((key, drawn),) = call("flat_map", Broken, skip=True).draw([1], range(4, 5), 0)
        assert key == (4,)
        assert drawn.fatal
