"""`intune generate`: made-up click logs to train on."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from intune._errors import PipelineError
from intune.cli.endings import clean_endings

_FORMATS: dict[str, Literal["parquet", "tsv"]] = {".parquet": "parquet", ".tsv": "tsv"}


def generate(
    path: Annotated[Path, typer.Argument(help="A file (.parquet, .tsv), or a folder that gets one.")],
    rows: Annotated[int, typer.Option(min=0, help="How many rows.")] = 1_000_000,
    format: Annotated[
        Literal["parquet", "tsv"] | None, typer.Option(help="By default that of the file's name, else parquet.")
    ] = None,
    hex_strings: Annotated[bool, typer.Option(help="Parquet with categories as hex strings, as in the text.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same rows.")] = 0,
) -> None:
    """Write made-up rows in Criteo's format, with a label that can be learnt."""
    from intune.recsys.generate import write_criteo

    with clean_endings():
        of_name = _FORMATS.get(path.suffix)
        if path.suffix and of_name is None:
            raise PipelineError(f"{path}: the ending must be one of {', '.join(_FORMATS)}, or none for a folder")
        if format and of_name and format != of_name:
            raise PipelineError(f"the name {path} says {of_name}, but --format says {format}")
        chosen = format or of_name or "parquet"
        file = path if of_name else path / f"part-0.{chosen}"
        write_criteo(file, rows, format=chosen, hex_strings=hex_strings, seed=seed)
        typer.echo(f"{rows:,} rows, {file.stat().st_size:,} bytes: {file}")
