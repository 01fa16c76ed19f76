"""Carrying out gather orders: what workers do for batch and shuffle."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from intune.pipeline.blocks import (
    block_bytes,
    block_concat,
    block_copy,
    block_rows,
    block_slice,
    block_take,
    gather_arrays,
)
from intune.pipeline.calls import Flow
from intune.pipeline.footprint import footprint
from intune.pipeline.sequence import Order, Piece, Window

_ROWS_A_PIECE = 256
"""With fewer rows taken from each piece than this, putting the pieces together first is cheaper."""


class Taken(NamedTuple):
    """What became of a window's pieces since that was asked for last.

    Attributes:
        let_go: Places of the pieces that are not needed any more.
        copy: What they were put together to, just now; None = nothing was.
    """

    let_go: list[int]
    copy: Any


class WindowData:
    """A window's rows as workers need them, its pieces put together where that pays.

    Where they are not, `_piece_of` says in which piece a place's row is, and `_permutation` which row of it. Samples
    are let go of as they are drawn, so each place may be drawn once.

    Attributes:
        copy_bytes: What its pieces put together will take beside them, at least 1; 0 = they are not put together.
        source_rows: Source rows that it stands for.
    """

    def __init__(self, window: Window, flow: Flow, emit: int) -> None:
        self._lock = threading.Lock()
        self._window, self._flow, self._emit = window, flow, emit
        self._permutation: Any = None
        self._pieces: list[Any] = []
        self._piece_of: Any = None
        self._left: Any = None
        self._let_go: list[int] = []
        self._copy: Any = None
        self.source_rows = source_rows(window.pieces)
        self.copy_bytes = 0
        if flow == "block" and len(window.pieces) > 1 and not self._picks:
            self.copy_bytes = max(1, sum(block_bytes(cut(piece, flow)) for piece in window.pieces))

    @property
    def _picks(self) -> bool:
        """Whether rows are picked from the pieces of a block as they are."""
        pieces = self._window.pieces
        return isinstance(pieces[0].token.payload, dict) and 1 < len(pieces) <= self._emit // _ROWS_A_PIECE

    def take(self, start: int, stop: int) -> Any:
        """Rows at places start to stop of the permutation: a block, or a list of samples."""
        with self._lock:
            if self._permutation is None:
                self._prepare()
        chosen = self._permutation[start:stop]
        if self._flow == "sample":
            return self._draw(chosen.tolist(), self._piece_of[start:stop])
        if self._piece_of is None:
            return block_take(self._pieces[0], chosen)
        return gather_arrays(self._pieces, self._piece_of[start:stop], chosen)

    def taken(self) -> Taken:
        """What became of its pieces since it was asked last."""
        with self._lock:
            taken = Taken(self._let_go, self._copy)
            self._let_go, self._copy = [], None
        return taken

    def _draw(self, rows: list[int], piece_of: Any) -> list[Any]:
        samples = [self._pieces[row] for row in rows]
        for row in rows:
            self._pieces[row] = None
        pieces, counts = np.unique(piece_of, return_counts=True)
        with self._lock:
            self._left[pieces] -= counts
            self._let_go += pieces[self._left[pieces] == 0].tolist()
        return samples

    def _prepare(self) -> None:
        pieces = [cut(piece, self._flow) for piece in self._window.pieces]
        permutation = self._window.permutation()
        if self._flow == "sample":
            self._pieces = [sample for piece in pieces for sample in piece]
            self._left = np.array([len(piece) for piece in pieces])
            self._piece_of = np.repeat(np.arange(len(pieces), dtype=np.uint32), self._left)[permutation]
            for place in self._whole():
                # Emptied, not dropped: by its address it is charged, which another one might get.
                self._window.pieces[place].token.payload.clear()
        elif self._picks:
            sizes = [block_rows(piece) for piece in pieces]
            kind = np.uint16 if len(pieces) <= 1 << 16 else np.uint32
            self._piece_of = np.repeat(np.arange(len(pieces), dtype=kind), sizes)[permutation]
            permutation -= (np.cumsum(sizes) - sizes)[self._piece_of]
            self._pieces = pieces
        else:
            # Arrow's take of a chunked column costs several times that of one array, for strings above all.
            self._pieces = [block_concat(pieces)]
            if self.copy_bytes:
                self._copy, self._let_go = self._pieces[0], self._whole()
        self._permutation = permutation

    def _whole(self) -> list[int]:
        """Places of the pieces of which no other window needs a part."""
        pieces = enumerate(self._window.pieces)
        return [place for place, (token, start, stop) in pieces if (start, stop) == (0, token.rows)]


def source_rows(pieces: Sequence[Piece]) -> float:
    """Source rows that pieces of items stand for."""
    return float(sum(p.token.source_rows * (p.stop - p.start) / max(1, p.token.rows) for p in pieces))


def cut(piece: Piece, flow: Flow) -> Any:
    """The rows of a piece: a block that shares memory, or a list."""
    payload = piece.token.payload
    if flow == "sample":
        return payload[piece.start : piece.stop]
    if piece.start == 0 and piece.stop == block_rows(payload):
        return payload
    return block_slice(payload, piece.start, piece.stop)


def put_together(order: Order, flow: Flow) -> Any:
    """The rows of a batch order: one block, or one list of samples."""
    parts = [cut(piece, flow) for piece in order.pieces]
    if flow == "sample":
        return parts[0] if len(parts) == 1 else [sample for part in parts for sample in part]
    block = block_concat(parts)
    if len(parts) == 1 and 2 * block_bytes(block) < sum(footprint(block).values()):
        return block_copy(block)  # a small slice would keep the whole of a large block alive
    return block


def stack(samples: Sequence[Any]) -> Any:
    """Samples of equal structure as one batch: dicts, tuples and lists of arrays; torch tensors by torch.

    Raises:
        TypeError: If a value is of a kind that cannot be stacked.
        ValueError: If samples differ in structure or shape.
    """
    first = samples[0]
    if isinstance(first, dict):
        for sample in samples:
            if not isinstance(sample, dict) or sample.keys() != first.keys():
                raise ValueError(f"samples of a batch need the same keys, got {list(first)} and {_keys(sample)}")
        return {key: _stack_at(key, [sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        for sample in samples:
            if not isinstance(sample, (tuple, list)) or len(sample) != len(first):
                raise ValueError(f"samples of a batch need {len(first)} elements each, got {sample!r:.80}")
        columns = [stack(column) for column in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return type(first)(columns)
    if hasattr(first, "untyped_storage"):
        import torch

        return torch.stack(list(samples))
    if isinstance(first, (str, bytes)):
        return list(samples)
    if isinstance(first, np.ndarray):
        return np.stack(samples)
    if isinstance(first, (np.generic, int, float, bool, complex)):
        return _numbers(samples)
    raise TypeError(
        f"cannot stack samples of type {type(first).__name__} into a batch: "
        "give dicts, tuples, numbers, arrays or tensors, or pass collate="
    )


def _stack_at(key: Any, values: list[Any]) -> Any:
    try:
        return stack(values)
    except (TypeError, ValueError) as error:
        error.add_note(f"intune: in {key!r} of the samples of a batch")
        raise


def _numbers(values: Sequence[Any]) -> Any:
    batch = np.asarray(values)
    if batch.dtype.kind in "OSU":  # numpy would make texts or objects of all without a word
        kinds = sorted({type(value).__name__ for value in values})
        raise TypeError(f"samples of a batch need values of one kind, or numbers that fit 64 bits, got {kinds}")
    return batch


def _keys(sample: Any) -> Any:
    return list(sample) if isinstance(sample, dict) else type(sample).__name__


class Gather:
    """What the gather of a stage does with an order.

    Args:
        flow: What comes in.
        emit: Rows of a whole emission.
        stacks: Whether samples become a batch.
        collate: The user's function for that, or None.
    """

    def __init__(self, flow: Flow, emit: int, stacks: bool, collate: Callable[[list[Any]], Any] | None) -> None:
        self._flow, self._emit, self._stacks, self._collate = flow, emit, stacks, collate

    def prepare(self, order: Order) -> None:
        """Give a window its data; called once a window, under the lock."""
        window = order.window
        if window is not None and window.data is None:
            window.data = WindowData(window, self._flow, self._emit)

    def copy_bytes(self, order: Order) -> int:
        """Bytes that putting together the pieces of its window takes, which the first order of it does; 0 = none."""
        window = order.window
        return 0 if window is None or window.copy is not None else int(window.data.copy_bytes)

    def part(self, order: Order, start: int, stop: int) -> Any:
        """Some rows of an order of a shuffle."""
        assert order.window is not None
        return order.window.data.take(order.start + start, order.start + stop)

    def __call__(self, order: Order) -> Any:
        """Carry out an order."""
        if order.window is not None:
            rows = order.window.data.take(order.start, order.start + order.rows)
        else:
            rows = put_together(order, self._flow)
        if not self._stacks or self._flow != "sample":
            return rows
        if self._collate is None:
            return stack(rows)
        batch = self._collate(rows)
        if batch is None:
            raise TypeError("collate gave None: did you forget `return`?")
        return batch
