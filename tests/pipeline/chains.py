"""Chains of stages in plain Python, to compare an engine with; and the same as pipelines."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from intune.pipeline.chain import Pipeline
from intune.pipeline.order import epoch_order, generator, plan_rank, rank_range
from intune.pipeline.run import Share, make_sequencer, unit_seed
from intune.pipeline.sequence import ShuffleSequencer
from intune.pipeline.source import IndexedSource

# --- what batch and shuffle must give, said plainly


def batches(rows: Sequence[Any], size: int, drop_last: bool) -> list[list[Any]]:
    """Rows in batches."""
    cut = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [batch for batch in cut if len(batch) == size or not drop_last]


def windows(total: int, size: int) -> list[range]:
    """Row numbers of the windows of a shuffle: rising by halves from a sixteenth, then full ones."""
    found, start = list[range](), 0
    while start < total:
        rows = max(1, size // 2 ** max(0, 4 - len(found)))
        found.append(range(start, min(total, start + rows)))
        start += rows
    return found


def emissions(total: int, size: int, emit: int, key: tuple[int, ...]) -> list[list[int]]:
    """Row numbers that a shuffle gives: windows permuted, cut at multiples of `emit`."""
    found = []
    for number, window in enumerate(windows(total, size)):
        mixed = [window[place] for place in generator(*key, number).permutation(len(window))]
        cuts = [window.start, *(row for row in window[1:] if row % emit == 0), window.stop]
        found += [mixed[a - window.start : b - window.start] for a, b in itertools.pairwise(cuts)]
    return found


# --- a source of blocks


class Blocks:
    """A `BlockSource`: by unit, the rows of each of its blocks; their column `id` counts through all of them."""

    kind = "blocks"
    schema = pa.schema([("id", pa.int64())])

    def __init__(self, units: Sequence[Sequence[int]], *, arrow: bool = True, bound: int = 1) -> None:
        self.units = [list(unit) for unit in units]
        self.max_concurrency: int | None = None
        self._arrow, self._bound = arrow, bound
        self._first = [0, *itertools.accumulate(map(sum, self.units))]
        self.opened: list[int] = []
        self.kept = 0

    def identity(self) -> dict[str, Any]:
        return {"units": self.units}

    def unit_count(self) -> int:
        return len(self.units)

    def unit_rows(self) -> list[int]:
        return [sum(unit) for unit in self.units]

    def count_unit_rows(self) -> list[int]:
        return self.unit_rows()

    def read_bound(self, unit: int) -> int:
        return self._bound * 8 * max(self.units[unit], default=0)

    def kept_bytes(self, unit: int) -> int:
        return self.kept

    def describe(self, unit: int) -> str:
        return f"unit {unit}"

    def blocks(self, unit: int) -> Iterator[list[int]]:
        """The rows of each block of a unit."""
        row = self._first[unit]
        for rows in self.units[unit]:
            yield list(range(row, row + rows))
            row += rows

    def open(self, unit: int) -> Iterator[pa.RecordBatch]:
        self.opened.append(unit)
        for rows in self.blocks(unit):
            yield pa.RecordBatch.from_arrays([pa.array(np.array(rows, np.int64))], ["id"])


# --- chains, as pipelines and in plain Python

Key = tuple[int, ...]


@dataclass
class Flow:
    """What stands between two stages, in order: items by sequence number.

    Attributes:
        kind: "block", "sample" or "opaque".
        items: (sequence number, rows) of blocks and batches, or of samples with one row each.
        broken: A function raised behind the last item.
        skipped: Sequence numbers that were left out.
    """

    kind: str
    items: list[tuple[Key, list[int]]]
    broken: bool = False
    skipped: list[Key] = field(default_factory=list)


class Op(NamedTuple):
    """One stage: how it is added to a pipeline, and what it does to a flow."""

    name: str
    add: Callable[[Pipeline], Pipeline]
    apply: Callable[[Flow, "Place"], Flow]


@dataclass
class Place:
    """Where a stage stands, for what depends on it."""

    pipeline: Pipeline
    number: int
    share: Share
    epoch: int
    skip: bool

    def rng(self, key: Key) -> np.random.Generator:
        """The generator that a function with rng=True gets."""
        return generator(self.share.seed, self.share.rank, self.epoch, self.number + 1, *key)


class BadRowError(ValueError):
    """What a function raises."""


def ids(item: Any) -> np.ndarray:
    """Row numbers of an item of any kind, int64[n]."""
    if isinstance(item, pa.RecordBatch):
        return item.column("id").to_numpy()
    if isinstance(item, dict):
        return item["id"]
    return np.atleast_1d(np.asarray(item))


def like(item: Any, rows: np.ndarray) -> Any:
    """An item of the same kind with these rows."""
    if isinstance(item, pa.RecordBatch):
        return pa.RecordBatch.from_arrays([pa.array(rows)], ["id"])
    if isinstance(item, dict):
        return {"id": rows}
    return rows if isinstance(item, np.ndarray) else int(rows[0])


def elementwise(name: str, function: Callable[..., Any], rng: bool = False) -> Op:
    """A map: `function` of rows int64[n] (and a generator) gives rows int64[n], or raises."""

    def stage(item: Any, *more: Any) -> Any:
        return like(item, function(ids(item), *more))

    def apply(flow: Flow, place: Place) -> Flow:
        items, skipped = list[tuple[Key, list[int]]](), list(flow.skipped)
        for key, rows in flow.items:
            try:
                more = [place.rng(key)] if rng else []
                items.append((key, function(np.array(rows), *more).tolist()))
            except BadRowError:
                if not place.skip:
                    return Flow(flow.kind, items, True, skipped)
                skipped.append(key)
        return Flow(flow.kind, items, flow.broken, skipped)

    return Op(name, lambda pipe: pipe.map(stage, rng=rng), apply)


def triple() -> Op:
    """A map of whole items."""
    return elementwise("triple", lambda rows: rows * 3 + 1)


def noise() -> Op:
    """A map that draws random numbers."""
    return elementwise("noise", lambda rows, rng: rows * 2 + rng.integers(0, 2, len(rows)), rng=True)


def fail(modulus: int, rest: int) -> Op:
    """A map that raises for some rows."""

    def function(rows: np.ndarray) -> np.ndarray:
        if (rows % modulus == rest).any():
            raise BadRowError(rows.tolist())
        return rows

    return elementwise(f"fail({modulus}, {rest})", function)


def keep(modulus: int) -> Op:
    """A filter."""

    def stage(item: Any) -> Any:
        kept = ids(item) % modulus != 0
        return kept if isinstance(item, (pa.RecordBatch, dict)) else bool(kept[0])

    def apply(flow: Flow, place: Place) -> Flow:
        kept = [(key, [row for row in rows if row % modulus]) for key, rows in flow.items]
        return replace(flow, items=[(key, rows) for key, rows in kept if rows])

    return Op(f"keep({modulus})", lambda pipe: pipe.filter(stage), apply)


def expand(most: int) -> Op:
    """A flat_map that gives up to `most` - 1 items for one, some of them without rows."""

    def children(rows: np.ndarray) -> Iterator[np.ndarray]:
        for number in range(int(rows[0]) % most):
            yield (rows if len(rows) == 1 else rows[rows % 2 == number % 2]) * 10 + number

    def apply(flow: Flow, place: Place) -> Flow:
        items = []
        for key, rows in flow.items:
            given = [child.tolist() for child in children(np.array(rows)) if len(child)]
            items += [((*key, number), child) for number, child in enumerate(given)]
        return replace(flow, items=items)

    def stage(item: Any) -> Iterator[Any]:
        for rows in children(ids(item)):
            yield like(item, rows)

    return Op(f"expand({most})", lambda pipe: pipe.flat_map(stage), apply)


def arrays() -> Op:
    """From Arrow to dicts of arrays."""
    return Op("arrays", lambda pipe: pipe.map(lambda block: {"id": ids(block).copy()}), lambda flow, place: flow)


def unbatch() -> Op:
    """Rows of blocks as samples."""

    def apply(flow: Flow, place: Place) -> Flow:
        samples = [((*key, n), [row]) for key, rows in flow.items for n, row in enumerate(rows)]
        return replace(flow, kind="sample", items=samples)

    return Op("unbatch", lambda pipe: pipe.unbatch().map(lambda row: int(row["id"])), apply)


def shuffle(size: int, seed: int | None = None) -> Op:
    """A shuffle."""

    def apply(flow: Flow, place: Place) -> Flow:
        rows = [row for _, rows in flow.items for row in rows]
        share, own = place.share, place.share.seed if seed is None else seed
        sequencer = make_sequencer(place.pipeline, place.number, share, place.epoch)
        assert isinstance(sequencer, ShuffleSequencer)
        given = emissions(len(rows), size, sequencer.emit, (own, share.rank, place.epoch, place.number + 1))
        if flow.broken:  # the window that was being filled is lost
            whole = [window.stop for window in windows(len(rows) + size, size) if window.stop <= len(rows)]
            given = given[: len(emissions(whole[-1], size, sequencer.emit, (0,))) if whole else 0]
        if flow.kind == "sample":
            items = [((n,), [rows[row]]) for n, row in enumerate(row for each in given for row in each)]
        else:
            items = [((n,), [rows[row] for row in each]) for n, each in enumerate(given)]
        return replace(flow, items=items)

    return Op(f"shuffle({size}, {seed})", lambda pipe: pipe.shuffle(size, seed=seed), apply)


def batch(size: int, drop_last: bool = False) -> Op:
    """A batch."""

    def apply(flow: Flow, place: Place) -> Flow:
        rows = [row for _, rows in flow.items for row in rows]
        cut = batches(rows, size, drop_last or flow.broken)
        kind = "block" if flow.kind == "block" else "opaque"
        return replace(flow, kind=kind, items=[((n,), each) for n, each in enumerate(cut)])

    return Op(f"batch({size}, {drop_last})", lambda pipe: pipe.batch(size, drop_last=drop_last), apply)


@dataclass
class Chain:
    """A source and stages."""

    source: Any
    ops: tuple[Op, ...] = ()

    def pipeline(self) -> Pipeline:
        """As it runs."""
        pipe = Pipeline(self.source)
        for op in self.ops:
            pipe = op.add(pipe)
        return pipe

    def flow(self, share: Share | None = None, epoch: int = 0, skip: bool = False) -> Flow:
        """What it gives, in plain Python."""
        share, pipe = share or Share(), Pipeline(self.source)
        flow = self._source(share, epoch)
        for op in self.ops:
            number, pipe = len(pipe.stages), op.add(pipe)
            flow = op.apply(flow, Place(self.pipeline(), number, share, epoch, skip))
        return flow

    def __repr__(self) -> str:
        """As it is shown when a test fails."""
        source = self.source.units if isinstance(self.source, Blocks) else type(self.source).__name__
        return f"{source} -> {' -> '.join(op.name for op in self.ops)}"

    def _source(self, share: Share, epoch: int) -> Flow:
        source, seed = self.source, unit_seed(self.pipeline(), share.seed)
        if isinstance(source, Blocks):
            order = epoch_order(len(source.units), seed, epoch)
            counts = source.unit_rows() if share.world_size > 1 else None
            plan = plan_rank(order, counts, share.rank, share.world_size, share.on_uneven)
            items = []
            for place in range(len(plan)):
                unit, start, stop, _ = plan[place]
                first = source._first[unit]
                wanted = range(first + start, first + (sum(source.units[unit]) if stop is None else stop))
                parts = [[row for row in rows if row in wanted] for rows in source.blocks(unit)]
                items += [((place, number), part) for number, part in enumerate(part for part in parts if part)]
            return Flow("block", items)
        if isinstance(source, IndexedSource):
            order = epoch_order(len(source), seed, epoch)
            start, stop, again = rank_range(len(order), share.rank, share.world_size, share.on_uneven)
            mine = [*order[start:stop], *itertools.islice(itertools.cycle(order), again if len(order) else 0)]
            return Flow("sample", [((n,), [source.get(int(index))]) for n, index in enumerate(mine)])
        rows = list(source.iterate())
        whole = len(rows) if share.on_uneven == "uneven" else len(rows) - len(rows) % share.world_size
        return Flow("sample", [((n,), [rows[n]]) for n in range(share.rank, whole, share.world_size)])


class Given(Chain):
    """A pipeline that is there already."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(pipe.source)
        self._pipe = pipe

    def pipeline(self) -> Pipeline:
        return self._pipe
