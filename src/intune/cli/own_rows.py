"""Rows for a first try: made once, kept in the user's cache folder."""

import os
import time
from pathlib import Path

from intune import __version__
from intune.cli.endings import say
from intune.cli.generate import progress_lines

ROWS = 1_000_000


def own_rows(rows: int = ROWS) -> Path:
    """A Parquet file of made-up rows; it is made where this version has not made it before, and that is said.

    It lies in `$XDG_CACHE_HOME/intune`, or `~/.cache/intune` where that is not set.

    Raises:
        IntuneError: If the folder cannot be made or written to.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "intune"
    file = folder / f"clicks-{rows}-{__version__}.parquet"
    if file.exists():
        say(f"no PATH given: using the made-up rows in {file}")
        return file
    from intune.recsys.generate import write_criteo

    say(f"no PATH given: making {rows:,} rows of click logs in {file}, once")
    try:
        write_criteo(file, rows, hex_strings=True, progress=progress_lines(rows, time.monotonic))
    except FileExistsError:
        if not file.exists():  # else another run that began at the same time was faster
            raise
    return file
