"""The lines that a training run ends with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import intune
from intune._values import (
    Allocation,
    Budget,
    ConsumerSnapshot,
    Event,
    MachineSnapshot,
    Snapshot,
    StageInfo,
    StageSnapshot,
)
from intune.control import Decision, Journal
from intune.control.explain import limit
from intune.pipeline.stats import StageTotals, Stats
from intune.recsys.summary import COLUMNS, Evaluation, Measured, MemoryPeak, Summary, in_a_line, limited_by, measure
from intune.testing import ManualClock

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
        limited_by="the interpreter lock in criteo_transform, 81% of the time",
        notes=("a note " * 20 + "ends",),
        run_dir=Path("runs") / "a-folder-with-a-long-name" / ("x" * 90),
    )


def test_lines_fit_a_terminal_and_lose_no_word(summary: Summary) -> None:
    *lines, last = summary.lines()
    assert max(map(len, lines)) <= 80
    assert last == f"run folder  {summary.run_dir}"
    words = " ".join(" ".join(lines).split())
    assert "limited by  the interpreter lock in criteo_transform, 81% of the time" in lines
    assert f"note {summary.notes[0]}" in words
    assert "rows        720 training + 80 held out = 800, of 800 read" in lines
    assert "trained     1,020 rows in 2.0 s, 510 rows/s" in lines


def test_what_does_not_fit_goes_on_below_the_text(summary: Summary) -> None:
    lines = summary.lines()
    first = next(number for number, line in enumerate(lines) if line.startswith("note        a note"))
    assert lines[first + 1].startswith(" " * 12)
    assert lines[first + 1][12] != " "


def stats(wait_seconds: float = 0.3, **cpu_seconds: float) -> Stats:
    stages = {name: StageTotals(5, 50, 2 * seconds, seconds, 0) for name, seconds in cpu_seconds.items()}
    return Stats(10.0, 5, 50, wait_seconds, stages, (), None)


def window(used: int | None, limit: int | None) -> Snapshot:
    machine = MachineSnapshot(2, memory_bytes=used, memory_limit_bytes=limit)
    return Snapshot(1.0, True, (), ConsumerSnapshot(1, 1, 1.0, 0.0), machine, Allocation({}, 2))


def line(used: int | None, limit: int | None, **more: object) -> dict[str, object]:
    return {"seen": {"machine": {"cpus": 2, "memory_bytes": used, "memory_limit_bytes": limit, **more}}}


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
        "memory_used_by": None,
        "own_memory_peak_bytes": None,
    }


def test_whose_memory_it_is_is_told_and_what_this_process_held() -> None:
    memory = MemoryPeak()
    by_all: dict[str, object] = {"memory_used_by": "all programs on this machine"}
    memory.see_journal(
        [line(5 * GIB, 24 * GIB, **by_all, own_memory_bytes=GIB), line(4 * GIB, 24 * GIB, own_memory_bytes=2 * GIB)]
    )
    measured = measure(stats(wait_seconds=0.0), 4.0, memory)
    assert (measured.memory_used_by, measured.own_memory_peak_bytes) == ("all programs on this machine", 2 * GIB)
    assert measured.in_words().endswith(
        "memory never above 5.0 of 24.0 GiB used by all programs on this machine, 2.0 GiB by this process"
    )


def test_of_what_is_unknown_nothing_is_said(summary: Summary) -> None:
    assert measure(stats(read=0.0, batch=0.0), 0.0, MemoryPeak()) == Measured()
    assert Measured().in_words() == ""
    assert not any(text.startswith("in short") for text in summary.lines())
    memory = MemoryPeak()
    memory.see_journal([line(GIB // 2, None), line(GIB // 4, None)])
    assert measure(stats(wait_seconds=0.0), 4.0, memory).in_words() == (
        "the trainer waited 0% of the time; memory never above 0.5 GiB"
    )


@pytest.mark.parametrize(
    "seen",
    [
        [(5, 6), (9, 24), (3, 4)],  # the limit was lowered, and the largest use had the largest limit
        [(9, 24), (5, 6), (4, 6), (5, None)],
        [(20, None), (5, 6), (None, 1), (20, None)],
        [(5, 6), (5, 6), (0, 24)],
    ],
)
def test_memory_is_told_as_it_came_nearest_to_its_limit(seen: list[tuple[int | None, int | None]]) -> None:
    def sized(count: int | None) -> int | None:
        return None if count is None else count * GIB

    for order in (seen, seen[::-1]):
        shown, read = MemoryPeak(), MemoryPeak()
        for used, most in order:
            shown.see(window(sized(used), sized(most)))
        read.see_journal([line(sized(used), sized(most)) for used, most in order])
        assert (shown.peak_bytes, shown.limit_bytes) == (read.peak_bytes, read.limit_bytes) == (5 * GIB, 6 * GIB)
        assert "memory never above 5.0 of 6.0 GiB" in measure(stats(), 4.0, shown).in_words()


def test_a_limit_alone_is_no_peak() -> None:
    memory = MemoryPeak()
    memory.see(window(None, 6 * GIB))
    assert "memory" not in measure(stats(), 4.0, memory).in_words()


# --- what limited the whole run


def seen(seconds: float, *, wait: float, busy: float = 0.0, **stage: object) -> Snapshot:
    """A window of a source and a transform on two CPUs."""
    read = StageSnapshot(StageInfo("read_parquet", "source"), None, 0, wait_share={"input": 0.2, "slot": 0.8})
    work = StageSnapshot(
        StageInfo("criteo_transform", "map"),
        None,
        wall_seconds_mean=0.01,
        wall_seconds_p99=0.01,
        cpu_seconds_mean=0.01,
        busy_seconds=busy * seconds,
        **{"running": 1, "items_in": 9, "items_out": 9, "wait_share": {"input": 0.6}, **stage},
    )
    return Snapshot(
        seconds,
        True,
        (read, work),
        ConsumerSnapshot(5, 500, 0.1, wait, ready=1),
        MachineSnapshot(2, cpu_seconds_used=0.4 * seconds),
        Allocation({"read_parquet": None, "criteo_transform": None}, 2),
        events=(Event("epoch_start", None, "epoch 0"),),
    )


TRAINER, CPU, NOTHING = seen(1.0, wait=0.01), seen(1.0, wait=0.9, busy=1.9), seen(1.0, wait=0.9, busy=0.5)

OVER = replace(
    seen(1.0, wait=0.0, running=0, items_in=0, items_out=0, wait_share={}),
    consumer=ConsumerSnapshot(0, 0, None, 0.0),
)


def journal(folder: Path, *windows: Snapshot, rotate_bytes: int = 2**20) -> Path:
    """The file that a run with these windows leaves."""
    path = folder / "journal.jsonl"
    kept = Journal(path, clock=ManualClock(), rotate_bytes=rotate_bytes)
    for each in windows:
        kept.record(Decision(each, Budget(2), each.allocation, (), each.allocation))
    kept.close()
    return path


def test_the_windows_of_this_test_are_limited_as_it_says() -> None:
    assert [limit(each).kind for each in (TRAINER, CPU, NOTHING)] == ["trainer", "cpu", "unknown"]


@pytest.mark.parametrize(
    ("windows", "line"),
    [
        ([CPU] * 9 + [TRAINER], "CPU for criteo_transform, 90% of the time"),
        ([TRAINER] * 9 + [CPU], "the trainer, 90% of the time"),
        ([TRAINER] * 4 + [CPU] * 5 + [NOTHING], "CPU for criteo_transform, 50%; the trainer, 40% of the time"),
        ([NOTHING] * 3, "nothing in particular, 100% of the time"),
        ([TRAINER, seen(9.0, wait=0.9, busy=1.9)], "CPU for criteo_transform, 90% of the time"),
        ([OVER, TRAINER, OVER], "the trainer, 100% of the time"),
        ([OVER], "not known: the run was over before anything was measured"),
        ([seen(0.0, wait=1.0)], "not known: the run was over before anything was measured"),
        ([], "not known: the run was over before anything was measured"),
    ],
)
def test_what_limited_a_run_is_a_line_over_all_its_windows_and_not_the_last(
    windows: list[Snapshot], line: str, tmp_path: Path
) -> None:
    assert limited_by(journal(tmp_path, *windows)) == line


def test_a_run_that_was_resumed_and_a_file_that_was_rotated_count_whole(tmp_path: Path) -> None:
    journal(tmp_path, *[TRAINER] * 3)
    assert limited_by(journal(tmp_path, CPU)) == "the trainer, 75% of the time"
    rotated = tmp_path / "rotated"
    rotated.mkdir()
    path = journal(rotated, *[TRAINER] * 2, *[CPU] * 8, rotate_bytes=5_000)
    assert Path(f"{path}.1").exists()
    assert limited_by(path) == "CPU for criteo_transform, 80% of the time"


def test_a_journal_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert limited_by(tmp_path / "none").startswith("not known, as the journal cannot be read: ")
    path = journal(tmp_path, TRAINER, TRAINER)
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert "line 1: schema None" in limited_by(path)


def test_cpu_that_other_programs_use_is_named_so() -> None:
    machine = MachineSnapshot(2, cpu_seconds_used=0.4, cpu_seconds_all=1.9)
    lines = [{"seen": each} for each in read_back(replace(NOTHING, machine=machine))]
    assert in_a_line(lines) == "CPU for others, 100% of the time"


def read_back(*windows: Snapshot) -> list[dict[str, object]]:
    kept = Journal(clock=ManualClock())
    for each in windows:
        kept.record(Decision(each, Budget(2), each.allocation, (), each.allocation))
    return [line["seen"] for line in kept.lines()]


def test_what_limited_a_run_fits_a_line_of_a_terminal(summary: Summary) -> None:
    line = in_a_line({"seen": each} for each in read_back(*[TRAINER] * 4, *[CPU] * 5, NOTHING))
    lines = replace(summary, limited_by=line).lines()
    assert f"limited by  {line}" in lines
    assert len(f"limited by  {line}") <= COLUMNS


def test_what_limited_a_real_loader_is_told_from_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with intune.from_iterable(range(10**8)).batch(4).loader(cpus=1, journal=path) as loader:
        for _ in loader:
            now = loader.stats().window
            if now is not None and now.consumer.steps and len(loader.journal) > 3:
                break
    assert limited_by(path) == in_a_line(loader.journal)
    assert limited_by(path).endswith("% of the time")
