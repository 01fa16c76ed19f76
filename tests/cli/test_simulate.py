"""`intune simulate` and `intune bench tuners`: what they say, draw and keep, and their errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

pytest.importorskip("typer")


from intune.cli.simulate import sparkline
from intune.sim import scenario

from .commands import invoke, user_error


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestSimulate:
    def test_it_says_what_was_simulated_done_and_got(self) -> None:
        result = invoke("simulate", "drift-3", "--tuner", "even", "--decisions", "40")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        drawn = scenario("drift", 3)
        assert lines[0] == f"drift-3: {len(drawn.stages)} stages on {drawn.machine.cpus} CPUs with no memory limit"
        assert [line.split()[1] for line in lines[1 : len(drawn.stages) + 1]] == [each.name for each in drawn.stages]
        assert lines[len(drawn.stages) + 1].startswith(f"  at {drawn.changes[0].seconds:.0f} s the cost of ")
        head = next(number for number, line in enumerate(lines) if "seconds" in line)
        table = [line.split() for line in lines[head + 1 : head + 21]]
        assert [row[0] for row in table] == ["0.5", *(str(second) for second in range(2, 39, 2))]
        assert lines[head - 1].endswith(", - = no limit of its own:")
        assert {len(row) for row in table} == {6 + len(drawn.stages)}  # a size is two words
        assert lines[-2].startswith("rows/s   ")
        assert len(lines[-2].split()[1]) == 40
        assert lines[-1].startswith("even: ")

    def test_part_of_a_second_is_said(self) -> None:
        said = invoke("simulate", "clean-0", "--decisions", "1").stdout.splitlines()[-1]
        assert " rows/s over 0.25 s; " in said

    @pytest.mark.parametrize(
        ("path", "said"),
        [("no/run.png", "No such file or directory"), ("folder.png", "Is a directory"), ("f/x.png", "Not a directory")],
    )
    def test_a_plot_that_cannot_be_written_is_told_before_anything_is_run(self, path: str, said: str) -> None:
        pytest.importorskip("matplotlib")
        Path("folder.png").mkdir()
        Path("f").touch()
        with mock.patch("intune.sim.play") as played:
            assert user_error("simulate", "wild-1", "--plot", path) == f"{path}: {said}"
        assert not played.called
        assert sorted(map(str, Path().iterdir())) == ["f", "folder.png"]

    def test_the_same_command_says_the_same(self) -> None:
        command = ("simulate", "wild-3", "--tuner", "random", "--decisions", "8")
        assert invoke(*command).stdout == invoke(*command).stdout

    def test_a_tuner_that_fails_is_no_result(self) -> None:
        with mock.patch("intune.tuners.Even.propose", side_effect=KeyError("x")):
            result = invoke("simulate", "clean-0", "--tuner", "even", "--decisions", "8")
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1] == (
            "error: even failed, so this is no result of it: KeyError: 'x'; replaced by every stage open"
        )

    def test_it_draws(self) -> None:
        pytest.importorskip("matplotlib")
        command = [sys.executable, "-c", "from intune.cli import main; main()", "simulate", "clean-0"]
        options = ["--decisions", "5", "--plot", "run.png"]  # in a process: matplotlib keeps files of fonts open
        result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[-1] == "drawn: run.png"
        assert Path("run.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("wild",), "a scenario is FAMILY-SEED, as in wild-17, with a seed of 0 or more, got 'wild'"),
            (("wild-x",), "a scenario is FAMILY-SEED, as in wild-17, with a seed of 0 or more, got 'wild-x'"),
            (("wild--3",), "a scenario is FAMILY-SEED, as in wild-17, with a seed of 0 or more, got 'wild--3'"),
            (("wlid-1",), "no family 'wlid': there are ['bandwidth',"),
            (("wild-1", "--tuner", "evne"), "unknown tuner 'evne': give one of "),
            (("wild-1", "--plot", "run.doc"), "run.doc: the ending of a plot must be one of .png, .svg, .pdf"),
        ],
    )
    def test_what_is_wrong_is_said_in_a_line(self, arguments: tuple[str, ...], said: str) -> None:
        assert user_error("simulate", *arguments).startswith(said)

    def test_a_plot_without_matplotlib_names_the_extra_before_anything_is_run(self) -> None:
        with mock.patch.dict(sys.modules, {"matplotlib": None}), mock.patch("intune.sim.play") as played:
            said = user_error("simulate", "wild-1", "--plot", "run.png")
        assert said == 'a plot needs matplotlib: pip install "intune[sim]"'
        assert not played.called

    def test_bars(self) -> None:
        assert sparkline([0, 7, 3, 14]) == "▁▅▃█"
        assert sparkline([0, 0]) == "▁▁"


@pytest.mark.slow
class TestBench:
    COMMAND = (
        "bench",
        "tuners",
        "--families",
        "quota",
        "--tuners",
        "shared, even",
        "--scenarios",
        "1",
        "--out",
        "r.jsonl",
    )

    def test_it_compares_and_goes_on(self) -> None:
        command = (*self.COMMAND, "--decisions", "12")
        result = invoke(*command)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "1 of 1 scenarios"
        assert lines[1].split()[:3] == ["family", "tuner", "scenarios"]
        assert [line.split()[:4] for line in lines[2:]] == [["quota", "shared", "1", "0"], ["quota", "even", "1", "0"]]
        assert [json.loads(line)["tuner"] for line in Path("r.jsonl").read_text().splitlines()] == ["shared", "even"]
        assert len(list(Path("r.oracle").iterdir())) == 1
        with mock.patch("intune.sim.evaluate.play", side_effect=AssertionError("nothing was to be run again")):
            again = invoke(*command, "--markdown")
        assert again.stdout.splitlines()[0].startswith("| family | tuner | scenarios | died | failed |")
        assert len(again.stdout.splitlines()) == 4

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--families", "celan", "no family 'celan': there are ["),
            ("--families", ",", "--families needs at least one name, got ','"),
            ("--tuners", "evne", "unknown tuner 'evne': give one of "),
            ("--out", ".", ".: Is a directory"),
            ("--out", "f/r.jsonl", "f"),
            ("--out", "taken.jsonl", "taken.oracle: File exists"),
            ("--out", "r.oracle", "r.oracle: oracles are kept in a folder of that name, so give another ending"),
        ],
    )
    def test_what_is_wrong_is_said_in_a_line_before_anything_is_run(self, option: str, value: str, said: str) -> None:
        Path("f").touch()
        Path("taken.oracle").touch()
        with mock.patch("intune.sim.evaluate.oracle", side_effect=AssertionError("nothing was to be run")):
            assert user_error(*self.COMMAND, option, value).startswith(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestCtrlC:
    """A terminal sends it to all processes of the command at once."""

    COMMAND = ("bench", "tuners", "--families", "clean", "--tuners", "even", "--scenarios", "6", "--decisions", "10")
    QUICK = "import intune.sim.oracle as o; o.Effort.__init__.__defaults__ = (0, 0, 3, 10, 20); "
    """The best allocation is searched for in seconds, not in a minute."""

    def stopped(self, told: int | None) -> list[Path]:
        """Its files after it was stopped, once it has told that so many are done, or has just begun processes."""
        process = subprocess.Popen(
            [sys.executable, "-c", f"{self.QUICK}from intune.cli import main; main()", *self.COMMAND, "--jobs", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            if told is not None:
                assert process.stdout.readline() == f"{told} of 6 scenarios\n"
            else:
                while len(psutil.Process(process.pid).children()) < 3:  # two, and the one that tracks resources
                    time.sleep(0.001)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert (process.returncode, err) == (
            130,
            "interrupted with what is done in tuners.jsonl; to go on: the same command\n",
        )
        return sorted(Path().glob("tuners.*"))

    def test_it_ends_and_the_file_is_gone_on_with(self) -> None:
        self.stopped(1)
        done = len(self.rows())  # perhaps more than one: both processes may end a scenario at the same moment
        self.stopped(done + 1)
        rows = self.rows()
        assert len({row["seed"] for row in rows}) == len(rows) > done

    def rows(self) -> list[dict[str, object]]:
        return [json.loads(row) for row in Path("tuners.jsonl").read_text().splitlines()]

    def test_it_ends_while_processes_start(self) -> None:
        assert self.stopped(None) == [Path("tuners.jsonl"), Path("tuners.oracle")]
        assert Path("tuners.jsonl").read_bytes() == b""
