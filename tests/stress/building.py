"""The real thing from a description: its source, files included, its pipeline and its loader."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import intune
from intune import Allocation, Budget, Pipeline, Snapshot, Tuner
from intune.tuners import RandomMoves, make_tuner

from .pipelines import MODULUS, Description, Function, Source, Stage, error_at, first_row, links, made_of, text


def sample(number: int, form: str) -> Any:
    """A row as a sample."""
    ids, x, z = first_row(number)
    if form == "int":
        return ids * MODULUS + x
    if form == "tuple":
        return ids, x, z
    return {"id": ids, "x": x, "z": z, "v": np.array([ids, 2 * ids])}


@dataclass(frozen=True)
class Samples:
    """An iterable or a dataset."""

    source: Source

    def __getitem__(self, number: int) -> Any:
        """One sample."""
        if number == self.source.fails_at:
            raise error_at(self.source.error, number)
        return sample(number, self.source.form)


class Unsized(Samples):
    """An iterable that does not say how long it is."""

    def __iter__(self) -> Iterator[Any]:
        """A pass."""
        return (self[number] for number in range(self.source.rows))


class Dataset(Samples):
    """A map-style dataset."""

    def __len__(self) -> int:
        """Its samples."""
        return self.source.rows


def sampler_order(source: Source, epoch: int, rank: int) -> list[int]:
    """Numbers that a sampler gives: some twice, some never."""
    drawn = np.random.default_rng([source.rows, epoch, rank]).integers(0, max(1, source.rows), source.rows * 3 // 4)
    return [int(number) for number in drawn]


class Sampler:
    """A sampler of one rank."""

    def __init__(self, source: Source, rank: int) -> None:
        self._source, self._rank, self._epoch = source, rank, 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is for this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """A pass."""
        return iter(sampler_order(self._source, self._epoch, self._rank))


PARQUET_SCHEMA = pa.schema(
    [("id", pa.int64()), ("x", pa.int64()), ("z", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int64()))]
)
TSV_SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64()), ("z", pa.int64()), ("s", pa.string())])


def lines_of(source: Source) -> list[list[bytes]]:
    """The lines of each TSV file, header and line ends included."""
    end = b"\r\n" if "r" in source.style else b"\n"
    files, start = [], 0
    for (rows,) in source.files:
        lines = [b"id\tx\tz\ts" + end] if "h" in source.style else []
        for number in range(start, start + rows):
            ids, x, z = first_row(number)
            value = "x" * len(str(x)) if number == source.fails_at else str(x)
            fields = [str(ids), value, str(z), text(number) or ""]
            lines.append("\t".join(fields).encode() + end)
        if rows and "e" in source.style:
            lines[-1] = lines[-1].removesuffix(end)
        files.append(lines)
        start += rows
    return files


def write_files(source: Source, folder: Path) -> None:
    """Write what a Parquet or TSV source reads."""
    if source.kind == "tsv":
        for number, lines in enumerate(lines_of(source)):
            (folder / f"{number}.tsv").write_bytes(b"".join(lines))
    if source.kind == "parquet":
        start = 0
        for number, groups in enumerate(source.files):
            with pq.ParquetWriter(folder / f"{number}.parquet", PARQUET_SCHEMA) as writer:
                for rows in groups:
                    ids = range(start, start + rows)
                    start += rows
                    values = [[*first_row(one), text(one), links(one)] for one in ids]
                    arrays = [[row[place] for row in values] for place in range(5)]
                    writer.write_table(pa.table(arrays, schema=PARQUET_SCHEMA))


def build(description: Description, folder: Path, rank: int, instances: list[Any]) -> Pipeline:
    """The pipeline; instances that its classes make stand in `instances` until they are closed."""
    pipe = _source(description.source, folder, rank)
    for number, stage in enumerate(description.stages, 1):
        pipe = _with_stage(pipe, stage, number, instances)
    return pipe


def _source(source: Source, folder: Path, rank: int) -> Pipeline:
    if source.kind == "list":
        return intune.from_iterable([sample(number, source.form) for number in range(source.rows)])
    if source.kind == "object":
        return intune.from_iterable(Unsized(source))
    if source.kind == "dataset":
        return intune.from_dataset(Dataset(source))
    if source.kind == "sampler":
        return intune.from_dataset(Dataset(source), sampler=Sampler(source, rank))
    if source.kind == "parquet":
        return intune.read_parquet(folder, block_rows=source.block_rows)
    return intune.read_tsv(folder, schema=TSV_SCHEMA, unit_bytes=source.unit_bytes, header="h" in source.style)


def _with_stage(pipe: Pipeline, stage: Stage, number: int, instances: list[Any]) -> Pipeline:
    if stage.kind == "shuffle":
        return pipe.shuffle(stage.size, seed=stage.seed)
    if stage.kind == "batch":
        return pipe.batch(stage.size, drop_last=stage.drop_last, collate=list if stage.collate else None)
    if stage.kind == "unbatch":
        return pipe.unbatch()
    if stage.kind == "to_torch":
        return pipe.to_torch(groups={"g": ["id", "x"]} if stage.grouped else None)
    function: Any = Function(stage.op, stage.k, stage.fails_at, stage.error, stage.lazy, stage.rng)
    if stage.made:
        function = made_of(function, instances if stage.executor == "thread" else [])
    method = getattr(pipe, stage.kind)
    result: Pipeline = method(
        function,
        name=f"stage {number}" if stage.named else None,
        executor=stage.executor,
        max_concurrency=stage.max_concurrency,
        waits=stage.waits,
        rng=stage.rng,
    )
    return result


class Tight:
    """Another tuner, but for the bytes in flight."""

    def __init__(self, tuner: Tuner, in_flight: int) -> None:
        self._tuner, self._in_flight = tuner, in_flight

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The other tuner's proposal with these bytes."""
        proposal = self._tuner.propose(snapshot, budget)
        return Allocation(proposal.concurrency, proposal.slots, self._in_flight, proposal.reasons)


def loader_of(description: Description, pipe: Pipeline, rank: int) -> intune.Loader:
    """The loader of one rank."""
    run = description.run
    tuner: Tuner = RandomMoves(run.seed) if run.tuner == "random" else make_tuner(run.tuner)
    return pipe.loader(
        memory=run.memory,
        tuner=tuner if run.in_flight is None else Tight(tuner, run.in_flight),
        cpus=run.cpus,
        seed=description.loader_seed,
        rank=rank,
        world_size=description.world_size,
        epochs=description.epochs if description.told else None,
        ordered=description.ordered,
        on_uneven=description.on_uneven,
        on_error="skip" if description.skip else "raise",
        max_ahead=run.max_ahead,
        prefetch=run.prefetch,
    )
