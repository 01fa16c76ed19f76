"""A map-style dataset in worker processes: the same rows, errors and random numbers, whoever calls `__getitem__`."""

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import intune
from intune._compose import build_loader
from intune.pipeline.executors import PROBE_SECONDS
from intune.pipeline.options import LoaderOptions
from intune.testing import ManualClock

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

EXECUTORS = ["thread", "process", "auto"]


class Squares:
    """Sample i is (i, i * i)."""

    def __init__(self, n: int = 300) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return (index, index * index)


class Pids(Squares):
    def __getitem__(self, index: int) -> Any:
        return os.getpid()


class Broken(Squares):
    def __getitem__(self, index: int) -> Any:
        if index % 9 == 5:
            raise LookupError(f"row {index} is damaged")
        return index


class Deadly(Squares):
    def __getitem__(self, index: int) -> Any:
        if index in (120, 211):
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def taken(pipe: intune.Pipeline, **options: Any) -> list[Any]:
    with pipe.loader(**{"cpus": 2, **options}) as loader:
        return list(loader)


def until_error(pipe: intune.Pipeline) -> tuple[list[Any], BaseException]:
    """What came before it, and the error."""
    got: list[Any] = []
    with pipe.loader(cpus=2) as loader:
        try:
            for sample in loader:
                got.append(sample)
        except Exception as error:
            return got, error
    raise AssertionError(f"no error after {len(got)} samples")


def lists(batches: list[Any]) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


class TestRows:
    def test_the_same_wherever_they_are_read(self) -> None:
        found = []
        for executor in EXECUTORS:
            pipe = intune.from_dataset(Squares(), executor=executor).shuffle(64, seed=3).batch(16)
            with pipe.loader(cpus=2) as loader:
                running = iter(loader)
                first = [next(running) for _ in range(7)]
                identity = loader.state_dict()["identity"]
                found.append((lists(first), identity, lists(list(running))))
        assert found[1:] == found[:1] * 2
        assert sorted(i for batch in (*found[0][0], *found[0][2]) for i in batch[0]) == list(range(300))

    def test_a_state_of_threads_goes_on_in_processes(self) -> None:
        pipes = {
            name: intune.from_dataset(Squares(), executor=name).shuffle(64, seed=3).batch(16)
            for name in ("thread", "process")
        }
        whole = lists(taken(pipes["thread"]))
        with pipes["thread"].loader(cpus=2) as loader:
            running = iter(loader)
            for _ in range(9):
                next(running)
            state = loader.state_dict()
        with pipes["process"].loader(cpus=2) as other:
            other.load_state_dict(state)
            assert lists(list(other)) == whole[9:]

    def test_ranks_and_samplers(self) -> None:
        pipe = intune.from_dataset(Squares(101), executor="process")
        shares = [taken(pipe, rank=rank, world_size=2, on_uneven="uneven") for rank in range(2)]
        assert [i for share in shares for i, _ in share] == list(range(101))
        sampler = [5, -1, 3, 3, 0]
        assert taken(intune.from_dataset(Squares(9), sampler=sampler, executor="process")) == [
            (i, i * i) for i in sampler
        ]

    def test_a_sampler_stays_in_this_process(self) -> None:
        class Sampler:
            def __init__(self) -> None:
                self.lock = threading.Lock()  # could not be sent

            def __iter__(self) -> Iterator[int]:
                with self.lock:
                    return iter([2, 1])

        assert taken(intune.from_dataset(Squares(), sampler=Sampler(), executor="process")) == [(2, 4), (1, 1)]

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_any_sample_may_come_none_too(self, executor: Any) -> None:
        samples = [None, "text", b"bytes", {"a": [1, None]}, np.arange(50_000), 1.5, False]
        got = taken(intune.from_dataset(samples, executor=executor))
        assert [type(sample) for sample in got] == [type(sample) for sample in samples]
        assert got[4].tolist() == list(range(50_000))
        assert got[:4] + got[5:] == samples[:4] + samples[5:]

    def test_a_dataset_of_torch(self) -> None:
        torch = pytest.importorskip("torch")
        dataset = torch.utils.data.TensorDataset(torch.arange(20), torch.ones(20, 3))
        numbers, ones = zip(*taken(intune.from_dataset(dataset, executor="process").batch(8)), strict=True)
        assert torch.cat(numbers).tolist() == list(range(20))
        assert torch.cat(ones).equal(torch.ones(20, 3))


