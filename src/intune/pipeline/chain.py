"""A pipeline: the definition, a chain of stages over a source. Nothing runs before a loader is made."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from intune._errors import PipelineError
from intune.pipeline.calls import Flow
from intune.pipeline.options import LoaderOptions
from intune.pipeline.source import BlockSource, Source

if TYPE_CHECKING:
    from intune._values import Tuner
    from intune.pipeline.loader import Loader
    from intune.pipeline.order import OnUneven

Executor = Literal["thread", "process", "auto"]


@dataclass(frozen=True)
class Stage:
    """One stage of a chain, as it was written.

    Attributes:
        name: Unique in its pipeline.
        kind: "map", "flat_map", "map_rows", "filter", "shuffle", "batch", "unbatch" or "to_torch".
        flow: What comes in.
        gives: What goes out.
        function: The user's function, for the kinds that have one.
        executor: "thread", "process" or "auto".
        max_concurrency: The most items that it may work on at once; None = no limit of its own.
        waits: Whether it waits instead of computing; None = to be measured.
        rng: Whether the function gets a seeded generator.
        options: What else was given, as JSON.
    """

    name: str
    kind: str
    flow: Flow
    gives: Flow
    function: Callable[..., Any] | None = None
    executor: Executor = "thread"
    max_concurrency: int | None = None
    waits: bool | None = None
    rng: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Pipeline:
    """A chain of stages; each method gives a new pipeline and leaves this one as it is.

    Made by `read_parquet`, `read_tsv`, `from_iterable` or `from_dataset`.
    """

    def __init__(self, source: Source, stages: tuple[Stage, ...] = ()) -> None:
        self.source = source
        self.stages = stages

    @property
    def flow(self) -> Flow:
        """What comes out at the end: "block", "sample" or "opaque"."""
        if self.stages:
            return self.stages[-1].gives
        return "block" if isinstance(self.source, BlockSource) else "sample"

    def map(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        executor: Executor = "thread",
        max_concurrency: int | None = None,
        waits: bool | None = None,
        rng: bool = False,
    ) -> "Pipeline":
        """Apply a function to each item as it flows: a block gives a block, a sample gives a sample.

        Args:
            function: Gets one item, gives one. A block function gives a RecordBatch or a dict of arrays,
                never gets 0 rows, and may give 0. A class is made once for each worker. Must be
                deterministic given its arguments.
            name: Name of the stage; by default the function's.
            executor: "thread" for what releases the interpreter lock, "process" for what holds it; "auto" to have
                that measured on the first items, decided once and noted in the journal. What global generators of
                random numbers give may then depend on the decision: draw from `rng` instead.
            max_concurrency: The most items at once; 1 for what is not safe in parallel.
            waits: True for what waits (network, sleeps) and so needs no CPU slot; None measures it.
            rng: Also pass a numpy Generator that is seeded by (seed, epoch, stage, item).

        Raises:
            PipelineError: If an option is not allowed.
        """
        return self._call("map", function, name, executor, max_concurrency, waits, rng, gives=self.flow)

    def flat_map(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        executor: Executor = "thread",
        max_concurrency: int | None = None,
        waits: bool | None = None,
        rng: bool = False,
    ) -> "Pipeline":
        """Apply a function that gives an iterable of items, drawn as they are needed.

        In a process stage the iterable is drawn to its end before the first item goes on. Arguments as
        for `map`.
        """
        self._no_opaque("flat_map")
        return self._call("flat_map", function, name, executor, max_concurrency, waits, rng, gives=self.flow)

    def map_rows(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        executor: Executor = "thread",
        max_concurrency: int | None = None,
        waits: bool | None = None,
        rng: bool = False,
    ) -> "Pipeline":
        """Apply a function to each row (a dict) of each block; it gives a dict. Arguments as for `map`."""
        if self.flow != "block":
            raise PipelineError(f"map_rows needs blocks, but {self._last()} gives {self.flow}s: use map")
        return self._call("map_rows", function, name, executor, max_concurrency, waits, rng, gives="block")

    def filter(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        executor: Executor = "thread",
        max_concurrency: int | None = None,
        waits: bool | None = None,
        rng: bool = False,
    ) -> "Pipeline":
        """Keep what a function says: one bool for a sample, bool[n] for a block of n rows. Arguments as for `map`."""
        self._no_opaque("filter")
        return self._call("filter", function, name, executor, max_concurrency, waits, rng, gives=self.flow)

    def shuffle(self, rows: int, *, seed: int | None = None) -> "Pipeline":
        """Permute rows inside windows of `rows` rows; also permutes the order of the source's units.

        The first windows are smaller (rows/16, /8, /4, /2), so that the first batch comes soon. Two
        windows are held in memory.

        Args:
            rows: Rows of a window, at least 1.
            seed: Overrides the loader's seed for these windows and, in the first shuffle, for the units.

        Raises:
            PipelineError: If rows is below 1, or after `batch`.
        """
        if not _is_int(rows) or rows < 1:
            raise PipelineError(f"shuffle needs rows >= 1, got {rows!r}")
        if seed is not None and (not _is_int(seed) or seed < 0):
            raise PipelineError(f"shuffle needs a seed >= 0 or None, got {seed!r}")
        if any(stage.kind == "batch" for stage in self.stages):
            raise PipelineError("shuffle after batch would permute rows across batches: put shuffle before batch")
        self._no_opaque("shuffle")
        return self._add("shuffle", None, None, self.flow, options={"rows": rows, "seed": seed})

    def batch(self, size: int, *, drop_last: bool = False, collate: Callable[..., Any] | None = None) -> "Pipeline":
        """Cut rows into batches of `size`: blocks are re-cut, samples are stacked.

        Samples that are dicts give a dict of arrays, tuples and scalars the same structure of arrays,
        torch tensors are stacked by torch.

        Args:
            size: Rows of a batch, at least 1.
            drop_last: Leave a last batch that is not full out.
            collate: Gets the list of samples instead and gives any object; only `map` and `to_torch` may follow.

        Raises:
            PipelineError: If size is below 1, or items have been collated before.
        """
        if not _is_int(size) or size < 1:
            raise PipelineError(f"batch needs a size >= 1, got {size!r}")
        self._no_opaque("batch")
        if collate is not None and self.flow != "sample":
            raise PipelineError("collate= is for samples, but these are blocks: use map after batch")
        gives: Flow = "block" if self.flow == "block" else "opaque"
        return self._add("batch", collate, None, gives, options={"size": size, "drop_last": bool(drop_last)})

    def unbatch(self) -> "Pipeline":
        """Give the rows of blocks one by one, as samples: a dict a row."""
        if self.flow != "block":
            raise PipelineError(f"unbatch needs blocks, but {self._last()} gives {self.flow}s")
        return self._add("unbatch", None, None, "sample")

    def to_torch(
        self, device: Any = "cpu", *, groups: Mapping[str, Sequence[str]] | None = None, name: str | None = None
    ) -> "Pipeline":
        """Give dicts of tensors; the last stage but for `map`.

        Args:
            device: Where tensors go; other devices than "cpu" get them through pinned memory.
            groups: By name, columns to be put side by side in one tensor [n, columns]; columns that stand in
                no group keep their own name.
            name: Name of the stage.

        Raises:
            PipelineError: If what comes in are single samples.
        """
        if self.flow == "sample":
            raise PipelineError("to_torch needs blocks or batches, but gets single samples: use batch first")
        if any(stage.kind == "to_torch" for stage in self.stages):
            raise PipelineError("to_torch stands in the chain already")
        from intune.pipeline.tensors import ToTorch  # pulls in nothing of torch before the first batch

        chosen = {key: list(columns) for key, columns in (groups or {}).items()}
        function = ToTorch(str(device), chosen)
        return self._add("to_torch", function, name, "opaque", options={"device": str(device), "groups": chosen})

    def take(self, count: int) -> list[Any]:
        """The first `count` items, for a look; runs the pipeline with a loader of its own."""
        taken: list[Any] = []
        if count < 1:
            return taken
        with self.loader() as loader:
            for item in loader:
                taken.append(item)
                if len(taken) == count:
                    break
        return taken

    def loader(
        self,
        *,
        memory: str | int | float | None = None,
        tuner: "str | Tuner" = "model",
        cpus: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        epochs: int | None = None,
        ordered: bool = True,
        on_uneven: "OnUneven | None" = None,
        on_error: Literal["raise", "skip"] = "raise",
        journal: Any = None,
        max_ahead: int | None = None,
        prefetch: int | None = None,
    ) -> "Loader":
        """Make what runs the pipeline: iterate it like a PyTorch loader.

        Args:
            memory: Limit for the whole process tree: bytes, "24GiB", or a share of the machine's (0 to 1);
                None = the tightest limit that the system sets.
            tuner: A name ("model", "shared" and others, see `intune.tuners`) or an object with `propose`.
            cpus: CPU slots; None = what the machine, its cgroup and the other ranks on it leave.
            seed: Seed of shuffles and of functions with rng=True.
            rank: This rank; None = from RANK, else 0.
            world_size: Number of ranks; None = from WORLD_SIZE, else 1.
            epochs: Number of epochs that will be asked for; lets an epoch begin while the last one ends.
            ordered: False gives items as they come, and then there is no state_dict.
            on_uneven: Where rows do not divide by ranks: "drop" the remainder, "pad" by repeating rows
                (blocks mark them in a column "is_padding"; samples of a dataset come unmarked), or "uneven". None =
                "drop" where rows can be counted, else an error.
            on_error: "skip" leaves out what a function or the reader fails on, counts and names it.
            journal: Path of the file that each decision is written to; None = memory only.
            max_ahead: The most items past the lowest unfinished one; None = slots + max(4, slots // 2).
            prefetch: Batches that may wait for the consumer; None = as many as may be worked on at once, and up to
                four times as many for a consumer that pauses though it is the faster one, while they and all else in
                flight hold less than half of what they may.

        Raises:
            PipelineError: If options contradict each other or the chain, or the journal cannot be written.
        """
        from intune._compose import build_loader  # the composition root knows us, we do not know it

        options = LoaderOptions(
            memory=memory,
            tuner=tuner,
            cpus=cpus,
            seed=seed,
            rank=rank,
            world_size=world_size,
            epochs=epochs,
            ordered=ordered,
            on_uneven=on_uneven,
            on_error=on_error,
            journal=journal,
            max_ahead=max_ahead,
            prefetch=prefetch,
        )
        return build_loader(self, options)

    def __repr__(self) -> str:
        """The chain in one line."""
        return " -> ".join([self.source.kind, *(stage.name for stage in self.stages)])

    def _call(
        self,
        kind: str,
        function: Callable[..., Any],
        name: str | None,
        executor: Executor,
        max_concurrency: int | None,
        waits: bool | None,
        rng: bool,
        *,
        gives: Flow,
    ) -> "Pipeline":
        title = name or _name_of(function, kind)
        if not callable(function):
            raise PipelineError(f"stage {title!r}: {kind} needs a function, got {type(function).__name__}")
        if executor not in ("thread", "process", "auto"):
            raise PipelineError(f"stage {title!r}: executor must be 'thread', 'process' or 'auto', got {executor!r}")
        if executor == "auto" and kind == "flat_map":
            how = "flat_map draws lazily in a thread, or as a list in a process"
            raise PipelineError(f"stage {title!r}: {how}: say which")
        if max_concurrency is not None and (not _is_int(max_concurrency) or max_concurrency < 1):
            raise PipelineError(f"stage {title!r}: max_concurrency must be at least 1 or None, got {max_concurrency!r}")
        if executor == "process" and waits:
            raise PipelineError(f"stage {title!r}: waits=True is for threads; a process stage holds a slot")
        pipeline = self._add(kind, function, name, gives)
        stage = replace(
            pipeline.stages[-1],
            executor=executor,
            max_concurrency=max_concurrency,
            waits=False if executor == "process" else waits,
            rng=rng,
        )
        return Pipeline(self.source, (*self.stages, stage))

    def _add(
        self,
        kind: str,
        function: Callable[..., Any] | None,
        name: str | None,
        gives: Flow,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> "Pipeline":
        if any(stage.kind == "to_torch" for stage in self.stages) and kind != "map":
            raise PipelineError(f"{kind} after to_torch: only map may follow it")
        taken = {self.source.kind, *(stage.name for stage in self.stages)}
        if name is not None and name in taken:
            raise PipelineError(f"stage name {name!r} stands in the chain already: {sorted(taken)}")
        base = name or (_name_of(function, kind) if function is not None and kind not in _OWN_NAME else kind)
        unique, number = base, 2
        while unique in taken:
            unique, number = f"{base}_{number}", number + 1
        stage = Stage(unique, kind, self.flow, gives, function, waits=False, options=dict(options or {}))
        return Pipeline(self.source, (*self.stages, stage))

    def _no_opaque(self, kind: str) -> None:
        if self.flow == "opaque":
            raise PipelineError(f"{kind} cannot follow {self._last()}, which gives objects that only map may change")

    def _last(self) -> str:
        return self.stages[-1].name if self.stages else self.source.kind


_OWN_NAME = ("shuffle", "batch", "unbatch", "to_torch")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name_of(function: Any, kind: str) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func, kind)
    name = getattr(function, "__name__", None) or type(function).__name__
    return kind if name == "<lambda>" else str(name)


def stage_names(stages: Iterable[Stage]) -> list[str]:
    """Names of stages, in order."""
    return [stage.name for stage in stages]
