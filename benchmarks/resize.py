"""How soon a change of concurrency takes effect, in items' times, and what a stage that waits loses by changes.

An item of the changed stage takes 50 ms. Growth from 1 to 8 counts until 8 items run, a cut from 8 to 1 until
one does. Meanwhile a stage that waits (sleeps 20 ms, 16 at once) goes on; its rate with changes every 200 ms is
compared with its rate without.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from _rounds import alternate, arguments, report, spread

import intune
from intune._compose import build_loader
from intune._values import Allocation, Budget, Snapshot
from intune.pipeline.options import LoaderOptions
from intune.testing import EmulatedClock, TokenPool, emulated

ITEM_SECONDS = 0.05


class Keep:
    """A tuner that leaves everything as it is, so that only our changes count."""

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What is in force."""
        return snapshot.allocation


class Counting:
    """Whole numbers without end."""

    def __iter__(self) -> Iterator[int]:
        """A new count."""
        return itertools.count()


def sleeping(value: int) -> int:
    """Wait like a request to a store."""
    time.sleep(0.02)
    return value


def run(changes: bool, seconds: float) -> dict[str, float]:
    """Rate of the waiting stage; with changes also the seconds that they took, in items' times."""
    clock = EmulatedClock()
    work = emulated(ITEM_SECONDS, TokenPool(8, clock))
    pipe = intune.from_iterable(Counting()).map(sleeping, name="waiting", waits=True).map(work, name="work")
    start = {"from_iterable": 1, "waiting": 16, "work": 8}
    loader = build_loader(
        pipe,
        LoaderOptions(tuner=Keep(), cpus=8, max_ahead=64),
        clock=clock,
        budget=lambda: Budget(8, max_threads=64),
    )
    engine = loader._engine
    engine.apply(replace(engine.allocation, concurrency=start))
    took: dict[str, list[float]] = {"up": [], "down": []}
    stop = threading.Event()

    def change() -> None:
        stage = engine.live[2]
        while not stop.wait(0.2):
            for name, value in (("down", 1), ("up", 8)):
                engine.apply(replace(engine.allocation, concurrency={**engine.allocation.concurrency, "work": value}))
                began = time.perf_counter()
                while (stage.running > 1 if value == 1 else stage.running < 8) and not stop.is_set():
                    time.sleep(0.0005)
                took[name].append((time.perf_counter() - began) / ITEM_SECONDS)
                if stop.wait(0.02):
                    return

    changer = threading.Thread(target=change)
    with loader:
        began = time.perf_counter()
        for value in loader:
            if changes and value == 8:
                changer.start()
            if time.perf_counter() - began > seconds:
                break
        stop.set()
        if changes:
            changer.join()
        waiting = loader.stats().stages["waiting"]
    figure = {"waiting_seconds_per_item": waiting.wall_seconds / waiting.items}
    for name, values in took.items():
        if values:
            figure[f"{name}_median"] = sorted(values)[len(values) // 2]
            figure[f"{name}_max"] = max(values)
    return figure


def main() -> None:
    """Measure."""
    chosen = arguments(__doc__)
    figures = alternate(
        {"without changes": lambda: run(False, chosen.seconds), "with changes": lambda: run(True, chosen.seconds)},
        chosen.rounds,
    )
    still, changing = figures["without changes"], figures["with changes"]
    report(
        "resize",
        {
            "growth_in_item_times": spread([figure["up_median"] for figure in changing]),
            "cut_in_item_times": spread([figure["down_median"] for figure in changing]),
            "waiting_stage_seconds_per_item_ratio": spread(
                [
                    a["waiting_seconds_per_item"] / b["waiting_seconds_per_item"]
                    for a, b in zip(changing, still, strict=True)
                ]
            ),
            "asked_for": {"item_times_at_most": 1},
        },
        write=not chosen.quick,
    )


if __name__ == "__main__":
    main()
