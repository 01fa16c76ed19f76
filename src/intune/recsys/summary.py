"""What came of a training run, as a value, as JSON and as lines to read."""

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from intune._errors import SourceError
from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune._words import count, gib
from intune.control import read_journal
from intune.control.explain import Kind, limit
from intune.control.shortage import Shortage, shortage, together
from intune.control.whole_run import SeenCrowds, went_on
from intune.pipeline.stats import Stats
from intune.recsys.whole import write_whole

COLUMNS = 80
_NAME = 12
"""Columns of the names of lines."""

_T = TypeVar("_T")

_LIMITS: dict[Kind, str] = {
    "trainer": "the trainer",
    "paused": "a pause of {}",
    "cpu": "CPU for {}",
    "lock": "the interpreter lock in {}",
    "turns": "what items of {} take turns for",
    "concurrency": "the concurrency of {}",
    "waits": "what {} waits for",
    "disk": "reading in {}",
    "memory": "memory",
    "order": "slow items of {}",
    "source": "nothing in particular",
    "unknown": "nothing in particular",
}
"""Kinds of limits in a few words, {} being the stage. A source that has nothing more to read limits nothing."""

NO_STAGE = "others"
"""Stands for a stage where the limit is none's: CPU that other programs use."""

TOLD_SHARE = 0.02
"""Share of the time from which it is told that memory held the loader back."""

CLEAR_SHARE = 0.6
"""Share of the time from which a limit stands alone; below it the next one is named too."""


@dataclass(frozen=True)
class Evaluation:
    """How a model did on the held-out rows.

    Attributes:
        rows: Held-out rows.
        rows_read: All rows that the files hold, counted by the reader in the same pass.
        auc: Area under the ROC curve; None where it is undefined (labels all the same, or no rows).
        log_loss: Mean log loss in nats; None for no rows.
    """

    rows: int
    rows_read: int
    auc: float | None
    log_loss: float | None


@dataclass(frozen=True)
class Measured:
    """What was measured while training went on; None = not known.

    Attributes:
        wait_share: Share of the time in which the training loop waited for the loader.
        busiest_stage: The stage that used most CPU.
        busiest_stage_cpu_share: Its share of the CPU seconds of all stages.
        memory_peak_bytes: What was used of the limit in that window of those seen that came nearest to it.
        memory_limit_bytes: That limit.
        memory_used_by: Whose use that was, in words: on a machine without other limits that of all programs.
        own_memory_peak_bytes: The most that this process alone held in a window, its worker processes left out.
    """

    wait_share: float | None = None
    busiest_stage: str | None = None
    busiest_stage_cpu_share: float | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_by: str | None = None
    own_memory_peak_bytes: int | None = None

    def in_words(self) -> str:
        """A sentence for a person, of what is known; empty where nothing is."""
        said = []
        if self.wait_share is not None:
            said.append(f"the trainer waited {self.wait_share:.0%} of the time")
        if self.busiest_stage is not None and self.busiest_stage_cpu_share is not None:
            said.append(f"{self.busiest_stage} used {self.busiest_stage_cpu_share:.0%} of the loader's CPU")
        if self.memory_peak_bytes is not None:
            of = "" if self.memory_limit_bytes is None else f"of {gib(self.memory_limit_bytes)} "
            own = self.own_memory_peak_bytes
            alone = "" if own is None else f", {_rounded_up(own)} GiB by this process"
            used_by = f" used by {self.memory_used_by}{alone}" if self.memory_used_by else ""
            said.append(f"memory never above {_rounded_up(self.memory_peak_bytes)} {of}GiB{used_by}")
        return "; ".join(said)


def _rounded_up(size_bytes: int) -> str:
    """In GiB: what was never passed must not be below what was measured."""
    return f"{math.ceil(size_bytes / 2**30 * 10) / 10:.1f}"


