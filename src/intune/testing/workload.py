"""A workload that says what a test wrote for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from intune._errors import AllocationError
from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot


def blank_snapshot(stages: Sequence[StageInfo], allocation: Allocation | None = None) -> Snapshot:
    """One second in which nothing happened and nothing was measured, under an allocation (None = open, one slot)."""
    if allocation is None:
        allocation = Allocation({stage.name: None for stage in stages}, slots=1)
    return Snapshot(
        window_seconds=1.0,
        warm=False,
        stages=tuple(StageSnapshot(stage, allocation.concurrency[stage.name], running=0) for stage in stages),
        consumer=ConsumerSnapshot(steps=0, rows=0, seconds_per_step=None, wait_share=1.0),
        machine=MachineSnapshot(cpus=1),
        allocation=allocation,
    )


class ScriptedWorkload:
    """Gives snapshots from a script and keeps every allocation that was applied; a `Workload`.

    It holds `apply` to its contract: an unknown, missing or negative entry raises, nothing is clamped, and what
    was in force before stays so.

    Args:
        stages: Its stages, source first.
        script: Snapshots to give one after another, the last one again and again; or a function from the
            allocation in force to the snapshot. None = blank ones. The allocation in force and each stage's
            concurrency are filled in.

    Attributes:
        applied: Every allocation that was applied, oldest first.
    """

    def __init__(
        self,
        stages: Sequence[StageInfo],
        script: Sequence[Snapshot] | Callable[[Allocation], Snapshot] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._names = [stage.name for stage in self._stages]
        if not self._names or len(set(self._names)) < len(self._names):
            raise ValueError(f"stages {self._names}: there must be at least one, with names that differ")
        if script is None:
            script = [blank_snapshot(self._stages)]
        if not callable(script) and not script:
            raise ValueError("the script has no snapshot: give one at least, or a function")
        self._script = script
        self._position = 0
        self._in_force = blank_snapshot(self._stages).allocation
        self.applied: list[Allocation] = []

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """The stages, source first."""
        return self._stages

    def snapshot(self) -> Snapshot:
        """The next one of the script."""
        if callable(self._script):
            found = self._script(self._in_force)
        else:
            found = self._script[min(self._position, len(self._script) - 1)]
            self._position += 1
        concurrency = self._in_force.concurrency
        stages = tuple(replace(stage, concurrency=concurrency[stage.name]) for stage in found.stages)
        return replace(found, allocation=self._in_force, stages=stages)

    def apply(self, allocation: Allocation) -> None:
        """Keep the allocation.

        Raises:
            AllocationError: If an entry is unknown, missing or negative.
        """
        given = allocation.concurrency
        if set(given) != set(self._names):
            missing, unknown = sorted(set(self._names) - set(given)), sorted(set(given) - set(self._names))
            raise AllocationError(f"entries missing for {missing}, unknown {unknown}; the stages are {self._names}")
        _refuse_below(given, 0)
        _refuse_below({"slots": allocation.slots}, 1)
        _refuse_below({"in_flight_bytes": allocation.in_flight_bytes}, 0)
        self._in_force = allocation
        self.applied.append(allocation)


def _refuse_below(values: Mapping[str, int | None], least: int) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise AllocationError(f"{name}: {value} is not allowed, at least {least}")
