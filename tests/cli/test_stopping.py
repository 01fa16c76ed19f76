"""Signals at every place of a command, each forced: the code is 128 + the number, and there is no traceback."""

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("typer")

import typer

from intune.cli.endings import clean_endings
from intune.cli.stopping import Terminated, Unwinding
from intune.recsys.generate import write_criteo

from .commands import PATIENT

SIGNALS = [signal.SIGINT, signal.SIGTERM]
WORD = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_were() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


# ---- within a process -----------------------------------------------------------------------------------------------


class Ended:
    """Stands for the end by force."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.happened = threading.Event()

    def __call__(self, when: str, number: int) -> None:
        self.said.append((when, number))
        self.happened.set()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_raises_and_further_ones_do_not(number: signal.Signals) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    ended = Ended()
    with Unwinding(ended) as signals, pytest.raises(KeyboardInterrupt) as stop:
        work()
    assert signals.number == number
    assert isinstance(stop.value, Terminated) == (number == signal.SIGTERM)
    assert (cleaned, ended.said) == ([True], [])


def test_what_does_not_end_is_ended_by_force() -> None:
    ended = Ended()
    with Unwinding(ended, grace_seconds=0.01):
        with contextlib.suppress(KeyboardInterrupt):  # as a careless library might
            signal.raise_signal(signal.SIGTERM)
        assert ended.happened.wait(30)
    assert ended.said == [("and ended by force, as it did not end within 0.01 s", signal.SIGTERM)]


def test_an_interrupt_that_a_finaliser_swallows_is_not_shown_and_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Unlucky:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    ended = Ended()
    with Unwinding(ended, grace_seconds=0.01):
        Unlucky()
        gc.collect()
        assert ended.happened.wait(30)
    assert capsys.readouterr() == ("", "")


def test_other_errors_in_finalisers_are_shown_as_ever() -> None:
    seen = []
    before, sys.unraisablehook = sys.unraisablehook, lambda what: seen.append(type(what.exc_value))
    try:

        class Faulty:
            def __del__(self) -> None:
                raise ZeroDivisionError

        with Unwinding(Ended()):
            Faulty()
            gc.collect()
    finally:
        sys.unraisablehook = before
    assert seen == [ZeroDivisionError]


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Unwinding(Ended()) as signals:
            signal.raise_signal(signal.SIGINT)
        assert signals.number is None
    finally:
        signal.signal(signal.SIGINT, before)


def wrapped() -> None:
    """As code beneath Python may make another error of an interrupt."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as stop:
        stop.add_note("after 5 rows")
        raise RuntimeError("<EMPTY MESSAGE>") from stop


def swallowed() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def made_a_users_error() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as stop:
        raise FileNotFoundError("gone") from stop


