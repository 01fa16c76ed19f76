"""What a worker process runs: rebuild the function, then answer calls until the parent wants no more.

It imports as little as it can, so that it starts fast and holds little memory. Keyboard interrupts are the
parent's business. When the parent is gone it ends at once, in the middle of whatever it does.
"""

import contextlib
import gc
import mmap
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from intune._allocators import release_unused
from intune.pipeline.arena import Memory, Piece, room_for
from intune.pipeline.transport import Link, Packed, Wire, dumps, pack, unpack

if TYPE_CHECKING:
    import numpy as np

_IDLE_SECONDS = 1.0  # after which a worker gives back what its last items needed

_MANY = 4  # so many inputs put away make us look whether they are garbage, and then twice as many


def main(control: int, arena: int, capacity: int, target: tuple[int, int]) -> None:
    """Serve the function that lies pickled in a range of the arena.

    Args:
        control: Descriptor of the socket to the parent.
        arena: Descriptor of the arena.
        capacity: Its address space in bytes.
        target: Start and size of the range.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end = socket.socket(fileno=control)
    threading.Thread(target=_end_with_parent, args=(control,), daemon=True).start()
    os.register_at_fork(after_in_child=end.close)  # else a child of the function would hide our death
    link = Link(end)
    try:
        with mmap.mmap(arena, target[1], offset=target[0], prot=mmap.PROT_READ) as stream:
            function = pickle.loads(stream)
    except SystemExit as error:
        _exit(error)
    except BaseException as error:
        link.send("failed", dumps(error))
        return
    link.send("ready")
    _Server(link, arena, capacity, function).serve()
    close = getattr(function, "close", None)
    if callable(close):
        close()


def _end_with_parent(control: int) -> None:
    poll = select.poll()
    poll.register(control, 0)  # reports nothing but that the other end is closed
    poll.poll()
    os._exit(1)


def _exit(error: SystemExit) -> NoReturn:
    """End as the function asked for, without waiting for threads that it may have started."""
    if not isinstance(error.code, int | None):
        sys.stderr.write(f"{error.code}\n")
    _flush()
    os._exit(error.code if isinstance(error.code, int) else 0 if error.code is None else 1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _Server:
    """Answers calls one by one. Results go the shortest way that leaves the input's memory in nobody else's hands."""

    def __init__(self, link: Link, arena: int, capacity: int, function: Callable[..., Any]) -> None:
        self._link = link
        self._poll = select.poll()
        self._poll.register(link.end, select.POLLIN)
        self._arena = arena
        self._capacity = capacity
        self._function = function
        self._mapped: Memory | None = None
        self._held = 0  # inputs that the function put away
        self._released: list[int] = []  # starts of those that it has let go since
        self._many = _MANY

    def serve(self) -> None:
        """Answer until the parent sends no more."""
        while (message := self._next()) is not None:
            seed, wire, given, release = message
            if not self._answer(seed, wire, None if given is None else Piece(*given)):
                return
            if release:
                release_unused()

    def _next(self) -> tuple[Any, ...] | None:
        """What the parent sends next; where that takes long, unused memory goes back to the system meanwhile."""
        if not self._poll.poll(_IDLE_SECONDS * 1000):
            release_unused()
        return self._link.receive()

    @property
    def _memory(self) -> Memory:
        if self._mapped is None:
            self._mapped = Memory(self._arena, self._capacity)
        return self._mapped

    def _answer(self, seed: int | None, wire: Wire, given: Piece | None) -> bool:
        holder = None if given is None else self._memory.lend(given)
        alive = None if holder is None else weakref.ref(holder)
        whole = None if holder is None else holder.data
        del holder
        kind = "result"
        try:
            packed = _work(self._function, seed, wire, whole, given)
        except SystemExit as error:
            _exit(error)
        except BaseException as error:
            kind, packed = "error", pack(error)
        del whole
        _flush()
        return self._deliver(kind, packed, given, alive)

    def _deliver(self, kind: str, packed: Packed, given: Piece | None, alive: "weakref.ref[np.ndarray] | None") -> bool:
        inside = {} if given is None else self._detach(packed.views, given)
        kept = self._keeps(given, alive)
        if packed.is_small:
            return self._reply(kind, packed.inline(), kept)
        covered = sum(piece.size for piece in inside.values())
        # What the function still holds is copied, and so is a small part of a large input.
        shared = inside if given is not None and not kept and 2 * covered >= given.size else {}
        fresh = [view for index, view in enumerate(packed.views) if index not in shared]
        need = room_for(fresh)
        if given is not None and not kept and not inside and need <= given.size:
            start: int | None = given.start  # the input is of no use to anyone any more
        else:
            start = self._ask_for(need) if need else 0
        if start is None:
            return False
        written = iter(self._memory.write(start, fresh))
        pieces = [shared.get(index) or next(written) for index in range(len(packed.views))]
        return self._reply(kind, packed.placed(pieces), kept)

    def _detach(self, views: list[memoryview], given: Piece) -> dict[int, Piece]:
        """Replace the views of the input by such that do not keep it alive; says which they are and where."""
        inside = {}
        for index, view in enumerate(views):
            piece = Piece(self._memory.position(view), view.nbytes)
            if given.start <= piece.start < given.end:
                inside[index] = piece
                again = self._memory.at(piece)
                views[index] = again.toreadonly() if view.readonly else again
        return inside

    def _keeps(self, given: Piece | None, alive: "weakref.ref[np.ndarray] | None") -> bool:
        """Whether the function has put the input, or a view of it, away; its release is then reported later."""
        if given is None or alive is None or alive() is None:
            return False
        if self._held >= self._many:  # perhaps nothing but garbage holds them
            gc.collect()
            self._many = max(_MANY, 2 * self._held)
        holder = alive()
        if holder is None:
            return False
        self._held += 1
        weakref.finalize(holder, self._release, given.start).atexit = False
        return True

    def _release(self, start: int) -> None:
        self._held -= 1
        self._released.append(start)

    def _ask_for(self, size: int) -> int | None:
        if not self._link.send("need", size):
            return None
        answer = self._link.receive()
        return None if answer is None else answer[0]

    def _reply(self, kind: str, body: Any, kept: bool) -> bool:
        released = []
        while self._released:
            released.append(self._released.pop())
        return self._link.send(kind, body, kept, released)


def _work(
    function: Callable[..., Any], seed: int | None, wire: Wire, whole: memoryview | None, given: Piece | None
) -> Packed:
    """Call the function. When this returns, nothing of ours holds the input but what is in the result."""

    def view(piece: Piece) -> memoryview:
        assert whole is not None
        assert given is not None
        return whole[piece.start - given.start : piece.end - given.start]

    args = unpack(wire, view)
    if seed is not None:
        _seed_generators(seed)
    result = function(*args)
    try:
        return pack(result)
    except Exception as error:
        error.add_note(
            f"The function's result, a {type(result).__qualname__}, cannot be sent to the main process. "
            'Return arrays, Arrow data or plain values, or use executor="thread"'
        )
        raise


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy.random  # numpy itself imports it at its first use only, which would then be unseeded

        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed % 2**63)