class MemoryPeak:
    """Of the windows that it was shown the one that came nearest to its limit: what was used in it, and that limit.

    Limits may change, and which of several is nearest too: the largest use may have been far from a limit that was
    larger. Windows without a limit count only where there is none with one; of these it is the largest use.
    """

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.peak_bytes: int | None = None
        self.limit_bytes: int | None = None
        self.used_by: str | None = None
        self.own_bytes: int | None = None

    def see(self, window: Snapshot | None) -> None:
        """Look at a window."""
        if window is not None:
            self._see(window.machine)

    def see_journal(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Look at the windows in lines of a journal, each with all of `seen`."""
        for line in lines:
            self._see(_made(MachineSnapshot, {**line["seen"]["machine"], "memory": ()}))

    def _see(self, machine: MachineSnapshot) -> None:
        used, limit, own = machine.memory_bytes, machine.memory_limit_bytes, machine.own_memory_bytes
        if own is not None:
            self.own_bytes = max(own, self.own_bytes or 0)
        if used is None:
            return
        before = (-1.0, -1) if self.peak_bytes is None else _nearness(self.peak_bytes, self.limit_bytes)
        if _nearness(used, limit) > before:
            self.peak_bytes, self.limit_bytes, self.used_by = used, limit, machine.memory_used_by or None


def _nearness(used: int, limit: int | None) -> tuple[float, int]:
    """The larger, the nearer to its limit; where there is none, below all that have one."""
    return (used / limit if limit else 0.0, used)


def limited_by(journal: Path) -> str:
    """What limited training, in one line: the trainer or a stage, and for what share of the time.

    Args:
        journal: The file that the loader wrote its journal to. All windows in it count, each by its length: those of
            a run that was stopped and resumed too, and those in `<journal>.1`, where the file was rotated.
    """
    try:
        older = Path(f"{journal}.1")
        return in_a_line([*(read_journal(older) if older.exists() else ()), *read_journal(journal)])
    except (OSError, SourceError) as error:
        return f"not known, as the journal cannot be read: {error}"


def in_a_line(lines: Iterable[Mapping[str, Any]]) -> str:
    """What limited the windows in lines of a journal, each with all of `seen`."""
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    missing: list[Shortage] = []
    crowds = SeenCrowds()
    for line in lines:
        window = crowds.add(_window(line["seen"]))
        if not went_on(window):
            continue
        found = limit(window)
        seconds[_LIMITS[found.kind]][found.stage or NO_STAGE] += window.window_seconds
        if (cost := shortage(window)) is not None:
            missing.append(cost)
    ranked = sorted(((sum(stages.values()), said) for said, stages in seconds.items()), reverse=True)
    total = sum(part for part, _ in ranked)
    if not total:
        return "not known: the run was over before anything was measured"
    named = ranked[: 1 if ranked[0][0] >= CLEAR_SHARE * total else 2]
    words = [
        f"{said.format(max(seconds[said], key=seconds[said].__getitem__))}, {part / total:.0%}" for part, said in named
    ]
    told = f"{'; '.join(words)} of the time"
    held = together(missing, total)
    return told if held.seconds < TOLD_SHARE * total else f"{told}; {held.in_words()}"


def _window(seen: Mapping[str, Any]) -> Snapshot:
    """The window that a line of a journal tells of; its events are left out, and all limits but the nearest."""
    stages = [_made(StageSnapshot, {**stage, "info": _made(StageInfo, stage["info"])}) for stage in _stages(seen)]
    parts = {
        "stages": tuple(stages),
        "consumer": _made(ConsumerSnapshot, seen["consumer"]),
        "machine": _made(MachineSnapshot, {**seen["machine"], "memory": ()}),
        "allocation": _made(Allocation, seen["allocation"]),
        "events": (),
    }
    return _made(Snapshot, {**seen, **parts})


def _stages(seen: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = seen["stages"]
    return found.values()


def _made(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A dataclass of the values that it has fields for."""
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})  # type: ignore[arg-type]


def measure(stats: Stats, seconds: float, memory: MemoryPeak) -> Measured:
    """What a loader's lifetime figures say of a run.

    Args:
        stats: Of the loader at the end of training.
        seconds: Wall seconds of training.
        memory: What was seen of the memory.
    """
    cpu_seconds = {name: stage.cpu_seconds for name, stage in stats.stages.items()}
    total = sum(cpu_seconds.values())
    busiest = max(cpu_seconds, key=cpu_seconds.__getitem__) if total > 0 else None
    return Measured(
        wait_share=min(1.0, stats.wait_seconds / seconds) if seconds > 0 else None,
        busiest_stage=busiest,
        busiest_stage_cpu_share=None if busiest is None else cpu_seconds[busiest] / total,
        memory_peak_bytes=memory.peak_bytes,
        memory_limit_bytes=memory.limit_bytes,
        memory_used_by=memory.used_by,
        own_memory_peak_bytes=memory.own_bytes,
    )


