"""How training goes as a table that stays in its place, for a terminal."""

import logging
import math
import os
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from intune._values import Snapshot, StageSnapshot
from intune._words import clock as on_a_clock
from intune._words import gib, or_open
from intune.control.shortage import Shortage, shortage
from intune.recsys.progress import Standing, Window

EVERY_SECONDS = 0.5
RATE_SECONDS = 10.0
"""Over how long the rate of rows is taken."""

CHANGES = 3
"""Changes that are listed below the table where it has no column for them."""

LEAST_HELD_SECONDS = 0.1
"""For less the table does not say that memory held the loader back."""

_WIDE = 150
"""Columns from which each stage's last change stands in its line."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def fits(console: Console, *, plain: bool) -> bool:
    """Whether a table that stays in its place can be shown, and is wanted.

    Args:
        console: The terminal.
        plain: Whether the user asked for lines.
    """
    # Asked of stdout itself: variables such as FORCE_COLOR let a pipe pass for a terminal with rich.
    at_terminal = sys.stdout.isatty() and console.is_interactive and not console.is_dumb_terminal
    return at_terminal and not plain and not os.environ.get("CI")


class LiveTable:
    """Shows where training stands, and each stage of the loader, twice a second.

    A thread of its own draws, so that the table goes on when the training loop waits. It reads the loader's last
    window and what it was told; what is not known is shown as "-".
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing yet.

        Args:
            console: Where to.
            clock: Gives seconds.
        """
        self._console = console
        self._clock = clock
        self._began = self._said = clock()
        self._standing: Standing | None = None
        self._pace = Pace()
        self._changes = Changes()
        self._held = HeldBack()
        self._failed = False

    def echo(self, line: str) -> None:
        """Write a line; above the table while there is one."""
        self._console.print(Text(line), soft_wrap=True)

    @contextmanager
    def running(self, window: Window) -> Iterator[None]:
        """Show the table within, and take it away at the end, whatever that is; the cursor is back then."""
        self._began = self._said = self._clock()
        live = Live(
            console=self._console,
            get_renderable=lambda: self._shown(window),
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # else it would be kept out of the file that it was sent to
        )
        stop = threading.Event()
        thread = threading.Thread(target=_refresh, args=(live, stop), name="intune-live-table", daemon=True)
        try:
            live.start()
            thread.start()
            yield
        finally:
            try:
                stop.set()
                if thread.ident is not None:
                    thread.join()
            finally:
                try:
                    live.stop()
                finally:
                    self._console.show_cursor(True)  # for a Ctrl-C in the middle of `stop`

    def due(self) -> bool:
        """Whether half a second has passed since the last time."""
        return self._clock() - self._said >= EVERY_SECONDS

    def say(self, standing: Standing) -> None:
        """Take note; the table shows it when it is drawn next."""
        self._said = self._clock()
        if self._standing is None:
            self._pace.add(self._began, standing.rows_before)
        self._pace.add(self._said, standing.rows)
        self._standing = standing

    def _shown(self, window: Window) -> Text:
        """The table; a fault in it is logged once and shown instead, as training must not end by it."""
        try:
            if not self._failed:
                return self.table(window())
        except Exception:
            self._failed = True
            _log.exception("The live table cannot be drawn; training goes on without it")
        return Text("(no table: it could not be drawn)")

    def table(self, window: Snapshot | None) -> Text:
        """Where training stands, and the stages over this window, never larger than the terminal."""
        now, (width, height) = self._clock(), self._console.size
        if window is not None:
            self._changes.note(window, now)
            self._held.note(window)
        held = [_cut(text, width) for text in self._held.words()]
        lines = _packed([*self._figures(now, window, _count if width >= 60 else _short), *held], width)
        if window is not None:
            lines += _stage_lines(window, self._changes, now, width)
        most = max(1, height - 1)  # what has left the screen could not be taken away at the end
        if len(lines) > most:
            lines[most - 1 :] = [f"({len(lines) - most + 1} more lines)"]
        return Text("\n".join(lines), no_wrap=True, overflow="crop")

    def _figures(self, now: float, window: Snapshot | None, number: Callable[[float], str]) -> list[str]:
        rate = self._pace.rate(now)
        epoch = rows = loss = total = waited = used = limit = None
        used_by = ""
        if (standing := self._standing) is not None:
            epoch, rows, loss, total = standing.epoch, standing.rows, standing.loss, standing.rows_total
        if window is not None:
            waited = window.consumer.wait_share
            used, limit = window.machine.memory_bytes, window.machine.memory_limit_bytes
            used_by = window.machine.memory_used_by and f" by {window.machine.memory_used_by}"
        return [
            f"epoch {_or(epoch, str)}",
            f"rows {_or(rows, number)}{'' if total is None else f' of about {number(total)}'}",
            f"{_or(rate, number)} rows/s",
            f"left {_or(self._seconds_left(now, rate), on_a_clock)}",
            f"loss {_or(loss, '{:.4f}'.format)}",
            f"waited {_or(waited, _percent)}",
            f"memory {_or(used, gib)} of {_or(limit, gib)} GiB{used_by}",
        ]

    def _seconds_left(self, now: float, rate: float | None) -> float | None:
        standing = self._standing
        if standing is None:
            return None
        ends = []
        if standing.seconds_limit is not None:
            ends.append(standing.seconds_limit - (now - self._began))
        if standing.rows_total is not None and rate:
            ends.append((standing.rows_total - standing.rows) / rate)
        return max(0.0, min(ends)) if ends else None


class Pace:
    """The rate of rows over the last ten seconds; it goes down while nothing is done."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, rows: int) -> None:
        """Note how many rows are done, in all."""
        self._points.append((now, rows))

    def rate(self, now: float) -> float | None:
        """Rows a second; None before anything was noted, or where no time has passed."""
        points = self._points
        while len(points) > 1 and points[1][0] <= now - RATE_SECONDS:
            points.popleft()
        if not points or now <= points[0][0]:
            return None
        return (points[-1][1] - points[0][1]) / (now - points[0][0])


