"""The watch over random pipelines sees what hangs and what is left behind."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import intune

from . import watching
from .pipelines import Description, Run, Source, Stage
from .watching import opened, watched


def test_what_hangs_is_shown_with_its_stacks_and_the_engine() -> None:
    inside = threading.Event()

    def hanging_function(batch: Any) -> Any:
        if batch[0]:
            inside.set()
            while not loader._engine.closed:
                time.sleep(0.001)
        return batch

    with intune.from_iterable(range(9)).batch(1).map(hanging_function, name="slow").loader(cpus=1) as loader:
        running = iter(loader)
        next(running)
        assert inside.wait(30)
        found = pytest.raises(AssertionError, match=r"not finished after 0\.2 s")
        with found as failure, watched(loader, seconds=0.2):
            list(running)
    for part in ("hanging_function", "slow", "Scheduler(", "CallNode(", "running=1", "gates"):
        assert part in str(failure.value)


def test_a_thread_that_stays_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.1)
    description = Description(0, Source("list", 3, "int"), (Stage("map", "sample", "add"),), "int", Run(1))
    go = threading.Event()
    stays = threading.Thread(target=go.wait, args=(30,), name="stays")
    with pytest.raises(AssertionError, match=r"left behind: .*stays"):
        _leave_behind(description, tmp_path, stays, go)
    stays.join()


def _leave_behind(description: Description, folder: Path, thread: threading.Thread, go: threading.Event) -> None:
    try:
        with opened(description, folder, 0):
            thread.start()
    finally:
        go.set()
