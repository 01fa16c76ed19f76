"""A function that raises gives one error, its own, that says where; what came before it is delivered."""

import os
import signal
import subprocess
import sys
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
from intune import Loader, Pipeline, SourceError, WorkerDiedError
from intune.testing import assert_exactly_once

from .resting import settle

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

BAD = 4242
EXECUTORS = ["thread", "process"]


class TwoArguments(Exception):
    """Cannot be rebuilt from its `args`."""

    def __init__(self, *, code: int, url: str) -> None:
        super().__init__(f"code {code} from {url}")
        self.code, self.url = code, url


class HoldsALock(Exception):
    """Cannot be pickled as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def two_arguments() -> None:
    raise TwoArguments(code=502, url="http://there")


def called_process() -> None:
    raise subprocess.CalledProcessError(3, ["make", "rows"], output="said so")


def unpicklable() -> None:
    raise HoldsALock("lock is held")


def empty_key() -> None:
    {}[""]


def plain() -> None:
    raise ValueError("no such click")


def chained() -> None:
    try:
        plain()
    except ValueError as error:
        raise RuntimeError("could not clean") from error


def system_exit() -> None:
    raise SystemExit(7)


ERRORS: dict[str, tuple[Callable[[], None], type[BaseException], str]] = {
    "two arguments": (two_arguments, TwoArguments, "code 502 from http://there"),
    "called process": (called_process, subprocess.CalledProcessError, "returned non-zero exit status 3"),
    "unpicklable": (unpicklable, HoldsALock, "lock is held"),
    "empty key": (empty_key, KeyError, "''"),
    "plain": (plain, ValueError, "no such click"),
    "chained": (chained, RuntimeError, "could not clean"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6,000 ids in two files with row groups of 500."""
    path = tmp_path_factory.mktemp("clicks")
    for number in range(2):
        ids = np.arange(number * 3000, (number + 1) * 3000)
        pq.write_table(pa.table({"id": ids}), path / f"part-{number}.parquet", row_group_size=500)
    return path


def raises_at(bad: int, fail: Callable[[], None]) -> Callable[[Any], Any]:
    """A block function that fails on one id."""

    def clean(block: Any) -> Any:
        if bad in block.column("id").to_pylist():
            fail()
        return block

    return clean


def ids(batches: list[Any]) -> list[int]:
    found: list[int] = []
    for batch in batches:
        if isinstance(batch, int):
            found.append(batch)
        else:
            found += (batch if isinstance(batch, np.ndarray) else batch.column("id").to_numpy()).tolist()
    return found


def until_error(loader: Loader) -> tuple[list[Any], BaseException]:
    """What was delivered, and then the error."""
    got: list[Any] = []
    try:
        for batch in loader:
            got.append(batch)
    except BaseException as error:
        if type(error).__module__.startswith("_pytest"):
            raise
        return got, error
    raise AssertionError(f"no error came, but {len(got)} batches")


