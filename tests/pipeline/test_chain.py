"""What is refused when a chain is built or a loader made, and how stages get their names."""

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Pipeline, PipelineError

pytestmark = pytest.mark.timeout(180)


def same(item: Any) -> Any:
    return item


@pytest.fixture
def blocks(tmp_path: Path) -> Pipeline:
    pq.write_table(pa.table({"id": list(range(10))}), tmp_path / "a.parquet")
    return intune.read_parquet(tmp_path)


@pytest.fixture
def samples() -> Pipeline:
    return intune.from_iterable(range(10))


class TestKindsOfItems:
    def test_readers_give_blocks_and_iterables_give_samples(self, blocks: Pipeline, samples: Pipeline) -> None:
        assert blocks.flow == "block"
        assert samples.flow == "sample"
        assert intune.from_dataset([1, 2]).flow == "sample"
        assert blocks.unbatch().flow == "sample"

    def test_batch_of_samples_is_opaque_and_of_blocks_a_block(self, blocks: Pipeline, samples: Pipeline) -> None:
        assert samples.batch(2).flow == "opaque"
        assert blocks.batch(2).flow == "block"
        assert blocks.batch(2).to_torch().flow == "opaque"

    def test_map_keeps_what_flows(self, blocks: Pipeline, samples: Pipeline) -> None:
        assert samples.map(same).flow == "sample"
        assert blocks.map(same).flow == "block"
        assert samples.batch(2).map(same).flow == "opaque"

    @pytest.mark.parametrize(
        "add",
        [
            lambda pipe: pipe.filter(same),
            lambda pipe: pipe.flat_map(same),
            lambda pipe: pipe.shuffle(4),
            lambda pipe: pipe.batch(2),
            lambda pipe: pipe.unbatch(),
            lambda pipe: pipe.map_rows(same),
        ],
        ids=["filter", "flat_map", "shuffle", "batch", "unbatch", "map_rows"],
    )
    @pytest.mark.parametrize("collate", [None, list], ids=["stacked", "collated"])
    def test_after_a_batch_of_samples_only_map_and_to_torch(
        self, samples: Pipeline, add: Callable[[Pipeline], Pipeline], collate: Any
    ) -> None:
        with pytest.raises(PipelineError, match="batch"):
            add(samples.batch(2, collate=collate))

    @pytest.mark.parametrize(
        "add",
        [
            lambda pipe: pipe.filter(same),
            lambda pipe: pipe.flat_map(same),
            lambda pipe: pipe.shuffle(4),
            lambda pipe: pipe.batch(2),
            lambda pipe: pipe.unbatch(),
            lambda pipe: pipe.map_rows(same),
            lambda pipe: pipe.to_torch(),
        ],
        ids=["filter", "flat_map", "shuffle", "batch", "unbatch", "map_rows", "to_torch"],
    )
    def test_after_to_torch_only_map(self, blocks: Pipeline, add: Callable[[Pipeline], Pipeline]) -> None:
        tensors = blocks.batch(2).to_torch()
        assert tensors.map(same).flow == "opaque"
        with pytest.raises(PipelineError, match=r"to_torch|put shuffle before batch"):
            add(tensors)

    def test_shuffle_after_batch_is_refused_with_the_hint(self, blocks: Pipeline) -> None:
        with pytest.raises(PipelineError, match="put shuffle before batch"):
            blocks.batch(2).shuffle(4)

    def test_to_torch_of_single_samples_is_refused_with_the_hint(self, samples: Pipeline) -> None:
        with pytest.raises(PipelineError, match="use batch first"):
            samples.to_torch()

    def test_what_needs_blocks_is_refused_for_samples(self, samples: Pipeline) -> None:
        with pytest.raises(PipelineError, match="map_rows needs blocks, but from_iterable gives samples: use map"):
            samples.map_rows(same)
        with pytest.raises(PipelineError, match="unbatch needs blocks"):
            samples.unbatch()

    def test_collate_of_blocks_is_refused(self, blocks: Pipeline) -> None:
        with pytest.raises(PipelineError, match="collate"):
            blocks.batch(2, collate=list)

    def test_each_method_leaves_the_pipeline_as_it_was(self, samples: Pipeline) -> None:
        longer = samples.map(same).batch(2)
        assert samples.stages == ()
        assert [stage.name for stage in longer.stages] == ["same", "batch"]


