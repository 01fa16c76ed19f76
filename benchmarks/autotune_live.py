"""Whether the tuner that is named after tf.data's AUTOTUNE does what AUTOTUNE does.

The twelve pipelines of `tuners_live`, with the same functions and tokens, under tf.data with AUTOTUNE at its defaults
(its thread pool and CPU budget are the tokens) and under this library with `HillClimb("max-parallelism")`. Rates are
measured once either has had fourteen seconds to settle, one program after the other. A stage in processes is a stage on
threads there, as tf.data has no processes; it starts as slowly. Needs an interpreter that has both TensorFlow and this
library: `--tf-python`. Takes ten minutes.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _rounds import RESULTS, machine, spread
from tuners_live import SETTLED_SECONDS, Part, Sleeper, function, parts, rate_of, run

from intune.testing import TokenPool
from intune.tuners import HillClimb

TIME_LIMIT_SECONDS = 120.0
AS_GOOD = 0.1
"""How far rates may be apart for the two to count as agreeing."""


def by_tf_data(number: int) -> float:
    """Items a second under tf.data."""
    import tensorflow as tf

    count, chosen = parts(number)
    tokens = TokenPool(count)
    streams = next((2 + int(10 * part.amount) for part in chosen if part.kind == "disk"), 2)
    data = tf.data.Dataset.counter()
    for part in chosen:
        own = _asleep(part) if part.kind == "process" else function(part, tokens, streams)
        data = data.map(
            lambda given, own=own: tf.numpy_function(own, [given], tf.int64), num_parallel_calls=tf.data.AUTOTUNE
        )
    options = tf.data.Options()
    options.threading.private_threadpool_size = count
    options.autotune.enabled = True
    options.autotune.cpu_budget = count
    return rate_of(data.prefetch(tf.data.AUTOTUNE).with_options(options), SETTLED_SECONDS)


def _asleep(part: Part) -> Callable[[int], int]:
    """A stage in processes, on threads: each thread starts as slowly as a process."""
    own = threading.local()

    def work(value: int) -> int:
        if not hasattr(own, "sleeper"):
            own.sleeper = Sleeper(1 + 5 * part.amount, part.seconds)
        return int(own.sleeper(value))

    return work


def theirs(number: int, python: str) -> float:
    """The same in a process of its own."""
    command = [python, str(Path(__file__)), "--one", str(number)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS)
    if found.returncode:
        raise RuntimeError(f"tf.data failed on pipeline {number}: {found.stderr.strip().splitlines()[-3:]}")
    return float(found.stdout.splitlines()[-1])


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tf-python", default=sys.executable, help="interpreter that has TensorFlow and this library")
    parser.add_argument("--pipelines", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--one", type=int, help="run tf.data on this pipeline here, and print its rate")
    chosen = parser.parse_args()
    if chosen.one is not None:
        print(by_tf_data(chosen.one))
        return
    rows: list[dict[str, Any]] = []
    for number in range(chosen.pipelines):
        there, here = theirs(number, chosen.tf_python), run(number, HillClimb("max-parallelism"), SETTLED_SECONDS)
        tokens, own = parts(number)
        kind = next((part.kind for part in own if part.kind != "plain"), "plain")
        row = {"number": number, "tokens": tokens, "kind": kind, "tf.data": round(there, 1), "here": round(here, 1)}
        rows.append({**row, "ratio": round(here / there, 3)})
        print(json.dumps(rows[-1]), flush=True)
    agree = sum(abs(row["ratio"] - 1) <= AS_GOOD for row in rows)
    summary = {"agree": agree, "of": len(rows), "ratio": spread([row["ratio"] for row in rows])}
    text = json.dumps({"benchmark": "autotune_live", "machine": machine(), **summary, "pipelines": rows}, indent=1)
    print(text)
    if len(rows) == 12:
        (RESULTS / "autotune_live.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
