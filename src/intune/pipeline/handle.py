"""One worker process, seen from the parent: start it, give it an item, end it."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from typing import Any

from intune._errors import StageError
from intune.pipeline.arena import Arena, Piece, room_for
from intune.pipeline.transport import Link, Packed, Wire, unpack

_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ARROW_IO_THREADS")
_LAST_MOMENT_SECONDS = 0.5  # between closing its socket and the end of a process

_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _forget_workers() -> None:
    for end in _ends:
        end.close()


# A forked child that held our ends open would keep the workers alive after us.
os.register_at_fork(after_in_child=_forget_workers)


def worker_environment(ours: dict[str, str]) -> dict[str, str]:
    """Our environment with one thread for each maths library, and the same string hashes in every worker.

    What the user has set stays; OMP_NUM_THREADS, which Arrow and torch follow too, speaks for the others.
    """
    threads = ours.get("OMP_NUM_THREADS", "1")
    added = {"OMP_NUM_THREADS": threads, **dict.fromkeys(_THREADS, threads), "PYTHONHASHSEED": "0"}
    return added | ours


class Gone(Exception):
    """The worker ended without an answer; says how."""


class Answer:
    """What a worker gave back. It can be opened once, when the worker has its next item already."""

    def __init__(self, kind: str, wire: Wire, loans: list[tuple[Piece, memoryview]]) -> None:
        self._kind = kind
        self._wire = wire
        self._loans = loans

    def open(self, stage: str) -> Any:
        """The result; what the function raised is raised. The stage's name is for messages.

        Raises:
            StageError: If the result cannot be rebuilt here.
        """
        try:
            value = unpack(self._wire, self._view)
        except Exception as error:
            raise StageError(f"stage {stage!r}: the function's result cannot be rebuilt here: {error!r}") from error
        if self._kind == "error":
            raise value
        return value

    def _view(self, piece: Piece) -> memoryview:
        whole, loan = next((whole, loan) for whole, loan in self._loans if whole.start <= piece.start < whole.end)
        return loan[piece.start - whole.start : piece.end - whole.start]


class Worker:
    """A process that serves the function pickled in a range of the arena.

    Args:
        arena: Where items and results lie.
        code: The range.
        label: What `ps` shows.

    Attributes:
        pid: Its process id.
        fd: Descriptor of our end of its socket: it hangs up when the process ends.
        cancelled: It is not wanted any more though it has not begun to serve.
        release: Whether it is to give unused memory back to the system after its next item.
        done: Whether it has done an item: before, it may not hold yet what it works with.
    """

    def __init__(self, arena: Arena, code: Piece, label: str) -> None:
        ours, theirs = socket.socketpair()
        _ends.update((ours, theirs))
        path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path if isinstance(entry, str)]
        arguments = (theirs.fileno(), arena.fd, arena.capacity, tuple(code))
        start = f"import sys; sys.path[:] = {path!r}; from intune.pipeline.worker import main; main(*{arguments!r})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, label],
                stdin=subprocess.DEVNULL,
                env=worker_environment(dict(os.environ)),
                pass_fds=(theirs.fileno(), arena.fd),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._arena = arena
        self._link = Link(ours)
        self._inputs: dict[int, Piece] = {}  # those that the function has put away, by where they start
        self.pid = self._process.pid
        self.fd = ours.fileno()
        self.cancelled = self.release = self.done = False

    def hears(self, events: int) -> bool:
        """Whether its socket has one of these poll events now, or has hung up."""
        poll = select.poll()
        poll.register(self.fd, events)
        return bool(poll.poll(0))

    def greeting(self) -> tuple[Any, ...] | None:
        """What it says when it begins: ("ready",) or ("failed", exception); None if it died."""
        return self._link.receive()

    def exchange(self, packed: Packed, seed: int | None) -> Answer:
        """Have one item done.

        Raises:
            Gone: If it died; the item is intact.
        """
        given = granted = None
        try:
            if not packed.is_small:
                given = self._arena.allocate(room_for(packed.views))
            wire = (
                packed.inline() if given is None else packed.placed(self._arena.memory.write(given.start, packed.views))
            )
            release, self.release = self.release, False
            message = self._ask(seed, wire, given and tuple(given), release)
            if message[0] == "need":
                granted = self._arena.allocate(message[1])
                message = self._ask(granted.start)
        except BaseException as error:
            # Even if it lives, its answer is still to come: nobody can use it any more. Only then its memory is free.
            how = self.end(_LAST_MOMENT_SECONDS if isinstance(error, EOFError) else 0)
            for piece in (given, granted):
                if piece is not None:
                    self._arena.free(piece)
            if isinstance(error, EOFError):
                raise Gone(how) from None
            raise
        kind, answer, kept, released = message
        if given is not None and kept:
            self._inputs[given.start] = given
            given = None
        for start in released:  # perhaps this one already, if a thread of the function let it go
            self._arena.free(self._inputs.pop(start))
        return Answer(kind, answer, self._borrow(answer, given, granted))

    def _ask(self, *message: Any) -> tuple[Any, ...]:
        answer = self._link.receive() if self._link.send(*message) else None
        if answer is None:
            raise EOFError
        return answer

    def _borrow(self, answer: Wire, *pieces: Piece | None) -> list[tuple[Piece, memoryview]]:
        """Keep of our ranges what the answer lies in, and free the rest."""
        loans = []
        used = [Piece(*place) for _, *place in answer[1] if len(place) == 2]
        for whole in pieces:
            if whole is None:
                continue
            end = max((piece.end for piece in used if whole.start <= piece.start < whole.end), default=0)
            if end:
                part = self._arena.shrink(whole, end - whole.start)
                loans.append((part, self._arena.lend(part)))
            else:
                self._arena.free(whole)
        return loans

    def leave(self) -> None:
        """Ask it to end after what it has in hand."""
        with contextlib.suppress(OSError):
            self._link.end.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        """End it at once while it starts; whoever waits for its greeting sees it."""
        self.cancelled = True
        self._process.kill()

    def end(self, patience: float = 0.0) -> str:
        """Kill it if it does not end by itself in so many seconds, and free its memory; says how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        killed = self._process.returncode is None
        if killed:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it ends when that lets it
                self._process.wait(1.0)
        self._link.end.close()
        while self._inputs:
            self._arena.free(self._inputs.popitem()[1])
        code = self._process.returncode
        if killed or code is None:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
