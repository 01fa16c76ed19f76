"""Whether the items of a stage take turns for what only one or a few of them may have: a lock, a disk, a connection.

Then more of them at once only make a longer queue. Two things together show it: several are worked on, and most of
their time goes by without computing or a want of a CPU; and the stage gives hardly more items a second than with
clearly fewer at once. Where it gives far fewer now, what they take turns for is idle for much of the time: something
else limits the run then.

Who gets a lock is a matter of chance: some items wait for seconds while others pass them. So such an item looks slow
and is not, and rates at few and at many at once are known to a factor of about 1.5 only.
"""

from typing import NamedTuple

from intune._values import Snapshot, StageSnapshot
from intune.control.lock import HELD_SECONDS, lost_seconds

LEAST_AT_ONCE = 1.5
"""Items in work on average below which nobody queues for anybody; and by how much few and many must differ."""

LEAST_ITEMS, ENOUGH_ITEMS = 20, 50
"""Items at few at once below which nothing is told of them, and from which on no smaller numbers are asked."""

LEAST_GAIN, MOST_GAIN = 0.5, 1.35
"""Items a second at many at once, over those at few: between these, more at once gained nothing."""

GAIN_SHARE = 0.35
"""The same, where the two hardly differ, as a share of what stages that scale would gain."""

LOST_SHARE = 0.75
"""Of the time that items lose while they take turns, the share that must be seen to be lost."""

COMPUTES_SHARE = 0.3
"""CPUs in use here below which no Python code holds the interpreter lock for much of the time."""

CPUS_BUSY_SHARE = 0.85
"""Share of the CPUs' time in use from which time that processes lose may be a want of CPUs."""


class More(NamedTuple):
    """What more at once brought to a stage.

    Attributes:
        few: Items at once, on average, that it is compared with.
        many: Items at once now.
        gain: Items a second now over those at few.
    """

    few: float
    many: float
    gain: float

    @property
    def scales(self) -> bool:
        """Whether it gained something."""
        return self.gain > min(MOST_GAIN, 1 + GAIN_SHARE * (self.many / self.few - 1))


def more_at_once(snapshot: Snapshot, stage: StageSnapshot) -> More | None:
    """What a stage gives now against what it gave with fewer at once; None where that is not known."""
    if snapshot.window_seconds <= 0 or not stage.wall_seconds_mean:
        return None
    many = stage.busy_seconds / snapshot.window_seconds
    items, seconds, walls = 0, 0.0, 0.0
    for crowd, count, wall in reversed(stage.wall_seconds_by_crowd):
        if LEAST_AT_ONCE * crowd <= many and items < ENOUGH_ITEMS:
            items, seconds, walls = items + count, seconds + count * wall / crowd, walls + count * wall
    if items < LEAST_ITEMS or seconds <= 0:
        return None
    return More(walls / seconds, many, many / stage.wall_seconds_mean * seconds / items)


def takes_turns(snapshot: Snapshot, stage: StageSnapshot) -> More | None:
    """What more at once brought to a stage whose items take turns; None where they do not, or it cannot be told."""
    if not loses_time(snapshot, stage):
        return None
    more = more_at_once(snapshot, stage)
    return more if more is not None and more.gain >= LEAST_GAIN and not more.scales else None


def may_take_turns(snapshot: Snapshot, stage: StageSnapshot) -> bool:
    """Whether they look so, and nothing shows that more at once bring more."""
    if not loses_time(snapshot, stage):
        return False
    more = more_at_once(snapshot, stage)
    return more is None or not more.scales


def loses_time(snapshot: Snapshot, stage: StageSnapshot) -> bool:
    """Whether most of its items' time goes by as if they took turns: without computing, or a want of a CPU."""
    many = stage.busy_seconds / snapshot.window_seconds if snapshot.window_seconds > 0 else 0.0
    if many < LEAST_AT_ONCE or _python_holds_the_lock(snapshot):
        return False
    if stage.run_queue_seconds is None and _cpus_are_busy(snapshot):
        return False
    return lost_seconds(stage) >= LOST_SHARE * (1 - 1 / many) * stage.busy_seconds


def _python_holds_the_lock(snapshot: Snapshot) -> bool:
    """Whether that time may be lost to the interpreter lock: not where the process hardly computes.

    The probe then waited for a CPU that others used.
    """
    used, wait = snapshot.machine.cpu_seconds_used, snapshot.machine.lock_wait_seconds or 0.0
    return wait >= HELD_SECONDS and (used is None or used >= COMPUTES_SHARE * snapshot.window_seconds)


def _cpus_are_busy(snapshot: Snapshot) -> bool:
    """Whether time that was lost may be a want of CPUs; so where their use is not known."""
    machine = snapshot.machine
    if machine.cpu_seconds_used is None:
        return True
    used = max(machine.cpu_seconds_used, machine.cpu_seconds_all or 0.0)
    return used >= CPUS_BUSY_SHARE * min(snapshot.allocation.slots, machine.cpus) * snapshot.window_seconds
