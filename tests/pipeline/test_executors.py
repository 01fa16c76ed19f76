"""Threads and processes give the same rows and the same random numbers; any function can go to a process."""

import functools
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Pipeline
from intune.pipeline import process

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

EXECUTORS = ["thread", "process"]


def run(pipe: Pipeline, epochs: int = 1, **options: Any) -> list[Any]:
    """Everything that some epochs give."""
    options.setdefault("cpus", 2)
    with pipe.loader(**options) as loader:
        return [item for _ in range(epochs) for item in loader]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 ids in row groups of 50."""
    path = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.table({"id": np.arange(1000)}), path / "rows.parquet", row_group_size=50)
    return path


def add(value: int, more: int) -> int:
    return value + more


class Table:
    """Something with state and methods."""

    def __init__(self, more: int = 3) -> None:
        self.more = more

    def __call__(self, value: int) -> int:
        return value + self.more

    def method(self, value: int) -> int:
        return value + self.more

    @staticmethod
    def static(value: int) -> int:
        return value + 3

    @classmethod
    def classy(cls, value: int) -> int:
        return value + 3


def nested() -> Callable[[int], int]:
    more = np.array([1, 2])

    def inner(value: int) -> int:
        return value + int(more.sum())

    return inner


FUNCTIONS: dict[str, Any] = {
    "lambda": lambda value: value + 3,
    "nested": nested(),
    "partial": functools.partial(add, more=3),
    "bound method": Table(3).method,
    "static method": Table.static,
    "class method": Table.classy,
    "object": Table(3),
    "class": Table,
    "partial of a class": functools.partial(Table, 3)(),
}


class TestAnyFunction:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_each_kind(self, executor: Any) -> None:
        """One stage for each kind of function, each on one worker."""
        pipe = intune.from_iterable(range(30))
        for name, function in FUNCTIONS.items():
            pipe = pipe.map(function, name=name, executor=executor, max_concurrency=1)
        assert run(pipe.batch(30), cpus=1)[0].tolist() == [i + 3 * len(FUNCTIONS) for i in range(30)]

    SCRIPT = """
        import functools, json, operator, threading
        import intune

        CONSTANT = 3

        class Row:
            def __init__(self, value):
                self.value = value

        class Reader:
            def __init__(self):
                self.lock = threading.Lock()
            def __call__(self, row):
                with self.lock:
                    return Row(row.value + CONSTANT)

        def helper(value):
            return value + CONSTANT

        def outer(row):
            return Row(helper(row.value))

        if __name__ == "__main__":
            pipe = (
                intune.from_iterable([Row(i) for i in range(20)])
                .map(outer, executor="process", max_concurrency=1)
                .map(Reader, executor="process", max_concurrency=1)
                .map(functools.partial(operator.attrgetter("value")), executor="process", max_concurrency=1)
                .map(lambda value: value + CONSTANT)
            )
            with pipe.loader(cpus=2) as loader:
                print(json.dumps([value for value in loader]))
        else:
            print("the main module was imported again")
    """

    @pytest.mark.parametrize("how", ["file", "stdin"])
    def test_what_is_defined_in_the_main_module(self, tmp_path: Path, how: str) -> None:
        script = textwrap.dedent(self.SCRIPT)
        file = tmp_path / "train.py"
        file.write_text(script)
        command = {"file": [str(file)], "stdin": ["-"]}[how]
        done = subprocess.run(
            [sys.executable, *command],
            input=script if how == "stdin" else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.stderr == ""
        assert done.stdout.strip() == str([i + 9 for i in range(20)])

    @pytest.mark.parametrize("holder", ["closure", "attribute", "argument"])
    def test_what_cannot_be_sent_is_named_and_nothing_is_left_half_started(self, holder: str) -> None:
        lock = threading.Lock()

        def closure(value: int) -> int:
            with lock:
                return value

        table = Table()
        table.lock = lock  # type: ignore[attr-defined]
        function = {"closure": closure, "attribute": table, "argument": functools.partial(add, more=lock)}[holder]
        pipe = (
            intune.from_iterable(range(3))
            .map(lambda i: i, executor="process")
            .map(function, name="locked", executor="process")
        )
        with pytest.raises(intune.PipelineError, match="'locked'") as caught:
            pipe.loader()
        assert 'executor="thread"' in str(caught.value)
        assert run(intune.from_iterable(range(3)).map(function if holder != "argument" else closure)) in (
            [0, 1, 2],
            [3, 4, 5],
        )

    def test_what_cannot_be_sent_as_an_item_is_named(self) -> None:
        pipe = intune.from_iterable([threading.Lock()]).map(lambda lock: 1, name="opened", executor="process")
        with pytest.raises(intune.StageError, match="'opened': an item cannot be sent"):
            run(pipe, cpus=1)
        back = intune.from_iterable([1]).map(lambda i: threading.Lock(), name="locks", executor="process")
        with pytest.raises(TypeError, match="lock") as caught:
            run(back, cpus=1)
        assert any("'locks'" in note for note in caught.value.__notes__)


class TestNoFork:
    def test_after_native_threads_were_used(self, folder: Path) -> None:
        """Arrow's pool and torch's are alive when the workers start, and a dataset object is held."""
        import pyarrow.dataset as ds
        import torch

        held = ds.dataset(folder)
        for round_ in range(4):
            assert pq.read_table(folder, use_threads=True).num_rows == held.to_table().num_rows == 1000
            assert (torch.ones(256, 256) @ torch.ones(256, 256)).sum() == 256**3
            pipe = intune.read_parquet(folder).map(lambda block: block, executor="process", max_concurrency=2)
            out = run(pipe.shuffle(100).batch(100), seed=round_)
            assert sorted(i for batch in out for i in batch.column("id").to_pylist()) == list(range(1000))

    def test_workers_are_warm_between_epochs(self) -> None:
        pipe = intune.from_iterable(range(20)).map(lambda i: os.getpid(), executor="process", max_concurrency=1)
        pids = run(pipe, epochs=3)
        assert len(set(pids)) == 1
        assert os.getpid() not in pids

    def test_as_many_processes_as_allowed(self) -> None:
        pipe = intune.from_iterable(range(50)).map(lambda i: os.getpid(), executor="process", max_concurrency=1)
        assert len(set(run(pipe, cpus=4))) == 1

    def test_a_class_is_made_in_the_worker_and_closed_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Counted:
            def __init__(self) -> None:
                (tmp_path / f"made-{os.getpid()}").touch(exist_ok=False)

            def __call__(self, i: int) -> int:
                return i

            def close(self) -> None:
                (tmp_path / f"closed-{os.getpid()}").touch(exist_ok=False)

        monkeypatch.setattr(process, "_CLOSE_SECONDS", 30.0)
        assert run(intune.from_iterable(range(50)).map(Counted, executor="process"), epochs=2) == [*range(50)] * 2
        made = {file.name.split("-")[1] for file in tmp_path.glob("made-*")}
        closed = {file.name.split("-")[1] for file in tmp_path.glob("closed-*")}
        assert 1 <= len(made) <= 2
        assert str(os.getpid()) not in made
        assert closed == made

    def test_flat_map_in_a_process_is_drawn_to_its_end(self) -> None:
        def spread(i: int) -> Iterator[int]:
            yield from range(i)

        pipe = intune.from_iterable(range(6)).flat_map(spread, executor="process", max_concurrency=1)
        assert run(pipe, cpus=1) == [j for i in range(6) for j in range(i)]

    def test_results_may_be_kept(self, folder: Path) -> None:
        """Batches from a process lie in shared memory: keeping them all must not change any."""
        pipe = intune.read_parquet(folder).map(
            lambda block: {
                "id": block.column("id").to_numpy(),
                "wide": np.repeat(block.column("id").to_numpy()[:, None], 2000, 1),
            },
            executor="process",
            max_concurrency=1,
        )
        out = run(pipe, cpus=1)
        for number, block in enumerate(out):
            assert block["id"].tolist() == list(range(50 * number, 50 * number + 50))
            assert (block["wide"] == block["id"][:, None]).all()
            block["wide"] += 1  # and they are ours to write to

    def test_the_input_is_not_changed_by_what_a_worker_does(self) -> None:
        samples = [np.arange(100_000) for _ in range(4)]

        def spoil(array: np.ndarray) -> int:
            array[:] = -1
            return int(array.sum())

        assert run(intune.from_iterable(samples).map(spoil, executor="process", max_concurrency=1)) == [-100_000] * 4
        assert all((sample == np.arange(100_000)).all() for sample in samples)


def draw_sample(value: int, rng: np.random.Generator) -> Any:
    return (value, int(rng.integers(1 << 62)))


def draw_block(block: Any, rng: np.random.Generator) -> Any:
    return {"id": block.column("id").to_numpy(), "draw": rng.integers(1 << 62, size=block.num_rows)}


class TestGenerators:
    """`rng=True`: the numbers depend on seed, epoch, stage and item, and on nothing else."""

    WAYS: tuple[dict[str, Any], ...] = (
        {"cpus": 1},
        {"cpus": 4},
        {"cpus": 3, "tuner": "even", "max_ahead": 2, "prefetch": 1},
        {"cpus": 2, "executor": "process"},
    )

    def all_ways(self, make: Callable[[Any], Pipeline], epochs: int = 2) -> list[Any]:
        found = []
        for way in self.WAYS:
            options = dict(way)
            out = run(make(options.pop("executor", "thread")), epochs, **options)
            found.append(
                [item if isinstance(item, tuple) else {k: v.tolist() for k, v in item.items()} for item in out]
            )
        assert all(other == found[0] for other in found[1:])
        return found[0]

    def test_samples(self) -> None:
        out = self.all_ways(
            lambda executor: intune.from_iterable(range(300)).map(draw_sample, rng=True, executor=executor)
        )
        assert len({draw for _, draw in out}) == 600, "items and epochs differ"

    def test_samples_of_a_dataset_after_a_shuffle(self) -> None:
        out = self.all_ways(
            lambda executor: intune.from_dataset(range(300)).shuffle(64).map(draw_sample, rng=True, executor=executor)
        )
        assert len({draw for _, draw in out}) == 600

    def test_blocks(self, folder: Path) -> None:
        out = self.all_ways(
            lambda executor: (
                intune.read_parquet(folder).map(draw_block, rng=True, executor=executor).shuffle(90).batch(40)
            )
        )
        assert len({draw for block in out for draw in block["draw"]}) == 2000

    def test_rows_and_children(self, folder: Path) -> None:
        def rows(row: Any, rng: np.random.Generator) -> Any:
            return {**row, "draw": rng.integers(1 << 62)}

        def children(value: int, rng: np.random.Generator) -> Any:
            return [(value, int(rng.integers(1 << 62))) for _ in range(3)]

        def keep(value: Any, rng: np.random.Generator) -> bool:
            return bool(rng.random() < 0.5)

        out = run(intune.read_parquet(folder).map_rows(rows, rng=True))
        assert len({draw for block in out for draw in block.column("draw").to_pylist()}) == 1000
        out = self.all_ways(
            lambda executor: (
                intune.from_iterable(range(100))
                .flat_map(children, rng=True, executor=executor)
                .filter(keep, rng=True, executor=executor)
            )
        )
        assert len(set(out)) == len(out)
        assert 200 < len(out) < 400

    def test_stages_seeds_and_ranks_differ(self) -> None:
        pipe = intune.from_iterable(range(100)).map(lambda i, rng: [i, int(rng.integers(1 << 62))], rng=True)
        two = run(pipe.map(lambda pair, rng: [*pair, int(rng.integers(1 << 62))], rng=True))
        assert not any(first == second for _, first, second in two)
        assert run(pipe, seed=1) != run(pipe, seed=2)
        assert run(pipe, seed=1) == run(pipe, seed=1)
        ranks = [run(pipe, rank=rank, world_size=2, on_uneven="uneven") for rank in range(2)]
        assert not {draw for _, draw in ranks[0]} & {draw for _, draw in ranks[1]}


class TestGlobalGenerators:
    """In worker processes `random`, numpy and torch are seeded for each item: nobody else draws from them."""

    @staticmethod
    def draw(value: Any) -> Any:
        return (random.getrandbits(60), int(np.random.randint(1 << 60)))

    def test_differ_between_items_and_epochs_and_come_again_with_the_seed(self) -> None:
        pipe = intune.from_iterable(range(1000)).map(self.draw, executor="process")
        out = run(pipe, epochs=2, seed=3)
        for which in range(2):
            assert len({pair[which] for pair in out}) >= 1998
        assert run(pipe, epochs=2, seed=3, cpus=1) == out
        assert run(pipe, seed=4, cpus=1)[0] != out[0]

    @pytest.mark.parametrize(
        "imported",
        [
            "with the function",
            pytest.param(
                "by the function",
                marks=pytest.mark.xfail(
                    strict=True, reason="torch is seeded from the item on that follows the one that imports it"
                ),
            ),
        ],
    )
    def test_torch_too(self, imported: str) -> None:
        import torch

        def draw(value: int) -> int:
            return int(torch.randint(1 << 60, ()).item())

        def import_and_draw(value: int) -> int:
            import torch

            return int(torch.randint(1 << 60, ()).item())

        function = draw if imported == "with the function" else import_and_draw
        pipe = intune.from_iterable(range(20)).map(function, executor="process", max_concurrency=1)
        with pipe.loader(cpus=1) as loader:
            first, second = list(loader), list(loader)
            loader.set_epoch(0)
            again = list(loader)
        assert len({*first, *second}) == 40
        assert again == first

    def test_those_of_the_training_process_are_left_alone(self) -> None:
        random.seed(1)
        np.random.seed(1)
        expected = self.draw(0)
        random.seed(1)
        np.random.seed(1)
        run(intune.from_iterable(range(50)).map(lambda i, rng: i, rng=True).shuffle(20).batch(5))
        assert self.draw(0) == expected


class TestChildrenOfTheWorker:
    def test_threads_of_the_maths_libraries_are_few(self) -> None:
        def environment(value: int) -> Any:
            return [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")]

        pipe = intune.from_iterable([1]).map(environment, executor="process")
        expected = os.environ.get("OMP_NUM_THREADS", "1")
        assert run(pipe, cpus=1) == [[expected] * 3]

    def test_a_users_choice_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        pipe = intune.from_iterable([1]).map(lambda i: os.environ["OMP_NUM_THREADS"], executor="process")
        assert run(pipe, cpus=1) == ["2"]

    def test_what_a_worker_prints_is_seen(self, capfd: pytest.CaptureFixture[str]) -> None:
        run(intune.from_iterable([1]).map(lambda i: print("from the worker") or i, executor="process"), cpus=1)
        assert "from the worker" in capfd.readouterr().out
