"""How well a calibrated simulator says what live pipelines do under allocations that were never tried.

The pipelines are those of `tuners_live`: functions hold one of 8 to 32 tokens while they sleep, every second pipeline
has a stage that does not scale. A sweep of 40 seconds calibrates the simulator; then allocations are drawn that the
sweep did not hold, each is simulated and run, and the shares by which the rates differ are given. Twelve pipelines
take half an hour.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from _rounds import RESULTS, machine, spread
from tuners_live import FIXED_SECONDS, SEED, SETTLED_SECONDS, live, parts, run

from intune.sim import Calibration
from intune.sim.calibrate import calibrate_lines
from intune.sim.sweep import Sweep
from intune.tuners import Static

HOLD_SECONDS = 2.0
ALLOCATIONS = 5
OPEN_SHARE = 0.3


def calibrated(number: int, seconds: float) -> tuple[Calibration, list[dict[str, int]]]:
    """The simulator after a sweep, and the limits that the sweep held."""
    with live(number, Sweep(HOLD_SECONDS)) as loader:
        until = time.perf_counter() + seconds
        for _ in loader:
            if time.perf_counter() >= until:
                break
        lines = loader.journal
    held = [limits(line["applied"]["concurrency"]) for line in lines]
    return calibrate_lines(lines), held


def limits(concurrency: dict[str, int | None]) -> dict[str, int]:
    """Those of the maps."""
    return {name: value for name, value in concurrency.items() if value is not None and name != "from_iterable"}


def drawn(number: int, held: list[dict[str, int]], seen: Calibration) -> Iterator[dict[str, int]]:
    """Allocations that were not held, within what may be asked for."""
    random = np.random.default_rng([SEED, number, 1])
    tokens, chosen = parts(number)
    while True:
        found = {
            part.name: min(2 * seen.seen[part.name], round(math.exp(random.uniform(0, math.log(tokens)))))
            for part in chosen
            if random.random() > OPEN_SHARE
        }
        if found and found not in held:
            yield found


def measured(number: int, seconds: float) -> dict[str, Any]:
    """A pipeline's allocations, what was said of them, and what they gave."""
    calibration, held = calibrated(number, seconds)
    tokens, chosen = parts(number)
    settle = (
        SETTLED_SECONDS if any(part.kind == "process" for part in chosen) else FIXED_SECONDS
    )  # processes start first
    rows = []
    for _, concurrency in zip(range(ALLOCATIONS), drawn(number, held, calibration), strict=False):
        said, got = calibration.what_if(concurrency=concurrency), run(number, Static(concurrency), settle)
        row = {"concurrency": concurrency, "measured": round(got, 2), "said": round(said.rows_per_second, 2)}
        rows.append(row | {"low": round(said.low, 2), "high": round(said.high, 2)})
    off = [abs(row["said"] / row["measured"] - 1) for row in rows]
    within = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    kind = next((part.kind for part in chosen if part.kind != "plain"), "plain")
    found = {"number": number, "tokens": tokens, "kind": kind, "off": spread(off), "within": within / len(rows)}
    return found | {"error": round(calibration.error, 4), "allocations": rows}


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipelines", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default 0)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a sweep (default 40)")
    chosen = parser.parse_args()
    rows = []
    for number in range(chosen.first, chosen.first + chosen.pipelines):
        rows.append(measured(number, chosen.seconds))
        print(json.dumps(rows[-1]), flush=True)
    off = spread([row["off"]["median"] for row in rows])
    within = sum(row["within"] for row in rows) / len(rows)
    found = {"benchmark": "calibration_live", "machine": machine(), "off": off, "within": within, "pipelines": rows}
    text = json.dumps(found, indent=1)
    print(text)
    if (chosen.first, chosen.pipelines, chosen.seconds) == (0, 12, 40.0):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "calibration_live.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
