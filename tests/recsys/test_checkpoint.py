"""Checkpoints, and runs that are stopped and go on: by Ctrl-C, by a kill, at an epoch's end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune import PipelineError, StateError  # noqa: E402
from intune.recsys.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from intune.recsys.config import TrainConfig  # noqa: E402
from intune.recsys.dlrm import DLRM  # noqa: E402
from intune.recsys.generate import write_criteo  # noqa: E402
from intune.recsys.interrupts import WholeSteps  # noqa: E402
from intune.recsys.train import train  # noqa: E402

ROWS = 3000


def made(kind: str = "adagrad", rows: int = 50) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = DLRM((rows,) * 26, dim=4)
    classes = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}
    parameters = list(model.parameters())
    return model, classes[kind](parameters[:3] if kind == "adam" else parameters, lr=0.1)


def tensors_of(model: Any, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()["state"]
    return [*model.state_dict().values(), *(value for values in state.values() for value in values.values())]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_criteo(tmp_path / "rows.parquet", ROWS)
    return tmp_path / "rows.parquet"


def config(rows: Path, run: Path, **options: Any) -> TrainConfig:
    small: dict[str, Any] = {"batch_size": 100, "shuffle_rows": 700, "rows_per_table": 200, "dim": 4, "cpus": 2}
    return TrainConfig(paths=(str(rows),), run_dir=run, **({"epochs": 2} | small | options))


def weights(run: Path) -> dict[str, Any]:
    with np.load(run / "checkpoint.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "json"}


def quiet(_: str) -> None:
    """Where progress goes in these tests."""


class TestFile:
    @pytest.mark.parametrize("kind", ["adagrad", "sgd"])
    def test_comes_back_exactly(self, tmp_path: Path, kind: str) -> None:
        model, optimizer = made(kind)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimizer.step()
        save_checkpoint(tmp_path / "c.npz", model, optimizer, {"epoch": 3, "name": "\u00e9"})
        other, its = made(kind)
        assert load_checkpoint(tmp_path / "c.npz", other, its) == {"epoch": 3, "name": "\u00e9"}
        pairs = list(zip(tensors_of(model, optimizer), tensors_of(other, its), strict=True))
        assert all(torch.equal(one, two) for one, two in pairs)
        assert os.listdir(tmp_path) == ["c.npz"]

    def test_a_write_that_fails_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = made()
        save_checkpoint(tmp_path / "c.npz", model, optimizer, {"n": 1})

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path / "c.npz", model, optimizer, {"n": 2})
        assert load_checkpoint(tmp_path / "c.npz", model, optimizer) == {"n": 1}
        assert os.listdir(tmp_path) == ["c.npz"]

    def test_another_model_is_named(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "c.npz", *made(rows=50), {})
        with pytest.raises(StateError, match=r"another model: tables.weight is torch.float32 \[1300, 4\] there and"):
            load_checkpoint(tmp_path / "c.npz", *made(rows=60))

    @pytest.mark.parametrize("keep", [0, 10, 1000, -30])
    def test_a_cut_file(self, tmp_path: Path, keep: int) -> None:
        path = tmp_path / "c.npz"
        save_checkpoint(path, *made(), {})
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(StateError, match="no whole checkpoint"):
            load_checkpoint(path, *made())

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match="there is no checkpoint"):
            load_checkpoint(tmp_path / "c.npz", *made())

    def test_pickled_objects_are_never_run(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(tmp_path / "ran"),)

        text = json.dumps({"schema": 1, "position": {}}).encode()
        evil = np.array([Evil()], object)
        np.savez(tmp_path / "c.npz", json=np.frombuffer(text, np.uint8), **{"model/x": evil})  # type: ignore[arg-type]
        with pytest.raises(StateError, match="no whole checkpoint"):
            load_checkpoint(tmp_path / "c.npz", *made())
        assert not (tmp_path / "ran").exists()

    def test_another_schema(self, tmp_path: Path) -> None:
        text = json.dumps({"schema": 99, "position": {}}).encode()
        np.savez(tmp_path / "c.npz", json=np.frombuffer(text, np.uint8))
        with pytest.raises(StateError, match="has schema 99; this version reads 1"):
            load_checkpoint(tmp_path / "c.npz", *made())


class TestRuns:
    @pytest.mark.parametrize("stop_after", [0.5, 7.5, 26.5, 27.5, 40.5])
    def test_a_run_that_stops_and_goes_on_is_the_run_that_never_stopped(
        self, rows: Path, tmp_path: Path, stop_after: float
    ) -> None:
        """Stopped in the first epoch (27 steps), at its end, just after, in the second one."""
        whole = train(config(rows, tmp_path / "whole"), echo=quiet)
        steps = iter(range(10**6))
        clock = lambda: float(next(steps))  # noqa: E731 - a second a reading
        first = config(rows, tmp_path / "run", seconds=2 + 4 * stop_after, checkpoint_seconds=1e9)
        broken = train(first, echo=quiet, clock=clock)
        assert broken.broken_off
        again = TrainConfig.read(tmp_path / "run", {"seconds": None, "cpus": 1})
        resumed = train(again, resume=True, echo=quiet)
        assert resumed.rows_by_epoch == whole.rows_by_epoch == (2700, 2700)
        assert resumed.loss_by_epoch == pytest.approx(whole.loss_by_epoch, rel=1e-6)
        assert resumed.loss_first == pytest.approx(whole.loss_first, rel=1e-6)
        ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "whole")
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)

    def test_a_finished_run_can_be_given_more_epochs(self, rows: Path, tmp_path: Path) -> None:
        train(config(rows, tmp_path / "run", epochs=1), echo=quiet)
        done = train(TrainConfig.read(tmp_path / "run", {}), resume=True, echo=quiet)
        assert done.rows_by_epoch == (2700,)
        more = train(TrainConfig.read(tmp_path / "run", {"epochs": 2}), resume=True, echo=quiet)
        assert more.rows_by_epoch == (2700, 2700)
        train(config(rows, tmp_path / "whole"), echo=quiet)
        ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "whole")
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)

    def test_other_data_is_refused(self, rows: Path, tmp_path: Path) -> None:
        train(config(rows, tmp_path / "run", seconds=1e-9), echo=quiet)
        rows.unlink()
        write_criteo(rows, ROWS + 1)
        with pytest.raises(StateError, match=r"saved by another loader: identity\.source\.files\.bytes is"):
            train(TrainConfig.read(tmp_path / "run", {}), resume=True, echo=quiet)

    def test_what_makes_it_another_run_is_refused(self, rows: Path, tmp_path: Path) -> None:
        train(config(rows, tmp_path / "run", epochs=1), echo=quiet)
        with pytest.raises(StateError, match="keeps its batch_size, seed; what may change is checkpoint_seconds"):
            TrainConfig.read(tmp_path / "run", {"seed": 5, "batch_size": 7, "cpus": 1})
        with pytest.raises(StateError, match="is not the folder of a run"):
            TrainConfig.read(tmp_path / "nothing", {})
        with pytest.raises(PipelineError, match="epochs must be at least 1"):
            TrainConfig.read(tmp_path / "run", {"epochs": 0})

    def test_without_checkpoints_nothing_is_written(self, rows: Path, tmp_path: Path) -> None:
        train(config(rows, tmp_path / "run", epochs=1, checkpoint_seconds=0), echo=quiet)
        assert not (tmp_path / "run" / "checkpoint.npz").exists()
        with pytest.raises(StateError, match="there is no checkpoint"):
            train(TrainConfig.read(tmp_path / "run", {}), resume=True, echo=quiet)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_killed_and_resumed_from_the_command(self, rows: Path, tmp_path: Path, number: int) -> None:
        run = tmp_path / "run"
        command = [sys.executable, "-c", "import sys; from intune.cli import main; sys.exit(main())"]
        options = ["--batch-size", "50", "--rows-per-table", "200", "--checkpoint-seconds", "0.05", "--cpus", "1"]
        new = [*command, "train", str(rows), "--run-dir", str(run), "--epochs", "100000", *options]
        with subprocess.Popen(new, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            while not (run / "checkpoint.npz").exists():
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.01)
            process.send_signal(number)
            text = process.communicate(timeout=60)[0]
        if number == signal.SIGINT:
            assert process.returncode == 130, text
            assert f"to go on: intune train --resume {run}" in text
        before = json.loads(np.load(run / "checkpoint.npz")["json"].tobytes())["position"]
        epochs = len(before["rows_by_epoch"]) + 1
        again = [*command, "train", "--resume", str(run), "--epochs", str(epochs)]
        done = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        summary = json.loads((run / "summary.json").read_text())
        assert summary["rows_by_epoch"] == [2700] * epochs
        train(config(rows, tmp_path / "whole", epochs=epochs, batch_size=50, shuffle_rows=200_000, dim=16), echo=quiet)
        ours, theirs = weights(run), weights(tmp_path / "whole")
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


class TestWholeSteps:
    def interrupted(self, done: list[str], times: int, inside: bool) -> None:
        """Interrupt so often, in a step or between two."""
        with WholeSteps() as whole:
            with whole.step():
                for number in range(times if inside else 0):
                    signal.raise_signal(signal.SIGINT)
                    done.append(f"after {number + 1}")
            if not inside:
                signal.raise_signal(signal.SIGINT)
            done.append("after the step")

    @pytest.mark.parametrize(
        ("times", "inside", "reached"), [(1, True, ["after 1"]), (2, True, ["after 1"]), (1, False, [])]
    )
    def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_one_does_not(
        self, times: int, inside: bool, reached: list[str]
    ) -> None:
        before, done = signal.getsignal(signal.SIGINT), list[str]()
        with pytest.raises(KeyboardInterrupt):
            self.interrupted(done, times, inside)
        assert done == reached
        assert signal.getsignal(signal.SIGINT) is before

    def test_without_an_interrupt_nothing_happens(self) -> None:
        done: list[str] = []
        self.interrupted(done, 0, inside=True)
        assert done == ["after the step"]

    def test_in_another_thread(self) -> None:
        done: list[str] = []
        thread = threading.Thread(target=self.interrupted, args=(done, 0, True))
        thread.start()
        thread.join()
        assert done == ["after the step"]
