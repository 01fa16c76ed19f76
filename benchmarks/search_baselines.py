"""Tuners that are compared, each given the same search of its parameters on simulated pipelines.

For each tuner: 12 candidates, the present default and 11 random ones, go through three rounds by what the training
loop got under them; 9,600 decisions. The one that is ahead of the default in the end is held against it on 64
scenarios that no search has seen: only if it is better there beyond chance is it called so, and worth making it the
default. All runs are kept in a file, so that it can be stopped and gone on with. About five minutes a tuner on one CPU.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path

from _rounds import report

from intune.sim.search import Found, Plan, Runs, as_json, search
from intune.sim.spaces import SPACES
from intune.sim.summary import Estimate


def main() -> None:
    """Search, print a line for each tuner, and keep the whole if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TUNER", help=f"of {', '.join(SPACES)} (default all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--rows", type=Path, default=Path("search.jsonl"), help="file of runs (default search.jsonl)")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in SPACES]:
        parser.error(f"there is no {unknown[0]!r}, only {', '.join(SPACES)}")
    if chosen.write and chosen.names:
        parser.error("--write keeps the result of all tuners: name none")
    plan, runs = Plan(), Runs(chosen.rows, chosen.jobs)
    found = [search(SPACES[name], plan, runs, tell=told) for name in chosen.names or SPACES]
    for line in table(found):
        print(line)
    summary = {"plan": asdict(plan), "tuners": {each.tuner: as_json(each) for each in found}}
    report("search_baselines", summary, write=chosen.write)


def told(line: str) -> None:
    """Progress."""
    print(line, flush=True)


def table(found: list[Found]) -> list[str]:
    """A line for each tuner: rows as a share of those under `model`, gains of the best over the default, a verdict."""
    lines = ["tuner         decisions  default  best   search, last round        validation                verdict"]
    for each in found:
        scores = f"{math.exp(each.default_score):7.3f}  {math.exp(each.best_score):5.3f}"
        gains = f"{_percent(each.search):24}  {_percent(each.validation):24}"
        verdict = "better" if each.better else "not beyond chance, the default stays"
        if each.best == each.default:
            verdict = "none was ahead of the default"
        lines.append(f"{each.tuner:12}  {each.decisions:9,}  {scores}  {gains}  {verdict}")
        if each.best != each.default:
            lines.append(f"{'':14}{', '.join(f'{name}={value}' for name, value in each.best.items())}")
    return lines


def _percent(gain: Estimate | None) -> str:
    if gain is None:
        return "-"
    low, value, high = (f"{math.expm1(figure):+.1%}" for figure in (gain.low, gain.value, gain.high))
    return f"{value} [{low}, {high}]"


if __name__ == "__main__":
    main()
