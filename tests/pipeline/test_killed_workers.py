"""A stage whose processes the system kills goes on with fewer of them, for a while."""

import os
import signal
from pathlib import Path

import numpy as np

import intune
from intune._values import StageInfo
from intune.pipeline.stage import KILL_SECONDS, LiveStage


class KillsItself:
    """Gives back its input; on one row it is killed, the first time."""

    def __init__(self, row: int, marker: Path) -> None:
        self.row, self.marker = row, str(marker)

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        if self.row in batch and not os.path.exists(self.marker):
            with open(self.marker, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_one_process_less_is_wanted_its_item_is_done_again_and_it_is_told(tmp_path: Path) -> None:
    pipe = intune.from_iterable(range(400)).batch(10)
    pipe = pipe.map(KillsItself(133, tmp_path / "killed"), name="work", executor="process")
    with pipe.loader(cpus=3, tuner="shared") as loader:
        rows = np.concatenate(list(loader))
        stage = loader._engine.live[2]
        assert (rows == np.arange(400)).all()
        assert (stage.most_processes, stage.processes) == (2, 2)
        loader._control._controller.step()  # type: ignore[attr-defined] # by then all that happened is in the journal
        seen = [event for line in loader.journal for event in line["seen"].get("events", [])]
        details = [event["detail"] for event in seen if event["kind"] == "worker_died"]
        assert len(details) == 1
        assert "killed by SIGKILL; its item is done again by at most 2 processes for a while" in details[0]


def live(processes: int, concurrency: int | None) -> LiveStage:
    stage = LiveStage(StageInfo("work", "map", "process", waits=False), None, 1, concurrency=concurrency)
    stage.processes = processes
    return stage


def test_one_more_is_tried_each_time_none_was_killed_for_long() -> None:
    stage = live(4, 4)
    stage.was_killed(100.0)
    assert stage.most_processes == 3
    assert not stage.try_more(100.0 + KILL_SECONDS - 1)
    assert stage.try_more(100.0 + KILL_SECONDS)
    assert stage.most_processes is None  # as many as are asked for


def test_each_kill_takes_one_and_one_always_stays() -> None:
    stage = live(2, None)
    for now in (0.0, 1.0, 2.0):
        stage.was_killed(now)
        stage.processes = stage.most_processes or 0
    assert stage.most_processes == 1
    assert stage.try_more(2.0 + KILL_SECONDS)
    assert not stage.try_more(2.0 + KILL_SECONDS + 1)
    assert stage.most_processes == 2
