"""`intune generate`: made-up click logs to train on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from intune._errors import PipelineError
from intune._words import count
from intune.cli.endings import clean_endings, say

_FORMATS: dict[str, Literal["parquet", "tsv"]] = {".parquet": "parquet", ".tsv": "tsv"}
_EVERY_SECONDS = 2.0


def generate(
    path: Annotated[
        Path, typer.Argument(help="A file (.parquet, .tsv), or a folder that gets one or, by --days, some.")
    ],
    rows: Annotated[int, typer.Option(min=0, help="How many rows; with --days, in each file.")] = 1_000_000,
    days: Annotated[
        int | None, typer.Option(min=1, help="Write so many files day_0, day_1, ... into the folder.")
    ] = None,
    format: Annotated[
        Literal["parquet", "tsv"] | None, typer.Option(help="By default that of the file's name, else parquet.")
    ] = None,
    hex_strings: Annotated[
        bool, typer.Option(help="Parquet with categories as hex strings, as in the text, instead of integers.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same rows.")] = 0,
    drift: Annotated[
        float, typer.Option(min=0, max=1, help="From day to day, the share of each vocabulary that is replaced.")
    ] = 0.0,
) -> None:
    """Write made-up rows in Criteo's format, as skewed and gappy as real ones, with a label that can be learnt."""
    from intune.recsys.generate import write_criteo, write_days

    with clean_endings():
        of_name = _FORMATS.get(path.suffix)
        if path.suffix and of_name is None:
            raise PipelineError(f"{path}: the ending must be one of {', '.join(_FORMATS)}, or none for a folder")
        if format and of_name and format != of_name:
            raise PipelineError(f"the name {path} says {of_name}, but --format says {format}")
        if days and of_name:
            raise PipelineError(f"--days writes several files: give a folder, not {path}")
        if drift and not days:
            raise PipelineError("--drift is from day to day: say --days as well")
        chosen = format or of_name or "parquet"
        file = path if of_name else path / f"part-0.{chosen}"
        said = progress_lines(rows * (days or 1), time.monotonic)
        with _left_said(file, days) as written:
            if days:
                new = write_days(
                    path, rows, days=days, format=chosen, hex_strings=hex_strings, seed=seed, drift=drift, progress=said
                )
            else:
                one = write_criteo(file, rows, format=chosen, hex_strings=hex_strings, seed=seed, progress=said)
                new = iter([one])
            for each in new:
                written.append(each.path)
                best = "" if each.ideal_auc is None else f", best possible AUC {each.ideal_auc:.4f}"
                say(f"{count(each.rows, 'row')}, {count(each.size_bytes, 'byte')}{best}: {each.path}")


@contextmanager
def _left_said(file: Path, days: int | None) -> Iterator[list[Path]]:
    """Have an interrupt say what is there after it.

    Args:
        file: The only one, or, with `days`, one in the folder.
        days: How many files are to be written.

    Yields:
        A list that gets the files that are written.
    """
    written: list[Path] = []
    try:
        yield written
    except KeyboardInterrupt as stop:
        if days:
            stop.add_note(f"after {len(written):,} of {count(days, 'file')}; each that is in {file.parent} is whole")
        else:
            stop.add_note(f"{file} is whole" if file.exists() else f"nothing is left of {file}")
        raise


def progress_lines(
    total: int, clock: Callable[[], float], echo: Callable[[str], object] = lambda line: typer.echo(line, err=True)
) -> Callable[[int], None]:
    """A function that is told of rows done and says so every two seconds, on stderr.

    Args:
        total: Rows to do.
        clock: Seconds.
        echo: Where lines go.
    """
    begin = last = clock()

    def say(done: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _EVERY_SECONDS and done < total:
            last = now
            echo(f"{done:,} of {total:,} rows  {done / (now - begin):,.0f} rows/s")

    return say
