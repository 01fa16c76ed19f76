"""`intune calibrate`: a real command on a real pipeline, on a journal, on what was saved, and its errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("typer")

from intune.cli.calibrate import parse_question
from intune.sim import Answer, Calibration, Scenario, SimMachine, SimStage, play
from intune.sim.calibration.calibrating import calibrate_lines
from intune.sim.calibration.sweep import Sweep

from .commands import invoke, user_error

PIPELINE = """
import threading

import intune

pause = threading.Event()


def work(number):
    pause.wait(0.01)
    return number


def make():
    return intune.from_iterable(range(300)).map(work).batch(5)


def needs(path):
    return make()


ready = make()
number = 3


class inner:
    make = staticmethod(make)
"""

PLAIN = Scenario(
    "plain",
    (SimStage("read", "source", cpu_seconds=0.01, rows=8), SimStage("work", cpu_seconds=0.04)),
    SimMachine(cpus=4),
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def text() -> str:
    """A journal file of a sweep."""
    return "".join(json.dumps(line) + "\n" for line in play(PLAIN, Sweep(2.0), 24).lines)


@pytest.fixture(scope="module")
def saved(text: str) -> Calibration:
    return calibrate_lines(map(json.loads, text.splitlines()))


@pytest.mark.slow
def test_a_pipeline_of_ones_own_is_measured_and_asked(tmp_path: Path) -> None:
    Path("mine.py").write_text(PIPELINE)
    command = [sys.executable, "-c", "from intune.cli import main; main()", "calibrate", "mine:make", "--seconds", "8"]
    options = ["--cpus", "2", "--what-if", "work=2", "--what-if", "work=200", "--save", "c.json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert lines[0] == "from_iterable -> work -> batch: measured for 8 s under one allocation after another", done
    assert re.match(r"(fits: none of the|DOES NOT FIT: )", lines[1])
    fitted = next(n for n, line in enumerate(lines) if line.startswith("measured on 2 CPU slots; fitted, an item of"))
    assert [line.split()[0] for line in lines[fitted + 1 : fitted + 4]] == ["from_iterable", "work", "batch"]
    assert any(re.match(r"  note: \d+ s tell little: with 120 s", line) for line in lines)
    rate = re.match(r"work=2: ([\d,]+) rows/s, in nine of ten cases [\d,]+ to [\d,]+", lines[-1])
    assert rate is not None, lines
    assert 100 <= int(rate[1].replace(",", "")) <= 220  # two at a time for 10 ms
    *simulated, error = done.stderr.splitlines()
    assert error.startswith("error: --what-if work=200: stage 'work': 200 at once is more than 2 times")
    assert simulated in ([], ["simulating work=2 (1 of 2) ..."])
    assert done.returncode == 2
    assert list(Calibration.load("c.json").seen) == ["from_iterable", "work", "batch"]


@pytest.mark.parametrize("target", ["own:ready", "own:make", "own:inner.make"])
def test_a_pipeline_is_named_in_several_ways(target: str, saved: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own.py").write_text(PIPELINE)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with mock.patch("intune.sim.calibrate", return_value=saved) as run:
        result = invoke("calibrate", target, "--seconds", "7", "--cpus", "3", "--memory", "50%")
    assert result.exit_code == 0, result.output
    (pipeline, seconds), options = run.call_args
    assert repr(pipeline) == "from_iterable -> work -> batch"
    assert callable(options.pop("progress"))
    assert (seconds, options) == (7.0, {"cpus": 3, "memory": "50%"})
    assert re.match(
        r"as it ran best \(.*\): [\d,]+ rows/s, .*; measured for \d+ s, not simulated", result.stdout.splitlines()[-1]
    )


def test_a_journal_with_a_torn_last_line(text: str, saved: Calibration) -> None:
    Path("j.jsonl").write_text(text + '{"schema": 1, "tick')
    result = invoke("calibrate", "--journal", "j.jsonl", "--save", "c.json", "--what-if", "work=2")
    assert result.exit_code == 0
    assert Calibration.load("c.json") == saved
    again = invoke("calibrate", "--load", "c.json", "--what-if", "work=2")
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of these: MODULE:NAME to run a pipeline, --journal FILE, --load FILE"),
        (("own:make", "--journal", "j"), "give one of these: "),
        (("own",), "'own': give MODULE:NAME, as in train:make_pipeline"),
        (("own:",), "'own:': give MODULE:NAME"),
        (("nowhere:make",), "no module 'nowhere' in "),
        (("own:mkae",), "own has no 'mkae'; did you mean 'make'?"),
        (("own:number",), "own:number is no pipeline, nor a function that returns one: got int"),
        (("own:make", "--what-if", "cpus"), "--what-if 'cpus': give cpus=N, tuner=NAME, or STAGE=N"),
        (("own:make", "--what-if", "cpus=2,cpus=3"), "--what-if 'cpus=2,cpus=3': give cpus=N"),
        (("own.py:make",), "'own.py:make': give MODULE:NAME, as in train:make_pipeline for train.py"),
        (("own:needs",), "own:needs is called without arguments, and cannot be: missing a required argument: 'path'"),
        (
            ("own:make", "--what-if", "cpus=many"),
            "--what-if 'cpus=many': cpus must be a whole number of at least 1, got 'many'",
        ),
        (("own:make", "--what-if", "cpus=0"), "--what-if 'cpus=0': cpus must be a whole number of at least 1, got '0'"),
        (
            ("own:make", "--what-if", "work=-3"),
            "--what-if 'work=-3': work must be a whole number of at least 1, got '-3'",
        ),
        (("own:make", "--what-if", "work=2,tuner=shared"), "--what-if 'work=2,tuner=shared': give tuner or limits"),
        (("own:make", "--what-if", "tuner=modle"), "unknown tuner 'modle'"),
        (("own:make", "--save", "no/c.json"), "no/c.json: No such file or directory"),
        (
            ("own:make", "--what-if", "wrok=2"),
            "--what-if 'wrok=2': no stage 'wrok', this pipeline has ",
        ),
        (
            ("own:make", "--cpus", "4", "--what-if", "cpus=9"),
            "--what-if 'cpus=9': with 4 CPU slots to measure on, at most 8 CPUs can be answered for",
        ),
        (("--journal", "none.jsonl"), "none.jsonl: No such file or directory"),
        (
            ("--journal", "own.py"),
            "own.py, line 1: damaged (no JSON: Expecting value at column 1), and its run goes on",
        ),
        (
            ("--journal", "empty.jsonl"),
            "empty.jsonl is empty: give a file that Pipeline.loader(journal=PATH) or intune",
        ),
        (
            ("--journal", "torn.jsonl"),
            "torn.jsonl, line 1: damaged (no JSON: Expecting ',' delimiter at column 14), and ",
        ),
        (("--journal", "binary.jsonl"), "binary.jsonl, line 1: damaged (no text from byte 3 on), and no other line is"),
        (
            ("--journal", "list.jsonl"),
            "list.jsonl, line 1: damaged (no JSON object), and no other line is whole; is it",
        ),
        (("--load", "own.py"), "own.py: no calibration as it is written by save"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.py").write_text(PIPELINE)
    Path("empty.jsonl").touch()
    Path("torn.jsonl").write_text('{"schema": 1 "tick": 0}\n')
    Path("binary.jsonl").write_bytes(b"{}\xff\n")
    Path("list.jsonl").write_text("[1]\n")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    assert user_error("calibrate", *arguments).startswith(said)


def wrong(saved: Calibration, times: float) -> Calibration:
    """One allocation that is off by so much when it is simulated."""
    first, *others = saved.held
    off = first._replace(simulated=first.measured * times, deviation=0.01, visits=3)
    return replace(saved, held=(off, *others))


def test_that_it_does_not_fit_is_said_first(saved: Calibration) -> None:
    wrong(saved, 1.3).save("c.json")
    result = invoke("calibrate", "--load", "c.json", "--what-if", "work=2")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("DOES NOT FIT: 1 allocation of ")
    assert re.search(r"gave [\d,]+ rows/s, simulated [\d,]+ \(\+30%\)", second)
    assert result.exit_code == 0


def test_where_it_is_far_off_only_what_was_measured_is_answered(saved: Calibration) -> None:
    wrong(saved, 2.0).save("c.json")
    result = invoke("calibrate", "--load", "c.json", "--what-if", "cpus=8")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --what-if cpus=8: the simulator does not fit this pipeline, so only")
    assert "Calibrate for longer" in result.stderr
    assert invoke("calibrate", "--load", "c.json").exit_code == 0


def test_answers_that_may_be_the_other_way_round(saved: Calibration) -> None:
    saved.save("c.json")
    questions = [word for text in ("work=1", "work=3", "work=4") for word in ("--what-if", text)]
    with mock.patch.object(
        Calibration, "what_if", side_effect=[Answer(9, 8, 10), Answer(30, 25, 35), Answer(33, 28, 40)]
    ):
        result = invoke("calibrate", "--load", "c.json", *questions)
    assert result.stdout.splitlines()[-1] == "which is faster cannot be told: work=3 and work=4"


def test_what_is_simulated_is_said_on_stderr_before_it_is(saved: Calibration) -> None:
    saved.save("c.json")
    held = next(one for one in saved.held if one.concurrency == {"read": None, "work": None})
    assert held.slots == saved.cpus
    result = invoke("calibrate", "--load", "c.json", "--what-if", "work=3", "--what-if", "tuner=shared")
    assert result.stderr == "simulating work=3 (1 of 2) ...\n"  # the other one was measured
    assert re.search(r"^work=3: [\d,]+ rows/s, .*\ntuner=shared: .*; measured for", result.stdout, re.MULTILINE)


def test_a_line_that_is_none_is_named_with_what_to_do(text: str) -> None:
    Path("j.jsonl").write_text(text + '{"schema": 1, "tick": 99, "full": true, "seen": {}}\n')
    said = user_error("calibrate", "--journal", "j.jsonl")
    number = text.count("\n") + 1
    assert said.startswith(f"j.jsonl, line {number}: the line of tick 99 is none that a loader of this version writes")
    assert said.endswith("or cut the file before that line")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seconds", "0", "--seconds must be a number above 0, got 0.0"),
        ("--cpus", "0", "--cpus must be an int >= 1, got 0"),
        ("--memory", "much", "--memory: 'much' is not a size in bytes"),
    ],
)
def test_an_option_that_is_not_allowed(option: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own.py").write_text(PIPELINE)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    result = invoke("calibrate", "own:make", option, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {said}"), result.stderr


def test_what_the_module_itself_needs_is_an_error_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("lacking.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        invoke("calibrate", "lacking:make")


def test_a_question() -> None:
    assert parse_question("cpus=64, tuner=model") == {"cpus": 64, "tuner": "model"}
    assert parse_question("work=3,a=b=4") == {"concurrency": {"work": 3, "a=b": 4}}
