import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from intune._errors import AllocationError
from intune._values import Allocation, Budget, Event, Snapshot, StageInfo
from intune.control import Controller, Guard, Journal
from intune.control.controller import intervals
from intune.testing import ManualClock, ScriptedWorkload, blank_snapshot
from intune.tuners import RandomMoves, Shared

STAGES = (
    StageInfo("read", "source"),
    StageInfo("work", "map", "process"),
    StageInfo("batch", "batch", max_concurrency=2),
)
OPEN = {"read": None, "work": None, "batch": None}


class Told:
    """Proposes what a list says, the last entry again and again, and keeps what it was shown."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.shown: list[Snapshot] = []
        self.budgets: list[Budget] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        self.shown.append(snapshot)
        self.budgets.append(budget)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


class Bench:
    """A controller with everything around it."""

    def __init__(
        self,
        tuner: object,
        *,
        budget: Budget | None = None,
        script: Callable[[Allocation], Snapshot] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.budget = budget or Budget(cpus=8, max_processes=8)
        self.workload = ScriptedWorkload(STAGES, script)
        self.clock = ManualClock()
        self.journal = Journal(clock=self.clock)
        self.controller = Controller(
            self.workload,
            tuner,  # type: ignore[arg-type]
            budget=lambda: self.budget,
            guard=guard or Guard(),
            journal=self.journal,
            clock=self.clock,
        )

    def step(self) -> dict[str, int | None]:
        return dict(self.controller.step().concurrency)


def fixed(read: int | None, work: int | None, batch: int | None = 1, slots: int = 8) -> Allocation:
    return Allocation({"read": read, "work": work, "batch": batch}, slots)


def kinds(snapshot: Snapshot) -> list[tuple[str, str | None]]:
    return [(event.kind, event.stage) for event in snapshot.events]


def test_a_step_applies_journals_and_returns_what_the_tuner_wants() -> None:
    wanted = replace(fixed(2, 3), reasons={"work": "is slow"}, in_flight_bytes=1000)
    bench = Bench(Told(wanted))
    assert bench.controller.step() == wanted
    assert bench.workload.applied == [wanted]
    (line,) = bench.journal.lines()
    assert line["proposed"] == line["applied"]
    assert line["applied"]["concurrency"] == {"read": 2, "work": 3, "batch": 1}
    assert (line["reasons"], line["vetoed"]) == ({"work": "is slow"}, [])


def test_the_tuner_sees_the_snapshot_and_the_budget_of_that_moment() -> None:
    script = lambda allocation: replace(blank_snapshot(STAGES), in_flight_items=7, events=(Event("epoch_end"),))  # noqa: E731
    tuner = Told(fixed(2, 3))
    bench = Bench(tuner, script=script)
    bench.step()
    bench.budget = Budget(cpus=4)
    bench.step()
    assert [budget.cpus for budget in tuner.budgets] == [8, 4]
    assert tuner.shown[1].in_flight_items == 7
    assert tuner.shown[1].allocation.concurrency == {"read": 2, "work": 3, "batch": 1}
    assert kinds(tuner.shown[0]) == [("epoch_end", None)]


def test_what_became_of_a_proposal_stands_in_the_next_snapshot_only() -> None:
    tuner = Told(fixed(2, 3, batch=9), fixed(2, 3))
    bench = Bench(tuner)
    bench.step()
    bench.step()
    bench.step()
    assert kinds(tuner.shown[0]) == []
    assert kinds(tuner.shown[1]) == [("clamped", "batch")]
    assert "from 9 to 2" in tuner.shown[1].events[0].detail
    assert kinds(tuner.shown[2]) == []
    assert bench.journal.lines()[0]["vetoed"][0]["stage"] == "batch"


def test_a_decrease_of_the_budget_is_obeyed_in_the_same_step_whatever_the_tuner_says() -> None:
    tuner = Told(fixed(2, 8, slots=16))
    bench = Bench(tuner, budget=Budget(cpus=16, max_processes=8))
    assert bench.controller.step().slots == 16
    bench.budget = Budget(cpus=8, max_processes=3)
    allocation = bench.controller.step()
    assert (allocation.slots, allocation.concurrency["work"]) == (8, 3)
    assert bench.workload.applied[-1] == allocation
    (event,) = [event for event in tuner.shown[1].events if event.kind == "budget"]
    assert event.detail == "cpus 16 -> 8, max_processes 8 -> 3"
    bench.budget = Budget(cpus=16, max_processes=8)
    assert bench.controller.step().slots == 16


def test_the_guard_may_veto_and_the_least_bytes_hold() -> None:
    class Half(Guard):
        def check(self, proposal: Allocation, snapshot: Snapshot, budget: Budget) -> tuple[Allocation, list[Event]]:
            assert proposal.concurrency["work"] is not None
            lower = {**proposal.concurrency, "work": proposal.concurrency["work"] // 2}
            return replace(proposal, concurrency=lower), [Event("vetoed", "work", "halved")]

    tuner = Told(fixed(1, 8))
    bench = Bench(tuner, guard=Half())
    assert bench.step()["work"] == 4
    bench.step()
    assert kinds(tuner.shown[1]) == [("vetoed", "work")]


@pytest.mark.parametrize(
    "fault",
    [
        ZeroDivisionError("by zero"),
        None,
        Allocation({"read": 1, "work": 1}, 1),
        Allocation({**OPEN, "wrok": 1}, 1),
        Allocation({**OPEN, "read": -1}, 1),
        Allocation({**OPEN, "read": 0}, 1),
        Allocation(OPEN, 0),
        Allocation({**OPEN, "read": float("nan")}, 1),
    ],
    ids=repr,
)
def test_a_tuner_at_fault_is_logged_once_and_its_last_good_allocation_stays(
    fault: object, caplog: pytest.LogCaptureFixture
) -> None:
    tuner = Told(fixed(2, 3), fault, fixed(7, 7))
    bench = Bench(tuner)
    decisions = [bench.step() for _ in range(4)]
    assert decisions == [{"read": 2, "work": 3, "batch": 1}] * 4
    assert len(tuner.shown) == 2, "a tuner that failed is not asked again"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.levelno == logging.ERROR
    assert "last good allocation" in record.getMessage()
    assert [[event["kind"] for event in line["vetoed"]] for line in bench.journal.lines()] == [
        [],
        ["tuner_failed"],
        [],
        [],
    ]
    assert [event["kind"] for event in bench.journal.lines()[2]["seen"]["events"]] == ["tuner_failed"]


def test_a_tuner_that_fails_at_once_is_replaced_by_everything_open(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Told(RuntimeError("no model")))
    assert bench.controller.step() == Allocation(OPEN, slots=8)
    assert "every stage open" in caplog.text
    assert "RuntimeError: no model" in bench.journal.lines()[0]["vetoed"][0]["detail"]
    bench.budget = Budget(cpus=2)
    assert bench.controller.step().slots == 2


def test_the_last_good_proposal_is_held_to_the_budget_and_comes_back_with_it() -> None:
    bench = Bench(Told(fixed(8, 8), ValueError()))
    bench.step()
    bench.budget = Budget(cpus=2, max_processes=2)
    assert bench.step()["work"] == 2
    bench.budget = Budget(cpus=8, max_processes=8)
    assert bench.step()["work"] == 8


def test_a_tuner_cannot_change_what_it_proposed() -> None:
    mine = dict(OPEN)
    bench = Bench(Told(Allocation(mine, 4), RuntimeError()))
    bench.step()
    mine["read"] = -5
    assert bench.step() == OPEN


def test_a_pause_survives_the_tuner_and_ends_with_resume() -> None:
    tuner = Told(fixed(2, 3))
    bench = Bench(tuner)
    bench.step()
    bench.controller.pause("work")
    bench.controller.pause("work")
    assert [bench.step()["work"], bench.step()["work"]] == [0, 0]
    assert bench.workload.applied[-1].reasons["work"] == "paused by the user"
    bench.controller.resume("work")
    assert bench.step()["work"] == 3
    bench.controller.resume("work")
    bench.step()
    assert [kinds(shown) for shown in tuner.shown] == [[], [("pause", "work")], [], [("pause", "work")], []]
    assert [shown.events[0].detail for shown in tuner.shown if shown.events] == [
        "paused by the user",
        "resumed by the user",
    ]


def test_a_pause_survives_a_tuner_that_fails() -> None:
    bench = Bench(Told(fixed(2, 3), RuntimeError()))
    bench.step()
    bench.controller.pause("read")
    assert bench.step() == {"read": 0, "work": 3, "batch": 1}
    bench.controller.resume("read")
    assert bench.step() == {"read": 2, "work": 3, "batch": 1}


def test_a_tuner_that_repeats_what_it_sees_neither_fails_nor_prolongs_a_pause() -> None:
    class Echo:
        asked = 0

        def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
            self.asked += 1
            if self.asked == 1:
                return fixed(2, 3)
            return replace(snapshot.allocation, reasons={})

    echo = Echo()
    bench = Bench(echo)
    bench.step()
    bench.controller.pause("work")
    assert [bench.step()["work"] for _ in range(3)] == [0, 0, 0]
    bench.controller.resume("work")
    assert [bench.step()["work"] for _ in range(2)] == [3, 3]
    assert echo.asked == 6


def test_pausing_an_unknown_stage_is_an_error() -> None:
    bench = Bench(Shared())
    for method in (bench.controller.pause, bench.controller.resume):
        with pytest.raises(AllocationError, match=r"'wrok'.*\['read', 'work', 'batch'\]"):
            method("wrok")


def test_what_a_workload_raises_comes_out_of_a_step() -> None:
    def broken(allocation: Allocation) -> Snapshot:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Bench(Shared(), script=broken).step()


def test_random_moves_are_all_applied() -> None:
    bench = Bench(RandomMoves(5), budget=Budget(cpus=6, max_threads=12, max_processes=3, memory_bytes=2**30))
    for cpus in [6, 6, 6, 2, 6] * 20:
        bench.budget = replace(bench.budget, cpus=cpus)
        bench.step()
    assert all(allocation.slots <= 6 for allocation in bench.workload.applied)
    assert len({str(allocation) for allocation in bench.workload.applied}) > 50
    assert not any(event["kind"] == "tuner_failed" for line in bench.journal.lines() for event in line["vetoed"])


def test_start_steps_at_once_then_once_an_interval_until_stop() -> None:
    bench = Bench(Shared())
    bench.controller.start()
    assert len(bench.workload.applied) == 1
    for steps in (2, 3):
        bench.clock.wait_for_sleepers()
        assert len(bench.workload.applied) == steps - 1
        bench.clock.advance(1.0)
        bench.clock.wait_for_sleepers()
        assert len(bench.workload.applied) == steps
    bench.clock.advance(0.5)
    bench.controller.stop()
    assert len(bench.workload.applied) == 3


def test_start_and_stop_may_be_repeated() -> None:
    bench = Bench(Shared())
    bench.controller.stop()
    bench.controller.start()
    bench.controller.start()
    assert len([thread for thread in threading.enumerate() if thread.name == "intune-controller"]) == 1
    assert len(bench.workload.applied) == 1
    bench.controller.stop()
    bench.controller.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "intune-controller"]
    bench.controller.start()
    bench.clock.wait_for_sleepers()
    bench.clock.advance(1.0)
    bench.clock.wait_for_sleepers()
    assert len(bench.workload.applied) == 3
    bench.controller.stop()


@pytest.mark.parametrize("bad_call", [1, 3])
def test_a_workload_that_fails_is_logged_once_and_stops_tuning_only(
    bad_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def script(allocation: Allocation) -> Snapshot:
        nonlocal calls
        calls += 1
        if calls >= bad_call:
            raise OSError("no figures")
        return blank_snapshot(STAGES, allocation)

    bench = Bench(Shared(), script=script)
    bench.controller.start()
    loops = [thread for thread in threading.enumerate() if thread.name == "intune-controller"]
    for _ in range(bad_call - 1):
        bench.clock.wait_for_sleepers()
        bench.clock.advance(1.0)
    for thread in loops:
        thread.join(10)
        assert not thread.is_alive()
    bench.controller.stop()
    assert calls == bad_call
    assert len(bench.workload.applied) == bad_call - 1
    (record,) = caplog.records
    assert "no figures" in str(record.exc_info)
    assert "training goes on" in record.getMessage()


def test_stop_from_inside_a_step_does_not_wait_for_itself() -> None:
    bench: Bench

    class Stops:
        def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
            if threading.current_thread().name == "intune-controller":
                bench.controller.stop()
                done.set()
            return Allocation(OPEN, 1)

    done = threading.Event()
    bench = Bench(Stops())
    bench.controller.start()
    bench.clock.wait_for_sleepers()
    bench.clock.advance(1.0)
    assert done.wait(10)


def test_a_tuner_that_does_not_return_is_left_alone_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("intune._periodic.JOIN_SECONDS", 0.01)
    entered, leave = threading.Event(), threading.Event()

    class Stuck:
        def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
            if threading.current_thread().name == "intune-controller":
                entered.set()
                leave.wait(10)
            return Allocation(OPEN, 1)

        def __repr__(self) -> str:
            return "Stuck()"

    bench = Bench(Stuck())
    bench.controller.start()
    bench.clock.wait_for_sleepers()
    bench.clock.advance(1.0)
    assert entered.wait(10)
    bench.controller.stop()
    leave.set()
    assert "Stuck() did not return" in caplog.text


def test_the_first_steps_come_sooner() -> None:
    assert list(itertools.islice(intervals(2.0), 6)) == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
