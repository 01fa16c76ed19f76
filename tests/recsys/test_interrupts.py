"""Signals while a model is trained: each moment forced, and the run that goes on is the one that never stopped."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune import IntuneError  # noqa: E402
from intune.pipeline.engine import Engine  # noqa: E402
from intune.pipeline.loader import LoaderIterator  # noqa: E402
from intune.recsys import train as training  # noqa: E402
from intune.recsys.config import TrainConfig  # noqa: E402
from intune.recsys.generate import write_criteo  # noqa: E402
from intune.recsys.interrupts import BrokenOff, Interrupts  # noqa: E402
from intune.recsys.train import train  # noqa: E402

EPOCH_STEPS = 9
"""900 of 1,000 rows, 100 a step."""


def forever() -> None:
    """What never ends but by an exception."""
    while True:
        time.sleep(0.005)


def interrupt(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_were() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is broken off almost at once."""
    monkeypatch.setattr(Interrupts.__init__, "__defaults__", (0.05,))


class TestTheClass:
    def test_without_a_signal_nothing_happens(self) -> None:
        with Interrupts(lambda: pytest.fail("nobody asked")) as stop:
            assert stop.wait(lambda: 5) == 5
            assert stop.wait(lambda: None) is None
        stop.deliver()
        assert (stop.asked, stop.broke_wait, stop.position) == (None, False, None)

    def test_a_signal_is_kept_until_it_is_delivered(self) -> None:
        done = []
        with Interrupts(dict) as stop:
            interrupt()
            done.append("the rest of the step")
            assert stop.asked == signal.SIGINT
            assert stop.wait(lambda: pytest.fail("no further batch")) is None
        with pytest.raises(KeyboardInterrupt):
            stop.deliver()
        assert done
        assert not stop.broke_wait

    def test_a_wait_is_broken_off_once_it_is_known_where_the_loop_stands(self) -> None:
        answers: list[dict[str, int] | None] = [None, None, {"at": 3}]

        def take() -> None:
            interrupt()
            forever()

        with Interrupts(lambda: answers.pop(0)) as stop:
            assert stop.wait(take) is None
        assert (stop.broke_wait, stop.position, answers) == (True, {"at": 3}, [])

    def test_a_batch_that_comes_meanwhile_is_given(self) -> None:
        asked = threading.Event()

        def where() -> None:
            asked.set()

        def take() -> str:
            interrupt()
            while not asked.is_set():
                time.sleep(0.001)
            return "batch"

        with Interrupts(where) as stop:
            assert stop.wait(take) == "batch"
        assert (stop.asked, stop.broke_wait) == (signal.SIGINT, False)

    @pytest.mark.usefixtures("impatient")
    def test_a_wait_of_which_nothing_can_be_learnt_is_broken_off_all_the_same(self) -> None:
        def take() -> None:
            interrupt()
            forever()

        with Interrupts(lambda: None) as stop:
            assert stop.wait(take) is None
        assert (stop.broke_wait, stop.position) == (True, None)

    @pytest.mark.usefixtures("impatient")
    def test_a_second_signal_sets_a_limit_and_a_third_changes_nothing(self) -> None:
        def hangs() -> None:
            for _ in range(3):
                interrupt()
            forever()

        with Interrupts(dict) as stop, pytest.raises(BrokenOff):
            hangs()
        assert stop.asked == signal.SIGINT

    def test_what_ends_in_time_after_a_second_signal_is_not_broken_off(self) -> None:
        with Interrupts(dict) as stop:
            interrupt()
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            stop.deliver()

    def test_the_handler_from_before_is_called_with_the_signal(self) -> None:
        class Own(Exception):
            pass

        def own(number: int, frame: object) -> None:
            raise Own(number)

        before = signal.signal(signal.SIGTERM, own)
        try:
            with Interrupts(dict) as stop:
                interrupt(signal.SIGTERM)
            with pytest.raises(Own, match="15"):
                stop.deliver()
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_signal_that_nobody_handles_or_that_is_ignored_stays_so(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with Interrupts(dict) as stop:
                assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
                interrupt()
            assert stop.asked is None
        finally:
            signal.signal(signal.SIGINT, before)

    def test_in_another_thread(self) -> None:
        got = []

        def run() -> None:
            with Interrupts(dict) as stop:
                got.append(stop.wait(lambda: 5))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert got == [5]


# ---- the training loop ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    write_criteo(file, 1000)
    return file


def config(rows: Path, run: Path, **options: Any) -> TrainConfig:
    small: dict[str, Any] = {"batch_size": 100, "shuffle_rows": 300, "rows_per_table": 50, "dim": 4, "cpus": 2}
    return TrainConfig(paths=(str(rows),), run_dir=run, **({"epochs": 2} | small | options))


def quiet(_: str) -> None:
    """Where progress goes in these tests."""


def weights(run: Path) -> dict[str, Any]:
    with np.load(run / "checkpoint.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "json"}


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run that never stops comes to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(config(rows, run), echo=quiet)
    return weights(run)


def at_call(number: int, original: Callable[..., Any], before: Callable[[], object]) -> Callable[..., Any]:
    """The function, with something done before that call of it."""
    calls = itertools.count(1)

    def patched(*args: Any, **named: Any) -> Any:
        if next(calls) == number:
            before()
        return original(*args, **named)

    return patched


def stopped(run: TrainConfig) -> str:
    """Train until it is interrupted; what is said of it."""
    with pytest.raises(KeyboardInterrupt) as stop:
        train(run, echo=quiet)
    (note,) = stop.value.__notes__
    assert str(run.run_dir) in note
    return str(note)


def goes_on_exactly(run: Path, whole: dict[str, Any]) -> None:
    summary = train(TrainConfig.read(run, {}), resume=True, echo=quiet)
    assert summary.rows_by_epoch == (900, 900)
    assert summary.rows_split_exactly
    ours = weights(run)
    assert ours.keys() == whole.keys()
    assert all(np.array_equal(ours[name], whole[name]) for name in whole)


STEPS = [1, 5, EPOCH_STEPS, EPOCH_STEPS + 1, 2 * EPOCH_STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_in_a_step(rows: Path, tmp_path: Path, whole: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(training._Loop, "_step", at_call(step, training._Loop._step, interrupt))
        said = stopped(config(rows, tmp_path / "run"))
    assert said == f"after {step * 100:,} rows; to go on: intune train --resume {tmp_path / 'run'}"
    goes_on_exactly(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, EPOCH_STEPS, EPOCH_STEPS + 1])
def test_between_a_batch_that_was_taken_and_its_step(
    rows: Path, tmp_path: Path, whole: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The iterator has taken the batch from its run, and has not yet given it to the loop."""
    with monkeypatch.context() as patched:
        patched.setattr(LoaderIterator, "_take", at_call(step, LoaderIterator._take, interrupt))
        said = stopped(config(rows, tmp_path / "run"))
    assert said.startswith(f"after {step * 100:,} rows; to go on: ")
    goes_on_exactly(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "done", "taken"),
    [
        (2, 1, False),
        (2, 1, True),
        (EPOCH_STEPS + 1, EPOCH_STEPS, False),  # for the end of the epoch
        (EPOCH_STEPS + 2, EPOCH_STEPS, False),  # for the first batch of the next
        (EPOCH_STEPS + 4, EPOCH_STEPS + 2, False),
        (EPOCH_STEPS + 4, EPOCH_STEPS + 2, True),
    ],
)
def test_in_a_wait_that_does_not_end(
    rows: Path, tmp_path: Path, whole: Any, wait: int, done: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes, or a batch comes just when the wait is broken off: the steps that were done are saved."""

    def stuck() -> None:
        interrupt()
        forever()

    with monkeypatch.context() as patched:
        if taken:
            place: Any = training._Loop._position
            found = threading.Event()

            def position(loop: Any, loader: Any) -> Any:
                state = place(loop, loader)
                found.set()
                return state

            def late() -> None:
                interrupt()
                assert found.wait(30)

            patched.setattr(training._Loop, "_position", position)
            patched.setattr(Engine, "_await", at_call(wait, Engine._await, late))
            patched.setattr(LoaderIterator, "_take", at_call(done + 1, LoaderIterator._take, forever))
        else:
            patched.setattr(Engine, "_await", at_call(wait, Engine._await, stuck))
        said = stopped(config(rows, tmp_path / "run"))
    assert said.startswith(f"after {done * 100:,} rows; to go on: ")
    goes_on_exactly(tmp_path / "run", whole)


@pytest.mark.slow
def test_before_the_first_step(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def stuck() -> None:
        interrupt()
        forever()

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_await", at_call(1, Engine._await, stuck))
        said = stopped(config(rows, run))
    assert said == f"before the first step, so nothing was saved; the run folder {run} is removed again"
    assert not run.exists()


@pytest.mark.slow
def test_before_the_first_step_of_a_resumed_run(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(config(rows, run, epochs=1), echo=quiet)
    before = (run / "checkpoint.npz").read_bytes()
    monkeypatch.setattr(Engine, "_await", at_call(1, Engine._await, interrupt))
    monkeypatch.setattr(training._Loop, "_position", lambda *_: {})
    monkeypatch.setattr(LoaderIterator, "_take", lambda *_: forever())
    with pytest.raises(KeyboardInterrupt) as stop:
        train(TrainConfig.read(run, {"epochs": 2}), resume=True, echo=quiet)
    assert stop.value.__notes__ == [
        f"before the first step, so nothing was saved; to go on: intune train --resume {run}"
    ]
    assert (run / "checkpoint.npz").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 3])
def test_in_the_save_however_often_it_is_finished(
    rows: Path, tmp_path: Path, whole: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_save() -> None:
        for _ in range(times):
            interrupt()

    with monkeypatch.context() as patched:
        patched.setattr(Interrupts.__init__, "__defaults__", (60.0,))  # a busy disk may take long
        patched.setattr(training._Loop, "_step", at_call(4, training._Loop._step, interrupt))
        patched.setattr(os, "fsync", at_call(3, os.fsync, in_the_save))  # after config.json and its folder
        said = stopped(config(rows, tmp_path / "run"))
    assert said.startswith("after 400 rows; to go on: ")
    goes_on_exactly(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_save_that_does_not_end_is_given_up_and_the_last_one_stands(
    rows: Path, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def hang() -> None:
        interrupt()
        forever()

    with monkeypatch.context() as patched:
        # config.json, and a checkpoint after each step; each is flushed, and then its folder.
        patched.setattr(training._Loop, "_step", at_call(4, training._Loop._step, interrupt))
        patched.setattr(os, "fsync", at_call(9, os.fsync, hang))
        said = stopped(config(rows, run, checkpoint_seconds=1e-9))
    assert said == (
        "after 400 rows; what was in hand did not end in time, so they are not saved; "
        f"the checkpoint after 300 rows stands; to go on: intune train --resume {run}"
    )
    assert not list(run.glob("*.tmp"))
    goes_on_exactly(run, whole)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_step_that_does_not_end_is_given_up(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        interrupt()
        interrupt()
        forever()

    monkeypatch.setattr(training._Loop, "_step", at_call(4, training._Loop._step, hang))
    said = stopped(config(rows, tmp_path / "run"))
    assert said == (
        "after 300 rows; what was in hand did not end in time, so they are not saved; "
        f"there is no checkpoint in the run folder {tmp_path / 'run'}"
    )
    assert not (tmp_path / "run" / "checkpoint.npz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [True, False])
def test_a_save_that_fails_says_so(
    rows: Path, tmp_path: Path, signalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("checkpoint"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    run = tmp_path / "run"
    monkeypatch.setattr(os, "fsync", full)
    wrong = f"{run / 'checkpoint.npz'} cannot be written: No space left on device"
    if not signalled:
        with pytest.raises(IntuneError) as failed:
            train(config(rows, run), echo=quiet)
        assert str(failed.value) == wrong
        return
    monkeypatch.setattr(training._Loop, "_step", at_call(4, training._Loop._step, interrupt))
    said = stopped(config(rows, run))
    assert said == f"after 400 rows; they are not saved, for {wrong}; there is no checkpoint in the run folder {run}"


@pytest.mark.slow
def test_without_checkpoints_it_says_that_nothing_is_saved(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(training._Loop, "_step", at_call(4, training._Loop._step, interrupt))
    assert stopped(config(rows, run, checkpoint_seconds=0)) == (
        "after 400 rows; they are not saved, as checkpoint_seconds=0 has it; "
        f"there is no checkpoint in the run folder {run}"
    )


@pytest.mark.slow
def test_an_interrupt_that_is_no_signal(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training._Loop, "_step", at_call(4, training._Loop._step, foreign))
    assert stopped(config(rows, tmp_path / "run")).startswith("after 300 rows; they are not saved; there is no check")
