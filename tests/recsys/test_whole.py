"""Files that come to be whole or not at all."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from intune import IntuneError
from intune.recsys.whole import open_locked, whole_file, write_whole


def own_name(name: str) -> str:
    """What a file is called while this thread writes it."""
    return f"{name}.{os.getpid()}-{threading.get_native_id()}.tmp"


@pytest.mark.parametrize("replace", [True, False])
def test_it_is_not_there_until_it_is_whole(tmp_path: Path, replace: bool) -> None:
    with whole_file(tmp_path / "a", replace=replace) as file:
        file.write(b"one")
        file.flush()
        assert [path.name for path in tmp_path.iterdir()] == [own_name("a")]
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
    with whole_file(tmp_path / "a", replace=True) as file:
        file.write(b"one")
    assert done == [f"flushed {own_name('a')}", "named", f"flushed {tmp_path.name}"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with whole_file(tmp_path / "a", replace=True) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_what_is_not_to_be_replaced_stays(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "a", replace=False):
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
        "with whole_file(pathlib.Path(sys.argv[1]), replace=True) as file:\n"
        "    file.write(b'ne')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "a"], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
    left = [path.name for path in tmp_path.iterdir() if path.name != "a"]
    assert len(left) == 1
    for name in ("a.1-x.tmp", "b.1-2.tmp", "xa.1-2.tmp"):
        (tmp_path / name).touch()
    with whole_file(tmp_path / "a", replace=True) as file:  # what was left of it is deleted, and nothing else
        assert not (tmp_path / left[0]).exists()
        file.write(b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1-x.tmp", "b.1-2.tmp", "xa.1-2.tmp"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_two_that_write_the_same_file_at_once_each_leave_a_whole_one(tmp_path: Path) -> None:
    """Each writes while the other does; neither takes what the other has in hand for left over."""
    both = threading.Barrier(2, timeout=30)
    wrong: list[BaseException] = []

    def write(text: bytes) -> None:
        try:
            for _ in range(20):
                with whole_file(tmp_path / "a", replace=True) as file:
                    both.wait()
                    file.write(text)
                    file.flush()
                    both.wait()
                assert (tmp_path / "a").read_bytes() in (b"one" * 999, b"other" * 999)
        except BaseException as error:
            wrong.append(error)
            both.abort()

    threads = [threading.Thread(target=write, args=(text * 999,)) for text in (b"one", b"other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_another_process_has_in_hand_is_not_left_over(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from intune.recsys.whole import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1]), replace=True) as file:\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()\n"
        "    file.write(b'theirs')\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with whole_file(tmp_path / "a", replace=True) as file:
            file.write(b"ours")
        assert (tmp_path / "a").read_bytes() == b"ours"
    assert other.returncode == 0
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"theirs")]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / "a.1-2.tmp").write_bytes(b"perhaps somebody writes it")
    with whole_file(tmp_path / "a", replace=True) as file:
        file.write(b"one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1-2.tmp"]


def test_a_locked_file_is_open_for_one_at_a_time(tmp_path: Path) -> None:
    with open_locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
        open_locked(tmp_path / "lock")
    open_locked(tmp_path / "lock").close()


def test_a_lock_whose_file_its_holder_has_deleted_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted between our opening it and locking it: what we lock has to be the file that others find."""
    flock, deleted = fcntl.flock, []

    def late(file: IO[bytes], how: int) -> None:
        if not deleted:
            deleted.append((tmp_path / "lock").unlink())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_locked(tmp_path / "lock") as file:
        assert os.path.samestat(os.fstat(file.fileno()), (tmp_path / "lock").stat())


@pytest.mark.parametrize("path", ["no/folder", "x" * 300])
def test_a_text_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(IntuneError, match=r" cannot be written: (No such file or directory|File name too long)$"):
        write_whole(tmp_path / path, "text")
    write_whole(tmp_path / "fine", "\u00e9")
    assert (tmp_path / "fine").read_bytes() == b"\xc3\xa9"
