"""Files that come to be whole or not at all, and files that lock others out."""

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from intune._errors import IntuneError


@contextlib.contextmanager
def whole_file(path: Path, *, replace: bool) -> Iterator[IO[bytes]]:
    """Write a file beside its place; where the block ends well, flush it to disk and give it its name.

    Meanwhile it is called `path` + "." + process-thread + ".tmp", which readers ignore, so that several may write the
    same file at the same time. After an error in the block, Ctrl-C among them, what was written is deleted and `path`
    is as it was. After a kill or a power cut it is as it was, too; what was written then lies beside it until somebody
    writes `path` again.

    Args:
        path: The file; its folder is there.
        replace: Whether it takes the place of a file that is there.

    Yields:
        The file, open for writing bytes.

    Raises:
        FileExistsError: If a file is there that is not to be replaced.
        OSError: If it cannot be written, as on a full disk.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    _remove_left_over(path)
    try:
        with _own(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if path.exists() and not replace:  # it may have come meanwhile
                raise FileExistsError(f"{path} is there already; name a new file")
            os.replace(part, path)  # still locked, else it might be taken for one that was left over
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is on its way says more
            part.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


def write_whole(path: Path, text: str) -> None:
    """Make a text file or replace it, whole or not at all.

    Raises:
        IntuneError: If it cannot be written; the message has the path.
    """
    try:
        with whole_file(path, replace=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise IntuneError(f"{path} cannot be written: {error.strerror or error}") from error


def open_locked(path: Path) -> IO[bytes]:
    """Open a file, made where needed, that nobody else opens so until it is closed or this process has ended.

    Raises:
        BlockingIOError: If somebody else holds it.
        OSError: If it cannot be made or locked.
    """
    while True:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")  # noqa: SIM115 - it is handed on
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # who held it has deleted it: the next one to come makes another


def _own(part: Path) -> IO[bytes]:
    """Open a file of one's own, and say by a lock that its writer lives."""
    while True:
        with contextlib.suppress(BlockingIOError):  # somebody takes it for left over, and will delete it
            try:
                file = open_locked(part)
                file.truncate()
                return file
            except BlockingIOError:
                raise
            except OSError:  # a file system without locks; then nothing is ever taken for left over
                return open(part, "wb")


def _remove_left_over(path: Path) -> None:
    """Delete what writers of the file have left that are no more."""
    of_it = re.compile(re.escape(path.name) + r"\.\d+-\d+\.tmp")
    for name in filter(of_it.fullmatch, os.listdir(path.parent)):
        with (
            contextlib.suppress(OSError),  # a writer lives, or it is gone meanwhile, or another user's
            open(path.with_name(name), "r+b") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_name(name).unlink()


def _is(path: Path, file: IO[bytes]) -> bool:
    """Whether a path leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
