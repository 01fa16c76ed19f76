"""What every test gets: nothing may stay behind it, property tests repeat themselves, real files are found."""

import gc
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

GRACE_SECONDS = 10.0
"""Only a test that leaves something takes so long."""
CALL_FAILED = pytest.StashKey[bool]()


def pytest_configure() -> None:
    """Let Ctrl-C mean what it means at a terminal: a shell that starts tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fail a test after which threads, child processes or open descriptors (memfds, pipes, files) are left.

    Ending takes a moment, so what is left gets a short grace. After a test that failed there is no check: its
    traceback keeps alive what the test held.
    """
    before = _held()
    yield
    if request.node.stash.get(CALL_FAILED, False):
        return
    left = _settled(lambda: _more(before, _held()))
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(map(_described, left)), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the check above whether the test itself failed."""
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _native_libraries_warm() -> None:
    """Let Arrow open now what it opens once and keeps for good (its pools, the pipe by which it hears Ctrl-C)."""
    pyarrow.csv.read_csv(pa.BufferReader(b"a\n1\n"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of small real files beside the checkout, or the one that INTUNE_TEST_DATA names."""
    named = os.environ.get("INTUNE_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[1] / ".." / "shared" / "data"
    if folder.is_dir():
        return folder.resolve()
    if named:
        pytest.fail(f"INTUNE_TEST_DATA={named} is not a folder; unset it or name the folder of test data")
    pytest.skip(f"no test data at {folder}; INTUNE_TEST_DATA may name the folder")


def _held() -> Counter[str]:
    """All that the process holds and has to give back, each thing by a name that tells it from others."""
    return Counter([*_threads(), *_children(), *_descriptors()])


def _threads() -> list[str]:
    # A foreign thread of a native pool that once called Python is listed for ever, as a dummy.
    return [
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    ]


def _children() -> list[str]:
    # multiprocessing starts one helper on first use and keeps it, and a pipe to it, until the process ends.
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    children = (child for child in psutil.Process().children(recursive=True) if child.pid != tracker)
    return [f"process {child.pid}" for child in children]


def _descriptors() -> list[str]:
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    names = []
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) == tracker:
            continue
        try:
            names.append(f"descriptor of {link.readlink()}")
        except FileNotFoundError:  # the one by which this folder is being listed
            continue
    return names


def _described(name: str) -> str:
    """The same name; for a process also what it runs, which could not be part of the name as it may change."""
    kind, _, number = name.partition(" ")
    if kind != "process":
        return name
    try:
        return f"{name}: {' '.join(psutil.Process(int(number)).cmdline())}"
    except psutil.ZombieProcess:
        return f"{name} (ended, but nobody waited for it)"
    except psutil.NoSuchProcess:
        return name


def _more(before: Counter[str], now: Counter[str]) -> list[str]:
    return sorted((now - before).elements())


def _settled(left: Callable[[], list[str]]) -> list[str]:
    """What is still left once garbage is collected and the grace is over; asks again and again until then."""
    names = left()
    if names:
        gc.collect()
    deadline = time.monotonic() + GRACE_SECONDS
    while (names := left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return names
