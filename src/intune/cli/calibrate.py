"""`intune calibrate`: a simulator that behaves like one's own pipeline, and what it says of what was not tried."""

import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intune._errors import PipelineError
from intune._words import count
from intune.cli.endings import USER_ERROR, clean_endings, plain_errors, say, tell

if TYPE_CHECKING:
    from intune.pipeline.chain import Pipeline
    from intune.sim import SimStage
    from intune.sim.answers import Answer, Calibration

OPTIONS = {"seconds": "--seconds", "cpus": "--cpus", "memory": "--memory"}
FORM = "cpus=N, tuner=NAME, or STAGE=N for a stage's concurrency"


def calibrate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A pipeline, or a function that returns one, in a module of this folder or of what is installed.",
            metavar="MODULE:NAME",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Fit to a journal instead of running.", show_default="run the pipeline")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Ask what was saved before.", show_default="run the pipeline")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For how long the pipeline is run.")] = 120.0,
    cpus: Annotated[int | None, typer.Option(help="CPU slots.", show_default="what the machine gives")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help='Limit, as "4GiB" or "50%".', show_default="what the machine gives"),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help=f"What to ask: {FORM}; several by commas. May be given again.", show_default="tuner=shared"),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the calibration in this file, as JSON.", show_default="it is not kept")
    ] = None,
) -> None:
    """Find out how a pipeline would do with more CPUs, another tuner or other limits, without trying.

    Runs it for two minutes under one allocation after another (or reads a journal), fits a simulator to what was
    measured, and answers with an interval. It never answers for more than twice what was seen.
    """
    with plain_errors():
        from intune.sim import calibrate as run
        from intune.sim import calibrate_journal
        from intune.sim.answers import Calibration
        from intune.sim.writable import check_file

        asked = {text: parse_question(text) for text in what_if or ["tuner=shared"]}

    with clean_endings(OPTIONS):
        _check_one(target, journal, load)
        if save is not None:
            check_file(save)
        if load is not None:
            found = Calibration.load(load)
        elif journal is not None:
            found = calibrate_journal(journal)
        else:
            assert target is not None
            pipeline = named_pipeline(target)
            tell(f"{pipeline!r}: measured for {seconds:g} s under one allocation after another")
            found = run(pipeline, seconds, cpus=cpus, memory=memory)
        if save is not None:
            found.save(save)
        for line in about(found):
            say(line)
        refused = [line for line in map(partial(_answer, found), asked.items()) if line is not None]
        if refused:
            for line in refused:
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(USER_ERROR)


def parse_question(text: str) -> dict[str, Any]:
    """Arguments of `Calibration.what_if`, from a text such as "cpus=64,tuner=model".

    Raises:
        PipelineError: If it is of another form, or there is no such tuner.
    """
    from intune.tuners import make_tuner

    found: dict[str, Any] = {}
    limits: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.rpartition("="))
        if not equals or not name or not value or name in found or name in limits:
            raise PipelineError(f"--what-if {text!r}: give {FORM}, each once, by commas")
        if name == "tuner":
            make_tuner(value)  # that there is none is better said now than in two minutes
            found[name] = value
        elif not value.isdecimal():
            raise PipelineError(f"--what-if {text!r}: {name} must be a whole number, got {value!r}")
        elif name == "cpus":
            found[name] = int(value)
        else:
            limits[name] = int(value)
    return found | ({"concurrency": limits} if limits else {})


def named_pipeline(target: str) -> "Pipeline":
    """The pipeline that MODULE:NAME stands for.

    Raises:
        PipelineError: If there is no such module or name, or it is neither a pipeline nor gives one.
    """
    from intune.pipeline.chain import Pipeline

    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise PipelineError(f"{target!r}: give MODULE:NAME, as in train:make_pipeline")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself needs
        raise PipelineError(f"no module {module!r} in {folder} or among what is installed") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise PipelineError(f"{module} has no {name!r}{meant}")
        found = getattr(found, part)
    if not isinstance(found, Pipeline) and callable(found):
        found = found()
    if not isinstance(found, Pipeline):
        raise PipelineError(f"{target} is no pipeline, nor a function that returns one: got {type(found).__name__}")
    return found


def about(found: "Calibration") -> Iterator[str]:
    """What was fitted, and how well."""
    yield (
        f"measured {found.seconds:.0f} s on {count(found.cpus, 'CPU slot')}; fitted, an item of each stage costs "
        "(at most so many were seen at once):"
    )
    fit = found.fits[0]
    stages = {stage.name: stage for stage in found.scenario.stages}
    for name, seen in found.seen.items():
        yield f"  {name:<16} {seen:>3}  {_costs(stages[fit.names[name]], fit.groups[name])}"
    for note in found.notes:
        yield f"  note: {note}"
    yield f"simulated again, allocations that were measured are off by {found.error / 1.48:.1%} (median)"


def _costs(stage: "SimStage", items: float) -> str:
    """Of one item, where that many are simulated as one."""
    kinds = {"CPU": stage.cpu_seconds, "lock": stage.lock_seconds, "in turn": stage.serial_seconds}
    kinds |= {"wait": stage.wait_seconds}
    said = [f"{seconds / items * 1e3:.3g} ms {kind}" for kind, seconds in kinds.items() if seconds / items >= 5e-7]
    if stage.disk_bytes or stage.network_bytes:
        said.append("shares a device")
    if stage.contention or stage.coherency:
        twice = 1 + stage.contention + 2 * stage.coherency
        said.append(f"beside another one {twice:.3g} times as long")
    return ", ".join(said) or "nothing"


def answer_line(question: str, answer: "Answer") -> str:
    """What is said of one question."""
    if answer.died is not None:
        return f"{question}: memory would run out: {answer.died}"
    interval = f"in nine of ten cases {answer.low:,.0f} to {answer.high:,.0f}"
    return f"{question}: {answer.rows_per_second:,.0f} rows/s, {interval}"


def _answer(found: "Calibration", question: tuple[str, dict[str, Any]]) -> str | None:
    """Say the answer to one question, or give why there is none."""
    text, arguments = question
    try:
        say(answer_line(text, found.what_if(**arguments)))
    except PipelineError as error:
        return f"--what-if {text}: {error}"
    return None


def _check_one(*sources: Sequence[Any] | Path | None) -> None:
    if sum(source is not None for source in sources) != 1:
        raise PipelineError("give one of these: MODULE:NAME to run a pipeline, --journal FILE, --load FILE")
