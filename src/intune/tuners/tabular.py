"""Q-learning with a table, on a state cut naively into buckets.

What a plain reading of InTune (Nagrecha et al., RecSys 2023; only the abstract was at hand) gives without a network:
the state is the share of the CPUs that each stage has and the throughput, both in a few buckets; an action gives one
stage one CPU more or less, or leaves all as it is; the reward is the throughput, as a share of the best seen, times
the share of the memory that is free. It learns while it decides, from nothing unless a table is loaded. Such a table
has a row for each split of the CPUs, of which a run of a hundred decisions sees few: it is here for comparison.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune._words import count
from intune.tuners._rows import most_useful, rows_finished

State = tuple[int, ...]


class Tabular:
    """Learns by trial which stage to give one CPU more or less; the sum stays within the CPUs.

    Args:
        seed: Of its random choices.
        explore: Share of decisions that are random, 0 to 1.
        learn: Learning rate, 0 (the table stays as it is) to 1.
        discount: Weight of the future, 0 to 1.
        hope: What an action that was never tried is taken to be worth; a reward of 1 for ever is worth
            1 / (1 - discount).
        buckets: Buckets for a stage's share of the CPUs, and for the throughput as a share of the best seen.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        explore: float = 0.1,
        learn: float = 0.3,
        discount: float = 0.9,
        buckets: int = 4,
        hope: float = 1.0,
    ) -> None:
        if buckets < 1:
            raise PipelineError(f"buckets is {buckets}, must be at least 1")
        self._random = random.Random(seed)
        self._explore, self._learn, self._discount, self._buckets, self._hope = explore, learn, discount, buckets, hope
        self._table: dict[State, NDArray[np.float64]] = {}
        self._last: tuple[State, int] | None = None
        self._best_rate = 0.0

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """One step from the split in force, an even one at first."""
        names = [stage.name for stage in snapshot.stages]
        most = [most_useful(stage.info, budget) for stage in snapshot.stages]
        split = _within([snapshot.allocation.concurrency.get(name) for name in names], most, budget.cpus)
        rate = _rate(snapshot) if snapshot.warm else None
        if rate is None:
            reason = "as before: too little was measured in this window"
            return Allocation(dict(zip(names, split, strict=True)), budget.cpus, reasons=dict.fromkeys(names, reason))
        self._best_rate = max(self._best_rate, rate)
        state = self._state(split, budget.cpus, rate)
        self._improve(state, rate / self._best_rate * (1 - _memory_share(snapshot)))
        allowed = [action for action in range(2 * len(names) + 1) if _allowed(action, split, most, budget.cpus)]
        action, why = self._choose(state, allowed)
        self._last = state, action
        reasons = dict.fromkeys(names, f"left as it is: {why}")
        if action:
            place, step = _meaning(action)
            split[place] += step
            reasons[names[place]] = f"{'one more' if step > 0 else 'one less'}: {why}"
        return Allocation(dict(zip(names, split, strict=True)), budget.cpus, reasons=reasons)

    def save(self, path: str | Path) -> None:
        """Write the table as arrays (npz): `states` int64[n, stages + 1], `values` float64[n, 2 stages + 1].

        Raises:
            PipelineError: If states of pipelines with different numbers of stages were seen, or none.
        """
        if len({len(state) for state in self._table}) != 1:
            raise PipelineError("only the table of one pipeline can be saved: nothing, or several were seen")
        with open(path, "wb") as file:
            np.savez(file, states=np.array([*self._table], np.int64), values=np.array([*self._table.values()]))

    def load(self, path: str | Path) -> None:
        """Go on from a table that was saved.

        Raises:
            PipelineError: If the file holds no table.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                states, values = file["states"], file["values"]
            fits = states.shape[0] == values.shape[0] and 2 * (states.shape[1] - 1) + 1 == values.shape[1]
        except (ValueError, KeyError, IndexError, EOFError, OSError) as error:
            raise PipelineError(f"{path} holds no table that was saved by Tabular: {error}") from error
        if not fits:
            raise PipelineError(f"{path} holds arrays of {states.shape} and {values.shape}, which are no table")
        self._table = {tuple(map(int, state)): row.astype(float) for state, row in zip(states, values, strict=True)}
        self._last = None

    def _state(self, split: Sequence[int], cpus: int, rate: float) -> State:
        shares = [*(value / cpus for value in split), rate / self._best_rate]
        return tuple(min(self._buckets - 1, int(share * self._buckets)) for share in shares)

    def _row(self, state: State) -> NDArray[np.float64]:
        return self._table.setdefault(state, np.full(2 * len(state) - 1, self._hope))

    def _improve(self, state: State, reward: float) -> None:
        """Learn from what the last action led to."""
        if self._last is None or len(self._last[0]) != len(state):
            return
        row, action = self._row(self._last[0]), self._last[1]
        row[action] += self._learn * (reward + self._discount * float(self._row(state).max()) - row[action])

    def _choose(self, state: State, allowed: Sequence[int]) -> tuple[int, str]:
        if self._random.random() < self._explore:
            return self._random.choice(allowed), "a random trial"
        row = self._row(state)
        best = max(allowed, key=lambda action: (row[action], -action))
        return best, f"worth {row[best]:.3g} in the table, which knows {count(len(self._table), 'state')}"


def _meaning(action: int) -> tuple[int, int]:
    """The place of the stage, and by how much it changes."""
    return (action - 1) // 2, 1 if action % 2 else -1


def _allowed(action: int, split: Sequence[int], most: Sequence[int], cpus: int) -> bool:
    if not action:
        return True
    place, step = _meaning(action)
    return 1 <= split[place] + step <= most[place] and (step < 0 or sum(split) < cpus)


def _within(now: Sequence[int | None], most: Sequence[int], cpus: int) -> list[int]:
    """What is in force where it is a split of the CPUs, else the even one."""
    split = [min(value or cpus, limit) for value, limit in zip(now, most, strict=True)]
    if all(now) and sum(split) <= max(cpus, len(split)):
        return split
    return [min(limit, max(1, cpus // len(split))) for limit in most]


def _rate(snapshot: Snapshot) -> float | None:
    """Source rows a second that came out of the last stage; None where nothing did."""
    rows = rows_finished(snapshot.stages[-1])
    return rows / snapshot.window_seconds if rows and snapshot.window_seconds > 0 else None


def _memory_share(snapshot: Snapshot) -> float:
    machine = snapshot.machine
    if machine.memory_bytes is None or not machine.memory_limit_bytes:
        return 0.0
    return min(1.0, machine.memory_bytes / machine.memory_limit_bytes)
