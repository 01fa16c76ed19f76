"""Work in processes: results, and that no process is left, however it ends."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest

from intune.sim.workers import carry_out

WHO = "/proc/self"
"""Its real path names the process that asks."""

MASK = partial(signal.pthread_sigmask, signal.SIG_BLOCK)


@pytest.mark.parametrize(("work", "jobs"), [([WHO] * 4, 1), ([WHO], 2)])
def test_the_caller_does_it_where_processes_gain_nothing(work: list[str], jobs: int) -> None:
    assert list(carry_out(work, os.path.realpath, jobs)) == [f"/proc/{os.getpid()}"] * len(work)


def test_processes_do_it() -> None:
    found = list(carry_out([WHO, "/a/../b", "/a/../c"], os.path.realpath, 2))
    assert len(found) == 3
    assert {"/b", "/c"} < set(found)
    assert f"/proc/{os.getpid()}" not in found
    assert multiprocessing.active_children() == []


def test_processes_end_when_the_caller_is_killed() -> None:
    program = "from os.path import realpath; import time; from intune.sim.workers import carry_out\n"
    program += "found = carry_out(['/proc/self'] * 3 + ['/'], realpath, 2)\n"
    program += "print(*{next(found) for _ in range(3)}, flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        workers = [int(each.rpartition("/")[2]) for each in caller.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in workers]
        caller.kill()
        try:
            for each in watched:
                assert select.select([each], [], [], 60)[0], "a process is left"
        finally:
            for each in watched:
                os.close(each)
    assert workers


def test_processes_never_see_an_interrupt_and_the_caller_does_again() -> None:
    assert [signal.SIGINT in each for each in carry_out([(), ()], MASK, 2)] == [True, True]
    assert signal.SIGINT not in MASK(())


class Interrupted(list[float]):
    """Work in which Ctrl-C comes when part of it was handed out."""

    all_handed_out = False

    def __iter__(self) -> Iterator[float]:
        yield self[0]
        os.kill(os.getpid(), signal.SIGINT)  # a thread of the pool may take it
        time.sleep(0.1)
        yield from self[1:]
        self.all_handed_out = True


def test_an_interrupt_waits_until_processes_have_begun(capfd: pytest.CaptureFixture[str]) -> None:
    work = Interrupted([1000, 1000])
    with pytest.raises(KeyboardInterrupt):
        next(carry_out(work, time.sleep, 2))
    assert work.all_handed_out
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr() == ("", "")


def test_an_iterator_that_is_closed_leaves_no_process() -> None:
    found = carry_out([0, 1000], time.sleep, 2)
    next(found)
    assert multiprocessing.active_children() != []
    found.close()
    assert multiprocessing.active_children() == []


def test_an_error_leaves_no_process() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        list(carry_out([1000, -1], time.sleep, 2))
    assert multiprocessing.active_children() == []
