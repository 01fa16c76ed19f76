"""What all runs of a loader share."""

from collections.abc import Callable
from dataclasses import dataclass

from intune._clock import Clock
from intune.pipeline.calls import Failure
from intune.pipeline.executors import Probe
from intune.pipeline.gather import Gather
from intune.pipeline.ledger import Ledger
from intune.pipeline.scheduler import Scheduler
from intune.pipeline.stage import LiveStage


def _no_probe(seconds: float) -> Probe:
    raise NotImplementedError("no way to measure waits for the interpreter lock was given")


@dataclass
class Context:
    """What all runs of a loader share.

    Attributes:
        clock: Time.
        ledger: Bytes in flight.
        ordered: Whether order is restored.
        prefetch: Batches that may wait for the consumer; None = `at_once`, or more (see `Segment.has_room`).
        max_ahead: The most items past the lowest unfinished one.
        at_once: Items that may be worked on at once: as many as there are slots, or as a waiting stage may; at least 2.
        skip: Whether failures are left out.
        exact_rows: A map must keep the number of rows: lengths were promised.
        busy: Tasks being run.
        on_trial: The stage whose trial is being run, and since when; nothing else may begin meanwhile.
        most_bytes: The most bytes that were ever allowed in flight; None = no limit so far.
        lacking: Bytes that what order waits for takes, for which the ledger had too few to spare when it was asked
            last; None = it had enough since this was set to None.
        held_back: The stage whose trial waits for others to finish, and since when.
        on_skip: Called with stage name, origin and failures that were left out.
        on_executor_trial: Called with a stage whose executor is open, its item's wall and CPU seconds and bytes.
        make_probe: Makes what measures waits for the interpreter lock, given the seconds between its samples.
        run_queue: Seconds that the calling thread was runnable without a CPU; None where unknown.
        make_scheduler: Makes what runs tasks, given a name for threads, slots and the most threads.
        make_gather: Makes what carries out the orders of a shuffle or batch.
    """

    clock: Clock
    ledger: Ledger
    ordered: bool = True
    prefetch: int | None = None
    max_ahead: int = 6
    at_once: int = 2
    skip: bool = False
    exact_rows: bool = False
    busy: int = 0
    on_trial: tuple[LiveStage, float] | None = None
    held_back: tuple[LiveStage, float] | None = None
    most_bytes: int | None = None
    lacking: int | None = None
    on_skip: Callable[[str, str, tuple[Failure, ...]], None] = lambda stage, origin, failures: None
    on_executor_trial: Callable[[LiveStage, float, float, int], None] = lambda stage, wall, cpu, size: None
    make_probe: Callable[[float], Probe] = _no_probe
    run_queue: Callable[[], float | None] = lambda: None
    make_scheduler: Callable[[str, int, int], Scheduler] = Scheduler
    make_gather: Callable[..., Gather] = Gather

    @property
    def alone(self) -> bool:
        """Whether a task runs on trial, alone."""
        return self.on_trial is not None
