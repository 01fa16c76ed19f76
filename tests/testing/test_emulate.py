import threading
import time
from collections.abc import Callable

import pytest

from intune.testing import EmulatedClock, ManualClock, TokenPool, emulated


def run(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_an_emulated_function_gives_back_its_input_and_takes_its_time() -> None:
    clock = EmulatedClock(ManualClock(auto=True))
    work = emulated(0.5, TokenPool(1, clock))
    item = object()
    assert work(item) is item
    assert clock.wall() == 0.5


def test_seconds_with_a_token_look_like_cpu_seconds_of_the_thread_that_held_it() -> None:
    manual = ManualClock(auto=True)
    clock = EmulatedClock(manual)
    work = emulated(0.25, TokenPool(2, clock))
    seen = []

    def other() -> None:
        work(None)
        seen.append(clock.cpu())

    for _ in range(2):
        work(None)
    manual.advance(1.0, cpu_seconds=0.125)
    run(other).join(10)
    assert (clock.cpu(), seen) == (0.625, [0.25])


def test_waiting_for_a_token_is_not_cpu_and_turns_come_in_order() -> None:
    manual = ManualClock()
    clock = EmulatedClock(manual)
    pool = TokenPool(1, clock)
    done: list[tuple[int, float, float]] = []
    threads = []
    for number in range(4):
        threads.append(run(lambda number=number: (pool.work(1.0), done.append((number, clock.wall(), clock.cpu())))))
        if number == 0:
            manual.wait_for_sleepers(1)
        else:
            wait_until(lambda number=number: len(pool._waiting) == number)
    for thread in threads:
        manual.wait_for_sleepers(1)
        manual.advance(1.0)
        thread.join(10)
    assert done == [(0, 1.0, 1.0), (1, 2.0, 1.0), (2, 3.0, 1.0), (3, 4.0, 1.0)]


def test_no_more_work_than_tokens_however_many_threads() -> None:
    manual = ManualClock()
    pool = TokenPool(3, EmulatedClock(manual))
    threads = [run(lambda: pool.work(1.0)) for _ in range(7)]
    for at_work, waiting in ((3, 4), (3, 1), (1, 0)):
        manual.wait_for_sleepers(at_work)
        wait_until(lambda waiting=waiting: len(pool._waiting) == waiting)
        assert len(manual._ends) == at_work
        manual.advance(1.0)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_token_comes_back_from_work_that_is_broken_off() -> None:
    class Breaks(ManualClock):
        broken = False

        def sleep(self, seconds: float, wake: threading.Event) -> bool:
            if not self.broken:
                self.broken = True
                raise KeyboardInterrupt
            return super().sleep(seconds, wake)

    pool = TokenPool(1, EmulatedClock(Breaks(auto=True)))
    with pytest.raises(KeyboardInterrupt):
        pool.work(1.0)
    pool.work(1.0)
    assert pool.clock.wall() == 1.0


@pytest.mark.parametrize("handed", [False, True])
def test_a_waiter_that_is_broken_off_leaves_the_line_or_passes_its_turn_on(
    handed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TokenPool(1, EmulatedClock(ManualClock(auto=True)))
    pool._take()
    real = threading.Lock

    class Turn:
        """A lock whose second acquire, that of the waiter, is broken off, perhaps just after it was released."""

        def __init__(self) -> None:
            self.inner, self.calls = real(), 0

        def acquire(self) -> bool:
            self.calls += 1
            if self.calls == 2:
                if handed:
                    pool._give()
                raise KeyboardInterrupt
            return self.inner.acquire()

        def release(self) -> None:
            self.inner.release()

    monkeypatch.setattr("intune.testing.emulate.threading.Lock", Turn)
    with pytest.raises(KeyboardInterrupt):
        pool.work(1.0)
    monkeypatch.undo()
    if not handed:
        pool._give()
    pool.work(1.0)
    assert (pool._free, len(pool._waiting)) == (1, 0)


def test_on_the_machines_clock_a_sleep_with_a_token_counts_as_cpu() -> None:
    pool = TokenPool(1)
    before = pool.clock.wall(), pool.clock.cpu()
    emulated(0.02, pool)(None)
    assert pool.clock.wall() - before[0] >= 0.02
    assert pool.clock.cpu() - before[1] >= 0.02


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_pool_without_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens is {tokens}"):
        TokenPool(tokens)


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_less_than_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        emulated(seconds, TokenPool(1))


def wait_until(true: Callable[[], bool]) -> None:
    """Another thread is about to do it; the time-out only keeps a broken test from hanging."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
