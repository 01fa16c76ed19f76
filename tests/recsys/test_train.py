"""Training end to end on real and made-up click logs: every row once an epoch, in the same order on any machine."""

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from intune import Budget, IntuneError, MemoryLimitError, PipelineError, SourceError  # noqa: E402
from intune._machine import MemoryLimit  # noqa: E402
from intune.recsys.config import TrainConfig  # noqa: E402
from intune.recsys.criteo import read_criteo  # noqa: E402
from intune.recsys.generate import generate_rows, write_criteo  # noqa: E402
from intune.recsys.train import EveryKth, evaluation_pipeline, train, training_pipeline  # noqa: E402
from intune.tuners import NAMES, make_tuner  # noqa: E402

SAMPLE = "criteo1tb/day_11_head3k.tsv"


def config(path: Path, tmp_path: Path, **options: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"batch_size": 256, "shuffle_rows": 1000, "rows_per_table": 500, "dim": 4, "cpus": 2}
    return TrainConfig(paths=(str(path),), run_dir=tmp_path / "run", **(defaults | options))


def quiet(_: str) -> None:
    """Where progress goes in these tests."""


@pytest.fixture
def sample(shared_data: Path) -> Path:
    return shared_data / SAMPLE


@pytest.fixture
def parts(sample: Path, tmp_path: Path) -> Path:
    """The sample as a folder of ten text files, so that there is something to do at the same time."""
    lines = sample.read_bytes().splitlines(keepends=True)
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(10):
        (folder / f"day_{part}").write_bytes(b"".join(lines[part::10]))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """600 made-up rows in Parquet."""
    write_criteo(tmp_path / "small.parquet", 600)
    return tmp_path / "small.parquet"


def hashes(batch: dict[str, Any]) -> list[bytes]:
    """One digest a row, of all that a model sees of it."""
    columns = [batch[name].numpy().reshape(len(batch["label"]), -1) for name in ("label", "dense", "sparse")]
    return [hashlib.sha256(b"".join(c[row].tobytes() for c in columns)).digest() for row in range(len(columns[0]))]


def order(run: TrainConfig, epochs: int = 2) -> list[list[bytes]]:
    """The rows that each epoch trains on, in order; the tuner "random" moves after every batch."""
    rows: list[list[bytes]] = []
    options: dict[str, Any] = {"cpus": run.cpus, "seed": run.seed, "tuner": run.make_tuner(), "epochs": epochs}
    with training_pipeline(run).loader(**options) as loader:
        workload = loader._engine  # control looks once a second, which for these few rows is once
        for _ in range(epochs):
            rows.append([])
            for batch in loader:
                rows[-1] += hashes(batch)
                if run.tuner == "random":
                    workload.apply(options["tuner"].propose(workload.snapshot(), Budget(run.cpus or 1)))
    return rows


# ---- which rows, in which order -------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(2, 50))
def test_the_two_filters_split_any_block_exactly(rows: int, k: int) -> None:
    block = {"x": np.arange(rows)}
    held_out, kept = EveryKth(k, held_out=True)(block), EveryKth(k, held_out=False)(block)
    assert held_out.dtype == kept.dtype == np.bool_
    assert (held_out ^ kept).all()
    assert np.flatnonzero(held_out).tolist() == list(range(k - 1, rows, k))


@pytest.mark.slow
def test_training_and_held_out_rows_are_all_rows_once(parts: Path, tmp_path: Path) -> None:
    def rows_of(run: TrainConfig, make: Callable[[TrainConfig], Any]) -> Counter[bytes]:
        with make(run).loader(cpus=2) as loader:
            return Counter(row for batch in loader for row in hashes(batch))

    run = config(parts, tmp_path, held_out=0.2)
    training, held_out = rows_of(run, training_pipeline), rows_of(run, evaluation_pipeline)
    assert (training.total(), held_out.total()) == (2400, 600)
    assert training + held_out == rows_of(config(parts, tmp_path, held_out=0), training_pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpus", "executor", "tuner"),
    [
        (4, "thread", "shared"),
        (1, "thread", "random"),
        (4, "thread", "random"),
        (2, "process", "shared"),
        (4, "process", "random"),
        (4, "thread", "even"),
        (4, "thread", "proportional"),
        (4, "thread", "model"),
    ],
)
def test_the_order_of_rows_does_not_depend_on_the_machine(
    parts: Path, tmp_path: Path, cpus: int, executor: str, tuner: str
) -> None:
    reference = order(config(parts, tmp_path, cpus=1))
    assert [len(epoch) for epoch in reference] == [2700, 2700]
    assert reference[0] != reference[1]
    assert Counter(reference[0]) == Counter(reference[1])
    assert order(config(parts, tmp_path, cpus=cpus, executor=executor, tuner=tuner)) == reference


