"""Pipelines as pure descriptions, and the functions that they are made of.

Rows are `(id, x, z)`: `id` and `x` decide what becomes of a row, `z` only takes up random numbers. Whatever form
rows take on their way (ints, tuples, dicts, Arrow, arrays, tensors), they can be read back by `rows_of`, which also
checks that the other columns still belong to their row.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

Row = tuple[int, int, int]
MODULUS = 10_007
"""x stays below; a sample that is one int is id * MODULUS + x."""


def first_row(number: int) -> Row:
    """The row with this id as the source has it."""
    return number, number * 31 % MODULUS, 0


def text(number: int) -> str | None:
    """Column `s` of a row."""
    return None if number % 5 == 0 else f"s{number}"


def links(number: int) -> list[int]:
    """Column `l` of a row."""
    return list(range(number % 4))


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        kind: "list", "object" (an iterable without length), "dataset", "sampler" (a dataset that has one),
            "parquet" or "tsv".
        rows: Rows in all; their ids are 0 to rows - 1.
        form: What a sample is: "int", "tuple", "dict"; "arrow" for files.
        files: For files: rows of each row group of each file (TSV: one group a file).
        block_rows: For Parquet: the most rows of a block.
        unit_bytes: For TSV: bytes of a unit.
        style: For TSV: header ("h"), CRLF ("r"), last line without end ("e").
        fails_at: The id at which reading fails.
        error: What it raises.
    """

    kind: str
    rows: int
    form: str
    files: tuple[tuple[int, ...], ...] = ()
    block_rows: int = 0
    unit_bytes: int = 0
    style: str = ""
    fails_at: int | None = None
    error: str = "value"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        kind: As in a chain.
        flow: What comes in: "block", "sample", "opaque".
        op: What the function does, see `Function`.
        k: Its number.
        rng: Whether it adds random numbers to z.
        made: Whether the function is a class.
        named: Whether it gets a name of its own.
        executor: Thread or process.
        max_concurrency: As in a chain.
        waits: As in a chain.
        fails_at: The id at which it fails.
        error: What it raises.
        lazy: flat_map: gives a generator, which fails half-way, not a list.
        size: Rows of a shuffle or batch.
        seed: Seed of a shuffle.
        drop_last: As in a chain.
        collate: Whether a batch of samples is a list.
        grouped: Whether to_torch puts columns side by side.
    """

    kind: str
    flow: str
    op: str = ""
    k: int = 0
    rng: bool = False
    made: bool = False
    named: bool = False
    executor: Any = "thread"
    max_concurrency: int | None = None
    waits: bool | None = None
    fails_at: int | None = None
    error: str = "value"
    lazy: bool = False
    size: int = 0
    seed: int | None = None
    drop_last: bool = False
    collate: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Run:
    """How a pipeline is run; nothing of it may change what comes out.

    Attributes:
        cpus: Slots.
        tuner: "shared", "even", "proportional" or "random".
        in_flight: Bytes in flight that the tuner allows.
        memory: As for a loader.
        max_ahead: As for a loader.
        prefetch: As for a loader.
        churn: Whether a thread applies random allocations all the time.
        ticks: Whether the tuner is asked each second.
        seed: Of the random tuner and of the churn.
    """

    cpus: int
    tuner: str = "shared"
    in_flight: int | None = None
    memory: str | None = None
    max_ahead: int | None = None
    prefetch: int = 2
    churn: bool = False
    ticks: bool = False
    seed: int = 0


@dataclass(frozen=True, repr=False)
class Description:
    """All of one random pipeline.

    Attributes:
        seed: What it was drawn from.
        source: Where rows come from.
        stages: What is done to them.
        form: What comes out.
        run: How it is run.
        loader_seed: The loader's seed.
        ordered: As for a loader.
        epochs: Epochs iterated.
        told: Whether the loader is told their number.
        world_size: Ranks; each is run.
        on_uneven: As for a loader.
        skip: Whether failures are left out.
        breaks: Leave the first epoch after this share of its items.
        resumes: Shares of an epoch at which a state is taken and another loader goes on.
        short_emissions: Whether shuffles give their windows in pieces of some rows instead of thousands.
    """

    seed: int
    source: Source
    stages: tuple[Stage, ...]
    form: str
    run: Run
    loader_seed: int = 0
    ordered: bool = True
    epochs: int = 1
    told: bool = False
    world_size: int = 1
    on_uneven: Any = None
    skip: bool = False
    breaks: float | None = None
    resumes: tuple[float, ...] = ()
    short_emissions: bool = False

    def __repr__(self) -> str:
        """What differs from the defaults."""
        return _short(self)

    @property
    def has_rng(self) -> bool:
        """Whether z is random."""
        return any(stage.rng for stage in self.stages)

    @property
    def fails_at(self) -> int | None:
        """The id at which something fails."""
        ids = [self.source.fails_at, *(stage.fails_at for stage in self.stages)]
        return next((number for number in ids if number is not None), None)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return "[" + ", ".join(map(_short, value)) + "]"
    if not is_dataclass(value):
        return repr(value)
    told = [(field, getattr(value, field.name)) for field in fields(value)]
    other = [f"{field.name}={_short(one)}" for field, one in told if one != field.default]
    return f"{type(value).__name__}({', '.join(other)})"


# --- what functions do


class Boom(Exception):
    """An error that cannot be made from its message alone."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)


