"""Tuners over scenarios: figures of a run, files that are gone on with, and the summary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from intune._errors import PipelineError, SourceError
from intune.sim import Scenario, SimMachine, SimStage
from intune.sim.evaluate import Plan, evaluate, measure, read_rows
from intune.sim.oracle import Best, Effort
from intune.sim.play import Interval, Trace, play
from intune.sim.summary import estimate, markdown, summarise
from intune.tuners import Shared

EFFORT = Effort(starts=0, descents=0, runs=3, short_steps=10, long_steps=20)
PLAN = Plan(("clean", "quota"), 2, ("shared", "even"), decisions=12, effort=EFFORT)
DRAWN = Scenario("x", (SimStage("read", "source", cpu_seconds=1.0),), SimMachine(memory_bytes=1e9))


def trace(rows: Sequence[int], died: str | None = None, asked: Sequence[int | None] = ()) -> Trace:
    def interval(at: int) -> Interval:
        return Interval(at + 1.0, rows[at], rows[at], 2.0, at, 1e8, {"read": asked[at] if asked else None}, 4)

    return Trace(tuple(map(interval, range(len(rows)))), 8e8, died, ())


def bests(*rates: tuple[float, float]) -> list[Best]:
    return [Best(seconds, {}, None, rate, rate, 1) for seconds, rate in rates]


class TestFigures:
    def test_shares_are_of_the_oracle_at_that_time(self) -> None:
        found = measure(DRAWN, trace([50] * 10 + [80] * 20), bests((0.0, 100.0), (10.0, 160.0)), 30)
        assert found["rates"] == {"0-5": 50, "5-10": 50, "10-20": 80}
        assert (found["share_5"], found["share_10"], found["share_20"]) == (0.5, 0.5, 0.5)
        assert found["regret"] == pytest.approx(0.5)
        assert found["peak_share"] == pytest.approx(0.8)
        assert (found["cpu_seconds"], found["processes"], found["seconds"]) == (60, 29, 30)

    def test_rates_of_a_real_run_are_those_of_its_trace(self) -> None:
        """The first decisions come sooner, so that not all intervals are as long."""
        drawn = Scenario("one", (SimStage("read", "source", cpu_seconds=0.01, rows=10),), SimMachine(cpus=2))
        run = play(drawn, Shared(), 20)
        found = measure(drawn, run, bests((0.0, 2000.0)), 20)
        assert found["rates"]["10-20"] == pytest.approx(run.rows_per_second(10, 20))
        assert found["share_10"] == pytest.approx(1.0, abs=0.02)
        assert found["regret"] == pytest.approx(0.0, abs=0.02)

    def test_nothing_counts_after_a_death(self) -> None:
        found = measure(DRAWN, trace([100] * 6, died="out of memory"), bests((0.0, 100.0)), 12)
        assert found["regret"] == pytest.approx(0.5)
        assert found["share_5"] == pytest.approx(0.2)
        assert found["died"] == "out of memory"
        assert found["seconds"] == 6

    def test_a_run_that_died_at_once_has_figures(self) -> None:
        found = measure(DRAWN, trace([], died="out of memory"), bests((0.0, 100.0)), 12)
        assert (found["regret"], found["late_changes"], found["processes"]) == (1.0, None, 0)

    def test_changes_after_convergence(self) -> None:
        asked = [*range(20), *[3, 4, 4, 4, 5, 5, 5, 5, 5, 5]]
        found = measure(DRAWN, trace([1] * 30, asked=asked), bests((0.0, 1.0)), 30)
        assert found["late_changes"] == pytest.approx(0.3)


@pytest.mark.slow
class TestFiles:
    def test_a_file_is_gone_on_with(self, tmp_path: Path) -> None:
        out, told = tmp_path / "new" / "rows.jsonl", list[tuple[int, int]]()
        rows = evaluate(PLAN, out, done=lambda n, of: told.append((n, of)))
        assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert rows == read_rows(out)
        assert [(row["family"], row["seed"], row["tuner"]) for row in rows] == [
            (family, seed, tuner) for family in PLAN.families for seed in (0, 1) for tuner in PLAN.tuners
        ]
        assert all(row["died"] is None and row["share_5"] > 0 for row in rows)
        lines = out.read_text().splitlines(keepends=True)
        out.write_text("".join([*lines[:3], *lines[4:7], lines[7][:50]]))  # one is missing, the last one is torn
        played = mock.Mock(wraps=__import__("intune.sim.play").sim.play)
        with mock.patch("intune.sim.evaluate.play", played):
            assert evaluate(PLAN, out) == rows
        assert played.call_count == 2
        assert sorted(map(json.dumps, read_rows(out))) == sorted(map(json.dumps, rows))

    def test_a_tuner_that_fails_is_told_of_in_the_row(self, tmp_path: Path) -> None:
        plan = Plan(("clean",), 1, ("even",), decisions=8, effort=EFFORT)
        with mock.patch("intune.tuners.Even.propose", side_effect=KeyError("x")):
            (failed,) = evaluate(plan, tmp_path / "a.jsonl")
        assert failed["tuner_failed"] == "KeyError: 'x'; replaced by every stage open"
        assert evaluate(plan, tmp_path / "b.jsonl")[0]["tuner_failed"] is None

    def test_processes_give_the_same(self, tmp_path: Path) -> None:
        plan = Plan(("clean",), 2, ("even",), decisions=8, effort=EFFORT)
        assert evaluate(plan, tmp_path / "a.jsonl", jobs=2) == evaluate(plan, tmp_path / "b.jsonl")

    def test_what_does_not_exist_is_told_before_anything_is_run(self, tmp_path: Path) -> None:
        out = tmp_path / "rows.jsonl"
        with pytest.raises(PipelineError, match="no family 'celan'"):
            evaluate(Plan(("celan",), 1, ("even",)), out)
        with pytest.raises(PipelineError, match="unknown tuner 'evne'"):
            evaluate(Plan(("clean",), 1, ("evne",)), out)
        assert not out.exists()

    def test_a_line_that_is_no_json_is_named(self, tmp_path: Path) -> None:
        out = tmp_path / "rows.jsonl"
        out.write_text("{}\nnonsense\n{}\n")
        with pytest.raises(SourceError, match=r"rows.jsonl, line 2: no JSON: 'nonsense'"):
            read_rows(out)


def row(tuner: str, share: float, **more: Any) -> dict[str, Any]:
    figures = {"share_5": share, "share_10": share, "share_20": share, "regret": 1 - share, "died": None}
    return {"family": "clean", "tuner": tuner, **figures, "late_changes": None, **more}


def test_the_summary() -> None:
    shares = [0.5, 0.9, 1.0, 0.6, 1.0]
    rows = [row("even", share) for share in shares] + [row("shared", 0.8, died="so", late_changes=0.5)] * 3
    even, shared = summarise(rows)
    assert (even.family, even.tuner, even.scenarios, even.died, even.late_changes) == ("clean", "even", 5, 0, None)
    assert (even.mean.value, even.median.value) == (pytest.approx(0.8), 0.9)
    assert even.p10.value == pytest.approx(np.percentile(shares, 10))
    assert even.mean.low < 0.8 < even.mean.high
    assert even.regret.value == pytest.approx(0.2)
    assert (shared.died, shared.late_changes) == (3, 0.5)
    assert (shared.mean.low, shared.mean.high) == (pytest.approx(0.8), pytest.approx(0.8))
    assert markdown([shared]).splitlines() == [
        "| family | tuner | scenarios | died | failed "
        "| mean share | median share | p10 share | regret | late changes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| clean | shared | 3 | 3 | 0 | 0.800 [0.800, 0.800] | 0.800 [0.800, 0.800] | 0.800 [0.800, 0.800] "
        "| 0.200 [0.200, 0.200] | 50% |",
    ]


def test_runs_in_which_the_tuner_failed_are_counted_and_nothing_else() -> None:
    failures = [row("even", 0.1, tuner_failed="KeyError: 'x'", died="so", late_changes=1.0)] * 2
    (some,) = summarise([row("even", 0.9, tuner_failed=None), *failures])
    assert (some.scenarios, some.died, some.failed, some.late_changes) == (1, 0, 2, None)
    assert (some.mean.value, some.regret.value) == (pytest.approx(0.9), pytest.approx(0.1))
    assert markdown(summarise(failures)).splitlines()[-1] == "| clean | even | 0 | 0 | 2 | - | - | - | - | - |"


def test_a_scenario_in_which_the_oracle_gets_nothing_is_left_out() -> None:
    assert summarise([row("even", 0.5, regret=None)]) == []


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    found = [estimate(random.normal(1.0, 0.2, 40), np.mean) for _ in range(200)]
    assert 0.88 <= np.mean([each.low <= 1.0 <= each.high for each in found]) <= 1.0