class TestProcesses:
    @pytest.mark.parametrize("most", [1, 2])
    def test_each_copy_is_asked_in_a_process_of_its_own(self, most: int) -> None:
        with intune.from_dataset(Pids(), executor="process", max_concurrency=most).loader(cpus=4) as loader:
            pids = {*loader, *loader}
            assert os.getpid() not in pids
            assert 1 <= len(pids) <= most
            loader.explain()
            (stage,) = loader.stats().window.stages
            assert (stage.info.executor, stage.info.kind) == ("process", "source")
            assert stage.processes_live in range(1, most + 1)  # the second may be on its way up still

    def test_one_that_cannot_be_sent_is_named_before_anything_runs(self) -> None:
        dataset = Squares()
        dataset.handle = threading.Lock()  # type: ignore[attr-defined]
        with pytest.raises(intune.PipelineError, match=r"'from_dataset'.*'handle' \(a lock\)"):
            intune.from_dataset(dataset, executor="process").loader()
        assert len(taken(intune.from_dataset(dataset))) == 300

    def test_what_a_copy_opens_itself_stays_with_it(self) -> None:
        class Lazy(Squares):
            lock: Any = None

            def __getitem__(self, index: int) -> Any:
                self.lock = self.lock or threading.Lock()
                with self.lock:
                    return index

        dataset = Lazy()
        assert taken(intune.from_dataset(dataset, executor="process")) == list(range(300))
        assert dataset.lock is None

    def test_a_killed_process_is_replaced_and_its_samples_come_once(self, tmp_path: Path) -> None:
        class Dying(Squares):
            def __getitem__(self, index: int) -> Any:
                if index in (77, 140) and not (tmp_path / str(index)).exists():
                    (tmp_path / str(index)).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return index

        assert taken(intune.from_dataset(Dying(), executor="process")) == list(range(300))
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_sample_that_kills_again_and_again_ends_with_the_reason(self) -> None:
        """The others that were sent to the same process with it come all the same."""
        got, error = until_error(intune.from_dataset(Deadly(), executor="process"))
        assert isinstance(error, intune.WorkerDiedError)
        assert re.search(r"'from_dataset'.*SIGKILL.*Memory: ", str(error))
        assert error.__notes__[-1].endswith("item 120")
        assert got == list(range(120))

    @pytest.mark.parametrize("stage", ["from_dataset", "map", "filter"])
    def test_left_out_are_the_samples_that_kill_and_no_others(self, stage: str) -> None:
        dataset = Deadly()
        pipe = {
            "from_dataset": intune.from_dataset(dataset, executor="process"),
            "map": intune.from_iterable(range(300)).map(dataset.__getitem__, name="map", executor="process"),
            "filter": intune.from_iterable(range(300)).filter(
                lambda i: dataset[i] == i, name="filter", executor="process"
            ),
        }[stage]
        with pipe.loader(cpus=2, on_error="skip") as loader:
            assert list(loader) == [i for i in range(300) if i not in (120, 211)]
            stats = loader.stats()
            assert stats.stages[stage].skipped == 2
            assert len(stats.skipped) == 2
            assert all("SIGKILL" in line for line in stats.skipped)


class TestErrors:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_the_error_is_the_datasets_own_and_names_its_number(self, executor: Any) -> None:
        sampler = [0, 1, 2, 3, 32, 4]  # the fifth is number 32
        got, error = until_error(intune.from_dataset(Broken(), sampler=sampler, executor=executor))
        assert got == [0, 1, 2, 3]
        assert (type(error), error.args) == (LookupError, ("row 32 is damaged",))
        notes = "\n".join(error.__notes__)
        assert "from_dataset" in notes
        assert notes.endswith("item 32")
        if executor == "process":
            assert "In worker process" in notes
            assert "__getitem__" in notes

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_those_left_out_are_counted_and_the_rest_comes(self, executor: Any) -> None:
        pipe = intune.from_dataset(Broken(), executor=executor)
        with pipe.loader(cpus=2, on_error="skip") as loader:
            assert list(loader) == [i for i in range(300) if i % 9 != 5]
            assert loader.stats().stages["from_dataset"].skipped == sum(i % 9 == 5 for i in range(300))

    @pytest.mark.parametrize("executor", [None, "fast", True])
    def test_no_such_executor(self, executor: Any) -> None:
        with pytest.raises(intune.PipelineError, match="from_dataset: executor must be 'thread', 'process' or 'auto'"):
            intune.from_dataset(Squares(), executor=executor)