@dataclass(frozen=True)
class Summary:
    """A training run.

    Attributes:
        rows_by_epoch: Rows trained in each epoch begun.
        broken_off: Whether the time was up before the last of these epochs was known to be complete.
        seconds: Wall seconds of training, evaluation left out.
        wait_seconds: Seconds of these in which the training loop waited for the loader.
        loss_by_epoch: Mean log loss of each epoch's training rows, before each step.
        loss_first: Mean loss of the first steps (at most 10).
        loss_last: Mean loss of the last steps (at most 10).
        evaluation: Result on the held-out rows; None where none were asked for.
        limited_by: What limited the rate over the whole run, in one line, as the function of this name says it.
        notes: What else the reader should know.
        run_dir: Folder with config.json, journal.jsonl and summary.json.
        measured: What was measured on the way; summary.json has it in words too, as `in_words`.
    """

    rows_by_epoch: tuple[int, ...]
    broken_off: bool
    seconds: float
    wait_seconds: float
    loss_by_epoch: tuple[float, ...]
    loss_first: float
    loss_last: float
    evaluation: Evaluation | None
    limited_by: str
    notes: tuple[str, ...]
    run_dir: Path
    measured: Measured = field(default_factory=Measured)

    @property
    def rows_split_exactly(self) -> bool | None:
        """Whether each complete epoch and the held-out rows make up all rows; None if nothing can be compared."""
        complete = self.rows_by_epoch[:-1] if self.broken_off else self.rows_by_epoch
        if self.evaluation is None or not complete:
            return None
        return set(complete) == {self.evaluation.rows_read - self.evaluation.rows}

    def write(self) -> None:
        """Write summary.json into the run folder.

        Raises:
            IntuneError: If it cannot be written; an older one stays.
        """
        fields = asdict(self) | {
            "run_dir": str(self.run_dir),
            "rows_split_exactly": self.rows_split_exactly,
            "in_words": self.measured.in_words(),
        }
        write_whole(self.run_dir / "summary.json", json.dumps(fields, indent=2) + "\n")

    def lines(self) -> list[str]:
        """The summary for a terminal of 80 columns; only the path of the run folder may be longer."""
        rows, share = sum(self.rows_by_epoch), self.wait_seconds / self.seconds
        in_words = self.measured.in_words()
        lines = [
            f"{f'epoch {epoch}':<{_NAME}}{count(rows_in_it, 'row')}, mean loss {loss:.4f}"
            for epoch, (rows_in_it, loss) in enumerate(zip(self.rows_by_epoch, self.loss_by_epoch, strict=True))
        ]
        if self.broken_off:
            lines[-1] += " (broken off: the time was up)"
        if in_words:
            lines.insert(0, f"{'in short':<{_NAME}}{in_words}")
        lines += [
            f"trained     {count(rows, 'row')} in {self.seconds:.1f} s, {rows / self.seconds:,.0f} rows/s",
            f"loss        {self.loss_first:.4f} -> {self.loss_last:.4f} (means over the first and the last steps)",
            *self._evaluation_lines(),
            f"waited      {self.wait_seconds:.1f} s for the loader, {share:.0%} of the time",
            f"{'limited by':<{_NAME}}{self.limited_by}",
            *(f"{'note':<{_NAME}}{note}" for note in self.notes),
        ]
        return [*(part for line in lines for part in _wrapped(line)), f"{'run folder':<{_NAME}}{self.run_dir}"]

    def _evaluation_lines(self) -> list[str]:
        evaluation = self.evaluation
        if evaluation is None:
            return ["held out    no rows, as asked"]
        scores = [f"AUC {'undefined' if evaluation.auc is None else format(evaluation.auc, '.4f')}"]
        if evaluation.log_loss is not None:
            scores.append(f"log loss {evaluation.log_loss:.4f}")
        lines = [f"held out    {count(evaluation.rows, 'row')}: {', '.join(scores)}"]
        if self.rows_split_exactly is not None:
            training = self.rows_by_epoch[0]
            total = training + evaluation.rows
            split = f"{training:,} training + {evaluation.rows:,} held out = {total:,}"
            lines.append(f"rows        {split}, of {evaluation.rows_read:,} read")
        return lines


def _wrapped(line: str) -> list[str]:
    """Lines of at most 80 columns, but for a word that is longer; the rest stands below the first line's text."""
    name, text = line[:_NAME], line[_NAME:]
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=name,
        subsequent_indent=" " * _NAME,
        break_long_words=False,
        break_on_hyphens=False,
    )
