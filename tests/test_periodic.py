"""A thread that does something again and again, on a clock that the test moves."""

import logging
import threading
from collections.abc import Generator

import pytest

from intune._clock import SystemClock
from intune._periodic import Periodic
from intune.testing import ManualClock


class Work:
    """Steps of 2 s, of which the last says that it was one; notes where they ran."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self.done = 0
        self.threads: list[threading.Thread] = []
        self.closed = threading.Event()

    def __call__(self) -> Generator[float, None, None]:
        self.threads.append(threading.current_thread())
        try:
            while self.done != self.steps:
                self.done += 1
                yield 2.0
        finally:
            self.closed.set()


def alive(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_it_steps_at_once_and_after_each_interval_in_a_daemon_of_its_name() -> None:
    clock, work = ManualClock(), Work()
    periodic = Periodic("a-name", work, clock)
    assert not periodic.started
    periodic.start()
    for steps in (1, 2, 3):
        clock.wait_for_sleepers()
        assert work.done == steps
        clock.advance(1.9)
        clock.wait_for_sleepers()
        assert work.done == steps
        clock.advance(0.1)
    assert periodic.started
    periodic.stop()
    assert work.closed.is_set()
    (thread,) = work.threads
    assert (thread.name, thread.daemon, thread.is_alive()) == ("a-name", True, False)


def test_start_and_stop_may_be_repeated() -> None:
    clock, work = ManualClock(), Work()
    periodic = Periodic("again", work, clock)
    periodic.stop()
    for round_ in (1, 2):
        periodic.start()
        periodic.start()
        clock.wait_for_sleepers()
        assert (alive("again"), len(work.threads)) == (1, round_)
        periodic.stop()
        periodic.stop()
        assert (alive("again"), periodic.started) == (0, False)


def test_stop_does_not_wait_for_the_interval() -> None:
    begun = threading.Event()

    def steps() -> Generator[float, None, None]:
        begun.set()
        yield 3600.0

    periodic = Periodic("long", steps, SystemClock())
    periodic.start()
    assert begun.wait(10)
    periodic.stop()
    assert alive("long") == 0


def test_it_ends_with_its_steps_and_is_not_begun_again_before_it_was_stopped() -> None:
    work = Work(steps=2)
    periodic = Periodic("short", work, ManualClock(auto=True))
    periodic.start()
    assert work.closed.wait(10)
    periodic.start()
    assert (work.done, len(work.threads), periodic.started) == (2, 1, True)
    periodic.stop()
    work.closed.clear()
    periodic.start()
    assert work.closed.wait(10)
    periodic.stop()
    assert (work.done, len(work.threads)) == (2, 2)


def test_stopped_by_a_step_of_its_own_it_does_not_wait_for_itself() -> None:
    after = threading.Event()

    def steps() -> Generator[float, None, None]:
        periodic.stop()
        after.set()
        yield 0.0
        raise AssertionError("it was stopped")

    periodic = Periodic("own", steps, SystemClock())
    periodic.start()
    assert after.wait(10)


@pytest.mark.parametrize("who", [None, "the tuner"])
def test_a_step_that_does_not_return_is_left_alone_and_named(
    who: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("intune._periodic.JOIN_SECONDS", 0.01)
    entered, leave = threading.Event(), threading.Event()

    def steps() -> Generator[float, None, None]:
        entered.set()
        leave.wait(10)
        yield 1.0

    periodic = Periodic("stuck", steps, SystemClock(), who)
    periodic.start()
    assert entered.wait(10)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "stuck"]
    with caplog.at_level(logging.WARNING):
        periodic.stop()
    leave.set()
    thread.join(10)
    assert not thread.is_alive()
    assert f"{who or 'stuck'} did not return within 0.01 s" in caplog.text
