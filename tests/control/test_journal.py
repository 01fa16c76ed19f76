import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import SourceError
from intune._values import Allocation, Budget, Event, Snapshot, StageInfo
from intune.control.journal import Decision, Journal, _changes, _merged, read_journal, to_plain
from intune.testing import ManualClock, blank_snapshot

STAGES = (StageInfo("read", "source"), StageInfo("a.b", "map"))
BUDGET = Budget(cpus=4, memory_bytes=1000)


def decision(number: int = 0, **changes: object) -> Decision:
    """A decision after a window with `number` steps; the rest is the same each time."""
    blank = blank_snapshot(STAGES)
    read = replace(blank.stages[0], items_out=number, wait_share={"input": 0.5})
    consumer = replace(blank.consumer, steps=number, rows=10 * number, wait_share=0.25)
    snapshot = replace(blank, window_seconds=2.0, consumer=consumer, stages=(read, blank.stages[1]), **changes)
    proposed = Allocation({"read": number + 1, "a.b": None}, 4, None, {"read": f"reason {number}"}, 80.0)
    return Decision(snapshot, BUDGET, proposed, (Event("clamped", "read", "why"),), replace(proposed, slots=2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(path: Path, clock: ManualClock) -> Iterator[Journal]:
    journal = Journal(path, clock=clock)
    yield journal
    journal.close()


def raw(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_what_was_seen_proposed_vetoed_applied_and_why(journal: Journal, path: Path) -> None:
    journal.record(decision(3))
    (line,) = raw(path)
    assert {key: line[key] for key in ("schema", "tick", "time", "full", "outcome")} == {
        "schema": 1,
        "tick": 0,
        "time": 0.0,
        "full": True,
        "outcome": None,
    }
    allocation = {"concurrency": {"read": 4, "a.b": None}, "in_flight_bytes": None, "expected_rows_per_second": 80.0}
    assert line["proposed"] == {**allocation, "slots": 4}
    assert line["applied"] == {**allocation, "slots": 2}
    assert line["judged"] is None
    assert line["vetoed"] == [{"kind": "clamped", "stage": "read", "detail": "why"}]
    assert line["reasons"] == {"read": "reason 3"}
    seen = line["seen"]
    assert list(seen["stages"]) == ["read", "a.b"]
    assert seen["stages"]["read"]["items_out"] == 3
    assert seen["stages"]["a.b"]["info"]["kind"] == "map"
    assert seen["budget"] == {"cpus": 4, "max_threads": 64, "max_processes": 64, "memory_bytes": 1000}
    assert set(seen) == {"budget", *(to_plain(decision().snapshot))}


def test_the_outcome_of_a_decision_stands_on_the_next_line(journal: Journal, path: Path) -> None:
    for number in (3, 8):
        journal.record(decision(number))
    journal.record(replace(decision(), snapshot=replace(decision().snapshot, window_seconds=0.0)))
    assert [line["outcome"] for line in raw(path)] == [
        None,
        {"window_seconds": 2.0, "steps_per_second": 4.0, "rows_per_second": 40.0, "wait_share": 0.25},
        {"window_seconds": 0.0, "steps_per_second": None, "rows_per_second": None, "wait_share": 0.25},
    ]


def test_time_is_that_of_the_clock_since_the_first_line(clock: ManualClock, journal: Journal) -> None:
    clock.advance(500.0)
    for seconds in (0.0, 1.5, 2.0):
        clock.advance(seconds)
        journal.record(decision())
    assert [(line["tick"], line["time"]) for line in journal.lines()] == [(0, 0.0), (1, 1.5), (2, 3.5)]


def test_only_what_changed_is_written(journal: Journal, path: Path) -> None:
    journal.record(decision(1))
    journal.record(decision(1))
    journal.record(decision(2, events=(Event("resize"),)))
    _, same, changed = raw(path)
    assert (same["full"], same["seen"]) == (False, {})
    assert changed["seen"] == {
        "stages": {"read": {"items_out": 2}},
        "consumer": {"steps": 2, "rows": 20},
        "events": [{"kind": "resize", "stage": None, "detail": ""}],
    }


def test_shares_by_cause_change_as_a_whole(journal: Journal, path: Path) -> None:
    journal.record(decision())
    snapshot = decision().snapshot
    other = replace(snapshot, stages=(replace(snapshot.stages[0], wait_share={"slot": 0.5}), snapshot.stages[1]))
    journal.record(replace(decision(), snapshot=other))
    assert raw(path)[1]["seen"] == {"stages": {"read": {"wait_share": {"slot": 0.5}}}}
    assert list(read_journal(path))[1]["seen"]["stages"]["read"]["wait_share"] == {"slot": 0.5}


def test_there_is_a_full_line_each_minute(clock: ManualClock, journal: Journal, path: Path) -> None:
    for number in range(130):
        journal.record(decision(number))
        clock.advance(1.0)
    assert [line["tick"] for line in raw(path) if line["full"]] == [0, 60, 120]


def test_a_stage_that_vanished_makes_a_full_line(journal: Journal, path: Path) -> None:
    journal.record(decision())
    journal.record(replace(decision(), snapshot=blank_snapshot(STAGES[:1])))
    assert raw(path)[1]["full"]
    assert list(list(read_journal(path))[1]["seen"]["stages"]) == ["read"]


def test_reading_puts_full_lines_together_again(clock: ManualClock, journal: Journal, path: Path) -> None:
    expected = []
    for number in range(200):
        made = decision(number // 3, in_flight_items=number % 2)
        journal.record(made)
        clock.advance(1.0)
        seen = to_plain(made.snapshot)
        expected.append({**seen, "stages": {s["info"]["name"]: s for s in seen["stages"]}, "budget": to_plain(BUDGET)})
    read = list(read_journal(path))
    assert [line["seen"] for line in read] == expected
    assert read == journal.lines()
    assert all(line["full"] for line in read)


def test_memory_keeps_the_last_lines_each_with_all_that_was_seen(clock: ManualClock) -> None:
    journal = Journal(clock=clock, keep=5)
    assert journal.lines() == []
    for number in range(12):
        journal.record(decision(number))
        clock.advance(1.0)
    lines = journal.lines()
    assert [line["tick"] for line in lines] == [7, 8, 9, 10, 11]
    assert [line["seen"]["stages"]["read"]["items_out"] for line in lines] == [7, 8, 9, 10, 11]
    assert all(line["seen"]["stages"]["a.b"]["info"]["name"] == "a.b" for line in lines)


def test_lines_given_out_do_not_reach_into_the_journal(clock: ManualClock) -> None:
    journal = Journal(clock=clock, keep=2)
    for number in range(4):
        journal.record(decision(number))
    journal.lines()[0]["seen"]["stages"]["a.b"]["info"]["name"] = "mine"
    journal.lines()[1]["seen"].clear()
    assert [line["seen"]["stages"]["a.b"]["info"]["name"] for line in journal.lines()] == ["a.b", "a.b"]


def test_each_line_is_in_the_file_at_once(journal: Journal, path: Path) -> None:
    for count in (1, 2):
        journal.record(decision())
        assert len(raw(path)) == count


def test_closing_twice_is_fine_and_memory_goes_on(journal: Journal, path: Path) -> None:
    journal.record(decision())
    journal.close()
    journal.close()
    journal.record(decision())
    assert (len(raw(path)), len(journal.lines())) == (1, 2)


def test_a_large_file_is_moved_away_and_the_new_one_starts_full(path: Path, clock: ManualClock) -> None:
    journal = Journal(path, clock=clock, rotate_bytes=9000)
    for number in range(60):
        journal.record(decision(number))
    journal.close()
    old = path.with_name("run.jsonl.1")
    assert max(path.stat().st_size, old.stat().st_size) <= 9000
    lines = [*read_journal(old), *read_journal(path)]
    ticks = [line["tick"] for line in lines]
    assert ticks == list(range(ticks[0], 60)), "an older one is written over, nothing else is lost"
    assert ticks[0] > 0
    assert lines == journal.lines()[ticks[0] :]


def test_a_line_longer_than_the_largest_file_is_written_all_the_same(path: Path, clock: ManualClock) -> None:
    journal = Journal(path, clock=clock, rotate_bytes=10)
    for number in range(3):
        journal.record(decision(number))
    journal.close()
    assert [line["tick"] for line in read_journal(path)] == [2]


def test_a_second_run_is_appended(path: Path) -> None:
    for _ in range(2):
        journal = Journal(path, clock=ManualClock())
        for number in range(2):
            journal.record(decision(number))
        journal.close()
    assert [(line["tick"], line["seen"]["consumer"]["steps"]) for line in read_journal(path)] == [
        (0, 0),
        (1, 1),
        (0, 0),
        (1, 1),
    ]


def test_a_line_cut_off_anywhere_is_left_out(journal: Journal, path: Path) -> None:
    for number in range(3):
        journal.record(decision(number))
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert [line["tick"] for line in read_journal(path)] == [0, 1]
    path.write_bytes(b"")
    assert list(read_journal(path)) == []


def test_a_run_after_one_that_was_cut_off_can_be_read(path: Path) -> None:
    first = Journal(path, clock=ManualClock())
    for number in range(3):
        first.record(decision(number))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    second = Journal(path, clock=ManualClock())
    second.record(decision(7))
    second.close()
    assert [line["seen"]["consumer"]["steps"] for line in read_journal(path)] == [0, 1, 7]


@pytest.mark.parametrize("damage", [b"{{{\n", b"17\n", b'{"schema": 1\n'])
def test_damage_in_the_middle_is_an_error(journal: Journal, path: Path, damage: bytes) -> None:
    for number in range(3):
        journal.record(decision(number))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[2])
    with pytest.raises(SourceError, match=r"run.jsonl, line 2: damaged"):
        list(read_journal(path))


def test_another_schema_is_an_error(path: Path) -> None:
    path.write_text('{"schema":2,"tick":0}\n')
    with pytest.raises(SourceError, match="line 1: schema 2, this version reads 1"):
        list(read_journal(path))


def test_a_path_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "none" / "run.jsonl", clock=clock)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_logged_once_and_memory_goes_on(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    journal = Journal(path, clock=clock)
    for number in range(3):
        journal.record(decision(number))
    journal.close()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1].errno == errno.ENOSPC
    assert [line["tick"] for line in journal.lines()] == [0, 1, 2]


def test_a_file_that_cannot_be_moved_away_is_logged_once_and_memory_goes_on(
    path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(path, clock=clock, rotate_bytes=2000)
    os.mkdir(f"{path}.1")
    for number in range(5):
        journal.record(decision(number))
    journal.close()
    assert len(caplog.records) == 1
    assert [line["tick"] for line in journal.lines()] == [0, 1, 2, 3, 4]
    assert [line["tick"] for line in read_journal(path)] == [0]


def test_plain_values_are_what_json_knows() -> None:
    event = Event("resize", None, "x")
    value = {
        1: (np.int64(3), np.float32(0.5), True, None, "text"),
        "nan": [math.nan, math.inf, np.float64("nan")],
        "event": event,
    }
    plain = to_plain(value)
    assert plain == {
        "1": [3, 0.5, True, None, "text"],
        "nan": [None, None, None],
        "event": {"kind": "resize", "stage": None, "detail": "x"},
    }
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    with pytest.raises(TypeError, match="cannot write <object"):
        to_plain({"a": object()})


def test_figures_that_are_no_numbers_are_null_in_the_file(journal: Journal, path: Path) -> None:
    snapshot: Snapshot = replace(decision().snapshot, window_seconds=math.nan)
    journal.record(replace(decision(), snapshot=snapshot))
    assert raw(path)[0]["seen"]["window_seconds"] is None


plain_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from("abc"), plain_values, max_size=3)


@given(old=objects, new=objects, depth=st.integers(0, 3))
def test_changes_merged_into_the_old_give_the_new(old: dict[str, object], new: dict[str, object], depth: int) -> None:
    changes = _changes(old, new, depth)
    if changes is None:
        assert vanished(old, new, depth)
    else:
        assert _merged(old, changes, depth) == new


def vanished(old: object, new: object, depth: int) -> bool:
    """Whether a key of an object that is compared field by field is no longer there."""
    if not isinstance(old, dict) or not isinstance(new, dict) or old == new:
        return False
    return bool(old.keys() - new.keys()) or bool(depth and any(vanished(old[k], new[k], depth - 1) for k in old))
