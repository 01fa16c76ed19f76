"""What stands in for the outside of a loader in simulated time: empty blocks, processes, gathers, a clock."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from intune.pipeline.gather import Gather
from intune.pipeline.sequence import Order
from intune.pipeline.stage import ProcessSizes, RemoteCall


class SimClock:
    """Time that the simulation moves; `cpu` is of the task whose result is being made.

    Attributes:
        now: Seconds that have passed; set back to a task's begin while its result is made.
        cpu_seconds: CPU seconds of that task so far.
        queue_seconds: Seconds that it had no CPU so far.
    """

    def __init__(self) -> None:
        self.now = self.cpu_seconds = self.queue_seconds = 0.0

    def wall(self) -> float:
        """Seconds that have passed."""
        return self.now

    def cpu(self) -> float:
        """CPU seconds of the task whose result is being made."""
        return self.cpu_seconds

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Refuses: nothing may sleep in simulated time, what comes at intervals is called by the simulation."""
        raise RuntimeError("nothing may sleep in simulated time")


def blank_block(rows: int, row_bytes: float) -> pa.RecordBatch:
    """A block of so many rows and bytes that nobody writes to, so that it takes addresses but no memory."""
    width = max(1, round(row_bytes))
    data = pa.py_buffer(np.empty(rows * width, dtype=np.uint8))
    column = pa.Array.from_buffers(pa.binary(width), rows, [None, data])
    return pa.RecordBatch.from_arrays([column], names=["x"])


class SimSource:
    """A source of units of one block each.

    Args:
        kind: Its name as a stage.
        units: Units an epoch.
        rows: Rows of a unit.
        row_bytes: Bytes of a row, on average.
        max_concurrency: The most units at once.
        make: Makes the block of the unit whose task ends now.
    """

    def __init__(
        self, kind: str, units: int, rows: int, row_bytes: float, max_concurrency: int | None, make: Callable[[], Any]
    ) -> None:
        self.kind, self.max_concurrency = kind, max_concurrency
        self._units, self._rows, self._row_bytes, self._make = units, rows, row_bytes, make
        self.schema = blank_block(0, row_bytes).schema

    def identity(self) -> dict[str, Any]:
        """Nothing tells two of them apart."""
        return {}

    def unit_count(self) -> int:
        """Units an epoch."""
        return self._units

    def unit_rows(self) -> Sequence[int] | None:
        """Rows of each unit."""
        return [self._rows] * self._units

    def count_unit_rows(self) -> Sequence[int]:
        """Rows of each unit."""
        return [self._rows] * self._units

    def read_bound(self, unit: int) -> int:
        """Bytes of a block on average: what a footer says."""
        return int(self._rows * self._row_bytes)

    def kept_bytes(self, unit: int) -> int:
        """Nothing: a unit is one block."""
        return 0

    def describe(self, unit: int) -> str:
        """Its number."""
        return f"unit {unit}"

    def open(self, unit: int) -> Iterator[Any]:
        """Its block."""
        yield self._make()


class SimGather(Gather):
    """Puts nothing together: gives a block of as many rows."""

    make: Callable[[int], Any]
    """Makes the block of the order whose task ends now, given its rows."""

    def copy_bytes(self, order: Order) -> int:
        """None."""
        return 0

    def part(self, order: Order, start: int, stop: int) -> Any:
        """Refuses: samples are not simulated."""
        raise NotImplementedError("only blocks are simulated")

    def __call__(self, order: Order) -> Any:
        """The block."""
        return self.make(order.rows)


class SimPool:
    """Worker processes of one stage that take a while to start.

    Args:
        target: What they would run.
        start: Begins to start one; the simulation calls `started` when it is up.
        cpu: CPU seconds of the task whose result is being made.
        resident: Bytes of a process.
    """

    failed = False

    def __init__(
        self, target: RemoteCall, start: Callable[[], None], cpu: Callable[[], float], resident: float
    ) -> None:
        self.live = self.starting = self.leaving = 0
        self.busy = 0
        self._wanted = self._done = 0
        self._call = replace(target.call, reseed=False)
        self._start, self._cpu, self._resident = start, cpu, resident

    def resize(self, n: int) -> None:
        """Set the wanted number."""
        self._wanted = n
        self.settle()

    def settle(self) -> bool:
        """Start more, as many at once as have done an item, or let idle ones go; whether some have gone."""
        while self.live + self.starting < self._wanted and self.starting < max(1, self._done):
            self.starting += 1
            self._start()
        surplus = min(self.live - self._wanted, self.live - self.busy)
        if surplus <= 0:
            return False
        self.live -= surplus
        self._done = min(self._done, self.live)
        return True

    def started(self) -> None:
        """One of those that were being started is up."""
        self.starting -= 1
        self.live += 1
        self.settle()

    def call(self, *args: Any) -> Any:
        """The output of one item, and the CPU seconds that it took."""
        self._done = max(self._done, self.busy)  # the one that was used last is used first
        before = self._cpu()
        output = self._call(*args) if self._call.kind != "flat_map" else list(self._call.draw(*args))
        return output, self._cpu() - before

    def sizes(self) -> ProcessSizes:
        """Bytes of each process: all that it will ever hold, from its start on."""
        return ProcessSizes((int(self._resident),) * self.live)

    @property
    def bytes(self) -> float:
        """What all of them take."""
        return self._resident * (self.live + self.starting + self.leaving)

    def close(self) -> None:
        """End them."""
        self._wanted = self.live = self.starting = self._done = 0
