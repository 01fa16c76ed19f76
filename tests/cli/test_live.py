"""The live table: what it shows, that it fits, and that the terminal is whole afterwards."""

import codecs
import errno
import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from intune._values import Allocation, ConsumerSnapshot, Event, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.cli.app import app
from intune.cli.live import Changes, LiveTable, Pace, fits
from intune.recsys.generate import write_criteo
from intune.recsys.progress import Standing
from intune.testing.scenes import scenes
from intune.testing.scenes import window as drawn

from .commands import PATIENT

GIB = 2**30
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 80, height: int = 50) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, record=True, width=width, height=height, _environ={})


def stage(name: str, concurrency: int | None = None, **fields: object) -> StageSnapshot:
    known = {"running": 1, "items_out": 4, "source_rows_per_item": 1000.0, "busy_seconds": 1.0}
    return StageSnapshot(StageInfo(name, "map"), concurrency, **(known | fields))  # type: ignore[arg-type]


def snapshot(*stages: StageSnapshot, events: tuple[Event, ...] = (), reasons: dict[str, str] | None = None) -> Snapshot:
    return Snapshot(
        2.0,
        True,
        stages,
        ConsumerSnapshot(10, 20_000, 0.2, 0.034),
        MachineSnapshot(4, memory_bytes=int(2.1 * GIB), memory_limit_bytes=6 * GIB),
        Allocation({each.name: each.concurrency for each in stages}, 4, None, reasons or {}),
        events=events,
    )


def rows_of(table: LiveTable, window: Snapshot | None) -> list[str]:
    return [line.rstrip() for line in table.table(window).plain.splitlines()]


# ---- what it shows --------------------------------------------------------------------------------------------------


def test_where_training_stands() -> None:
    clock = Clock()
    table = LiveTable(terminal(200), clock)
    clock.now += 4.0
    assert table.due()
    table.say(Standing(1, 24_000, 0.51239, None, rows_before=4000, rows_total=64_000))
    assert not table.due()
    assert rows_of(table, snapshot(stage("a")))[0] == (
        "epoch 1  rows 24,000 of about 64,000  5,000 rows/s  left 8 s  loss 0.5124  waited 3%  memory 2.1 of 6.0 GiB"
    )


@pytest.mark.parametrize(
    ("total", "limit", "left"),
    [(None, None, "-"), (None, 3700.0, "1:01:36"), (20_000, 3700.0, "4 s"), (20_000, 5.0, "1 s"), (9000, None, "0 s")],
)
def test_time_left_is_the_end_that_comes_first(total: int | None, limit: float | None, left: str) -> None:
    clock = Clock()
    table = LiveTable(terminal(200), clock)
    clock.now += 4.0
    table.say(Standing(0, 10_000, 0.5, None, rows_total=total, seconds_limit=limit))
    assert f"  left {left}  " in rows_of(table, None)[0]


def test_whose_memory_it_is_is_said_where_that_is_known() -> None:
    table = LiveTable(terminal(200), Clock())
    window = snapshot(stage("a"))
    shared = replace(window.machine, memory_used_by="all programs on this machine")
    assert rows_of(table, replace(window, machine=shared))[0].endswith(
        "memory 2.1 of 6.0 GiB by all programs on this machine"
    )


def test_what_is_not_known_is_a_dash() -> None:
    table = LiveTable(terminal(200), Clock())
    bare = "epoch -  rows -  - rows/s  left -  loss -  waited -  memory - of - GiB"
    assert rows_of(table, None) == [bare]
    table.say(Standing(0, 0, float("nan"), None))
    unknown = StageSnapshot(StageInfo("wait", "source", waits=True), None, running=0)
    window = replace(snapshot(unknown), machine=MachineSnapshot(4))
    first, _, line = rows_of(table, window)
    assert first == "epoch 0  rows 0  - rows/s  left -  loss -  waited 3%  memory - of - GiB"
    assert line.split() == ["wait", "open", "0", "-", "-", "-", "-"]


def held(share: float, seconds: float = 1.0) -> Snapshot:
    """A window in which memory held a free CPU back."""
    return replace(snapshot(stage("a", 2)), window_seconds=seconds, held_back_share=share, in_flight_bytes_limit=2**20)