@pytest.mark.slow
def test_another_seed_gives_another_order_of_the_same_rows(parts: Path, tmp_path: Path) -> None:
    first, second = (order(config(parts, tmp_path, seed=seed), epochs=1)[0] for seed in (0, 1))
    assert first != second
    assert Counter(first) == Counter(second)


@pytest.mark.slow
@pytest.mark.parametrize("hex_strings", [True, False])
def test_parquet_made_from_the_text_trains_on_the_same_rows(sample: Path, tmp_path: Path, hex_strings: bool) -> None:
    with read_criteo(sample).loader() as loader:
        rows = pa.Table.from_batches(list(loader))
    if hex_strings:
        words = {f"C{i}": [None if c is None else f"{c:x}" for c in rows[f"C{i}"].to_pylist()] for i in range(1, 27)}
        rows = pa.table({name: words.get(name, rows[name]) for name in rows.schema.names})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=250)
    options: dict[str, Any] = {"held_out": 0, "shuffle_rows": 0}
    of_parquet = order(config(tmp_path / "rows.parquet", tmp_path, **options), epochs=1)
    assert of_parquet == order(config(sample, tmp_path, **options), epochs=1)
    assert len(of_parquet[0]) == 3000


# ---- a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_the_loss_falls_and_each_epoch_has_each_row(sample: Path, tmp_path: Path, executor: str) -> None:
    run = config(sample, tmp_path, epochs=3, executor=executor)
    summary = train(run, echo=quiet)
    assert summary.rows_by_epoch == (2700, 2700, 2700)
    assert summary.loss_by_epoch[0] > summary.loss_by_epoch[1] > summary.loss_by_epoch[2]
    assert summary.loss_first > 2 * summary.loss_last
    assert summary.evaluation is not None
    assert (summary.evaluation.rows, summary.evaluation.rows_read) == (300, 3000)
    assert summary.evaluation.log_loss is not None
    assert summary.evaluation.log_loss < 0.3
    assert summary.rows_split_exactly is True
    assert not summary.broken_off
    assert 0 <= summary.wait_seconds <= summary.seconds
    assert summary.limited_by
    text = "\n".join(summary.lines())
    assert "2,700 training + 300 held out = 3,000, of 3,000 read" in text
    assert "trained     8,100 rows" in text


@pytest.mark.slow
def test_a_label_that_can_be_learnt_is_learnt(tmp_path: Path) -> None:
    write_criteo(tmp_path / "rows.tsv", 20_000, format="tsv")
    summary = train(config(tmp_path / "rows.tsv", tmp_path, epochs=2, rows_per_table=2000, dim=8), echo=quiet)
    assert summary.evaluation is not None
    assert summary.evaluation.auc is not None
    assert summary.evaluation.auc > 0.65
    assert summary.rows_split_exactly is True


