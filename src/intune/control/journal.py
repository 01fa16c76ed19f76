"""The journal: a line of JSON for each decision; what was seen, proposed, vetoed, applied and why.

A line is an object with these fields:

* `schema`: 1. `tick`: counts the lines of a run from 0. `time`: seconds on the run's clock since its first line.
* `full`: whether `seen` is complete; otherwise it holds only what changed since the line before.
* `seen`: the snapshot and, as `budget`, the budget. `stages` is an object by stage name, `machine.memory` one by what
  sets a limit.
* `proposed`, `applied`: `concurrency` by stage, `slots`, `in_flight_bytes`, and `expected_rows_per_second`, what the
  training loop is expected to take under it (null: the tuner does not say, or for `applied`: it was not granted all).
  `reasons`: the tuner's, by stage.
* `vetoed`: events, one for each thing that was lowered or refused, and for a tuner that failed.
* `outcome`: what the decision of the line before led to: `window_seconds`, `steps_per_second`,
  `rows_per_second` and `wait_share` of the trainer; null on the first line of a run.
* `judged`: what the last change of the allocation brought, on the line at which enough steps have been done since;
  else null. `tick`: the line that made the change. `concurrency` by stage and `slots`: [before, after]. `expected` and
  `got`: change of the rows that the trainer takes a second, as a share of those before (0.18 = 18 % more); `expected`
  is the tuner's estimate, null where it did not say. `steps`, `seconds`: what `got` was taken from. A change after
  which too few steps can be compared (`intune.control.outcome` says which) is never judged.

Figures that are not numbers (NaN, infinity) become null, as JSON has none. The first line of a file and one
in each minute are full, so that a file can be read from its start and little is lost with a damaged one.
"""

import copy
import io
import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from intune._clock import Clock
from intune._errors import SourceError
from intune._values import Allocation, Budget, Event, Snapshot
from intune.control.outcome import Outcome

_log = logging.getLogger(__name__)

SCHEMA = 1
FULL_SECONDS = 60.0
ROTATE_BYTES = 64 * 2**20
DEPTH = 2
"""Levels of `seen` that are compared field by field (stages, a stage, its fields); deeper ones change as a whole."""


@dataclass(frozen=True, slots=True)
class Decision:
    """All that one step of the controller knew and did.

    Attributes:
        snapshot: What the tuner saw.
        budget: What held.
        proposed: What the tuner wanted, or what stood in for it.
        vetoed: What was not granted and why, and that a tuner failed.
        applied: What was put into force.
        outcome: What the last change before it brought, where that became known in this window.
    """

    snapshot: Snapshot
    budget: Budget
    proposed: Allocation
    vetoed: tuple[Event, ...]
    applied: Allocation
    outcome: Outcome | None = None