class Changes:
    """What happened last to each stage, and when; taken from the events of the windows."""

    def __init__(self) -> None:
        self._window: Snapshot | None = None
        self._last: dict[str, tuple[float, str]] = {}

    def note(self, window: Snapshot, now: float) -> None:
        """Take up the events of a window; nothing happens where it was the last one already."""
        if window is self._window:
            return
        self._window = window
        for event in window.events:
            if event.stage is None:
                continue
            why = window.allocation.reasons.get(event.stage, "") if event.kind in ("resize", "pause") else ""
            self._last.pop(event.stage, None)  # so that the dictionary stays in the order of time
            self._last[event.stage] = now, f"{event.detail or event.kind}{why and f': {why}'}"

    def text(self, stage: str, now: float) -> str:
        """What happened last to a stage, how long ago and why; "-" = nothing was seen."""
        if stage not in self._last:
            return "-"
        when, what = self._last[stage]
        return f"{on_a_clock(now - when)} ago, {what}"

    def latest(self) -> list[str]:
        """The stages to which something happened, the last first."""
        return list(reversed(self._last))


class HeldBack:
    """For how long the memory limit held the loader back, over all windows that were shown."""

    def __init__(self) -> None:
        self._window: Snapshot | None = None
        self._seconds = 0.0

    def note(self, window: Snapshot) -> None:
        """Take up a window; nothing happens where it was the last one already."""
        if window is not self._window:
            self._window = window
            cost = shortage(window)
            self._seconds += cost.seconds if cost is not None else 0.0

    def words(self) -> list[str]:
        """As in "held back 3.1 s by the memory limit"; none where that is not worth a word."""
        return [Shortage(self._seconds, 0, 0.0).in_words()] if self._seconds >= LEAST_HELD_SECONDS else []


