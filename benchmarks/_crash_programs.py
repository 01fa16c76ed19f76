"""The programs that are compared: one process each, which tells what it did on its last line of output.

`python _crash_programs.py PROGRAM SECONDS` reads a scenario as JSON on standard input. It imports first, says "ready",
and begins at the next line of input, so that whoever started it can put it into a control group and set its limit.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any

from _crash_scenarios import Counting, Scenario, consume, function_of

OURS = {"model": "model", "shared": "shared", "random": "random"}
THEIRS = {"tf.data": 0.0, "tf.data-half": 0.5}


def intune_program(tuner: str) -> Any:
    """This library with a tuner."""
    import torch  # noqa: F401  the trainer's, as it would be in a training run

    import intune
    from intune._clock import SystemClock
    from intune._compose import build_loader
    from intune.pipeline.options import LoaderOptions
    from intune.testing import EmulatedClock, TokenPool
    from intune.tuners import RandomMoves

    def run(chosen: Scenario, seconds: float, limit: int) -> dict[str, Any]:
        clock = EmulatedClock(SystemClock())
        tokens = TokenPool(chosen.tokens, clock)
        pipe = intune.from_iterable(Counting())
        for place, stage in enumerate(chosen.stages):
            at_work: Any = nullcontext if stage.processes else tokens.held
            executor, most = ("process", stage.processes) if stage.processes else ("thread", None)
            function = function_of(chosen, place, at_work)
            pipe = pipe.map(function, name=f"stage{place}", executor=executor, max_concurrency=most)
            if place == 0 and chosen.window:
                pipe = pipe.shuffle(chosen.window)
        decides: Any = RandomMoves(seed=chosen.number) if tuner == "random" else tuner
        options = LoaderOptions(tuner=decides, cpus=chosen.tokens)
        with build_loader(pipe, options, clock=clock) as loader:
            found = consume(loader, chosen, seconds)
            return {**found, "explain": loader.explain()}

    return run


def tf_program(share: float) -> Any:
    """tf.data with AUTOTUNE; `share` of the limit as its memory budget, 0 = its default."""
    import tensorflow as tf

    from intune.testing import TokenPool

    def run(chosen: Scenario, seconds: float, limit: int) -> dict[str, Any]:
        tokens = TokenPool(chosen.tokens)
        data = tf.data.Dataset.counter()
        for place, stage in enumerate(chosen.stages):
            function = function_of(chosen, place, tokens.held)
            data = data.map(
                lambda given, function=function: tf.numpy_function(function, [given], tf.uint8),
                num_parallel_calls=stage.processes or tf.data.AUTOTUNE,
            )
            if place == 0 and chosen.window:
                data = data.shuffle(chosen.window)
        data = data.prefetch(tf.data.AUTOTUNE)
        options = tf.data.Options()
        options.threading.private_threadpool_size = chosen.tokens
        options.autotune.enabled = True
        options.autotune.cpu_budget = chosen.tokens
        if share:
            options.autotune.ram_budget = int(share * limit)
        return consume(data.with_options(options).as_numpy_iterator(), chosen, seconds)

    return run


def main() -> None:
    """Import, wait, run."""
    name, seconds = sys.argv[1], float(sys.argv[2])
    run = intune_program(OURS[name]) if name in OURS else tf_program(THEIRS[name])
    print("ready", flush=True)
    given = json.loads(sys.stdin.readline())
    print(json.dumps(run(Scenario.from_json(given["scenario"]), seconds, given["limit_bytes"])), flush=True)


if __name__ == "__main__":
    main()
