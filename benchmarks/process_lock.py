"""A Python function that holds the interpreter lock, over processes: against two plain loops in two processes."""

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

from _rounds import alternate, arguments, report, spread

import intune

SPINS = 20_000


def busy(value: int) -> int:
    """About half a millisecond of plain Python."""
    total = value
    for step in range(SPINS):
        total = (total * 31 + step) & 0xFFFF
    return total


def rate(values: Iterator[Any], seconds: float) -> float:
    """Items a second, the first third dropped."""
    began, start, counted = time.perf_counter(), 0.0, 0
    for number, _ in enumerate(values):
        now = time.perf_counter()
        if not start and now - began > seconds / 3:
            start, counted = now, number
        if now - began > seconds:
            return (number - counted) / (now - start)
    raise AssertionError("the values ended too soon")


def _child(seconds: float, barrier: Any, out: Any) -> None:
    barrier.wait()
    out.put(rate((busy(value) for value in range(1 << 60)), seconds))


def two_loops(seconds: float) -> dict[str, float]:
    """Two plain loops at once, their rates summed."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(2), context.Queue()
    children = [context.Process(target=_child, args=(seconds, barrier, out)) for _ in range(2)]
    for child in children:
        child.start()
    total = sum(out.get() for _ in children)
    for child in children:
        child.join()
    return {"items_per_second": total}


def pipeline(seconds: float) -> dict[str, float]:
    """The same function in a process stage of two."""
    pipe = intune.from_iterable(range(1 << 60)).map(busy, executor="process")
    with pipe.loader(cpus=2) as loader:
        return {"items_per_second": rate(iter(loader), seconds)}


def main() -> None:
    """Measure."""
    chosen = arguments(__doc__)
    figures = alternate(
        {"two plain loops": lambda: two_loops(chosen.seconds), "pipeline": lambda: pipeline(chosen.seconds)},
        chosen.rounds,
    )
    loops, ours = ([figure["items_per_second"] for figure in figures[name]] for name in ("two plain loops", "pipeline"))
    report(
        "process_lock",
        {
            "loops_items_per_second": spread(loops),
            "pipeline_items_per_second": spread(ours),
            "share_of_loops": spread([a / b for a, b in zip(ours, loops, strict=True)]),
            "asked_for_at_least": 0.92,
        },
        write=not chosen.quick,
    )


if __name__ == "__main__":
    main()
