"""Calibration: a sweep on a pipeline, or a journal of one, becomes a simulator that behaves like it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intune._errors import PipelineError, SourceError
from intune.control.journal import numbered_lines
from intune.control.turns import MOST_GAIN
from intune.pipeline.chain import Pipeline
from intune.pipeline.loader import Loader
from intune.sim.calibration.answers import Calibration
from intune.sim.calibration.around import neighbours
from intune.sim.calibration.fitting import Fitted, fitted
from intune.sim.calibration.levels import LEAST_ITEMS, PASSING, Level, stage_levels
from intune.sim.calibration.replay import Held, drift, replayed
from intune.sim.calibration.seen import Window, windows
from intune.sim.calibration.sweep import Sweep

REPLICAS = 5
"""Scenarios that may be true as well, beside the likeliest one."""

LEAST_WINDOWS = 3
POINTS = 20
"""Allocations of a sweep, at least; where there is time for more, each is held for `HOLD_SECONDS`."""

HOLD_SECONDS = 3.0
LEAST_HOLD_SECONDS = 2.0
"""Less is over before what was begun under the allocation before is gone."""

SHORT_SECONDS = 60.0
"""A sweep that is shorter tells little apart."""

WAITS_SHARE = 0.5
"""Share of an item's seconds that is CPU below which it mostly waits."""

NOT_FEW = 2.0
"""Items at once from which on none is alone; times as many that are many."""

EPOCHS = 1_000_000
"""More than a sweep ever begins; that the next one is known to follow lets it begin while the last one ends."""

Progress = Callable[[float], object]