def test_it_says_for_how_long_memory_has_held_the_loader_back() -> None:
    table = LiveTable(terminal(200), Clock())
    assert "held back" not in rows_of(table, held(0.0))[0]
    assert "held back" not in rows_of(table, held(0.09))[0]
    window = held(0.5, 4.0)
    for _ in range(3):  # the same one counts once
        assert rows_of(table, window)[0].endswith("memory 2.1 of 6.0 GiB  held back 2.1 s by the memory limit")
    assert rows_of(table, held(1.0))[0].endswith("held back 3.1 s by the memory limit")
    assert rows_of(table, held(0.0))[0].endswith("held back 3.1 s by the memory limit")


@pytest.mark.parametrize(
    ("width", "end"), [(30, "by the m…"), (40, "by the memory limit"), (80, "by the memory limit")]
)
def test_that_memory_holds_it_back_has_room_in_narrow_terminals(width: int, end: str) -> None:
    lines = rows_of(LiveTable(terminal(width), Clock()), held(1.0, 86_400.0))
    (line,) = [line for line in lines if "held back" in line]
    assert cell_len(line) <= width
    assert line.endswith(f"held back 86,400.0 s {end}")


def test_each_stage_in_a_line() -> None:
    table = LiveTable(terminal(180), Clock())
    window = snapshot(
        stage("read", busy_seconds=6.0, wait_share={"slot": 0.25}),
        stage("transform", 3, running=2, wait_share={"input": 0.1, "room": 0.4, "order": 0.001}),
        stage("batch", 0, items_out=0, wait_share={"input": 0.0}),
        events=(Event("resize", "transform", "concurrency 2 -> 3"), Event("epoch_start", None, "epoch 1")),
        reasons={"transform": "busy on 2.10 items at once"},
    )
    lines = [re.split(" {2,}", line) for line in rows_of(table, window)[1:]]
    assert lines == [
        ["stage", "concurrency", "running", "busy", "rows/s", "waiting for", "last change"],
        ["read", "open", "1", "75%", "2.0k", "slot 25%", "-"],
        [
            *("transform", "3", "2", "17%", "2.0k", "room 40%, input 10%"),
            "0 s ago, concurrency 2 -> 3: busy on 2.10 items at once",
        ],
        ["batch", "0", "1", "-", "0", "0%", "-"],
    ]


def test_the_last_changes_stand_below_where_there_is_no_column_for_them() -> None:
    clock = Clock()
    table = LiveTable(terminal(80), clock)
    names = [f"s{number}" for number in range(5)]
    for name in [*names, "s1"]:
        window = snapshot(*map(stage, names), events=(Event("worker_died", name, f"worker of {name} died"),))
        table.table(window)
        clock.now += 30.0
    assert rows_of(table, window)[-3:] == [
        "s1: 30 s ago, worker of s1 died",
        "s4: 1:00 ago, worker of s4 died",
        "s3: 1:30 ago, worker of s3 died",
    ]


def test_a_reason_has_up_to_three_lines_below_the_table() -> None:
    reason = "a reason of many words " * 3 + "and an end"
    event = Event("resize", "a", "concurrency 1 -> 2")
    lines = rows_of(LiveTable(terminal(60), Clock()), snapshot(stage("a", 2), events=(event,), reasons={"a": reason}))
    assert lines[-2:] == [
        "a: 0 s ago, concurrency 1 -> 2: a reason of many words a",
        "  reason of many words a reason of many words and an end",
    ]
    long = snapshot(stage("a", 2), events=(event,), reasons={"a": reason * 9})
    lines = rows_of(LiveTable(terminal(60), Clock()), long)
    assert len(lines) == 7
    assert lines[-1].endswith(" …")


def test_what_came_of_a_change_stands_with_it() -> None:
    changes = Changes()
    window = snapshot(stage("a", 5), events=(Event("resize", "a", "concurrency 3 -> 5"),), reasons={"a": "it is full"})
    changes.note(window, 10.0)
    judged = Event("outcome", "a", "concurrency 3 -> 5; it is full; estimated +18 %, got +15 % (45 steps in 3.0 s)")
    changes.note(snapshot(stage("a", 5), events=(judged,), reasons={"a": "as before"}), 11.0)
    assert changes.text("a", 11.0) == f"0 s ago, {judged.detail}"


