"""Sources of samples: taken in runs, so that scheduling costs little where samples do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from intune.pipeline.calls import Failure, Keys, Output
from intune.pipeline.footprint import Footprint
from intune.pipeline.item import Item
from intune.pipeline.ledger import Forecast
from intune.pipeline.nodes import Node, Work, size_of
from intune.pipeline.segment import Segment
from intune.pipeline.stage import LiveStage

RUN_SECONDS = 1e-3
"""Work that a run of samples is to hold: enough that scheduling costs little, little enough to share out."""
PROCESS_RUN_SECONDS = 4e-2
"""The same where a worker process is asked: each question has it wait until a thread of ours gets a CPU again."""
RUN_SAMPLES = 512
RUN_BYTES = 1 << 20


class RunLength:
    """Samples of the next run, by what the stages that it will pass cost and hold for a sample.

    Args:
        stages: These stages; of those that have not been measured yet one sample is the most.
    """

    def __init__(self, stages: Sequence[LiveStage]) -> None:
        self._stages = [stage for stage in stages if stage.info.kind in ("source", "map", "filter", "flat_map")]
        self._last = 1

    def next(self, forecast: Forecast) -> int:
        """At least 1, at most twice the last one."""
        seconds = [stage.sample_seconds for stage in self._stages]
        known = [second for second in seconds if second is not None]
        if len(known) < len(seconds):
            return 1
        process = any(stage.pool is not None or stage.executor_trial is not None for stage in self._stages)
        wanted = (PROCESS_RUN_SECONDS if process else RUN_SECONDS) / max(sum(known), 1e-9)
        if forecast.known:
            wanted = min(wanted, RUN_BYTES / max(forecast.mean, 1e-9))
        return max(1, min(RUN_SAMPLES, int(wanted), 2 * self._last))

    def took(self, length: int) -> None:
        """A run of this length was begun."""
        self._last = length


class SampleNode(Node):
    """The source, for samples: takes them in runs whose length follows what the segment costs a sample."""

    def __init__(self, stage: LiveStage, segment: Segment, stages: list[LiveStage], first: int) -> None:
        super().__init__(stage, segment)
        self._runs, self._next = RunLength(stages), first

    def _length(self) -> int:
        """Samples of the next run."""
        return self._runs.next(self.segment.forecast)

    def _gates(self) -> tuple[bool, bool, bool]:
        """Order, room, memory."""
        segment = self.segment
        return segment.gates(segment.opens_order(), (segment.next_root,), segment.forecast, self._length())

    def _item(self, length: int) -> Item:
        segment = self.segment
        self._runs.took(length)
        root = segment.next_root
        position = self._next
        item = segment.begin((root,), position, segment.forecast, length, lambda: f"sample {position} of the epoch")
        segment.next_root += 1
        self._next += length
        return item

    def _fill(self, item: Item, samples: list[Any], keys: Keys, sizes: Footprint, wall: float, cpu: float) -> None:
        item.payload, item.keys, item.rows = samples, keys, len(samples)
        item.source_rows = float(len(samples))
        self.context.ledger.true_up(item.charge, sizes)
        item.held(item.charge.actual)
        self._book(len(samples), wall, cpu)
        self.stage.counters.items_in += len(samples)
        if samples:
            self.stage.note_seconds(len(samples), wall)
            self._out(item, item.peak)


class IndexNode(SampleNode):
    """Samples by number, from a map-style dataset."""

    def __init__(
        self, stage: LiveStage, segment: Segment, stages: list[LiveStage], first: int, epoch: int, order: Any
    ) -> None:
        super().__init__(stage, segment, stages, first)
        self._epoch, self._order = epoch, order
        self._check()

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """Samples left, order, room, memory."""
        left = self._next < len(self._order) and not self.stopped()
        return left, *self._gates()

    def begin(self) -> Work:
        """Take the next run of numbers."""
        length = min(self._length(), len(self._order) - self._next)
        start = self._next
        item = self._item(length)
        self._check()
        indices = [int(index) for index in self._order[start : start + length]]
        keys = range(start, start + length)

        def work() -> tuple[Output, float, float, Footprint]:
            output, wall, cpu = self.stage.execute(indices, keys, self._epoch, self.context.clock)
            return output, wall, cpu, size_of(output.payload, output.keys)

        return Work(work, lambda result: self._finish(item, *result), lambda error: self._broke(item, error))

    def _finish(self, item: Item, output: Output, wall: float, cpu: float, sizes: Footprint) -> None:
        if self.stage.executor_trial is not None:
            self.context.on_executor_trial(self.stage, wall, cpu, sum(sizes.values()))
        assert output.keys is not None
        self._skipped(item, tuple(self._named(failure) for failure in output.skipped))
        self._fill(item, output.payload, output.keys, sizes, wall, cpu)
        if output.failure is not None:
            item.fail(self._named(output.failure), self.stage.info.name)
            self.failed()
        self.after(item) if item.rows else self.segment.arrived(item)

    def _named(self, failure: Failure) -> Failure:
        """The same with the number that the dataset knows the sample by."""
        return replace(failure, key=(int(self._order[failure.key[0]]),))

    def _check(self) -> None:
        if self._next >= len(self._order):
            self.segment.total = self.segment.next_root


class IterableNode(SampleNode):
    """Samples one after another, from any iterable; one run is drawn at a time."""

    def __init__(
        self,
        stage: LiveStage,
        segment: Segment,
        stages: list[LiveStage],
        first: int,
        draw: Callable[[], Iterator[tuple[int, Any]]],
    ) -> None:
        super().__init__(stage, segment, stages, first)
        self._start_drawing = draw
        self._iterator: Iterator[tuple[int, Any]] | None = None
        self._ended = False

    def gates(self) -> tuple[bool, bool, bool, bool]:
        """Not at the end, order, room, memory."""
        left = not self._ended and not self.stopped()
        return left, *self._gates()

    def begin(self) -> Work:
        """Draw the next run."""
        length = self._length()
        item = self._item(length)
        clock = self.context.clock

        def work() -> tuple[Any, ...]:
            wall, cpu = clock.wall(), clock.cpu()
            samples: list[Any] = []
            numbers: list[int] = []
            failure = None
            try:
                if self._iterator is None:
                    self._iterator = self._start_drawing()
                for number, sample in self._iterator:
                    numbers.append(number)
                    samples.append(sample)
                    if len(samples) == length:
                        break
            except Exception as error:
                failure = Failure(error, (item.position + len(samples),))
            step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
            keys = range(numbers[0], numbers[0] + step * len(numbers), step) if numbers else range(0)
            return samples, keys, size_of(samples, keys), clock.wall() - wall, clock.cpu() - cpu, failure, length

        return Work(work, lambda result: self._finish(item, *result), lambda error: self._broke(item, error))

    def _finish(
        self,
        item: Item,
        samples: list[Any],
        keys: Keys,
        sizes: Footprint,
        wall: float,
        cpu: float,
        failure: Failure | None,
        asked: int,
    ) -> None:
        self._next -= asked - len(samples)
        if failure is not None:
            item.fail(failure, self.stage.info.name)
            self.failed()
        if len(samples) < asked:
            self._ended = True
            self.segment.total = self.segment.next_root
        self._fill(item, samples, keys, sizes, wall, cpu)
        self.after(item) if item.rows else self.segment.arrived(item)

    def _broke(self, item: Item, error: BaseException) -> None:
        self._ended = True
        self.segment.total = self.segment.next_root
        super()._broke(item, error)