def error_at(kind: str, number: int) -> Exception:
    """The error that a function raises at a row."""
    kinds: Mapping[str, Exception] = {
        "boom": Boom(number, "no luck"),
        "value": ValueError(f"row {number} is bad"),
        "key": KeyError(number),
        "stop": StopIteration(number),
    }
    return kinds[kind]


@dataclass(frozen=True)
class Function:
    """The function of a stage.

    * "add": x = 3 x + k, and random numbers onto z; "add_rows": x += rows of the block or batch.
    * "to_arrays", "to_arrow", "table", "thin": another form, or fewer columns.
    * "empty": blocks with a certain first id lose their rows. "keep", "none": filters.
    * "children": 0 to 5 of each sample. "slices", "copies" (how many depends on the first id), "same": of each block.
    """

    op: str
    k: int
    fails_at: int | None
    error: str
    lazy: bool
    rng: bool

    def __call__(self, item: Any, generator: Any = None) -> Any:
        """Apply it to one item."""
        if isinstance(item, list):  # collated
            return [self(sample, generator) for sample in item]
        fails = self._fails(item)
        if self.op in ("children", "slices", "copies", "same"):
            children = self._children(item, generator, fails)
            return children if self.lazy else list(children)
        if fails:
            raise error_at(self.error, self.fails_at or 0)
        return getattr(self, f"_{self.op}")(item, generator)

    def _fails(self, item: Any) -> bool:
        if self.fails_at is None:
            return False
        hit = columns(item)[0] == self.fails_at
        return hit if isinstance(hit, bool) else bool(hit.any())

    def _add(self, item: Any, generator: Any) -> Any:
        _, x, z = columns(item)
        return replaced(item, (3 * x + self.k) % MODULUS, self._noise(z, generator))

    def _add_rows(self, item: Any, generator: Any) -> Any:
        _, x, z = columns(item)
        return replaced(item, (x + len(x)) % MODULUS, z)

    def _to_arrays(self, item: Any, generator: Any) -> Any:
        ids, x, z = columns(item)
        return {"id": ids, "x": x, "z": z, "v": np.stack([ids, 2 * ids], axis=1)}

    def _to_arrow(self, item: Any, generator: Any) -> Any:
        ids, x, z = columns(item)
        v = pa.FixedSizeListArray.from_arrays(np.stack([ids, 2 * ids], axis=1).ravel(), 2)
        return pa.RecordBatch.from_pydict({"id": ids, "x": x, "z": z, "v": v})

    def _table(self, item: Any, generator: Any) -> Any:
        return pa.Table.from_batches([item])

    def _thin(self, item: Any, generator: Any) -> Any:
        if isinstance(item, pa.RecordBatch):
            return item.select(["id", "x", "z"])
        return {name: item[name] for name in ("id", "x", "z")}

    def _empty(self, item: Any, generator: Any) -> Any:
        return part(item, 0, 0) if int(columns(item)[0][0]) % 3 == self.k % 3 else item

    def _keep(self, item: Any, generator: Any) -> Any:
        ids, x, _ = columns(item)
        keep = (7 * ids + x) % (2 + self.k % 4) != 0
        return pa.array(keep) if isinstance(item, pa.RecordBatch) and self.k % 2 else keep

    def _none(self, item: Any, generator: Any) -> Any:
        ids = columns(item)[0]
        return ids != ids

    def _children(self, item: Any, generator: Any, fails: bool) -> Iterator[Any]:
        ids, x, z = columns(item)
        if self.op == "slices":
            count = self.k % 5 + 1
        elif self.op == "children":
            count = int(ids + self.k) % 6
        else:
            count = (self.k if self.op == "same" else int(ids[0]) + self.k) % 4
        for number in range(count):
            if fails and number == count // 2:
                break
            if self.op == "slices":
                yield part(item, len(ids) * number // count, len(ids) * (number + 1) // count)
            else:
                yield replaced(item, (x + number) % MODULUS, self._noise(z, generator))
        if fails:
            raise error_at(self.error, self.fails_at or 0)

    def _noise(self, z: Any, generator: Any) -> Any:
        if not self.rng:
            return z
        return z + (generator.integers(1, 1000, len(z)) if hasattr(z, "__len__") else int(generator.integers(1, 1000)))


def made_of(function: Function, instances: list[Any]) -> type:
    """A class whose instances do what a function does; those that are not closed stand in `instances`."""

    class Made:
        def __init__(self) -> None:
            instances.append(self)

        def __call__(self, *args: Any) -> Any:
            return function(*args)

        def close(self) -> None:
            instances.remove(self)

    return Made


def columns(item: Any) -> tuple[Any, Any, Any]:
    """id, x and z of an item: numbers, arrays or tensors."""
    if isinstance(item, pa.RecordBatch):
        return item.column("id").to_numpy(), item.column("x").to_numpy(), item.column("z").to_numpy()
    if isinstance(item, dict):
        return item["id"], item["x"], item["z"]
    if isinstance(item, tuple):
        return item
    return item // MODULUS, item % MODULUS, item * 0


def replaced(item: Any, x: Any, z: Any) -> Any:
    """The item with another x and z."""
    if isinstance(item, pa.RecordBatch):
        for name, values in (("x", x), ("z", z)):
            item = item.set_column(item.schema.get_field_index(name), name, pa.array(values))
        return item
    if isinstance(item, dict):
        return {**item, "x": x, "z": z}
    if isinstance(item, tuple):
        return item[0], x, z
    return item // MODULUS * MODULUS + x


def part(block: Any, start: int, stop: int) -> Any:
    """Some rows of a block."""
    if isinstance(block, dict):
        return {name: column[start:stop] for name, column in block.items()}
    return block.slice(start, stop - start)


# --- what came out


def rows_of(item: Any, form: str) -> list[Row]:
    """The rows of an item that a loader gave; checks what it is, and that its other columns belong to its rows."""
    kind, _, inner = form.rpartition(" ")
    if kind == "list":
        assert isinstance(item, list)
        return [row for sample in item for row in rows_of(sample, inner)]
    if kind == "torch":
        item = _from_torch(item)
    elif inner == "arrow":
        assert isinstance(item, pa.RecordBatch)
        item = item.to_pydict()
    if kind == "" and inner not in ("arrow", "arrays"):
        ids, x, z = ([value] for value in columns(item))
        item = {name: [value] for name, value in item.items()} if isinstance(item, dict) else {}
    else:
        if inner == "int":
            assert isinstance(item, np.ndarray)
        ids, x, z = (list(map(int, values)) for values in columns(item))
        item = item if isinstance(item, dict) else {}
    rows = [(int(i), int(a), int(b)) for i, a, b in zip(ids, x, z, strict=True)]
    for name, expected in (("s", text), ("l", links), ("v", lambda number: [number, 2 * number])):
        if name in item:
            got = [value if value is None or isinstance(value, str) else list(value) for value in item[name]]
            assert got == [expected(row[0]) for row in rows], f"column {name} has {got} at {rows}"
    return rows


def _from_torch(item: Any) -> Any:
    """The same as arrays, groups taken apart and lists put together."""
    if isinstance(item, tuple):
        return tuple(column.numpy() for column in item)
    if not isinstance(item, dict):
        return item.numpy()
    arrays: dict[str, Any] = {}
    for name, column in item.items():
        if name == "g":
            arrays["id"], arrays["x"] = column.numpy()[:, 0], column.numpy()[:, 1]
        elif isinstance(column, tuple):
            values, offsets = (part.numpy() for part in column)
            arrays[name] = [values[start:stop].tolist() for start, stop in pairwise(offsets)]
        else:
            arrays[name] = column.numpy()
    return arrays