class Journal:
    """Keeps the last decisions in memory and, where it has a path, appends each to a file and flushes.

    A file that passes `rotate_bytes` is renamed to `<path>.1`, over an older one of that name. If writing
    fails, a full disk for example, that is logged once; the file is given up and memory goes on. Safe to use
    from several threads.

    Args:
        path: File to append to; None = memory only.
        clock: Gives the time of each line.
        keep: Lines kept in memory.
        rotate_bytes: Largest size of a file.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self, path: str | Path | None = None, *, clock: Clock, keep: int = 1000, rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        self._path = None if path is None else Path(path)
        self._clock = clock
        self._keep = keep
        self._rotate_bytes = rotate_bytes
        self._lock = threading.Lock()
        self._tick = 0
        self._began: float | None = None
        self._last_full = -math.inf
        self._seen: dict[str, Any] = {}
        self._kept: deque[bytes] = deque()
        self._before_kept: dict[str, Any] = {}
        self._file = None if self._path is None else _open(self._path)

    def record(self, decision: Decision) -> None:
        """Add one decision."""
        with self._lock:
            now = self._clock.wall()
            self._began = now if self._began is None else self._began
            line = self._line(decision, now - self._began)
            text = _encode(line)
            if self._file is not None and (size := self._file.tell()) and size + len(text) > self._rotate_bytes:
                self._rotate()
                line["full"], line["seen"] = True, self._seen
                text = _encode(line)
            if line["full"]:
                self._last_full = line["time"]
            self._remember(text)
            self._write(text)

    def lines(self) -> list[dict[str, Any]]:
        """The last decisions, oldest first, each with all of `seen`; lines share the parts that did not change."""
        with self._lock:
            kept, seen = list(self._kept), copy.deepcopy(self._before_kept)
        return list(_reassemble(map(json.loads, kept), seen))

    def close(self) -> None:
        """Close the file; lines stay readable. May be called again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _line(self, decision: Decision, time: float) -> dict[str, Any]:
        seen = _seen(decision)
        changed = None if time - self._last_full >= FULL_SECONDS else _changes(self._seen, seen, DEPTH)
        first, self._seen = not self._seen, seen
        line = {
            "schema": SCHEMA,
            "tick": self._tick,
            "time": time,
            "full": changed is None,
            "seen": seen if changed is None else changed,
            "proposed": _numbers(decision.proposed),
            "vetoed": to_plain(decision.vetoed),
            "applied": _numbers(decision.applied),
            "reasons": to_plain(decision.proposed.reasons),
            "outcome": None if first else _outcome(decision.snapshot),
            "judged": None if decision.outcome is None else _judged(decision.outcome, self._tick),
        }
        self._tick += 1
        return line

    def _remember(self, text: bytes) -> None:
        self._kept.append(text)
        if len(self._kept) > self._keep:
            self._before_kept = _patched(self._before_kept, json.loads(self._kept.popleft()))

    def _write(self, text: bytes) -> None:
        if self._file is None:
            return
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._give_up()

    def _rotate(self) -> None:
        assert self._file is not None
        assert self._path is not None
        try:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = _open(self._path)
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        _log.exception("The journal %s cannot be written; it goes on in memory only", self._path)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_journal(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal file, each with all of `seen` put together again from the changes.

    A line that was cut off while being written is left out: the last one of the file, or of a run after which
    another one was appended.

    Raises:
        SourceError: If a line in the middle is damaged, none is whole, or one is of a schema that this version does not
            know; it names file and line.
        OSError: If the file cannot be read.
    """
    yield from (line for _, line in numbered_lines(path))


def numbered_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same, each with its number in the file, from 1, for errors that speak of it.

    Raises:
        SourceError: As of `read_journal`.
        OSError: If the file cannot be read.
    """
    seen: dict[str, Any] = {}
    with open(path, "rb") as file:
        for number, line in _whole_lines(file, path):
            (line,) = _reassemble([line], seen)
            seen = line["seen"]
            yield number, line


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings, sequences and numbers as JSON knows them; numbers that are not finite become None.

    Raises:
        TypeError: If there is something else in it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    raise TypeError(f"cannot write {value!r} as JSON; allowed are numbers, text, mappings, sequences and dataclasses")


def _open(path: Path) -> io.FileIO:
    """Open for appending, unbuffered; a last line that was cut off by an earlier run gets its end."""
    torn = False
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read() != b"\n"
    opened = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the journal
    if torn:
        opened.write(b"\n")
    return opened


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _seen(decision: Decision) -> dict[str, Any]:
    seen: dict[str, Any] = to_plain(decision.snapshot)
    seen["stages"] = {stage["info"]["name"]: stage for stage in seen["stages"]}
    seen["machine"]["memory"] = {use["limit_from"]: use for use in seen["machine"]["memory"]}
    seen["budget"] = to_plain(decision.budget)
    return seen


def _numbers(allocation: Allocation) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(allocation)
    del plain["reasons"]
    return plain


def _outcome(snapshot: Snapshot) -> dict[str, Any]:
    seconds, consumer = snapshot.window_seconds, snapshot.consumer
    return {
        "window_seconds": to_plain(seconds),
        "steps_per_second": to_plain(consumer.steps / seconds) if seconds > 0 else None,
        "rows_per_second": to_plain(consumer.rows / seconds) if seconds > 0 else None,
        "wait_share": to_plain(consumer.wait_share),
    }


def _judged(outcome: Outcome, tick: int) -> dict[str, Any]:
    change = outcome.change
    plain: dict[str, Any] = to_plain(
        {
            "tick": tick - outcome.decisions_ago,
            "concurrency": change.concurrency,
            "slots": change.slots,
            "expected": change.expected,
            "got": outcome.got,
            "steps": outcome.steps,
            "seconds": outcome.seconds,
        }
    )
    return plain


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """What is different in `new`, compared down to `depth`; None where something vanished, which no change can say."""
    if old.keys() - new.keys():
        return None
    found: dict[str, Any] = {}
    for key, value in new.items():
        if key in old and old[key] == value:
            continue
        if depth and isinstance(value, dict) and isinstance(old.get(key), dict):
            inner = _changes(old[key], value, depth - 1)
            if inner is None:
                return None
            found[key] = inner
        else:
            found[key] = value
    return found


def _patched(old: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """All of what a line saw; `old` is that of the line before and is left as it is."""
    return dict(line["seen"]) if line["full"] else _merged(old, line["seen"], DEPTH)


def _merged(old: Mapping[str, Any], changed: Mapping[str, Any], depth: int) -> dict[str, Any]:
    merged = dict(old)
    for key, value in changed.items():
        inside = depth and isinstance(value, dict) and isinstance(old.get(key), dict)
        merged[key] = _merged(old[key], value, depth - 1) if inside else value
    return merged


def _reassemble(lines: Iterable[dict[str, Any]], seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for line in lines:
        seen = _patched(seen, line)
        yield {**line, "seen": seen, "full": True}


def _whole_lines(file: Iterable[bytes], path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    damaged: tuple[int, str] | None = None
    whole = False
    for number, text in enumerate(file, start=1):
        line = _decoded(text)
        if damaged is not None and (isinstance(line, str) or line.get("tick") != 0):
            raise SourceError(
                f"{path}, line {damaged[0]}: damaged ({damaged[1]}), and its run goes on; cut the file before that line"
            )
        damaged = (number, line) if isinstance(line, str) else None
        if isinstance(line, str):
            continue
        if line.get("schema") != SCHEMA:
            raise SourceError(f"{path}, line {number}: schema {line.get('schema')!r}, this version reads {SCHEMA}")
        whole = True
        yield number, line
    if damaged is not None and not whole:
        raise SourceError(
            f"{path}, line {damaged[0]}: damaged ({damaged[1]}), and no other line is whole; is it a journal?"
        )


def _decoded(text: bytes) -> dict[str, Any] | str:
    """The line, or why it is not whole."""
    try:
        line = json.loads(text)
    except UnicodeDecodeError as error:
        return f"no text from byte {error.start + 1} on"
    except json.JSONDecodeError as error:
        return f"no JSON: {error.msg} at column {error.colno}"
    if not isinstance(line, dict):
        return "no JSON object"
    return line if text.endswith(b"\n") else "its end is missing"
