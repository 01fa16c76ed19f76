"""A loader whose limits change while it runs: whatever is moved, the rows stay the same and memory within its bound."""

import json
import logging
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Allocation, Budget, Loader, MemoryLimitError, Pipeline
from intune._compose import build_loader
from intune.pipeline.options import LoaderOptions
from intune.pipeline.stage import LiveStage
from intune.testing import assert_exactly_once
from intune.tuners import RandomMoves, Static

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

ROWS = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 ids in row groups of 100, 8 bytes a row."""
    path = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.table({"id": np.arange(ROWS)}), path / "rows.parquet", row_group_size=100)
    return path


def ids(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        if isinstance(batch, int):
            found.append(batch)
        else:
            found += np.asarray(batch["id"] if not isinstance(batch, np.ndarray) else batch).tolist()
    return found


def same(item: Any) -> Any:
    return item


def halves(block: Any) -> Iterator[Any]:
    yield block.slice(0, block.num_rows // 2)
    yield block.slice(block.num_rows // 2)


class Moving:
    """Decisions one after another, from a thread of their own, for as long as the block lasts."""

    def __init__(self, move: Callable[[], object]) -> None:
        self.moves = 0
        self._move, self._stop = move, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.0005):
                self._move()
                self.moves += 1
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Moving":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def held() -> tuple[int, int]:
    return threading.active_count(), len(psutil.Process().children())


class TestMovesDoNotTouchTheData:
    CHAINS: ClassVar[dict[str, Callable[[Any], Pipeline]]] = {
        "threads": lambda pipe: pipe.map(same).batch(32).map(same),
        "process": lambda pipe: pipe.map(same, executor="process", max_concurrency=2).batch(32),
        "one-to-many": lambda pipe: pipe.flat_map(halves).map(same).batch(32),
        "unbatched": lambda pipe: pipe.unbatch().map(lambda row: row["id"]).batch(32),
    }

    @pytest.mark.parametrize("by", ["random tuner", "one stage to and fro", "anything"])
    @pytest.mark.parametrize("ordered", [True, False])
    @pytest.mark.parametrize("chain", CHAINS)
    def test_ids_are_exact(self, folder: Path, chain: str, ordered: bool, by: str) -> None:
        before = held()
        rng = random.Random(f"{chain} {ordered} {by}")
        pipe = self.CHAINS[chain](intune.read_parquet(folder))
        with pipe.loader(cpus=6, tuner=RandomMoves(rng.randrange(99)), ordered=ordered) as loader:
            with Moving(self.mover(loader, by, rng)) as moving:
                epochs = 0
                while epochs < 2 or moving.moves < 3:
                    got = ids(loader)
                    assert got == list(range(ROWS)) if ordered else assert_exactly_once(got, ROWS) is None
                    epochs += 1
            assert loader._engine.scheduler.peak_used <= 6
            assert loader._engine.scheduler.used == 0
        while held() != before:
            time.sleep(0.001)

    def mover(self, loader: Loader, by: str, rng: random.Random) -> Callable[[], object]:
        engine = loader._engine
        names = [stage.name for stage in engine.stages]
        if by == "random tuner":
            return loader._control._controller.step  # type: ignore[attr-defined]
        chosen = names[1]

        def move() -> None:
            now = engine.allocation
            if by == "one stage to and fro":
                value = 6 if now.concurrency[chosen] == 1 else 1
                engine.apply(replace(now, slots=6, concurrency={**now.concurrency, chosen: value}))
            else:
                engine.apply(
                    Allocation(
                        {name: rng.choice((None, 1, 2, 6)) for name in names},
                        rng.randint(1, 6),
                        rng.choice((None, 0, 1000, 10**6)),
                    )
                )

        return move

    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_shuffled_order_does_not_change(self, folder: Path, executor: Any) -> None:
        pipe = (
            intune.read_parquet(folder).map(same, executor=executor, max_concurrency=2).shuffle(700).map(same).batch(32)
        )
        with pipe.loader(cpus=2, seed=5) as loader:
            expected = [ids(loader), ids(loader)]
        for seed in range(1 if executor == "process" else 3):
            with pipe.loader(cpus=5, seed=5, tuner=RandomMoves(seed)) as loader:
                controller = loader._control._controller  # type: ignore[attr-defined]
                with Moving(controller.step):
                    assert [ids(loader), ids(loader)] == expected

    def test_resumed_while_it_is_moved(self, folder: Path) -> None:
        pipe = intune.read_parquet(folder).flat_map(halves).shuffle(300).batch(32)
        with pipe.loader(cpus=3) as loader:
            whole = ids(loader)
        got: list[int] = []
        state = None
        for stop in (5, 60, 1, 100, 999):
            with pipe.loader(cpus=5, tuner=RandomMoves(stop)) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                with Moving(loader._control._controller.step):  # type: ignore[attr-defined]
                    for number, batch in enumerate(loader, 1):
                        got += ids([batch])
                        if number == stop:
                            state = json.dumps(loader.state_dict())
                            break
        assert got == whole

    @pytest.mark.parametrize(
        "tuner",
        ["shared", "even", "proportional", pytest.param(Static({"rest": 2, "batch": 1}, slots=2), id="static")],
    )
    def test_every_tuner(self, folder: Path, tuner: Any) -> None:
        with intune.read_parquet(folder).map(same, name="rest").batch(32).loader(cpus=3, tuner=tuner) as loader:
            controller = loader._control._controller  # type: ignore[attr-defined]
            with Moving(controller.step):
                assert ids(loader) == list(range(ROWS))
            assert loader._engine.scheduler.peak_used <= 3

    def test_the_budget_is_obeyed_at_the_next_decision(self, folder: Path) -> None:
        cpus = [8]
        pipe = intune.read_parquet(folder).map(same).batch(32)
        loader = build_loader(pipe, LoaderOptions(tuner="shared"), budget=lambda: Budget(cpus[0]))
        with loader:
            controller = loader._control._controller  # type: ignore[attr-defined]
            got: list[int] = []
            for number, batch in enumerate(loader):
                got += ids([batch])
                if number in (100, 200):
                    cpus[0] = 1 if number == 100 else 8
                    controller.step()
                    assert loader._engine.scheduler.slots == cpus[0]
            assert got == list(range(ROWS))


class Bytes:
    """A tuner that allows so many bytes in flight."""

    def __init__(self, size: int) -> None:
        self.size = size

    def propose(self, snapshot: Any, budget: Budget) -> Allocation:
        return Allocation({stage.name: None for stage in snapshot.stages}, budget.cpus, self.size)


def wide(block: Any) -> dict[str, np.ndarray]:
    """A kilobyte a row."""
    rows = np.asarray(block["id"])
    return {"id": rows, "x": np.repeat(rows[:, None], 127, 1)}


class TestMemory:
    @pytest.mark.parametrize("chain", [lambda pipe: pipe, lambda pipe: pipe.map(wide)], ids=["read", "mapped"])
    def test_a_window_that_does_not_fit_says_what_would(self, folder: Path, chain: Any) -> None:
        pipe = chain(intune.read_parquet(folder))
        size = 40_000 if pipe.stages == () else 2_000_000
        with pipe.shuffle(9000).batch(32).loader(cpus=2, tuner=Bytes(size)) as loader:
            with pytest.raises(MemoryLimitError, match=r"shuffle\(rows=9000\)") as caught:
                list(loader)
            with pytest.raises(MemoryLimitError):
                list(loader)
        found = re.search(r"at most rows=(\d+) fit", str(caught.value))
        assert found is not None
        fits = int(found[1])
        assert 100 < fits < 9000
        with pipe.shuffle(fits).batch(32).loader(cpus=2, tuner=Bytes(size)) as loader:
            assert_exactly_once(ids(loader), ROWS)

    def test_while_it_is_not_known_what_processes_will_leave_no_window_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LiveStage, "measure_processes", lambda stage: None)
        pipe = intune.from_iterable(range(40)).map(abs, executor="process").shuffle(4, seed=1)
        with pipe.loader(cpus=2, tuner=Bytes(0)) as loader:
            assert sorted(loader) == list(range(40))

    def test_a_few_large_rows_at_first_do_not_speak_for_all(self) -> None:
        """The first windows have 1, 2, 5 and 10 rows; most of the third one are forty times as large as all others."""
        sizes = [4_000_000 if place in (3, 4, 5) else 100_000 for place in range(100)]
        pipe = intune.from_iterable(sizes).map(lambda size: np.zeros(size, np.uint8), name="make").shuffle(20)
        with pipe.loader(cpus=2, tuner=Bytes(60_000_000)) as loader:
            assert sorted(len(sample) for sample in loader) == sorted(sizes)

    def test_large_rows_are_told_before_a_whole_window_of_them_is_there(self) -> None:
        pipe = intune.from_iterable(range(100)).map(lambda _: np.zeros(5_000_000, np.uint8), name="make").shuffle(20)
        given: list[Any] = []
        with pipe.loader(cpus=2, tuner=Bytes(60_000_000)) as loader:  # noqa: SIM117
            with pytest.raises(MemoryLimitError, match=r"shuffle\(rows=20\) .* at most rows=5 fit"):
                given.extend(len(sample) for sample in loader)
        assert len(given) <= 1 + 2 + 5

    def test_a_limit_for_everything(self, folder: Path) -> None:
        """Two windows of 9 MB in what 24 MiB above what this process holds leave for items."""
        limit = psutil.Process().memory_info().rss + (24 << 20)
        pipe = intune.read_parquet(folder).map(lambda block: {**wide(block), "y": np.zeros((block.num_rows, 2000))})
        with pipe.shuffle(9000).batch(32).loader(cpus=2, memory=limit) as loader:  # noqa: SIM117
            with pytest.raises(MemoryLimitError, match="raise memory="):
                list(loader)

    @pytest.mark.parametrize("size", [0, 1, 5000])
    @pytest.mark.parametrize(
        "chain",
        [
            lambda pipe: pipe,
            lambda pipe: pipe.batch(32),
            lambda pipe: pipe.map(wide).batch(700),
            lambda pipe: pipe.flat_map(halves).batch(32),
            lambda pipe: pipe.flat_map(halves).flat_map(halves).map(wide),
            lambda pipe: pipe.filter(lambda block: block.column("id").to_numpy() % 2 == 0).batch(50),
            lambda pipe: pipe.unbatch().flat_map(lambda row: [row, row]).batch(32),
        ],
        ids=["read", "batch", "map", "flat_map", "flat_map twice", "filter", "unbatch"],
    )
    @pytest.mark.parametrize("ordered", [True, False])
    def test_hardly_any_is_slow_but_comes_to_its_end(
        self, folder: Path, chain: Callable[[Pipeline], Pipeline], size: int, ordered: bool
    ) -> None:
        pipe = chain(intune.read_parquet(folder))
        with pipe.loader(cpus=4) as loader:
            expected = sum(1 for _ in loader)
        with pipe.loader(cpus=4, tuner=Bytes(size), ordered=ordered) as loader:
            assert sum(1 for _ in loader) == expected
            assert loader._engine.context.ledger.charged == 0

    @pytest.mark.parametrize("ordered", [True, False])
    @pytest.mark.parametrize(
        "chain",
        [
            lambda pipe: pipe.shuffle(64).batch(32),
            lambda pipe: pipe.flat_map(halves).shuffle(64).batch(32),
            lambda pipe: pipe.shuffle(64).flat_map(halves).batch(32),
            lambda pipe: pipe.shuffle(64).shuffle(16).batch(700),
        ],
        ids=["shuffle", "flat_map before", "flat_map after", "twice"],
    )
    def test_no_more_than_two_windows_is_enough(self, folder: Path, chain: Any, ordered: bool) -> None:
        """The window's rows fit, but not the row groups that they lie in."""
        pipe = chain(intune.read_parquet(folder))
        for samples in (False, True):
            start = intune.from_iterable(range(ROWS)).shuffle(64).batch(32) if samples else pipe
            with start.loader(cpus=4, tuner=Bytes(6000), ordered=ordered) as loader:
                assert_exactly_once(ids(loader), ROWS)
                assert loader._engine.context.ledger.charged == 0

    @pytest.mark.parametrize("ordered", [True, False])
    @pytest.mark.parametrize("consumer", ["quick", "paused"])
    def test_the_bound_is_kept(self, folder: Path, consumer: str, ordered: bool) -> None:
        """Of 60 blocks of 100 kB that may run ahead, no more are made than fit into 1 MB, but for those in hand."""
        lock = threading.Lock()
        alive = most = 0

        def dead() -> None:
            nonlocal alive
            with lock:
                alive -= 1

        def made(block: Any) -> Any:
            nonlocal alive, most
            block = wide(block)
            with lock:
                alive += 1
                most = max(most, alive)
            weakref.finalize(block["x"], dead)
            return block

        pipe = intune.read_parquet(folder).map(made, waits=True).map(same).batch(100)
        options: dict[str, Any] = {"max_ahead": 60, "prefetch": 50, "ordered": ordered}
        with pipe.loader(cpus=4, tuner=Bytes(1_000_000), **options) as loader:
            running = iter(loader)
            for _ in range(20 if consumer == "paused" else 100):
                next(running)
            if consumer == "paused":
                while loader._engine.context.busy:
                    time.sleep(0.001)
            assert 1 < most <= 10 + 4
            del running

    def test_what_a_flat_map_gives_does_not_swell_what_its_source_reserves(self, folder: Path) -> None:
        pipe = intune.read_parquet(folder).map(wide).flat_map(lambda block: [block, block], name="twice").batch(100)
        with pipe.loader(cpus=4, memory="8GiB") as loader:
            assert len(ids(loader)) == 2 * ROWS
            assert loader._engine.context.ledger.peak < 64 << 20

    def test_bytes_that_were_lowered_for_a_while_are_no_reason_to_give_up(self, folder: Path) -> None:
        """Whether two windows fit is judged by the most that was ever allowed: a tuner, or the guard, may take back."""
        tuner = Bytes(1_000_000)
        pipe = intune.read_parquet(folder).shuffle(3000).batch(32)
        with pipe.loader(cpus=2, tuner=tuner) as loader:
            tuner.size = 100
            loader._control._controller.step()  # type: ignore[attr-defined]
            assert_exactly_once(ids(loader), ROWS)

    def test_the_error_names_the_stage(self, folder: Path) -> None:
        with intune.read_parquet(folder).shuffle(9000).loader(tuner=Bytes(1000)) as loader:
            with pytest.raises(MemoryLimitError) as caught:
                list(loader)
            assert any("'shuffle'" in note for note in caught.value.__notes__)


