"""The command: what it makes, what it says when something is wrong, and how it ends."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal, get_type_hints

import psutil
import pytest

pytest.importorskip("typer")


import intune
from intune._machine import System, memory_limit
from intune.cli.generate import progress_lines
from intune.cli.own_rows import own_rows
from intune.cli.train import new_run_dirs, train
from intune.recsys.config import TUNERS
from intune.recsys.generate import write_criteo
from intune.recsys.run_folder import RunFolder

from .commands import PATIENT, invoke, user_error

SMALL_MODEL = ("--rows-per-table", "500", "--batch-size", "100")
COMMAND = (sys.executable, "-c", PATIENT + "import sys; from intune.cli import main; sys.exit(main())")


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


def test_the_version() -> None:
    assert invoke("--version").stdout == f"intune {intune.__version__}\n"


def help_of(*command: str) -> str:
    """The help in one line, without frames and colours, which some terminals get."""
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", invoke(*command, "--help").stdout)
    return " ".join(text.split())


def test_help_names_every_command_and_option() -> None:
    assert {"train", "generate", "doctor", "simulate", "calibrate", "bench"} <= set(re.findall(r"\w+", help_of()))
    text = help_of("train")
    for option in ("epochs", "seconds", "tuner", "cpus", "memory", "held-out", "run-dir", "executor", "device"):
        assert f"--{option}" in text


def test_usage_says_once_that_there_may_be_several_paths() -> None:
    assert "train [OPTIONS] [PATH]... " in help_of("train")


@pytest.mark.parametrize(
    ("option", "default"),
    [
        ("epochs", "(1, or what fits --seconds)"),
        ("seconds", "(when the epochs are done)"),
        ("batch-size", "2048"),
        ("rows-shuffle", "200000"),
        ("tuner", "model"),
        ("concurrency", "(none)"),
        ("cpus", "(what the machine gives)"),
        ("memory", "(what the machine gives)"),
        ("seed", "0"),
        ("held-out", "0.1"),
        ("run-dir", "(runs/<time>-<name>)"),
        ("executor", "thread"),
        ("format", "auto"),
        ("device", "cpu"),
        ("rows-per-table", "100000"),
    ],
)
def test_help_says_every_default(option: str, default: str) -> None:
    of_option = help_of("train").split(f"--{option} ", 1)[1].split(" --", 1)[0]
    if option == "epochs":  # its default names another option
        of_option = help_of("train").split("--epochs ", 1)[1]
    assert f"[default: {default}]" in of_option


@pytest.mark.parametrize("command", ["train", "doctor", "simulate", "calibrate", "bench tuners"])
def test_no_option_is_without_its_default(command: str) -> None:
    text = help_of(*command.split())
    switches = re.findall(r" --[a-z-]+ <bool>", text)
    assert text.count("[default: ") == len(re.findall(r" --[a-z-]+ <", text)) - len(switches)


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
    size = f"{Path(file).stat().st_size:,}"
    assert re.fullmatch(rf"1,200 rows, {size} bytes, best possible AUC 0\.\d{{4}}: {file}\n", result.stdout)
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


@pytest.mark.parametrize(("format", "ending"), [("parquet", ".parquet"), ("tsv", "")])
def test_generate_writes_days(format: Literal["parquet", "tsv"], ending: str) -> None:
    options = ("--rows", "300", "--days", "2", "--seed", "3", "--drift", "0.2", "--format", format)
    result = invoke("generate", "logs", *options)
    assert result.exit_code == 0
    assert [line.rpartition(": ")[2] for line in result.stdout.splitlines()] == [
        f"logs/day_{day}{ending}" for day in range(2)
    ]
    write_criteo("same", 300, format=format, seed=3, day=1, drift=0.2)
    assert Path(f"logs/day_1{ending}").read_bytes() == Path("same").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rows.tsv", "--days", "2"), "--days writes several files: give a folder, not rows.tsv"),
        (("logs", "--drift", "0.1"), "--drift is from day to day: say --days as well"),
        (("rows.csv",), "rows.csv: the ending must be one of .parquet, .tsv, or none for a folder"),
    ],
)
def test_generate_refuses_what_contradicts_itself(arguments: tuple[str, ...], message: str) -> None:
    assert message in user_error("generate", *arguments)
    assert list(Path().iterdir()) == []


def test_generate_says_how_far_it_is_every_two_seconds() -> None:
    lines: list[str] = []
    times = iter([10.0, 11.0, 12.5, 13.0, 15.0])
    say = progress_lines(4000, lambda: next(times), lines.append)
    for rows in (1000, 2000, 3000, 4000):
        say(rows)
    assert lines == ["2,000 of 4,000 rows  800 rows/s"]


@pytest.mark.slow
def test_generate_on_a_full_disk_is_an_error_of_one_line() -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
    Path("sitecustomize.py").write_text(limits)
    with command("generate", "logs", "--rows", "20000", PYTHONPATH=str(Path.cwd())) as process:
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (2, "")
    assert err == "error: logs/part-0.parquet was not written: File too large; nothing is left of it\n"
    assert list(Path("logs").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300, "cannot be made: File name too long"),
        ("x" * 300 + ".parquet", "was not written: File name too long; nothing is left of it"),
        ("file/rows.parquet", "the folder file cannot be made: File exists"),
        ("file/deep/rows.parquet", "the folder file/deep cannot be made: Not a directory"),
    ],
)
def test_generate_where_nothing_can_be_written(path: str, message: str) -> None:
    Path("file").touch()
    assert message in user_error("generate", path, "--rows", "1")
    assert [each.name for each in Path().iterdir()] == ["file"]


def test_generate_refuses_days_that_are_there_in_part() -> None:
    for name in ("day_7.parquet", "day_3.parquet", "day_10.parquet", "day_1", "day_01.parquet", "day_x.parquet"):
        Path("logs").mkdir(exist_ok=True)
        (Path("logs") / name).touch()
    assert "logs/day_3.parquet is there already" in user_error("generate", "logs", "--days", "8", "--rows", "1")
    assert invoke("generate", "logs", "--days", "3", "--rows", "1").exit_code == 0


@pytest.mark.slow
def test_very_many_days_begin_at_once_and_an_interrupt_says_how_many_are_whole() -> None:
    with command("generate", "logs", "--days", str(10**12), "--rows", "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(": logs/day_0.parquet\n")
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    said = re.fullmatch(r"interrupted after ([\d,]+) of 1,000,000,000,000 files; each that is in logs is whole\n", err)
    assert said, err
    written = len(list(Path("logs").iterdir()))
    assert written - int(said[1].replace(",", "")) in (0, 1)  # one more where it came before it was counted
    assert [path.suffix for path in Path("logs").iterdir()] == [".parquet"] * written


def redirected(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with its streams as a shell redirects them."""
    shell = ["sh", "-c", f'exec "$@" {how}', "sh", *COMMAND, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(shell, capture_output=True, text=True, timeout=100, check=False, env=environment)


@pytest.mark.slow
def test_a_stdout_that_is_closed_or_full() -> None:
    closed = redirected(">&-", "generate", "a.parquet", "--rows", "10")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    full = redirected(">/dev/full", "generate", "b.parquet", "--rows", "10")
    size = Path("b.parquet").stat().st_size
    assert full.returncode == 120
    assert re.fullmatch(
        r"error: stdout cannot be written to: No space left on device; it was to say: "
        rf"10 rows, {size:,} bytes, best possible AUC 0\.\d+: b\.parquet\n",
        full.stderr,
    ), full.stderr
    write_criteo("same", 10)
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes() == Path("same").read_bytes()
    all_closed = redirected("<&- >&- 2>&-", "generate", "c.parquet", "--rows", "10")
    assert all_closed.returncode == 0
    assert Path("c.parquet").read_bytes() == Path("same").read_bytes()


@pytest.mark.slow
def test_a_full_stdout_does_not_end_training() -> None:
    write_criteo("logs/part-0.parquet", 400)
    full = redirected(">/dev/full", "train", "logs", *SMALL_MODEL, "--run-dir", "run", "--epochs", "2")
    assert full.returncode == 120
    assert full.stderr.startswith(
        "error: stdout cannot be written to: No space left on device; it was to say: in short"
    )
    assert json.loads(Path("run/summary.json").read_text())["rows_by_epoch"] == [360, 360]


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


def test_the_help_of_train_names_every_tuner_that_it_takes() -> None:
    (option,) = get_type_hints(train, include_extras=True)["tuner"].__metadata__
    names = re.sub(r" \(.*?\)", "", option.help.rstrip(".")).replace(" or ", ", ").split(", ")
    assert sorted(names) == sorted(TUNERS)


def test_without_a_path_it_trains_on_rows_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(own_rows, "__defaults__", (400,))
    result = invoke("train", *SMALL_MODEL, "--run-dir", "here")
    assert result.exit_code == 0, result.output
    assert "making 400 rows of click logs in " in result.stdout
    assert json.loads(Path("here/summary.json").read_text())["rows_by_epoch"] == [360]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), ("0.25", 0.25)])
