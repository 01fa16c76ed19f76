"""Which stages do less with more items at once, in words: by how long items took beside how many others."""

from collections.abc import Mapping

from intune._words import count, duration

Crowds = tuple[tuple[int, int, float], ...]
"""Of a stage: (items at once, items, mean wall seconds of one), in rising order, as in a snapshot."""

LEAST_ITEMS = 10
"""Fewer items at a number say nothing."""

LESS = 0.85
"""Share of the best rate below which a stage is said to do less with more at once."""


def slowdowns(stages: Mapping[str, Crowds]) -> list[str]:
    """A sentence for each stage that was seen to finish fewer items a second with more at once."""
    return [sentence for name, crowds in stages.items() if (sentence := _slowdown(name, crowds)) is not None]


def _slowdown(name: str, crowds: Crowds) -> str | None:
    known = [(at_once, seconds) for at_once, items, seconds in crowds if items >= LEAST_ITEMS and seconds > 0]
    if len(known) < 2:
        return None
    best, best_seconds = max(known, key=lambda each: each[0] / each[1])
    most, most_seconds = known[-1]
    if most / most_seconds >= LESS * best / best_seconds:
        return None
    less = 1 - most / most_seconds / (best / best_seconds)
    return (
        f"Stage {name} slows down with concurrency: {count(best, 'item')} at once took {duration(best_seconds)} each, "
        f"{most} at once {duration(most_seconds)} each, which is {100 * less:.0f} % fewer items a second. "
        'The tuner "model" limits such stages; max_concurrency= does it by hand.'
    )
