import threading

import pytest

from intune.testing import ManualClock


def run(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_time_passes_only_when_it_is_advanced() -> None:
    clock = ManualClock()
    assert (clock.wall(), clock.cpu()) == (0.0, 0.0)
    clock.advance(1.5, cpu_seconds=0.25)
    clock.advance(0.5)
    assert (clock.wall(), clock.cpu()) == (2.0, 0.25)


def test_cpu_seconds_belong_to_the_thread_that_advanced() -> None:
    clock, seen = ManualClock(), []
    clock.advance(1.0, cpu_seconds=1.0)

    def other() -> None:
        seen.append(clock.cpu())
        clock.advance(0.0, cpu_seconds=3.0)
        seen.append(clock.cpu())

    run(other).join(10)
    assert (seen, clock.cpu()) == ([0.0, 3.0], 1.0)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_time_does_not_go_back_or_out_of_bounds(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot advance by"):
        ManualClock().advance(seconds)
    with pytest.raises(ValueError, match="cannot advance by"):
        ManualClock().advance(0.0, cpu_seconds=seconds)


def test_a_sleeper_wakes_when_its_time_has_come_and_not_before() -> None:
    clock, woken = ManualClock(), []
    short = run(lambda: woken.append(("short", clock.sleep(1.0, threading.Event()))))
    long = run(lambda: woken.append(("long", clock.sleep(3.0, threading.Event()))))
    clock.wait_for_sleepers(2)
    clock.advance(0.5)
    clock.wait_for_sleepers(2)
    clock.advance(0.5)
    short.join(10)
    assert woken == [("short", False)]
    clock.advance(2.0)
    long.join(10)
    assert woken == [("short", False), ("long", False)]


def test_a_sleeper_can_be_woken() -> None:
    clock, wake, woken = ManualClock(), threading.Event(), []
    sleeper = run(lambda: woken.append(clock.sleep(1.0, wake)))
    clock.wait_for_sleepers()
    wake.set()
    sleeper.join(10)
    assert (woken, clock.wall()) == ([True], 0.0)
    assert clock.sleep(1.0, wake), "an event that is set already does not wait"
    with pytest.raises(TimeoutError, match="0 of 1 threads sleep"):
        clock.wait_for_sleepers(timeout=0.01)


def test_no_time_is_no_sleep() -> None:
    assert not ManualClock().sleep(0.0, threading.Event())


def test_an_automatic_clock_jumps_to_the_end_of_each_sleep() -> None:
    clock, wake = ManualClock(auto=True), threading.Event()
    assert not clock.sleep(5.0, wake)
    assert not clock.sleep(0.5, wake)
    assert clock.wall() == 5.5
    wake.set()
    assert clock.sleep(5.0, wake)
    assert clock.wall() == 5.5


def test_ten_tenths_are_one() -> None:
    clock = ManualClock()
    sleeper = run(lambda: clock.sleep(1.0, threading.Event()))
    clock.wait_for_sleepers()
    for _ in range(10):
        clock.advance(0.1)
    assert clock.wall() < 1.0, "the sum of floats is a little less"
    sleeper.join(10)
    assert not sleeper.is_alive()
