"""The command: what it makes, what it says when something is wrong, and how it ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import intune
from intune.cli.app import app
from intune.cli.train import new_run_dir
from intune.recsys.generate import write_criteo

SMALL_MODEL = ("--rows-per-table", "500", "--batch-size", "100")
COMMAND = (sys.executable, "-c", "import sys; from intune.cli import main; sys.exit(main())")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Steps this small are slower with several threads, far slower on a busy machine."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def user_error(*arguments: str) -> str:
    """The one line that a wrong command gives."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()


def test_the_version() -> None:
    assert invoke("--version").stdout == f"intune {intune.__version__}\n"


def test_help_names_every_command_and_option() -> None:
    assert {"train", "generate"} <= set(re.findall(r"\w+", invoke("--help").stdout))
    text = re.sub(r"\x1b\[[0-9;]*m", "", invoke("train", "--help").stdout)  # some terminals get colours
    for option in ("epochs", "seconds", "tuner", "cpus", "memory", "held-out", "run-dir", "executor", "device"):
        assert f"--{option}" in text


# ---- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (("logs",), "logs/part-0.parquet"),
        (("logs", "--format", "tsv"), "logs/part-0.tsv"),
        (("deep/rows.tsv",), "deep/rows.tsv"),
        (("rows.parquet",), "rows.parquet"),
    ],
)
def test_generate_writes_a_file_or_a_folder_with_one(arguments: tuple[str, ...], file: str) -> None:
    result = invoke("generate", *arguments, "--rows", "1200", "--seed", "3")
    assert result.exit_code == 0
    assert result.stdout == f"1,200 rows, {Path(file).stat().st_size:,} bytes: {file}\n"
    write_criteo("same", 1200, format="tsv" if file.endswith("tsv") else "parquet", seed=3)
    assert Path(file).read_bytes() == Path("same").read_bytes()


def test_generate_does_not_overwrite() -> None:
    invoke("generate", "logs", "--rows", "10")
    before = Path("logs/part-0.parquet").read_bytes()
    assert "part-0.parquet is there already" in user_error("generate", "logs", "--rows", "20")
    assert Path("logs/part-0.parquet").read_bytes() == before


def test_generate_refuses_a_name_that_contradicts_the_format() -> None:
    assert "rows.tsv" in user_error("generate", "rows.tsv", "--format", "parquet")
    assert not Path("rows.tsv").exists()


# ---- train ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_says_how_it_went_and_keeps_it() -> None:
    write_criteo("logs/part-0.parquet", 800)
    result = invoke("train", "logs", *SMALL_MODEL, "--epochs", "2", "--seed", "5", "--cpus", "2", "--memory", "2GiB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "epoch 1     720 rows, mean loss 0." in result.stdout
    assert "rows        720 training + 80 held out = 800, of 800 read" in lines
    assert sum(line.startswith(("held out    80 rows: AUC 0.", "waited", "limited by")) for line in lines) == 3
    (run,) = Path("runs").iterdir()
    assert lines[-1] == f"run folder  {run}"
    assert run.name.endswith("-logs")
    config = json.loads((run / "config.json").read_text())
    assert (config["paths"], config["epochs"], config["seed"], config["memory"]) == (["logs"], 2, 5, "2GiB")
    assert json.loads((run / "summary.json").read_text())["rows_by_epoch"] == [720, 720]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--executor", "process", "--tuner", "random"),
        ("--tuner", "static", "--concurrency", "read_tsv=1", "--concurrency", "criteo_transform=2"),
        ("--tuner", "even", "--rows-shuffle", "0", "--held-out", "0"),
        ("--seconds", "0.001", "--format", "tsv"),
    ],
)
def test_train_takes_its_options(options: tuple[str, ...]) -> None:
    write_criteo("day_0", 400, format="tsv")
    result = invoke("train", "day_0", *SMALL_MODEL, "--run-dir", "here", *options)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("here/summary.json").read_text())["rows_by_epoch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no PATH given: name Criteo files or a folder; `intune generate FOLDER` makes some to try"),
        (("nowhere",), "no file or folder 'nowhere'"),
        (("logs", "--held-out", "1"), "held_out must be a share from 0 to 0.5"),
        (("logs", "--epochs", "0"), "epochs must be at least 1, got 0"),
        (("logs", "--tuner", "clever"), "unknown tuner 'clever'"),
        (
            ("logs", "--tuner", "static", "--concurrency", "x"),
            "concurrency must be STAGE=N, as in read_parquet=2, got 'x'",
        ),
        (
            ("logs", "--tuner", "static", "--concurrency", "x=1"),
            "no stage 'x' to set the concurrency of; there are read_",
        ),
        (("logs", "--memory", "lots"), "'lots' is not a size in bytes"),
        (("logs", "--cpus", "0"), "cpus"),
        (("logs", "--run-dir", "logs"), "the run folder logs is there already"),
        (("logs", "--format", "tsv"), "expected 40 tab-separated fields"),
        (("other.csv",), "cannot tell the format of"),
    ],
)
def test_what_the_user_did_wrong_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    write_criteo("logs/part-0.parquet", 50)
    Path("other.csv").write_text("1,2\n")
    assert message in user_error("train", *arguments)


def test_the_run_folder_gets_a_number_where_the_name_is_taken(tmp_path: Path) -> None:
    now = datetime(2024, 5, 6, 7, 8, 9)
    first = new_run_dir(tmp_path, "data/clicks.parquet", now)
    assert first == tmp_path / "20240506-070809-clicks"
    first.mkdir()
    assert new_run_dir(tmp_path, "data/clicks/", now) == tmp_path / "20240506-070809-clicks-2"


# ---- as a process ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
    finally:
        if process.poll() is None:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_ctrl_c_ends_with_130_and_no_traceback(executor: str) -> None:
    write_criteo("logs/part-0.parquet", 20_000)
    options = (*SMALL_MODEL, "--seconds", "100", "--executor", executor, "--run-dir", "run")
    with command("train", "logs", *options) as process:
        assert process.stdout is not None
        first = process.stdout.readline()  # a line of progress: it trains
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert re.match(r"epoch \d+  [\d,]+ rows", first)
    assert process.returncode == 130
    assert err == "interrupted\n"
    assert re.search(r"^interrupted after [\d,]+ rows; run folder run$", out, re.MULTILINE)
    assert (executor == "process") == bool(children)
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.slow
def test_a_whole_run_as_a_process_is_quiet_on_stderr() -> None:
    write_criteo("logs/part-0.parquet", 500)
    with command("train", "logs", *SMALL_MODEL, PYTHONWARNINGS="error") as process:
        out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("run folder  runs/")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("typer", ("--version",), 'error: the command needs typer: pip install "intune[cli]"\n'),
        ("torch", ("train", "logs"), 'error: training needs PyTorch: pip install "intune[torch]"\n'),
    ],
)
def test_without_an_extra_it_says_which_to_install(missing: str, arguments: tuple[str, ...], message: str) -> None:
    # An importer that comes first and knows the one package not.
    Path("sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    with command(*arguments, PYTHONPATH=path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (2, "", message)