def _refresh(live: Live, stop: threading.Event) -> None:
    while not stop.wait(EVERY_SECONDS):
        live.refresh()


def _stage_lines(window: Snapshot, changes: Changes, now: float, width: int) -> list[str]:
    """A heading, a line for each stage and, where the lines have no room for the last changes, these below."""
    # Laid out here: a table of rich's own costs some twenty times the CPU of a text.
    gap = 2 if width >= 60 else 1
    columns = [
        ["stage", *(stage.name for stage in window.stages)],
        ["concurrency" if width >= 100 else "conc", *(or_open(stage.concurrency) for stage in window.stages)],
        ["running" if width >= 100 else "run", *(str(stage.running) for stage in window.stages)],
        ["busy", *(_or(_busy(stage, window), _percent) for stage in window.stages)],
        ["rows/s", *(_or(_rate(stage, window.window_seconds), _short) for stage in window.stages)],
    ]
    sizes = [max(map(cell_len, column)) for column in columns]
    waiting = max(11, min(34, width // 4))  # 11: the longest cause at 100 %, or the heading
    sizes[0] = max(4, min(sizes[0], width - sum(sizes[1:]) - waiting - gap * len(sizes), width // 3))
    sizes.append(waiting)
    columns.append(["waiting for", *(_waiting(stage, waiting) for stage in window.stages)])
    if width >= _WIDE:
        sizes.append(width - sum(sizes) - gap * len(sizes))
        columns.append(["last change", *(changes.text(stage.name, now) for stage in window.stages)])
    lines = [(" " * gap).join(map(_cell, row, sizes, range(len(sizes)))) for row in zip(*columns, strict=True)]
    if width < _WIDE:
        for name in changes.latest()[:CHANGES]:
            told = f"{name}: {changes.text(name, now)}"
            parts = textwrap.wrap(told, width, subsequent_indent="  ", max_lines=3, placeholder=" …")
            lines += [_cut(part, width) for part in parts]
    return lines


def _cell(text: str, size: int, place: int) -> str:
    """A text of that many columns: numbers, at places 1 to 4, stand right."""
    text = _cut(text, size)
    return " " * (size - cell_len(text)) + text if 1 <= place <= 4 else set_cell_size(text, size)


def _cut(text: str, size: int) -> str:
    return text if cell_len(text) <= size else set_cell_size(text, max(0, size - 1)) + "…"


def _packed(parts: Sequence[str], width: int) -> list[str]:
    """Parts side by side, in as many lines as they need."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _busy(stage: StageSnapshot, window: Snapshot) -> float | None:
    """Share of what the stage may work at once that it did work; None where there is no number for that."""
    most = stage.concurrency
    if most is None and stage.info.executor == "process":
        most = stage.processes_live
    elif most is None and not stage.info.waits:
        most = window.allocation.slots
    if not most or window.window_seconds <= 0:
        return None
    return min(1.0, stage.busy_seconds / window.window_seconds / most)


def _rate(stage: StageSnapshot, seconds: float) -> float | None:
    if stage.source_rows_per_item is None or seconds <= 0:
        return None
    return stage.items_out * stage.source_rows_per_item / seconds


def _waiting(stage: StageSnapshot, size: int) -> str:
    """Causes with their shares, the largest first, as many as there is room for."""
    if not stage.wait_share:
        return "-"
    shares = sorted(stage.wait_share.items(), key=lambda each: -each[1])
    told = [f"{cause} {_percent(share)}" for cause, share in shares if share >= 0.005] or ["0%"]
    while len(told) > 1 and len(", ".join(told)) > size:
        told.pop()
    return ", ".join(told)


def _or(value: T | None, shown: Callable[[T], str]) -> str:
    """The value as it is shown, or "-" for what is not known."""
    unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return "-" if value is None or unknown else shown(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _short(value: float) -> str:
    """A number in at most six columns: 950, 12.3k, 4.0M."""
    if value >= 1e12:
        return f"{value:.0e}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"
