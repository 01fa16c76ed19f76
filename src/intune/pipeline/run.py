"""One epoch being run: the chain wired into segments, and what is picked next."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from intune._errors import MemoryLimitError
from intune._words import size
from intune.pipeline.calls import Failure
from intune.pipeline.chain import Pipeline, Stage
from intune.pipeline.context import Context
from intune.pipeline.drawing import FlatMapNode, OrderNode, UnitNode
from intune.pipeline.item import Item
from intune.pipeline.ledger import Charge
from intune.pipeline.nodes import CallNode, GatherNode, Node, Work
from intune.pipeline.order import OnUneven, epoch_order, plan_rank, rank_range
from intune.pipeline.samples import IndexNode, IterableNode
from intune.pipeline.segment import Delivery, Segment, Sequence
from intune.pipeline.sequence import BatchSequencer, Order, ReplayLog, Sequencer, ShuffleSequencer
from intune.pipeline.source import BlockSource, IndexedSource, SequentialSource
from intune.pipeline.stage import LiveStage

EMIT_ROWS = 65_536
SMALL_EMIT_ROWS = 4_096
SAMPLE_EMIT_ROWS = 256

TELLING_ROWS, ENOUGH_ROWS = 4, 16
"""Rows of a window below which they say nothing of those to come, and below which they say little."""


@dataclass(frozen=True)
class Share:
    """Whose part of the data is read, and with which seed.

    Attributes:
        seed: Seed of the loader.
        rank: This rank.
        world_size: Number of ranks.
        on_uneven: What to do with rows that do not divide by ranks.
    """

    seed: int = 0
    rank: int = 0
    world_size: int = 1
    on_uneven: OnUneven = "drop"


@dataclass(frozen=True)
class Position:
    """Where in an epoch a run begins.

    Attributes:
        source: First unit, or first sample, to be read.
        levels: For each sequencer its next emission, and the number of the first row that it will get.
        drop: Items (samples one by one) at the start of what comes out that have been delivered before.
    """

    source: int = 0
    levels: tuple[tuple[int, int], ...] = ()
    drop: int = 0


def unit_seed(pipeline: Pipeline, seed: int) -> int | None:
    """Seed of the order of units: that of the first shuffle, or None without one."""
    for stage in pipeline.stages:
        if stage.kind == "shuffle":
            own = stage.options["seed"]
            return seed if own is None else int(own)
    return None


def make_sequencer(
    pipeline: Pipeline, number: int, share: Share, epoch: int, emission: int = 0, row: int = 0
) -> Sequencer:
    """The sequencer of a shuffle or batch; `number` is its place among the stages after the source."""
    stage = pipeline.stages[number]
    if stage.kind == "batch":
        return BatchSequencer(stage.options["size"], stage.options["drop_last"], emission=emission, row=row)
    own = stage.options["seed"]
    key = (share.seed if own is None else own, share.rank, epoch, number + 1)
    return ShuffleSequencer(stage.options["rows"], _emit_rows(pipeline, number), key, emission=emission, row=row)


def _emit_rows(pipeline: Pipeline, number: int) -> int:
    """Rows of an emission: whole batches where a batch follows at once, so that they need no second copy."""
    stage = pipeline.stages[number]
    if stage.kind == "batch":
        return int(stage.options["size"])
    usual = SAMPLE_EMIT_ROWS if stage.flow == "sample" else EMIT_ROWS
    following = pipeline.stages[number + 1] if number + 1 < len(pipeline.stages) else None
    if following is None or following.kind != "batch":
        return usual
    size = int(following.options["size"])
    least = min(usual, SMALL_EMIT_ROWS)
    return size * max(1, -(-least // size))


def _up_to_flat_map(stages: list[LiveStage]) -> list[LiveStage]:
    """The stages that an item passes before a flat_map takes it apart."""
    return list(itertools.takewhile(lambda stage: stage.info.kind != "flat_map", stages))


class EpochRun:
    """One epoch on its way, from the source to the consumer.

    Everything but the work of its tasks happens with the scheduler's lock held.

    Args:
        pipeline: The chain.
        stages: Its living stages, source first.
        context: What all runs share.
        share: Whose part is read.
        epoch: The epoch.
        start: Where it begins.
        wake: Called when something new is ready for the consumer, or the end is reached.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: list[LiveStage],
        context: Context,
        share: Share,
        epoch: int,
        start: Position,
        wake: Callable[[], None],
    ) -> None:
        self.context, self.epoch, self.start = context, epoch, start
        self.charges: set[Charge] = set()
        self.running = 0
        self.failed = self.cancelled = False
        self.error: BaseException | None = None
        self._pipeline, self._stages, self._share, self._wake = pipeline, stages, share, wake
        self.delivery = Delivery(context, start.drop, wake)
        self.segments: list[Segment] = []
        self.sequences: list[Sequence] = []
        self.nodes: list[Node] = []
        self._wire()
        self._deepest = list(reversed(self.nodes))
        self.root: tuple[int, int] | None = None
        self._whole: int | None = None

    # --- the scheduler's side

    def open(self) -> None:
        """Begin; an epoch without a single unit ends here."""
        self.segments[0].pump()

    def pick(self, slot_free: bool, on_waits: Callable[[LiveStage, bool], None]) -> "RunTask | None":
        """The deepest task that may begin, now taken in hand."""
        for node in self._deepest:
            stage = node.stage
            if stage.running >= stage.cap or not (slot_free or not stage.holds_slot):
                continue
            if not all(node.gates()):
                continue
            if stage.wants_alone and self.context.busy:
                self.context.held_back = self.context.held_back or (stage, self.context.clock.wall())
                return None  # it is measured alone: let the others finish first
            alone = stage.wants_alone
            now = self.context.clock.wall()
            task = RunTask(self, stage, now, node.begin(), on_waits if alone or stage.trial is not None else None)
            stage.running += 1
            self.running += 1
            self.context.busy += 1
            self.context.on_trial = (stage, now) if alone else None
            self.context.held_back = None if alone else self.context.held_back
            return task
        return None

    @property
    def source_done(self) -> bool:
        """Whether its source has given everything."""
        first = self.segments[0]
        return first.total is not None and first.next_root >= first.total

    def crash(self, error: BaseException) -> None:
        """A fault of ours, or a limit that does not allow to go on: the consumer gets it at once."""
        self.error = self.error or error
        self.failed = True
        self._wake()

    def cancel(self) -> None:
        """Stop; what is in hand is finished and thrown away."""
        self.cancelled = True
        self.reap()

    def reap(self) -> None:
        """Give back what a cancelled run holds, once nothing of it is in hand."""
        if not self.cancelled:
            return
        for node in self.nodes:
            node.abandon(not self.running)
        if not self.running:
            self.context.ledger.release_all(self.charges)
            self.delivery.ready.clear()

    # --- the consumer's side

    def take(self) -> Item:
        """The next item for the consumer; there is one. Its bytes are not ours any more."""
        item = self.delivery.ready[0]
        self.delivery.taking()
        # Noted before it leaves the queue: an interrupt in between finds it there.
        self.root, self._whole = (item.position, item.before), item.count if item.failure is None else None
        self.delivery.ready.popleft()
        self.context.ledger.release(item.charge)
        return item

    def position(self, taken: int) -> Position:
        """Where a run would begin that goes on after `taken` items (samples) of the last item taken."""
        if self.root is None:
            return self.start
        root, before = self.root
        drop = before + taken
        if self.sequences and self.segments[-1].depth == 1 and taken == self._whole:
            root, drop = root + 1, 0  # one root, one item: this one is behind us
        levels = []
        for number in range(len(self.sequences) - 1, -1, -1):
            sequence = self.sequences[number]
            found = sequence.log.find(sequence.sequencer.first_row(root))
            if found is None:
                earlier = self.start.levels[number - 1][0] if number and self.start.levels else 0
                found = (earlier if number else self.start.source, self._start_row(number))
            levels.append((root, found[1]))
            root = found[0]
        return Position(root, tuple(reversed(levels)), drop)

    def in_flight(self) -> int:
        """Items between the source and the consumer."""
        return sum(segment.live for segment in self.segments) + len(self.delivery.ready)

    # --- wiring

    def _start_row(self, number: int) -> int:
        return self.start.levels[number][1] if self.start.levels else 0

    def _wire(self) -> None:
        places = [n for n, stage in enumerate(self._pipeline.stages) if stage.kind in ("shuffle", "batch")]
        bounds = [-1, *places, len(self._pipeline.stages)]
        groups = [self._pipeline.stages[bounds[i] + 1 : bounds[i + 1]] for i in range(len(bounds) - 1)]
        block_source = isinstance(self._pipeline.source, BlockSource)
        end: Delivery | Sequence = self.delivery
        for level in range(len(groups) - 1, -1, -1):
            drawn = self._is_drawn(places[level - 1]) if level else block_source
            depth = 1 + sum(stage.kind == "flat_map" for stage in groups[level]) + drawn
            if level:
                first, row = self.start.levels[level - 1] if self.start.levels else (0, 0)
            else:
                first, row = self.start.source if block_source else 0, 0
            segment = Segment(self.context, depth, first, end, self.charges)
            if isinstance(end, Sequence):
                end.preceding = segment
            self.segments.insert(0, segment)
            if level:
                sequencer = make_sequencer(self._pipeline, places[level - 1], self._share, self.epoch, first, row)
                end = Sequence(self.context, sequencer, ReplayLog(row), None, segment, self._check)
                end.stage = self._pipeline.stages[places[level - 1]].name
                self.sequences.insert(0, end)
        for level, group in enumerate(groups):
            self._wire_segment(level, group, places[level - 1] if level else -1)

    def _is_drawn(self, place: int) -> bool:
        """Whether samples of an order are taken in runs: those of a shuffle, not those that become a batch."""
        stage = self._pipeline.stages[place]
        return stage.kind == "shuffle" and stage.flow == "sample"

    def _wire_segment(self, level: int, group: tuple[Stage, ...], place: int) -> None:
        segment, live = self.segments[level], self._stages
        nodes: list[Node] = []
        if level:
            stage = self._pipeline.stages[place]
            gather = self.context.make_gather(
                stage.flow, _emit_rows(self._pipeline, place), stage.kind == "batch", stage.function
            )
            before = self.sequences[level - 1]
            if self._is_drawn(place):
                passed = _up_to_flat_map(live[place + 2 : place + 2 + len(group)])
                nodes.append(OrderNode(live[place + 1], segment, passed, before, gather))
            else:
                nodes.append(GatherNode(live[place + 1], segment, before, gather, stage.gives))
        else:
            nodes.append(self._source_node(segment, _up_to_flat_map(live[1 : len(group) + 1])))
        for offset, stage in enumerate(group):
            living = live[place + offset + 2]
            if stage.kind == "flat_map":
                passed = [living, *_up_to_flat_map(live[place + offset + 3 : place + len(group) + 2])]
                nodes.append(FlatMapNode(living, segment, passed, self.epoch, stage.flow))
            else:
                nodes.append(CallNode(living, segment, self.epoch, stage.gives))
        if len(nodes) > 1 and isinstance(nodes[1], CallNode):
            nodes[1].first = True
        for node, following in itertools.pairwise(nodes):
            node.after = following.put  # type: ignore[attr-defined]
        for node in nodes:
            node.failed, node.stopped = self._note_failure, lambda: self.failed
        self.nodes += nodes

    def _source_node(self, segment: Segment, followers: list[LiveStage]) -> Node:
        source, share, stage = self._pipeline.source, self._share, self._stages[0]
        seed = unit_seed(self._pipeline, share.seed)
        if isinstance(source, BlockSource):
            several = share.world_size > 1
            rows = source.count_unit_rows() if several else None
            order = epoch_order(source.unit_count(), seed, self.epoch)
            plan = plan_rank(order, rows, share.rank, share.world_size, share.on_uneven)
            segment.total = len(plan)
            segment.next_root = min(self.start.source, len(plan))
            return UnitNode(stage, segment, source, plan, several and share.on_uneven == "pad")
        stages = [stage, *followers]
        if isinstance(source, IndexedSource):
            indices = source.order(self.epoch)
            if indices is None:  # a sampler's order is this rank's already
                indices = epoch_order(len(source), seed, self.epoch)
                start, stop, repeat = rank_range(len(indices), share.rank, share.world_size, share.on_uneven)
                again = np.resize(indices, repeat) if len(indices) else indices
                indices = np.concatenate([indices[start:stop], again])
            return IndexNode(stage, segment, stages, self.start.source, self.epoch, indices)
        return IterableNode(stage, segment, stages, self.start.source, lambda: self._draw(source))

    def _draw(self, source: SequentialSource) -> Iterator[tuple[int, Any]]:
        """Samples of this rank with their numbers: row i goes to rank i % world_size."""
        share, skip = self._share, self.start.source
        numbered = enumerate(source.iterate())
        while group := list(itertools.islice(numbered, share.world_size)):
            whole = len(group) == share.world_size or share.on_uneven == "uneven"
            if not whole or share.rank >= len(group):
                return
            if skip:
                skip -= 1
            else:
                yield group[share.rank]

    def _note_failure(self) -> None:
        self.failed = True

    def _check(self, sequence: Sequence, orders: list[Order]) -> Failure | None:
        """The first full window tells what two windows need; bytes taken back for a while are no reason to give up."""
        budget = self.context.most_bytes if self.context.ledger.budget is not None else None
        window = orders[0].window if orders else None
        if budget is None or window is None or not isinstance(sequence.sequencer, ShuffleSequencer):
            return None
        if any(stage.pool is not None and stage.resident is None for stage in self._stages):
            return None  # nobody knows yet what processes will leave: till then they may be taken to need everything
        tokens = {id(piece.token): piece.token for piece in window.pieces if piece.token.rows}
        rows, most = sum(token.rows for token in tokens.values()), sequence.sequencer.size
        if rows < min(TELLING_ROWS, most):
            return None
        per_row = sum(token.charge.actual for token in tokens.values()) / max(1, rows)
        need = 2 * most * per_row
        if rows < min(ENOUGH_ROWS, most) and need <= 2 * budget:
            return None  # a few that are large by chance would speak for all; as one window fits, others can still tell
        if need <= budget or window.number >= 5:
            return None
        fits = int(0.9 * budget / (2 * per_row))  # not each row is as large as these
        error = MemoryLimitError(
            f"shuffle(rows={most}) holds two windows of {per_row:.0f} bytes a row, "
            f"{size(int(need))}, but {size(budget)} may be in flight: at most rows={fits} fit; "
            "lower rows or raise memory="
        )
        return Failure(error, (window.number,))


