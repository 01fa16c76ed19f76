"""Draws a chunk of made-up click logs: absences, counts, categories and labels, whole columns at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, criteo_schema
from intune.recsys.criteo_facts import (
    C11_FOLLOWS_C7,
    CATEGORIES,
    COUNT_RANK_CORRELATIONS,
    COUNTS,
    MISSING,
    PARENTS,
)
from intune.recsys.laws import CategoryLaw, CountLaw, Floats, Integers, category_ids, normal_factor
from intune.recsys.truth import true_logit

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Chunk:
    """Rows and what only their maker knows.

    Attributes:
        batch: n rows with the columns of `criteo_schema`.
        logit: Of each row's true click probability, float64[n].
    """

    batch: pa.RecordBatch
    logit: Floats


@dataclass(frozen=True)
class _Laws:
    """What rows are drawn from, made once a process."""

    counts: tuple[CountLaw, ...]
    factor: Floats
    categories: Mapping[str, CategoryLaw]
    siblings: Integers


def draw_chunk(rows: int, random: np.random.Generator, *, drift: float = 0.0) -> Chunk:
    """Draw rows.

    Args:
        rows: How many, n.
        random: Where chance comes from; all of it.
        drift: How far the time has gone on. From 0 to d, a share d of the values of each vocabulary is replaced by
            others, and the logits of clicks and of absences have moved by d: clicks up, absences up and down in turn.

    Returns:
        The rows. Which of them lack what, and all their values, are the same for the same state of `random`.
    """
    laws = _laws()
    missing = _draw_missing(rows, random, drift)
    counts = _draw_counts(laws, rows, random)
    categories = _draw_categories(laws, rows, random, drift)
    for name, absent in missing.items():
        if name in counts:
            counts[name][absent] = 0
        else:
            categories[name][absent] = -1
    logit = true_logit(counts, categories, drift)
    label = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int32)
    columns = [pa.array(label)]
    columns += [pa.array(counts[name], mask=missing.get(name)) for name in COUNT_COLUMNS]
    for j, name in enumerate(CATEGORY_COLUMNS):
        columns.append(pa.array(category_ids(j, categories[name]), mask=missing.get(name)))
    return Chunk(pa.RecordBatch.from_arrays(columns, schema=criteo_schema()), logit)


@cache
def _laws() -> _Laws:
    categories = {name: CategoryLaw(facts) for name, facts in zip(CATEGORY_COLUMNS, CATEGORIES, strict=True)}
    factor = normal_factor(COUNT_RANK_CORRELATIONS)
    return _Laws(tuple(map(CountLaw, COUNTS)), factor, categories, _siblings(categories))


def _draw_missing(rows: int, random: np.random.Generator, drift: float) -> dict[str, Flags]:
    missing: dict[str, Flags] = {}
    for i, facts in enumerate(MISSING):
        shift = drift if i % 2 else -drift
        chance: Floats | float = _shifted(facts.rate, shift)
        if facts.cause is not None:
            cause = next(other.rate for other in MISSING if facts.cause in other.columns)
            without = max(0.0, (facts.rate - cause * facts.rate_with_cause) / (1 - cause))
            both = np.array([_shifted(without, shift), _shifted(facts.rate_with_cause, shift)])
            chance = both[missing[facts.cause].astype(np.int64)]
        missing |= dict.fromkeys(facts.columns, random.random(rows) < chance)
    return missing


def _shifted(rate: float, shift: float) -> float:
    """The rate whose logit is greater by `shift`."""
    return float(rate / (rate + (1 - rate) * np.exp(-shift)))


def _draw_counts(laws: _Laws, rows: int, random: np.random.Generator) -> dict[str, Integers]:
    independent = random.standard_normal((len(COUNT_COLUMNS), rows))
    counts = {}
    for i, (name, law) in enumerate(zip(COUNT_COLUMNS, laws.counts, strict=True)):
        # Summed one by one: a product of matrices may differ in its last digits from one machine to another.
        normal = np.zeros(rows)
        for weight, numbers in zip(laws.factor[i, : i + 1], independent, strict=False):
            normal += weight * numbers
        counts[name] = law.count(normal)
    return counts


def _draw_categories(laws: _Laws, rows: int, random: np.random.Generator, drift: float) -> dict[str, Integers]:
    """Which value of its vocabulary each column has, by the order of frequency at the beginning of time."""
    values: dict[str, Integers] = {}
    for j, name in enumerate(CATEGORY_COLUMNS):
        if name not in PARENTS:
            values[name] = laws.categories[name].rank(random.random(rows))
            if drift:
                _renew(values[name], CATEGORIES[j].vocabulary, j, drift)
    for name, parent in PARENTS.items():
        values[name] = _follow(laws.categories, name, parent, values[parent])
    strays = random.random(rows) >= C11_FOLLOWS_C7
    values["C11"] = np.where(strays, laws.siblings[values["C11"]], values["C11"])
    return values


def _follow(laws: Mapping[str, CategoryLaw], name: str, parent: str, values: Integers) -> Integers:
    """The value that follows from the parent's: the one at the same height of the cumulated shares.

    So both laws are kept, and the column with fewer values merges neighbours.
    """
    return laws[name].rank(laws[parent].middle(values))


def _siblings(laws: Mapping[str, CategoryLaw]) -> Integers:
    """For each value of C11 the next that C13 follows from in the same way, round about; where there is none, itself.

    With such a value in its place, C13 still follows from C11, but C11 no longer from C7.
    """
    own = np.arange(CATEGORIES[CATEGORY_COLUMNS.index("C11")].vocabulary)
    child = _follow(laws, "C13", "C11", own)  # never falls
    next_is_one = np.append(child[1:] == child[:-1], False)
    siblings: Integers = np.where(next_is_one, own + 1, child.searchsorted(child))
    return siblings


def _renew(values: Integers, vocabulary: int, column: int, drift: float) -> None:
    """Let a share `drift` of the ranks stand for other values, in place; at 1.5 all did so once, half of them twice.

    The others are spread over the vocabulary, so most of them were rare before.
    """
    moment = category_ids(column, values) / 2**32  # when within one unit of drift it is the rank's turn
    turns = np.floor(drift + moment).astype(np.int64)
    (new,) = np.nonzero(turns)
    values[new] = category_ids(column + len(CATEGORY_COLUMNS), values[new] * 64 + turns[new] % 64) % vocabulary
