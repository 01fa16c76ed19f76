"""Whether files can be written, found out before the work whose results they are to hold."""

import tempfile
from pathlib import Path


def check_file(path: Path) -> None:
    """See that a file can be written, without a change of one that is there.

    Raises:
        OSError: If it cannot; it names the file.
    """
    if path.exists():
        with path.open("r+b"):
            return
    _try_in(path.parent, path)


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there, and see that files can be made in it.

    Raises:
        OSError: If they cannot; it names the folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    _try_in(path, path)


def _try_in(folder: Path, wanted: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:  # it names a file that nobody has heard of
        raise OSError(error.errno, error.strerror, str(wanted)) from error
