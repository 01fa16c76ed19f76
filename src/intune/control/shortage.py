"""What a memory limit cost, and what more memory would give."""

from collections.abc import Sequence
from dataclasses import dataclass

from intune._values import Snapshot
from intune._words import duration, size
from intune.control.bounds import bound_without

LEAST_GAIN = 0.03
"""Less is not worth a sentence."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the memory limit cost over some time.

    Attributes:
        seconds: Seconds in which a CPU slot was free and only memory kept an item from going on.
        more_bytes: About how much more memory would have let all slots work.
        gain: About what share more would have been delivered with it; at most what the trainer could take, and what
            limits of the stages would let through.
    """

    seconds: float
    more_bytes: int
    gain: float

    def in_words(self) -> str:
        """As in "held back 14.0 s by the memory limit; about 2.1 GiB more would have given about 30% more"."""
        held = f"held back {duration(self.seconds)} by the memory limit"
        if self.gain < LEAST_GAIN or not self.more_bytes:
            return held
        return f"{held}; about {size(self.more_bytes)} more would have given about {self.gain:.0%} more"


def together(parts: Sequence[Shortage], run_seconds: float) -> Shortage:
    """Several windows of a run as one: what was held back in some of them cost the whole run only its share.

    Args:
        parts: What memory cost, in each window in which it cost anything.
        run_seconds: Length of all windows of the run.
    """
    seconds = sum(part.seconds for part in parts)
    if seconds <= 0:
        return Shortage(0.0, 0, 0.0)
    more = sum(part.more_bytes * part.seconds for part in parts) / seconds
    gain = sum(part.gain * part.seconds for part in parts) / max(seconds, run_seconds)
    return Shortage(seconds, int(more), gain)


def shortage(window: Snapshot) -> Shortage | None:
    """What the memory limit cost in a window; None where it held nothing back, or where that is not known.

    It is taken that what is in flight grows with the number of items that are worked on, and the rate with it: an
    estimate for stages that do not hinder each other.
    """
    if not window.held_back_share or window.in_flight_bytes_limit is None or window.window_seconds <= 0:
        return None
    holding = [stage for stage in window.stages if stage.info.waits is not True]
    busy = sum(stage.busy_seconds for stage in holding) / window.window_seconds
    if busy <= 0:
        return None
    gain = bound_without(window, None) - 1
    seconds = window.held_back_share * window.window_seconds
    # While the brake holds, nothing may be in flight: what is, is what was too little.
    return Shortage(seconds, int(gain * max(window.in_flight_bytes_limit, window.in_flight_bytes or 0)), gain)
