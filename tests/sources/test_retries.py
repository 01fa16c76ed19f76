"""Reads that fail for a moment are repeated, and nothing comes twice or goes missing for it."""

import errno
import gzip
import io
import random
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import intune
from intune._errors import LoaderError, SourceError
from intune.sources._retries import Retries, is_transient
from intune.sources.parquet import ParquetSource
from intune.sources.text import TextSource

fsspec = pytest.importorskip("fsspec")

AB = pa.schema([("a", pa.string()), ("b", pa.int64())])
TABLE = pa.table({"a": [f"row {index}" for index in range(3_000)], "b": list(range(3_000))}, schema=AB)
TEXT = "".join(f"row {index}\t{index}\n" for index in range(3_000)).encode()


class Waits:
    """A clock that writes down how long was to be waited, and does not wait."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wall(self) -> float:
        return sum(self.seconds)

    def cpu(self) -> float:
        return 0.0

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        self.seconds.append(seconds)
        return wake.is_set()


class Flaky(pafs.FSSpecHandler):
    """Local files of which chosen calls, openings and reads counted together from 0, raise."""

    def __init__(self) -> None:
        super().__init__(fsspec.filesystem("file"))
        self.failures: dict[int, Exception] = {}
        self.calls = self.opened = self.closed = 0

    def count(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.failures:
            raise self.failures[self.calls - 1]

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.count()
        return pa.PythonFile(FlakyFile(path, self), mode="r")


class FlakyFile(io.FileIO):
    def __init__(self, path: str, handler: Flaky) -> None:
        super().__init__(path, "rb")
        self.handler = handler
        handler.opened += 1

    def read(self, size: int | None = -1) -> bytes:
        self.handler.count()
        return super().read(-1 if size is None else size)

    def close(self) -> None:
        if not self.closed:
            self.handler.closed += 1
        super().close()


KINDS = ["ranges", "gzip", "parquet", "streamed parquet"]


class Case:
    """A file of one kind on a flaky filesystem, its source, and what it gives without failures."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "file"
        if "parquet" in kind:
            pq.write_table(TABLE, self.path, row_group_size=1500, data_page_size=2_000, use_dictionary=False)
        else:
            self.path.write_bytes(gzip.compress(TEXT, 0) if kind == "gzip" else TEXT)
        self.handler = Flaky()
        self.waits = Waits()

    def source(self) -> ParquetSource | TextSource:
        system = pafs.PyFileSystem(self.handler)
        retries = Retries(clock=self.waits, generator=random.Random(1))
        if "parquet" in self.kind:
            rows = 200 if "streamed" in self.kind else 10_000
            return ParquetSource(self.path, filesystem=system, block_rows=rows, retries=retries)
        return TextSource(self.path, schema=AB, unit_bytes=5_000, filesystem=system, retries=retries)

    def read(self) -> list[list[tuple[Any, ...]]]:
        """The rows of each block."""
        source = self.source()
        return [
            list(zip(*(column.to_pylist() for column in block.columns), strict=True))
            for unit in range(source.unit_count())
            for block in source.open(unit)
        ]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


def test_whichever_call_fails_once_each_block_comes_once(case: Case) -> None:
    expected = case.read()
    assert [row for block in expected for row in block] == [(f"row {index}", index) for index in range(3_000)]
    calls = case.handler.calls
    assert calls >= 6
    for call in range(calls):
        case.handler.calls = 0
        case.handler.failures = {call: OSError(errno.EIO, "input/output error")}
        case.waits.seconds.clear()
        assert case.read() == expected, call
        assert len(case.waits.seconds) == 1
        assert 0.05 <= case.waits.seconds[0] <= 0.1
    assert case.handler.opened == case.handler.closed


def test_many_failures_far_apart_are_no_failure(case: Case) -> None:
    expected = case.read()
    calls = case.handler.calls
    case.handler.calls = 0
    case.handler.failures = {call: TimeoutError(errno.ETIMEDOUT, "slow") for call in range(3, 6 * calls, 17)}
    assert case.read() == expected
    assert case.waits.seconds


def test_after_three_retries_the_error_says_how_often_it_was_tried(case: Case) -> None:
    case.read()
    for first in (0, 1, case.handler.calls - 1):
        case.handler.calls = 0
        case.handler.failures = {call: ConnectionResetError(errno.ECONNRESET, "reset") for call in range(first, 9_999)}
        case.waits.seconds.clear()
        with pytest.raises(SourceError, match=r"file.*: cannot be read: .*reset.*\(tried 4 times\)"):
            case.read()
        assert len(case.waits.seconds) == 3
        assert all(0.05 * 3**index <= wait <= 0.1 * 3**index for index, wait in enumerate(case.waits.seconds))
    assert case.handler.opened == case.handler.closed


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EISDIR])
def test_what_is_not_of_a_moment_is_not_repeated(case: Case, code: int) -> None:
    case.read()
    for call in range(case.handler.calls):
        case.handler.calls = 0
        case.handler.failures = {call: OSError(code, "no")}
        with pytest.raises(SourceError, match="cannot be read"):
            case.read()
        assert case.handler.calls == call + 1
    assert case.waits.seconds == []


