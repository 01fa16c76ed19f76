"""How well a calibrated simulator says what live pipelines do under allocations that were never tried.

Real functions on real CPUs: threads that sleep, numpy work, Python that holds the interpreter lock, a semaphore, a
stage that hinders itself, processes, and two that mix. A sweep calibrates the simulator; then three allocations that it
did not hold are simulated and run, each for ten seconds once it has settled. The machine must have two CPUs or more:
where a question is of two, the sweep has one of them. Eight pipelines take half an hour.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _rounds import report, spread

import intune
from intune._errors import PipelineError
from intune.pipeline.chain import Pipeline
from intune.sim.calibration.calibrating import EPOCHS, Calibration, calibrate
from intune.tuners import Static

ITEMS = 100_000
CPUS = 2
SETTLE_SECONDS, PROCESS_SETTLE_SECONDS, MEASURE_SECONDS = 3.0, 8.0, 10.0
QUESTIONS = 3

Question = Mapping[str, int]


def sleep_for(seconds: float) -> Callable[[int], int]:
    """Waits for an answer."""

    def wait(number: int) -> int:
        time.sleep(seconds)
        return number

    return wait


def sort(number: int) -> int:
    """Computes without the interpreter lock: 8 ms or so."""
    np.sort(np.random.default_rng(number % 7).random(100_000))
    return number


def loop(number: int) -> int:
    """Computes with it: 6 ms or so."""
    total = 0
    for each in range(100_000):
        total += each * each
    return number


def loop_and_sleep(number: int) -> int:
    """Holds the lock, then waits for longer."""
    loop(number)
    time.sleep(0.014)
    return number


def in_turns(places: int, inside: float, outside: float) -> Callable[[int], int]:
    """Sleeps, a part of it with one of so many places."""
    semaphore = threading.Semaphore(places)

    def wait(number: int) -> int:
        with semaphore:
            time.sleep(inside)
        time.sleep(outside)
        return number

    return wait


def hindering(seconds: float, coherency: float) -> Callable[[int], int]:
    """Takes longer the more are in it: its rate rises, then falls."""
    counting, at_work = threading.Lock(), 0

    def wait(number: int) -> int:
        nonlocal at_work
        with counting:
            at_work += 1
            n = at_work
        time.sleep(seconds * (1 + coherency * n * (n - 1)))
        with counting:
            at_work -= 1
        return number

    return wait


def pipelines() -> dict[str, tuple[Callable[[], Pipeline], list[Question]]]:
    """By name, what makes a pipeline, and what may be asked of it."""

    def source() -> Pipeline:
        return intune.from_iterable(range(ITEMS))

    thread: dict[str, Any] = {"executor": "thread"}
    return {
        "sleep": (
            lambda: source().map(sleep_for(0.03), name="wait", **thread).map(sort, name="sort", **thread),
            [{"wait": n} for n in (3, 5, 7, 9, 11)],
        ),
        "numpy": (
            lambda: source().map(sort, name="sort", **thread).batch(4).map(sort_batch, name="again", **thread),
            [{"cpus": 2}, {"cpus": 2, "sort": 1}, {"cpus": 2, "sort": 1, "again": 1}],
        ),
        "lock": (
            lambda: source().map(loop_and_sleep, name="loop", **thread),
            [{"loop": n} for n in (3, 5, 6, 7, 9)],
        ),
        "semaphore": (
            lambda: source().map(in_turns(3, 0.02, 0.03), name="turns", **thread),
            [{"turns": n} for n in (3, 5, 6, 7, 11)],
        ),
        "hindering": (
            lambda: source().map(hindering(0.02, 0.02), name="bent", **thread),
            [{"bent": n} for n in (3, 5, 6, 9, 11)],
        ),
        "processes": (
            lambda: source().map(loop, name="apart", executor="process").map(sort, name="sort", **thread),
            [{"cpus": 2}, {"cpus": 2, "apart": 1}, {"cpus": 2, "sort": 1}],
        ),
        "mixed": (
            lambda: (
                source()
                .map(sleep_for(0.02), name="wait", **thread)
                .map(loop, name="loop", **thread)
                .map(sort, name="sort", **thread)
            ),
            [{"wait": n, "loop": loops} for n in (3, 5, 7) for loops in (1, 2)],
        ),
        "mixed processes": (
            lambda: (
                source()
                .map(in_turns(2, 0.01, 0.02), name="turns", **thread)
                .map(loop, name="apart", executor="process")
            ),
            [{"turns": 3, "apart": 1}, {"turns": 5}, {"turns": 7, "apart": 2}, {"turns": 11, "apart": 1}],
        ),
    }


def sort_batch(batch: Any) -> Any:
    """As `sort`, for a batch."""
    sort(1)
    return batch


def run(pipeline: Pipeline, question: Question, settle: float) -> float:
    """Rows a second, from `settle` seconds on."""
    limits = {name: value for name, value in question.items() if name != "cpus"}
    rows, began, until = 0, 0.0, time.perf_counter() + settle
    with pipeline.loader(tuner=Static(limits), cpus=question.get("cpus", CPUS), epochs=EPOCHS) as loader:
        for batch in loader:
            now = time.perf_counter()
            if not began and now >= until:
                began, until = now, now + MEASURE_SECONDS
            elif began:
                rows += len(batch) if isinstance(batch, np.ndarray) else 1
                if now >= until:
                    return rows / (now - began)
    raise AssertionError("the source ended")


@contextmanager
def on_cpus(count: int) -> Iterator[int]:
    """So many CPUs only, for this thread and what it begins."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield count
    finally:
        os.sched_setaffinity(0, before)


