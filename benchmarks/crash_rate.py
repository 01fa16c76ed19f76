"""How often a program is killed for its memory: random pipelines, each in a control group with a limit of its own.

Each pipeline runs under this library (by default, with all stages open, and with random moves) and under tf.data with
AUTOTUNE (at its defaults, and with `ram_budget` set to half of the limit), with the same functions and the same
limit: what the larger of the two programs needs after its imports, and 0.5 to 4 GiB. It needs a writable memory group
of version 1 (root) and an interpreter that has both TensorFlow and this library: `--tf-python`. Results are appended
to a file, so that it can be stopped and goes on where it was. All of it takes three hours, so `make bench` leaves it
out.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from _crash_programs import OURS, THEIRS
from _crash_scenarios import MIB, SEED, scenario
from _groups import kills, memory_group, set_limit, start, used
from _rounds import RESULTS, report

GRACE_SECONDS = 60.0
SAMPLE_SECONDS = 0.02
HERE = Path(__file__).parent


class Peak:
    """The most that was used of a group, sampled."""

    def __init__(self, group: Path) -> None:
        self.group, self.bytes = group, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, used(self.group))


def program(name: str, seconds: float, python: str, group: Path) -> "subprocess.Popen[str]":
    """One of the programs, ready to be told its scenario."""
    return start([python, str(HERE / "_crash_programs.py"), name, str(seconds)], group)


def baseline(python_of: dict[str, str]) -> int:
    """Bytes of the larger program after its imports."""
    sizes = []
    for name in ("shared", "tf.data"):
        with memory_group() as group:
            child = program(name, 1.0, python_of[name], group)
            sizes.append(used(group))
            child.kill()
            child.communicate()
    return max(sizes)


def run(number: int, name: str, limit: int, seconds: float, python: str) -> dict[str, Any]:
    """One program on one pipeline."""
    with memory_group() as group:
        child = program(name, seconds, python, group)
        if not set_limit(group, limit):
            raise RuntimeError(f"the kernel refused a limit of {limit} bytes")
        text = json.dumps({"scenario": scenario(number).as_json(), "limit_bytes": limit})
        with Peak(group) as peak:
            try:
                out, err = child.communicate(text + "\n", timeout=seconds + GRACE_SECONDS)
                hung = False
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                hung = True
        killed = child.returncode == -9 and not hung
        found: dict[str, Any] = {}
        if child.returncode == 0:
            found = json.loads(out.splitlines()[-1])
        return {
            "number": number,
            "program": name,
            "limit_mib": limit // MIB,
            "killed": killed,
            "kills_in_group": kills(group),
            "hung": hung,
            "failed": None if child.returncode == 0 or killed or hung else err.strip().splitlines()[-1:],
            "items_per_second": found["items"] / found["seconds"] if found else None,
            "first_seconds": found.get("first_seconds"),
            "peak_share": round(peak.bytes / limit, 4),
            "said": found.get("explain"),
        }


def bound(events: int, runs: int) -> float:
    """Upper end of the 95 % interval (Wilson) of a share."""
    if not runs:
        return 1.0
    z, share = 1.96, events / runs
    middle = share + z * z / (2 * runs)
    return (middle + z * math.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs))) / (1 + z * z / runs)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By program: killed share, peaks, and rates against tf.data's where that lives."""
    rate = {(row["number"], row["program"]): row["items_per_second"] for row in rows}
    found: dict[str, Any] = {}
    for name in (*OURS, *THEIRS):
        own = [row for row in rows if row["program"] == name]
        if not own:
            continue
        killed = sum(row["killed"] or row["kills_in_group"] > 0 for row in own)
        peaks = [row["peak_share"] for row in own if not row["killed"]]
        ratios = sorted(
            rate[row["number"], name] / theirs
            for row in own
            if rate[row["number"], name] and (theirs := rate.get((row["number"], "tf.data")))
        )
        found[name] = {
            "runs": len(own),
            "killed": killed,
            "killed_share": round(killed / len(own), 3),
            "killed_share_upper_95": round(bound(killed, len(own)), 3),
            "hung_or_failed": sum(bool(row["hung"] or row["failed"]) for row in own),
            "peak_share_max": max(peaks, default=None),
            "peak_share_median": round(statistics.median(peaks), 3) if peaks else None,
            "rate_against_tf.data": {
                "pipelines": len(ratios),
                "geometric_mean": round(statistics.geometric_mean(ratios), 3) if ratios else None,
                "p10": round(ratios[len(ratios) // 10], 3) if ratios else None,
                "min": round(ratios[0], 3) if ratios else None,
            },
        }
    return found


def main() -> None:
    """Run what is missing, then print the summary of everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipelines", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default 0)")
    parser.add_argument("--programs", nargs="+", choices=[*OURS, *THEIRS], default=[*OURS, *THEIRS])
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds a run (default 8)")
    parser.add_argument("--tf-python", default=sys.executable, help="interpreter that has TensorFlow and this library")
    parser.add_argument("--rows", type=Path, default=RESULTS / "crash_rate.jsonl", help="where results are appended")
    parser.add_argument("--write", action="store_true", help="keep the summary among the results")
    chosen = parser.parse_args()
    python_of = {name: sys.executable if name in OURS else chosen.tf_python for name in (*OURS, *THEIRS)}
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()] if chosen.rows.exists() else []
    done = {(row["number"], row["program"]) for row in rows}
    base = rows[0]["baseline_mib"] * MIB if rows else baseline(python_of)
    for number in range(chosen.first, chosen.first + chosen.pipelines):
        for name in chosen.programs:
            if (number, name) in done:
                continue
            limit = base + scenario(number).extra_bytes
            row = {**run(number, name, limit, chosen.seconds, python_of[name]), "baseline_mib": base // MIB}
            rows.append(row)
            with chosen.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({k: v for k, v in row.items() if k != "said"}), flush=True)
    told = {"seed": SEED, "seconds": chosen.seconds, "baseline_mib": base // MIB, "programs": summary(rows)}
    report("crash_rate", told, write=chosen.write)


if __name__ == "__main__":
    main()
