"""Files that come to be whole or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from intune.recsys.whole import whole_file


@pytest.mark.parametrize("replace", [True, False])
def test_it_is_not_there_until_it_is_whole(tmp_path: Path, replace: bool) -> None:
    with whole_file(tmp_path / "a", suffix=".part", replace=replace) as file:
        file.write(b"one")
        file.flush()
        assert [path.name for path in tmp_path.iterdir()] == ["a.part"]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"one")]


def test_it_is_on_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        done.append(f"flushed {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def named(old: Path, new: Path) -> None:
        done.append("named")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    with whole_file(tmp_path / "a", suffix=".part", replace=True) as file:
        file.write(b"one")
    assert done == ["flushed a.part", "named", f"flushed {tmp_path.name}"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with whole_file(tmp_path / "a", suffix=".part", replace=True) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_what_is_not_to_be_replaced_stays(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "a", suffix=".part", replace=False):
            (tmp_path / "a").write_bytes(b"came meanwhile")

    with pytest.raises(FileExistsError, match="a is there already; name a new file"):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"came meanwhile"]


@pytest.mark.slow
def test_a_kill_while_it_is_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    program = (
        "import os, pathlib, sys\n"
        "from intune.recsys.whole import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1]), suffix='.part', replace=True) as file:\n"
        "    file.write(b'ne')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "a"], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
    with whole_file(tmp_path / "a", suffix=".part", replace=True) as file:  # what was left is in nobody's way
        file.write(b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]