def text(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


class TestInAFunction:
    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("kind", ERRORS)
    def test_the_original_error_with_its_place(self, folder: Path, kind: str, executor: Any) -> None:
        fail, error_type, says = ERRORS[kind]
        pipe = intune.read_parquet(folder).map(raises_at(BAD, fail), name="clean", executor=executor, max_concurrency=2)
        with pipe.batch(100).loader(cpus=2) as loader:
            got, error = until_error(loader)
            assert type(error) is error_type
            assert says in str(error)
            assert ids(got) == list(range(4000))
            everything = text(error)
            assert "'clean'" in everything
            assert "part-1.parquet" in everything
            assert "row group 2" in everything
            assert fail.__name__ in everything, "the line of the function that raised"
            if kind == "two arguments" and executor == "process":
                assert error.code == 502  # type: ignore[attr-defined]
            if kind == "chained":
                assert "no such click" in everything

    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
    def test_samples_before_it_are_delivered_one_by_one(self, method: str, executor: Any) -> None:
        def work(i: int) -> Any:
            if i == 777:
                raise ValueError("no 777")
            return {"map": i, "filter": True, "flat_map": [i]}[method]

        pipe = getattr(intune.from_iterable(range(2000)), method)(work, name="work", executor=executor)
        with pipe.loader(cpus=1 if executor == "process" else 3) as loader:
            got, error = until_error(loader)
        assert got == list(range(777))
        assert isinstance(error, ValueError)
        assert any("'work'" in note and "item 777" in note for note in error.__notes__)

    @pytest.mark.parametrize("method", ["map_rows", "unbatch"])
    def test_rows_of_blocks(self, folder: Path, method: str) -> None:
        def work(row: Any) -> Any:
            if row["id"] == BAD:
                raise ValueError("no 4242")
            return row

        pipe = intune.read_parquet(folder)
        pipe = (
            pipe.map_rows(work, name="work").batch(100)
            if method == "map_rows"
            else pipe.unbatch().map(work, name="work")
        )
        with pipe.loader(cpus=2) as loader:
            got, error = until_error(loader)
        if method == "map_rows":
            assert ids(got) == list(range(4200))
        else:
            assert [row["id"] for row in got] == list(range(BAD))
        assert any("'work'" in note and "part-1.parquet, row group 2" in note for note in error.__notes__)

    def test_children_before_it_are_delivered(self) -> None:
        def spread(i: int) -> Iterator[int]:
            yield from (10 * i, 10 * i + 1)
            if i == 5:
                raise ValueError("half way")
            yield 10 * i + 2

        with intune.from_iterable(range(9)).flat_map(spread).loader(cpus=2) as loader:
            got, error = until_error(loader)
        assert got == [10 * i + j for i in range(5) for j in range(3)] + [50, 51]
        assert str(error) == "half way"

    @pytest.mark.parametrize("fail", [plain, system_exit])
    def test_exactly_one_error_and_the_first_in_order(self, fail: Callable[[], None]) -> None:
        """Later items fail too, and before the first one does: they do not hide it."""
        later = threading.Event()

        def work(batch: np.ndarray) -> np.ndarray:
            if batch[0] == 20:
                assert later.wait(30)
                fail()
            if batch[0] > 20:
                later.set()
                raise RuntimeError(f"follow-on {batch[0]}")
            return batch

        pipe = intune.from_iterable(range(60)).batch(1).map(work, waits=True)
        with pipe.loader(cpus=4) as loader:
            running = iter(loader)
            got = [int(next(running)[0]) for _ in range(20)]
            assert got == list(range(20))
            with pytest.raises((ValueError, SystemExit)) as caught:
                next(running)
            assert any("item 20" in note for note in caught.value.__notes__)
            assert list(running) == []

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_the_loader_can_be_iterated_again(self, folder: Path, tmp_path: Path, executor: Any) -> None:
        class OnlyOnce:
            """Fails on one id, the first time that it is seen anywhere."""

            def __init__(self, flag: Path) -> None:
                self.flag = flag

            def __call__(self, block: Any) -> Any:
                if BAD in block.column("id").to_pylist() and not self.flag.exists():
                    self.flag.touch()
                    raise ValueError("the first time")
                return block

        pipe = (
            intune.read_parquet(folder)
            .map(OnlyOnce(tmp_path / "flag"), executor=executor, max_concurrency=1)
            .shuffle(900)
        )
        with pipe.batch(100).loader(cpus=2) as loader:
            _, error = until_error(loader)
            assert str(error) == "the first time"
            assert_exactly_once(ids(list(loader)), 6000)
            assert_exactly_once(ids(list(loader)), 6000)

    @pytest.mark.parametrize("ordered", [True, False])
    def test_an_error_every_epoch(self, ordered: bool) -> None:
        def work(i: int) -> int:
            if i == 50:
                raise ValueError("always")
            return i

        with intune.from_iterable(range(100)).map(work).batch(5).loader(cpus=3, ordered=ordered) as loader:
            for _ in range(5):
                got, error = until_error(loader)
                assert str(error) == "always"
                assert len(error.__notes__) == 1
                if ordered:
                    assert ids(got) == list(range(50))


class TestElsewhere:
    def test_in_an_iterable(self) -> None:
        class Broken:
            def __iter__(self) -> Iterator[int]:
                yield from range(37)
                raise ConnectionError("gone")

        for ordered in (True, False):
            with intune.from_iterable(Broken()).batch(10).loader(ordered=ordered) as loader:
                got, error = until_error(loader)
                assert str(error) == "gone"
                assert "from_iterable" in text(error)
                if ordered:
                    assert ids(got) == list(range(30))

    def test_in_iter_itself(self) -> None:
        class Broken:
            def __iter__(self) -> Iterator[int]:
                raise ConnectionError("never there")

        with intune.from_iterable(Broken()).loader() as loader:
            assert str(until_error(loader)[1]) == "never there"
            assert str(until_error(loader)[1]) == "never there"

    def test_in_a_dataset(self) -> None:
        class Broken:
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> int:
                if index == 63:
                    raise LookupError("row 63 is damaged")
                return index

        with intune.from_dataset(Broken()).batch(10).loader(cpus=3) as loader:
            got, error = until_error(loader)
        assert ids(got) == list(range(60))
        assert type(error) is LookupError
        assert any("from_dataset" in note and "63" in note for note in error.__notes__)

    def test_in_a_file_that_was_damaged_since(self, tmp_path: Path) -> None:
        for number in range(3):
            ids_ = np.arange(number * 100, (number + 1) * 100)
            pq.write_table(pa.table({"id": ids_}), tmp_path / f"{number}.parquet", compression="none")
        pipe = intune.read_parquet(tmp_path).batch(10)
        size = (tmp_path / "1.parquet").stat().st_size
        (tmp_path / "1.parquet").write_bytes(b"x" * size)
        with pipe.loader(cpus=2) as loader:
            got, error = until_error(loader)
        assert ids(got) == list(range(100))
        assert "1.parquet" in text(error)

    def test_in_collate(self) -> None:
        def collate(samples: list[int]) -> list[int]:
            if 25 in samples:
                raise ValueError("cannot collate")
            return samples

        with intune.from_iterable(range(60)).batch(10, collate=collate).map(lambda b: b).loader(cpus=3) as loader:
            got, error = until_error(loader)
        assert got == [list(range(10)), list(range(10, 20))]
        assert any("'batch'" in note for note in error.__notes__)

    def test_in_stacking(self) -> None:
        samples = [np.zeros(2)] * 15 + [np.zeros(3)] + [np.zeros(2)] * 4
        with intune.from_iterable(samples).batch(5).loader(cpus=2) as loader:
            got, error = until_error(loader)
        assert len(got) == 3
        assert isinstance(error, ValueError)

    def test_in_to_torch(self, folder: Path) -> None:
        class Refuses:
            def to(self, device: Any, **options: Any) -> Any:
                raise ValueError("boom")

        pipe = intune.read_parquet(folder).batch(1000)
        bad = pipe.map(
            lambda batch: {"name": np.array(["x"] * batch.num_rows)} if batch.column("id")[0].as_py() == 2000 else batch
        )
        with bad.to_torch().loader(cpus=2) as loader:
            got, error = until_error(loader)
        assert [batch["id"][0].item() for batch in got] == [0, 1000]
        assert isinstance(error, TypeError)
        assert any("'to_torch'" in note for note in error.__notes__)

    def test_in_a_sampler(self) -> None:
        class Broken:
            def __iter__(self) -> Iterator[int]:
                raise ConnectionError("no plan")

        with intune.from_dataset([1, 2], sampler=Broken()).loader() as loader:
            for _ in range(2):
                with pytest.raises(ConnectionError, match="no plan"):
                    list(loader)

    def test_in_the_training_loop(self) -> None:
        with intune.from_iterable(range(1000)).batch(5).loader(cpus=2) as loader:
            training = (1 / (10 - int(batch[0])) for batch in loader)
            with pytest.raises(ZeroDivisionError):
                list(training)
            assert ids(list(loader)) == list(range(1000))


class TestSkip:
    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("method", ["map", "filter"])
    def test_samples(self, method: str, executor: Any) -> None:
        def work(i: int) -> Any:
            if i % 10 == 3:
                raise ValueError(f"bad {i}")
            return i if method == "map" else True

        pipe = getattr(intune.from_iterable(range(200)), method)(work, name="work", executor=executor)
        with pipe.batch(16).loader(cpus=1 if executor == "process" else 3, on_error="skip") as loader:
            assert ids(list(loader)) == [i for i in range(200) if i % 10 != 3]
            stats = loader.stats()
        assert stats.stages["work"].skipped == 20
        assert len(stats.skipped) == 20
        assert any("work" in line and "bad 43" in line for line in stats.skipped)

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_blocks_are_left_out_whole(self, folder: Path, executor: Any) -> None:
        pipe = intune.read_parquet(folder).map(raises_at(BAD, plain), executor=executor, max_concurrency=1)
        with pipe.batch(100).loader(cpus=2, on_error="skip") as loader:
            assert ids(list(loader)) == [*range(4000), *range(4500, 6000)]
            (line,) = loader.stats().skipped
        assert "part-1.parquet, row group 2" in line
        assert "no such click" in line

    def test_rows_of_map_rows(self, folder: Path) -> None:
        def work(row: Any) -> Any:
            if row["id"] in (0, BAD, 5999):
                raise ValueError("bad row")
            return row

        with intune.read_parquet(folder).map_rows(work, name="work").loader(on_error="skip") as loader:
            assert sorted({*range(6000)} - {*ids(list(loader))}) == [0, BAD, 5999]
            assert loader.stats().stages["work"].skipped == 3

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_flat_map_keeps_what_came_before(self, executor: Any) -> None:
        def spread(i: int) -> Iterator[int]:
            yield 10 * i
            if i % 2:
                raise ValueError("odd")
            yield 10 * i + 1

        pipe = intune.from_iterable(range(6)).flat_map(spread, name="spread", executor=executor)
        with pipe.loader(cpus=1, on_error="skip") as loader:
            assert list(loader) == [0, 1, 10, 20, 21, 30, 40, 41, 50]
            assert loader.stats().stages["spread"].skipped == 3

    def test_datasets(self) -> None:
        class Broken:
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> int:
                if index % 9 == 0:
                    raise LookupError(index)
                return index

        with intune.from_dataset(Broken()).batch(10).loader(cpus=3, on_error="skip") as loader:
            for _ in range(2):
                assert ids(list(loader)) == [i for i in range(100) if i % 9]
            assert loader.stats().stages["from_dataset"].skipped == 24

    def test_a_file_that_was_damaged_since(self, tmp_path: Path) -> None:
        for number in range(3):
            ids_ = np.arange(number * 100, (number + 1) * 100)
            pq.write_table(pa.table({"id": ids_}), tmp_path / f"{number}.parquet", compression="none")
        pipe = intune.read_parquet(tmp_path).batch(30)
        size = (tmp_path / "1.parquet").stat().st_size
        (tmp_path / "1.parquet").write_bytes(b"x" * size)
        with pipe.loader(cpus=2, on_error="skip") as loader:
            assert ids(list(loader)) == [*range(100), *range(200, 300)]
            assert "1.parquet" in loader.stats().skipped[0]

    def test_batches_that_do_not_collate(self) -> None:
        def collate(samples: list[int]) -> list[int]:
            if 25 in samples:
                raise ValueError("cannot collate")
            return samples

        with intune.from_iterable(range(50)).batch(10, collate=collate).loader(on_error="skip") as loader:
            assert [batch[0] for batch in loader] == [0, 10, 30, 40]
            assert loader.stats().stages["batch"].skipped == 1

    def test_everything(self) -> None:
        def work(i: int) -> int:
            raise ValueError(i)

        with intune.from_iterable(range(300)).map(work).batch(7).loader(on_error="skip") as loader:
            assert list(loader) == []
            assert loader.stats().stages["work"].skipped == 300
            assert len(loader.stats().skipped) == 100

    @pytest.mark.parametrize("fail", [system_exit, lambda: (_ for _ in ()).throw(KeyboardInterrupt())])
    def test_what_is_no_exception_is_never_skipped(self, fail: Callable[[], Any]) -> None:
        def work(i: int) -> int:
            if i == 7:
                fail()
            return i

        with intune.from_iterable(range(30)).map(work).loader(on_error="skip") as loader:
            got, error = until_error(loader)
        assert got == list(range(7))
        assert isinstance(error, (SystemExit, KeyboardInterrupt))

    def test_a_source_that_cannot_begin_is_not_skipped_in_silence(self) -> None:
        with intune.from_iterable(i for i in range(3)).loader(on_error="skip") as loader:
            assert list(loader) == [0, 1, 2]
            with pytest.raises(SourceError, match="read only once"):
                list(loader)


class TestKilledWorkers:
    def kill_once(self, flag: Path, at: int) -> Callable[[Any], Any]:
        def work(block: Any) -> Any:
            if at in block.column("id").to_pylist() and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return block

        return work

    def test_the_item_is_done_again(self, folder: Path, tmp_path: Path) -> None:
        work = self.kill_once(tmp_path / "flag", BAD)
        pipe = intune.read_parquet(folder).map(work, executor="process", max_concurrency=2)
        with pipe.shuffle(700, seed=1).batch(64).loader(cpus=2) as loader:
            assert_exactly_once(ids(list(loader)), 6000)
        assert (tmp_path / "flag").exists()

    def test_order_is_kept(self, folder: Path, tmp_path: Path) -> None:
        work = self.kill_once(tmp_path / "flag", BAD)
        pipe = intune.read_parquet(folder).map(work, executor="process", max_concurrency=2)
        with pipe.batch(64).loader(cpus=2) as loader:
            assert ids(list(loader)) == list(range(6000))

    def test_a_deadly_item_gives_an_error_with_figures(self, folder: Path) -> None:
        def work(block: Any) -> Any:
            if BAD in block.column("id").to_pylist():
                os.kill(os.getpid(), signal.SIGKILL)
            return block

        pipe = intune.read_parquet(folder).map(work, name="deadly", executor="process", max_concurrency=2)
        with pipe.batch(100).loader(cpus=2) as loader:
            got, error = until_error(loader)
            assert ids(got) == list(range(4000))
            assert isinstance(error, WorkerDiedError)
            assert "SIGKILL" in str(error)
            assert "'deadly'" in str(error)
            assert "MiB" in str(error)
            assert "row group 2" in text(error)
            assert ids(until_error(loader)[0]) == list(range(4000))

    def test_idle_workers_that_are_killed_are_replaced(self, folder: Path) -> None:
        pipe = intune.read_parquet(folder).map(lambda block: block, name="same", executor="process", max_concurrency=2)
        with pipe.batch(100).loader(cpus=2) as loader:
            (pool,) = (stage.pool for stage in loader._engine.live if stage.pool is not None)
            running = iter(loader)
            got = [next(running)]
            settle(loader)
            for pid in pool.pids():  # type: ignore[attr-defined]
                os.kill(pid, signal.SIGKILL)
            assert ids([*got, *running]) == list(range(6000))

    @pytest.mark.parametrize("what", ["import", "exit"])
    def test_workers_that_cannot_begin(self, what: str) -> None:
        """Not a hang: the reason comes out of the loader."""

        class Broken:
            def __init__(self) -> None:
                self.what = what

            def __call__(self, i: int) -> int:
                return i

            def __setstate__(self, state: dict[str, Any]) -> None:
                if state["what"] == "import":
                    raise ImportError("no module named clicks")
                os._exit(9)

        pipe = intune.from_iterable(range(5)).map(Broken(), name="broken", executor="process", max_concurrency=1)
        with pipe.loader(cpus=1) as loader:
            _, error = until_error(loader)
            assert isinstance(error, ImportError if what == "import" else WorkerDiedError)
            assert "broken" in text(error)


def test_pipelines_are_not_spoilt_by_an_error() -> None:
    pipe: Pipeline = intune.from_iterable(range(10)).map(lambda i: 1 // (i - 5))
    for _ in range(2):
        with pipe.loader() as loader:
            assert isinstance(until_error(loader)[1], ZeroDivisionError)
