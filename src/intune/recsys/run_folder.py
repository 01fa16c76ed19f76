"""The folder of a training run, which one process at a time uses."""

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from intune._errors import IntuneError, StateError
from intune.recsys.whole import open_locked, write_whole

_LOCK = "in-use"
_MADE = ("config.json", "journal.jsonl")
"""What is in a folder before its run has something to save."""


class RunFolder:
    """A run folder: made or claimed within a `with` block, and free for others after it.

    The claim is a locked file with the number of the process in it, which the kernel frees however the process ends.
    """

    def __init__(self, path: Path) -> None:
        """Touch nothing yet."""
        self.path = path
        self._made = False
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "RunFolder":
        """Touch nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let others use it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the folder may be gone
                (self.path / _LOCK).unlink()
            self._lock.close()

    def claim(self) -> None:
        """Use a folder that is there.

        Raises:
            StateError: If another process uses it, with its number, or it is not there.
            IntuneError: If it cannot be claimed, as on a read-only file system.
        """
        file = self.path / _LOCK
        try:
            self._lock = open_locked(file)
            self._lock.truncate()
            os.write(self._lock.fileno(), str(os.getpid()).encode())  # past its buffer, which would be tried again
        except BlockingIOError:
            raise StateError(
                f"another intune train{_holder(file)} uses the run folder {self.path}: wait for its end, or stop it"
            ) from None
        except FileNotFoundError:
            raise StateError(f"there is no run folder {self.path}") from None
        except OSError as error:
            raise IntuneError(f"the run folder {self.path} cannot be used: {error.strerror or error}") from error

    def make(self, config: str) -> None:
        """Make the folder, use it, and write config.json.

        Args:
            config: What is written.

        Raises:
            FileExistsError: If it is there.
            IntuneError: If it cannot be made or written to.
        """
        self._made = True  # before it is, so that a signal that comes now leaves nothing
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            self._made = False
            if isinstance(error, FileExistsError) and os.path.lexists(self.path):
                raise FileExistsError(f"the run folder {self.path} is there already; name a new one") from None
            raise IntuneError(f"the run folder {self.path} cannot be made: {error.strerror or error}") from error
        self.claim()
        write_whole(self.path / "config.json", config)

    def remove(self) -> None:
        """Delete the folder with what a run writes before its first step, if this object has made it.

        Raises:
            OSError: If it cannot be deleted, as where there are other files in it.
        """
        if not self._made:
            return
        if self._lock is not None:
            for name in (*_MADE, _LOCK):
                (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()


def _holder(file: Path) -> str:
    try:
        number = file.read_text()
    except OSError:  # it has ended meanwhile
        number = ""
    return f" (pid {number})" if number else ""
