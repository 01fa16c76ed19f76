"""What each kind of stage does to blocks and to samples, in threads and in processes."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import intune
from intune import Pipeline

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

ROWS = 50
EXECUTORS = ["thread", "process"]


@pytest.fixture
def blocks(tmp_path: Path) -> Pipeline:
    """50 rows in row groups of 10: `id`, `x` = id / 2."""
    ids = np.arange(ROWS)
    pq.write_table(pa.table({"id": ids, "x": ids / 2}), tmp_path / "rows.parquet", row_group_size=10)
    return intune.read_parquet(tmp_path)


def arrays(block: Any) -> dict[str, np.ndarray]:
    """A record batch as a dict of arrays, the other form of a block."""
    return {name: block.column(name).to_numpy() for name in block.schema.names}


def run(pipe: Pipeline, **options: Any) -> list[Any]:
    """Everything that one epoch gives, by a loop as a training loop has it."""
    options.setdefault("cpus", 1 if any(stage.executor == "process" for stage in pipe.stages) else 2)
    with pipe.loader(**options) as loader:
        return [item for item in loader]


def column(items: list[Any], name: str = "id") -> list[Any]:
    """One column of all blocks, in order."""
    return [
        value for item in items for value in (item[name].tolist() if isinstance(item, dict) else item[name].to_pylist())
    ]


FORMS: dict[str, Callable[[Any], Any]] = {"RecordBatch": lambda block: block, "dict": arrays}


def double(block: Any) -> Any:
    if isinstance(block, dict):
        return {**block, "x": block["x"] * 2}
    return block.set_column(1, "x", pa.array(block.column("x").to_numpy() * 2))


def nothing_of_some(block: Any) -> Any:
    """All rows of every other block, none of the others."""
    first = int(block["id"][0]) if isinstance(block, dict) else block.column("id")[0].as_py()
    keep = slice(None) if first % 20 == 0 else slice(0, 0)
    return (
        {name: values[keep] for name, values in block.items()}
        if isinstance(block, dict)
        else block.slice(0, block.num_rows if first % 20 == 0 else 0)
    )


def id_is_odd(block: Any) -> Any:
    ids = block["id"] if isinstance(block, dict) else block.column("id").to_numpy()
    return ids % 2 == 1


def none_at_all(block: Any) -> Any:
    return np.zeros(len(block["id"]), dtype=bool)


def halves(block: Any) -> Iterator[Any]:
    if isinstance(block, dict):
        middle = len(block["id"]) // 2
        yield {name: values[:middle] for name, values in block.items()}
        yield {name: values[middle:] for name, values in block.items()}
    else:
        yield block.slice(0, block.num_rows // 2)
        yield block.slice(block.num_rows // 2)


def no_children(item: Any) -> list[Any]:
    return []


@pytest.mark.parametrize(("form", "executor"), [("RecordBatch", "thread"), ("dict", "thread"), ("dict", "process")])
class TestBlocks:
    def start(self, blocks: Pipeline, form: str) -> Pipeline:
        return blocks.map(FORMS[form], name="form")

    def test_map(self, blocks: Pipeline, form: str, executor: Any) -> None:
        out = run(self.start(blocks, form).map(double, executor=executor))
        assert column(out) == list(range(ROWS))
        assert column(out, "x") == [float(i) for i in range(ROWS)]
        assert isinstance(out[0], dict) == (form == "dict")

    def test_map_may_give_no_rows_and_nobody_sees_them(self, blocks: Pipeline, form: str, executor: Any) -> None:
        seen: list[int] = []
        pipe = self.start(blocks, form).map(nothing_of_some, executor=executor)
        out = run(pipe.map(lambda block: seen.append(len(block["id"])) or block))
        assert column(out) == [i for i in range(ROWS) if i % 20 < 10]
        assert len(out) == 3
        assert set(seen) == {10}

    def test_map_rows(self, blocks: Pipeline, form: str, executor: Any) -> None:
        out = run(self.start(blocks, form).map_rows(lambda row: {**row, "x": row["x"] + 1}, executor=executor))
        assert column(out) == list(range(ROWS))
        assert column(out, "x") == [i / 2 + 1 for i in range(ROWS)]

    def test_filter(self, blocks: Pipeline, form: str, executor: Any) -> None:
        out = run(self.start(blocks, form).filter(id_is_odd, executor=executor).batch(7))
        assert column(out) == list(range(1, ROWS, 2))
        assert [len(item["id"]) for item in out] == [7, 7, 7, 4]

    @pytest.mark.parametrize(
        "rest", [lambda pipe: pipe, lambda pipe: pipe.shuffle(8).batch(4), lambda pipe: pipe.unbatch()]
    )
    def test_filter_to_nothing(self, blocks: Pipeline, form: str, executor: Any, rest: Any) -> None:
        assert run(rest(self.start(blocks, form).filter(none_at_all, executor=executor))) == []

    def test_flat_map(self, blocks: Pipeline, form: str, executor: Any) -> None:
        out = run(self.start(blocks, form).flat_map(halves, executor=executor))
        assert column(out) == list(range(ROWS))
        assert len(out) == 10

    def test_flat_map_to_nothing(self, blocks: Pipeline, form: str, executor: Any) -> None:
        assert run(self.start(blocks, form).flat_map(no_children, executor=executor).batch(3)) == []

    def test_flat_map_drops_empty_children_and_keeps_order(self, blocks: Pipeline, form: str, executor: Any) -> None:
        def thrice(block: Any) -> list[Any]:
            empty = (
                {name: values[:0] for name, values in block.items()} if isinstance(block, dict) else block.slice(0, 0)
            )
            return [empty, block, empty, block, block]

        seen: list[int] = []
        pipe = self.start(blocks, form).flat_map(thrice, executor=executor)
        out = run(pipe.map(lambda block: seen.append(len(block["id"])) or block))
        assert column(out) == [i for first in range(0, ROWS, 10) for _ in range(3) for i in range(first, first + 10)]
        assert 0 not in seen

    def test_unbatch_gives_rows(self, blocks: Pipeline, form: str, executor: Any) -> None:
        pipe = self.start(blocks, form).unbatch().map(lambda row: row["id"] + row["x"], executor=executor)
        assert run(pipe) == [i * 1.5 for i in range(ROWS)]

    @pytest.mark.parametrize("size", [1, 7, 10, 30, 64])
    def test_batch_cuts_anew(self, blocks: Pipeline, form: str, executor: Any, size: int) -> None:
        pipe = self.start(blocks, form)
        pipe = pipe.map(double, executor=executor) if size == 7 else pipe.map(double)
        for drop_last in (False, True):
            out = run(pipe.batch(size, drop_last=drop_last))
            full = ROWS // size * size
            assert column(out) == list(range(full if drop_last else ROWS))
            assert [len(item["id"]) for item in out[:-1]] == [size] * (len(out) - 1)

    def test_arrays_of_several_dimensions(self, blocks: Pipeline, form: str, executor: Any) -> None:
        def widen(block: Any) -> dict[str, np.ndarray]:
            ids = np.asarray(block["id"])
            return {"id": ids, "image": np.broadcast_to(ids[:, None, None], (len(ids), 3, 2)).astype(np.float32)}

        out = run(self.start(blocks, form).map(widen, executor=executor).shuffle(16).batch(20))
        assert [item["image"].shape for item in out] == [(20, 3, 2), (20, 3, 2), (10, 3, 2)]
        assert out[0]["image"].dtype == np.float32
        assert all((item["image"] == item["id"][:, None, None]).all() for item in out)
        assert sorted(column(out)) == list(range(ROWS))


class Point(NamedTuple):
    x: int
    y: float


SAMPLES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "dict": (lambda i: {"a": i, "b": [i, i]}, lambda batch: batch["b"][1]),
    "tuple": (lambda i: (i, i + 0.5), lambda batch: batch[0]),
    "namedtuple": (lambda i: Point(i, i + 0.5), lambda batch: batch.x),
    "int": (lambda i: i, lambda batch: batch),
    "numpy scalar": (lambda i: np.int64(i), lambda batch: batch),
    "array": (lambda i: np.array([i, -i]), lambda batch: batch[:, 0]),
    "tensor": (lambda i: torch.tensor([i, -i]), lambda batch: batch[:, 0]),
    "nested": (lambda i: {"p": (Point(i, 0.0), torch.tensor(i))}, lambda batch: batch["p"][1]),
}


class TestSamples:
    # A worker takes seconds to import torch, and "nested" has tensors too.
    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("kind", [kind for kind in SAMPLES if kind != "tensor"])
    def test_map_filter_and_batch(self, kind: str, executor: Any) -> None:
        make, first = SAMPLES[kind]
        pipe = intune.from_iterable(range(23)).map(make, executor=executor).filter(lambda sample: True).batch(5)
        out = run(pipe)
        assert [i for batch in out for i in np.asarray(first(batch)).tolist()] == list(range(23))
        assert len(out) == 5
        assert isinstance(first(out[0]), torch.Tensor if kind in ("tensor", "nested") else np.ndarray)

    @pytest.mark.parametrize("kind", SAMPLES)
    def test_structure_and_type_are_kept(self, kind: str) -> None:
        make, _ = SAMPLES[kind]
        out = run(intune.from_iterable(range(6)).map(make).batch(6))
        assert isinstance(out[0], Point) == (kind == "namedtuple")
        alone = run(intune.from_iterable(range(6)).map(make))
        assert type(alone[3]) is type(make(3))

    @pytest.mark.parametrize("kind", SAMPLES)
    def test_batch_goes_to_torch(self, kind: str) -> None:
        make, first = SAMPLES[kind]
        out = run(intune.from_iterable(range(10)).map(make).batch(4).to_torch())
        parts = [first(batch) for batch in out]
        assert all(isinstance(part, torch.Tensor) for part in parts)
        assert torch.cat(parts).tolist() == list(range(10))


class TestSamplesOtherwise:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_flat_map_gives_zero_one_or_many(self, executor: Any) -> None:
        pipe = intune.from_iterable(range(20)).flat_map(lambda i: [i] * (i % 4), executor=executor)
        assert run(pipe) == [i for i in range(20) for _ in range(i % 4)]

    def test_flat_map_that_never_ends_is_drawn_as_needed(self) -> None:
        drawn: list[int] = []

        def forever(start: int) -> Iterator[int]:
            for i in itertools.count(start):
                drawn.append(i)
                yield i

        with intune.from_iterable([0, 1000]).flat_map(forever).batch(4).loader(cpus=2) as loader:
            for _ in range(2):
                got = []
                for batch in loader:
                    got += batch.tolist()
                    if len(got) >= 12:
                        break
                assert got == list(range(12))
        assert max(drawn) < 100_000

    def test_flat_map_in_flat_map_keeps_order(self) -> None:
        pipe = intune.from_iterable(range(5)).flat_map(lambda i: range(i)).flat_map(lambda i: list("ab"[: i + 1]))
        assert run(pipe) == [letter for i in range(5) for j in range(i) for letter in "ab"[: j + 1]]

    def test_collate_gets_the_samples_and_gives_any_object(self) -> None:
        out = run(intune.from_iterable(range(10)).batch(4, collate=lambda samples: frozenset(samples)).map(len))
        assert out == [4, 4, 2]

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_batch_larger_than_everything(self, drop_last: bool) -> None:
        out = run(intune.from_iterable(range(3)).batch(8, drop_last=drop_last))
        assert [len(batch) for batch in out] == ([] if drop_last else [3])

    def test_strings_stay_a_list(self) -> None:
        assert run(intune.from_iterable(["a", "b", "c"]).batch(2)) == [["a", "b"], ["c"]]

    @pytest.mark.parametrize(
        ("samples", "error"),
        [
            ([{"a": 1}, {"b": 1}], ValueError),
            ([(1, 2), (1,)], ValueError),
            ([object(), object()], TypeError),
            ([np.zeros(2), np.zeros(3)], ValueError),
        ],
        ids=["keys", "lengths", "type", "shapes"],
    )
    def test_samples_that_do_not_fit_together(self, samples: list[Any], error: type[Exception]) -> None:
        with pytest.raises(error) as caught:
            run(intune.from_iterable(samples).batch(2))
        assert any("stage 'batch'" in note for note in caught.value.__notes__)

    def test_a_function_without_return(self) -> None:
        with pytest.raises(TypeError, match="did you forget `return`"):
            run(intune.from_iterable([1]).map(lambda value: None))
        with pytest.raises(TypeError, match="did you forget `return`"):
            run(intune.from_iterable([1]).batch(1, collate=lambda values: None))

    def test_a_filter_gives_booleans(self) -> None:
        with pytest.raises(TypeError, match="True or False"):
            run(intune.from_iterable([1]).filter(lambda value: value))
        assert run(intune.from_iterable([1, 2]).filter(lambda value: np.bool_(value > 1))) == [2]

    @pytest.mark.parametrize("wrong", [None, 3, "text", {"a": 1}])
    def test_a_flat_map_gives_an_iterable_of_items(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="flat_map needs a function that gives an iterable"):
            run(intune.from_iterable([1]).flat_map(lambda value: wrong))


class TestBlocksOtherwise:
    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            (lambda block: None, TypeError, "did you forget `return`"),
            (lambda block: 3, TypeError, "expected a block"),
            (lambda block: {}, ValueError, "at least one column"),
            (lambda block: {"a": np.zeros(2), "b": np.zeros(3)}, ValueError, "same first length"),
            (lambda block: {"a": np.float64(1)}, ValueError, "same first length"),
        ],
        ids=["none", "number", "empty", "lengths", "scalar"],
    )
    def test_what_is_no_block(self, blocks: Pipeline, wrong: Any, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says) as caught:
            run(blocks.map(wrong, name="bad"))
        notes = "".join(caught.value.__notes__)
        assert "'bad'" in notes
        assert "rows.parquet" in notes

    @pytest.mark.parametrize("wrong", [[True] * 10, np.ones(3, bool), np.ones(10), True])
    def test_a_filter_of_blocks_gives_a_bool_for_each_row(self, blocks: Pipeline, wrong: Any) -> None:
        if isinstance(wrong, list):
            assert column(run(blocks.filter(lambda block: wrong))) == list(range(ROWS))
            return
        with pytest.raises(TypeError, match=r"expected bool\[10\]"):
            run(blocks.filter(lambda block: wrong))

    def test_a_filter_may_give_an_arrow_array(self, blocks: Pipeline) -> None:
        import pyarrow.compute as pc

        assert column(run(blocks.filter(lambda block: pc.less(block.column("id"), 3)))) == [0, 1, 2]

    def test_a_table_counts_as_a_block(self, blocks: Pipeline) -> None:
        out = run(blocks.map(lambda block: pa.Table.from_batches([block])))
        assert all(isinstance(item, pa.RecordBatch) for item in out)
        assert column(out) == list(range(ROWS))

    @pytest.mark.parametrize("through", ["batch", "shuffle"])
    def test_blocks_that_differ_cannot_be_put_together(self, blocks: Pipeline, through: str) -> None:
        def drift(block: Any) -> Any:
            return block if block.column("id")[0].as_py() < 20 else block.append_column("new", block.column("id"))

        pipe = blocks.map(drift)
        with pytest.raises(ValueError, match="new"):
            run(pipe.shuffle(50).batch(5) if through == "shuffle" else pipe.batch(15))

    def test_a_map_rows_that_gives_other_columns_each_time(self, blocks: Pipeline) -> None:
        with pytest.raises(ValueError, match="same columns"):
            run(blocks.map_rows(lambda row: {"id": row["id"]} if row["id"] % 2 else row))

    def test_a_small_batch_does_not_keep_a_large_block_alive(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"id": np.arange(20_000)}), tmp_path / "large.parquet")
        out = run(intune.read_parquet(tmp_path).batch(10), prefetch=1)
        assert sum(buffer.size for buffer in out[5].column("id").buffers() if buffer is not None) < 10_000


class TestToTorch:
    @pytest.fixture
    def clicks(self, tmp_path: Path) -> Path:
        table = pa.table(
            {
                "label": pa.array([0, 1, 1, 0], pa.int8()),
                "d1": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()),
                "d2": pa.array([1, 2, 3, 4], pa.float32()),
                "tags": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int64())),
                "pair": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int32(), 2)),
                "flag": pa.array([True, False, True, True]),
                "hole": pa.array([1, None, 3, 4], pa.int64()),
                "name": pa.array(["a", "b", "c", "d"]),
            }
        )
        pq.write_table(table, tmp_path / "clicks.parquet")
        return tmp_path

    def test_columns_become_tensors_of_their_type(self, clicks: Path) -> None:
        (batch,) = run(intune.read_parquet(clicks, columns=["label", "d1", "flag", "pair"]).batch(4).to_torch())
        assert batch["label"].dtype == torch.int8
        assert batch["d1"].dtype == torch.float32
        assert batch["flag"].tolist() == [True, False, True, True]
        assert batch["pair"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]

    def test_groups_stand_side_by_side(self, clicks: Path) -> None:
        pipe = intune.read_parquet(clicks, columns=["label", "d1", "d2"]).batch(3)
        out = run(pipe.to_torch(groups={"dense": ["d2", "d1"]}))
        assert sorted(out[0]) == ["dense", "label"]
        assert out[0]["dense"].tolist() == [[1, 0.5], [2, 1.5], [3, 2.5]]
        assert out[1]["dense"].shape == (1, 2)

    def test_a_group_of_columns_that_are_not_there(self, clicks: Path) -> None:
        pipe = intune.read_parquet(clicks, columns=["label"]).batch(2)
        with pytest.raises(ValueError, match=r"group 'dense' names columns \['nope'\]"):
            run(pipe.to_torch(groups={"dense": ["nope"]}))

    def test_lists_become_values_and_offsets(self, clicks: Path) -> None:
        (batch,) = run(intune.read_parquet(clicks, columns=["tags"]).batch(4).to_torch())
        values, offsets = batch["tags"]
        assert values.tolist() == [1, 2, 3]
        assert offsets.tolist() == [0, 2, 2, 2, 3]
        assert (values.dtype, offsets.dtype) == (torch.int64, torch.int64)

    def test_lists_of_a_slice_begin_at_zero(self, clicks: Path) -> None:
        out = run(intune.read_parquet(clicks, columns=["tags"]).batch(3).to_torch())
        assert [(v.tolist(), o.tolist()) for v, o in (batch["tags"] for batch in out)] == [
            ([1, 2], [0, 2, 2, 2]),
            ([3], [0, 1]),
        ]

    def test_lists_that_are_all_empty(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"tags": pa.array([[], [], []], pa.list_(pa.int64()))}), tmp_path / "e.parquet")
        (batch,) = run(intune.read_parquet(tmp_path).batch(3).to_torch())
        values, offsets = batch["tags"]
        assert (values.shape, values.dtype) == ((0,), torch.int64)
        assert offsets.tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize("shuffled", [False, True])
    def test_missing_values_are_refused_by_name(self, clicks: Path, shuffled: bool) -> None:
        pipe = intune.read_parquet(clicks, columns=["label", "hole"])
        pipe = pipe.shuffle(4) if shuffled else pipe
        with pytest.raises(ValueError, match="column 'hole' has 1 missing value"):
            run(pipe.batch(4).to_torch())

    def test_missing_values_inside_a_list_are_refused_by_name(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"tags": pa.array([[1, None], [2]])}), tmp_path / "n.parquet")
        with pytest.raises(ValueError, match="column 'tags' has 1 missing value"):
            run(intune.read_parquet(tmp_path).batch(2).to_torch())

    def test_strings_are_refused_by_name(self, clicks: Path) -> None:
        with pytest.raises(TypeError, match="name"):
            run(intune.read_parquet(clicks, columns=["label", "name"]).batch(4).to_torch())

    def test_tensors_may_be_written_to(self, clicks: Path) -> None:
        for batch in run(intune.read_parquet(clicks, columns=["d1"]).batch(2).to_torch()):
            batch["d1"] += 1
            assert batch["d1"].is_contiguous()

    def test_map_may_follow(self, clicks: Path) -> None:
        pipe = intune.read_parquet(clicks, columns=["d1", "d2"]).batch(2).to_torch()
        assert run(pipe.map(lambda batch: (batch["d1"] + batch["d2"]).sum().item())) == [5.0, 13.0]

    def test_dicts_of_arrays(self, clicks: Path) -> None:
        pipe = intune.read_parquet(clicks, columns=["label", "d1"]).map(arrays).batch(4)
        (batch,) = run(pipe.to_torch(groups={"both": ["label", "d1"]}))
        assert batch["both"].shape == (4, 2)
        with pytest.raises(TypeError, match="when"):
            run(pipe.map(lambda block: {**block, "when": np.zeros(len(block["d1"]), "M8[s]")}).to_torch())

    @pytest.mark.parametrize(
        ("array", "advice"),
        [
            (np.arange(4, dtype=">f4"), "newbyteorder('=')"),
            (np.arange(4, dtype=">i8"), "newbyteorder('=')"),
            (np.arange(4, dtype=np.longdouble), "or drop them"),
            (np.zeros(4, [("a", "f4")]), "or drop them"),
        ],
    )
    def test_numbers_that_torch_does_not_know_are_refused_by_name(self, array: Any, advice: str) -> None:
        def batch(samples: list[int]) -> dict[str, Any]:
            return {"fine": np.arange(4), "odd": array}

        with pytest.raises(TypeError, match=r"columns \{'odd': ") as refused:
            run(intune.from_iterable([0]).batch(1, collate=batch).to_torch())
        assert str(array.dtype) in str(refused.value)
        assert advice in str(refused.value)
        assert "fine" not in str(refused.value)

    def test_a_foreign_byte_order_deep_inside_is_refused_with_its_place(self) -> None:
        def batch(samples: list[int]) -> dict[str, Any]:
            return {"lists": (np.arange(3.0), {"offsets": np.arange(3, dtype=">i8")})}

        pipe = intune.from_iterable(range(2)).batch(2, collate=batch)
        with pytest.raises(TypeError, match=r"column 'lists'\[1\]\['offsets'\] is an array of >i8"):
            run(pipe.to_torch())

    @pytest.mark.parametrize("names", [["a"], ["a", "b"]])
    def test_groups_take_a_foreign_byte_order_as_they_copy_anyway(self, names: list[str]) -> None:
        def batch(samples: list[int]) -> dict[str, Any]:
            return {name: np.arange(3, dtype=">f4") for name in names}

        (out,) = run(intune.from_iterable([1]).batch(1, collate=batch).to_torch(groups={"g": names}))
        assert out["g"].tolist() == [[value] * len(names) for value in (0.0, 1.0, 2.0)]

    def test_texts_in_a_group_are_refused_by_name(self) -> None:
        def batch(samples: list[int]) -> dict[str, Any]:
            return {"a": np.arange(2), "word": np.array(["x", "y"])}

        pipe = intune.from_iterable([1]).batch(1, collate=batch)
        with pytest.raises(TypeError, match=r"columns \{'word': '<U1'\} cannot be tensors"):
            run(pipe.to_torch(groups={"g": ["a", "word"]}))


class TestClasses:
    """A class given in the place of a function is made once for each worker and closed."""

    @pytest.mark.parametrize("kind", ["map", "filter", "flat_map"])
    @pytest.mark.parametrize("most", [1, 3])
    def test_at_most_concurrency_are_made_and_all_are_closed(self, kind: str, most: int) -> None:
        made: list[Any] = []
        closed: list[Any] = []
        in_use: set[int] = set()
        lent_twice: list[int] = []

        class Worker:
            def __init__(self) -> None:
                made.append(self)

            def __call__(self, value: int) -> Any:
                if id(self) in in_use:
                    lent_twice.append(value)
                in_use.add(id(self))
                result = {"map": value, "filter": True, "flat_map": [value]}[kind]
                in_use.discard(id(self))
                return result

            def close(self) -> None:
                closed.append(self)

        pipe = getattr(intune.from_iterable(range(300)), kind)(Worker, max_concurrency=most)
        with pipe.map(lambda value: value).loader(cpus=4) as loader:
            for _ in range(3):
                assert [value for value in loader] == list(range(300))
        assert 1 <= len(made) <= most
        assert closed
        assert sorted(map(id, closed)) == sorted(map(id, made))
        assert not lent_twice

    def test_a_draw_that_was_broken_off_gives_its_instance_back(self) -> None:
        made: list[Any] = []
        closed: list[Any] = []

        class Worker:
            def __init__(self) -> None:
                made.append(self)

            def __call__(self, value: int) -> Iterator[int]:
                return itertools.repeat(value)

            def close(self) -> None:
                closed.append(self)

        with intune.from_iterable(range(4)).flat_map(Worker, max_concurrency=1).loader(cpus=2) as loader:
            for _ in range(5):
                for value in loader:
                    assert value == 0
                    break
        assert len(closed) == len(made)
        assert len(made) == 1

    def test_a_function_that_cannot_be_made(self) -> None:
        class Broken:
            def __init__(self) -> None:
                raise OSError("no such table")

            def __call__(self, value: int) -> int:
                return value

        with pytest.raises(OSError, match="no such table"):
            run(intune.from_iterable(range(3)).map(Broken))

    def test_shrinking_closes_what_is_too_many(self) -> None:
        closed: list[Any] = []
        together = threading.Barrier(2)

        class Worker:
            def __call__(self, batch: Any) -> Any:
                if batch[0] >= 10:
                    together.wait(30)
                return batch

            def close(self) -> None:
                closed.append(self)

        pipe = intune.from_iterable(range(12)).batch(1).map(Worker, waits=True, max_concurrency=2)
        with pipe.loader(cpus=2) as loader:
            assert sum(len(batch) for batch in loader) == 12
            loader._engine.apply(intune.Allocation({"from_iterable": 1, "batch": 1, "Worker": 1}, slots=1))
            assert len(closed) == 1
        assert len(closed) == 2


class TestMaxConcurrency:
    @pytest.mark.parametrize("kind", ["map", "filter"])
    @pytest.mark.parametrize("most", [1, 2])
    def test_never_more_at_once(self, kind: str, most: int) -> None:
        lock = threading.Lock()
        now = peak = 0

        def count(value: int) -> Any:
            nonlocal now, peak
            with lock:
                now += 1
                peak = max(peak, now)
            sum(range(200))
            with lock:
                now -= 1
            return value if kind == "map" else True

        source = intune.from_dataset(range(400))
        pipe = getattr(source.map(lambda value: value), kind)(count, max_concurrency=most, waits=True)
        assert run(pipe, cpus=8) == list(range(400))
        assert 1 <= peak <= most

    def test_a_dataset_that_is_not_safe_in_parallel(self) -> None:
        class Careful:
            def __init__(self) -> None:
                self.lock = threading.Lock()

            def __len__(self) -> int:
                return 300

            def __getitem__(self, index: int) -> int:
                assert self.lock.acquire(blocking=False)
                sum(range(100))
                self.lock.release()
                return index

        assert run(intune.from_dataset(Careful(), max_concurrency=1), cpus=8) == list(range(300))

    def test_a_flat_map_has_no_more_parents_open(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"id": np.arange(30)}), tmp_path / "rows.parquet", row_group_size=1)
        lock, later_ones_came = threading.Lock(), threading.Event()
        now = peak = 0

        def late(block: Any) -> Any:
            number = block.column("id")[0].as_py()
            if number == 12:
                later_ones_came.set()
            if number == 10:
                assert later_ones_came.wait(30)
            return block

        def spread(block: Any) -> Iterator[Any]:
            nonlocal now, peak
            with lock:
                now += 1
                peak = max(peak, now)
            yield from [block] * 50
            with lock:
                now -= 1

        pipe = intune.read_parquet(tmp_path).map(late, waits=True)
        out = run(pipe.flat_map(spread, max_concurrency=1, waits=False), max_ahead=8)
        assert len(out) == 1500
        assert peak == 1
