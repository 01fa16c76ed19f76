"""The worker processes of one stage.

Workers are fresh interpreters that run `intune.pipeline.worker`: nothing is forked, and the user's main module is
not imported again. One thread of the pool starts, watches and buries them; whoever has an item borrows a worker,
talks to it and gives it back.
"""

import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from intune._clock import SystemClock
from intune._errors import AllocationError, LoaderError, PipelineError, StageError, WorkerDiedError
from intune._machine.memory import memory_limits, used_of_limit
from intune._machine.system import System
from intune._words import count, size
from intune.pipeline import transport
from intune.pipeline.arena import Arena
from intune.pipeline.culprit import why_unpicklable
from intune.pipeline.handle import Gone, Worker
from intune.pipeline.stage import ProcessSizes, RemoteCall

_IDLE_SECONDS = 1.0  # memory that nobody used for so long is given back
_LEAVE_SECONDS = 10.0  # a worker that is no longer wanted may take so long to close what it has
_CLOSE_SECONDS = 1.0  # the same when the pool is closed
_STARTS = 3  # so many starts may fail in a row while there is no other worker
_LONGEST_PAUSE = 30.0  # seconds between two starts


class ProcessPool:
    """Worker processes that each hold a copy of one function. All methods may be called from any thread.

    * `resize` sets the number that is wanted and returns. As many workers are started at once as have done an item,
      and one until then: what they hold, and that they can be started at all, is known before many are. Of too many,
      idle ones end at once and busy ones after their item; they count as `leaving` until they are gone. 0 pauses.
    * A worker that dies is replaced; the item that it had is done again by another one, `retries` times.
    * If a worker cannot be started, `call` raises the reason once no worker is left, until `resize` asks for more.
    * A function that has a `close` is closed when its worker is no longer wanted.

    Args:
        stage: Name of the stage, for messages.
        target: The function, or any other object that can be called.
        retries: How often an item is done again whose worker died.
        on_change: Called when `live` has changed, from any thread, without a lock. It must not close the pool.
        describe_memory: Figures for the message about a dead worker; by default the limit with the least room, what
            is used of it, and what this process and its workers use.
        on_death: Called with how a worker ended ("was killed by SIGKILL") each time that one dies with an item in
            hand, in the thread that has the item, without a lock. It must neither raise nor close the pool.

    Raises:
        PipelineError: If the function cannot be sent to a worker; names the part of it that is to blame.
    """

    def __init__(
        self,
        stage: str,
        target: Callable[..., Any],
        *,
        retries: int = 1,
        on_change: Callable[[], None] = lambda: None,
        describe_memory: Callable[[], str] | None = None,
        on_death: Callable[[str], None] = lambda how: None,
    ) -> None:
        code = _pickled(stage, target)
        self._stage = stage
        self._retries = retries
        self._on_change = on_change
        self._describe_memory = describe_memory or self._memory_figures
        self._on_death = on_death
        self._clock = SystemClock()
        self._owner = os.getpid()
        self._arena = Arena()
        self._room = self._arena.allocate(len(code))
        (self._code,) = self._arena.memory.write(self._room.start, [memoryview(code)])
        self._changed = threading.Condition()
        self._wanted = 0
        self._told = (0, False)
        self._free: list[Worker] = []
        self._busy: set[Worker] = set()
        self._leaving: dict[Worker, float] = {}  # and until when
        self._starting: list[Worker] = []  # the newest last
        self._failure: Callable[[], BaseException] | None = None  # why no more workers are started
        self._failed_starts = self._deaths = 0  # in a row
        self._not_before = 0.0
        self._close_by: float | None = None
        self._thread: threading.Thread | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def live(self) -> int:
        """Workers that are ready or busy, and wanted."""
        with self._changed:
            return self._live()

    @property
    def starting(self) -> int:
        """Workers that are being started."""
        with self._changed:
            return len(self._starting)

    @property
    def leaving(self) -> int:
        """Workers that are not wanted any more and have not ended yet."""
        with self._changed:
            return len(self._leaving) + len(self._free) + len(self._busy) - self._live()

    @property
    def failed(self) -> bool:
        """Whether workers cannot be started, and none is left: `call` raises why."""
        with self._changed:
            return self._failure is not None and not self._free and not self._busy

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that are shared with the workers, kept results included."""
        return self._arena.bytes_held

    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or busy."""
        with self._changed:
            return [worker.pid for worker in (*self._free, *self._busy)]

    def sizes(self) -> ProcessSizes:
        """Memory of each of these workers that is its own: neither shared with us nor with its like."""
        with self._changed:
            workers = [(worker.pid, worker.done) for worker in (*self._free, *self._busy)]
        done: list[int] = []
        fresh: list[int] = []
        for pid, has_done in workers:
            with suppress(psutil.Error):
                memory = psutil.Process(pid).memory_info()
                (done if has_done else fresh).append(memory.rss - memory.shared)
        return ProcessSizes(tuple(done), tuple(fresh))

    def release_unused(self) -> None:
        """Have each worker give unused memory back to the system after its next item; idle ones do so by themselves."""
        with self._changed:
            for worker in (*self._free, *self._busy):
                worker.release = True

    def resize(self, n: int) -> None:
        """Set the number of workers that is wanted, and return at once.

        Raises:
            AllocationError: If it is negative.
            LoaderError: If the pool is closed, or this is a fork of the process that made it.
        """
        if n < 0:
            raise AllocationError(f"stage {self._stage!r}: {n} processes were asked for; 0 (pause) is the least")
        self._check_owner()
        with self._changed:
            self._check_open()
            if n > self._wanted:
                self._failure, self._failed_starts, self._deaths, self._not_before = None, 0, 0, 0.0
            self._wanted = n
            while self._free and self._surplus() > 0:
                self._dismiss(self._free.pop(0))
            self._cancel_surplus()
            if self._thread is None:
                self._thread = threading.Thread(target=self._attend, name=f"intune-{self._stage}", daemon=True)
                self._thread.start()
        self._ring()
        self._tell()

    def call(self, *args: Any, seed: int | None = None) -> Any:
        """The function's result for these arguments; waits for a free worker, and for the result.

        Arrays in the result are views of shared memory, writable where the function's were.

        Args:
            args: Arguments; they are not changed, whatever the function does with its copies.
            seed: Seeds `random`, and numpy's and torch's global generators where they are imported, before the call.

        Raises:
            LoaderError: If the pool is closed, before or meanwhile.
            StageError: If the arguments, the result or the function's exception cannot go between processes.
            WorkerDiedError: If workers died of this item more than `retries` times.
            BaseException: What the function raised, with its traceback as a note.
        """
        self._check_owner()
        packed = self._pack(args)
        died: list[str] = []
        while len(died) <= self._retries:
            worker = self._borrow()
            try:
                answer = worker.exchange(packed, seed)
            except Gone as gone:
                died.append(f"process {worker.pid} {gone}")
                self._lose(worker)
                if not self._is_closing():  # else it was ended by us
                    self._on_death(str(gone))
            except BaseException:
                self._lose(worker)
                raise
            else:
                self._give_back(worker)
                return answer.open(self._stage)
        with self._changed:
            self._check_open()
        raise WorkerDiedError(
            f"stage {self._stage!r}: worker {', then '.join(died)} while it worked on an item. "
            f"{_HINT if any('SIGKILL' in how for how in died) else ''}Memory: {self._describe_memory()}"
        )

    def close(self) -> None:
        """End all workers within two seconds; items that wait, or do not finish, end with a LoaderError. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._close_by is None:
                self._close_by = self._clock.wall() + _CLOSE_SECONDS
                self._wanted = 0
                for worker in (*self._free, *self._busy):
                    worker.leave()
                self._leaving = dict.fromkeys((*self._leaving, *self._free), self._close_by)
                self._free.clear()
                self._cancel_surplus()
            thread = self._thread
            self._changed.notify_all()
        self._ring()
        self._tell()
        if thread is not None:
            thread.join()
        with self._changed:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1
                self._arena.free(self._room)
        self._arena.close()

    # The workers' lists are changed under the lock only. A worker in none of them belongs to whoever took it out.

    def _live(self) -> int:
        return min(len(self._free) + len(self._busy), self._wanted)

    def _surplus(self) -> int:
        return len(self._free) + len(self._busy) - self._wanted

    def _coming(self) -> list[Worker]:
        return [worker for worker in self._starting if not worker.cancelled]

    def _cancel_surplus(self) -> None:
        for worker in self._coming()[max(0, -self._surplus()) :]:
            worker.cancel()

    def _wants_start(self) -> bool:
        """Whether one more is to be started, once there may be a next start: as many at once as have done an item."""
        if self._close_by is not None or self._failure is not None or self._surplus() + len(self._coming()) >= 0:
            return False
        return len(self._starting) < max(1, sum(worker.done for worker in (*self._free, *self._busy)))

    def _is_closing(self) -> bool:
        with self._changed:
            return self._close_by is not None

    def _check_owner(self) -> None:
        """Without the lock: another thread may have held it at the fork, and never lets go of the copy."""
        if os.getpid() != self._owner:
            raise LoaderError(
                f"stage {self._stage!r}: this process is a fork of the one that made the loader, and its copy is dead; "
                "make a loader here"
            )

    def _check_open(self) -> None:
        if self._close_by is not None:
            raise LoaderError(f"stage {self._stage!r}: the loader is closed")

    def _pack(self, args: tuple[Any, ...]) -> transport.Packed:
        try:
            return transport.pack(args)
        except Exception as error:
            raise StageError(
                f"stage {self._stage!r}: an item cannot be sent to a worker process ({type(error).__name__}: {error}). "
                'Give it arrays, Arrow data or plain values, or use executor="thread"'
            ) from error

    def _borrow(self) -> Worker:
        with self._changed:
            while True:
                self._check_open()
                while self._free:
                    worker = self._free.pop()
                    if not worker.hears(0):
                        self._busy.add(worker)
                        return worker
                    self._note_death(worker)
                if self._failure is not None and not self._starting and not self._busy:
                    raise self._failure()
                self._changed.wait()

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            self._busy.discard(worker)
            self._deaths = 0
            if not worker.done:
                worker.done = True
                self._ring()  # more may be started at once
            if self._surplus() >= 0:
                self._dismiss(worker)
            else:
                self._free.append(worker)
                self._changed.notify()

    def _lose(self, worker: Worker) -> None:
        """A worker ended, or had to be ended, with an item in hand."""
        with self._changed:
            self._busy.discard(worker)
            self._note_death()
        self._tell()

    def _dismiss(self, worker: Worker) -> None:
        worker.leave()
        self._leaving[worker] = self._clock.wall() + _LEAVE_SECONDS if self._close_by is None else self._close_by
        self._ring()

    def _note_death(self, idle: Worker | None = None) -> None:
        """The first death in a row is made good at once, later ones slower and slower."""
        if idle is not None:
            self._leaving[idle] = 0.0
        if self._deaths:
            self._not_before = self._clock.wall() + min(1.0, 0.05 * 2**self._deaths)
        self._deaths += 1
        self._changed.notify_all()
        self._ring()

    def _ring(self) -> None:
        with self._changed:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _tell(self) -> None:
        with self._changed:
            state = self._live(), self._failure is not None
            changed, self._told = state != self._told, state
        if changed:
            self._on_change()

    # What follows runs in the pool's own thread.

    def _attend(self) -> None:
        # Workers inherit the mask: none of them hears an interrupt before it has learnt to ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        trim_at = self._clock.wall() + _IDLE_SECONDS
        while not self._is_over():
            self._wait(trim_at)
            now = self._clock.wall()
            self._greet(now)
            self._bury(now)
            while self._may_start(now):
                self._start_one(now)
            if now >= trim_at:
                self._arena.trim()
                trim_at = now + _IDLE_SECONDS
            self._tell()

    def _is_over(self) -> bool:
        with self._changed:
            if self._close_by is None or self._leaving or self._starting:
                return False
            return not self._busy or self._clock.wall() > self._close_by

    def _wait(self, until: float) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        with self._changed:
            until = min([until, *self._leaving.values()])
            if self._wants_start():
                until = min(until, self._not_before)
            if self._close_by is not None:
                until = min(until, self._close_by)
            for worker in (*self._free, *self._leaving):
                poll.register(worker.fd, 0)
            for worker in self._starting:
                poll.register(worker.fd, select.POLLIN)
        poll.poll(max(0.0, until - self._clock.wall()) * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _greet(self, now: float) -> None:
        with self._changed:
            heard = [worker for worker in self._starting if worker.hears(select.POLLIN)]
        for worker in heard:
            greeting = worker.greeting()
            ready = greeting == ("ready",) and not worker.cancelled
            how = "" if ready else worker.end(0.5)
            with self._changed:
                self._starting.remove(worker)
                if ready:
                    self._failed_starts = 0
                    self._free.append(worker)
                    if self._surplus() > 0:
                        self._dismiss(self._free.pop())
                elif not worker.cancelled:
                    self._note_failed_start(f"a worker process {how}", greeting, now)
                self._changed.notify_all()

    def _note_failed_start(self, what: str, greeting: tuple[Any, ...] | None, now: float) -> None:
        self._failed_starts += 1
        self._not_before = now + min(_LONGEST_PAUSE, 0.1 * 2**self._failed_starts)
        if greeting is not None:  # it could say why, and would say it again
            self._failure = lambda: _failed_start(self._stage, greeting[1])
        elif self._failed_starts >= _STARTS and not (self._free or self._busy):  # else the others go on meanwhile
            text = f"stage {self._stage!r}: {what} before it began, {self._failed_starts} times in a row. "
            self._failure = lambda: WorkerDiedError(f"{text}Memory: {self._describe_memory()}")

    def _bury(self, now: float) -> None:
        with self._changed:
            for worker in [worker for worker in self._free if worker.hears(0)]:
                self._free.remove(worker)
                self._note_death(worker)
            ended = [worker for worker, by in self._leaving.items() if now >= by or worker.hears(0)]
            overdue = [*self._busy] if self._close_by is not None and now >= self._close_by else []
        for worker in (*ended, *overdue):
            last_moment = 0.5 if self._close_by is None else max(0.0, self._close_by - now)
            worker.end(last_moment if worker.hears(0) else 0.0)
        with self._changed:
            for worker in ended:
                del self._leaving[worker]

    def _may_start(self, now: float) -> bool:
        with self._changed:
            return now >= self._not_before and self._wants_start()

    def _start_one(self, now: float) -> None:
        try:
            worker = Worker(self._arena, self._code, f"intune: {self._stage}")
        except OSError as error:
            with self._changed:
                self._note_failed_start(f"a worker process could not be made ({error})", None, now)
                self._changed.notify_all()
            return
        with self._changed:
            self._starting.append(worker)
            self._cancel_surplus()  # what is wanted may have changed meanwhile

    def _memory_figures(self) -> str:
        own = psutil.Process().memory_info().rss
        each = [size for sizes in self.sizes() for size in sizes]
        others = count(len(each), "live worker")
        workers = f"{others} with {size(sum(each) // len(each))} each" if each else "no other worker lives"
        return (
            f"{_tightest_limit(System())}; this process holds {size(own)}, {workers}, {size(self.bytes_held)} are "
            "shared with them"
        )


_HINT = "SIGKILL is how the system ends a process when memory runs out. "


def _tightest_limit(system: System) -> str:
    """The limit with the least room left, and what is used of it: "1.9 GiB of 2.0 GiB used (memory.max of ...)"."""
    found = [(limit, used_of_limit(system, limit).value) for limit in memory_limits(system)]
    known = [(limit, limit.limit_bytes, int(used)) for limit, used in found if limit.limit_bytes and used is not None]
    if not known:
        return "no limit and use could be read"
    limit, most, used = min(known, key=lambda each: each[1] - each[2])
    return f"{size(used)} of {size(most)} used ({limit.read_from})"


def _pickled(stage: str, target: Callable[..., Any]) -> bytes:
    try:
        return transport.dumps(target)
    except Exception as error:
        function = target.call.function if isinstance(target, RemoteCall) else target
        role, advice = "", "Make it inside the function, or in the constructor of a class given in its place,"
        if isinstance(target, RemoteCall) and target.call.kind == "get" and isinstance(function, partial):
            (function,) = function.args
            role, advice = "the dataset", "Open it at the first __getitem__, or leave it out in __getstate__,"
        raise PipelineError(
            f"stage {stage!r}: {why_unpicklable(function, transport.dumps, role)} cannot be sent to a worker process "
            f'({type(error).__name__}: {error}). {advice} or use executor="thread"'
        ) from error


def _failed_start(stage: str, pickled: bytes) -> BaseException:
    error: BaseException = pickle.loads(pickled)
    error.add_note(f"A worker process of stage {stage!r} could not begin: its function could not be rebuilt there")
    return error
