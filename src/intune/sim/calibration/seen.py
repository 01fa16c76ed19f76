"""Windows read back from the lines of a journal, as the values that the tuner saw when they were written."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from intune._errors import SourceError
from intune._values import Allocation, Budget, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot

T = TypeVar("T")


class Window(NamedTuple):
    """What a tuner saw at one decision.

    Attributes:
        snapshot: What happened.
        budget: What held.
        held_seconds: For how long its allocation had been in force, with all processes up, at its end.
    """

    snapshot: Snapshot
    budget: Budget
    held_seconds: float


def windows(lines: Iterable[Mapping[str, Any]], place: Callable[[], str] = str) -> list[Window]:
    """The windows of the last run in a journal, from the first to the last one in which something was finished.

    Args:
        lines: As `intune.control.journal.read_journal`, a loader's `journal` or a `Trace` has them.
        place: Says where the line stands that was given last, for errors; may say nothing.

    Raises:
        SourceError: If a line is none of a journal.
    """
    found: list[Window] = []
    held, before, starting = 0.0, None, False
    for line in lines:
        if line.get("tick") == 0:  # an older run, perhaps of another pipeline, stands before it
            found = []
        try:
            window = read_window(line)
        except SourceError as error:
            raise SourceError(f"{place()}: {error}" if place() else str(error)) from error
        snapshot, now = window.snapshot, (window.snapshot.allocation.concurrency, window.snapshot.allocation.slots)
        held = (held if now == before else 0.0) + snapshot.window_seconds
        was_starting, starting = starting, any(stage.processes_starting for stage in snapshot.stages)
        held = 0.0 if starting or was_starting else held
        before = now
        if snapshot.window_seconds > 0:
            found.append(window._replace(held_seconds=held))
    # In between, a window in which nothing was finished is time that it took; before and after, nobody wanted anything.
    return _cut(_cut(found)[::-1])[::-1]


def _cut(found: list[Window]) -> list[Window]:
    """From the first window on in which something was finished."""
    return list(itertools.dropwhile(lambda each: not any(s.items_out for s in each.snapshot.stages), found))


def read_window(line: Mapping[str, Any]) -> Window:
    """What was seen at a line's decision.

    Raises:
        SourceError: If the line is none of a journal.
    """
    try:
        return _window(line["seen"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the line of tick {line.get('tick')!r} is none that a loader of this version writes ({error!r}); record "
            "one with Pipeline.loader(journal=PATH) or intune train, or cut the file before that line"
        ) from error


def _window(seen: Mapping[str, Any]) -> Window:
    stages = tuple(map(_stage, seen["stages"].values()))
    snapshot = {
        **seen,
        "stages": stages,
        "consumer": _made(ConsumerSnapshot, seen["consumer"]),
        "machine": _made(MachineSnapshot, seen["machine"]),
        "allocation": _made(Allocation, seen["allocation"]),
        "events": (),
    }
    return Window(_made(Snapshot, snapshot), _made(Budget, seen["budget"]), 0.0)


def _stage(seen: Mapping[str, Any]) -> StageSnapshot:
    crowds = tuple((int(crowd), int(items), float(wall)) for crowd, items, wall in seen["wall_seconds_by_crowd"])
    return _made(StageSnapshot, {**seen, "info": _made(StageInfo, seen["info"]), "wall_seconds_by_crowd": crowds})


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """An object of those of the values that it has fields for: what a later version adds is left out."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})