@pytest.mark.slow
def test_the_run_folder_says_what_was_done(small: Path, tmp_path: Path) -> None:
    run = config(small, tmp_path)
    summary = train(run, echo=quiet)
    files = sorted(file.name for file in run.run_dir.iterdir())
    assert files == ["checkpoint.npz", "config.json", "journal.jsonl", "summary.json"]
    written = json.loads((run.run_dir / "config.json").read_text())
    assert written == json.loads(json.dumps(asdict(run), default=str)) | {"began_in": os.getcwd()}
    result = json.loads((run.run_dir / "summary.json").read_text())
    assert result["rows_by_epoch"] == [540]
    assert result["rows_split_exactly"] is True
    assert result["evaluation"] == asdict(summary.evaluation)  # type: ignore[arg-type]
    decisions = [json.loads(line) for line in (run.run_dir / "journal.jsonl").read_text().splitlines()]
    assert decisions
    assert all("schema" in decision for decision in decisions)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model_whatever_the_tuner_does(small: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    runs = [
        train(config(small, tmp_path / str(number), epochs=2, tuner=tuner, cpus=cpus), echo=quiet)
        for number, (tuner, cpus) in enumerate([("shared", 1), ("random", 4)])
    ]
    assert runs[0].loss_by_epoch == runs[1].loss_by_epoch
    assert runs[0].evaluation == runs[1].evaluation
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_the_tuner_static_does_what_it_is_told(small: Path, tmp_path: Path) -> None:
    run = config(small, tmp_path, tuner="static", concurrency={"read_parquet": 1, "criteo_transform": 2})
    train(run, echo=quiet)
    first = json.loads((run.run_dir / "journal.jsonl").read_text().splitlines()[0])
    concurrency = first["applied"]["concurrency"]
    assert (concurrency["read_parquet"], concurrency["criteo_transform"], concurrency["batch"]) == (1, 2, None)


@pytest.mark.slow
def test_time_runs_out(small: Path, tmp_path: Path) -> None:
    # A clock that moves by a second each time it is looked at.
    summary = train(config(small, tmp_path, batch_size=10, seconds=20), echo=quiet, clock=itertools.count().__next__)
    assert summary.broken_off
    assert 0 < summary.rows_by_epoch[0] < 540
    assert summary.seconds >= 20
    assert summary.rows_split_exactly is None
    assert any("broken off" in line for line in summary.lines())


@pytest.mark.slow
def test_without_epochs_it_goes_on_until_the_time_is_up(small: Path, tmp_path: Path) -> None:
    summary = train(config(small, tmp_path, seconds=40), echo=quiet, clock=itertools.count().__next__)
    assert summary.broken_off
    assert len(summary.rows_by_epoch) > 1
    assert summary.rows_by_epoch[0] == 540
    assert summary.rows_split_exactly is True


@pytest.mark.slow
def test_progress_is_said_on_the_way(small: Path, tmp_path: Path) -> None:
    said: list[str] = []
    train(config(small, tmp_path, batch_size=20), echo=said.append, clock=itertools.count().__next__)
    assert len(said) > 5
    assert all(len(line) <= 80 for line in said)
    figures = [line for line in said if not line.startswith("  ")]  # without what the tuner decided
    assert [line for line in figures if not re.match(r"epoch 0  \d+ rows  \d+ rows/s  loss \d\.\d{4}", line)] == []
    assert 5 < len(figures) < len(said)


@pytest.mark.slow
def test_ctrl_c_says_how_far_it_came_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    ticks = itertools.count()

    def clock() -> float:
        if (tick := next(ticks)) == 30:
            raise KeyboardInterrupt
        return tick / 1000

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config(small, tmp_path, batch_size=10), echo=said.append, clock=clock)
    assert said == []
    notes = "; ".join(stopped.value.__notes__)
    assert re.match(r"after [\d,]+ rows; ", notes)
    assert str(tmp_path / "run") in notes


# ---- rows that are few, odd or none ---------------------------------------------------------------------------------


def write_rows(file: Path, rows: int, **columns: pa.Array) -> Path:
    table = pa.Table.from_batches(generate_rows(rows))
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, file)
    return file


@pytest.mark.slow
def test_labels_of_one_class_are_told_of(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "zeros.parquet", 300, label=pa.array([0] * 300, pa.int32()))
    summary = train(config(file, tmp_path), echo=quiet)
    assert summary.evaluation is not None
    assert summary.evaluation.auc is None
    assert summary.evaluation.log_loss is not None
    assert "AUC is undefined: all held-out labels are the same" in summary.notes
    assert any("AUC undefined" in line for line in summary.lines())


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_told_of(small: Path, tmp_path: Path) -> None:
    summary = train(config(small, tmp_path, batch_size=4096), echo=quiet)
    assert summary.rows_by_epoch == (540,)
    assert summary.notes == ("the batch size (4,096) is larger than the 540 training rows: one step an epoch",)


