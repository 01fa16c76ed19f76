"""Tuners on twelve live pipelines, against the best fixed allocations that were found for each.

Functions hold one of 8 to 32 tokens while they sleep, so that a token stands for a CPU. Every second pipeline has a
stage that does not scale: it hinders itself, takes turns for a lock, shares a disk of few streams, or runs in processes
that start slowly. The same pipelines are described to the simulator, where the best fixed allocation is searched for;
that one, its neighbours and the tuners then run in real time. `reached` is a tuner's rate, after fifteen decisions, as
a share of the best of all that ran. Takes a quarter of an hour.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from _rounds import RESULTS, machine, spread

import intune
from intune._compose import build_loader
from intune._values import Budget, Tuner
from intune.pipeline.options import LoaderOptions
from intune.sim import Scenario, SimMachine, SimStage
from intune.sim.oracle import Effort, oracle
from intune.testing import EmulatedClock, TokenPool
from intune.tuners import Static

SEED = 20261130
KINDS = ("bent", "lock", "disk", "process")
SETTLED_SECONDS, MEASURED_SECONDS = 14.0, 8.0
"""After the first a tuner has decided more than fifteen times."""
FIXED_SECONDS = 4.0
STREAM = 1e6


@dataclass(frozen=True)
class Part:
    """One mapped stage: seconds of an item alone, and what is special about it."""

    name: str
    kind: str
    seconds: float
    share: float = 0.0
    amount: float = 0.0

    @property
    def special(self) -> float:
        """Seconds under the lock or at the disk."""
        return self.seconds * self.share


def parts(number: int) -> tuple[int, tuple[Part, ...]]:
    """Tokens and stages of a pipeline."""
    random = np.random.default_rng([SEED, number])
    tokens = int(random.choice([8, 16, 32]))
    count = int(random.integers(2, 6))
    rate = float(np.exp(random.uniform(np.log(25), np.log(80))))
    seconds = np.maximum(random.dirichlet([1.5] * count), 0.08) * tokens / rate
    odd = int(seconds.argmax()) if number % 2 else -1
    kind = KINDS[number // 2 % len(KINDS)]
    found = []
    for place, each in enumerate(seconds):
        share, amount = float(random.uniform(0.1, 0.4)), float(np.exp(random.uniform(np.log(0.02), np.log(0.2))))
        own = kind if place == odd else "plain"
        found.append(Part(f"{own}{place}", own, float(each), share, amount))
    return tokens, tuple(found)


def described(number: int) -> Scenario:
    """The pipeline as the simulator knows it."""
    tokens, chosen = parts(number)
    streams = next((2 + int(10 * part.amount) for part in chosen if part.kind == "disk"), 2)
    stages = [SimStage("from_iterable", "source", cpu_seconds=1e-5, row_bytes=32, max_concurrency=1)]
    for part in chosen:
        own: dict[str, Any] = {"cpu_seconds": part.seconds}
        if part.kind == "bent":
            own["coherency"] = part.amount
        elif part.kind == "lock":
            own = {"serial_seconds": part.special, "cpu_seconds": part.seconds - part.special}
        elif part.kind == "disk":
            own = {"disk_bytes": part.special * STREAM, "cpu_seconds": part.seconds - part.special}
        elif part.kind == "process":
            own = {"wait_seconds": part.seconds, "executor": "process", "start_seconds": 1 + 5 * part.amount}
        stages.append(SimStage(part.name, row_bytes=32, **own))
    machine = SimMachine(tokens, streams * STREAM, STREAM)
    return Scenario(f"live-{number}", tuple(stages), machine)


class Sleeper:
    """The function of a stage in processes: slow to start, then asleep."""

    def __init__(self, start: float, seconds: float) -> None:
        self._seconds = seconds
        time.sleep(start)

    def __call__(self, value: int) -> int:
        """The same value, later."""
        time.sleep(self._seconds)
        return value


def function(part: Part, tokens: TokenPool, streams: int) -> Callable[[int], int]:
    """What a stage does to an item."""
    lock, disk, counting = threading.Lock(), threading.Semaphore(streams), threading.Lock()
    at_work = 0

    def hold(seconds: float) -> None:
        with tokens.held():
            threading.Event().wait(seconds)

    def plain(value: int) -> int:
        hold(part.seconds)
        return value

    def bent(value: int) -> int:
        nonlocal at_work
        with tokens.held():
            with counting:
                at_work += 1
                n = at_work
            threading.Event().wait(part.seconds * (1 + part.amount * n * (n - 1)))
            with counting:
                at_work -= 1
        return value

    def locked(value: int) -> int:
        with lock:
            hold(part.special)
        hold(part.seconds - part.special)
        return value

    def read(value: int) -> int:
        with disk:
            time.sleep(part.special)
        hold(part.seconds - part.special)
        return value

    return {"plain": plain, "bent": bent, "lock": locked, "disk": read}[part.kind]


def run(number: int, tuner: "str | Tuner", settle: float) -> float:
    """Items a second, from `settle` seconds on."""
    count, chosen = parts(number)
    clock = EmulatedClock()
    tokens = TokenPool(count, clock)
    streams = next((2 + int(10 * part.amount) for part in chosen if part.kind == "disk"), 2)
    pipe = intune.from_iterable(Numbers())
    for part in chosen:
        if part.kind == "process":
            start, seconds = 1 + 5 * part.amount, part.seconds

            class Own(Sleeper):
                def __init__(self, start: float = start, seconds: float = seconds) -> None:
                    super().__init__(start, seconds)

            pipe = pipe.map(Own, name=part.name, executor="process")
        else:
            pipe = pipe.map(function(part, tokens, streams), name=part.name)
    options = LoaderOptions(tuner=tuner, cpus=count)
    with build_loader(pipe, options, clock=clock, budget=lambda: Budget(count, 64, 64)) as loader:
        return rate_of(loader, settle)


def rate_of(items: Iterable[Any], settle: float) -> float:
    """Items a second, from `settle` seconds on, of what has no end."""
    began, taken = time.perf_counter(), 0
    for _ in items:
        now = time.perf_counter() - began
        taken += now >= settle
        if now >= settle + MEASURED_SECONDS:
            return taken / MEASURED_SECONDS
    raise AssertionError("the numbers have no end")


class Numbers:
    """Whole numbers without end."""

    def __iter__(self) -> Iterator[int]:
        """A new count."""
        return itertools.count()


def fixed(number: int) -> list[dict[str, int]]:
    """The best fixed allocation in the simulator, and the same with one more or less for each limit."""
    best = oracle(described(number), effort=Effort(starts=4, descents=1, runs=60))[0]
    limits = {name: value for name, value in best.concurrency.items() if value is not None and name != "from_iterable"}
    more = {name: value + 1 for name, value in limits.items()}
    less = {name: max(1, value - 1) for name, value in limits.items()}
    return [limits, more, less] if limits else [limits]


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuners", nargs="+", default=["shared", "model"], help="by name (default shared model)")
    parser.add_argument("--pipelines", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default 0)")
    chosen = parser.parse_args()
    rows = []
    for number in range(chosen.first, chosen.first + chosen.pipelines):
        rates = {name: run(number, name, SETTLED_SECONDS) for name in chosen.tuners}
        best = max(*rates.values(), *(run(number, Static(each), FIXED_SECONDS) for each in fixed(number)))
        tokens, own = parts(number)
        kind = next((part.kind for part in own if part.kind != "plain"), "plain")
        row = {"number": number, "tokens": tokens, "kind": kind, "best": round(best, 1)}
        row |= {name: round(rate / best, 3) for name, rate in rates.items()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = {name: spread([row[name] for row in rows]) for name in chosen.tuners}
    found = {"benchmark": "tuners_live", "machine": machine(), "reached": summary, "pipelines": rows}
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.first == 0 and chosen.pipelines == 12:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tuners_live.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
