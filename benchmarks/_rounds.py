"""What all benchmarks share: alternating rounds, medians with their spread, a small JSON result."""

import argparse
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def arguments(description: str, names: Sequence[str] = ()) -> argparse.Namespace:
    """The options of every benchmark; where it has `names`, those of its parts that are to be measured."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds a round (default 15)")
    parser.add_argument("--quick", action="store_true", help="one round of 6 s, nothing is written")
    if names:
        parser.add_argument("names", nargs="*", help=f"of {', '.join(names)} (default all; else nothing is written)")
    chosen = parser.parse_args()
    if names:
        unknown = [name for name in chosen.names if name not in names]
        if unknown:
            parser.error(f"there is no {unknown[0]!r}, only {', '.join(names)}")
        chosen.names = chosen.names or list(names)
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 6.0
    return chosen


def alternate(contenders: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> dict[str, list[Any]]:
    """Run all contenders in turn, so many times; the order turns round each time. Figures by contender."""
    figures: dict[str, list[Any]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            figure = dict(contenders[name]())
            figures[name].append(figure)
            print(f"round {number + 1}  {name:28}" + "  ".join(f"{k} {v:.4g}" for k, v in figure.items()), flush=True)
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(name: str, summary: Mapping[str, Any], write: bool) -> None:
    """Print a summary and, for full runs, keep it as JSON."""
    text = json.dumps({"benchmark": name, "machine": machine(), **summary}, indent=1)
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "commit": commit,
    }