def test_a_window_that_is_seen_again_does_not_make_a_change_new() -> None:
    changes = Changes()
    window = snapshot(stage("a", 2), events=(Event("resize", "a", "concurrency open -> 2"),))
    changes.note(window, 10.0)
    changes.note(window, 15.0)
    assert changes.text("a", 20.0) == "10 s ago, concurrency open -> 2"
    assert changes.text("b", 20.0) == "-"


def test_the_pace_is_that_of_the_last_seconds_and_sinks_while_nothing_is_done() -> None:
    pace = Pace()
    assert pace.rate(0.0) is None
    pace.add(0.0, 0)
    assert pace.rate(0.0) is None
    for second in range(1, 21):
        pace.add(float(second), 100 * second if second <= 10 else 1000 + 300 * (second - 10))
    assert pace.rate(20.0) == 300.0
    assert pace.rate(25.0) == pytest.approx(150.0)
    assert pace.rate(40.0) == 0.0


# ---- that it fits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 99, 100, 149, 150, 200])
def test_every_width_and_window_fits(width: int) -> None:
    for scene in scenes():
        allocation = Allocation(dict.fromkeys((each.name for each in scene.stages), 2), 4, None, {})
        clock = Clock()
        table = LiveTable(terminal(width), clock)
        for number in range(3):
            clock.now += 1.0
            table.say(Standing(number, 10**9 * number, 0.5, None, rows_total=10**11))
            events = [Event("resize", scene.stages[0].name, "concurrency 1 -> 2, " * 20)]
            lines = rows_of(table, drawn(scene, number, allocation, events))
            heading = next(place for place, line in enumerate(lines) if line.startswith("sta"))
            for line, each in zip(lines[heading + 1 :], scene.stages, strict=False):
                assert line.startswith(each.name[:3])
            assert len(lines) > heading + len(scene.stages)
            if width >= 40:
                assert max(map(cell_len, lines)) <= width


def test_at_40_columns_the_most_telling_is_left() -> None:
    window = snapshot(stage("criteo_transform_of_mine", 12, wait_share={"memory": 1.0, "input": 0.2}))
    lines = rows_of(LiveTable(terminal(40), Clock()), window)
    assert lines[-1].split()[1:] == ["12", "1", "4%", "2.0k", "memory", "100%"]
    assert lines[-1].startswith("crit")
    assert max(map(len, lines)) <= 40


def test_names_of_wide_letters_stay_in_their_columns() -> None:
    window = snapshot(stage("読み込み" * 20), stage("b"))
    *_, wide, narrow = rows_of(LiveTable(terminal(80), Clock()), window)
    assert "…" in wide
    assert cell_len(wide[: wide.index("open")]) == narrow.index("open")


def test_more_stages_than_lines_are_counted_instead() -> None:
    window = snapshot(*(stage(f"stage {number}") for number in range(60)))
    lines = rows_of(LiveTable(terminal(200, height=10), Clock()), window)
    assert len(lines) == 9
    assert lines[-1] == "(54 more lines)"


# ---- the terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_whole_whatever_ends_it(error: type[BaseException] | None) -> None:
    console = terminal()
    table = LiveTable(console, Clock())
    before = sys.stdout, sys.stderr
    with nullcontext() if error is None else pytest.raises(error), table.running(lambda: None):
        table.echo("a [bold]message[/bold] " + "x" * 100)
        print("printed by somebody")
        if error is not None:
            raise error
    assert (sys.stdout, sys.stderr) == before
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert "a [bold]message[/bold] " + "x" * 100 in written
    assert written.index("a [bold]message") < written.index("printed by somebody") < written.rindex("epoch -")


def test_a_table_that_cannot_be_drawn_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise ZeroDivisionError("no window")

    console = terminal()
    with LiveTable(console, Clock()).running(broken):
        pass
    assert "(no table: it could not be drawn)" in console.export_text()
    assert [record.message for record in caplog.records] == [
        "The live table cannot be drawn; training goes on without it"
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "plain", "at_terminal", "shown"),
    [
        ({}, False, True, True),
        ({}, True, True, False),
        ({}, False, False, False),
        ({"FORCE_COLOR": "1"}, False, False, False),
        ({"TERM": "dumb"}, False, True, False),
        ({"CI": "true"}, False, True, False),
    ],
)
def test_where_a_table_is_shown(
    variables: dict[str, str], plain: bool, at_terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", _Terminal() if at_terminal else io.StringIO())
    assert fits(Console(), plain=plain) == shown


def test_help_names_the_option() -> None:
    assert "--plain" in re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, ["train", "--help"]).stdout)


