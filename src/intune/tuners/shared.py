"""The strong baseline: no limits by stage, the scheduler's shared slots do the work."""

from intune._values import Allocation, Budget, Snapshot


class Shared:
    """Leaves every concurrency open, on all CPUs."""

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """Every stage open."""
        return Allocation(
            concurrency={stage.name: None for stage in snapshot.stages},
            slots=budget.cpus,
            reasons={stage.name: f"open: may use all {budget.cpus} slots" for stage in snapshot.stages},
        )
