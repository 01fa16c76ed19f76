"""How a command ends: what the user did wrong is one line and code 2, Ctrl-C is code 130, anything else a traceback."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import typer

from intune._errors import IntuneError

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def clean_endings(options: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Turn errors of the user and Ctrl-C into a line on stderr and an exit code.

    Args:
        options: By the name of an argument of the library, the option that stands for it: an error that speaks of the
            one is made to speak of the other.

    Raises:
        typer.Exit: With code 2 after "error: ...", with code 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        notes = "; ".join(getattr(stop, "__notes__", []))
        typer.echo(f"interrupted {notes}".rstrip(), err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (IntuneError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", []))])
        typer.echo(f"error: {as_options(' '.join(text.split()), options)}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        typer.echo('error: training needs PyTorch: pip install "intune[torch]"', err=True)
        raise typer.Exit(USER_ERROR) from None


def as_options(text: str, options: Mapping[str, str]) -> str:
    """A text that speaks of arguments made to speak of options: format='tsv' -> --format tsv.

    A word is taken for an argument where "=" or " must" follows, where it has an underscore, or where ":" follows and
    it stands first; never within a path, a longer word or quotes.

    Args:
        text: An error of the library.
        options: By the name of an argument, the option that stands for it.
    """
    if not options:
        return text
    names = "|".join(map(re.escape, options))
    spoken_of = re.compile(rf"""(?<![\w/.'"-])({names})(?:=('[^']*'|[\w.]+)|(?![\w/='"-]))""")

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if value is not None:
            return options[name] + " " + value.strip("'")
        rest = text[match.end() :]
        sure = "_" in name or rest.startswith(" must") or (not match.start() and rest.startswith(":"))
        return options[name] if sure else match[0]

    return spoken_of.sub(option, text)
