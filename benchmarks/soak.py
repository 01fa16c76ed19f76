"""Half an hour of changes: does memory grow, does a batch ever take long, is anything lost or left behind?

Item sizes, concurrency, processes, slots and bytes in flight change all the time; the limit of the program's control
group is lowered step by step and raised again in each cycle. The last third of the run is compared with the second
one, moment by moment of a cycle: memory (anonymous and shared, of the whole group); and files, threads and processes.
Almost all functions sleep, so that it can run beside other work. It needs a writable memory group of version 1 (root).
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _groups import kills, memory_group, set_limit, start, used
from _rounds import report

MIB = 2**20
CYCLES = 15
"""In a run, so that a third has five whole ones."""

HIGH, LOW = 500 * MIB, 300 * MIB
"""Limits beyond what the program uses after its imports."""

SAMPLE_SECONDS = 0.1
MOMENTS = 20
"""Of a cycle, that are compared."""

GROWTH_SHARE, GROWTH_BYTES = 0.02, 16 * MIB
LONGEST_GAP = 10.0
END_SECONDS = 60.0


@dataclass
class Samples:
    """What was read while it ran: (seconds, bytes, limit), and the program's own lines with their seconds."""

    memory: list[tuple[float, int, int]] = field(default_factory=list)
    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def listen(self, child: subprocess.Popen[str], began: float) -> None:
        """Take the program's lines until it ends."""
        assert child.stdout is not None
        for text in child.stdout:
            line = json.loads(text)
            if "epochs" in line:
                self.last = line
            else:
                self.lines.append((time.monotonic() - began, line))


class Limit:
    """The limit of a group over a cycle: high in its first half, then lowered in steps as far as the kernel lets us."""

    def __init__(self, group: Path, base: int) -> None:
        self._group, self._base = group, base
        self.now = 0
        self.refused = 0
        self.lowered = 0
        """Times that it reached its lowest."""

    def follow(self, phase: float, memory: int) -> None:
        """Set what belongs to a phase in [0, 1)."""
        high, low = self._base + HIGH, self._base + LOW
        if phase < 0.5:
            wanted = high
        else:
            wanted = max(low, int(0.97 * self.now) // MIB * MIB)
            if memory >= 0.85 * wanted:
                return
        if wanted == self.now:
            return
        if set_limit(self._group, wanted):
            self.now = wanted
            self.lowered += wanted == low
        else:
            self.refused += 1


def soak(minutes: float) -> dict[str, Any]:
    """Run it: the figures."""
    seconds, samples = 60 * minutes, Samples()
    cycle = seconds / CYCLES
    with memory_group() as group:
        child = start([sys.executable, str(Path(__file__).with_name("_soak_program.py"))], group)
        limit = Limit(group, used(group))
        assert child.stdin is not None
        limit.follow(0.0, 0)
        child.stdin.write(f"{seconds}\n")
        child.stdin.flush()
        began = time.monotonic()
        listener = threading.Thread(target=samples.listen, args=(child, began))
        listener.start()
        said = 0.0
        while child.poll() is None and (now := time.monotonic() - began) < seconds + END_SECONDS:
            memory = used(group)
            samples.memory.append((now, memory, limit.now))
            limit.follow(now % cycle / cycle, memory)
            if now >= said:
                said += 60
                print(f"{now / 60:4.0f} min  {memory / MIB:.0f} of {limit.now / MIB:.0f} MiB", flush=True)
            time.sleep(SAMPLE_SECONDS)
        hung = child.poll() is None
        if hung:
            child.kill()
        listener.join()
        assert child.stderr is not None
        errors = child.stderr.read()
        child.stdin.close()
        returned = child.wait()
        if returned:
            print(f"ended with {returned}, {kills(group)} kills: {errors}", flush=True)
        return {
            "minutes": minutes,
            "returned": returned,
            "hung": hung,
            "errors": errors[-2000:],
            "kills": kills(group),
            "limit_refused": limit.refused,
            "limit_at_its_lowest": limit.lowered,
            **samples.last,
            **(figures(samples, seconds, cycle) if not returned else {}),
        }


def figures(samples: Samples, seconds: float, cycle: float) -> dict[str, Any]:
    """Growth from the second to the last third of the run, and the longest gap."""
    second, last = (by_moment(samples, cycle, seconds * n / 3, seconds * (n + 1) / 3) for n in (1, 2))
    both = [moment for moment in second if moment in last]
    before = statistics.fmean(second[moment] for moment in both)
    after = statistics.fmean(last[moment] for moment in both)
    gaps = sorted(line["gap"] for _, line in samples.lines)
    found: dict[str, Any] = {
        "memory_mib_second_third": round(before / MIB, 1),
        "memory_mib_last_third": round(after / MIB, 1),
        "growth_mib": round((after - before) / MIB, 1),
        "growth_share": round(after / before - 1, 4),
        "peak_share_of_limit": round(max(memory / limit for _, memory, limit in samples.memory), 4),
        "batches": sum(line["batches"] for _, line in samples.lines),
        "longest_gap_seconds": gaps[-1],
        "gap_seconds_p99": gaps[int(0.99 * len(gaps))],
    }
    for name in ("files", "threads", "processes"):
        thirds = [
            max(line[name] for at, line in samples.lines if seconds * n / 3 <= at < seconds * (n + 1) / 3)
            for n in (1, 2)
        ]
        found[f"most_{name}_second_and_last_third"] = thirds
    return found


def by_moment(samples: Samples, cycle: float, start: float, stop: float) -> dict[int, float]:
    """Mean bytes in [start, stop) by moment of the cycle."""
    found: dict[int, list[int]] = {}
    for at, memory, _ in samples.memory:
        if start <= at < stop:
            found.setdefault(int(MOMENTS * (at % cycle / cycle)), []).append(memory)
    return {moment: statistics.fmean(values) for moment, values in found.items()}


def failures(found: dict[str, Any]) -> list[str]:
    """What is not as it is asked for."""
    if found["returned"]:
        return ["it did not end well"]
    grown = found["growth_mib"] * MIB > GROWTH_BYTES and found["growth_share"] > GROWTH_SHARE
    checks = {
        "it said something": found["errors"],
        "processes were killed": found["kills"],
        "items were lost or came twice": found["wrong_items"],
        "no epoch was finished": not found["epochs"],
        "the limit was never at its lowest": not found["limit_at_its_lowest"],
        "memory grew": grown,
        "a batch took too long": found["longest_gap_seconds"] > LONGEST_GAP,
    }
    return [text for text, failed in checks.items() if failed]


def main() -> None:
    """Measure, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long (default 30)")
    parser.add_argument("--write", action="store_true", help="keep the figures among the results")
    chosen = parser.parse_args()
    found = soak(chosen.minutes)
    failed = failures(found)
    asked = {
        "growth_at_most": {"share": GROWTH_SHARE, "or_mib": GROWTH_BYTES // MIB},
        "longest_gap_seconds_at_most": LONGEST_GAP,
    }
    report("soak", {**found, "asked_for": asked, "failed": failed}, write=chosen.write)
    if failed:
        raise SystemExit(", ".join(failed))


if __name__ == "__main__":
    main()
