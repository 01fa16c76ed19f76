"""Slots and threads: a free slot takes the deepest work there is.

Threads are not tied to stages. The scheduler knows nothing of stages either: it asks `pick` for the next
task whenever a slot or a thread is free, and `pick` answers with the deepest one.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Task(Protocol):
    """Work for one thread."""

    holds_slot: bool
    """Whether it counts against the CPU slots while it runs."""

    def run(self) -> None:
        """Do the work, without the lock; never raises."""

    def done(self) -> None:
        """Book the result, with the lock."""


class Bell:
    """Wakes the consumer, whom an interrupt may take out of its waiting at any moment.

    `threading.Condition` would not do: interrupted while it takes its lock again, it leaves that lock to be
    released by somebody who does not hold it.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def notify_all(self) -> None:
        """Something happened; the scheduler's lock is held. Who was woken passes it on where others may wait too."""
        if self._gate.locked():
            self._gate.release()

    def wait(self) -> None:
        """Wait without the lock until something happened since the last wait."""
        self._gate.acquire()


class WorkerThread(threading.Thread):
    """A thread of a scheduler; a daemon: a function that never returns must not keep the interpreter from ending.

    Attributes:
        ending: Set when the scheduler is being closed.
    """

    def __init__(self, ending: threading.Event, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.ending = ending


def ending() -> threading.Event:
    """Set when the calling thread is to end soon: who waits in a task waits for it too. Nobody sets it elsewhere."""
    thread = threading.current_thread()
    return thread.ending if isinstance(thread, WorkerThread) else threading.Event()


class _Worker:
    __slots__ = ("gate", "leave", "task", "thread")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.task: Task | None = None
        self.leave = False
        self.thread: threading.Thread


class Scheduler:
    """Runs tasks on threads that it starts as they are needed.

    The lock guards the scheduler and everything that `pick` and the tasks' `done` touch.

    Args:
        name: For the names of threads.
        slots: CPU slots, at least 1. More may be set at any time and is used at once; after less is set,
            running tasks finish and none begins until use has fallen below it.
        max_threads: The most threads.

    `observe` is called before a finished task is booked: what it sees is how things stood until then.
    `spare` is how many idle threads are kept for later; of more, each ends by itself. `slotless` says whether
    there may be tasks that hold no slot: without them nobody is woken to look for work while no slot is free.
    """

    def __init__(self, name: str, slots: int, max_threads: int) -> None:
        self.lock = threading.Lock()
        self.slots = slots
        self.used = 0
        self.peak_used = 0
        self.max_threads = max_threads
        self.spare = slots
        self.slotless = False
        self.pick: Callable[[bool], Task | None] = lambda slot_free: None
        self.observe: Callable[[], None] = lambda: None
        self._name = name
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False
        self._ending = threading.Event()
        self._started = 0

    @property
    def threads(self) -> int:
        """Threads that live."""
        return len(self._workers)

    def dispatch(self) -> None:
        """Give work to idle or new threads while there is some; the lock is held."""
        while self._idle or len(self._workers) < self.max_threads:
            task = self.take()
            if task is None:
                return
            self._hand(task)

    def nudge(self, sure: bool = False) -> None:
        """Something changed: let one thread look for work; the lock is held. Cheap for the consumer.

        It takes no task itself: an interrupt would lose it. `sure`: also where no slot is free.
        """
        if self._closed or not (sure or self.slotless or self.used < self.slots):
            return
        if self._idle or len(self._workers) < self.max_threads:
            self._hand(None)

    def take(self) -> Task | None:
        """The next task, if one may begin; its slot is taken. The lock is held."""
        if self._closed:
            return None
        task = self.pick(self.used < self.slots)
        if task is not None and task.holds_slot:
            self.used += 1
            if self.used > self.peak_used:
                self.peak_used = self.used
        return task

    def book(self, task: Task) -> None:
        """A task that was taken has run: free its slot and book its result. The lock is held."""
        self.observe()
        if task.holds_slot:
            self.used -= 1
        task.done()

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of its workers."""
        return any(worker.thread is thread for worker in list(self._workers))

    def close(self, seconds: float) -> list[str]:
        """End all threads; names of those that were still inside a function after so many seconds."""
        self._ending.set()
        with self.lock:
            self._closed = True
            for worker in self._workers:  # not only idle ones: an interrupt may have lost one on its way, or unstarted
                worker.leave = True
                if worker.gate.locked():
                    worker.gate.release()
            self._idle.clear()
            threads = [worker.thread for worker in self._workers if worker.thread.ident is not None]
        until = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]

    def _hand(self, task: Task | None) -> None:
        if self._idle:
            worker = self._idle.pop()  # the one that was idle for the shortest time
            worker.task = task
            worker.gate.release()
            return
        worker = _Worker()
        worker.task = task
        self._started += 1
        worker.thread = WorkerThread(self._ending, self._loop, (worker,), f"{self._name}-{self._started}")
        self._workers.add(worker)
        worker.thread.start()

    def _loop(self, worker: _Worker) -> None:
        task, worker.task = worker.task, None
        while True:
            if task is not None:
                task.run()
            with self.lock:
                if task is not None:
                    self.book(task)
                task = self.take()
                if task is None:
                    if self._closed or len(self._idle) >= self.spare:
                        self._workers.discard(worker)
                        return
                    self._idle.append(worker)
                else:
                    self.dispatch()
            if task is None:
                worker.gate.acquire()
                task, worker.task = worker.task, None
                if worker.leave and task is None:  # one that it was handed just before is in hand already
                    with self.lock:
                        self._workers.discard(worker)
                    return