class TestRandomNumbers:
    @pytest.mark.parametrize("library", ["random", "numpy", "torch"])
    def test_differ_between_samples_and_epochs_and_come_again_with_the_seed(self, library: str) -> None:
        if library == "torch":
            pytest.importorskip("torch")

        class Draws(Squares):
            def __init__(self) -> None:
                super().__init__(200)
                self.library = __import__(library)

            def __getitem__(self, index: int) -> int:
                if library == "random":
                    return int(self.library.getrandbits(60))
                if library == "numpy":
                    return int(self.library.random.randint(1 << 60))
                return int(self.library.randint(1 << 60, ()).item())

        def drawn(**options: Any) -> list[int]:
            with intune.from_dataset(Draws(), executor="process").loader(**options) as loader:
                return [*loader, *loader]

        first = drawn(cpus=2, seed=5)
        assert len(set(first)) == 400
        assert drawn(cpus=1, seed=5, prefetch=1) == first
        assert not set(drawn(cpus=1, seed=6)) & set(first)

    def test_ranks_differ(self) -> None:
        class Draws(Squares):
            def __getitem__(self, index: int) -> float:
                return random.random()

        pipe = intune.from_dataset(Draws(), executor="process")
        one, other = (taken(pipe, rank=rank, world_size=2, cpus=1) for rank in range(2))
        assert not set(one) & set(other)

    def test_those_of_the_training_process_are_left_alone(self) -> None:
        class Draws(Squares):
            def __getitem__(self, index: int) -> float:
                return random.random() + np.random.rand()

        random.seed(8)
        np.random.seed(8)
        before = random.getstate(), np.random.get_state()[1].tolist()
        taken(intune.from_dataset(Draws(), executor="process"))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class FixedProbe:
    """Says always the same."""

    def __init__(self, wait: float) -> None:
        self.wait = wait

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def mean_wait_seconds(self) -> float:
        return self.wait


class Clocked(Squares):
    """Samples that take 20 ms of a clock in this process; in another one, where there is no such clock, none."""

    def __init__(self, clock: ManualClock | None) -> None:
        super().__init__()
        self.clock = clock

    def __getitem__(self, index: int) -> Any:
        if self.clock is not None:
            self.clock.advance(0.02, cpu_seconds=0.02)
        return index

    def __reduce__(self) -> Any:
        return Clocked, (None,)


@pytest.mark.parametrize(("waits", "executor"), [(5.0, "process"), (0.0, "thread")])
def test_auto_follows_the_interpreter_lock(waits: float, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune._compose.LockProbe", lambda *arguments: FixedProbe(waits * PROBE_SECONDS))
    clock = ManualClock()
    pipe = intune.from_dataset(Clocked(clock), executor="auto")
    with build_loader(pipe, LoaderOptions(cpus=2), clock=clock) as loader:
        assert list(loader) == list(range(300))
        loader.explain()  # closes the window that has the decision
        events = [event for line in loader.journal for event in line["seen"].get("events", ())]
        decided = [(event["stage"], event["detail"].split(":")[0]) for event in events if event["kind"] == "executor"]
        assert decided == [("from_dataset", executor)]
        assert loader._engine.stages[0].executor == executor


def test_auto_keeps_a_dataset_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune._compose.LockProbe", lambda *arguments: FixedProbe(5 * PROBE_SECONDS))
    clock = ManualClock()

    class Held(Squares):
        def __getitem__(self, index: int) -> Any:  # its clock has a lock
            clock.advance(0.02, cpu_seconds=0.02)
            return index

    with build_loader(intune.from_dataset(Held(), executor="auto"), LoaderOptions(cpus=2), clock=clock) as loader:
        assert list(loader) == list(range(300))
        assert loader._engine.stages[0].executor == "thread"


@pytest.mark.slow
def test_measured_for_real() -> None:
    """Plain Python for 30 ms a sample holds the lock; a sleep does not."""

    class Spins(Squares):
        def __getitem__(self, index: int) -> int:
            until = time.thread_time() + 0.03
            while time.thread_time() < until:
                pass
            return index

    class Sleeps(Squares):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.03)
            return index

    for dataset, executor in ((Spins(20), "process"), (Sleeps(20), "thread")):
        with intune.from_dataset(dataset, executor="auto").loader(cpus=2) as loader:
            assert list(loader) == list(range(20))
            assert loader._engine.stages[0].executor == executor
