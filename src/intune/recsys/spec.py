"""Which columns of a block become which arrays of a batch, written down once and checked before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import PipelineError, SourceError
from intune.pipeline.blocks import Array, Block
from intune.pipeline.chain import Pipeline
from intune.recsys._columns import Column, check_kind, is_time, labels, naming, plain, plain_type, problems_with
from intune.recsys.features import Encoder, Number
from intune.recsys.hashing import Cross
from intune.recsys.lists import MultiHot, Padded


@dataclass(frozen=True)
class Dense:
    """A column of numbers, one column of the output `dense`.

    Attributes:
        column: Its name.
        number: How its numbers become float32.
    """

    column: str
    number: Number = field(default_factory=Number)

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("the column", self.column, str)
        check_kind(f"the number of {self.column!r}", self.number, Number)

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads."""
        return (self.column,)

    def problems(self, schema: pa.Schema) -> list[str]:
        """What is wrong with the column of a schema, a sentence each."""
        return problems_with(schema, self.column, self.number)

    def __call__(self, batch: pa.RecordBatch) -> npt.NDArray[np.float32]:
        """float32[n]; a SourceError names the column."""
        with naming(self.column):
            return self.number(batch.column(self.column))


@dataclass(frozen=True)
class Sparse:
    """A category, one column of the output `sparse`: of one column, or of several crossed.

    Attributes:
        column: Its name; for `Cross` a sequence of two names or more.
        encoder: What makes rows of a table of it.
    """

    column: str | Sequence[str]
    encoder: Encoder | Cross

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind(f"the encoder of {self.column!r}", self.encoder, Encoder, Cross)
        for name in (self.column,) if isinstance(self.column, str) else self.column:
            check_kind("each column", name, str)
        crossed = isinstance(self.encoder, Cross)
        if crossed is isinstance(self.column, str) or (crossed and len(self.column) < 2):
            expected = "two columns or more" if crossed else "one column"
            raise PipelineError(f"{type(self.encoder).__name__} takes {expected}, got {self.column!r}")
        if not isinstance(self.column, str):
            object.__setattr__(self, "column", tuple(self.column))
        if isinstance(self.encoder, Cross) and self.encoder.encoders and len(self.encoder.encoders) != len(self.column):
            raise PipelineError(f"{len(self.encoder.encoders)} encoders for the columns {self.column} to cross")

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads."""
        return (self.column,) if isinstance(self.column, str) else tuple(self.column)

    def problems(self, schema: pa.Schema) -> list[str]:
        """What is wrong with the columns of a schema, a sentence each."""
        if not isinstance(self.encoder, Cross):
            return problems_with(schema, self.columns[0], self.encoder)
        takers = [(name, self.encoder.encoder_of(place)) for place, name in enumerate(self.columns)]
        return [problem for name, taker in takers for problem in problems_with(schema, name, taker)]

    def __call__(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """int64[n]; a SourceError names the column or columns."""
        columns = [batch.column(name) for name in self.columns]
        with naming(" x ".join(self.columns)):
            return self.encoder(columns) if isinstance(self.encoder, Cross) else self.encoder(columns[0])


Lists: TypeAlias = MultiHot | Padded


@dataclass(frozen=True)
class FeatureSpec:
    """A block function: the named columns in, the arrays of a batch out.

        spec = FeatureSpec(
            label="click",
            dense=[Dense("price", Number(low=0, log=True))],
            sparse=[Sparse("user", Hash(1_000_000)), Sparse(("user", "hour"), Cross(100_000))],
            lists=[MultiHot("items_seen", Vocabulary.from_parquet("items.parquet", "id"), most=50)],
        )
        pipe = intune.read_parquet(paths, columns=spec.columns)
        spec.check(pipe)
        pipe.map(spec).shuffle(500_000).batch(8192).to_torch()

    Picklable, without state, safe in several threads at once. The columns of a block are checked as `check` does.

    Attributes:
        dense: Columns of `dense`, in this order.
        sparse: Columns of `sparse`, in this order.
        lists: Outputs of their own: `MultiHot` and `Padded`.
        label: The column with 0 or 1 (or booleans) that becomes `label`; None: no label
            (`dataclasses.replace(spec, label=None)` serves data without one).
    """

    dense: Sequence[Dense] = ()
    sparse: Sequence[Sparse] = ()
    lists: Sequence[Lists] = ()
    label: str | None = None

    def __post_init__(self) -> None:
        """Check that there are outputs, each with a name of its own."""
        check_kind("the label", self.label, str, type(None))
        kinds: dict[str, tuple[type, ...]] = {"dense": (Dense,), "sparse": (Sparse,), "lists": (MultiHot, Padded)}
        for part, allowed in kinds.items():
            check_kind(part, getattr(self, part), Sequence)
            object.__setattr__(self, part, tuple(getattr(self, part)))
            for feature in getattr(self, part):
                check_kind(f"each of {part}", feature, *allowed)
        if not self.outputs:
            raise PipelineError("a spec needs at least one of dense, sparse, lists and label")
        twice = sorted({name for name in self.outputs if self.outputs.count(name) > 1})
        if twice:
            raise PipelineError(f"several outputs are called {twice}: give lists other names with name=")

    @property
    def columns(self) -> tuple[str, ...]:
        """What to read: each column once."""
        features = (*self.dense, *self.sparse, *self.lists)
        names = [name for feature in features for name in feature.columns]
        return tuple(dict.fromkeys(names if self.label is None else [self.label, *names]))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a block becomes, in their order."""
        groups = {"label": self.label is not None, "dense": self.dense, "sparse": self.sparse}
        names = [name for name, there in groups.items() if there]
        return (*names, *(name for feature in self.lists for name in feature.outputs))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of the embedding table of each column of `sparse`."""
        return tuple(feature.encoder.table_rows for feature in self.sparse)

    @property
    def list_table_rows(self) -> dict[str, int]:
        """Rows of the embedding table of each of `lists`, by the name of its output."""
        return {feature.outputs[0]: feature.encoder.table_rows for feature in self.lists}

    def check(self, columns: pa.Schema | Pipeline) -> None:
        """Check that the columns are there, of types that are taken; nothing is read.

        Args:
            columns: A pipeline that reads blocks, without further stages; or the schema of blocks, as
                `pyarrow.parquet.read_schema` gives it. Other columns do not matter.

        Raises:
            SourceError: If a column is not there, there twice, or of another type; all such are listed, each with
                its type and what is allowed. For a pipeline of Parquet files with the first file that has such.
            PipelineError: If the pipeline does more than reading, or gives samples.
        """
        if isinstance(columns, pa.Schema):
            _refuse("the columns", self._problems(columns))
            return
        schema = getattr(columns.source, "schema", None)
        if columns.stages or schema is None:
            raise PipelineError("check takes a schema, or a pipeline that reads blocks and has no other stage yet")
        problems = self._problems(schema)
        for path, of_file in getattr(columns.source, "file_schemas", ()) if problems else ():
            _refuse(f"the columns of {path}", self._problems(of_file))
        _refuse("the columns", problems)

    def _problems(self, schema: pa.Schema) -> list[str]:
        """What is wrong with a schema, a sentence each."""
        problems = [] if self.label is None else problems_with(schema, self.label, _Label())
        for feature in (*self.dense, *self.sparse, *self.lists):
            problems += feature.problems(schema)
        return list(dict.fromkeys(problems))

    def __call__(self, block: Block) -> Block:
        """Transform one block of n rows.

        Args:
            block: A record batch, or a dict of arrays [n] or, for lists of one length, [n, length].

        Returns:
            Of the outputs that the spec has: `label` float32[n], `dense` float32[n, columns], `sparse`
            int64[n, columns], and those of `lists`. A dict of arrays, which costs the least to shuffle and batch; if
            there is a `MultiHot`, whose rows differ in length, a record batch, where columns of arrays are fixed-size
            lists. `to_torch` makes the same tensors of both.

        Raises:
            SourceError: If columns do not fit the spec, or a value is not allowed; the message has column and row.
        """
        batch = self._batch(block)
        self.check(batch.schema)
        out: dict[str, Column] = {}
        if self.label is not None:
            out["label"] = labels(plain(batch.column(self.label)), self.label)
        if self.dense:
            out["dense"] = np.empty((batch.num_rows, len(self.dense)), np.float32)
            for j, dense in enumerate(self.dense):
                out["dense"][:, j] = dense(batch)
        if self.sparse:
            out["sparse"] = np.empty((batch.num_rows, len(self.sparse)), np.int64)
            for j, sparse in enumerate(self.sparse):
                out["sparse"][:, j] = sparse(batch)
        for feature in self.lists:
            out.update(feature(batch))
        if not any(isinstance(column, pa.Array) for column in out.values()):
            return out
        return pa.RecordBatch.from_arrays([_as_arrow(column) for column in out.values()], names=list(out))

    def _batch(self, block: Block) -> pa.RecordBatch:
        """The columns as Arrow; of numpy arrays those only that are wanted."""
        if isinstance(block, pa.RecordBatch):
            return block
        columns = {}
        for name in self.columns:
            if name in block:
                with naming(name):
                    columns[name] = _as_arrow(block[name])
        if len(lengths := {len(column) for column in columns.values()}) > 1:
            raise SourceError(f"the columns have {sorted(lengths)} rows: they must have equally many")
        return pa.RecordBatch.from_pydict(columns)


def _refuse(whose: str, problems: list[str]) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise SourceError(f"{whose} do not fit the features:\n  {lines}")


class _Label:
    """What a label may be."""

    expects = "integers, floats and booleans that are 0 or 1"

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column may have the type."""
        plain_kind = plain_type(kind)
        return not is_time(kind) and bool(pa.types.is_integer(plain_kind) or pa.types.is_floating(plain_kind))


def _as_arrow(column: Column | Array) -> pa.Array:
    """[n] as it is, [n, length] as lists of one length.

    Raises:
        TypeError: If the array has another shape, or values that Arrow does not have.
    """
    if isinstance(column, pa.Array):
        return column
    if column.ndim not in (1, 2):
        raise TypeError(f"expected an array [n], or [n, length] for lists, got one of shape {column.shape}")
    values = column.reshape(-1)
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    try:
        values = pa.array(values)
    except (pa.ArrowException, NotImplementedError) as error:
        raise TypeError(f"values of the numpy type {column.dtype} are not taken: {error}") from error
    if column.ndim == 1:
        return values
    if not column.shape[1]:  # which a fixed size may not be
        return pa.ListArray.from_arrays(np.zeros(len(column) + 1, np.int32), values)
    return pa.FixedSizeListArray.from_arrays(values, column.shape[1])
