"""A random pipeline from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .building import lines_of
from .pipelines import Description, Run, Source, Stage

T = TypeVar("T")

PROCESS_SHARE = 0.06
"""Of pipelines with a stage in processes: to start one takes a fifth of a second."""


class Dice:
    """Draws from a seed."""

    def __init__(self, *seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def chance(self, share: float) -> bool:
        """True in a share of cases."""
        return bool(self._generator.random() < share)

    def whole(self, low: int, high: int) -> int:
        """One of low to high, both included."""
        return int(self._generator.integers(low, high + 1))

    def size(self, low: int, high: int) -> int:
        """One of low to high, small ones as often as large ones."""
        return min(high, int(low * (high / low) ** self._generator.random() + 0.5)) if high > low else low

    def share(self) -> float:
        """0 to 1, both included."""
        return float(self._generator.integers(0, 65) / 64)

    def one(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.whole(0, len(options) - 1)]

    def weighted(self, options: dict[str, float]) -> str:
        """One of them, some more often."""
        shares = np.array(list(options.values()))
        return str(self._generator.choice(list(options), p=shares / shares.sum()))


def draw(seed: int) -> Description:
    """The pipeline of a seed."""
    dice = Dice(seed)
    process = dice.chance(PROCESS_SHARE)
    source = _source(dice, 200 if process else 1200)
    ordered = dice.chance(0.85)
    world_size = 1 if process or dice.chance(0.85) else dice.whole(2, 4)
    uneven = _on_uneven(dice, source, world_size)
    keeps_rows = world_size > 1 and uneven != "uneven"
    stages, form = _Chain(dice, source, ordered, keeps_rows).draw()
    if process:
        stages = _in_processes(dice, stages)
    source, stages = _with_failure(dice, source, stages) if dice.chance(0.25) else (source, stages)
    failing = source.fails_at is not None or any(stage.fails_at is not None for stage in stages)
    can_skip = source.fails_at is None or source.kind != "object"  # an iterator that raised is at its end
    return Description(
        seed,
        source,
        stages,
        form,
        _run(dice, stages),
        loader_seed=dice.whole(0, 3),
        ordered=ordered,
        epochs=dice.whole(1, 3),
        told=dice.chance(0.5),
        world_size=world_size,
        on_uneven=uneven,
        skip=can_skip and dice.chance(0.5 if failing else 0.1),
        breaks=dice.share() if dice.chance(0.3) else None,
        resumes=tuple(dice.share() for _ in range(dice.whole(0, 2))) if ordered else (),
        short_emissions=dice.chance(0.5),
    )


def otherwise(description: Description, *salt: int) -> Description:
    """The same rows by a machine of another size, another tuner, threads instead of processes."""
    dice = Dice(description.seed, *salt, 1)
    stages = tuple(
        replace(stage, executor="thread", waits=_waits(dice), max_concurrency=_most(dice)) if stage.op else stage
        for stage in description.stages
    )
    return replace(description, stages=stages, run=_run(dice, stages))


def with_shuffles(description: Description, rows_by_stage: dict[int, int]) -> Description:
    """The same with other rows in some shuffles, by number of the stage."""
    stages = tuple(
        replace(stage, size=rows_by_stage.get(number, stage.size)) for number, stage in enumerate(description.stages)
    )
    return replace(description, stages=stages)


def _source(dice: Dice, most: int) -> Source:
    kind = dice.one(("list", "object", "dataset", "sampler", "parquet", "parquet", "parquet", "tsv", "tsv"))
    amount = dice.weighted({"none": 0.03, "few": 0.2, "some": 0.6, "many": 0.17})
    rows = {"none": 0, "few": dice.whole(1, 20), "some": dice.whole(20, 300), "many": dice.whole(300, 1200)}[amount]
    rows = min(rows, most)
    if kind == "parquet":
        files = _cut_into_files(dice, rows)
        return Source(kind, rows, "arrow", files, block_rows=dice.size(max(1, rows // 200), max(1, rows)))
    if kind == "tsv":
        files = tuple((sum(groups),) for groups in _cut_into_files(dice, rows))
        source = Source(kind, rows, "arrow", files, style="".join(s for s in "hre" if dice.chance(0.3)))
        size = sum(len(line) for lines in lines_of(source) for line in lines)
        return replace(source, unit_bytes=dice.size(max(1, size // 300), max(2, size)))
    return Source(kind, rows, dice.one(("int", "tuple", "dict")))


def _cut_into_files(dice: Dice, rows: int) -> tuple[tuple[int, ...], ...]:
    """Row groups of 1 to 4 files, some of them empty."""
    files = []
    for left_files in range(dice.whole(1, 4), 0, -1):
        here = rows if left_files == 1 else dice.whole(0, rows)
        rows -= here
        groups = []
        for left in range(dice.whole(1, 6), 0, -1):
            group = here if left == 1 else (0 if dice.chance(0.15) else dice.whole(0, here))
            here -= group
            groups.append(group)
        files.append(tuple(groups))
    return tuple(files)


def _on_uneven(dice: Dice, source: Source, world_size: int) -> Any:
    if world_size == 1:
        return None
    return dice.one(["drop", "uneven", "uneven"] + ["pad"] * (source.form == "arrow"))


class _Chain:
    """Draws stages one after another, each legal after those before.

    Args:
        dice: The draws.
        source: Where rows come from.
        ordered: Without order, what a function makes of a row may not depend on the rows beside it.
        keeps_rows: Whether no stage may change the number of rows, as several ranks run.
    """

    def __init__(self, dice: Dice, source: Source, ordered: bool, keeps_rows: bool) -> None:
        self._dice, self._source, self._ordered, self._keeps = dice, source, ordered, keeps_rows
        self.form = source.form
        self.flow = "block" if source.form == "arrow" else "sample"
        self.extras = {"parquet": {"s", "l"}, "tsv": {"s"}}.get(source.kind, set())
        self.row_of = ""
        self.stages: list[Stage] = []
        self.grown = 0

    def draw(self) -> tuple[tuple[Stage, ...], str]:
        """The stages, and what comes out."""
        count = self._dice.one((0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6))
        if count and self.flow == "block" and self._dice.chance(0.4):
            self._map("to_arrays")
        while len(self.stages) < count:
            getattr(self, f"_{self._dice.weighted(self._kinds())}")()
            if self.stages[-1].grouped:
                break
        return tuple(self.stages), self.form

    def _kinds(self) -> dict[str, float]:
        batched = any(stage.kind == "batch" for stage in self.stages)
        if self.flow == "opaque":
            torch = 0.0 if self.form.startswith(("torch", "list")) else 1.0
            return {"map": 2.0, "to_torch": torch}
        kinds = {"map": 3.0, "batch": 3.0}
        if not batched:
            kinds["shuffle"] = 2.5
        if not self._keeps:
            kinds["filter"] = 2.0
            kinds["flat_map"] = 2.0 if self.grown < (2 if self._source.rows <= 300 else 1) else 0.0
        if self.flow == "block":
            kinds |= {"map_rows": 1.5, "unbatch": 1.5, "to_torch": 1.0}
        return kinds

    @property
    def _depends_on_order(self) -> bool:
        """Whether blocks are cut otherwise each time."""
        return not self._ordered and any(stage.kind in ("shuffle", "batch") for stage in self.stages)

    def _add(self, kind: str, op: str, **more: Any) -> None:
        dice = self._dice
        called: dict[str, Any] = {"named": dice.chance(0.3), "max_concurrency": _most(dice), "waits": _waits(dice)}
        called |= {"made": dice.chance(0.1), "k": dice.whole(0, 99)}
        self.stages.append(Stage(kind, self.flow, op, **(called if op else {}), **more))

    def _map(self, op: str = "") -> None:
        dice, ops = self._dice, ["add", "add"]
        if self.flow == "block":
            ops += ["thin"]
            ops += ["to_arrays", "table"] if self.form == "arrow" else ["to_arrow"]
            if not self._depends_on_order:
                ops += ["add_rows"] + ([] if self._keeps else ["empty"])
        elif self.flow == "opaque" and self._ordered and not self.form.startswith("list") and "int" not in self.form:
            ops += ["add_rows"]
        op = op or dice.one(ops)
        self._add("map", op, rng=self._rng(op))
        if op in ("to_arrays", "to_arrow"):
            self.form, self.extras = op[3:], {"v"}
        elif op == "thin":
            self.extras = set()

    def _map_rows(self) -> None:
        op = self._dice.one(("add", "add", "thin"))
        self._add("map_rows", op, rng=self._rng(op))
        if op == "thin":
            self.extras = set()

    def _filter(self) -> None:
        self._add("filter", "none" if self._dice.chance(0.05) else "keep")

    def _flat_map(self) -> None:
        self.grown += 1
        if self.flow == "sample":
            op = "children"
        else:
            op = self._dice.one(("slices", "same") if self._depends_on_order else ("slices", "same", "copies"))
        self._add("flat_map", op, lazy=self._dice.chance(0.7), rng=op != "slices" and self._rng("add"))

    def _shuffle(self) -> None:
        seed = self._dice.whole(0, 5) if self._dice.chance(0.3) else None
        self._add("shuffle", "", size=self._dice.size(1, 2 * max(1, self._source.rows)), seed=seed)

    def _batch(self) -> None:
        dice = self._dice
        collate = False
        if self.flow == "sample":
            collate = dice.chance(0.2)
            if not collate and self.form == "row" and self.extras - ({"v"} if self.row_of == "arrays" else set()):
                self._add("map", "thin")
                self.extras = set()
        # Without order another batch may be the last one, so that nothing which counts rows may follow.
        drop_last = dice.chance(0.3) and (self._ordered or self.flow == "sample")
        self._add("batch", "", size=dice.whole(1, 50), drop_last=drop_last, collate=collate)
        if self.flow == "sample":
            self.flow, self.form = "opaque", ("list " if collate else "stack ") + self.form

    def _unbatch(self) -> None:
        self._add("unbatch", "")
        self.row_of, self.flow, self.form = self.form, "sample", "row"

    def _to_torch(self) -> None:
        if self.flow == "block" and "s" in self.extras:
            self._add("map", "thin")
            self.extras = set()
        grouped = self._dice.chance(0.3) and not any(kind in self.form for kind in ("int", "tuple"))
        self._add("to_torch", "", grouped=grouped)
        self.flow, self.form = "opaque", "torch " + self.form.removeprefix("stack ")

    def _rng(self, op: str) -> bool:
        listed = self.form.startswith(("list", "torch"))
        return op == "add" and "int" not in self.form and not listed and self._dice.chance(0.15)


def _most(dice: Dice) -> int | None:
    return dice.whole(1, 3) if dice.chance(0.2) else None


def _waits(dice: Dice) -> bool | None:
    return dice.one((None, True, False)) if dice.chance(0.4) else None


def _in_processes(dice: Dice, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    before = next((number for number, stage in enumerate(stages) if stage.kind == "to_torch"), len(stages))
    able = [number for number, stage in enumerate(stages[:before]) if stage.op]  # torch takes seconds to import
    if not able:
        return stages
    chosen = dice.one(able)
    return tuple(
        replace(stage, executor="process", waits=None, max_concurrency=dice.one((1, 2))) if number == chosen else stage
        for number, stage in enumerate(stages)
    )


def _with_failure(dice: Dice, source: Source, stages: tuple[Stage, ...]) -> tuple[Source, tuple[Stage, ...]]:
    """A row at which the source or one function fails; where it has none, everything stays."""
    row = dice.whole(0, max(0, source.rows - 1))
    error = dice.one(("boom", "value", "key", "stop"))
    able = [number for number, stage in enumerate(stages) if stage.op]
    if source.kind not in ("parquet", "list") and (not able or dice.chance(0.25)):
        return replace(source, fails_at=row, error=error), stages
    if not able:
        return source, stages
    chosen = dice.one(able)
    failing = replace(stages[chosen], fails_at=row, error=error)
    return source, (*stages[:chosen], failing, *stages[chosen + 1 :])


def _run(dice: Dice, stages: tuple[Stage, ...]) -> Run:
    shuffles = any(stage.kind == "shuffle" for stage in stages)
    processes = any(stage.executor == "process" for stage in stages)
    tuner = dice.one(("shared", "shared", "even", "proportional", "random"))
    in_flight = dice.one((0, 1, 1000, 30_000, 1_000_000, 10**8)) if dice.chance(0.3) else None
    memory = dice.one(("64GiB", "16GiB")) if dice.chance(0.4) else None
    if memory is not None and in_flight is None and not shuffles and dice.chance(0.2):
        memory, in_flight = None, 1
    if shuffles and tuner == "random" and in_flight is None:
        in_flight = 10**9  # else a random move might leave less than a shuffle needs
    return Run(
        cpus=dice.whole(1, 2 if processes else 4),
        tuner=tuner,
        in_flight=in_flight,
        memory=memory,
        max_ahead=dice.whole(1, 20) if dice.chance(0.6) else None,
        prefetch=dice.whole(1, 3),
        churn=dice.chance(0.3),
        ticks=dice.chance(0.2),
        seed=dice.whole(0, 10**6),
    )
