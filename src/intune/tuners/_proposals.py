"""Pieces that proposals of the fitted model are made of."""

from collections.abc import Mapping
from dataclasses import replace

from intune._values import Allocation, Budget, Snapshot
from intune.tuners._plan import Best


def tried_at(target: Allocation, name: str, level: int, why: str) -> Allocation:
    """The target but for one stage, which is tried at a level."""
    return replace(
        target,
        concurrency={**target.concurrency, name: level},
        reasons={**target.reasons, name: f"a trial at {level} {why}"},
    )


def too_much(given: int, wanted: int) -> bool:
    """Whether it is more than half as much again, and more than one more."""
    return given > wanted + max(1, wanted // 2)


def all_open(snapshot: Snapshot, budget: Budget) -> Allocation:
    """No limit for any stage."""
    names = [stage.name for stage in snapshot.stages]
    return Allocation(dict.fromkeys(names), budget.cpus, reasons=dict.fromkeys(names, "open: not measured yet"))


def at_most(target: Allocation, levels: Mapping[str, int], budget: Budget) -> Allocation:
    """The target, but for stages that may have no more than this; on all CPUs, as not all is known yet."""
    concurrency, reasons = dict(target.concurrency), dict(target.reasons)
    for name, level in levels.items():
        wanted = concurrency[name]
        if wanted is None or level < wanted:
            concurrency[name] = level
            reasons[name] = f"{level} at first, then more: it shows how the stage scales"
    return replace(target, concurrency=concurrency, slots=budget.cpus, reasons=reasons)


def in_words(found: Best) -> str:
    """The best rate and what bounds it, in words."""
    words = {
        "trainer": "what the training loop takes",
        "lock": "what the interpreter lock allows",
        "slots": "what the CPUs allow",
        "processes": "what the processes allow",
        "memory": "what memory allows",
    }
    return f"{found.rate:.3g} source rows/s, {words.get(found.bound, f'what {found.bound} can do')}"
