"""What is said of a change: only where enough steps can be compared, and the right number where they can."""

from dataclasses import replace

import pytest

from intune._values import Allocation, Budget, Event, Snapshot, StageInfo
from intune.control import Controller, Guard, Journal
from intune.control.outcome import LEAST_STEPS, Judge, Outcome
from intune.testing import ManualClock, ScriptedWorkload, blank_snapshot

STAGES = (StageInfo("read", "source"), StageInfo("work", "map"), StageInfo("more", "map", "process"))
FEW = Allocation({"read": None, "work": 3, "more": 2}, 8)
MORE = replace(FEW, concurrency={**FEW.concurrency, "work": 5}, reasons={"work": "it is the limit"})


def window(steps: int, *, wait: float = 0.99, seconds: float = 1.0, events: tuple[Event, ...] = ()) -> Snapshot:
    """A window with so many steps of 10 rows."""
    blank = blank_snapshot(STAGES)
    consumer = replace(blank.consumer, steps=steps, rows=10 * steps, wait_share=wait)
    return replace(blank, window_seconds=seconds, consumer=consumer, events=events)


def moving(snapshot: Snapshot) -> Snapshot:
    """The same with a process of `more` being started."""
    *others, last = snapshot.stages
    return replace(snapshot, stages=(*others, replace(last, processes_live=2, processes_starting=1)))


def after(judge: Judge, *windows: Snapshot, applied: Allocation) -> list[Outcome]:
    """Let it see windows in which the same was in force."""
    found = []
    for each in windows:
        found.append(judge.window(each))
        judge.decided(each, applied)
    return [each for each in found if each is not None]


def judged(*before: Snapshot, expected: float | None = None, change: Allocation = MORE) -> Judge:
    """One that saw these windows under few, and then the change."""
    judge = Judge()
    judge.decided(window(0), FEW)
    assert after(judge, *before[:-1], applied=FEW) == []
    assert after(judge, *before[-1:], applied=replace(change, expected_rows_per_second=expected)) == []
    return judge


def test_what_was_expected_and_what_came_are_shares_of_the_rate_before() -> None:
    judge = judged(window(100), expected=1180.0)
    (found,) = after(judge, window(115), applied=MORE)
    assert found.change.expected == pytest.approx(0.18)
    assert found.got == pytest.approx(0.15)
    assert (found.steps, found.seconds, found.decisions_ago) == (115, 1.0, 1)
    assert found.change.numbers() == "work 3 -> 5"
    assert found.in_words() == "estimated +18 %, got +15 % (115 steps in 1.0 s)"
    assert judge.last == found
    assert after(judge, window(400), applied=MORE) == [], "it is said once"
    assert judge.last == replace(found, decisions_ago=2)


def test_it_is_judged_once_there_are_enough_steps_over_as_many_windows_as_that_takes() -> None:
    judge = judged(window(20), window(20), window(20), expected=200.0)
    found = after(judge, *(window(8, seconds=0.5) for _ in range(6)), applied=MORE)
    assert [each.decisions_ago for each in found] == [4]
    assert (found[0].steps, found[0].seconds) == (32, 2.0)
    assert found[0].got == pytest.approx(16 / 20 - 1)


def test_only_the_last_windows_before_count() -> None:
    judge = judged(window(1000), window(LEAST_STEPS), expected=None)
    (found,) = after(judge, window(2 * LEAST_STEPS), applied=MORE)
    assert (found.change.expected, found.got) == (None, pytest.approx(1.0))
    assert found.in_words() == "got +100 % (60 steps in 1.0 s)"


@pytest.mark.parametrize("before", [[window(LEAST_STEPS - 1)], [window(0), window(3)], []])
def test_with_few_steps_before_nothing_is_said(before: list[Snapshot]) -> None:
    judge = judged(*before, window(0), expected=500.0)
    assert after(judge, window(500), window(500), applied=MORE) == []
    assert judge.last is not None
    assert (judge.last.change.expected, judge.last.got) == (None, None)
    assert judge.last.in_words() == ""


def test_with_few_steps_after_it_says_what_it_has() -> None:
    judge = judged(window(100), expected=1180.0)
    assert after(judge, window(10), applied=MORE) == []
    assert judge.last is not None
    assert (
        judge.last.in_words() == "estimated +18 %, what it brought is not known (10 steps since that can be compared)"
    )


@pytest.mark.parametrize("kind", ["epoch_start", "epoch_end", "braked", "worker_died"])
def test_windows_that_say_nothing_of_an_allocation_are_left_out(kind: str) -> None:
    judge = judged(window(100))
    (found,) = after(judge, window(3, events=(Event(kind),)), window(110), applied=MORE)
    assert (found.got, found.decisions_ago) == (pytest.approx(0.1), 2)


