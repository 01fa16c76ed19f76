"""Order restored, and the sequencers of batch and shuffle: plan in sequence, work in parallel.

Pure state machines without threads or clocks. A sequencer takes headers (a token and its rows) strictly in
order and gives gather orders that any worker may carry out. What it decides depends on (seed, epoch, stage,
rows in order) only, never on timing, bytes, workers or machine.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from intune.pipeline.order import generator

Path = tuple[int, ...]


class Restorer:
    """Gives leaves back in the order of their paths, whatever the order in which they come.

    A path has one number a level: the root (source unit, or emission of the sequencer before) and one more
    for each one-to-many stage. A parent closes with the count of its children, also zero. Roots are
    numbered without gaps.

    Args:
        depth: Length of a leaf's path, at least 1.
        first: The first root that comes.
    """

    def __init__(self, depth: int, first: int = 0) -> None:
        self._cursor = [first] + [0] * (depth - 1)
        self._leaves: dict[Path, Any] = {}
        self._closed: dict[Path, int] = {}

    @property
    def low(self) -> int:
        """The lowest root that is not wholly given back."""
        return self._cursor[0]

    def expects(self, path: Path) -> bool:
        """Whether the next leaf in order is the one at this path, or its first descendant."""
        cursor, length = self._cursor, len(path)
        return tuple(cursor[:length]) == path and not any(cursor[length:])

    def leaf(self, path: Path, token: Any) -> None:
        """A leaf is done."""
        self._leaves[path] = token

    def close(self, path: Path, count: int) -> None:
        """The parent at a path (shorter than a leaf's) has had all its children."""
        self._closed[path] = count

    def drop(self, path: Path) -> None:
        """What was at a path ended without a leaf, at whatever level: nothing is given back for it."""
        if len(path) == len(self._cursor):
            self._leaves[path] = _NOTHING
        else:
            self._closed[path] = 0

    def ready(self) -> Iterator[Any]:
        """Tokens that are next in order; each is given once."""
        cursor, depth = self._cursor, len(self._cursor)
        while True:
            if depth > 1 and self._step_out():
                continue
            token = self._leaves.pop(tuple(cursor), _MISSING)
            if token is _MISSING:
                return
            cursor[-1] += 1
            if token is not _NOTHING:
                yield token

    def _step_out(self) -> bool:
        """Move past the innermost parent whose children have all been given back."""
        cursor = self._cursor
        for level in range(len(cursor) - 1, 0, -1):
            parent = tuple(cursor[:level])
            if self._closed.get(parent) == cursor[level] and not any(cursor[level + 1 :]):
                del self._closed[parent]
                cursor[level - 1] += 1
                cursor[level:] = [0] * (len(cursor) - level)
                return True
        return False


_MISSING = object()
_NOTHING = object()


class Piece(NamedTuple):
    """Rows start to stop of the item behind a token."""

    token: Any
    start: int
    stop: int


@dataclass
class Window:
    """The rows of one shuffle window; its permutation is drawn by the first worker that needs it."""

    number: int
    rows: int
    key: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
    pending: int = 0
    """Orders given for it that have not been carried out."""
    data: Any = None
    """What workers keep for it between its orders."""
    preparing: bool = False
    """Its first order is being carried out, which draws the permutation; the others would wait for that."""
    let_go: set[int] = field(default_factory=set)
    """Places among the pieces of those that are not needed any more, whose tokens were given back."""
    copy: Any = None
    """Token of what its pieces are put together to; None = they are not, or not yet."""

    def give_back(self, places: Iterable[int]) -> list[Any]:
        """Tokens of the pieces at these places, which nobody needs any more."""
        self.let_go.update(places)
        return [self.pieces[place].token for place in places]

    def permutation(self) -> npt.NDArray[np.int64]:
        """int64[rows]: Philox(key, number)."""
        return generator(*self.key, self.number).permutation(self.rows)


class Order(NamedTuple):
    """What a worker is to put together: `pieces` one after another, or places of a window's permutation."""

    emission: int
    rows: int
    pieces: tuple[Piece, ...] = ()
    window: Window | None = None
    start: int = 0
    row: int = 0
    """Number of its first row among the rows that the sequencer gives in the epoch."""


class BatchSequencer:
    """Cuts the rows that pass into batches of `size`.

    Args:
        size: Rows a batch.
        drop_last: Leave a last batch that is not full out.
        emission: First batch to give.
        row: Number, from the start of the epoch, of the first row that will come.
    """

    def __init__(self, size: int, drop_last: bool = False, *, emission: int = 0, row: int = 0) -> None:
        self.size, self.drop_last, self.emission = size, drop_last, emission
        self.row = row
        self._skip = emission * size - row
        if self._skip < 0:
            raise ValueError(f"batch {emission} begins at row {emission * size}, but rows begin at {row}")
        self._pieces: list[Piece] = []
        self._have = 0

    full = False
    """Whether it takes no header now; a batch sequencer always does."""
    made = 0
    """Pieces made so far; each holds its token until it is given back, by `done` or `abandon` at the latest."""

    def push(self, token: Any, rows: int) -> list[Order]:
        """Take the next header in order; the orders that it completes."""
        self.row += rows
        skipped = min(self._skip, rows)
        self._skip -= skipped
        start, orders = skipped, []
        while start < rows:
            stop = min(rows, start + self.size - self._have)
            self._pieces.append(Piece(token, start, stop))
            self.made += 1
            self._have += stop - start
            start = stop
            if self._have == self.size:
                orders.append(self._emit())
        return orders

    @property
    def filling(self) -> tuple[list[Piece], int]:
        """What has come of the next batch, and the rows of a whole one."""
        return self._pieces, self.size

    def finish(self) -> list[Order]:
        """No more headers come."""
        if not self._have:
            return []
        return [] if self.drop_last else [self._emit()]

    def abandon(self) -> list[Any]:
        """Tokens of rows that no order has been given for; they are forgotten."""
        tokens = [piece.token for piece in self._pieces]
        self._pieces, self._have = [], 0
        return tokens

    def done(self, order: Order) -> list[Any]:
        """A worker has carried out an order; the tokens that are not needed for it any more."""
        return [piece.token for piece in order.pieces]

    def first_row(self, emission: int) -> int:
        """First input row, from the start of the epoch, that an emission and all after it need."""
        return emission * self.size

    def count(self, rows: int) -> int:
        """Emissions from `rows` input rows."""
        return rows // self.size if self.drop_last else -(-rows // self.size)

    def rows(self, rows: int) -> int:
        """Output rows from `rows` input rows."""
        return rows - rows % self.size if self.drop_last else rows

    def _emit(self) -> Order:
        order = Order(self.emission, self._have, tuple(self._pieces), row=self.emission * self.size)
        self.emission += 1
        self._pieces, self._have = [], 0
        return order


class ShuffleSequencer:
    """Permutes rows in tumbling windows: the first ones rising rows/16, /8, /4, /2, then `rows` each.

    A window is given in emissions cut where the row number is a multiple of `emit` and where windows end.
    Two windows are held at most: while the one is being given out the next one fills.

    Args:
        rows: Rows of a window.
        emit: Rows of an emission.
        key: (seed, epoch, stage).
        emission: First emission to give.
        row: Number, from the start of the epoch, of the first row that will come.
    """

    def __init__(self, rows: int, emit: int, key: tuple[int, ...], *, emission: int = 0, row: int = 0) -> None:
        self.size, self.emit, self._key = rows, emit, key
        self.emission, self.row = emission, row
        self._located = (0, 0, 0)
        number, start, first = self._locate(emission)
        self._first_row, self._number, self._skip_emissions = start, number, emission - first
        self._skip = start - row
        if self._skip < 0:
            raise ValueError(f"emission {emission} needs rows from {start} on, but rows begin at {row}")
        self._filling = self._window(number)
        self._have = 0
        self._full: deque[Window] = deque()
        self.made = 0

    @property
    def full(self) -> bool:
        """Whether it takes no header now: two windows are held."""
        return len(self._full) >= 2

    def push(self, token: Any, rows: int) -> list[Order]:
        """Take the next header in order; the orders that it completes."""
        self.row += rows
        skipped = min(self._skip, rows)
        self._skip -= skipped
        start, orders = skipped, []
        while start < rows:
            stop = min(rows, start + self._filling.rows - self._have)
            self._filling.pieces.append(Piece(token, start, stop))
            self.made += 1
            self._have += stop - start
            start = stop
            if self._have == self._filling.rows:
                orders += self._emit()
        return orders

    @property
    def filling(self) -> tuple[list[Piece], int]:
        """What has come of the window that fills, and the rows of all of it."""
        return self._filling.pieces, self._filling.rows

    def finish(self) -> list[Order]:
        """No more headers come."""
        if not self._have:
            return []
        self._filling.rows = self._have
        return self._emit()

    def abandon(self) -> list[Any]:
        """Tokens of rows that no order has been given for; they are forgotten."""
        tokens = [piece.token for piece in self._filling.pieces]
        self._filling.pieces, self._have = [], 0
        return tokens

    def done(self, order: Order) -> list[Any]:
        """A worker has carried out an order; the tokens that are not needed for it any more."""
        window = order.window
        assert window is not None
        window.pending -= 1
        if window.pending:
            return []
        self._full = deque(other for other in self._full if other is not window)
        window.data = None
        left = [place for place in range(len(window.pieces)) if place not in window.let_go]
        return window.give_back(left) + ([] if window.copy is None else [window.copy])

    def first_row(self, emission: int) -> int:
        """First input row, from the start of the epoch, that an emission and all after it need."""
        return self._locate(emission)[1]

    def count(self, rows: int) -> int:
        """Emissions from `rows` input rows."""
        number = start = emissions = 0
        while start < rows:
            size = min(self.window_rows(number), rows - start)
            emissions += self._emissions(start, size)
            start += size
            number += 1
        return emissions

    def rows(self, rows: int) -> int:
        """Output rows from `rows` input rows."""
        return rows

    def window_rows(self, number: int) -> int:
        """Rows of a window by its number."""
        return max(1, self.size >> max(0, 4 - number))

    def _emissions(self, start: int, rows: int) -> int:
        return (start + rows - 1) // self.emit - start // self.emit + 1

    def _locate(self, emission: int) -> tuple[int, int, int]:
        """Window of an emission: its number, its first row, its first emission (all windows taken as full)."""
        number, start, first = self._located if emission >= self._located[2] else (0, 0, 0)
        while True:
            size = self.window_rows(number)
            count = self._emissions(start, size)
            if emission < first + count:
                self._located = (number, start, first)  # positions are asked for in rising order
                return self._located
            number, start, first = number + 1, start + size, first + count

    def _window(self, number: int) -> Window:
        return Window(number, self.window_rows(number), self._key)

    def _emit(self) -> list[Order]:
        window, start = self._filling, self._first_row
        orders = []
        row = start
        while row < start + window.rows:
            stop = min((row // self.emit + 1) * self.emit, start + window.rows)
            if self._skip_emissions:
                self._skip_emissions -= 1
            else:
                orders.append(Order(self.emission, stop - row, (), window, row - start, row))
                self.emission += 1
            row = stop
        if not orders:
            return orders  # a last window all of which was given before: its tokens are left to `abandon`
        window.pending = len(orders)
        self._number += 1
        self._first_row += window.rows
        self._filling = self._window(self._number)
        self._have = 0
        self._full.append(window)
        return orders


Sequencer = BatchSequencer | ShuffleSequencer


class ReplayLog:
    """Remembers where roots began in the rows that a sequencer took, to find back from a row to its root.

    Args:
        row: Number, from the start of the epoch, of the first row that will come.
    """

    def __init__(self, row: int = 0) -> None:
        self._row = row
        self._starts: deque[tuple[int, int]] = deque()

    def add(self, root: int, rows: int) -> None:
        """The next header in order came from this root and has so many rows."""
        if not self._starts or self._starts[-1][0] != root:
            self._starts.append((root, self._row))
        self._row += rows

    def find(self, row: int) -> tuple[int, int] | None:
        """The last root that began at or before a row, and its first row; roots before it are forgotten.

        None means that no row of any root has come yet.
        """
        starts = self._starts
        while len(starts) > 1 and starts[1][1] <= row:
            starts.popleft()
        return starts[0] if starts else None
