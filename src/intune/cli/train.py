"""`intune train`: train a DLRM on Criteo files and say what limited it."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from intune._errors import PipelineError
from intune.cli.endings import as_options, clean_endings, plain_errors, say, tell
from intune.cli.own_rows import own_rows

_SAME = (
    *("format", "epochs", "seconds", "batch_size", "held_out", "tuner", "concurrency", "cpus", "memory", "seed"),
    *("run_dir", "executor", "device", "rows_per_table", "checkpoint_seconds"),
)
OPTIONS = {"shuffle_rows": "--rows-shuffle", "paths": "PATH", **{name: f"--{name.replace('_', '-')}" for name in _SAME}}
"""By the name of an argument of the library, the option of this command that stands for it."""


_NAME = 50
"""Letters of a file's name in that of a run folder; a name may have 255 bytes."""


def train(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Criteo files, folders or patterns; none = made-up rows, kept in the cache.", metavar="PATH"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the rows.", show_default="1, or what fits --seconds")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop training after so many seconds.", show_default="when the epochs are done")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows a step.")] = 2048,
    rows_shuffle: Annotated[
        int, typer.Option(help="Rows of a shuffle window; 0 = in the order of the files.")
    ] = 200_000,
    tuner: Annotated[
        str,
        typer.Option(
            help="model, shared, even, proportional, static (of the limits given), random, dqn, hillclimb, "
            "hillclimb-climb, hillclimb-stage-based, learned-model, plumber, tabular or threshold."
        ),
    ] = "model",
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            help="For the tuner static, STAGE=N: the most items a stage works on at once.", show_default="none"
        ),
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU slots.", show_default="what the machine gives")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help='Limit, as "4GiB", or as "50%" of what the machine gives.', show_default="what the machine gives"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the row order and of the first weights.")] = 0,
    held_out: Annotated[float, typer.Option(help="Share of rows for evaluation, 0 to 0.5.")] = 0.1,
    run_dir: Annotated[
        Path | None, typer.Option(help="New folder for the run.", show_default="runs/<time>-<name>")
    ] = None,
    executor: Annotated[Literal["thread", "process"], typer.Option(help="Where transforms run.")] = "thread",
    format: Annotated[Literal["auto", "tsv", "parquet"], typer.Option(help="Format of the files.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model lives: cpu, cuda, cuda:1.")] = "cpu",
    rows_per_table: Annotated[int, typer.Option(help="Rows of each of the 26 embedding tables.")] = 100_000,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="How often to save model, optimizer and position; 0 = never.")
    ] = 300.0,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a run to go on with, from its last checkpoint.", show_default="a new run"),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show progress as lines, as where stdout is no terminal; no live table.")
    ] = False,
) -> None:
    """Train a DLRM on Criteo files: Kaggle's train.txt, days of the 1 TB set, or Parquet made from them."""
    with plain_errors(OPTIONS):
        from rich.console import Console

        from intune.cli.live import LiveTable, fits
        from intune.recsys.config import TrainConfig
        from intune.recsys.train import already_finished
        from intune.recsys.train import train as run

    with clean_endings(OPTIONS), _said_before_training(resume):
        if not paths and not resume:
            paths = [str(own_rows())]
        fields: dict[str, Any] = {
            "paths": tuple(paths or ()),
            "format": format,
            "epochs": epochs,
            "seconds": seconds,
            "batch_size": batch_size,
            "shuffle_rows": rows_shuffle,
            "held_out": held_out,
            "tuner": tuner,
            "concurrency": dict(map(parse_concurrency, concurrency or ())),
            "cpus": cpus,
            "memory": memory,
            "seed": seed,
            "executor": executor,
            "device": device,
            "rows_per_table": rows_per_table,
            "checkpoint_seconds": checkpoint_seconds,
            "run_dir": run_dir,
        }
        if resume:
            config = TrainConfig.read(resume, {name: fields[name] for name in fields if _given(context, name)})
            if finished := already_finished(config):
                say(as_options(finished, OPTIONS))
                return
        else:
            new = iter([run_dir]) if run_dir else new_run_dirs(Path("runs"), fields["paths"][0], datetime.now())
            config = TrainConfig(**fields | {"run_dir": next(new)})
        console = Console()
        table = LiveTable(console) if fits(console, plain=plain) else None
        echo = tell if table is None else table.echo
        while True:
            try:
                summary = run(config, resume=resume is not None, echo=echo, reporter=table)
                break
            except FileExistsError:  # another run that began in the same second was faster
                if run_dir:
                    raise
                config = replace(config, run_dir=next(new))
    for line in summary.lines():
        say(line)


@contextmanager
def _said_before_training(resume: Path | None) -> Iterator[None]:
    """Have an interrupt that says nothing of its own, as training had not begun, say what is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not getattr(stop, "__notes__", []):
            kept = f"; what {resume} holds stays as it was; to go on: intune train --resume {resume}" if resume else ""
            stop.add_note(f"before training began, so nothing was saved{kept}")
        raise


def _given(context: typer.Context, name: str) -> bool:
    """Whether the user gave the option that stands for this field."""
    source = context.get_parameter_source("rows_shuffle" if name == "shuffle_rows" else name)
    return source is not None and source.name == "COMMANDLINE"


def new_run_dirs(base: Path, first_path: str, now: datetime) -> Iterator[Path]:
    """Folders that are not there yet: <base>/<time>-<name of the first path>, then numbered from 2 on."""
    stem = f"{now:%Y%m%d-%H%M%S}-{Path(first_path).stem[:_NAME] or 'run'}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return (base / name for name in names if not os.path.lexists(base / name))


def parse_concurrency(text: str) -> tuple[str, int]:
    """Read "STAGE=N".

    Raises:
        PipelineError: If it is something else.
    """
    stage, _, number = text.partition("=")
    if not stage or not number.isdecimal():
        raise PipelineError(f"concurrency must be STAGE=N, as in read_parquet=2, got {text!r}")
    return stage, int(number)
