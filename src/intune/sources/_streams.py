"""Text that can only be read from its beginning: compressed files, and values that may have line ends in quotes.

Blocks of lines follow each other; how they are cut depends on the content and the block size alone. At most a
block and a line are in memory, however large the file is.
"""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from intune._errors import SourceError
from intune._words import count
from intune.sources._files import FileSet
from intune.sources._lines import LONGEST_LINE, Lines, line_ends, unclosed
from intune.sources._retries import is_transient

T = TypeVar("T")

_MAGIC_BYTES = 4
_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # of a zst frame without content, after a byte 0x50 to 0x5f
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_UNKNOWN_NAMES = (".bz2", ".xz", ".lz4", ".zip")
_UNKNOWN_MAGIC = (b"\xfd7zX", b"\x04\x22\x4d\x18", b"PK\x03\x04")
_LOOKERS = 8  # threads that look at files before anything is read
_READ_AHEAD = 1 << 18  # object stores are asked for this much at once; a message names a byte no closer than this


def codec_of(path: str, first: bytes) -> str | None:
    """How a file is compressed, by its first bytes: "gzip", "zstd" or None.

    Args:
        path: Its path; one that ends in .gz or .zst must have such content.
        first: Its `first_bytes`, fewer than 4 if it is shorter.

    Raises:
        SourceError: If its name says that it is compressed and its content does not, or it is compressed otherwise.
    """
    if first.startswith(_GZIP):
        return "gzip"
    if first == _ZSTD or (first[1:] == _SKIPPABLE and 0x50 <= first[0] <= 0x5F):
        return "zstd"
    name = path.lower()
    if name.endswith(_UNKNOWN_NAMES) or first.startswith(_UNKNOWN_MAGIC):
        raise SourceError(f"{path}: compressed in a way that is not supported; use gzip (.gz) or Zstandard (.zst)")
    for ending, codec in _CODECS.items():
        if name.endswith(ending):
            what = f"begins with {first!r}" if first else "is empty, which no compressed file is; is it cut short?"
            raise SourceError(f"{path}, byte 0: its name says {codec}, but the file {what}")
    return None


def first_bytes(files: FileSet, file: int) -> bytes:
    """What `codec_of` looks at."""
    with files.open(file) as stream:
        first: bytes = stream.read(_MAGIC_BYTES)
        return first


def look_at_all(files: FileSet, look: Callable[[int], T]) -> list[T]:
    """What `look` says of each file, several at once; the threads end with this call."""
    with ThreadPoolExecutor(min(_LOOKERS, len(files)), thread_name_prefix="intune-look") as pool:
        return list(pool.map(look, range(len(files))))


def first_line(files: FileSet, file: int, raw: pa.NativeFile) -> tuple[str | None, bytes]:
    """How a file is compressed, and its first line without mark and line end; b"" where there is none.

    Args:
        files: The list with the file.
        file: Its number.
        raw: The file, just opened; it is closed afterwards.

    Raises:
        SourceError: As `codec_of` and `stream_lines`.
        OSError: If the file cannot be read.
    """
    codec = codec_of(files.path(file), raw.read(_MAGIC_BYTES))
    raw.seek(0)
    with closing(_stream(files, file, raw, codec, 1 << 16, None)) as blocks:
        lines = next(blocks, None)
        return codec, b"" if lines is None else lines.without_mark().text(0)


def stream_lines(
    files: FileSet, file: int, codec: str | None, block_bytes: int, quote: str | None
) -> Generator[Lines, None, None]:
    """Give all lines of a file, in blocks of about `block_bytes` of text; `offset` is one in the text.

    Args:
        files: The list with the file.
        file: Its number.
        codec: What `codec_of` says; all members or frames are read.
        block_bytes: Bytes of text of a block; more if one line has more.
        quote: A line end between two of these is part of a value and ends no line.

    Raises:
        SourceError: If the compressed content is cut short or damaged, or followed by something else; with path
            and byte. Or if a line is longer than both `LONGEST_LINE` and `block_bytes`.
        OSError: If the file cannot be read for a moment.
    """
    with files.open(file) as raw:
        yield from _stream(files, file, raw, codec, block_bytes, quote)


def _stream(
    files: FileSet, file: int, raw: pa.NativeFile, codec: str | None, block_bytes: int, quote: str | None
) -> Generator[Lines, None, None]:
    with pa.BufferedInputStream(raw, _READ_AHEAD) as stored:
        text = stored if codec is None else pa.CompressedInputStream(stored, codec)
        rest, offset, lines = b"", 0, 0
        ended = False
        while not ended:
            wanted = max(block_bytes, len(rest))
            try:
                chunk = _read_all(text, wanted)
            except OSError as error:
                if is_transient(error):
                    raise
                raise SourceError(
                    f"{files.path(file)}: cannot be read up to byte {raw.tell():,} of {files.sizes[file]:,}, "
                    f"after {lines:,} whole lines: {error}"
                ) from error
            ended = len(chunk) < wanted
            data = rest + chunk
            ends = record_ends(np.frombuffer(data, np.uint8), quote)
            if ended and data and (not ends.size or ends[-1] != len(data)):
                ends = np.append(ends, len(data))  # the last line of the file has no line end
            if not ends.size:
                if len(data) > max(block_bytes, LONGEST_LINE):
                    raise SourceError(_no_end(files.path(file), offset, lines, data, quote))
                rest = data
                continue
            last = int(ends[-1])
            block = Lines(pa.py_buffer(data).slice(0, last), ends, offset, lines)
            rest, offset, lines = data[last:], offset + last, lines + block.line_feeds()
            yield block


def record_ends(array: npt.NDArray[np.uint8], quote: str | None) -> npt.NDArray[np.int64]:
    """Where lines end: behind each line feed, but for those after an odd number of quotes."""
    ends = line_ends(array)
    if quote is None:
        return ends
    quotes = np.flatnonzero(array == ord(quote))
    outside: npt.NDArray[np.int64] = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return outside


def _read_all(stream: pa.NativeFile, wanted: int) -> bytes:
    """So many bytes, fewer only at the end."""
    parts: list[bytes] = []
    while wanted:
        part: bytes = stream.read(wanted)
        if not part:
            break
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


def _no_end(path: str, offset: int, before: int, data: bytes, quote: str | None) -> str:
    size = count(len(data), "byte")
    if quote is not None and b"\n" in data:  # in a value, whose quote is in the first line of the row
        return f"{path}:{before + 1}: {unclosed(quote, f'in {size} from byte {offset:,} on')}"
    return f"{path}: no line end in {size} of text from byte {offset:,} on; is this a text file?"