def test_memory_may_be_a_share_of_what_the_machine_gives(text: str, share: float) -> None:
    write_criteo("logs/part-0.parquet", 400)
    given = memory_limit(System()).limit_bytes
    assert given is not None
    assert invoke("train", "logs", *SMALL_MODEL, "--run-dir", "run", "--memory", text).exit_code == 0
    first = json.loads(Path("run/journal.jsonl").read_text().splitlines()[0])
    assert first["seen"]["machine"]["memory_limit_bytes"] == int(share * given)


@pytest.mark.slow
def test_a_finished_run_says_so_and_stays_as_it_is() -> None:
    write_criteo("logs/part-0.parquet", 800)
    assert invoke("train", "logs", *SMALL_MODEL, "--run-dir", "run", "--epochs", "2").exit_code == 0
    before = {file.name: file.read_bytes() for file in Path("run").iterdir()}
    done = invoke("train", "--resume", "run")
    assert (done.exit_code, done.stdout) == (
        0,
        "the run in run is already finished after 2 epochs, 1,440 rows; to go on, --epochs must be above 2\n",
    )
    assert {file.name: file.read_bytes() for file in Path("run").iterdir()} == before
    more = invoke("train", "--resume", "run", "--epochs", "3")
    assert more.exit_code == 0, more.output
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["rows_by_epoch"] == [720] * 3
    assert (
        f"trained     2,160 rows in {summary['seconds']:.1f} s, {2160 / summary['seconds']:,.0f} rows/s" in more.stdout
    )


