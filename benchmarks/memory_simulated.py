"""Does memory ever run out in simulated time, whatever the tuner asks for?

Scenarios of the families "memory" and "wild" that have a limit, each under every tuner for sixty decisions, until each
tuner has made the decisions that are asked for: 100,000 for the default one, for random moves and for all stages open,
10,000 for the others. Ledger, guard and brake are those of a real run. Results are appended to a file, so that it can
be stopped and goes on where it was. All of it takes some hours of a CPU.
"""

import argparse
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from _rounds import RESULTS, report

from intune.sim import play, scenario
from intune.sim.evaluate import tuner_named
from intune.sim.workers import carry_out

MANY, SOME = 100_000, 10_000
TUNERS = {
    **dict.fromkeys(("model", "random", "shared"), MANY),
    **dict.fromkeys(("even", "proportional", "hillclimb", "plumber", "threshold", "tabular"), SOME),
}
FAMILIES = ("memory", "wild")
DECISIONS = 60
FIRST_SEED = 2_000_000
PIECE = 40
"""Runs that are handed out at once."""

Run = tuple[str, int, str]


def limited() -> Iterator[tuple[str, int]]:
    """Scenarios with a limit, without end."""
    for number in itertools.count(FIRST_SEED):
        for family in FAMILIES:
            if scenario(family, number).machine.memory_bytes is not None:
                yield family, number


def runs(wanted: dict[str, int]) -> Iterator[Run]:
    """All that there is to do, scenario by scenario."""
    most = max(wanted.values())
    for number, (family, seed) in enumerate(itertools.islice(limited(), -(-most // DECISIONS))):
        yield from ((family, seed, name) for name, decisions in wanted.items() if number * DECISIONS < decisions)


def one(run: Run) -> dict[str, Any]:
    """What became of a run."""
    logging.disable(logging.CRITICAL)
    family, seed, name = run
    drawn = scenario(family, seed)
    trace = play(drawn, tuner_named(name, seed), DECISIONS)
    limit = drawn.machine.memory_bytes
    assert limit is not None
    return {
        "family": family,
        "seed": seed,
        "tuner": name,
        "decisions": len(trace.intervals),
        "died": trace.died,
        "failed": trace.tuner_failed,
        "peak_share": round(trace.peak_bytes / limit, 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By tuner: decisions, deaths, and the most memory that was used."""
    found = {}
    for name in TUNERS:
        own = [row for row in rows if row["tuner"] == name]
        if own:
            died = [f"{row['family']}-{row['seed']}" for row in own if row["died"]]
            failed = sum(row["failed"] is not None for row in own)
            peak = max(row["peak_share"] for row in own)
            decisions = sum(row["decisions"] for row in own)
            found[name] = {"decisions": decisions, "died": died, "tuner_failed": failed, "peak_share_max": peak}
    return found


def main() -> None:
    """Run what is missing, then print the summary of everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuners", nargs="+", choices=list(TUNERS), default=list(TUNERS))
    parser.add_argument("--decisions", type=int, help="of each tuner (default 100,000 or 10,000, by tuner)")
    parser.add_argument(
        "--rows", type=Path, default=RESULTS / "memory_simulated.jsonl", help="where results are appended"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--write", action="store_true", help="keep the summary among the results")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()] if chosen.rows.exists() else []
    done = {(row["family"], row["seed"], row["tuner"]) for row in rows}
    wanted = {name: chosen.decisions or TUNERS[name] for name in chosen.tuners}
    missing = (run for run in runs(wanted) if run not in done)
    with chosen.rows.open("a") as file:
        while piece := list(itertools.islice(missing, PIECE * chosen.jobs)):
            with closing(carry_out(piece, one, chosen.jobs)) as found:
                for row in found:
                    rows.append(row)
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    if row["died"] or row["failed"]:
                        print(json.dumps(row), flush=True)
            print(f"{len(rows):,} runs", flush=True)
    report("memory_simulated", {"tuners": summary(rows)}, write=chosen.write)


if __name__ == "__main__":
    main()
