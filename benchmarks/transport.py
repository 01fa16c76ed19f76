"""What it costs to send an item to a worker process and to have its result back.

A round trip of 8 MiB is timed through a function that gives back what it got, and through one that gives a new
array; GB/s are payload bytes, counted once, by seconds of the whole call. Sixteen payloads take turns, so that they
do not sit in the processor's caches. Also: a tiny item, and the start of a worker until its first answer.
"""

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pyarrow as pa
from _rounds import alternate, arguments, report, spread

from intune.pipeline.process import ProcessPool

PAYLOAD_BYTES = 8 << 20
PAYLOADS = 16
COLUMNS = 8


def array(seed: int) -> np.ndarray:
    """int64 numbers, 8 MiB."""
    return np.random.default_rng(seed).integers(0, 100, PAYLOAD_BYTES // 8)


def block(seed: int) -> dict[str, np.ndarray]:
    """The same as a block of columns."""
    return {f"c{number}": part for number, part in enumerate(np.split(array(seed), COLUMNS))}


def batch(seed: int) -> pa.RecordBatch:
    """The same as an Arrow block."""
    return pa.record_batch(block(seed))


def same(value: Any) -> Any:
    """What came in."""
    return value


def negative(value: np.ndarray) -> np.ndarray:
    """A new array."""
    return -value


def started() -> dict[str, float]:
    """Seconds from the wish for a worker to its first answer."""
    begun = time.perf_counter()
    pool = ProcessPool("start", same)
    pool.resize(1)
    pool.call(1)
    seconds = time.perf_counter() - begun
    pool.close()
    return {"start_seconds": seconds}


def round_trips(function: Callable[..., Any], payloads: list[Any], seconds: float) -> dict[str, float]:
    """Mean over so many seconds, the worker and its memory warm."""
    pool = ProcessPool("transport", function)
    pool.resize(1)
    for payload in payloads:
        pool.call(payload)
    calls, turn, begun = 0, cycle(payloads), time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        for _ in range(10):
            pool.call(next(turn))
        calls += 10
    pool.close()
    if isinstance(payloads[0], int):
        return {"round_trip_seconds": passed / calls}
    return {"gigabytes_per_second": calls * PAYLOAD_BYTES / passed / 1e9}


def main() -> None:
    """Alternate the cases, and report medians."""
    chosen = arguments(__doc__ or "")
    seconds = chosen.seconds / 5
    makers: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
        "numpy, same": (same, array),
        "dict of numpy, same": (same, block),
        "arrow, same": (same, batch),
        "numpy, new": (negative, array),
        "tiny, same": (same, int),
    }
    cases: dict[str, Callable[[], dict[str, float]]] = {"worker start": started}
    for name, (function, make) in makers.items():
        payloads = [make(seed) for seed in range(PAYLOADS)]
        cases[name] = lambda function=function, payloads=payloads: round_trips(function, payloads, seconds)
    figures = alternate(cases, chosen.rounds)
    summary = {
        name: {key: spread([round_[key] for round_ in rounds]) for key in rounds[0]} for name, rounds in figures.items()
    }
    report(
        "transport",
        {
            "command": "python benchmarks/transport.py",
            "payload_bytes": PAYLOAD_BYTES,
            "rounds": chosen.rounds,
            "seconds_a_round": chosen.seconds,
            "cases": summary,
        },
        write=not chosen.quick,
    )


if __name__ == "__main__":
    main()
