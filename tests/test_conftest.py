"""The check that nothing stays behind a test is run on tests that do leave something, in a pytest of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LEAKY = """
import os
import subprocess
import sys
import threading

KEPT = []

def test_keeps_nothing():
    with open(__file__):
        pass

def test_hands_over_late():
    threading.Timer(0.05, int).start()

def test_keeps_a_thread():
    release = threading.Event()
    KEPT.append(release)
    threading.Thread(target=release.wait, name="forgotten", daemon=True).start()

def test_keeps_a_process():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_never_waits_for_a_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    KEPT.append(child)

def test_keeps_a_memfd():
    KEPT.append(os.memfd_create("arena"))

def test_keeps_a_file():
    KEPT.append(open(__file__))

def test_keeps_a_second_descriptor_of_one_file():
    KEPT.append(os.dup(KEPT[-1].fileno()))

def test_keeps_only_garbage():
    class Ring:
        def __init__(self):
            self.itself = self
            self.end = os.pipe()
        def __del__(self):
            for end in self.end:
                os.close(end)
    Ring()

def test_fails_by_itself():
    KEPT.append(os.memfd_create("held by a test that failed"))
    raise ArithmeticError

def test_does_not_pay_for_others():
    pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaky")
    hasty = (HERE / "conftest.py").read_text().replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 0.5")
    (folder / "conftest.py").write_text(hasty)
    (folder / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False).stdout


def outcome(report: str, test: str) -> list[str]:
    """What pytest's last lines say of a test; one that passes and then leaves something is named twice."""
    return re.findall(rf"^(PASSED|FAILED|ERROR) \S+::{test}(?: |$)", report, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "test", ["test_keeps_nothing", "test_hands_over_late", "test_keeps_only_garbage", "test_does_not_pay_for_others"]
)
def test_a_test_that_leaves_nothing_passes(report: str, test: str) -> None:
    assert outcome(report, test) == ["PASSED"], report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("test_keeps_a_thread", r"thread forgotten \(\d+\)"),
        ("test_keeps_a_process", r"process \d+: .*input\(\)"),
        ("test_never_waits_for_a_process", r"process \d+ \(ended"),
        ("test_keeps_a_memfd", r"descriptor of /memfd:arena"),
        ("test_keeps_a_file", r"descriptor of .*test_leaky\.py"),
        ("test_keeps_a_second_descriptor_of_one_file", r"descriptor of .*test_leaky\.py"),
    ],
)
def test_a_test_that_leaves_something_fails_and_names_it(report: str, test: str, named: str) -> None:
    assert sorted(outcome(report, test)) == ["ERROR", "PASSED"], report
    section = report.split(f"ERROR at teardown of {test} ")[1].split("\n___")[0]
    assert re.search(named, section), report


@pytest.mark.slow
def test_a_test_that_fails_is_not_told_off_for_what_its_traceback_holds(report: str) -> None:
    assert outcome(report, "test_fails_by_itself") == ["FAILED"], report


def test_shared_data_is_the_folder_beside_the_checkout(shared_data: Path) -> None:
    named = os.environ.get("INTUNE_TEST_DATA")
    assert shared_data == Path(named or HERE.parents[1] / "shared" / "data").resolve()