def calibrate(
    pipeline: Pipeline,
    seconds: float = 120.0,
    *,
    step: Callable[[Any], object] | None = None,
    cpus: int | None = None,
    memory: str | int | float | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Run a pipeline under one allocation after another, and fit the simulator to what was measured.

    Memory is guarded as in training. Epochs follow one another until the time is up.

    Args:
        pipeline: What is run, with a loader of its own.
        seconds: For how long, above 0.
        step: What the training loop does with a batch; None = nothing, so that rates are those of the loader alone.
        cpus: CPU slots; None = what the machine gives.
        memory: Limit for the whole process tree, as `Pipeline.loader` takes it.
        journal: A file to which what was measured is appended, for `calibrate_journal`.
        progress: Called after each batch with the seconds that have passed.

    Raises:
        PipelineError: If an option is not allowed, the pipeline gives nothing, or too little was finished to learn
            from.
    """
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(f"calibrate needs a pipeline, got {type(pipeline).__name__}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PipelineError(f"seconds must be a number above 0, got {seconds!r}")
    hold = min(HOLD_SECONDS, max(LEAST_HOLD_SECONDS, seconds / POINTS))
    options: dict[str, Any] = {"cpus": cpus, "memory": memory, "epochs": EPOCHS, "journal": journal}
    with pipeline.loader(tuner=Sweep(hold), **options) as loader:
        _drain(loader, seconds, step, progress)
        lines = loader.journal
    return calibrate_lines(lines)


def calibrate_journal(path: str | Path) -> Calibration:
    """Fit the simulator to a journal file; of several runs in it the last one counts.

    Raises:
        SourceError: If a line in the middle is damaged, or is none of a journal, or none is whole; it names file and
            line.
        PipelineError: If too little was finished to learn from.
        OSError: If the file cannot be read.
    """
    at = [0]

    def lines() -> Iterator[Mapping[str, Any]]:
        for number, line in numbered_lines(path):
            at[0] = number
            yield line

    seen = windows(lines(), lambda: f"{path}, line {at[0]}")
    if not at[0]:
        raise SourceError(f"{path} is empty: give a file that Pipeline.loader(journal=PATH) or intune train wrote to")
    try:
        return _calibrated(seen)
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from error


def calibrate_lines(lines: Iterable[Mapping[str, Any]]) -> Calibration:
    """Fit the simulator to the lines of a journal, whatever tuner decided meanwhile.

    Args:
        lines: As `intune.control.journal.read_journal`, a loader's `journal` or a `Trace` has them; of several runs the
            last one counts.

    Raises:
        SourceError: If a line is none of a journal.
        PipelineError: If too little was finished to learn from.
    """
    return _calibrated(windows(lines))


def _calibrated(seen: Sequence[Window]) -> Calibration:
    finished = sum(any(stage.items_out for stage in window.snapshot.stages) for window in seen)
    if finished < LEAST_WINDOWS:
        raise PipelineError(
            f"only {finished} windows in which something was finished, at least {LEAST_WINDOWS} are needed: "
            "let it run for longer"
        )
    fits = fitted(seen, REPLICAS)
    held = replayed(fits[0], seen)
    if not held:
        raise PipelineError(
            "no allocation was held for long enough to tell what it gave: let it run for longer, by steps of several "
            "times what an item takes from end to end"
        )
    most = _most_at_once(seen)
    given = {name: _largest(each.concurrency[name] for each in held) for name in most}
    rate = max(each.measured for each in held)
    cpus = max(window.snapshot.allocation.slots for window in seen)
    return Calibration(fits, cpus, most, given, held, rate / _rows_a_step(fits[0]), tuple(_notes(seen, most, held)))


def _largest(limits: Iterable[int | None]) -> int | None:
    """None is open."""
    found = list(limits)
    return None if None in found else max(each for each in found if each is not None)


def _drain(
    loader: Loader, seconds: float, step: Callable[[Any], object] | None, progress: Callable[[float], object] | None
) -> None:
    """Take batches until so much time has passed since the first one: before it, modules may be imported."""
    began = math.inf
    for epoch in range(EPOCHS):
        batches = 0
        try:
            for batch in loader:
                batches += 1
                began = min(began, time.perf_counter())
                if step is not None:
                    step(batch)
                passed = time.perf_counter() - began
                if progress is not None:
                    progress(passed)
                if passed >= seconds:
                    return
        except SourceError:
            if not epoch or batches:
                raise
            return  # what can be read only once has been
        if not batches:
            raise PipelineError("the pipeline gave no batch, so there is nothing to calibrate")


def _rows_a_step(fit: Fitted) -> float:
    """Rows that the trainer is given in a step of the simulation."""
    rows = fit.scenario.stages[0].rows
    for stage in fit.scenario.stages:
        rows = stage.rows if stage.kind == "batch" else max(1, rows // stage.children)
    return rows * fit.rows


def _most_at_once(seen: Sequence[Window]) -> dict[str, int]:
    """By stage, the most that it was seen working on: of several items, and not only while an allocation was new."""
    found = {}
    for place, stage in enumerate(seen[-1].snapshot.stages):
        wall = stage_levels(seen, place, 0.0, 0.0).wall
        sure = [each for each in wall if each.deviation < PASSING and each.items >= LEAST_ITEMS] or wall
        found[stage.name] = max(1, *(round(each.at_once) for each in sure), 1)
    return found


def _waiting_notes(seen: Sequence[Window]) -> Iterator[str]:
    """Of stages that mostly wait: whether their items take turns, or whether that could not be seen."""
    for place, stage in enumerate(seen[-1].snapshot.stages):
        levels = stage_levels(seen, place, 0.0, 0.0)
        few, many = levels.wall[0], levels.wall[-1]
        if levels.cpu[-1].seconds >= WAITS_SHARE * many.seconds:
            continue
        if few.at_once >= NOT_FEW:
            yield (
                f"{stage.name}: never seen with fewer than {few.at_once:.0f} at once, so what it waits alone is taken "
                "to be the same: if its items take turns (a lock, a disk), it is a small part of that, and more at "
                "once gain nothing. Calibrate by MODULE:NAME, or give it a limit for a while"
            )
        elif many.at_once >= NOT_FEW * few.at_once and _rate(many) <= MOST_GAIN * _rate(few):
            yield (
                f"{stage.name}: gives hardly more with {many.at_once:.0f} at once than with {few.at_once:.0f}: its "
                "items take turns (a lock, a disk, a connection), so that more at once or more CPUs gain nothing there"
            )


def _rate(level: Level) -> float:
    return level.at_once / level.seconds


def _notes(seen: Sequence[Window], most: Mapping[str, int], held: Sequence[Held]) -> Iterator[str]:
    """What these windows cannot tell."""
    last = seen[-1].snapshot
    _, others, _ = neighbours(seen)
    if others:
        yield (
            f"other programs wanted about {others:.1f} of the {last.machine.cpus} CPUs while this one did; taken to go "
            "on so, also with more CPUs: calibrate on a quiet machine where that will be one"
        )
    seconds = sum(window.snapshot.window_seconds for window in seen)
    if seconds < SHORT_SECONDS:
        yield f"{seconds:.0f} s tell little: with 120 s intervals become narrower"
    if differs := drift(held):
        yield (
            f"one allocation gave {differs:.0%} more or less from one time to the next: the work changes, or other "
            "programs come and go; intervals are as much wider"
        )
    if len(held) < 2:
        yield "one allocation was measured only: whether another one is better is told by the law alone"
    alone = [stage.name for stage in last.stages if most[stage.name] <= 1 and stage.info.max_concurrency != 1]
    if alone:
        yield f"{', '.join(alone)}: never seen working on more than one item at once, so taken to scale"
    yield from _waiting_notes(seen)
    slots = max(window.snapshot.allocation.slots for window in seen)
    if slots > last.machine.cpus:
        yield f"{slots} CPU slots on {last.machine.cpus} CPUs: what computes was not seen as it is with {slots} CPUs"
    if all(stage.run_queue_seconds is None for window in seen for stage in window.snapshot.stages):
        yield "time in the run queue was not measured: waiting for a CPU looks like waiting for something else"
    elif any(stage.info.executor == "process" for stage in last.stages):
        yield "how long processes waited for a CPU is not measured, but taken from what all wanted"
    if all(window.snapshot.machine.lock_wait_seconds is None for window in seen):
        yield "waits for the interpreter lock were not measured: they look like waiting for something else"
    yield "a GPU is not simulated: a step takes what the training loop was seen to take"
