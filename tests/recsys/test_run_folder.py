"""Run folders: one process at a time, and nothing left of a run that never began."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from intune import IntuneError, StateError
from intune.recsys.run_folder import RunFolder

HOLDS = (
    "import pathlib, sys\n"
    "from intune.recsys.run_folder import RunFolder\n"
    "with RunFolder(pathlib.Path(sys.argv[1])) as folder:\n"
    "    folder.claim()\n"
    "    print('claimed', flush=True)\n"
    "    sys.stdin.read()\n"
)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_it_is_made_with_its_configuration_and_free_afterwards(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new" / "run") as folder:
        folder.make("{}")
        assert names(folder.path) == ["config.json", "in-use"]
    assert names(folder.path) == ["config.json"]
    assert (folder.path / "config.json").read_text() == "{}"
    for _ in range(2):
        with RunFolder(folder.path) as again:
            again.claim()


def test_another_process_that_uses_it_is_named_until_it_is_killed(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with RunFolder(tmp_path) as folder, pytest.raises(StateError) as caught:
            folder.claim()
        assert str(caught.value) == (
            f"another intune train (pid {other.pid}) uses the run folder {tmp_path}: wait for its end, or stop it"
        )
        assert names(tmp_path) == ["in-use"]  # theirs
        other.send_signal(signal.SIGKILL)
        other.wait()
        with RunFolder(tmp_path) as folder:
            folder.claim()
    assert names(tmp_path) == []


def test_one_that_is_being_begun_is_in_use(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as first, RunFolder(tmp_path / "run") as second:
        first.make("{}")
        with pytest.raises(StateError, match=rf"another intune train \(pid {os.getpid()}\) uses the run folder"):
            second.claim()
        with pytest.raises(FileExistsError, match="is there already; name a new one"):
            second.make("{}")
        second.remove()  # not its own
    assert names(tmp_path / "run") == ["config.json"]


def test_what_was_made_can_be_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.make("{}")
        (folder.path / "journal.jsonl").touch()
        folder.remove()
        assert names(tmp_path) == []
    assert names(tmp_path) == []


def test_what_others_have_put_into_it_is_not_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.make("{}")
        (folder.path / "notes").touch()
        with pytest.raises(OSError, match="not empty"):
            folder.remove()
    assert names(tmp_path / "run") == ["notes"]


def test_a_folder_that_cannot_be_made_or_used_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file" / "run", "Not a directory"), (tmp_path / ("x" * 300), "File name too long")):
        with RunFolder(path) as folder:
            with pytest.raises(IntuneError, match=rf"the run folder .* cannot be made: {why}$"):
                folder.make("{}")
            folder.remove()
    with RunFolder(tmp_path / "file") as folder, pytest.raises(IntuneError, match="cannot be used: Not a directory"):
        folder.claim()
    with RunFolder(tmp_path / "none") as folder, pytest.raises(StateError, match="there is no run folder"):
        folder.claim()
    assert names(tmp_path) == ["file"]


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, RunFolder(tmp_path / "run") as folder:
        patched.setattr(os, "fsync", full)
        with pytest.raises(IntuneError, match=r"config\.json cannot be written: No space left on device"):
            folder.make("{}")
        folder.remove()
    assert names(tmp_path) == []
