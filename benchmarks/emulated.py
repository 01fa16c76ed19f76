"""Four stages that hold one of 32 tokens for 20, 100, 10 and 5 ms: items a second, in order, and items in flight.

32 tokens can give 32 / 0.135 s = 237 items a second at most. The second contender is the best fixed split.
"""

import itertools
import time
from collections.abc import Iterator

from _rounds import alternate, arguments, report, spread

import intune
from intune._compose import build_loader
from intune._values import Budget, Tuner
from intune.pipeline.options import LoaderOptions
from intune.testing import EmulatedClock, TokenPool, emulated
from intune.tuners import Static

TOKENS = 32
SECONDS = (0.020, 0.100, 0.010, 0.005)
BEST_SPLIT = {"from_iterable": 1, "a": 5, "b": 22, "c": 3, "d": 2}


class Counting:
    """Whole numbers without end."""

    def __iter__(self) -> Iterator[int]:
        """A new count."""
        return itertools.count()


def run(tuner: "str | Tuner", seconds: float) -> dict[str, float]:
    """Items a second after the first third, and the most items in flight at any time."""
    clock = EmulatedClock()
    tokens = TokenPool(TOKENS, clock)
    pipe = intune.from_iterable(Counting())
    for name, each in zip("abcd", SECONDS, strict=True):
        pipe = pipe.map(emulated(each, tokens), name=name)
    loader = build_loader(
        pipe, LoaderOptions(tuner=tuner, cpus=TOKENS), clock=clock, budget=lambda: Budget(TOKENS, max_threads=64)
    )
    with loader:
        began, start, counted, most = time.perf_counter(), 0.0, 0, 0
        for expected, value in enumerate(loader):
            assert value == expected
            engine = loader._engine
            most = max(most, sum(run.in_flight() for run in engine.runs))
            now = time.perf_counter()
            if not start and now - began > seconds / 3:
                start, counted = now, value
            if now - began > seconds:
                return {"items_per_second": (value - counted) / (now - start), "in_flight_items": most}
    raise AssertionError("the count has no end")


def main() -> None:
    """Measure."""
    chosen = arguments(__doc__)
    figures = alternate(
        {
            "shared slots": lambda: run("shared", chosen.seconds),
            "best fixed split": lambda: run(Static(BEST_SPLIT), chosen.seconds),
        },
        chosen.rounds,
    )
    summary = {
        name: {key: spread([figure[key] for figure in rounds]) for key in rounds[0]} for name, rounds in figures.items()
    }
    report(
        "emulated",
        {**summary, "asked_for": {"items_per_second_at_least": 230, "in_flight_items_at_most": 48}},
        write=not chosen.quick,
    )


if __name__ == "__main__":
    main()