class TestOptions:
    @pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
    def test_batch_sizes(self, samples: Pipeline, size: Any) -> None:
        with pytest.raises(PipelineError, match="batch needs a size >= 1"):
            samples.batch(size)

    @pytest.mark.parametrize("rows", [0, -5, 1.5, False, None])
    def test_shuffle_rows(self, samples: Pipeline, rows: Any) -> None:
        with pytest.raises(PipelineError, match="shuffle needs rows >= 1"):
            samples.shuffle(rows)

    @pytest.mark.parametrize("seed", [-1, 0.5, "7", True])
    def test_shuffle_seeds(self, samples: Pipeline, seed: Any) -> None:
        with pytest.raises(PipelineError, match="seed"):
            samples.shuffle(4, seed=seed)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"executor": "fork"}, "executor must be 'thread', 'process' or 'auto', got 'fork'"),
            ({"max_concurrency": 0}, "max_concurrency must be at least 1 or None, got 0"),
            ({"max_concurrency": 1.5}, "max_concurrency must be at least 1 or None, got 1.5"),
            ({"executor": "process", "waits": True}, "waits=True is for threads"),
        ],
    )
    @pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
    def test_stage_options_are_checked_and_the_stage_is_named(
        self, samples: Pipeline, method: str, options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(PipelineError) as caught:
            getattr(samples, method)(same, name="clean", **options)
        assert "'clean'" in str(caught.value)
        assert says in str(caught.value)

    @pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
    def test_what_cannot_be_called_is_refused(self, samples: Pipeline, method: str) -> None:
        with pytest.raises(PipelineError, match="needs a function, got int"):
            getattr(samples, method)(3)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"cpus": 0}, "cpus"),
            ({"cpus": 2.0}, "cpus"),
            ({"memory": "many"}, "memory"),
            ({"memory": 0}, "memory"),
            ({"memory": -1}, "memory"),
            ({"memory": [1]}, "memory"),
            ({"memory": True}, "memory"),
            ({"seed": -1}, "seed"),
            ({"prefetch": 0}, "prefetch"),
            ({"max_ahead": 0}, "max_ahead"),
            ({"epochs": 0}, "epochs"),
            ({"on_error": "ignore"}, "on_error"),
            ({"on_uneven": "cut"}, "on_uneven"),
            ({"rank": 0}, "rank"),
            ({"world_size": 2}, "world_size"),
            ({"rank": 2, "world_size": 2}, "rank must be below world_size"),
            ({"rank": -1, "world_size": 2}, "rank"),
            ({"tuner": "best"}, "unknown tuner 'best'"),
            ({"tuner": object()}, "no tuner"),
        ],
    )
    def test_loader_options_are_checked(self, samples: Pipeline, options: dict[str, Any], says: str) -> None:
        with pytest.raises(PipelineError, match=says):
            samples.loader(**options)

    @pytest.mark.parametrize("wrong", ["text", b"bytes", 3, None])
    def test_what_is_no_iterable_of_samples(self, wrong: Any) -> None:
        with pytest.raises(PipelineError, match="from_iterable"):
            intune.from_iterable(wrong)

    def test_an_iterable_dataset_is_sent_to_the_other_function(self) -> None:
        with pytest.raises(PipelineError, match="use from_iterable"):
            intune.from_dataset(iter(range(3)))

    @pytest.mark.parametrize("most", [0, -1, 1.5])
    def test_max_concurrency_of_a_dataset(self, most: Any) -> None:
        with pytest.raises(PipelineError, match="max_concurrency"):
            intune.from_dataset([1, 2], max_concurrency=most)

    def test_a_function_that_cannot_be_sent_is_refused_when_the_loader_is_made(self, samples: Pipeline) -> None:
        import threading

        lock = threading.Lock()

        def locked(value: int) -> int:
            with lock:
                return value

        with pytest.raises(PipelineError) as caught:
            samples.map(locked, executor="process").loader()
        assert "'locked'" in str(caught.value)
        assert "'lock'" in str(caught.value)
        assert 'executor="thread"' in str(caught.value)


class TestNames:
    def test_a_stage_is_named_after_its_function(self, samples: Pipeline) -> None:
        class Scale:
            def __call__(self, value: int) -> int:
                return value

        pipe = (
            samples.map(same)
            .map(functools.partial(same))
            .map(lambda value: value)
            .map(Scale)
            .map(Scale())
            .filter(lambda value: True)
            .batch(2)
        )
        names = [stage.name for stage in pipe.stages]
        assert names == ["same", "same_2", "map", "Scale", "Scale_2", "filter", "batch"]
        assert repr(pipe) == "from_iterable -> " + " -> ".join(names)

    def test_a_name_is_taken_once(self, samples: Pipeline) -> None:
        with pytest.raises(PipelineError, match=r"stage name 'clean' stands in the chain already"):
            samples.map(same, name="clean").filter(same, name="clean")
        with pytest.raises(PipelineError, match="from_iterable"):
            samples.map(same, name="from_iterable")

    def test_names_that_would_meet_are_kept_apart(self, samples: Pipeline) -> None:
        pipe = samples.map(same, name="same_2").map(same).map(same)
        names = [stage.name for stage in pipe.stages]
        assert len(set(names)) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_a_pipeline_give_the_same(copied: Callable[[Pipeline], Pipeline], tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(10)}), tmp_path / "a.parquet")
    (tmp_path / "a.tsv").write_text("".join(f"{row}\n" for row in range(10)))
    schema = pa.schema([("a", pa.int64())])
    for pipe in (intune.read_parquet(tmp_path / "a.parquet"), intune.read_tsv(tmp_path / "a.tsv", schema=schema)):
        pipe.take(1)  # what reading leaves in it does no harm
        with copied(pipe.batch(4)).loader(cpus=1) as loader:
            assert [batch["a"].to_pylist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
