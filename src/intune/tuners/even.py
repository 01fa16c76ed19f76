"""The same for every stage."""

from intune._values import Allocation, Budget, Snapshot
from intune._words import count


class Even:
    """Divides the CPUs evenly over the stages: each at least 1, the remainder to the earlier ones.

    A stage gets no more than its `max_concurrency`; what it leaves is not given to others.
    """

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The even split; it looks at no measurement."""
        share, remainder = divmod(budget.cpus, len(snapshot.stages))
        concurrency: dict[str, int | None] = {}
        for place, stage in enumerate(snapshot.stages):
            part = max(1, share + (place < remainder))
            concurrency[stage.name] = min(part, stage.info.max_concurrency or part)
        reason = f"{count(budget.cpus, 'CPU')} over {count(len(snapshot.stages), 'stage')}"
        return Allocation(concurrency, budget.cpus, reasons=dict.fromkeys(concurrency, reason))
