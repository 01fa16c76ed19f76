"""Anything that is allowed, for tests: what holds under these moves holds under every tuner."""

import random

from intune._values import Allocation, Budget, Snapshot, StageInfo


class RandomMoves:
    """Proposes a random legal allocation each time: jumps between 1 and the most, single steps, open, slots, bytes.

    Args:
        seed: The same seed and the same calls give the same moves.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """The next move."""
        move = self._random.choice(("all to 1", "all to the most", "each its own", "one of them"))
        now = {stage.name: snapshot.allocation.concurrency.get(stage.name) or None for stage in snapshot.stages}
        chosen = self._random.choice(list(now))
        for stage in snapshot.stages:
            if move != "one of them" or stage.name == chosen:
                now[stage.name] = self._value(move, stage.info, budget)
        slots = self._random.choice((1, budget.cpus, self._random.randint(1, budget.cpus)))
        memory = self._random.choice((None, self._random.randint(0, budget.memory_bytes or 2**30)))
        return Allocation(now, slots, memory, dict.fromkeys(now, f"random move: {move}"))

    def _value(self, move: str, stage: StageInfo, budget: Budget) -> int | None:
        most = stage.max_concurrency or (budget.max_threads if stage.waits else budget.cpus)
        if move == "all to 1":
            return 1
        if move == "all to the most":
            return most
        return self._random.choice((None, 1, most, self._random.randint(1, most)))