@pytest.mark.slow
def test_no_rows_held_out_as_asked(small: Path, tmp_path: Path) -> None:
    summary = train(config(small, tmp_path, held_out=0), echo=quiet)
    assert summary.rows_by_epoch == (600,)
    assert summary.evaluation is None
    assert any("no rows, as asked" in line for line in summary.lines())


@pytest.mark.slow
def test_blocks_too_short_to_hold_a_row_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "few.parquet", 5)
    summary = train(config(file, tmp_path), echo=quiet)
    assert summary.rows_by_epoch == (5,)
    assert summary.evaluation is not None
    assert (summary.evaluation.rows, summary.evaluation.rows_read, summary.evaluation.auc) == (0, 5, None)
    assert "no rows were held out: no block has 10 rows; AUC is undefined" in summary.notes
    assert summary.rows_split_exactly is True


@pytest.mark.parametrize("name", ["none.parquet", "day_0"])
def test_no_rows_at_all(tmp_path: Path, name: str) -> None:
    write_criteo(tmp_path / name, 0, format="parquet" if name.endswith("parquet") else "tsv")
    with pytest.raises(SourceError, match="no rows to train on: there are none in"):
        train(config(tmp_path / name, tmp_path), echo=quiet)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(small: Path, tmp_path: Path) -> None:
    run = config(small, tmp_path, optimizer="sgd", learning_rate=1e30)
    with pytest.raises(IntuneError, match=r"the loss is not finite any more .* try a learning rate below 1e\+30"):
        train(run, echo=quiet)


def test_a_bad_label_names_the_file(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "odd.parquet", 20, label=pa.array([0] * 7 + [5] + [0] * 12, pa.int32()))
    with pytest.raises(SourceError, match="column 'label', row 7 of the block: must be 0 or 1, is 5") as caught:
        train(config(file, tmp_path), echo=quiet)
    notes = " ".join(caught.value.__notes__)
    assert "criteo_transform" in notes
    assert "odd.parquet" in notes


def test_a_run_folder_is_never_overwritten(small: Path, tmp_path: Path) -> None:
    run = config(small, tmp_path)
    run.run_dir.mkdir()
    (run.run_dir / "summary.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"run folder .* is there already; name a new one"):
        train(run, echo=quiet)
    assert [file.read_text() for file in run.run_dir.iterdir()] == ["mine"]


@pytest.mark.parametrize("device", ["toaster", "cuda:77", "meta"])
def test_a_device_that_is_not_there_is_told_of_before_anything_is_made(
    small: Path, tmp_path: Path, device: str
) -> None:
    with pytest.raises(PipelineError, match=f"device '{device}' cannot be used: "):
        train(config(small, tmp_path, device=device), echo=quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("rows", "optimizer"), [(10**9, "adagrad"), (10**9, "sgd"), (2**62, "sgd")])
def test_a_model_too_large_for_the_machine_is_told_of_before_anything_is_made(
    small: Path, tmp_path: Path, rows: int, optimizer: Any
) -> None:
    with pytest.raises(MemoryLimitError, match=rf"rows_per_table={rows} takes .* GiB .*: lower rows_per_table or dim"):
        train(config(small, tmp_path, rows_per_table=rows, dim=64, optimizer=optimizer), echo=quiet)
    assert not (tmp_path / "run").exists()


def test_a_model_that_no_memory_is_found_for_is_told_of(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("intune.recsys.model.memory_limit", lambda _: MemoryLimit(None, "not known"))
    with pytest.raises(MemoryLimitError, match=r"rows_per_table=1000000000000 takes .* GiB .* which cannot be had: "):
        train(config(small, tmp_path, rows_per_table=10**12), echo=quiet)
    assert not (tmp_path / "run").exists()


def test_the_largest_seed(small: Path, tmp_path: Path) -> None:
    assert train(config(small, tmp_path, seed=2**63 - 1), echo=quiet).rows_by_epoch == (540,)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SourceError])
