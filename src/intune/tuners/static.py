"""What the user says."""

from collections.abc import Mapping

from intune._errors import AllocationError
from intune._values import Allocation, Budget, Snapshot


class Static:
    """Gives the same numbers always; stages that are not named stay open.

    Args:
        concurrency: By stage, the most items it works on at once.
        slots: CPU slots; None = all of the budget. More than the budget has are not asked for.
    """

    def __init__(self, concurrency: Mapping[str, int], slots: int | None = None) -> None:
        wrong = [name for name, value in concurrency.items() if isinstance(value, bool) or value < 1]
        if wrong:
            raise AllocationError(f"stage {wrong[0]!r}: concurrency {concurrency[wrong[0]]!r}, must be at least 1")
        if slots is not None and slots < 1:
            raise AllocationError(f"slots {slots!r}, must be at least 1, or None for all")
        self._concurrency = dict(concurrency)
        self._slots = slots

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The user's numbers.

        Raises:
            AllocationError: If a stage that was named does not exist.
        """
        names = [stage.name for stage in snapshot.stages]
        if unknown := [name for name in self._concurrency if name not in names]:
            raise AllocationError(f"no stage {unknown[0]!r}: this workload has {names}")
        return Allocation(
            concurrency={name: self._concurrency.get(name) for name in names},
            slots=budget.cpus if self._slots is None else min(self._slots, budget.cpus),
            reasons={name: "set by the user" if name in self._concurrency else "open: not set" for name in names},
        )
