"""How a command ends: what the user did wrong is one line and code 2, Ctrl-C is code 130, anything else a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from intune._errors import IntuneError

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def clean_endings() -> Iterator[None]:
    """Turn errors of the user and Ctrl-C into a line on stderr and an exit code.

    Raises:
        typer.Exit: With code 2 after "error: ...", with code 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (IntuneError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", []))])
        typer.echo(f"error: {' '.join(text.split())}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        typer.echo('error: training needs PyTorch: pip install "intune[torch]"', err=True)
        raise typer.Exit(USER_ERROR) from None
