"""The lines that a training run ends with."""

from pathlib import Path

import pytest

from intune.recsys.summary import Evaluation, Summary


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