@pytest.mark.parametrize(
    ("work", "said"),
    [(wrapped, " after 5 rows"), (swallowed, " when its work was done"), (made_a_users_error, "")],
    ids=["wrapped", "swallowed", "made a user's error"],
)
def test_after_a_signal_whatever_comes_out_is_its_end(
    work: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, clean_endings():
        work()
    assert ended.value.exit_code == 130
    assert capsys.readouterr() == ("", f"interrupted{said}\n")


# ---- the command ----------------------------------------------------------------------------------------------------

SEND = "import os, signal, time\ndef send(): os.kill(os.getpid(), {number:d}); time.sleep(0)\n"

AT_IMPORT = """
import sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            send()
sys.meta_path.insert(0, Sends())
"""

AT_CALL = """
import functools, {module}
def patch(owner, name, number, many):
    original, calls = getattr(owner, name), []
    @functools.wraps(original)
    def patched(*args, **named):
        calls.append(1)
        if len(calls) == number:
            for _ in range(many):
                send()
        return original(*args, **named)
    setattr(owner, name, patched)
patch({module}{owner}, {name!r}, {call}, {many})
"""


def at_import(name: str) -> str:
    return AT_IMPORT.format(name=name)


def at_call(place: str, call: int = 1, many: int = 1) -> str:
    """Before a call of a function, given as module:Class.name."""
    module, _, names = place.partition(":")
    *owner, name = names.split(".")
    return AT_CALL.format(module=module, owner="".join(f".{each}" for each in owner), name=name, call=call, many=many)


def ended(number: int, where: str, *arguments: str, seconds: float = 100.0) -> tuple[int, str, str]:
    """Code, stdout and stderr of the command, with a signal sent to itself there; nothing of it is left."""
    program = f"{PATIENT}{SEND.format(number=number)}{where}\nimport sys\nfrom intune.cli import main\nsys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + 10  # for a moment after its streams were closed a process may still be there
    while left := [each for each in psutil.process_iter() if session(each.pid) == process.pid]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    return process.returncode, out, err


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        return None


TRAIN = ("train", "logs", "--rows-per-table", "500", "--batch-size", "100", "--cpus", "2", "--run-dir", "run")


@pytest.fixture
def logs() -> None:
    write_criteo("logs/part-0.parquet", 2000)


NOT_BEGUN = "before anything was begun; all is as it was"
NOT_TRAINED = "before training began, so nothing was saved"
TRAINED = "after training, before all of its summary was written; to go on: intune train --resume run"
DONE = "when its work was done"


def stepped(rows: str) -> str:
    return f"after {rows} rows; to go on: intune train --resume run"


@pytest.mark.slow
@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("number", "where", "said"),
    [
        (signal.SIGINT, at_import("typer"), NOT_BEGUN),
        (signal.SIGTERM, at_import("torch"), NOT_BEGUN),
        (signal.SIGINT, at_import("torch.nn.functional"), NOT_BEGUN),
        (signal.SIGINT, at_import("intune.recsys.train"), NOT_BEGUN),
        (signal.SIGTERM, at_call("intune.recsys.dlrm:DLRM.__init__"), NOT_TRAINED),
        (signal.SIGINT, at_call("intune._compose:build_loader"), NOT_TRAINED),
        (signal.SIGINT, at_call("intune.pipeline.engine:Engine.close"), NOT_TRAINED),
        (signal.SIGINT, at_call("intune.recsys.run_folder:RunFolder.make"), NOT_TRAINED),
        (signal.SIGTERM, at_call("intune.recsys.run_folder:RunFolder.claim"), NOT_TRAINED),
        (signal.SIGINT, at_call("intune.recsys.whole:os.replace"), NOT_TRAINED),
        (signal.SIGINT, at_call("intune.recsys.train:expected_rows"), NOT_TRAINED),
        (
            signal.SIGINT,
            at_call("intune.pipeline.engine:Engine.begin"),
            "before the first step, so nothing was saved; the run folder run is removed again",
        ),
        (signal.SIGINT, at_call("intune.recsys.dlrm:DLRM.forward", 7), stepped("700")),
        (signal.SIGTERM, at_call("intune.pipeline.loader:LoaderIterator._take", 7), stepped("700")),
        (signal.SIGINT, at_call("intune.recsys.whole:os.replace", 2), stepped("1,800")),
        (signal.SIGINT, at_call("intune.pipeline.engine:Engine.close", 2), TRAINED),
        (signal.SIGTERM, at_call("intune.recsys.train:auc"), TRAINED),
        (signal.SIGINT, at_call("intune.recsys.summary:Summary.write"), TRAINED),
        (signal.SIGINT, at_call("intune.recsys.summary:Summary.lines"), DONE),
        (signal.SIGTERM, at_call("intune.cli:leave"), DONE),
        (signal.SIGINT, at_call("atexit:_run_exitfuncs"), DONE),
        (signal.SIGINT, "import atexit; atexit.register(send)", DONE),
    ],
)
def test_wherever_it_lands_the_command_ends_with_its_code_and_a_line(
    number: signal.Signals, where: str, said: str
) -> None:
    code, _, err = ended(number, where, *TRAIN)
    assert code == 128 + number
    assert re.fullmatch(f"{WORD[number]} {said}\n", err), err
    begun = said not in (NOT_BEGUN, NOT_TRAINED) and "before the first step" not in said
    assert Path("run").exists() == begun


