"""`intune calibrate`: a simulator that behaves like one's own pipeline, and what it says of what was not tried."""

import difflib
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intune._errors import PipelineError
from intune._words import count
from intune.cli.endings import USER_ERROR, clean_endings, plain_errors, say, tell

if TYPE_CHECKING:
    from intune.pipeline.chain import Pipeline
    from intune.sim import SimStage
    from intune.sim.calibration.answers import Answer, Calibration

OPTIONS = {"seconds": "--seconds", "cpus": "--cpus", "memory": "--memory"}
BEST = "as it ran best"
MOST_LINES = 5
"""Allocations that do not fit which are named."""

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
        typer.Option(
            help=f"What to ask: {FORM}; several by commas. May be given again.", show_default="as it ran best"
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the calibration in this file, as JSON.", show_default="it is not kept")
    ] = None,
) -> None:
    """Find out how a pipeline would do with more CPUs, another tuner or other limits, without trying.

    Runs it for two minutes under one allocation after another (or reads a journal), fits a simulator to what was
    measured, says where that does not fit, and answers with an interval. It never answers for more than twice what was
    seen.
    """
    with plain_errors():
        from intune.sim import calibrate as run
        from intune.sim import calibrate_journal
        from intune.sim.calibration.answers import Calibration
        from intune.sim.writable import check_file

        asked = {text: parse_question(text) for text in what_if or []}

    with clean_endings(OPTIONS):
        _check_one(target, journal, load)
        if save is not None:
            check_file(save)
        if load is not None:
            found = Calibration.load(load)
        elif journal is not None:
            with _shown(f"fitting a simulator to {journal}"):
                found = calibrate_journal(journal)
        else:
            assert target is not None
            pipeline = named_pipeline(target)
            check_questions(asked, pipeline, cpus)
            tell(f"{pipeline!r}: measured for {seconds:g} s under one allocation after another")
            with _shown("measuring, then fitting", seconds) as at:
                found = run(pipeline, seconds, cpus=cpus, memory=memory, progress=at)
        if save is not None:
            found.save(save)
        for line in about(found):
            say(line)
        questions = asked or {BEST: {}}
        answers = {
            text: _answer(found, text, arguments, f"{number} of {len(questions)}")
            for number, (text, arguments) in enumerate(questions.items(), 1)
        }
        for line in alike({text: answer for text, answer in answers.items() if answer is not None}):
            say(line)
        if None in answers.values():
            raise typer.Exit(USER_ERROR)


