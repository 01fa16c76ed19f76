"""Ranges of lines in a file: which lines begin in a byte range, and where each of them ends.

A line ends with LF or CRLF, the last one of a file perhaps with nothing. A line belongs to the range in
which it begins, so ranges that cover a file give each line exactly once, wherever they are cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import SourceError
from intune._words import count

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_LINE = 16 << 20
"""Bytes of the longest line that is read; a longer one is taken for a file that is not text."""

_LF, _CR = 10, 13
_SCAN = 1 << 18  # bytes scanned at once, so that the comparison stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Whole lines that follow each other in a file.

    Attributes:
        data: Their bytes, line ends included.
        ends: int64 [lines], where each ends in `data`, its line end included.
        offset: Where `data` begins in the file, or in the text of a compressed one.
        before: How many line feeds are before them; None where that is not known.
    """

    data: pa.Buffer
    ends: npt.NDArray[np.int64]
    offset: int
    before: int | None = None

    def __len__(self) -> int:
        """Number of lines, empty ones included."""
        return int(self.ends.size)

    def slice(self, start: int, stop: int) -> "Lines":
        """Lines `start` to `stop`, sharing the bytes."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[stop - 1]) if stop else 0
        ends = self.ends[start:stop] - first
        before = self.before
        if before is not None:
            before += _line_feeds(self.data.slice(0, first))
        return Lines(self.data.slice(first, last - first), ends, self.offset + first, before)

    def begins_with_mark(self) -> bool:
        """Whether the first character is a byte order mark, or a value that looks like one."""
        return bool(self.data.slice(0, min(len(BYTE_ORDER_MARK), self.data.size)).to_pybytes() == BYTE_ORDER_MARK)

    def without_mark(self) -> "Lines":
        """The same lines without the byte order mark that a file may begin with."""
        if not self.begins_with_mark():
            return self
        data = self.data.slice(len(BYTE_ORDER_MARK))
        ends = self.ends - len(BYTE_ORDER_MARK)
        return Lines(data, ends[ends > 0], self.offset + len(BYTE_ORDER_MARK), self.before)

    def line_feeds(self) -> int:
        """Line feeds in them: more than lines where values have some in quotes."""
        return _line_feeds(self.data)

    def text(self, line: int) -> bytes:
        """One line without its line end."""
        text: bytes = self.slice(line, line + 1).data.to_pybytes()
        return text.removesuffix(b"\n").removesuffix(b"\r") if text.endswith(b"\n") else text

    def is_empty(self) -> npt.NDArray[np.bool_]:
        """Which lines have nothing but their line end: bool [lines]."""
        lengths = np.diff(self.ends, prepend=0)
        array = np.frombuffer(self.data, np.uint8)
        empty: npt.NDArray[np.bool_] = (lengths == 1) & (array[self.ends - 1] == _LF)
        two = np.flatnonzero(lengths == 2)
        empty[two] = (array[self.ends[two] - 2] == _CR) & (array[self.ends[two] - 1] == _LF)
        return empty

    def has_hex_prefix(self) -> bool:
        """Whether 0x or 0X is anywhere in them."""
        for part in _parts(np.frombuffer(self.data, np.uint8), 1):
            text = part.tobytes()
            # One byte is sought far faster than two of which the first is frequent.
            if (b"x" in text and b"0x" in text) or (b"X" in text and b"0X" in text):
                return True
        return False

    def longest(self) -> int:
        """Bytes of the longest line, its line end included."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))

    def stray_return(self, quote: str | None = None) -> int | None:
        """The first line with a carriage return that is part neither of a line end nor of a quoted value, or None."""
        array = np.frombuffer(self.data, np.uint8)
        if not any(np.any(part == _CR) for part in _parts(array)):
            return None
        returns = np.flatnonzero(array == _CR)
        stray = returns[array[np.minimum(returns + 1, array.size - 1)] != _LF]
        if quote is not None:
            stray = stray[np.searchsorted(np.flatnonzero(array == ord(quote)), stray) % 2 == 0]
        return int(np.searchsorted(self.ends, stray[0], side="right")) if stray.size else None


def read_lines(stream: pa.NativeFile, size: int, start: int, stop: int) -> Lines:
    """Read the lines that begin in the bytes `start` to `stop` of a file of `size` bytes, stop <= size.

    Raises:
        SourceError: If a line is longer than both the range and `LONGEST_LINE`.
    """
    begin = max(start - 1, 0)  # one byte earlier, to see whether a line begins at `start` itself
    ahead = min(max((stop - start) >> 6, 1 << 10), 1 << 16)
    while True:
        stream.seek(begin)
        data = stream.read_buffer(min(stop + ahead, size) - begin)
        ends = line_ends(np.frombuffer(data, np.uint8))
        if begin + data.size == size and (not ends.size or ends[-1] != data.size):
            ends = np.append(ends, data.size)  # the last line of the file has no line end
        last = int(np.searchsorted(ends, stop - begin))  # the line in which byte `stop - 1` lies
        if last < ends.size or (start and last == 0):
            break
        if ahead > max(stop - start, LONGEST_LINE):
            raise SourceError(f"no line end in the {count(ahead, 'byte')} after byte {stop:,}; is this a text file?")
        ahead *= 4
    if start and last == 0:
        return Lines(data.slice(0, 0), ends[:0], start)  # all within a line that began before
    return Lines(data, ends, begin).slice(1 if start else 0, last + 1)


def unclosed(quote: str, where: str) -> str:
    """What to say of a quote that opens a value and has no partner."""
    return (
        f"a {quote} opens a value in this line that is not closed {where}: close it, double a {quote} that is part of "
        "a value, or say quote=None if they are text like any other"
    )


def count_lines(stream: pa.NativeFile, stop: int) -> int:
    """Lines that end in the first `stop` bytes of a file. Slow: for error messages."""
    count = 0
    for begin in range(0, stop, 1 << 20):
        stream.seek(begin)
        count += _line_feeds(stream.read_buffer(min(stop - begin, 1 << 20)))
    return count


def _line_feeds(data: pa.Buffer) -> int:
    return sum(int(np.count_nonzero(part == _LF)) for part in _parts(np.frombuffer(data, np.uint8)))


def _parts(array: npt.NDArray[np.uint8], overlap: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
    for begin in range(0, array.size, _SCAN):
        yield array[begin : begin + _SCAN + overlap]


def line_ends(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Where lines end that end with a line feed: the byte after it, int64 [lines]."""
    found = [np.flatnonzero(part == _LF) + (index * _SCAN + 1) for index, part in enumerate(_parts(array))]
    return np.concatenate(found) if found else np.empty(0, np.int64)
