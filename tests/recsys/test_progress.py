"""The lines that say how training goes."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.recsys.config import TrainConfig
from intune.recsys.generate import write_criteo
from intune.recsys.progress import Progress, Standing, Window


def window(concurrency: dict[str, int | None], slots: int = 4) -> Snapshot:
    stages = tuple(StageSnapshot(StageInfo(name, "map"), most, running=1) for name, most in concurrency.items())
    consumer = ConsumerSnapshot(steps=10, rows=100, seconds_per_step=0.2, wait_share=0.254)
    return Snapshot(2.0, True, stages, consumer, MachineSnapshot(4), Allocation(concurrency, slots))


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_line_is_due_every_two_seconds_and_counts_from_the_last(said: list[str]) -> None:
    now = 100.0
    progress = Progress(said.append, lambda: now)
    now = 101.9
    assert not progress.due()
    now = 102.0
    assert progress.due()
    progress.say(Standing(0, 5000, 0.51239, None))
    assert not progress.due()
    now = 106.0
    progress.say(Standing(1, 7000, 0.4, window({"read_tsv": None, "transform": 3})))
    assert said == [
        "epoch 0  5,000 rows  2,500 rows/s  loss 0.5124",
        "epoch 1  7,000 rows  500 rows/s  loss 0.4000  waited 25%",
        "  4 CPU slots; most items at once: transform 3",
    ]


def test_what_was_decided_is_said_only_when_it_has_changed(said: list[str]) -> None:
    ticks = iter(range(100))
    progress = Progress(said.append, lambda: float(next(ticks)))
    for concurrency in ({"a": None, "b": None}, {"a": None, "b": None}, {"a": None, "b": 2}, {"a": 1, "b": 2}):
        progress.say(Standing(0, 1, 0.5, window(concurrency)))
    progress.say(Standing(0, 1, 0.5, window({"a": 1, "b": 2}, slots=3)))
    assert [line for line in said if not line.startswith("epoch")] == [
        "  4 CPU slots; most items at once: no limit",
        "  4 CPU slots; most items at once: b 2",
        "  4 CPU slots; most items at once: a 1, b 2",
        "  3 CPU slots; most items at once: a 1, b 2",
    ]


def test_every_line_fits_a_terminal(said: list[str]) -> None:
    ticks = iter((0.0, 2.0))
    progress = Progress(said.append, lambda: next(ticks))
    many = {f"a_stage_with_a_long_name_{number}": number + 1 for number in range(9)} | {"x" * 200: 5}
    progress.say(Standing(100, 12_345_678_901, 12.3456, window(many)))
    assert max(map(len, said)) <= 80
    assert all(name in "".join(line.strip() for line in said) for name in many)


def test_rows_of_earlier_runs_are_no_part_of_the_rate(said: list[str]) -> None:
    ticks = iter((0.0, 2.0, 4.0))
    progress = Progress(said.append, lambda: next(ticks))
    for rows in (1_000_400, 1_000_600):
        progress.say(Standing(3, rows, 0.5, None, rows_before=1_000_000))
    assert said == [
        "epoch 3  1,000,400 rows  200 rows/s  loss 0.5000",
        "epoch 3  1,000,600 rows  100 rows/s  loss 0.5000",
    ]


class Recorder:
    """Keeps what the training loop says, after every step."""

    def __init__(self) -> None:
        self.said: list[Standing] = []
        self.lasts = False
        self.times = 0

    @contextmanager
    def running(self, window: Window) -> Iterator[None]:
        self.lasts = True
        self.times += 1
        try:
            yield
        finally:
            window()
            self.lasts = False

    def due(self) -> bool:
        assert self.lasts
        return True

    def say(self, standing: Standing) -> None:
        self.said.append(standing)


def run_config(tmp_path: Path, format: Literal["tsv", "parquet"], **fields: object) -> TrainConfig:
    write_criteo(tmp_path / "rows", 600, format=format)
    known = {"batch_size": 90, "rows_per_table": 50, "dim": 4, "cpus": 2, "shuffle_rows": 0} | fields
    return TrainConfig(paths=(str(tmp_path / "rows"),), format=format, run_dir=tmp_path / "run", **known)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "tsv"])
def test_the_loop_says_where_it_stands_and_how_many_rows_there_are(
    format: Literal["tsv", "parquet"], tmp_path: Path
) -> None:
    train = pytest.importorskip("intune.recsys.train").train
    recorder, ticks = Recorder(), itertools.count()
    config = run_config(tmp_path, format, epochs=2, seconds=1e6)
    summary = train(config, echo=pytest.fail, clock=lambda: next(ticks) / 1000, reporter=recorder)
    first, last = recorder.said[0], recorder.said[-1]
    assert [each.rows for each in recorder.said] == list(range(90, 1081, 90))
    assert (first.epoch, first.rows_total) == (0, 1080 if format == "parquet" else None)
    assert (last.epoch, last.rows_total, last.rows_before, last.seconds_limit) == (1, 1080, 0, 1e6)
    assert last.window is not None
    assert (recorder.times, recorder.lasts) == (1, False)
    written = json.loads((config.run_dir / "summary.json").read_text())
    assert written["measured"]["memory_peak_bytes"] >= max(
        each.window.machine.memory_bytes or 0 for each in recorder.said if each.window is not None
    )
    assert written["in_words"] == summary.measured.in_words()
    assert f"{summary.measured.busiest_stage} used " in written["in_words"]


@pytest.mark.slow
def test_what_was_trained_before_is_told_where_a_run_is_resumed(tmp_path: Path) -> None:
    train = pytest.importorskip("intune.recsys.train").train
    config = run_config(tmp_path, "parquet", epochs=1)
    train(config, echo=[].append)
    recorder = Recorder()
    more = TrainConfig.read(config.run_dir, {"epochs": 3})
    train(more, resume=True, echo=[].append, reporter=recorder)
    assert {each.rows_before for each in recorder.said} == {540}
    assert {each.rows_total for each in recorder.said} == {1620}


@pytest.mark.slow
def test_a_reporter_is_done_before_an_error_comes_out(tmp_path: Path) -> None:
    train = pytest.importorskip("intune.recsys.train").train

    class Stops(Recorder):
        def say(self, standing: Standing) -> None:
            raise KeyboardInterrupt

    recorder = Stops()
    with pytest.raises(KeyboardInterrupt):
        train(run_config(tmp_path, "parquet"), echo=pytest.fail, reporter=recorder)
    assert (recorder.times, recorder.lasts) == (1, False)
