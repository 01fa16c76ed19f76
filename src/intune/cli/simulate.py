"""`intune simulate`: a tuner on a simulated pipeline, and what it got."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from intune._errors import PipelineError
from intune._words import count, size
from intune.cli.endings import clean_endings, say

if TYPE_CHECKING:
    from intune.sim import Scenario, SimStage, Trace

LINES = 20
"""Lines of the table over time, about."""

FAILED = 1
"""Exit code where the tuner raised an error."""

BARS = "▁▂▃▄▅▆▇█"


def simulate(
    scenario: Annotated[str, typer.Argument(help="FAMILY-SEED, as in wild-17.", metavar="SCENARIO")],
    tuner: Annotated[str, typer.Option(help="shared, even, proportional, random or another one's name.")] = "shared",
    decisions: Annotated[int, typer.Option(min=1, help="Decisions, one a simulated second.")] = 60,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the run into this file, .png, .svg or .pdf.", show_default="no plot")
    ] = None,
) -> None:
    """Let a tuner steer a made-up pipeline in simulated time, and say what it did and got."""
    from intune.sim import play
    from intune.sim.evaluate import tuner_named
    from intune.sim.plot import check_plot
    from intune.sim.plot import plot as draw

    with clean_endings():
        drawn = parse_scenario(scenario)
        chosen = tuner_named(tuner, drawn.seed)
        if plot is not None:
            check_plot(plot)
        trace = play(drawn, chosen, decisions)
        for line in (*about(drawn), *over_time(trace), *outcome(trace, drawn, tuner)):
            say(line)
        if plot is not None:
            draw(trace, f"{drawn.name}, {tuner}", plot)
            say(f"drawn: {plot}")
        if trace.tuner_failed is not None:
            typer.echo(f"error: {tuner} failed, so this is no result of it: {trace.tuner_failed}", err=True)
            raise typer.Exit(FAILED)


def parse_scenario(text: str) -> "Scenario":
    """The scenario that a word like "wild-17" names.

    Raises:
        PipelineError: If it names none.
    """
    from intune.sim import scenario

    family, _, seed = text.rpartition("-")
    if not family or family.endswith("-") or not seed.isdecimal():
        raise PipelineError(f"a scenario is FAMILY-SEED, as in wild-17, with a seed of 0 or more, got {text!r}")
    return scenario(family, int(seed))


def about(drawn: "Scenario") -> Iterator[str]:
    """What is simulated."""
    machine = drawn.machine
    limit = "no memory limit" if machine.memory_bytes is None else f"{size(int(machine.memory_bytes))} of memory"
    yield f"{drawn.name}: {count(len(drawn.stages), 'stage')} on {count(machine.cpus, 'CPU')} with {limit}"
    for number, stage in enumerate(drawn.stages, 1):
        yield f"  {number:>2} {stage.name:<10} {stage.kind:<8} {stage.executor:<8} {_costs(stage)}"
    for change in drawn.changes:
        of = f" of {change.stage}" if change.stage else ""
        yield f"  at {change.seconds:.0f} s the {change.what}{of} becomes {change.value:.3g}"


def _costs(stage: "SimStage") -> str:
    kinds = {"CPU": stage.cpu_seconds, "lock": stage.lock_seconds, "serial": stage.serial_seconds}
    kinds |= {"wait": stage.wait_seconds}
    return ", ".join(f"{seconds * 1e3:.3g} ms {kind}" for kind, seconds in kinds.items() if seconds) or "nothing"


def over_time(trace: "Trace") -> Iterator[str]:
    """A line for every few decisions: what was got, and the concurrency by stage."""
    if not trace.intervals:
        return
    numbers = " ".join(f"{number:>3}" for number in range(1, len(trace.intervals[0].concurrency) + 1))
    yield "over time; under each stage's number the items that it may work on at once, - = no limit of its own:"
    yield f"{'seconds':>8} {'rows/s':>9} {'CPUs':>6} {'memory':>10} {'slots':>5}  {numbers}"
    every = max(1, round(len(trace.intervals) / LINES))
    before = 0.0
    for first in range(0, len(trace.intervals), every):
        part = trace.intervals[first : first + every]
        last, length = part[-1], part[-1].seconds - before
        before = last.seconds
        rows = sum(each.rows for each in part) / length
        cpus = sum(each.cpu_seconds for each in part) / length
        asked = " ".join(f"{'-' if value is None else value:>3}" for value in last.concurrency.values())
        memory = size(int(last.memory_bytes))
        yield f"{last.seconds:>8g} {rows:>9,.0f} {cpus:>6.1f} {memory:>10} {last.slots:>5}  {asked}"


def outcome(trace: "Trace", drawn: "Scenario", tuner: str) -> Iterator[str]:
    """What came of it."""
    if trace.intervals:
        begins = [0.0, *(each.seconds for each in trace.intervals)]
        rates = [each.rows / (each.seconds - begin) for begin, each in zip(begins, trace.intervals, strict=False)]
        yield f"rows/s   {sparkline(rates)}"
    limit = drawn.machine.memory_bytes
    share = f", {trace.peak_bytes / limit:.0%} of the limit" if limit else ""
    peak = f"most memory {size(int(trace.peak_bytes))}{share}"
    if trace.died is not None:
        yield f"{tuner}: memory ran out: {trace.died}; {peak}"
    else:
        yield f"{tuner}: {trace.rows_per_second():,.0f} rows/s over {trace.intervals[-1].seconds:g} s; {peak}"


def sparkline(values: list[float]) -> str:
    """Numbers as bars from nothing to the largest one."""
    most = max(values) or 1
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in values)
