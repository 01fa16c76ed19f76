"""How a command ends: what the user or the system did is one line and code 2, Ctrl-C is 130, the rest a traceback."""

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import typer

from intune._errors import IntuneError
from intune.cli.stopping import UNFLUSHED, WORDS, Unwinding

USER_ERROR = 2
SIGNALLED = 128
"""Plus the signal's number, as shells have it: 130 after Ctrl-C, 143 after SIGTERM."""

_OPTIONS: Mapping[str, str] = MappingProxyType({})


@contextmanager
def clean_endings(options: Mapping[str, str] = _OPTIONS) -> Iterator[None]:
    """Turn errors of the user, Ctrl-C and SIGTERM into a line on stderr and an exit code; for the work of a command.

    Args:
        options: By the name of an argument of the library, the option that stands for it: an error that speaks of the
            one is made to speak of the other.

    Raises:
        typer.Exit: With code 2 after "error: ...", with code 130 after Ctrl-C, with code 143 after SIGTERM.
    """
    with Unwinding() as signals:
        error: BaseException | None = None
        try:
            with plain_errors(options, lambda: signals.number is None):
                yield
        except BaseException as raised:
            if signals.number is None and not isinstance(raised, KeyboardInterrupt):
                raise
            error = raised
    if signals.number is None and error is None:
        return
    # Whatever came out, it was broken off by the signal.
    number = signals.number or signal.SIGINT
    # Nothing came out where the exception was lost in a finaliser, and all was done before the end came by force.
    said = "when its work was done" if error is None else as_options("; ".join(_notes(error)), options)
    typer.echo(f"{WORDS[signal.Signals(number)]} {said}".rstrip(), err=True)
    raise typer.Exit(SIGNALLED + number) from None


@contextmanager
def plain_errors(options: Mapping[str, str] = _OPTIONS, wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The same for errors of the user alone; for imports, which a signal may end on the spot.

    Args:
        options: As of `clean_endings`.
        wanted: Whether an error that comes is the user's.

    Raises:
        typer.Exit: With code 2 after "error: ...".
    """
    try:
        yield
    except (IntuneError, OSError) as error:
        if not wanted() or isinstance(error, BrokenPipeError):  # the end of a pipe is no error, and ends it silently
            raise
        text = " ".join([_in_words(error), *(f"({note})" for note in getattr(error, "__notes__", []))])
        typer.echo(f"error: {as_options(' '.join(text.split()), options)}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except ModuleNotFoundError as error:
        if error.name != "torch" or not wanted():
            raise
        typer.echo('error: training needs PyTorch: pip install "intune[torch]"', err=True)
        raise typer.Exit(USER_ERROR) from None


def say(line: str) -> None:
    """Say a line of what came of a command on stdout; where that is full, say it on stderr and end.

    Raises:
        typer.Exit: With the code `UNFLUSHED` if stdout cannot be written to.
    """
    try:
        typer.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # what it holds will not go out at the end, either
        typer.echo(f"error: stdout cannot be written to: {error.strerror or error}; it was to say: {line}", err=True)
        raise typer.Exit(UNFLUSHED) from None


def tell(line: str) -> None:
    """Say a line on the way; a full disk behind stdout is no reason to end what is going on."""
    try:
        typer.echo(line)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise


def _in_words(error: IntuneError | OSError) -> str:
    """An error without numbers of the system: "name: No space left on device"."""
    if isinstance(error, IntuneError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _notes(error: BaseException | None) -> list[str]:
    """What an interrupt says of itself, where it may have become another error on its way."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return list(getattr(error, "__notes__", []))


def as_options(text: str, options: Mapping[str, str]) -> str:
    """A text that speaks of arguments made to speak of options: format='tsv' -> --format tsv.

    A word is taken for an argument where "=" (with a value or without) or " must" follows, where it has an underscore,
    or where ":" follows and it stands first; never within a path, a longer word or quotes.

    Args:
        text: An error of the library.
        options: By the name of an argument, the option that stands for it.
    """
    if not options:
        return text
    names = "|".join(map(re.escape, options))
    spoken_of = re.compile(rf"""(?<![\w/.'"-])({names})(?:=('[^']*'|[\w.]+|(?=[\s,;)]|$))|(?![\w/='"-]))""")

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if value is not None:
            return f"{options[name]} {value.strip(chr(39))}".rstrip()
        rest = text[match.end() :]
        sure = "_" in name or rest.startswith(" must") or (not match.start() and rest.startswith(":"))
        return options[name] if sure else match[0]

    return spoken_of.sub(option, text)