@pytest.mark.slow
@pytest.mark.usefixtures("logs")
def test_where_a_run_would_be_resumed_it_says_what_stands() -> None:
    assert ended(signal.SIGINT, "send = None", *TRAIN)[0] == 0
    before = Path("run/checkpoint.npz").read_bytes()
    again = ("train", "--resume", "run", "--epochs", "2")
    for place, said in (
        (
            "intune.recsys.dlrm:DLRM.__init__",
            "before training began, so nothing was saved; what run holds stays as it was",
        ),
        ("intune.pipeline.engine:Engine.begin", "before the first step, so nothing was saved"),
    ):
        code, _, err = ended(signal.SIGINT, at_call(place), *again)
        assert (code, err) == (130, f"interrupted {said}; to go on: intune train --resume run\n")
        assert Path("run/checkpoint.npz").read_bytes() == before


@pytest.mark.slow
@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("place", ["intune.recsys.dlrm:DLRM.forward", "intune.recsys.whole:os.fsync"])
def test_several_at_once_lose_nothing(place: str) -> None:
    call = 7 if place.endswith("forward") else 3  # config.json and its folder come first
    code, _, err = ended(signal.SIGINT, at_call(place, call, many=3), *TRAIN)
    rows = "700" if call == 7 else "1,800"
    assert (code, err) == (130, f"interrupted after {rows} rows; to go on: intune train --resume run\n")
    code, out, err = ended(0, "", "train", "--resume", "run")
    assert (code, err) == (0, "")
    assert "rows        1,800 training + 200 held out = 2,000, of 2,000 read" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_generate_leaves_nothing_half_written(number: signal.Signals) -> None:
    code, out, err = ended(
        number, at_call("intune.recsys.write:_with_hex_strings"), "generate", "new.tsv", "--rows", "9"
    )
    assert (code, out, err) == (128 + number, "", f"{WORD[number]} nothing is left of new.tsv\n")
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_rows_of_its_own_are_not_left_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = ended(signal.SIGINT, at_call("intune.recsys.write:_with_hex_strings"), "train")
    assert (code, err) == (130, f"interrupted {NOT_TRAINED}\n")
    assert list((tmp_path / "cache" / "intune").iterdir()) == []


@pytest.mark.slow
def test_what_is_ignored_stays_so() -> None:
    code, out, err = ended(signal.SIGINT, "signal.signal(2, signal.SIG_IGN)" + at_import("typer"), "--version")
    assert (code, err) == (0, "")
    assert out.startswith("intune ")


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_at_any_moment(executor: str) -> None:
    """Moments at random over the whole of a short run, from the command's first line on."""
    write_criteo("logs/part-0.parquet", 20_000)
    begun = "import sys\nprint('begun', flush=True)\n"
    program = f"{PATIENT}import intune.cli\n{begun}sys.exit(intune.cli.main())"
    options = ("--rows-per-table", "500", "--batch-size", "100", "--seconds", "1.5", "--executor", executor)
    for number in range(12):
        delay = random.Random(number).uniform(0.0, 6.0)
        process: Any = subprocess.Popen(
            [sys.executable, "-c", program, "train", "logs", *options, "--run-dir", f"run-{number}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout.readline() == "begun\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        if process.returncode == 0:  # it had ended by itself a moment before
            assert out.splitlines()[-1] == f"run folder  run-{number}"
        else:
            assert (process.returncode, err.count("\n")) == (130, 1), err
            assert err.startswith("interrupted ")
