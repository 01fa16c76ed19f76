"""What came out of many runs: a line for each family of scenarios and tuner, with bootstrap intervals."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from intune.sim.evaluate import MOMENTS, Row

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over scenarios, and the interval of 95 % in which it lies when others are drawn; NaN over none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Line:
    """One tuner on one family.

    Attributes:
        family: The family.
        tuner: The tuner.
        scenarios: Scenarios that were run and count.
        died: Of these, how often memory ran out.
        failed: Scenarios that do not count, as the tuner raised an error in them.
        mean: Mean share of the oracle at the last moment of `MOMENTS` that was reached.
        median: Median of the same.
        p10: 10th percentile of the same.
        regret: Mean regret over all decisions.
        late_changes: Mean share of late decisions that changed something; None where none was late.
    """

    family: str
    tuner: str
    scenarios: int
    died: int
    failed: int
    mean: Estimate
    median: Estimate
    p10: Estimate
    regret: Estimate
    late_changes: float | None


def summarise(rows: Iterable[Row]) -> list[Line]:
    """A line for each family and tuner, in the order in which they come.

    Rows without an oracle's rate are left out. So are those in which the tuner failed, but they are counted.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["family"], row["tuner"]), []).append(row)
    return [line for (family, tuner), group in groups.items() if (line := _line(family, tuner, group)) is not None]


def _line(family: str, tuner: str, rows: list[Row]) -> Line | None:
    failed = sum(row.get("tuner_failed") is not None for row in rows)
    counted = [row for row in rows if row["regret"] is not None and row.get("tuner_failed") is None]
    moments = [f"share_{m}" for m in MOMENTS if all(row.get(f"share_{m}") is not None for row in counted)]
    if not (counted or failed) or not moments:
        return None
    shares = np.array([row[moments[-1]] for row in counted])
    regrets = np.array([row["regret"] for row in counted])
    late = [row["late_changes"] for row in counted if row["late_changes"] is not None]
    return Line(
        family,
        tuner,
        len(counted),
        sum(row["died"] is not None for row in counted),
        failed,
        estimate(shares, np.mean),
        estimate(shares, np.median),
        estimate(shares, partial(np.percentile, q=10)),
        estimate(regrets, np.mean),
        float(np.mean(late)) if late else None,
    )


def estimate(values: np.ndarray[Any, Any], of: Callable[..., Any]) -> Estimate:
    """A statistic and its bootstrap interval, NaN where there are no values; `of` takes an array and an axis."""
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan)
    random = np.random.default_rng(0)
    drawn = random.choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(of(drawn, axis=1), [2.5, 97.5])
    return Estimate(float(of(values, axis=0)), float(low), float(high))


HEADS = (
    *("family", "tuner", "scenarios", "died", "failed"),
    *("mean share", "median share", "p10 share", "regret", "late changes"),
)


def cells(line: Line) -> tuple[str, ...]:
    """A line of the summary as words, in the order of `HEADS`."""
    late = "-" if line.late_changes is None else f"{line.late_changes:.0%}"
    counts = str(line.scenarios), str(line.died), str(line.failed)
    return line.family, line.tuner, *counts, str(line.mean), str(line.median), str(line.p10), str(line.regret), late


def markdown(lines: Iterable[Line]) -> str:
    """The summary as a table in Markdown."""
    rows = [HEADS, tuple("---" for _ in HEADS), *map(cells, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