class PseudoTerminal:
    """The command at a pseudo-terminal of 100 columns, as the leader of a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        for name in ("CI", "COLUMNS", "LINES", "TTY_INTERACTIVE"):
            environment.pop(name, None)
        code = PATIENT + "import sys; from intune.cli import main; sys.exit(main())"
        self.main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.before = termios.tcgetattr(terminal)
        self.terminal = terminal
        actions = [(os.POSIX_SPAWN_DUP2, terminal, to) for to in (0, 1, 2)]
        launcher = (
            "import os, sys, fcntl, termios; os.chdir(sys.argv[1]); "
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[2:]])"
        )
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", launcher, str(folder), code, *arguments],
            environment,
            file_actions=actions,
            setsid=True,
            setsigdef=[signal.SIGINT],
        )
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character

    def read_until(self, *wanted: str, seconds: float = 60.0) -> None:
        """Read until all these texts were written."""
        until = time.monotonic() + seconds
        while not all(text in self.written for text in wanted):
            assert time.monotonic() < until, self.written
            assert self._read(), self.written

    def end(self) -> int:
        """Read all that is left; the exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.main)

    def _read(self) -> bool:
        if self.terminal >= 0 and self.written:  # the command has it open by now: the end is seen as an error
            os.close(self.terminal)
            self.terminal = -1
        try:
            new = os.read(self.main, 65536)
        except OSError as error:
            if error.errno == errno.EIO:
                return False
            raise
        self.written += self._decoder.decode(new)
        return bool(new)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_at_a_terminal_saves_and_leaves_the_cursor_shown(
    tmp_path: Path, number: str, code: int, word: str
) -> None:
    write_criteo(tmp_path / "logs" / "part-0.parquet", 20_000)
    options = ("--rows-per-table", "500", "--batch-size", "100", "--seconds", "100", "--run-dir", "run")
    at = PseudoTerminal(tmp_path, "train", "logs", *options)
    try:
        at.read_until(HIDE_CURSOR, "criteo_transform", "loss 0.", "waiting for")
        if number == "SIGINT":
            os.write(at.main, b"\x03")
        else:
            os.kill(at.pid, signal.SIGTERM)
        assert at.end() == code
    finally:
        at.close()
    assert at.written.count(SHOW_CURSOR) >= 1
    assert at.written.rindex(SHOW_CURSOR) > at.written.rindex(HIDE_CURSOR)
    assert "Traceback" not in at.written
    last = at.written[at.written.rindex(SHOW_CURSOR) :]
    said = " ".join(last.split())
    assert re.search(rf"{word} after [\d,]+ rows; to go on: intune train --resume run$", said)
    assert (tmp_path / "run" / "checkpoint.npz").exists()


@pytest.mark.slow
def test_a_whole_run_at_a_terminal_ends_with_its_summary_alone(tmp_path: Path) -> None:
    write_criteo(tmp_path / "logs" / "part-0.parquet", 2000)
    at = PseudoTerminal(tmp_path, "train", "logs", "--rows-per-table", "500", "--run-dir", "run")
    try:
        assert at.end() == 0
    finally:
        at.close()
    last = at.written[at.written.rindex(SHOW_CURSOR) :]
    assert "in short    the trainer waited" in last
    assert last.splitlines()[-1] == "run folder  run"


@pytest.mark.slow
def test_plain_at_a_terminal_writes_lines_only(tmp_path: Path) -> None:
    write_criteo(tmp_path / "logs" / "part-0.parquet", 2000)
    at = PseudoTerminal(tmp_path, "train", "logs", "--rows-per-table", "500", "--run-dir", "run", "--plain")
    try:
        assert at.end() == 0
    finally:
        at.close()
    assert "\x1b" not in at.written
    assert at.written.splitlines()[-1] == "run folder  run"