@pytest.mark.parametrize("kind", ["budget", "pause", "executor", "waits", "tuner_failed"])
def test_after_what_changes_everything_nothing_is_said(kind: str) -> None:
    judge = judged(window(100))
    assert after(judge, window(100, events=(Event(kind),)), window(100), applied=MORE) == []
    assert after(judged(window(100), window(100, events=(Event(kind),))), applied=MORE) == []


def test_a_change_before_there_are_enough_steps_begins_anew() -> None:
    judge = judged(window(100))
    assert after(judge, window(10), applied=FEW) == []
    assert after(judge, window(100), applied=FEW) == [], "it is not known what 10 steps were a sample of"
    assert judge.last is not None
    assert judge.last.change.numbers() == "work 5 -> 3"


@pytest.mark.parametrize(
    ("steps", "wait", "told"),
    [(120, 0.88, True), (60, 0.9, True), (300, 0.97, True), (40, 0.0, False), (50, 0.5, False)],
)
def test_where_the_training_loop_itself_changed_nothing_is_said(steps: int, wait: float, told: bool) -> None:
    judge = judged(window(100, wait=0.9))  # 1 ms a step of its own, of 10 ms
    found = after(judge, window(steps, wait=wait), window(100, wait=0.9), applied=MORE)
    assert [each.steps for each in found] == ([steps] if told else [])


def test_windows_in_which_processes_come_up_are_left_out_and_the_one_after() -> None:
    grown = replace(FEW, concurrency={**FEW.concurrency, "more": 3})
    judge = judged(window(100), change=grown)
    found = after(judge, moving(window(20)), moving(window(40)), window(80), window(150), applied=grown)
    assert [(each.got, each.decisions_ago) for each in found] == [(pytest.approx(0.5), 4)]


def test_slots_alone_are_a_change_too() -> None:
    judge = judged(window(100), change=replace(FEW, slots=4))
    (found,) = after(judge, window(50), applied=replace(FEW, slots=4))
    assert found.change.numbers() == "slots 8 -> 4"
    assert found.events() == [Event("outcome", None, "slots 8 -> 4: got -50 % (50 steps in 1.0 s)")]


def test_its_event_has_what_was_seen_and_why() -> None:
    full = window(100)
    read, work, more = full.stages
    work = replace(
        work, waiting_items=12, busy_seconds=2.9, in_hand_mean=3.0, wall_seconds_mean=0.1, cpu_seconds_mean=0.097
    )
    judge = judged(replace(full, stages=(read, work, more)), expected=1180.0)
    (found,) = after(judge, window(115), applied=MORE)
    (event,) = found.events()
    assert (event.kind, event.stage) == ("outcome", "work")
    assert event.detail == (
        "concurrency 3 -> 5; it is the limit; 12 items waited before it, busy on 2.9 at CPU share 0.97; "
        "estimated +18 %, got +15 % (115 steps in 1.0 s)"
    )


class Doubles:
    """Proposes 2, from the third decision on 4, and expects half as much again of that."""

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        self.shown.append(snapshot)
        number = 2 if len(self.shown) < 3 else 4
        return Allocation({"read": None, "work": number, "more": 1}, 8, None, {"work": "so"}, 1500.0)


@pytest.mark.parametrize("budget", [Budget(8), Budget(8, max_threads=3)])
def test_a_controller_journals_it_and_tells_the_tuner_and_a_person(budget: Budget) -> None:
    steps = iter([0, 100, 100, 140, 140])

    def script(allocation: Allocation) -> Snapshot:
        return replace(window(next(steps)), allocation=allocation)

    tuner, clock, told = Doubles(), ManualClock(), list[Event]()
    journal = Journal(clock=clock)
    controller = Controller(
        ScriptedWorkload(STAGES, script),
        tuner,
        budget=lambda: budget,
        guard=Guard(),
        journal=journal,
        clock=clock,
        tell=told.append,
    )
    assert controller.outcome is None
    for _ in range(5):
        controller.step()
    lines = journal.lines()
    limited = budget.max_threads < 4
    work = 3 if limited else 4
    assert [line["judged"] is None for line in lines] == [True, True, True, False, True]
    assert lines[3]["judged"] == {
        "tick": 2,
        "concurrency": {"work": [2, work]},
        "slots": [lines[1]["applied"]["slots"], lines[2]["applied"]["slots"]],
        "expected": None if limited else pytest.approx(0.5),
        "got": pytest.approx(0.4),
        "steps": 140,
        "seconds": 1.0,
    }
    assert [line["proposed"]["expected_rows_per_second"] for line in lines] == [1500.0] * 5
    assert lines[2]["applied"]["expected_rows_per_second"] == (None if limited else 1500.0), "it was not granted all"
    assert [event for event in tuner.shown[3].events if event.kind == "outcome"] == told
    assert told[0].stage == "work"
    assert controller.outcome is not None
    assert controller.outcome.got == pytest.approx(0.4)
