"""Calibration: a sweep on a pipeline, or a journal of one, becomes a simulator that behaves like it."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intune._errors import PipelineError, SourceError
from intune._values import Allocation, Budget, Snapshot, StageSnapshot
from intune.control.journal import read_journal
from intune.pipeline.chain import Pipeline
from intune.pipeline.loader import Loader
from intune.sim.answers import LEAST_ERROR, Calibration
from intune.sim.fitting import Fitted, fitted
from intune.sim.play import play
from intune.sim.seen import Window, read_window, windows
from intune.sim.sweep import Sweep

REPLICAS = 5
"""Fits to windows drawn again, beside the likeliest one."""

TOLD_SCALE = 0.1
REPLAYED = 60
"""Windows that are simulated again to see how far off that is: the last ones."""

FEW, LONG = 10, 10
"""Fewer items make no rate; more windows are not needed for one."""

LEAST_RATES = 4
"""With fewer rates it is not told what all are off by from by how much each is."""

MOST_ERROR = 2.0

LEAST_WINDOWS = 3
POINTS = 20
"""Allocations of a sweep, at least; where there is time for more, each is held for `HOLD_SECONDS`."""

HOLD_SECONDS = 3.0
LEAST_HOLD_SECONDS = 1.0
EPOCHS = 1_000_000
"""More than a sweep ever begins; that the next one is known to follow lets it begin while the last one ends."""


def calibrate(
    pipeline: Pipeline,
    seconds: float = 120.0,
    *,
    step: Callable[[Any], object] | None = None,
    cpus: int | None = None,
    memory: str | int | float | None = None,
) -> Calibration:
    """Run a pipeline under one allocation after another, and fit the simulator to what was measured.

    Memory is guarded as in training. Epochs follow one another until the time is up.

    Args:
        pipeline: What is run, with a loader of its own.
        seconds: For how long, above 0.
        step: What the training loop does with a batch; None = nothing, so that rates are those of the loader alone.
        cpus: CPU slots; None = what the machine gives.
        memory: Limit for the whole process tree, as `Pipeline.loader` takes it.

    Raises:
        PipelineError: If an option is not allowed, the pipeline gives nothing, or too little was finished to learn
            from.
    """
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(f"calibrate needs a pipeline, got {type(pipeline).__name__}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PipelineError(f"seconds must be a number above 0, got {seconds!r}")
    hold = min(HOLD_SECONDS, max(LEAST_HOLD_SECONDS, seconds / POINTS))
    with pipeline.loader(tuner=Sweep(hold), cpus=cpus, memory=memory, epochs=EPOCHS) as loader:
        _drain(loader, seconds, step)
        return calibrate_lines(loader.journal)


def calibrate_journal(path: str | Path) -> Calibration:
    """Fit the simulator to a journal file; of several runs in it the last one counts.

    Raises:
        SourceError: If a line in the middle is damaged, or is none of a journal.
        PipelineError: If too little was finished to learn from.
        OSError: If the file cannot be read.
    """
    return calibrate_lines(read_journal(path))


def calibrate_lines(lines: Iterable[Mapping[str, Any]]) -> Calibration:
    """Fit the simulator to the lines of a journal, whatever tuner decided meanwhile.

    Args:
        lines: As `intune.control.journal.read_journal`, a loader's `journal` or a `Trace` has them; of several runs the
            last one counts.

    Raises:
        SourceError: If a line is none of a journal.
        PipelineError: If too little was finished to learn from.
    """
    seen = windows(lines)
    if len(seen) < LEAST_WINDOWS:
        raise PipelineError(
            f"only {len(seen)} windows in which something was finished, at least {LEAST_WINDOWS} are needed: "
            "let it run for longer"
        )
    best = fitted(seen)
    fits = (best, *_again(seen))
    seconds = sum(window.snapshot.window_seconds for window in seen)
    rows = sum(window.snapshot.consumer.rows for window in seen)
    rates = [window.snapshot.consumer.rows / window.snapshot.window_seconds for window in seen]
    steps = statistics.median(rates) / _rows_a_step(best)
    scale, error = _off(best, seen)
    return Calibration(
        fits,
        max(window.snapshot.allocation.slots for window in seen),
        _most_at_once(seen),
        seconds,
        rows / seconds,
        steps,
        scale,
        error,
        (*best.doubts, *_notes(seen, scale)),
    )


def _drain(loader: Loader, seconds: float, step: Callable[[Any], object] | None) -> None:
    """Take batches until so much time has passed since the first one: before it, modules may be imported."""
    until = math.inf
    for epoch in range(EPOCHS):
        batches = 0
        try:
            for batch in loader:
                batches += 1
                until = min(until, time.perf_counter() + seconds)
                if step is not None:
                    step(batch)
                if time.perf_counter() >= until:
                    return
        except SourceError:
            if not epoch or batches:
                raise
            return  # what can be read only once has been
        if not batches:
            raise PipelineError("the pipeline gave no batch, so there is nothing to calibrate")


def _again(seen: Sequence[Window]) -> Iterator[Fitted]:
    """Fits to as many windows, drawn with replacement; the last window says what stages are, so it stays."""
    random = np.random.default_rng(0)
    for _ in range(REPLICAS):
        drawn = np.sort(random.integers(0, len(seen), len(seen) - 1))
        try:
            yield fitted([*(seen[place] for place in drawn), seen[-1]])
        except PipelineError:  # a stage that finished something in few windows only
            continue


class _Replay:
    """Decides again what was decided."""

    def __init__(self, fit: Fitted, seen: Sequence[Window]) -> None:
        self._names = fit.names
        self._left = [window.snapshot.allocation for window in seen]

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What was in force in the next window; in the end what was so in the last one."""
        then = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        return Allocation({self._names[name]: value or None for name, value in then.concurrency.items()}, then.slots)


