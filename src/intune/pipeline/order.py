"""Which units of a source an epoch reads, in which order, and which of their rows a rank takes.

Pure functions of (seed, epoch, rank): every rank computes the same global order without talking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

OnUneven = Literal["drop", "pad", "uneven"]
"""What to do where rows do not divide by ranks: leave the remainder out, repeat rows, or differ by one row."""

_UNIT_ORDER = 0x756E6974  # "unit": tells the stream of the unit order from the streams of stages


def generator(*key: int) -> np.random.Generator:
    """A Philox generator that is a pure function of a path of non-negative numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def epoch_order(count: int, seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """Order of `count` units in an epoch: permuted where there is a seed, else as they are. int64[count]."""
    if seed is None:
        return np.arange(count, dtype=np.int64)
    return generator(seed, epoch, _UNIT_ORDER).permutation(count)


class UnitSlice(NamedTuple):
    """Rows start to stop (None = to its end) of a unit; `padding`: repeated to make ranks equal."""

    unit: int
    start: int = 0
    stop: int | None = None
    padding: bool = False


@dataclass(frozen=True)
class RankPlan:
    """What one rank reads in one epoch.

    Attributes:
        units: int64[n]; units in order.
        first: Rows of the first unit that belong to the rank before it.
        last: Rows of the last unit up to which this rank reads; None = to its end.
        padding: Slices read once more after all others.
        rows: Rows in all, padding included; None where unknown.
    """

    units: npt.NDArray[np.int64]
    first: int = 0
    last: int | None = None
    padding: tuple[UnitSlice, ...] = ()
    rows: int | None = None

    def __len__(self) -> int:
        """Number of slices."""
        return len(self.units) + len(self.padding)

    def __getitem__(self, position: int) -> UnitSlice:
        """The slice at a position of the epoch."""
        count = len(self.units)
        if position >= count:
            return self.padding[position - count]
        return UnitSlice(
            int(self.units[position]),
            self.first if position == 0 else 0,
            self.last if position == count - 1 else None,
        )


def rank_range(rows: int, rank: int, world_size: int, on_uneven: OnUneven) -> tuple[int, int, int]:
    """Rows [start, stop) of an epoch that a rank takes, and how many rows it repeats after them.

    "drop" gives floor(rows / world_size) rows to each and leaves the remainder out; "pad" gives
    ceil(rows / world_size) to each, the last ones repeating the epoch's first rows; "uneven" leaves
    nothing out and repeats nothing.
    """
    if on_uneven == "drop":
        share = rows // world_size
        return rank * share, (rank + 1) * share, 0
    if on_uneven == "pad":
        share = -(-rows // world_size)
        start, stop = min(rank * share, rows), min((rank + 1) * share, rows)
        return start, stop, share - (stop - start)
    return rank * rows // world_size, (rank + 1) * rows // world_size, 0


def plan_rank(
    order: npt.NDArray[np.int64],
    unit_rows: Sequence[int] | None,
    rank: int = 0,
    world_size: int = 1,
    on_uneven: OnUneven = "drop",
) -> RankPlan:
    """Cut an epoch's order of units into equal contiguous row ranges and take one rank's.

    Args:
        order: int64[n]; all units in the order of the epoch.
        unit_rows: Rows of each unit by its number; may be None only for one rank.
        rank: This rank.
        world_size: Number of ranks.
        on_uneven: What to do with rows that do not divide by ranks.
    """
    if unit_rows is None:
        if world_size != 1:
            raise ValueError("rows of each unit are needed to plan more than one rank")
        return RankPlan(order)
    ends = np.cumsum(np.asarray(unit_rows, dtype=np.int64)[order])
    total = int(ends[-1]) if len(ends) else 0
    start, stop, repeat = rank_range(total, rank, world_size, on_uneven)
    units, first, last = _cut(order, ends, start, stop)
    padding: list[UnitSlice] = []
    position = 0
    while repeat and total:
        span = min(repeat, total - position)
        extra = RankPlan(*_cut(order, ends, position, position + span))
        padding += [extra[i]._replace(padding=True) for i in range(len(extra))]
        repeat -= span
        position = (position + span) % total
    rows = stop - start + (rank_range(total, rank, world_size, on_uneven)[2] if total else 0)
    return RankPlan(units, first, last, tuple(padding), rows)


def _cut(order: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], start: int, stop: int) -> tuple[Any, int, int]:
    """Units that hold rows [start, stop), rows before in the first one, rows up to the end in the last one."""
    if stop <= start:
        return order[:0], 0, 0
    low = int(np.searchsorted(ends, start, side="right"))
    high = int(np.searchsorted(ends, stop, side="left")) + 1
    before = int(ends[low - 1]) if low else 0
    last_before = int(ends[high - 2]) if high >= 2 else 0
    return order[low:high], start - before, stop - last_before
