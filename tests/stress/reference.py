"""What a pipeline has to give, by plain Python: one row after another, without threads, blocks in memory or plans.

Only permutations come from the library: those of a shuffle's windows, and of a source's units.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from intune.pipeline.order import epoch_order
from intune.pipeline.sequence import Window

from .building import lines_of, sampler_order
from .pipelines import MODULUS, Description, Row, Source, Stage, first_row

Block = list[Row]


class Failed(Exception):
    """A function, or the source, fails at a row."""

    def __init__(self, kind: str, row: int, stage: int) -> None:
        super().__init__(kind, row, stage)
        self.kind, self.row, self.stage = kind, row, stage


@dataclass(frozen=True)
class EmissionRows:
    """Rows of the blocks in which shuffles give their windows, and of those before batches (more for large ones)."""

    blocks: int
    before_batches: int


@dataclass
class Outcome:
    """One epoch of one rank.

    Attributes:
        items: Rows of each item; a sample is an item of one row.
        failed: What ends it early.
        skipped: What was left out, by stage (0 = the source).
    """

    items: list[Block]
    failed: Failed | None
    skipped: Counter[int]


def outcome(description: Description, epoch: int, rank: int, emissions: EmissionRows) -> Outcome:
    """What an epoch of a rank gives."""
    result = Outcome([], None, Counter())
    try:
        for item in _Epoch(description, epoch, rank, emissions, result.skipped).items():
            result.items.append(item)
    except Failed as failed:
        result.failed = failed
    return result


class _Epoch:
    """Every item is a list of rows; a sample is a list of one."""

    def __init__(
        self, description: Description, epoch: int, rank: int, emissions: EmissionRows, skipped: Counter[int]
    ) -> None:
        self._description, self._epoch, self._rank = description, epoch, rank
        self._emissions, self._skipped = emissions, skipped

    def items(self) -> Iterator[Block]:
        """The items that come out at the end."""
        source = self._description.source
        items = self._blocks(source) if source.form == "arrow" else self._samples(source)
        for number, stage in enumerate(self._description.stages, 1):
            items = getattr(self, f"_{stage.kind}")(items, stage, number)
        return items

    # --- sources

    def _unit_seed(self) -> int | None:
        first = next((stage for stage in self._description.stages if stage.kind == "shuffle"), None)
        if first is None:
            return None
        return self._description.loader_seed if first.seed is None else first.seed

    def _order(self, count: int) -> list[int]:
        return [int(unit) for unit in epoch_order(count, self._unit_seed(), self._epoch)]

    def _samples(self, source: Source) -> Iterator[Block]:
        world, rank, uneven = self._description.world_size, self._rank, self._description.on_uneven
        ids = list(range(source.rows))
        if source.kind == "sampler":
            ids = sampler_order(source, self._epoch, rank)
        elif source.kind == "dataset":
            ids, repeated = self._share(self._order(source.rows))
            ids += repeated
        elif world > 1:
            whole = source.rows if uneven == "uneven" else source.rows // world * world
            ids = ids[rank:whole:world]
        fails_at = source.fails_at
        if source.kind == "object" and fails_at is not None and fails_at < source.rows:
            # It is drawn past the rows of other ranks, too, all those of a turn at once.
            ids = [one for one in ids if one // world < fails_at // world] + [fails_at]
        for number in ids:
            if number != fails_at:
                yield [first_row(number)]
            elif not self._description.skip:
                raise Failed(source.error, number, 0)
            else:
                self._skipped[0] += 1

    def _share(self, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """The part of a rank, and what it repeats after it."""
        world, rank, uneven, count = self._description.world_size, self._rank, self._description.on_uneven, len(rows)
        if world == 1:
            return list(rows), []
        if uneven == "uneven":
            return rows[rank * count // world : (rank + 1) * count // world], []
        if uneven == "drop":
            return rows[rank * (count // world) : (rank + 1) * (count // world)], []
        each = -(-count // world)
        mine = rows[rank * each : (rank + 1) * each]
        return mine, [rows[place % count] for place in range(each - len(mine))]

    def _blocks(self, source: Source) -> Iterator[Block]:
        units = _parquet_units(source) if source.kind == "parquet" else _tsv_units(source)
        rows = [(unit, block, row) for unit in self._order(len(units)) for block, row in units[unit]]
        # A place is (part, unit, block): what differs in it stands in different blocks.
        bad = {unit for unit, rows_of_unit in enumerate(units) for _, row in rows_of_unit if row == source.fails_at}
        mine, repeated = self._share(rows)
        passes, taken = [mine], 0
        while taken < len(repeated):  # each pass over the epoch reads its units anew
            passes.append(repeated[taken : taken + len(rows)])
            taken += len(rows)
        for part in passes:
            yield from self._read(part, bad, source)

    def _read(self, rows: list[tuple[int, int, int]], bad: set[int], source: Source) -> Iterator[Block]:
        place, failed = None, None
        block: Block = []
        for unit, number, row in rows:
            if (unit, number) != place:
                if block:
                    yield block
                place, block = (unit, number), []
            if unit not in bad:
                block.append(first_row(row))
            elif failed != unit:
                failed = unit
                if not self._description.skip:
                    raise Failed("source", row, 0)
                self._skipped[0] += 1
        if block:
            yield block

    # --- stages that call a function

    def _call(
        self, items: Iterator[Block], stage: Stage, number: int, apply: Callable[[Block], Iterator[Block]]
    ) -> Iterator[Block]:
        """What `apply` gives for each item; what it fails at is left out or raised."""
        for item in items:
            try:
                for result in apply(item):
                    if result:
                        yield result
            except Failed:
                if not self._description.skip:
                    raise
                self._skipped[number] += 1

    def _map(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        def apply(rows: Block) -> Iterator[Block]:
            _check(rows, stage, number)
            yield _mapped(rows, stage)

        return self._call(items, stage, number, apply)

    def _map_rows(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        def apply(rows: Block) -> Iterator[Block]:
            bad = [row[0] == stage.fails_at for row in rows]
            if any(bad) and not self._description.skip:
                yield [_mapped([row], stage)[0] for row in rows[: bad.index(True)]]
                _check(rows, stage, number)
            self._skipped[number] += sum(bad)
            yield [_mapped([row], stage)[0] for row, fails in zip(rows, bad, strict=True) if not fails]

        return self._call(items, stage, number, apply)

    def _filter(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        def apply(rows: Block) -> Iterator[Block]:
            _check(rows, stage, number)
            yield [row for row in rows if stage.op == "keep" and (7 * row[0] + row[1]) % (2 + stage.k % 4)]

        return self._call(items, stage, number, apply)

    def _flat_map(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        def apply(rows: Block) -> Iterator[Block]:
            children = _children(rows, stage)
            if any(row[0] == stage.fails_at for row in rows):
                if stage.lazy:
                    yield from children[: len(children) // 2]
                _check(rows, stage, number)
            yield from children

        return self._call(items, stage, number, apply)

    def _unbatch(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        return ([row] for rows in items for row in rows)

    def _to_torch(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        return items

    # --- stages that gather

    def _batch(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        batch: Block = []
        for rows in items:
            for row in rows:
                batch.append(row)
                if len(batch) == stage.size:
                    yield batch
                    batch = []
        if batch and not stage.drop_last:
            yield batch

    def _shuffle(self, items: Iterator[Block], stage: Stage, number: int) -> Iterator[Block]:
        window: Block = []
        count = start = 0
        for rows in items:
            for row in rows:
                window.append(row)
                if len(window) == max(1, stage.size // (16 >> min(4, count))):
                    yield from self._permuted(window, count, start, number)
                    start += len(window)
                    window, count = [], count + 1
        if window:
            yield from self._permuted(window, count, start, number)

    def _permuted(self, rows: Block, window: int, start: int, number: int) -> Iterator[Block]:
        stage = self._description.stages[number - 1]
        seed = self._description.loader_seed if stage.seed is None else stage.seed
        places = Window(window, len(rows), (seed, self._rank, self._epoch, number)).permutation()
        emission: Block = []
        for place, row in enumerate(places.tolist(), start + 1):
            emission.append(rows[row])
            if stage.flow == "sample" or place % self._emission_rows(number) == 0:
                yield emission
                emission = []
        if emission:
            yield emission

    def _emission_rows(self, number: int) -> int:
        stages = self._description.stages
        if number == len(stages) or stages[number].kind != "batch":
            return self._emissions.blocks
        size = stages[number].size
        return -(-self._emissions.before_batches // size) * size


def _check(rows: Block, stage: Stage, number: int) -> None:
    if any(row[0] == stage.fails_at for row in rows):
        assert stage.fails_at is not None
        raise Failed(stage.error, stage.fails_at, number)


def _mapped(rows: Block, stage: Stage) -> Block:
    if stage.op == "add":
        return [(number, (3 * x + stage.k) % MODULUS, z) for number, x, z in rows]
    if stage.op == "add_rows":
        return [(number, (x + len(rows)) % MODULUS, z) for number, x, z in rows]
    if stage.op == "empty" and rows[0][0] % 3 == stage.k % 3:
        return []
    return rows


def _children(rows: Block, stage: Stage) -> list[Block]:
    if stage.op == "slices":
        count = stage.k % 5 + 1
        return [rows[len(rows) * one // count : len(rows) * (one + 1) // count] for one in range(count)]
    first = rows[0][0]
    count = {"children": (first + stage.k) % 6, "copies": (first + stage.k) % 4, "same": stage.k % 4}[stage.op]
    return [[(number, (x + child) % MODULUS, z) for number, x, z in rows] for child in range(count)]


def _parquet_units(source: Source) -> list[list[tuple[int, int]]]:
    """By unit, (block, id) of each row: row groups that are not empty, in blocks of so many rows."""
    units, start = [], 0
    for groups in source.files:
        for rows in groups:
            if rows:
                units.append([(row // source.block_rows, start + row) for row in range(rows)])
            start += rows
    return units


def _tsv_units(source: Source) -> list[list[tuple[int, int]]]:
    """By unit, (0, id) of each row: those whose lines begin in a range of bytes."""
    units, number = [], 0
    for lines in lines_of(source):
        size, begins = sum(map(len, lines)), 0
        here: list[list[tuple[int, int]]] = [[] for _ in range(-(-size // source.unit_bytes))]
        for place, line in enumerate(lines):
            if place or "h" not in source.style:
                here[begins // source.unit_bytes].append((0, number))
                number += 1
            begins += len(line)
        units += here
    return units
