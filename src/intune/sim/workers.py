"""Work handed out to processes that end when the work does, or is broken off."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def carry_out(work: Sequence[Job], run: Callable[[Job], Result], jobs: int) -> Generator[Result, None, None]:
    """Results as they come; when the iterator is closed, or an error or Ctrl-C comes out of it, no process is left.

    Args:
        work: What is done, each by one call.
        run: Does it; it must be importable, as it goes to other processes.
        jobs: Processes; with one, or for a single piece of work, the caller does it.
    """
    if jobs <= 1 or len(work) <= 1:
        yield from map(run, work)
        return
    context = _Spawn()
    pool = ProcessPoolExecutor(min(jobs, len(work)), mp_context=context, initializer=_end_with_parent)
    try:
        with _uninterrupted():
            futures = [pool.submit(run, each) for each in work]
        for future in as_completed(futures):
            yield future.result()
    finally:
        # Processes that still work are not waited for: what they do is not wanted any more, and may take minutes.
        context.end()
        pool.shutdown(cancel_futures=True)  # its thread gives back what the processes shared


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Spawn(SpawnContext):
    """Spawns, as the caller may have threads that a fork would not survive, and knows which processes it made."""

    def __init__(self) -> None:
        self._made: list[SpawnProcess] = []

    def Process(self, *args: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        """A new process, not started yet."""
        self._made.append(SpawnProcess(*args, **named))
        return self._made[-1]

    def end(self) -> None:
        """End all that run, and wait until they have."""
        begun = [each for each in self._made if each.pid is not None]
        for process in begun:
            process.terminate()
        for process in begun:
            process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """What starts processes is not broken off half-way, and they never see Ctrl-C, which a terminal sends to them too.

    Signals that come meanwhile are handled afterwards. The mask is for the processes, which keep it: a handler of their
    own would come too late, when they have been importing for a while. It does not keep the signal from the caller,
    where another thread may take it.
    """
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    before = {number: how for number, how in known.items() if how not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, how in before.items():
            signal.signal(number, how)
        for each in came:
            signal.raise_signal(each)