class TestTunersThatFail:
    @pytest.mark.parametrize("how", ["raises", "nothing", "incomplete", "negative"])
    def test_training_goes_on(self, folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def propose(self, snapshot: Any, budget: Budget) -> Any:
                if how == "raises":
                    raise RuntimeError("no idea")
                if how == "nothing":
                    return None
                return Allocation({} if how == "incomplete" else {stage.name: -1 for stage in snapshot.stages}, 1)

        with (
            caplog.at_level(logging.ERROR),
            intune.read_parquet(folder).batch(32).loader(cpus=2, tuner=Broken()) as loader,
        ):
            controller = loader._control._controller  # type: ignore[attr-defined]
            controller.step()
            assert ids(loader) == list(range(ROWS))
            controller.step()
            events = [event for line in loader.journal for event in line["seen"].get("events", [])]
        assert len([record for record in caplog.records if "Broken" in record.message]) == 1
        assert [event["kind"] for event in events].count("tuner_failed") == 1


class TestJournal:
    def test_a_file_gets_each_decision(self, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.jsonl"
        with intune.read_parquet(folder).batch(32).loader(cpus=2, tuner="even", journal=file) as loader:
            ids(loader)
            loader._control._controller.step()  # type: ignore[attr-defined]
            loader._control.stop()
            kept = loader.journal
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["tick"] for line in lines] == [line["tick"] for line in kept]
        assert len(lines) >= 3
        assert all(line["schema"] == lines[0]["schema"] for line in lines)

    def test_without_a_path_nothing_is_written(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with intune.read_parquet(folder).batch(32).loader(cpus=2) as loader:
            ids(loader)
        assert list(tmp_path.iterdir()) == []

    def test_a_journal_that_cannot_be_written_is_said_at_once(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        for path, advice in (
            (tmp_path / "nowhere" / "run.jsonl", f"there is no folder {tmp_path / 'nowhere'}: make it first"),
            (str(tmp_path / "nowhere" / "run.jsonl"), "or name a file in one that is there"),
            (tmp_path / "file" / "run.jsonl", f"there is no folder {tmp_path / 'file'}"),
            (tmp_path, f"it is a folder: name a file in it, such as {tmp_path / 'journal.jsonl'}"),
            (5, "journal must be the path of a file or None, got 5"),
        ):
            with pytest.raises(intune.PipelineError) as refused:
                intune.read_parquet(folder).loader(journal=path)
            assert advice in str(refused.value)
            assert isinstance(path, int) or f"journal={str(path)!r} cannot be written (" in str(refused.value)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody may make a file")
    def test_a_journal_that_may_not_be_written_says_what_else_to_give(self, folder: Path) -> None:
        with pytest.raises(intune.PipelineError, match="give a path that this user may write to, or None"):
            intune.read_parquet(folder).loader(journal="/proc/self/run.jsonl")