def _off(best: Fitted, seen: Sequence[Window]) -> tuple[float, float]:
    """By what simulated rates must be multiplied, and how far they are off then, for allocations that were measured.

    They are simulated in the same order, each for as long, so that what an allocation leaves to the next one counts in
    both. A rate, that of the last stage, is taken of one that was held, or of several in a row where few items were
    finished.
    """
    chosen = seen[-REPLAYED:]
    trace = play(best.scenario, _Replay(best, chosen), len(chosen))
    if trace.died is not None:
        return 1.0, MOST_ERROR
    again = [_finished(window.snapshot.stages[-1]) / best.unit for window in map(read_window, trace.lines[1:])]
    off = []
    for first, last in itertools.pairwise(_held(chosen)):
        measured = sum(_finished(window.snapshot.stages[-1]) for window in chosen[first:last])
        seconds = sum(window.snapshot.window_seconds for window in chosen[first:last])
        simulated = sum(again[first:last]) / (trace.intervals[last - 1].seconds - trace.intervals[first - 1].seconds)
        off.append(math.log(measured / seconds / max(simulated, 1e-9)))
    if len(off) < LEAST_RATES:
        return 1.0, MOST_ERROR if not off else min(MOST_ERROR, max(LEAST_ERROR, *map(abs, off)))
    middle = min(MOST_ERROR, max(-MOST_ERROR, statistics.median(off)))
    if any(stage.executor == "process" for stage in best.scenario.stages):
        middle = 0.0  # how long processes take to start is known roughly, and would count as if it were always so
    deviation = 1.48 * statistics.median(abs(each - middle) for each in off)
    return math.exp(middle), min(MOST_ERROR, max(LEAST_ERROR, deviation))


def _finished(stage: StageSnapshot) -> float:
    """Source rows that its items stand for."""
    return stage.items_out * (stage.source_rows_per_item or 0.0)


def _held(seen: Sequence[Window]) -> Iterator[int]:
    """Places between which a rate is taken: where something else was put into force, else every `LONG` windows."""
    steps, since = FEW, LONG  # from the first of them on
    for place, (before, window) in enumerate(itertools.pairwise(seen), 1):
        was, now = before.snapshot.allocation, window.snapshot.allocation
        other = (was.concurrency, was.slots) != (now.concurrency, now.slots)
        if steps >= FEW and (other or since >= LONG):
            yield place
            steps = since = 0
        steps += window.snapshot.stages[-1].items_out
        since += 1
    if steps >= FEW:
        yield len(seen)


def _rows_a_step(fit: Fitted) -> float:
    """Rows that the trainer is given in a step of the simulation."""
    rows = fit.scenario.stages[0].rows
    for stage in fit.scenario.stages:
        rows = stage.rows if stage.kind == "batch" else max(1, rows // stage.children)
    return rows * fit.rows


def _most_at_once(seen: Sequence[Window]) -> dict[str, int]:
    most: dict[str, float] = {}
    for window in seen:
        for stage in window.snapshot.stages:
            crowds = [crowd for crowd, _, _ in stage.wall_seconds_by_crowd]
            most[stage.name] = max(most.get(stage.name, 1), stage.in_hand_mean, *crowds)
    return {name: max(1, round(value)) for name, value in most.items()}


def _notes(seen: Sequence[Window], scale: float) -> Iterator[str]:
    """What these windows cannot tell."""
    if abs(math.log(scale)) > TOLD_SCALE:
        yield (
            f"rates are multiplied by {scale:.2f}: something that is not simulated makes that difference, whatever the "
            "allocation is"
        )
    most = _most_at_once(seen)
    alone = [
        stage.name for stage in seen[-1].snapshot.stages if most[stage.name] <= 1 and stage.info.max_concurrency != 1
    ]
    if alone:
        yield f"{', '.join(alone)}: never seen working on more than one item at once, so taken to scale"
    if all(stage.run_queue_seconds is None for window in seen for stage in window.snapshot.stages):
        yield "time in the run queue was not measured: waiting for a CPU looks like waiting for something else"
    if all(window.snapshot.machine.lock_wait_seconds is None for window in seen):
        yield "waits for the interpreter lock were not measured: they look like waiting for something else"
    yield "a GPU is not simulated: a step takes what the training loop was seen to take"
