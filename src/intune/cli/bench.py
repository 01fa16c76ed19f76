"""`intune bench tuners`: tuners compared on simulated pipelines."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intune._errors import PipelineError
from intune.cli.endings import clean_endings, plain_errors, say, tell

if TYPE_CHECKING:
    from intune.sim.summary import Line

WIDTH = 160

bench = typer.Typer(help="Compare tuners.", no_args_is_help=True)


@bench.callback()
def _root() -> None:
    """Compare tuners."""


@bench.command()
def tuners(
    families: Annotated[
        str | None,
        typer.Option(help="Families of scenarios, by commas.", show_default="those that tuners are made on"),
    ] = None,
    tuners: Annotated[str, typer.Option(help="Names of tuners, by commas.")] = "model,shared,proportional",
    scenarios: Annotated[int, typer.Option(min=1, help="Scenarios of each family.")] = 20,
    decisions: Annotated[int, typer.Option(min=10, help="Decisions of each run, one a simulated second.")] = 60,
    out: Annotated[
        Path, typer.Option(help="File of results, gone on with if it is there; oracles lie beside it.")
    ] = Path("tuners.jsonl"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table in Markdown.")] = False,
) -> None:
    """Run tuners on simulated pipelines and say which share of the best static allocation they reach."""
    with plain_errors():
        from intune.sim import TRAINED
        from intune.sim.evaluate import Plan, evaluate
        from intune.sim.summary import markdown as as_markdown
        from intune.sim.summary import summarise

    with clean_endings():
        chosen = tuple(TRAINED) if families is None else _names("--families", families)
        plan = Plan(chosen, scenarios, _names("--tuners", tuners), decisions)
        try:
            rows = evaluate(plan, out, jobs, lambda n, of: tell(f"{n:,} of {of:,} scenarios"))
        except KeyboardInterrupt as stop:
            stop.add_note(f"with what is done in {out}; to go on: the same command")
            raise
        lines = summarise(rows)
        for line in (as_markdown(lines) if markdown else as_text(lines)).splitlines():
            say(line)


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise PipelineError(f"{option} needs at least one name, got {text!r}")
    return names


def as_text(lines: Sequence["Line"]) -> str:
    """The summary as a table for a terminal."""
    from rich.console import Console
    from rich.table import Table

    from intune.sim.summary import HEADS, cells

    table = Table(*HEADS, box=None, header_style="")
    for line in lines:
        table.add_row(*cells(line))
    written = io.StringIO()
    Console(file=written, width=WIDTH, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
