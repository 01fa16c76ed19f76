"""The lines that a training run ends with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot
from intune.pipeline.stats import StageTotals, Stats
from intune.recsys.summary import Evaluation, Measured, MemoryPeak, Summary, measure

GIB = 2**30


@pytest.fixture
def summary() -> Summary:
    return Summary(
        rows_by_epoch=(720, 300),
        broken_off=True,
        seconds=2.0,
        wait_seconds=0.5,
        loss_by_epoch=(0.7, 0.6),
        loss_first=0.7,
        loss_last=0.6,
        evaluation=Evaluation(80, 800, 0.75, 0.5),
        limited_by="The CPUs are the limit: " + "many words about it, " * 8 + "and an end.\nA second line.",
        notes=("a note " * 20 + "ends",),
        run_dir=Path("runs") / "a-folder-with-a-long-name" / ("x" * 90),
    )


def test_lines_fit_a_terminal_and_lose_no_word(summary: Summary) -> None:
    *lines, last = summary.lines()
    assert max(map(len, lines)) <= 80
    assert last == f"run folder  {summary.run_dir}"
    words = " ".join(" ".join(lines).split())
    assert " ".join(f"limited by {summary.limited_by}".split()) in words
    assert f"note {summary.notes[0]}" in words
    assert "rows        720 training + 80 held out = 800, of 800 read" in lines
    assert "trained     1,020 rows in 2.0 s, 510 rows/s" in lines


def test_what_does_not_fit_goes_on_below_the_text(summary: Summary) -> None:
    lines = summary.lines()
    first = next(number for number, line in enumerate(lines) if line.startswith("limited by  The CPUs"))
    assert lines[first + 1].startswith(" " * 12)
    assert lines[first + 1][12] != " "
    assert " " * 12 + "A second line." in lines


def stats(wait_seconds: float = 0.3, **cpu_seconds: float) -> Stats:
    stages = {name: StageTotals(5, 50, 2 * seconds, seconds, 0) for name, seconds in cpu_seconds.items()}
    return Stats(10.0, 5, 50, wait_seconds, stages, (), None)


def window(used: int | None, limit: int | None) -> Snapshot:
    machine = MachineSnapshot(2, memory_bytes=used, memory_limit_bytes=limit)
    return Snapshot(1.0, True, (), ConsumerSnapshot(1, 1, 1.0, 0.0), machine, Allocation({}, 2))


def line(used: int | None, limit: int | None) -> dict[str, object]:
    return {"seen": {"machine": {"memory_bytes": used, "memory_limit_bytes": limit}}}


def test_a_run_in_a_sentence(summary: Summary, tmp_path: Path) -> None:
    memory = MemoryPeak()
    memory.see(window(GIB, 6 * GIB))
    memory.see_journal([line(int(2.04 * GIB), 6 * GIB), line(None, None)])
    memory.see(None)
    measured = measure(stats(read=3.0, criteo_transform=6.1, batch=0.9), 10.0, memory)
    said = (
        "the trainer waited 3% of the time; criteo_transform used 61% of the loader's CPU; memory never above 2.1 of "
        "6.0 GiB"
    )
    assert measured.in_words() == said
    whole = replace(summary, measured=measured, run_dir=tmp_path)
    assert whole.lines()[:2] == [
        "in short    the trainer waited 3% of the time; criteo_transform used 61% of the",
        "            loader's CPU; memory never above 2.1 of 6.0 GiB",
    ]
    assert whole.lines()[2:-1] == summary.lines()[:-1]
    whole.write()
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["in_words"] == said
    assert written["measured"] == {
        "wait_share": 0.03,
        "busiest_stage": "criteo_transform",
        "busiest_stage_cpu_share": 0.61,
        "memory_peak_bytes": int(2.04 * GIB),
        "memory_limit_bytes": 6 * GIB,
    }


def test_of_what_is_unknown_nothing_is_said(summary: Summary) -> None:
    assert measure(stats(read=0.0, batch=0.0), 0.0, MemoryPeak()) == Measured()
    assert Measured().in_words() == ""
    assert not any(text.startswith("in short") for text in summary.lines())
    memory = MemoryPeak()
    memory.see_journal([line(GIB // 2, None), line(GIB // 4, None)])
    assert measure(stats(wait_seconds=0.0), 4.0, memory).in_words() == (
        "the trainer waited 0% of the time; memory never above 0.5 GiB"
    )


def test_a_limit_alone_is_no_peak() -> None:
    memory = MemoryPeak()
    memory.see(window(None, 6 * GIB))
    assert "memory" not in measure(stats(), 4.0, memory).in_words()
