"""Three identity stages over small integers, in order, with journal, ledger and statistics on: items a second."""

import itertools
import time
from collections.abc import Iterator

from _rounds import alternate, arguments, report, spread

import intune


class Counting:
    """Whole numbers without end."""

    def __iter__(self) -> Iterator[int]:
        """A new count."""
        return itertools.count()


def identity(value: int) -> int:
    """Give back what came."""
    return value


def pipeline(seconds: float) -> dict[str, float]:
    """Items a second, the first third dropped; the order is checked."""
    pipe = intune.from_iterable(Counting()).map(identity, name="a").map(identity, name="b").map(identity, name="c")
    with pipe.loader(cpus=2, memory="8GiB") as loader:
        began, start, counted = time.perf_counter(), 0.0, 0
        for expected, value in enumerate(loader):
            assert value == expected
            if value % 4096 == 0:
                now = time.perf_counter()
                if not start and now - began > seconds / 3:
                    start, counted = now, value
                if now - began > seconds:
                    return {"items_per_second": (value - counted) / (now - start)}
    raise AssertionError("the count has no end")


def plain(seconds: float) -> dict[str, float]:
    """The same three calls in a plain loop, one thread."""
    began, start, counted = time.perf_counter(), 0.0, 0
    for value in itertools.count():
        identity(identity(identity(value)))
        if value % 4096 == 0:
            now = time.perf_counter()
            if not start and now - began > seconds / 3:
                start, counted = now, value
            if now - began > seconds:
                return {"items_per_second": (value - counted) / (now - start)}
    raise AssertionError("the count has no end")


def main() -> None:
    """Measure."""
    chosen = arguments(__doc__)
    figures = alternate(
        {"pipeline": lambda: pipeline(chosen.seconds), "plain loop": lambda: plain(chosen.seconds)}, chosen.rounds
    )
    rates = {name: [figure["items_per_second"] for figure in rounds] for name, rounds in figures.items()}
    report(
        "identity",
        {
            "pipeline_items_per_second": spread(rates["pipeline"]),
            "plain_loop_items_per_second": spread(rates["plain loop"]),
            "asked_for_at_least": 150_000,
        },
        write=not chosen.quick,
    )


if __name__ == "__main__":
    main()