def untried(questions: list[Question], journal: Path) -> Iterator[Question]:
    """Those that the sweep did not hold."""
    held = [json.loads(line)["applied"]["concurrency"] for line in journal.read_text().splitlines()]
    for question in questions:
        limits = {name: value for name, value in question.items() if name != "cpus"}
        same = ({name: now.get(name) for name in limits} == limits and set_only(now, limits) for now in held)
        if "cpus" in question or not any(same):
            yield question


def set_only(now: Mapping[str, int | None], limits: Question) -> bool:
    """Whether all other stages are open."""
    return all(value is None for name, value in now.items() if name not in limits)


def asked(found: Calibration, question: Question) -> dict[str, Any]:
    """What it says."""
    limits = {name: value for name, value in question.items() if name != "cpus"}
    try:
        said = found.what_if(cpus=question.get("cpus"), concurrency=limits or None)
    except PipelineError as error:
        return {"refused": str(error)}
    return {"said": said.rows_per_second, "low": said.low, "high": said.high}


def measured(name: str, seconds: float, folder: Path) -> dict[str, Any]:
    """A pipeline's allocations, what was said of them, and what they gave."""
    make, questions = pipelines()[name]
    journal = folder / f"{name.replace(' ', '-')}.jsonl"
    larger = any("cpus" in question for question in questions)
    journal.unlink(missing_ok=True)
    with on_cpus(1 if larger else CPUS) as cpus:
        found = calibrate(make(), seconds, cpus=cpus, journal=journal)
    settle = PROCESS_SETTLE_SECONDS if "processes" in name else SETTLE_SECONDS
    rows = []
    for _, question in zip(range(QUESTIONS), untried(questions, journal), strict=False):
        rows.append({"question": question, "measured": run(make(), question, settle), **asked(found, question)})
    answered = [row for row in rows if "said" in row]
    off = [abs(row["said"] / row["measured"] - 1) for row in answered]
    within = sum(row["low"] <= row["measured"] <= row["high"] for row in answered)
    median = statistics.median(off) if off else None
    return {"name": name, "off": median, "within": within, "answered": len(answered), "rows": rows}


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="name of one pipeline (default all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a sweep (default 120)")
    parser.add_argument("--folder", type=Path, help="where journals are kept (default: they are not)")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        folder.mkdir(exist_ok=True, parents=True)
        for name in [chosen.only] if chosen.only else pipelines():
            rows.append(measured(name, chosen.seconds, folder))
            print(json.dumps(rows[-1]), flush=True)
    off = [row["off"] for row in rows if row["off"] is not None]
    within = sum(row["within"] for row in rows), sum(row["answered"] for row in rows)
    summary = {"off": spread(off) if off else None, "within": within, "pipelines": rows}
    report("calibrate_live", summary, not chosen.only)


if __name__ == "__main__":
    main()
