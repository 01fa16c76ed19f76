"""The command `intune`; needs the extra `cli` (`pip install "intune[cli]"`)."""

import os
import sys
from typing import NoReturn

from intune.cli.stopping import end_at_once, leave


def main() -> NoReturn:
    """Run the command, or say how to install what it needs, and end the process."""
    _fill_closed()
    end_at_once("before anything was begun; all is as it was")
    try:
        from intune.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        print(f'error: the command needs {error.name}: pip install "intune[cli]"', file=sys.stderr)
        leave(2)
    try:
        app()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    leave(0)


def _fill_closed() -> None:
    """Open what the shell has closed of stdin, stdout and stderr, or a file of ours would become one of them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
