"""Whether a loader has come to rest: what is in hand is held by a test, and nothing more can begin."""

import time

from intune import Loader


def at_rest(loader: Loader, busy: int) -> bool:
    """Whether so many items are in hand, every other thread is idle, and so nothing more can begin."""
    scheduler = loader._engine.scheduler
    with scheduler.lock:
        return len(scheduler._workers) - len(scheduler._idle) == busy == loader._engine.context.busy


def settle(loader: Loader, busy: int = 0) -> None:
    """Wait until so many items are in hand and nothing more can begin; for ever, if that never comes."""
    while not at_rest(loader, busy):
        time.sleep(0.001)
