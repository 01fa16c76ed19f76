"""Memory that a process shares with its workers, handed out in ranges.

It is one anonymous file, so that no name, no size of /dev/shm and no limit of open files matters however many
values are kept. Only the process that owns it hands ranges out: a worker that is killed at any moment leaves
nothing to repair. A range is free again when the last view of it has died.
"""

import bisect
import contextlib
import ctypes
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from intune._errors import LoaderError, MemoryLimitError

if TYPE_CHECKING:
    import numpy as np  # a worker imports it with its first array only, to start fast

_ALIGNMENT = 64  # what Arrow and vector instructions like best
_PAGE = mmap.PAGESIZE
_PUNCH_BYTES = 32 << 20  # given back in steps, since the interpreter lock is held meanwhile


class Piece(NamedTuple):
    """A range of an arena, in bytes."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.size


class FreeList:
    """The free ranges of `[0, capacity)`, taken first fit from the low end: what is in use stays small and warm.

    Attributes:
        ranges: In order; no two of them touch.
    """

    def __init__(self, capacity: int) -> None:
        self.ranges = [Piece(0, capacity)]

    def take(self, size: int) -> Piece | None:
        """The lowest free range of `size` bytes, or None if there is none."""
        for index, free in enumerate(self.ranges):
            if free.size >= size:
                rest = Piece(free.start + size, free.size - size)
                self.ranges[index : index + 1] = [rest] if rest.size else []
                return Piece(free.start, size)
        return None

    def give(self, piece: Piece) -> None:
        """Make a range free again.

        Raises:
            ValueError: If a part of it is free already.
        """
        index = bisect.bisect(self.ranges, piece)
        before = self.ranges[index - 1] if index else Piece(-1, 0)
        after = self.ranges[index] if index < len(self.ranges) else Piece(piece.end + 1, 0)
        if before.end > piece.start or after.start < piece.end:
            raise ValueError(f"{piece} is free already, at least in part")
        joined = [part for part in (before, after) if part.size and piece.start in (part.end, part.start - piece.size)]
        start = min([piece.start, *(part.start for part in joined)])
        end = max([piece.end, *(part.end for part in joined)])
        first = index - (before in joined)
        self.ranges[first : first + len(joined)] = [Piece(start, end - start)]

    def carve(self, low: int, high: int) -> list[Piece]:
        """Take everything that is free in `[low, high)`."""
        taken, left = [], []
        for free in self.ranges:
            start, end = max(free.start, low), min(free.end, high)
            if start >= end:
                left.append(free)
                continue
            taken.append(Piece(start, end - start))
            left += [Piece(free.start, start - free.start), Piece(end, free.end - end)]
        self.ranges = [free for free in left if free.size]
        return taken


class Memory:
    """A mapping of a whole arena. A page costs memory only once it has been written."""

    def __init__(self, fd: int, capacity: int) -> None:
        import numpy as np

        self._map = mmap.mmap(fd, capacity)
        self._bytes: np.ndarray = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data

    def at(self, piece: Piece) -> memoryview:
        """The bytes of a range, without keeping it in use."""
        return self._bytes[piece.start : piece.end].data

    def lend(self, piece: Piece) -> "np.ndarray":
        """The bytes of a range as a holder, uint8[size]: it lives as long as any view of its `data`."""
        import numpy as np

        holder: np.ndarray = np.frombuffer(self._map, np.uint8, piece.size, piece.start)
        return holder

    def position(self, view: memoryview) -> int:
        """Where in the arena a buffer begins; outside of `[0, capacity)` if it lies elsewhere."""
        import numpy as np

        address: int = np.frombuffer(view, np.uint8).ctypes.data
        return address - self._address

    def write(self, start: int, sources: Iterable[memoryview]) -> list[Piece]:
        """Copy buffers to `start` and on, aligned, and say where each lies. Releases the interpreter lock."""
        import numpy as np

        pieces = []
        for source in sources:
            piece = Piece(start, source.nbytes)
            self._bytes[piece.start : piece.end] = np.frombuffer(source, np.uint8)
            pieces.append(piece)
            start = _rounded(piece.end)
        return pieces

    def give_back(self, piece: Piece) -> None:
        """Return the pages of a range to the system; they read as zeros afterwards."""
        for start in range(piece.start, piece.end, _PUNCH_BYTES):
            self._map.madvise(mmap.MADV_REMOVE, start, min(_PUNCH_BYTES, piece.end - start))


def room_for(views: Iterable[memoryview]) -> int:
    """Bytes that `Memory.write` needs for these buffers."""
    return sum(_rounded(view.nbytes) for view in views)


class Arena:
    """Shared memory that this process owns. All methods may be called from any thread.

    In a forked child the memory is still that of the parent: values received before the fork stay valid there
    only as long as the parent keeps them too.

    Attributes:
        fd: The file, for a worker to map; -1 once it is closed.
        capacity: Bytes of address space. Memory is used only for what is handed out.
        memory: Its mapping in this process.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity or _default_capacity()
        self.fd = _memory_file()
        self._close_file = weakref.finalize(self, os.close, self.fd)
        self._close_file.atexit = False
        os.ftruncate(self.fd, self.capacity)
        self.memory = Memory(self.fd, self.capacity)
        self._free = FreeList(self.capacity)
        self._dead: deque[Piece] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._in_use = 0
        self._reach = 0  # the end of what was handed out since the last trim
        self._touched = 0  # the end of what may hold memory, but for what was handed out since the last trim
        self._pid = os.getpid()

    @property
    def in_use(self) -> int:
        """Bytes now handed out."""
        return self._in_use

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that it occupies now: what is handed out and what was not yet given back."""
        with self._locked():
            return 0 if self.fd < 0 else os.fstat(self.fd).st_blocks * 512

    def allocate(self, size: int) -> Piece:
        """A range of at least `size` bytes.

        Raises:
            LoaderError: If it is closed.
            MemoryLimitError: If no free range is as large.
        """
        with self._locked():
            if self._closed:
                raise LoaderError("the loader was closed while an item was on its way to a worker process")
            piece = self._free.take(_rounded(size, _PAGE))
            if piece is not None:
                self._in_use += piece.size
                self._reach = max(self._reach, piece.end)
        if piece is None:
            raise MemoryLimitError(
                f"{size:,} bytes do not fit the memory shared with a stage's processes: {self._in_use:,} of "
                f"{self.capacity:,} bytes of address space are in use. Keep fewer results at once, or raise `ulimit -v`"
            )
        return piece

    def free(self, piece: Piece) -> None:
        """Take a range back. Safe from a finalizer, whatever the thread holds that it interrupts."""
        if os.getpid() == self._pid:
            self._dead.append(piece)
            self._settle()

    def shrink(self, piece: Piece, size: int) -> Piece:
        """Take back what lies past the first `size` bytes of a range."""
        kept = Piece(piece.start, _rounded(size, _PAGE))
        if kept.size < piece.size:
            self.free(Piece(kept.end, piece.size - kept.size))
        return kept

    def lend(self, piece: Piece) -> memoryview:
        """The bytes of a range, which is free again when the last view of them has died."""
        holder = self.memory.lend(piece)
        weakref.finalize(holder, self.free, piece).atexit = False
        return holder.data

    def trim(self) -> None:
        """Give free memory back to the system, but for as much as was reached since the last trim."""
        with self._locked():
            if self._closed:
                return
            top = self._free.ranges[-1] if self._free.ranges else Piece(self.capacity, 0)
            in_use_until = top.start if top.end == self.capacity else self.capacity
            pieces = self._free.carve(self._reach, max(self._touched, self._reach))
            self._touched, self._reach = max(self._reach, in_use_until), 0
            self._in_use += sum(piece.size for piece in pieces)  # nobody else's until they are empty
        for piece in pieces:
            self.memory.give_back(piece)
            self.free(piece)

    def close(self) -> None:
        """Give everything back. What is lent stays valid, and is given back as it dies. Idempotent."""
        with self._locked():
            if not self._closed:
                self._closed = True
                for piece in self._free.carve(0, max(self._touched, self._reach)):
                    self.memory.give_back(piece)
            self._bury()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            yield
        self._settle()

    def _settle(self) -> None:
        """Account for what died. A finalizer never waits: whoever holds the lock does it when letting go."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            piece = self._dead.popleft()
            self._in_use -= piece.size
            if self._closed:
                self.memory.give_back(piece)
            else:
                self._free.give(piece)
        if self._closed and not self._in_use and self.fd >= 0:
            self._close_file()
            self.fd = -1
            del self.memory


def _rounded(size: int, to: int = _ALIGNMENT) -> int:
    return -(-size // to) * to


def _memory_file() -> int:
    """An anonymous file in memory; by way of libc where the interpreter was built against one without it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("intune")
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.memfd_create(b"intune", 1)  # 1: close on exec
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_create failed; process stages need Linux with glibc 2.27 or later")
    return fd


def _default_capacity() -> int:
    """Address space: twice the machine's memory, since holes cost nothing; less under `ulimit -v`."""
    wanted = 2 * os.sysconf("SC_PHYS_PAGES") * _PAGE
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, _rounded(limit // 8, _PAGE))
