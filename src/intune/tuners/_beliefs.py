"""What is known of each stage, learnt from windows; see `model` for what is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intune._values import Snapshot, StageInfo, StageSnapshot
from intune.tuners._fit import MOST_SECONDS, Point, StageFit, number
from intune.tuners._rows import cpu_per_row, trainer_per_row, wall_per_row

LOCK_FREE_SECONDS, LOCK_HELD_SECONDS = 3e-4, 2e-3
"""What a thread waits for the lock where nothing holds it for long, and from where on something does."""

CONTENDS = 0.1
"""Share of its time lost to the lock from which a stage counts as one that wants it."""

STARVED = 0.05
"""Share of waiting of the training loop from which more is wanted at all."""

NEWEST = 0.3
"""Weight of the newest window in running means."""

MOST_BUSY = 1024.0
"""More items at once than any stage has: what a window too short to be true says is cut to it."""


@dataclass(slots=True)
class Belief:
    """What is known of a stage.

    Attributes:
        info: What it is.
        fit: Its curve.
        cpu_seconds: CPU seconds a source row, a running mean.
        lock_share: Share of these in which it holds the interpreter lock; None = not measured yet.
        busy: Items at once in the last window that taught something.
        saturated: The largest concurrency at which it was seen fully used; None = never.
        process_bytes: What one of its processes holds.
        held_up: Share of the time in which those behind it had no place for its items, a running mean of the windows
            in which the training loop waited all the same: what it can do in the rest of the time counts.
    """

    info: StageInfo
    fit: StageFit
    cpu_seconds: float | None = None
    lock_share: float | None = None
    busy: float = 0.0
    saturated: int | None = None
    process_bytes: int = 0
    held_up: float = 0.0


NUMBERS: Mapping[str, tuple[bool, float]] = {
    "cpu_seconds": (True, MOST_SECONDS),
    "lock_share": (True, 1.0),
    "busy": (False, MOST_BUSY),
    "saturated": (True, MOST_BUSY),
    "process_bytes": (False, 1e15),
    "held_up": (False, 1.0),
}
"""What is kept of a belief beside its fit: whether it may be unknown, and the most that it can be."""


class Beliefs:
    """All that is known of a pipeline.

    Args:
        forgetting: Of the fits of the stages.
        noise: Of the same.
        least_items: Completions below which a stage's window teaches nothing.

    Attributes:
        stages: By stage that was measured, what is known of it.
        trainer_seconds: Seconds that the training loop itself needs for a source row, a running mean; None = not known.
    """

    def __init__(self, forgetting: float, noise: float, least_items: int) -> None:
        self._forgetting, self._noise, self._least_items = forgetting, noise, least_items
        self.stages: dict[str, Belief] = {}
        self.trainer_seconds: float | None = None

    def state_dict(self) -> list[dict[str, Any]]:
        """What is known of each stage, for `remember`: JSON. Safe to ask for while it learns."""
        return [
            {
                "name": name,
                "kind": belief.info.kind,
                "executor": belief.info.executor,
                "waits": belief.info.waits,
                "fit": belief.fit.state_dict(),
                **{field: getattr(belief, field) for field in NUMBERS},
            }
            for name, belief in list(self.stages.items())
        ]

    def remember(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Begin with what an earlier run knew.

        Raises:
            Exception: Of some kind, if it is nothing that `state_dict` gave.
        """
        found = {}
        for each in state:
            fit = StageFit(forgetting=self._forgetting, noise=self._noise)
            fit.remember(each["fit"])
            name, kind, executor, waits = each["name"], each["kind"], each["executor"], each["waits"]
            if not isinstance(name, str) or not isinstance(kind, str) or executor not in ("thread", "process"):
                raise ValueError("a stage has a name, a kind, and the executor 'thread' or 'process'")
            if waits is not None and waits is not True and waits is not False:
                raise ValueError("whether a stage waits is true, false or null")
            numbers: dict[str, Any] = {}
            for field, (optional, most) in NUMBERS.items():
                value = each[field]
                numbers[field] = None if value is None and optional else number(value, 0.0, most)
            numbers["saturated"] = None if numbers["saturated"] is None else int(numbers["saturated"])
            numbers["process_bytes"] = int(numbers["process_bytes"])
            found[name] = Belief(StageInfo(name, kind, executor, waits=waits), fit, **numbers)
        self.stages = found

    def learn(self, snapshot: Snapshot) -> frozenset[str]:
        """Learn from a window.

        Returns:
            The stages that were found to have changed.
        """
        if snapshot.window_seconds <= 0:
            return frozenset()
        own = trainer_per_row(snapshot)
        if own is not None:
            self.trainer_seconds = _mean(self.trainer_seconds, own)
        contention = lock_contention(snapshot)
        lost = {stage.name: lost_share_of(stage) * contention for stage in snapshot.stages}
        changed = [stage.name for stage in snapshot.stages if self._learn_stage(stage, snapshot, lost[stage.name])]
        self._learn_lock(snapshot, lost)
        return frozenset(changed)

    def _learn_stage(self, stage: StageSnapshot, snapshot: Snapshot, lost_share: float) -> bool:
        seconds, cpu = wall_per_row(stage), cpu_per_row(stage)
        if seconds is None or stage.items_out < self._least_items:
            return False
        belief = self.stages.get(stage.name)
        if belief is None:
            belief = Belief(stage.info, StageFit(forgetting=self._forgetting, noise=self._noise))
        belief.info = stage.info
        belief.busy = min(stage.in_hand_mean or stage.busy_seconds / snapshot.window_seconds, MOST_BUSY)
        belief.saturated = stage.saturated_concurrency
        belief.process_bytes = stage.process_resident_bytes or belief.process_bytes
        if snapshot.consumer.wait_share > STARVED:
            held_up = stage.wait_share.get("order", 0.0) + stage.wait_share.get("room", 0.0)
            belief.held_up = _mean(belief.held_up, min(1.0, held_up))
        if cpu is not None:
            belief.cpu_seconds = _mean(belief.cpu_seconds, min(cpu, seconds))
        own = (1 - lost_share) / (stage.source_rows_per_item or 1.0)
        points = [Point(crowd, items, wall * own) for crowd, items, wall in stage.wall_seconds_by_crowd]
        changed = belief.fit.observe(points or [Point(belief.busy, stage.items_out, seconds * (1 - lost_share))])
        self.stages[stage.name] = belief  # only now, as another thread may ask for what is known
        return changed

    def _learn_lock(self, snapshot: Snapshot, lost: Mapping[str, float]) -> None:
        """How much of their CPU time stages on threads hold the interpreter lock.

        Of n threads that all need it all the time each loses 1 - 1 / n of its time. As one thread holds it at a
        time, all together hold it for no longer than the window.
        """
        threads = [s for s in snapshot.stages if s.name in self.stages and computes_on_threads(s.info)]
        contending = [stage for stage in threads if lost[stage.name] >= CONTENDS]
        at_once = sum(stage.busy_seconds for stage in contending) / snapshot.window_seconds
        if snapshot.machine.lock_wait_seconds is None or at_once < 1.5:
            return
        shares = {stage.name: min(1.0, lost[stage.name] / (1 - 1 / at_once)) for stage in threads}
        held = sum(shares[stage.name] * _cpu_share(stage) * stage.busy_seconds for stage in threads)
        too_much = max(1.0, held / snapshot.window_seconds)
        for name, share in shares.items():
            self.stages[name].lock_share = _mean(self.stages[name].lock_share, share / too_much)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST * (new - old)


def computes_on_threads(info: StageInfo) -> bool:
    """Whether it is a stage that may hold the interpreter lock of the training process."""
    return info.executor == "thread" and not info.waits


def _cpu_share(stage: StageSnapshot) -> float:
    """CPU seconds in a second of its work."""
    if stage.cpu_seconds_mean is None or not stage.wall_seconds_mean:
        return 1.0
    return min(1.0, stage.cpu_seconds_mean / stage.wall_seconds_mean)


def lost_share_of(stage: StageSnapshot) -> float:
    """Share of its work in which its threads neither ran nor waited for a CPU."""
    if not computes_on_threads(stage.info) or stage.busy_seconds <= 0:
        return 0.0
    return max(0.0, 1 - _cpu_share(stage) - (stage.run_queue_seconds or 0.0) / stage.busy_seconds)


def lock_contention(snapshot: Snapshot) -> float:
    """From 0, the lock is free, to 1: threads that compute in Python hold it all the time."""
    wait = snapshot.machine.lock_wait_seconds
    if wait is None:
        return 0.0
    return min(1.0, max(0.0, (wait - LOCK_FREE_SECONDS) / (LOCK_HELD_SECONDS - LOCK_FREE_SECONDS)))
