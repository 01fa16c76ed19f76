"""Why stages run fewer items than they may: time booked to causes, while work goes on."""

from intune.metrics.counters import unmet
from intune.pipeline.run import EpochRun

LEAST_SECONDS = 2e-3
"""How often at most: it costs some microseconds."""


class Waits:
    """Books time to causes, with the scheduler's lock held.

    Attributes:
        held_back: Seconds in which a slot was free and only memory kept an item from going on.
    """

    def __init__(self, now: float) -> None:
        self.held_back = 0.0
        self._booked_until = now

    def book_if_due(self, now: float, run: EpochRun | None, slot: bool) -> None:
        """Book, unless that was done just before."""
        if now - self._booked_until > LEAST_SECONDS:
            self.book(now, run, slot)

    def book(self, now: float, run: EpochRun | None, slot: bool) -> None:
        """Book the time since the last call to the causes for which stages run below their concurrency.

        Args:
            now: The time.
            run: The epoch that is delivered; None = none is.
            slot: Whether a CPU slot is free.
        """
        passed, self._booked_until = now - self._booked_until, now
        if run is None or run.cancelled or passed <= 0:
            return
        held_back = False
        for node in run.nodes:
            stage = node.stage
            if stage.running >= stage.cap:
                stage.largest_cap = max(stage.largest_cap, stage.cap)
                continue
            has_input, order, room, memory = node.gates()
            cause = unmet(
                input_ready=has_input, order_open=order, room=room, memory=memory, slot=slot or not stage.holds_slot
            )
            held_back = held_back or (cause == "memory" and slot)
            # With nothing unmet it only waits for a thread to take notice, as for a slot.
            stage.counters.wait_seconds[cause or "slot"] += passed
        if held_back:
            self.held_back += passed