def parse_question(text: str) -> dict[str, Any]:
    """Arguments of `Calibration.what_if`, from a text such as "cpus=64,tuner=model".

    Raises:
        PipelineError: If it is of another form, there is no such tuner, or nobody could answer it.
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
        elif not value.isdecimal() or int(value) < 1:
            raise PipelineError(f"--what-if {text!r}: {name} must be a whole number of at least 1, got {value!r}")
        elif name == "cpus":
            found[name] = int(value)
        else:
            limits[name] = int(value)
    if limits and "tuner" in found:
        raise PipelineError(
            f"--what-if {text!r}: give tuner or limits, not both: limits that stay leave a tuner nothing to do"
        )
    return found | ({"concurrency": limits} if limits else {})


def check_questions(asked: Mapping[str, Mapping[str, Any]], pipeline: "Pipeline", cpus: int | None) -> None:
    """See that no question is of a stage that there is not, or of more CPUs than will be answered, before the sweep.

    Raises:
        PipelineError: If one is.
    """
    from intune._machine.cpus import cpu_reading
    from intune._machine.system import System
    from intune.sim.calibration.answers import FURTHEST

    names = [pipeline.source.kind, *(stage.name for stage in pipeline.stages)]
    slots = cpus or cpu_reading(System()).cpus
    for text, arguments in asked.items():
        for name in arguments.get("concurrency", {}):
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise PipelineError(f"--what-if {text!r}: no stage {name!r}, this pipeline has {names}{meant}")
        if arguments.get("cpus", 0) > FURTHEST * slots:
            raise PipelineError(
                f"--what-if {text!r}: with {count(slots, 'CPU slot')} to measure on, at most {FURTHEST * slots} CPUs "
                "can be answered for; measure on a larger machine"
            )


def named_pipeline(target: str) -> "Pipeline":
    """The pipeline that MODULE:NAME stands for.

    Raises:
        PipelineError: If there is no such module or name, or it is neither a pipeline nor gives one.
    """
    from intune.pipeline.chain import Pipeline

    module, colon, name = target.partition(":")
    if not colon or not module or not name or module.endswith(".py"):
        raise PipelineError(f"{target!r}: give MODULE:NAME, as in train:make_pipeline for train.py")
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
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise PipelineError(f"{target} is called without arguments, and cannot be: {error}") from None
        except ValueError:  # it does not tell what it takes
            pass
        found = found()
    if not isinstance(found, Pipeline):
        raise PipelineError(f"{target} is no pipeline, nor a function that returns one: got {type(found).__name__}")
    return found


def about(found: "Calibration") -> Iterator[str]:
    """Where it does not fit, then what was fitted, and what cannot be told."""
    from intune.sim.calibration.answers import SAID, off_line

    if found.misfits:
        yield (
            f"DOES NOT FIT: {count(len(found.misfits), 'allocation')} of {len(found.held)} that were measured, "
            f"simulated again, off by more than {SAID:.0%}; intervals are as much wider:"
        )
        for one in found.misfits[:MOST_LINES]:
            yield f"  {off_line(one)}"
        if len(found.misfits) > MOST_LINES:
            yield f"  and {len(found.misfits) - MOST_LINES} more"
    else:
        yield f"fits: none of the {count(len(found.held), 'allocation')} measured is surely off by {SAID:.0%}"
    yield (
        f"measured on {count(found.cpus, 'CPU slot')}; fitted, an item of each stage costs, alone unless a note "
        "says otherwise (at most so many were seen at once):"
    )
    fit = found.fits[0]
    stages = {stage.name: stage for stage in found.scenario.stages}
    for name, seen in found.seen.items():
        yield f"  {name:<16} {seen:>3}  {_costs(stages[fit.names[name]], fit.groups[name], seen)}"
    for note in found.notes:
        yield f"  note: {note}"


def _costs(stage: "SimStage", items: float, most: int) -> str:
    """Of one item, where that many are simulated as one."""
    kinds = {"CPU": stage.cpu_seconds, "CPU with the lock": stage.lock_seconds, "wait": stage.waiting(1)}
    said = [f"{seconds / items * 1e3:.3g} ms {kind}" for kind, seconds in kinds.items() if seconds / items >= 5e-7]
    alone = stage.cpu_seconds + stage.lock_seconds + stage.waiting(1)
    slowed = 1 + stage.contention * (most - 1) + stage.coherency * most * (most - 1)
    beside = (stage.cpu_seconds + stage.lock_seconds) * slowed + stage.waiting(most)
    if alone and beside > 1.05 * alone:
        said.append(f"{beside / alone:.3g} times as long with {most} at once")
    return ", ".join(said) or "nothing"


def answer_line(question: str, answer: "Answer") -> str:
    """What is said of one question."""
    if answer.died is not None:
        return f"{question}: memory would run out: {answer.died}"
    how = "" if answer.measured_seconds is None else f"; measured for {answer.measured_seconds:.0f} s, not simulated"
    interval = f"in nine of ten cases {answer.low:,.0f} to {answer.high:,.0f}"
    return f"{question}: {answer.rows_per_second:,.0f} rows/s, {interval}{how}"


def alike(answers: "Mapping[str, Answer]") -> Iterator[str]:
    """Which answers may as well be the other way round."""
    known = [(text, answer) for text, answer in answers.items() if answer.died is None]
    pairs = [
        f"{one} and {other}"
        for (one, first), (other, second) in itertools.combinations(known, 2)
        if first.low <= second.high and second.low <= first.high
    ]
    if pairs:
        yield f"which is faster cannot be told: {'; '.join(pairs)}"


def _answer(found: "Calibration", text: str, arguments: Mapping[str, Any], number: str) -> "Answer | None":
    """Say the answer to one question, or on stderr why there is none; on stderr, too, that it is being simulated."""
    doing = f"simulating {text} ({number})"

    def simulated(done: int, of: int) -> None:
        at(done)
        if not done and not sys.stderr.isatty():  # no bar is seen
            typer.echo(f"{doing} ...", err=True)

    try:
        with _shown(doing, len(found.fits)) as at:
            answer = found.what_if(**arguments, progress=simulated)
    except PipelineError as error:
        typer.echo(f"error: --what-if {text}: {error}", err=True)
        return None
    if text == BEST:
        limits = [f"{name}={value}" for name, value in found.best.concurrency.items() if value is not None]
        text = f"{BEST} ({', '.join(limits) or 'all stages open'})"
    say(answer_line(text, answer))
    return answer


@contextmanager
def _shown(text: str, total: float | None = None) -> Iterator[Callable[[float], object]]:
    """A line on a terminal that says how far it is, and is gone in the end; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)


def _check_one(*sources: Sequence[Any] | Path | None) -> None:
    if sum(source is not None for source in sources) != 1:
        raise PipelineError("give one of these: MODULE:NAME to run a pipeline, --journal FILE, --load FILE")