@pytest.mark.slow
def test_a_resumed_run_refuses_other_data_in_the_words_of_the_command(tmp_path: Path) -> None:
    write_criteo("logs/part-0.parquet", 400)
    assert invoke("train", "logs", *SMALL_MODEL, "--run-dir", "run").exit_code == 0
    assert user_error("train", "other", "--resume", "run", "--rows-shuffle", "7", "--cpus", "1") == (
        "the run in run was begun with PATH logs, --rows-shuffle 200000 and keeps that, got PATH other, "
        "--rows-shuffle 7; leave it out, or begin a new run; what may be given anew: --checkpoint-seconds, "
        "--concurrency, --cpus, --device, --epochs, --executor, --memory, --seconds, --tuner"
    )
    for same in ("logs/", str(tmp_path / "logs")):
        again = invoke("train", same, "--resume", "run", "--batch-size", "100", "--seed", "0")
        assert (again.exit_code, "is already finished" in again.stdout) == (0, True), again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "no file or folder 'nowhere'"),
        (("logs", "--held-out", "1"), "--held-out must be a share from 0 to 0.5"),
        (("logs", "--rows-shuffle", "-1"), "--rows-shuffle must be at least 0"),
        (("logs", "--held-out", "1e-320"), "--held-out must be a share from 0 to 0.5"),
        (("logs", "--seed", "9" * 23), "--seed must be from 0 to 2**63-1, got 999"),
        (("logs", "--rows-per-table", "1000000000"), "--rows-per-table 1000000000 takes 3,099.4 GiB for the model"),
        (("logs", "--device", "meta"), "device 'meta' cannot be used: "),
        (("logs", "--run-dir", "x" * 300), "cannot be made: File name too long"),
        (("logs", "--run-dir", "other.csv/run"), "the run folder other.csv/run cannot be made: Not a directory"),
        (("logs", "--epochs", "0"), "--epochs must be at least 1, got 0"),
        (("logs", "--tuner", "clever"), "unknown tuner 'clever'"),
        (("logs", "--tuner", "hilclimb"), "unknown tuner 'hilclimb': give one of 'dqn', 'even', 'hillclimb', "),
        (
            ("logs", "--tuner", "static", "--concurrency", "x"),
            "--concurrency must be STAGE=N, as in read_parquet=2, got 'x'",
        ),
        (
            ("logs", "--tuner", "static", "--concurrency", "x=1"),
            "no stage 'x' to set the concurrency of; there are read_",
        ),
        (("logs", "--memory", "lots"), "--memory: 'lots' is not a size in bytes"),
        (("logs", "--memory", "150%"), "--memory: '150%' is not a share: it must be above 0 and at most all"),
        (("logs", "--memory", "1MiB"), "--memory 1MiB is 1 MiB, but this process and its children use"),
        (("logs", "--cpus", "0"), "--cpus must be an int >= 1, got 0"),
        (("logs", "--run-dir", "logs"), "the run folder logs is there already"),
        (("logs", "--format", "tsv"), "expected 40 tab-separated fields"),
        (("other.csv",), "and *.parquet; say --format tsv or --format parquet"),
        (("no-label.tsv",), "files without a label need label=False, and cannot be trained on"),
    ],
)
def test_what_the_user_did_wrong_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    write_criteo("logs/part-0.parquet", 50)
    Path("other.csv").write_text("1,2\n")
    Path("no-label.tsv").write_text("\t" * 38 + "\n")
    assert message in user_error("train", *arguments)


