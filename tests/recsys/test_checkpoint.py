"""Checkpoints, and runs that are stopped and go on: by Ctrl-C, by a kill, at an epoch's end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune import PipelineError, StateError  # noqa: E402
from intune.recsys.checkpoint import load_checkpoint, load_position, save_checkpoint  # noqa: E402
from intune.recsys.config import TrainConfig  # noqa: E402
from intune.recsys.dlrm import DLRM  # noqa: E402
from intune.recsys.generate import write_criteo  # noqa: E402
from intune.recsys.recall import recall  # noqa: E402
from intune.recsys.summary import limited_by  # noqa: E402
from intune.recsys.train import already_finished, train  # noqa: E402
from intune.tuners import Model  # noqa: E402

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
        with pytest.raises(StateError, match=r"another model: tables.weight is float32 \[1300, 4\] there and"):
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

        about = {"schema": 2, "position": {}, "optimizer": "Adagrad", "arrays": {"model/x": "object [1]"}}
        text = json.dumps(about).encode()
        evil = np.array([Evil()], object)
        np.savez(tmp_path / "c.npz", json=np.frombuffer(text, np.uint8), **{"model/x": evil})  # type: ignore[arg-type]
        with pytest.raises(StateError, match="no whole checkpoint"):
            load_checkpoint(tmp_path / "c.npz", *made())
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("grown", "kind", "listed", "said"),
        [
            ("model/tables.weight", "adagrad", True, r"another model: tables.weight is float32 \[64, 1048576\] there"),
            ("model/tables.weight", "adagrad", False, r"no whole checkpoint: tables.weight is float32 \[64, 1048576\]"),
            ("optimizer/0/sum", "adagrad", True, r"another model: optimizer/0/sum is float32 \[64, 1048576\] there"),
            ("optimizer/0/exp_avg", "adam", True, r"optimizer/0/exp_avg is float32 \[64, 1048576\] there and for a"),
            ("optimizer/77/sum", "adam", True, r"optimizer/77/sum is .* there and for a parameter of 0 elements here"),
            ("json", "adagrad", True, "the array json takes 268,435,456 bytes, at most 67,108,864 are read"),
        ],
    )
    def test_an_array_that_unpacks_to_gigabytes_is_refused_before_it_is_read(
        self, tmp_path: Path, grown: str, kind: str, listed: bool, said: str
    ) -> None:
        """A file of kilobytes may hold it, compressed."""
        path = tmp_path / "c.npz"
        save_checkpoint(path, *made(kind), {})
        with np.load(path) as arrays:
            held = dict(arrays)
        about = json.loads(held.pop("json").tobytes())
        if listed:
            about["arrays"][grown] = "float32 [64, 1048576]"
        small = {"json": np.frombuffer(json.dumps(about).encode(), np.uint8), **held}
        np.savez_compressed(path, **{name: value for name, value in small.items() if name != grown})
        with (
            zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open(f"{grown}.npy", "w", force_zip64=True) as member,
        ):
            shape = (2**28,) if grown == "json" else (64, 2**20)
            header = {"descr": "|u1" if grown == "json" else "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)  # type: ignore[arg-type]
            for _ in range(256):
                member.write(bytes(2**20))
        assert path.stat().st_size < 2**22
        model, optimizer = made(kind)
        tracemalloc.start()
        try:
            with pytest.raises(StateError, match=said):
                load_checkpoint(path, model, optimizer)
            assert tracemalloc.get_traced_memory()[1] < 2**25
        finally:
            tracemalloc.stop()

    def test_a_header_that_says_another_size_than_is_there_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "c.npz"
        save_checkpoint(path, *made(), {})
        with zipfile.ZipFile(path, "a") as archive, archive.open("model/more.npy", "w") as member:
            header = {"descr": "<f4", "fortran_order": False, "shape": (2**50,)}
            np.lib.format.write_array_header_1_0(member, header)  # type: ignore[arg-type]
        with pytest.raises(
            StateError, match=r"the array model/more takes \d+ bytes, which is not float32 \[1125899906"
        ):
            load_checkpoint(path, *made())

    def test_another_schema(self, tmp_path: Path) -> None:
        text = json.dumps({"schema": 99, "position": {}}).encode()
        np.savez(tmp_path / "c.npz", json=np.frombuffer(text, np.uint8))
        with pytest.raises(StateError, match="has schema 99; this version reads 2"):
            load_checkpoint(tmp_path / "c.npz", *made())

    def test_the_state_of_another_optimizer(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "c.npz", *made("sgd"), {})
        with pytest.raises(StateError, match=r"another model: optimizer is SGD there and Adagrad here; optimizer/0/s"):
            load_checkpoint(tmp_path / "c.npz", *made("adagrad"))

    def test_an_array_that_is_not_there_is_missed(self, tmp_path: Path) -> None:
        path = tmp_path / "c.npz"
        save_checkpoint(path, *made(), {})
        with np.load(path) as arrays:
            held = dict(arrays)
        first = next(name for name in held if name.startswith("optimizer/"))
        for wrong in (
            {name: value for name, value in held.items() if name != first},
            held | {first: held[first][None]},
            held | {f"{first}_more": held[first]},
        ):
            np.savez(path, **wrong)  # type: ignore[arg-type]
            with pytest.raises(StateError, match=rf"c\.npz is no whole checkpoint: {first}\w* is .* in its list$"):
                load_checkpoint(path, *made())

    @pytest.mark.parametrize("about", [None, 5, {"schema": 2}, {"schema": 2, "position": 5}])
    def test_what_describes_itself_in_another_way(self, tmp_path: Path, about: Any) -> None:
        np.savez(tmp_path / "c.npz", json=np.frombuffer(json.dumps(about).encode(), np.uint8))
        for read in (lambda path: load_checkpoint(path, *made()), load_position):
            with pytest.raises(StateError, match=r"c\.npz is no whole checkpoint: "):
                read(tmp_path / "c.npz")

    @pytest.mark.parametrize("classes", ["adagrad", "sgd"])
    @pytest.mark.filterwarnings("ignore")  # of zipfile and numpy, for names and headers that make no sense
    def test_any_damaged_byte_is_found_or_changes_nothing(self, tmp_path: Path, classes: str) -> None:
        """Of headers, names and the directory, where checksums do not reach; by all bits that one byte can lose."""

        def small() -> tuple[Any, Any]:
            torch.manual_seed(1)
            model = torch.nn.Linear(3, 2)
            return model, {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[classes](model.parameters(), lr=0.1)

        def state(model: Any, optimizer: Any) -> list[Any]:
            return [values.tolist() for values in tensors_of(model, optimizer)]

        model, optimizer = small()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        path = tmp_path / "c.npz"
        save_checkpoint(path, model, optimizer, {"loader": {"epoch": 1}})
        whole, found = path.read_bytes(), 0
        directory = whole.find(b"PK\1\2")
        for at, bit in itertools.product([*range(0, directory, 7), *range(directory, len(whole))], (0, 3, 7)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            fresh = small()
            before = state(*fresh)
            try:
                position, refused = load_checkpoint(path, *fresh), ""
            except StateError as error:
                refused = str(error)
            if refused:
                assert str(path) in refused
                assert state(*fresh) == before
                found += 1
            else:
                assert (position, state(*fresh)) == ({"loader": {"epoch": 1}}, state(model, optimizer)), (at, bit)
        assert found > 500


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
        before = (tmp_path / "run" / "summary.json").read_bytes()
        with pytest.raises(StateError, match=r"is already finished after 1 epoch, 2,700 rows; to go on, epochs must"):
            train(TrainConfig.read(tmp_path / "run", {}), resume=True, echo=quiet)
        assert (tmp_path / "run" / "summary.json").read_bytes() == before
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
        with pytest.raises(
            StateError, match=r"was begun with batch_size='100', seed='0' and .*, got batch_size='7', se"
        ):
            TrainConfig.read(tmp_path / "run", {"seed": 5, "batch_size": 7, "dim": 4, "cpus": 1})
        with pytest.raises(StateError, match="is not the folder of a run"):
            TrainConfig.read(tmp_path / "nothing", {})
        with pytest.raises(PipelineError, match="epochs must be at least 1"):
            TrainConfig.read(tmp_path / "run", {"epochs": 0})

    def test_the_same_paths_may_be_written_otherwise(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "logs").mkdir()
        rows.rename(tmp_path / "logs" / "part")
        (tmp_path / "link").symlink_to("logs")
        train(config(Path("logs"), Path("run"), epochs=1, format="parquet"), echo=quiet)
        for same in ("logs", "logs/", "./logs", str(tmp_path / "logs"), "link", "run/../logs"):
            assert TrainConfig.read(Path("run"), {"paths": (same,), "run_dir": Path("./run")}).paths == ("logs",)
        for other in (("logs/part",), ("run",), ("logs", "run")):
            with pytest.raises(StateError, match=r"was begun with paths='logs' and keeps that, got paths='"):
                TrainConfig.read(Path("run"), {"paths": other})
        with pytest.raises(StateError, match="was begun with run_dir='run'"):
            TrainConfig.read(Path("run"), {"run_dir": Path("elsewhere")})

    def test_it_can_be_resumed_from_another_folder(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        train(config(Path(rows.name), Path("run"), epochs=1), echo=quiet)
        monkeypatch.chdir(tmp_path.parent)
        again = TrainConfig.read(tmp_path / "run", {"epochs": 2, "paths": (str(rows),)})
        assert train(again, resume=True, echo=quiet).rows_by_epoch == (2700, 2700)
        (tmp_path.parent / rows.name).mkdir(exist_ok=True)
        with pytest.raises(StateError, match="was begun with paths="):
            TrainConfig.read(tmp_path / "run", {"paths": (rows.name,)})

    def test_seconds_are_those_of_all_sessions_as_the_rows_are(self, rows: Path, tmp_path: Path) -> None:
        def ticks(step: float) -> Callable[[], float]:
            return map(lambda count: count * step, itertools.count()).__next__

        first = train(config(rows, tmp_path / "run", epochs=1), echo=quiet, clock=ticks(10.0))
        again = TrainConfig.read(tmp_path / "run", {"epochs": 2})
        second = train(again, resume=True, echo=quiet, clock=ticks(0.001))
        assert first.seconds > 270  # a reading or more a step
        # Less than the readings after the last save, and more by a whole session of short ticks.
        assert first.seconds - 50 < second.seconds < first.seconds + 1
        assert second.wait_seconds > first.wait_seconds - 1e-9
        assert (
            f"trained     5,400 rows in {second.seconds:.1f} s, {5400 / second.seconds:,.0f} rows/s" in second.lines()
        )

    def test_a_run_that_was_stopped_before_its_evaluation_is_only_evaluated(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stopped(*_: object) -> Any:
            raise KeyboardInterrupt

        run = tmp_path / "run"
        with monkeypatch.context() as patched:
            patched.setattr("intune.recsys.train.evaluate", stopped)
            with pytest.raises(KeyboardInterrupt) as stop:
                train(config(rows, run, epochs=1), echo=quiet)
        assert stop.value.__notes__ == [
            f"after training, before all of its summary was written; to go on: intune train --resume {run}"
        ]
        journal = (run / "journal.jsonl").read_bytes()
        done = train(TrainConfig.read(run, {}), resume=True, echo=quiet)
        whole = train(config(rows, tmp_path / "whole", epochs=1), echo=quiet)
        assert (done.evaluation, done.rows_by_epoch) == (whole.evaluation, whole.rows_by_epoch)
        assert done.loss_by_epoch == pytest.approx(whole.loss_by_epoch)
        assert done.limited_by == limited_by(done.run_dir / "journal.jsonl")
        assert done.seconds > 0
        assert (run / "journal.jsonl").read_bytes() == journal
        assert already_finished(TrainConfig.read(run, {})) is not None

    def test_fewer_epochs_than_begun_are_refused(self, rows: Path, tmp_path: Path) -> None:
        steps = itertools.count()
        train(config(rows, tmp_path / "run", seconds=2 + 4 * 40), echo=quiet, clock=lambda: float(next(steps)))
        with pytest.raises(StateError, match=r"epochs must be at least 2: so many are begun in .*, got 1"):
            train(TrainConfig.read(tmp_path / "run", {"epochs": 1}), resume=True, echo=quiet)

    @pytest.mark.parametrize(
        "text", ["null", "5", "[]", "{}", "", '"x"', '{"paths": 5}', '{"paths": ["x"], "epochs": "y"}']
    )
    def test_a_configuration_that_is_none_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(StateError, match="is not the folder of a run that could be resumed: "):
            TrainConfig.read(tmp_path, {})

    def test_only_one_process_at_a_time(self, rows: Path, tmp_path: Path) -> None:
        run = config(rows, tmp_path / "run", epochs=1)
        wrong: list[str] = []

        def echo(_: str) -> None:
            for resume, error in ((True, StateError), (False, FileExistsError)):
                with pytest.raises(error) as caught:
                    train(run, resume=resume, echo=quiet)
                wrong.append(str(caught.value))

        train(run, echo=echo, clock=itertools.count().__next__)
        another = (
            f"another intune train (pid {os.getpid()}) uses the run folder {run.run_dir}: wait for its end, or stop it"
        )
        assert set(wrong) == {another, f"the run folder {run.run_dir} is there already; name a new one"}
        again = TrainConfig.read(tmp_path / "run", {"epochs": 2})
        wrong.clear()
        train(again, resume=True, echo=echo, clock=itertools.count().__next__)
        assert another in wrong
        assert sorted(os.listdir(run.run_dir)) == ["checkpoint.npz", "config.json", "journal.jsonl", "summary.json"]

    def test_what_the_tuner_learnt_is_there_for_the_session_that_resumes(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[Any] = []
        load = Model.load_state_dict
        monkeypatch.setattr(Model, "load_state_dict", lambda tuner, state: (given.append(state), load(tuner, state)))
        train(config(rows, tmp_path / "run", epochs=1), echo=quiet)
        position = load_position(tmp_path / "run" / "checkpoint.npz")
        assert position["tuner"]["name"] == "model"
        assert not given
        train(TrainConfig.read(tmp_path / "run", {"epochs": 2, "tuner": "shared"}), resume=True, echo=quiet)
        assert not given
        assert load_position(tmp_path / "run" / "checkpoint.npz")["tuner"] is None
        train(TrainConfig.read(tmp_path / "run", {"epochs": 3, "tuner": "model"}), resume=True, echo=quiet)
        assert not given  # the last session's tuner keeps nothing
        position = load_position(tmp_path / "run" / "checkpoint.npz")
        train(TrainConfig.read(tmp_path / "run", {"epochs": 4}), resume=True, echo=quiet)
        assert given == [position["tuner"]["state"]]

    def test_a_tuner_that_cannot_use_what_was_kept_begins_anew(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Model, "state_dict", lambda tuner: {"format": "of another version"})
            train(config(rows, tmp_path / "run", epochs=1), echo=quiet)
        said: list[str] = []
        done = train(TrainConfig.read(tmp_path / "run", {"epochs": 2}), resume=True, echo=said.append)
        assert any(line.startswith("the tuner begins anew: expected what state_dict()") for line in said)
        assert done.rows_by_epoch == (2700, 2700)

    @pytest.mark.parametrize("kept", [["x"], "model", 3, {"name": "model"}, {"name": "model", "state": [1]}])
    def test_an_entry_of_a_tuner_that_is_none_ends_no_run(self, kept: Any) -> None:
        recall("model", Model(), kept, quiet)

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
