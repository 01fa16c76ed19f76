"""However an iteration was left, the state says what was given, and a new loader goes on behind it."""

import gc
import inspect
import itertools
import json
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Loader, Pipeline

pytestmark = pytest.mark.timeout(180)

ROWS, BATCH = 300, 10
OURS = str(Path(intune.__file__).parent / "pipeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 ids in two files of row groups of 7 rows."""
    path = tmp_path_factory.mktemp("rows")
    for number in range(2):
        table = pa.table({"id": np.arange(number * 150, (number + 1) * 150)})
        pq.write_table(table, path / f"{number}.parquet", row_group_size=7)
    return path


def halves(block: Any) -> Iterator[Any]:
    yield block.slice(0, block.num_rows // 2)
    yield block.slice(block.num_rows // 2)


CHAINS: dict[str, Callable[[Path], Pipeline]] = {
    "batches": lambda folder: intune.read_parquet(folder).batch(BATCH),
    "shuffled": lambda folder: intune.read_parquet(folder).shuffle(64, seed=3).batch(BATCH),
    "one to many at the end": lambda folder: intune.read_parquet(folder).shuffle(64).flat_map(halves),
    "samples": lambda folder: intune.from_iterable(range(ROWS)).map(abs),
    "shuffled samples": lambda folder: intune.from_iterable(range(ROWS)).shuffle(64).map(abs),
}


def plain(item: Any) -> Any:
    return item["id"].to_pylist() if hasattr(item, "schema") else item


def epochs(pipe: Pipeline, count: int, state: str | None = None) -> list[list[Any]]:
    """What a run of so many epochs gives, or what is left of it after a state, by epoch."""
    with pipe.loader(cpus=2) as loader:
        given: list[list[Any]] = [[] for _ in range(count)]
        first = 0
        if state is not None:
            loader.load_state_dict(json.loads(state))
            first = json.loads(state)["epoch"]
        for epoch in range(first, count):
            given[epoch] = [plain(item) for item in loader]
        return given


class Stop(BaseException):
    """What a handler, or the body of a loop, raises."""


class Interruption:
    """Raises at the n-th point in our code from now on at which the interpreter would let a signal's handler run.

    Args:
        n: Which.
        name: Count only the ends of built-in functions of this name.
    """

    def __init__(self, n: int, name: str = "") -> None:
        self._left, self._name = n, name

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code  # a generator may be closed by its finaliser, which loses errors
        ours = code.co_filename.startswith(OURS) and not code.co_flags & inspect.CO_GENERATOR
        if ours and event in ("call", "c_return") and (not self._name or self._name == getattr(arg, "__name__", "")):
            self._left -= 1
            if not self._left:
                raise Stop


def leave_by_break(loader: Loader, got: list[Any], n: int) -> None:
    for item in loader:
        got.append(plain(item))
        if len(got) == n:
            break


def leave_by_an_error_in_the_body(loader: Loader, got: list[Any], n: int) -> None:
    def body() -> None:
        for item in loader:
            got.append(plain(item))
            if len(got) == n:
                raise Stop

    with pytest.raises(Stop):
        body()


def leave_by_an_error_that_keeps_the_iterator(loader: Loader, got: list[Any], n: int) -> None:
    running = iter(loader)
    got += [plain(next(running)) for _ in range(n)]
    with pytest.raises(Stop):
        interrupted_next(running)
    assert next(running, "nothing more") == "nothing more"
    loader.state_dict()  # while the iterator lives


def interrupted_next(running: Iterator[Any]) -> None:
    """An interrupt just when `next` has begun."""
    sys.setprofile(Interruption(1, "acquire"))
    try:
        next(running)
    finally:
        sys.setprofile(None)


def leave_by_dropping(loader: Loader, got: list[Any], n: int) -> None:
    running = iter(loader)
    got += [plain(next(running)) for _ in range(n)]
    del running


def leave_to_the_garbage_collector(loader: Loader, got: list[Any], n: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.running, self.me = iter(loader), self

    got += [plain(item) for item in itertools.islice(Trainer().running, n)]
    collector = threading.Thread(target=gc.collect)  # in whatever thread it comes
    collector.start()
    collector.join()


def leave_by_a_signal(loader: Loader, got: list[Any], n: int) -> None:
    def handler(number: int, frame: Any) -> None:
        raise Stop

    def wait(run: Any) -> None:
        if len(got) == n:
            signal.raise_signal(signal.SIGUSR1)
        await_(run)

    before = signal.signal(signal.SIGUSR1, handler)
    await_, loader._engine._await = loader._engine._await, wait  # type: ignore[method-assign]
    try:
        with pytest.raises(Stop):
            got.extend(plain(item) for item in loader)
    finally:
        signal.signal(signal.SIGUSR1, before)
        del loader._engine._await


WAYS = [
    leave_by_break,
    leave_by_an_error_in_the_body,
    leave_by_an_error_that_keeps_the_iterator,
    leave_by_dropping,
    leave_to_the_garbage_collector,
]


class TestEachWayToLeave:
    @pytest.mark.parametrize("chain", CHAINS)
    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[6:])
    def test_goes_on_behind_what_was_given(self, folder: Path, chain: str, way: Callable[..., None]) -> None:
        pipe = CHAINS[chain](folder)
        whole = epochs(pipe, 2)
        for n in (1, 13, len(whole[0]) - 1):
            got: list[Any] = []
            with pipe.loader(cpus=2) as loader:
                way(loader, got, n)
                state = json.dumps(loader.state_dict())
                assert json.dumps(loader.state_dict()) == state
            assert got == whole[0][:n]
            assert epochs(pipe, 2, state) == [whole[0][n:], whole[1]]

    @pytest.mark.parametrize("chain", ["batches", "shuffled", "one to many at the end"])
    def test_a_signal_in_a_wait(self, folder: Path, chain: str) -> None:
        pipe = CHAINS[chain](folder)
        whole = epochs(pipe, 2)
        for n in (0, 13, len(whole[0])):  # at last in the wait for the end of the epoch
            got: list[Any] = []
            with pipe.loader(cpus=2) as loader:
                leave_by_a_signal(loader, got, n)
                state = json.dumps(loader.state_dict())
            assert got == whole[0][:n]
            assert epochs(pipe, 2, state) == [whole[0][n:], whole[1]]

    def test_an_error_of_a_stage_stands_before_what_failed(self) -> None:
        broken = True

        def work(i: int) -> int:
            if broken and i == 137:
                raise ValueError("not now")
            return i

        for pipe in (intune.from_iterable(range(ROWS)).map(work), intune.from_iterable(range(ROWS)).map(work).batch(5)):
            broken = True
            got: list[Any] = []
            with pipe.loader(cpus=2) as loader:
                with pytest.raises(ValueError, match="not now"):
                    got.extend(loader)
                state = json.dumps(loader.state_dict())
            broken = False
            with pipe.loader(cpus=2) as loader:
                loader.load_state_dict(json.loads(state))
                got.extend(loader)
            assert np.array_equal(np.hstack(got), np.arange(ROWS))


class TestWhatComesNext:
    """Where an iteration was left is what a new loader goes on with; the loader itself goes on with the next epoch."""

    def test_the_next_iteration_is_the_next_epoch(self, folder: Path) -> None:
        pipe = CHAINS["shuffled"](folder)
        whole = epochs(pipe, 2)
        with pipe.loader(cpus=2) as loader:
            leave_by_break(loader, [], 4)
            left = loader.state_dict()
            assert left["epoch"] == 0
            running = iter(loader)
            assert loader.state_dict() == left, "nothing was asked for yet"
            assert plain(next(running)) == whole[1][0]
            assert loader.state_dict()["epoch"] == 1
            assert [plain(item) for item in running] == whole[1][1:]
            assert loader.state_dict()["epoch"] == 2
            del running
            assert loader.state_dict()["epoch"] == 2

    @pytest.mark.parametrize("keep", [False, True])
    def test_the_user_may_say_otherwise(self, folder: Path, keep: bool) -> None:
        pipe = CHAINS["batches"](folder)
        with pipe.loader(cpus=2) as loader:
            leave_by_break(loader, [], 4)
            early = loader.state_dict()
            loader.set_epoch(5)
            assert (loader.state_dict()["epoch"], loader.state_dict()["sequencers"]) == (5, [])
            running: Any = iter(loader)
            next(running)
            if keep:
                with pytest.raises(Stop):
                    interrupted_next(running)
            else:
                running = None
            assert loader.state_dict()["epoch"] == 5
            loader.load_state_dict(early)
            assert loader.state_dict() == early
            del running
            assert loader.state_dict() == early

    def test_an_epoch_chosen_while_another_is_live_is_the_next(self, folder: Path) -> None:
        pipe = CHAINS["batches"](folder)
        with pipe.loader(cpus=2) as loader:
            running = iter(loader)
            next(running)
            loader.set_epoch(7)
            assert loader.state_dict()["epoch"] == 0
            list(running)
            assert loader.state_dict()["epoch"] == 7

    def test_what_was_left_holds_no_data(self, folder: Path) -> None:
        pipe = CHAINS["shuffled"](folder)
        with pipe.loader(cpus=2) as loader:
            running = iter(loader)
            next(running)
            run = weakref.ref(loader._engine.runs[0])
            del running
            loader._engine.close()
            gc.collect()
            assert run() is None


def interrupt_at(loader: Loader, first: str, n: int) -> tuple[int, bool]:
    """Go on from a state, interrupted at the n-th point: how many items were given, and whether it was."""
    next(iter(loader))  # what tunes it has begun
    loader.load_state_dict(json.loads(first))
    given = 0
    running = iter(loader)
    sys.setprofile(Interruption(n))
    try:
        for _ in running:
            given += 1
        return given, False
    except Stop:
        return given, True
    finally:
        sys.setprofile(None)


@pytest.mark.slow
class TestEachMomentOfAnInterrupt:
    """The interrupt comes at each point of the last batches of an epoch, one after another, and of its end."""

    def states(self, pipe: Pipeline, last: int) -> tuple[str, int]:
        """The state before the last items, and how many there are in an epoch."""
        whole = epochs(pipe, 1)[0]
        with pipe.loader(cpus=2) as loader:
            running = iter(loader)
            for _ in range(len(whole) - last):
                next(running)
            return json.dumps(loader.state_dict()), len(whole)

    @pytest.mark.parametrize(("chain", "last"), [("batches", 3), ("shuffled", 2), ("one to many at the end", 3)])
    def test_blocks(self, folder: Path, chain: str, last: int) -> None:
        pipe = CHAINS[chain](folder)
        whole = epochs(pipe, 2)
        first, count = self.states(pipe, last)
        rests: dict[str, list[Any]] = {}
        moments = set()
        for n in itertools.count(1):
            with pipe.loader(cpus=1) as loader:
                given, stopped = interrupt_at(loader, first, n)
                state = json.dumps(loader.state_dict())
            if state not in rests:
                rests[state] = epochs(pipe, 2, state)
            assert rests[state] == [whole[0][count - last + given :], whole[1]], f"point {n}: {given} given"
            moments.add(given)
            if not stopped and moments == set(range(last + 1)):  # one that does not wait has fewer points than others
                break
        assert n > 100

    def test_the_only_batch_of_an_epoch(self, folder: Path) -> None:
        pipe = intune.read_parquet(folder).batch(ROWS)
        with pipe.loader(cpus=1) as loader:
            first = json.dumps(loader.state_dict())
            for n in itertools.count(1):
                given, stopped = interrupt_at(loader, first, n)
                state = loader.state_dict()
                at_end = state["epoch"] == 1 or [each["emission"] for each in state["sequencers"]] == [1]
                assert at_end == (given == 1), f"point {n}: {given} given"
                if not stopped:
                    break

    def test_samples(self, folder: Path) -> None:
        pipe = CHAINS["samples"](folder)
        first, _ = self.states(pipe, 5)
        for n in itertools.count(1):
            with pipe.loader(cpus=1) as loader:
                given, stopped = interrupt_at(loader, first, n)
                state = loader.state_dict()
            at = ROWS if state["epoch"] else state["source"] + state["drop"]
            assert at == ROWS - 5 + given, f"point {n}: {given} given"
            if not stopped:
                break