class RunTask:
    """A task of a run, for the scheduler."""

    __slots__ = (
        "_area",
        "_begun",
        "_counts",
        "_error",
        "_measured",
        "_on_waits",
        "_result",
        "_run",
        "_work",
        "holds_slot",
        "stage",
    )

    def __init__(
        self,
        run: EpochRun,
        stage: LiveStage,
        now: float,
        work: Work,
        on_waits: Callable[[LiveStage, bool], None] | None,
    ) -> None:
        self.holds_slot = stage.holds_slot
        self.stage, self._begun = stage, now
        self._area = stage.counters.load.change(now, 1)
        self._run, self._work, self._on_waits = run, work, on_waits
        self._result: Any = None
        self._error: BaseException | None = None
        self._measured: tuple[float, float, float | None] | None = None
        self._counts = stage.trial is not None and stage.trial.counts

    @property
    def drawn(self) -> int:
        """Items that were drawn from the same parent before, for one-to-many stages."""
        return self._work.drawn

    def run(self) -> None:
        """Do the work; called without the lock."""
        try:
            if self._on_waits is not None or self.stage.counters.wants_queue():
                self._measure()
            else:
                self._result = self._work.work()
        except BaseException as error:  # also SystemExit of a user's function: it must not end our thread
            self._error = error

    def done(self) -> None:
        """Book the result; called with the lock."""
        run, stage = self._run, self.stage
        run.context.busy -= 1
        run.running -= 1
        stage.running -= 1
        now = run.context.clock.wall()
        area = stage.counters.load.change(now, -1) - self._area
        stage.crowd = area / (now - self._begun) if now > self._begun else 1.0
        if self._measured is not None:
            wall, _, queued = self._measured
            stage.counters.queued(wall, queued)
            if self._on_waits is not None:
                run.context.on_trial = None
        if run.cancelled:
            run.reap()
            return
        worked = stage.counters.worked_items
        try:
            if self._error is None:
                self._work.finish(self._result)
                if stage.counters.worked_items > worked:  # not where it only found that nothing was left to draw
                    self._try(stage)
            else:
                self._work.broke(self._error)
        except BaseException as error:  # a fault of ours: tell the consumer, who would wait for ever otherwise
            run.crash(error)

    def _try(self, stage: LiveStage) -> None:
        """A step of the trial of whether the stage waits, if there is one."""
        if self._measured is None or self._on_waits is None or stage.trial is None:
            return
        wall, cpu, queued = self._measured
        waits = stage.trial.add(wall, cpu, queued or 0.0, self._counts)
        if waits is not None:
            self._on_waits(stage, waits)

    def _measure(self) -> None:
        context = self._run.context
        clock = context.clock
        wall, cpu, queue = clock.wall(), clock.cpu(), context.run_queue()
        try:
            self._result = self._work.work()
        finally:
            after = context.run_queue()
            queued = after - queue if queue is not None and after is not None else None
            self._measured = (clock.wall() - wall, clock.cpu() - cpu, queued)


def count_rows(pipeline: Pipeline, share: Share, rows: int) -> tuple[int, bool]:
    """Rows that come out of the chain for `rows` rows in, and items: (items, known).

    Returns:
        The number of items that one epoch delivers, and whether it can be known at all.
    """
    items: int | None = rows if not isinstance(pipeline.source, BlockSource) else None
    for number, stage in enumerate(pipeline.stages):
        if stage.kind in ("filter", "flat_map"):
            return 0, False
        if stage.kind in ("shuffle", "batch"):
            sequencer = make_sequencer(pipeline, number, share, 0)
            items = sequencer.count(rows)
            rows = sequencer.rows(rows)
            if stage.gives == "sample":
                items = rows
        elif stage.kind == "unbatch":
            items = rows
    return (items, True) if items is not None else (0, False)