def test_what_ends_before_its_first_step_leaves_no_run_folder(
    small: Path, tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> Any:
        assert (tmp_path / "run" / "config.json").exists()
        raise error

    run = config(small, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("intune.recsys.train.expected_rows", ends)
        with pytest.raises(error):
            train(run, echo=quiet)
    assert not run.run_dir.exists()
    assert train(run, echo=quiet).rows_by_epoch == (540,)


def test_a_run_folder_that_cannot_be_removed_again_is_told_of(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> Any:
        (tmp_path / "run" / "notes").touch()
        raise SourceError("gone")

    monkeypatch.setattr("intune.recsys.train.expected_rows", ends)
    with pytest.raises(SourceError, match="gone") as caught:
        train(config(small, tmp_path), echo=quiet)
    assert caught.value.__notes__ == [f"the run folder {tmp_path / 'run'} could not be removed: Directory not empty"]


def test_a_summary_that_cannot_be_written_says_how_to_get_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(small, tmp_path)
    replace = os.replace

    def full(old: Path, new: Path) -> None:
        if new.name == "summary.json":
            raise OSError(28, "No space left on device")
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(IntuneError, match=r"summary\.json cannot be written: No space left on device") as caught:
            train(run, echo=quiet)
    assert caught.value.__notes__ == [f"to go on: intune train --resume {run.run_dir}"]
    assert sorted(os.listdir(run.run_dir)) == ["checkpoint.npz", "config.json", "journal.jsonl"]
    assert train(TrainConfig.read(run.run_dir, {}), resume=True, echo=quiet).rows_by_epoch == (540,)


def test_nothing_is_made_for_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file or folder"):
        train(config(tmp_path / "nowhere", tmp_path), echo=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"seconds": 0.0}, "seconds must be more than 0, got 0.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"shuffle_rows": -1}, "shuffle_rows must be at least 0; 0 = no shuffle, got -1"),
        ({"held_out": 1.0}, "held_out must be a share from 0 to 0.5, so that rows are left to train on"),
        (
            {"held_out": 1e-320},
            "held_out must be a share from 0 to 0.5, so that rows are left to train on, and 0 or at ",
        ),
        ({"seed": -1}, "seed must be from 0 to 2**63-1, got -1"),
        ({"seed": 2**63}, "seed must be from 0 to 2**63-1, got 9223372036854775808"),
        ({"held_out": math.nan}, "held_out must be a share"),
        ({"optimizer": "adam"}, "optimizer must be one of adagrad, sgd, got 'adam'"),
        ({"learning_rate": -1.0}, "learning_rate must be more than 0, got -1.0"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"rows_per_table": 1}, "rows_per_table must be an int of at least 2"),
        ({"tuner": "learned_model"}, "'threshold'; did you mean 'learned-model'?"),
        ({"tuner": "radnom"}, "'proportional', 'random', 'shared', 'static', "),
        ({"tuner": "clever"}, "unknown tuner 'clever'"),
        ({"tuner": "static"}, "need each other, got tuner 'static' and concurrency {}"),
        ({"concurrency": {"batch": 1}}, "need each other, got tuner 'model'"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        config(tmp_path, tmp_path, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_tuner_of_the_library_may_be_named(tmp_path: Path, name: str) -> None:
    assert type(config(tmp_path, tmp_path, tuner=name).make_tuner()) is type(make_tuner(name))


@pytest.mark.parametrize(
    ("epochs", "seconds", "limit"), [(None, None, 1), (3, None, 3), (3, 10.0, 3), (None, 10.0, None)]
)
def test_how_many_epochs(tmp_path: Path, epochs: int | None, seconds: float | None, limit: int | None) -> None:
    assert config(tmp_path, tmp_path, epochs=epochs, seconds=seconds).epoch_limit == limit