def test_damaged_content_is_not_repeated(case: Case) -> None:
    if case.kind == "ranges":
        case.path.write_bytes(TEXT + b"x\n")
    else:
        case.path.write_bytes(case.path.read_bytes()[:-7])
    with pytest.raises(SourceError, match="file"):
        case.read()
    assert case.waits.seconds == []


def test_a_stream_that_is_left_early_closes_its_file(case: Case) -> None:
    blocks = case.source().open(0)
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    assert case.handler.opened == case.handler.closed


def test_counting_rows_is_repeated_too(tmp_path: Path) -> None:
    for kind in ("ranges", "gzip"):
        case = Case(kind, tmp_path)
        expected = case.source().count_unit_rows()
        for call in range(case.handler.calls):
            case.handler.calls = 0
            case.handler.failures = {call: BlockingIOError(errno.EAGAIN, "again")}
            assert case.source().count_unit_rows() == expected
        assert sum(expected) == 3_000


class LongWaits(Waits):
    """A clock whose waits end when they are woken, or after a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.woken = threading.Event(), threading.Event()

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        self.begun.set()
        if wake.wait(60):
            self.woken.set()
        return self.woken.is_set()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_loader_ends_a_wait(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, clock = Case(kind, tmp_path), LongWaits()
    case.waits = clock
    source = case.source()
    case.handler.failures = dict.fromkeys(range(1000), OSError(errno.EIO, "input/output error"))
    loader = intune.Pipeline(source).batch(10).loader(memory="4GiB", cpus=1)
    ended: list[BaseException] = []

    def draw() -> None:
        try:
            next(iter(loader))
        except Exception as error:
            ended.append(error)

    consumer = threading.Thread(target=draw)
    consumer.start()
    assert clock.begun.wait(60)
    calls = case.handler.calls
    loader.close()
    consumer.join(60)
    assert clock.woken.is_set()
    assert case.handler.calls == calls
    assert isinstance(ended[0], LoaderError)
    assert not caplog.records  # no thread was left behind
    assert case.handler.opened == case.handler.closed


# Which errors, how long.


class ClientPayloadError(Exception):
    __module__ = "aiohttp.client_exceptions"


class Derived(ClientPayloadError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "x"),
        OSError(errno.EAGAIN, "x"),
        OSError(errno.ESTALE, "x"),
        TimeoutError("no code"),
        ConnectionResetError("no code"),
        OSError(
            "When reading information for key 'a': AWS Error NETWORK_CONNECTION during HeadObject: curlCode: 28, x"
        ),
        OSError("AWS Error SLOW_DOWN during GetObject operation"),
        Derived("half of a response"),
    ],
    ids=repr,
)
def test_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "x"),
        PermissionError(errno.EACCES, "x"),
        OSError("Truncated compressed stream"),
        OSError("AWS Error ACCESS_DENIED during GetObject operation"),
        pa.ArrowInvalid("Parquet magic bytes not found in footer"),
        SourceError("changed"),
        ValueError("x"),
    ],
    ids=repr,
)
def test_not_transient(error: Exception) -> None:
    assert not is_transient(error)


def test_the_same_seed_waits_the_same_and_another_differs() -> None:
    def waits(seed: int, most: int) -> list[float]:
        clock = Waits()
        tries = []

        def read() -> None:
            tries.append(1)
            raise OSError(errno.EIO, "x")

        with pytest.raises(OSError, match=rf"tried {most + 1} times"):
            Retries(most=most, clock=clock, generator=random.Random(seed)).call(read)
        assert len(tries) == most + 1
        return clock.seconds

    assert waits(1, 3) == waits(1, 3)
    assert waits(1, 3) != waits(2, 3)
    assert waits(1, 0) == []
    assert all(0.05 * 3**index <= wait <= 0.1 * 3**index for index, wait in enumerate(waits(3, 6)))


def test_an_error_of_who_draws_is_not_taken_for_one_of_reading() -> None:
    starts = []

    def start() -> Generator[int, None, None]:
        starts.append(1)
        yield from range(3)

    items = Retries(clock=Waits()).resume(start)
    assert next(items) == 0
    with pytest.raises(OSError, match="mine"):
        items.throw(OSError(errno.EIO, "mine"))  # type: ignore[attr-defined]
    assert len(starts) == 1
