import io
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import SourceError
from intune.sources import _lines
from intune.sources._lines import Lines, count_lines, read_lines

TEXT = st.lists(st.sampled_from([b"", b"a", b"bc" * 5, b"\r", b"x" * 70])).map(b"\n".join)


def lines_of(content: bytes) -> Lines:
    return read_lines(pa.BufferReader(content), len(content), 0, len(content))


@given(TEXT, st.integers(1, 40))
def test_ranges_give_each_line_once_in_order(content: bytes, step: int) -> None:
    expected = [line + b"\n" for line in content.split(b"\n")]
    expected[-1] = expected[-1][:-1]
    if not expected[-1]:
        expected.pop()
    stream = pa.BufferReader(content)
    found, starts = [], []
    for start in range(0, len(content), step):
        lines = read_lines(stream, len(content), start, min(start + step, len(content)))
        for index in range(len(lines)):
            one = lines.slice(index, index + 1)
            found.append(one.data.to_pybytes())
            starts.append(one.offset)
            assert start <= one.offset < start + step
    assert found == expected
    assert starts == [0, *itertools.accumulate(map(len, expected))][: len(expected)]


@given(TEXT)
def test_empty_lines_and_texts(content: bytes) -> None:
    lines = lines_of(content + b"end") if content else lines_of(b"end")
    expected = [line.removesuffix(b"\r") for line in (content + b"end").split(b"\n")]
    assert [lines.text(index) for index in range(len(lines))] == expected
    assert lines.is_empty().tolist() == [not text for text in expected]


def test_a_line_longer_than_the_range_is_read_whole() -> None:
    content = b"a" * 1_000_000 + b"\n" + b"b\n"
    stream = pa.BufferReader(content)
    ranges = [(0, 10), (10, 20), (999_990, 1_000_000), (1_000_000, 1_000_001), (1_000_001, 1_000_003)]
    assert [len(read_lines(stream, len(content), *at)) for at in ranges] == [1, 0, 0, 0, 1]
    assert read_lines(stream, len(content), 0, 10).ends.tolist() == [1_000_001]


class Counting(io.BytesIO):
    """Remembers the sizes of its reads."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.sizes: list[int] = []

    def read(self, size: int | None = -1, /) -> bytes:
        self.sizes.append(size or 0)
        return super().read(size)


def test_what_has_no_line_ends_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lines, "LONGEST_LINE", 1 << 12)
    content = b"x" * 1_000_000
    file = Counting(content)
    with (
        pa.PythonFile(file, mode="r") as stream,
        pytest.raises(SourceError, match=r"no line end in the .* bytes after byte 100; is this a text file"),
    ):
        read_lines(stream, len(content), 0, 100)
    assert max(file.sizes) < 100_000


def test_the_rest_of_a_long_line_is_not_searched_for_its_end() -> None:
    content = b"x" * 1_000_000
    file = Counting(content)
    with pa.PythonFile(file, mode="r") as stream:
        assert len(read_lines(stream, len(content), 1000, 2000)) == 0
    assert sum(file.sizes) < 10_000


def test_stray_returns() -> None:
    assert lines_of(b"a\r\nb\r\n").stray_return() is None
    assert lines_of(b"a\r\nb\r").stray_return() == 1
    assert lines_of(b"a\nb\nc\rd\n").stray_return() == 2
    assert lines_of(b"a\r\r\n").stray_return() == 0
    assert lines_of(b"a\n\rb\n").stray_return() == 1
    big = b"a\r\n" * 300_000
    assert lines_of(big).stray_return() is None
    assert lines_of(big + b"\r" + big).stray_return() == 300_000


def test_count_lines() -> None:
    content = b"ab\n" * 1_000_000
    stream = pa.BufferReader(content)
    for stop in (0, 2, 3, 4, 1 << 20, (1 << 20) + 1, len(content)):
        assert count_lines(stream, stop) == stop // 3


def test_the_mark_at_the_start() -> None:
    lines = lines_of(b"\xef\xbb\xbfab\ncd").without_mark()
    assert (lines.text(0), lines.text(1), lines.offset) == (b"ab", b"cd", 3)
    assert len(lines_of(b"\xef\xbb\xbf").without_mark()) == 0
    assert lines_of(b"\xef\xbb").without_mark().text(0) == b"\xef\xbb"
    assert lines_of(b"\xef\xbb\xbf\n\n").without_mark().is_empty().tolist() == [True, True]
    assert lines_of(b"ab\n").longest() == 3
    assert Lines(pa.py_buffer(b""), np.empty(0, np.int64), 0).longest() == 0
