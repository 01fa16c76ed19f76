"""The watch over random pipelines sees what hangs and what is left behind."""

import threading
from pathlib import Path

import pytest

import intune

from .pipelines import Description, Run, Source, Stage
from .watching import opened, watched


def test_what_hangs_is_shown_with_its_stacks_and_the_engine() -> None:
    hang = threading.Event()

    def hanging_function(x: int) -> int:
        hang.wait(30)
        return x

    with intune.from_iterable(range(9)).map(hanging_function, name="slow").loader(cpus=1) as loader:
        found = pytest.raises(AssertionError, match=r"not finished after 0\.2 s")
        with found as failure, watched(loader, seconds=0.2):
            threading.Timer(0.5, hang.set).start()
            list(loader)
    for part in ("hanging_function", "slow", "Scheduler(", "CallNode(", "running=1", "gates"):
        assert part in str(failure.value)


def test_a_thread_that_stays_is_found(tmp_path: Path) -> None:
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
