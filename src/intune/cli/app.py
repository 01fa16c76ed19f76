"""The command's parts put together, and what is common to them."""

from typing import Annotated

import typer

import intune
from intune.cli.bench import bench
from intune.cli.calibrate import calibrate
from intune.cli.doctor import doctor
from intune.cli.generate import generate
from intune.cli.pretrain import pretrain
from intune.cli.simulate import simulate
from intune.cli.train import train

app = typer.Typer(
    name="intune",
    help="Feeds a model in training as fast as the machine allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(generate)
app.command()(doctor)
app.command()(simulate)
app.command()(pretrain)
app.command()(calibrate)
app.add_typer(bench, name="bench")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"intune {intune.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Feeds a model in training as fast as the machine allows."""