def test_the_run_folder_gets_a_number_where_the_name_is_taken(tmp_path: Path) -> None:
    now = datetime(2024, 5, 6, 7, 8, 9)
    first, second = itertools.islice(new_run_dirs(tmp_path, "data/clicks.parquet", now), 2)
    assert (first, second) == (tmp_path / "20240506-070809-clicks", tmp_path / "20240506-070809-clicks-2")
    first.mkdir()
    assert next(new_run_dirs(tmp_path, "data/clicks/", now)) == second
    long = next(new_run_dirs(tmp_path, "\u00e9" * 200, now))
    long.mkdir()  # so its name is not too long


@pytest.mark.slow
def test_a_run_folder_that_another_run_made_a_moment_before_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write_criteo("logs/part-0.parquet", 400)
    made: list[Path] = []

    def also_made(folder: RunFolder, config: str) -> None:
        if len(made) < 2:
            folder.path.mkdir(parents=True)
        made.append(folder.path)
        make(folder, config)

    make = RunFolder.make
    monkeypatch.setattr(RunFolder, "make", also_made)
    result = invoke("train", "logs", *SMALL_MODEL)
    assert result.exit_code == 0, result.output
    assert [path.name.removeprefix(made[0].name) for path in made] == ["", "-2", "-3"]
    assert [sorted(os.listdir(path)) for path in made[:2]] == [[], []]
    assert result.stdout.splitlines()[-1] == f"run folder  {made[2]}"


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
    assert re.fullmatch(r"interrupted after [\d,]+ rows; .*\brun\b.*\n", err)
    assert err.count("interrupted") == 1
    assert "interrupted" not in out
    assert max(map(len, [first, *out.splitlines()])) <= 80
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
