"""Slots and threads: what may run at once, in which order, and what changes of the limits do while it runs."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import intune
from intune import Allocation, AllocationError, Loader, Pipeline
from intune._compose import build_loader
from intune.pipeline.options import LoaderOptions
from intune.pipeline.scheduler import Bell, Scheduler
from intune.testing import ManualClock, TokenPool, assert_exactly_once, check_workload, emulated

from .resting import at_rest

pytestmark = pytest.mark.timeout(180)


def wait_for(what: Callable[[], bool]) -> None:
    """Ask again and again; a test that waits for ever is ended by its time-out."""
    while not what():
        time.sleep(0.001)


FIRST = 10
"""The items before are quick: from them it is found out whether the source waits, which is measured alone."""


class Held:
    """A stage function whose items stay inside until they are let go, from item `first` on."""

    def __init__(self, first: int = FIRST) -> None:
        self.first, self.most = first, 0
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._free = 0
        self._open = False

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        number = int(batch[0])
        if number < self.first:
            return batch
        with self._changed:
            self._inside.add(number)
            self.most = max(self.most, len(self._inside))
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._open or (self._free > 0 and number == min(self._inside)), 50):
                raise TimeoutError(number)
            self._free -= 1
            self._inside.discard(number)
            self._changed.notify_all()
        return batch

    @property
    def inside(self) -> int:
        with self._changed:
            return len(self._inside)

    def let_go(self, items: int = 1) -> None:
        """Let so many items out, the first ones in order, and wait until they are."""
        with self._changed:
            before = len(self._inside)
            self._free = items
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._free <= 0, 50)
            assert before >= items
            self.most = 0

    def open(self) -> None:
        """Let everything out from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class Consumed:
    """The loader's batches, taken by a thread of their own.

    That no stage waits is decided beforehand, unless `open_trials`: to be measured alone a stage would wait for items
    that are held inside.
    """

    def __init__(self, loader: Loader, open_trials: bool = False) -> None:
        self.rows: list[int] = []
        for stage in loader._engine.live:
            if stage.trial is not None and not open_trials:
                stage.decide(False)
        loader._engine.refresh()
        self._thread = threading.Thread(target=self._take, args=(loader,))
        self._thread.start()

    def _take(self, loader: Loader) -> None:
        for batch in loader:
            self.rows += batch.tolist()

    def join(self) -> list[int]:
        self._thread.join()
        return self.rows


def batches(n: int) -> Pipeline:
    return intune.from_dataset(range(n)).batch(1)


def apply(loader: Loader, slots: int | None = None, **concurrency: int | None) -> None:
    loader._control._controller.stop()  # type: ignore[attr-defined] # else it might put back what it saw before
    now = loader._engine.allocation
    loader._engine.apply(replace(now, slots=slots or now.slots, concurrency={**now.concurrency, **concurrency}))


def pause(loader: Loader, *stages: str) -> None:
    """As a user does: whatever the tuner says, until `resume`."""
    controller = loader._control._controller  # type: ignore[attr-defined]
    for stage in stages:
        controller.pause(stage)
    controller.step()


def resume(loader: Loader, *stages: str) -> None:
    controller = loader._control._controller  # type: ignore[attr-defined]
    for stage in stages:
        controller.resume(stage)
    controller.step()


class TestSlots:
    def test_never_more_at_once_and_all_of_them(self) -> None:
        held = Held()
        with batches(40).map(held, name="held", waits=False).loader(cpus=4, tuner=Keep()) as loader:
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 4)
            wait_for(lambda: at_rest(loader, 4))
            assert loader._engine.scheduler.used == 4
            held.open()
            assert consumed.join() == list(range(40))
            assert loader._engine.scheduler.peak_used == 4
            assert loader._engine.scheduler.used == 0

    def test_lowered_and_raised_while_they_run(self) -> None:
        held = Held()
        with batches(60).map(held, name="held", waits=False).loader(cpus=4, tuner=Keep()) as loader:
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 4)
            apply(loader, slots=2)
            for left in (3, 2):
                held.let_go()
                wait_for(lambda left=left: held.inside == left and at_rest(loader, left))  # type: ignore[misc]
            for _ in range(5):  # two at once from now on: one goes, one comes
                held.let_go()
                wait_for(lambda: held.inside == 2 and at_rest(loader, 2))
                assert held.most <= 2
            apply(loader, slots=1)
            held.let_go(2)
            wait_for(lambda: held.inside == 1 and at_rest(loader, 1))
            apply(loader, slots=4)
            wait_for(lambda: held.inside == 4 and at_rest(loader, 4))
            held.open()
            assert consumed.join() == list(range(60))
            assert loader._engine.scheduler.peak_used == 4

    def test_more_than_there_were_at_the_start(self) -> None:
        held = Held()
        with batches(30).map(held, name="held", waits=False).loader(cpus=1, tuner=Keep()) as loader:
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 1 and at_rest(loader, 1))
            apply(loader, slots=3)
            wait_for(lambda: held.inside == 3 and at_rest(loader, 3))
            held.open()
            assert consumed.join() == list(range(30))

    def test_one_slot_takes_each_item_to_its_end_before_the_next(self) -> None:
        """The deepest stage first: with one slot an item goes all the way."""
        log: list[tuple[str, int]] = []

        def note(name: str) -> Callable[[np.ndarray], np.ndarray]:
            return lambda batch: log.append((name, int(batch[0]))) or batch

        pipe = batches(30).map(note("first"), name="first", waits=False).map(note("second"), name="second", waits=False)
        with pipe.loader(cpus=1) as loader:
            assert len(list(loader)) == 30
        assert log == [(name, i) for i in range(30) for name in ("first", "second")]

    @pytest.mark.parametrize("ordered", [True, False])
    def test_stages_that_wait_hold_none(self, ordered: bool) -> None:
        held = Held()
        pipe = batches(40).map(held, name="held", waits=True).map(lambda batch: batch, waits=False)
        with pipe.loader(cpus=1, max_ahead=12, ordered=ordered, tuner=Keep()) as loader:
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 12)
            wait_for(lambda: at_rest(loader, 12))
            assert loader._engine.scheduler.used == 0
            held.open()
            assert_exactly_once(consumed.join(), 40)
            assert loader._engine.scheduler.peak_used == 1


class Keep:
    """A tuner that leaves everything as it is, so that a test decides."""

    def propose(self, snapshot: Any, budget: Any) -> Allocation:
        allocation: Allocation = snapshot.allocation
        return replace(allocation, in_flight_bytes=None, slots=min(allocation.slots, budget.cpus))


class TestConcurrency:
    @pytest.mark.parametrize("waits", [True, False])
    def test_raised_and_lowered_while_they_run(self, waits: bool) -> None:
        held = Held()
        with batches(80).map(held, name="held", waits=waits).loader(cpus=6, max_ahead=8, tuner=Keep()) as loader:
            apply(loader, held=1)
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 1 and at_rest(loader, 1))
            apply(loader, held=5)
            wait_for(lambda: held.inside == 5 and at_rest(loader, 5))
            apply(loader, held=2)
            held.let_go(3)
            wait_for(lambda: held.inside == 2 and at_rest(loader, 2))
            for _ in range(4):
                held.let_go()
                wait_for(lambda: held.inside == 2 and at_rest(loader, 2))
                assert held.most <= 2
            apply(loader, held=None)
            wait_for(lambda: held.inside == (8 if waits else 6))
            held.open()
            assert consumed.join() == list(range(80))

    def test_a_stages_own_limit_holds_whatever_is_allowed(self) -> None:
        held = Held()
        pipe = batches(30).map(held, name="held", waits=True, max_concurrency=2)
        with pipe.loader(cpus=4, tuner=Keep()) as loader:
            apply(loader, held=50)
            consumed = Consumed(loader)
            wait_for(lambda: held.inside == 2 and at_rest(loader, 2))
            held.open()
            assert consumed.join() == list(range(30))

    @pytest.mark.parametrize("stage", ["from_dataset", "batch", "first", "second"])
    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_a_paused_stage_begins_nothing_and_others_go_on(self, stage: str, executor: Any) -> None:
        def same(batch: Any) -> Any:
            return batch

        pipe = batches(50).map(same, name="first", executor=executor, max_concurrency=1).map(same, name="second")
        with pipe.loader(cpus=2, max_ahead=6, tuner=Keep()) as loader:
            assert len(list(loader)) == 50
            done = loader.stats().stages
            pause(loader, stage)
            consumed = Consumed(loader)
            wait_for(lambda: loader._engine.consumer._inside_since is not None and at_rest(loader, 0))
            now = loader.stats().stages
            assert now[stage].items == done[stage].items
            if stage in ("batch", "first"):
                assert now["from_dataset"].items > done["from_dataset"].items
            if stage == "second":
                assert now["first"].items > done["first"].items
            assert consumed.rows == []
            resume(loader, stage)
            assert consumed.join() == list(range(50))

    def test_everything_paused_and_resumed(self) -> None:
        with batches(50).loader(cpus=2, tuner=Keep()) as loader:
            pause(loader, "from_dataset", "batch")
            consumed = Consumed(loader)
            wait_for(lambda: loader._engine.consumer._inside_since is not None and at_rest(loader, 0))
            assert loader.stats().batches == 0
            resume(loader, "from_dataset", "batch")
            assert consumed.join() == list(range(50))

    def test_only_stages_that_exist_can_be_paused(self) -> None:
        with batches(5).loader(cpus=2) as loader, pytest.raises(AllocationError, match="nothing"):
            pause(loader, "nothing")

    def test_processes_follow(self) -> None:
        pipe = batches(30).map(lambda batch: batch, name="work", executor="process")
        with pipe.loader(cpus=3, tuner=Keep()) as loader:
            pool: Any = loader._engine.live[2].pool
            wait_for(lambda: pool.live == 3)
            apply(loader, work=1)
            wait_for(lambda: (pool.live, pool.leaving) == (1, 0))
            assert [int(batch[0]) for batch in loader] == list(range(30))
            apply(loader, work=2)
            wait_for(lambda: pool.live == 2)
            assert loader._engine.live[2].cap == 2
            pause(loader, "work")
            wait_for(lambda: (pool.live, pool.leaving) == (0, 0))
            resume(loader, "work")
            assert [int(batch[0]) for batch in loader] == list(range(30))


class TestAllocations:
    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_the_loader_is_a_workload(self, executor: Any) -> None:
        pipe = batches(30).map(lambda batch: batch, executor=executor, max_concurrency=2)
        with pipe.loader(cpus=2) as loader:
            check_workload(loader._engine)
            assert len(list(loader)) == 30
            loader._control.stop()
            check_workload(loader._engine)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"concurrency": {"from_dataset": 1}}, "missing.*batch"),
            ({"concurrency": {"from_dataset": 1, "batch": 1, "more": 1}}, "unknown.*more"),
            ({"concurrency": {"from_dataset": -1, "batch": 1}}, "from_dataset.*-1"),
            ({"concurrency": {"from_dataset": 1.5, "batch": 1}}, "from_dataset.*1.5"),
            ({"concurrency": {"from_dataset": True, "batch": 1}}, "from_dataset.*True"),
            ({"slots": 0}, "slots.*0"),
            ({"slots": 1.5}, "slots.*1.5"),
            ({"in_flight_bytes": -1}, "in_flight_bytes.*-1"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, change: dict[str, Any], says: str) -> None:
        with batches(10).loader(cpus=2) as loader:
            before = loader._engine.allocation
            with pytest.raises(AllocationError, match=says):
                loader._engine.apply(replace(before, **change))
            assert loader._engine.allocation == before
            assert len(list(loader)) == 10


class TestDoesItWait:
    """Found out by measurement: a stage that sleeps waits and needs no slot, one that computes does not."""

    def decided(self, work: Callable[[Any], Any], clock: Any, waits: bool | None = None) -> tuple[bool | None, Loader]:
        pipe = intune.from_iterable(range(30)).batch(1).map(work, name="work", waits=waits)
        loader = build(pipe, clock=clock)
        with loader:
            assert [int(batch[0]) for batch in loader] == list(range(30))
            info = next(stage for stage in loader._engine.stages if stage.name == "work")
        return info.waits, loader

    @pytest.mark.parametrize(
        ("wall", "cpu", "waits"),
        [
            (0.5, 0.0, True),
            (0.5, 0.1, True),
            (0.05, 0.0, True),
            (0.5, 0.5, False),
            (0.5, 0.2, False),
            (0.05, 0.04, False),
        ],
    )
    def test_by_the_share_of_time_without_cpu(self, wall: float, cpu: float, waits: bool) -> None:
        clock = ManualClock()

        def work(batch: Any) -> Any:
            clock.advance(wall, cpu_seconds=cpu)
            return batch

        found, _ = self.decided(work, clock)
        assert found is waits

    @pytest.mark.parametrize("said", [True, False])
    def test_what_the_user_says_is_not_measured(self, said: bool) -> None:
        clock = ManualClock()

        def work(batch: Any) -> Any:
            clock.advance(0.5, cpu_seconds=0.5 if said else 0.0)
            return batch

        found, _ = self.decided(work, clock, waits=said)
        assert found is said

    def test_emulated_work_counts_as_computing(self) -> None:
        tokens = TokenPool(2)
        found, _ = self.decided(emulated(0.002, tokens), tokens.clock)
        assert found is False

    def test_real_sleep_is_found_out_and_told(self) -> None:
        def work(batch: Any) -> Any:
            time.sleep(0.3 if batch[0] < 2 else 0)  # so long that what disturbs it is little of it
            return batch

        pipe = intune.from_iterable(range(30)).batch(1).map(work, name="work")
        with pipe.loader(cpus=1) as loader:
            list(loader)
            assert next(stage for stage in loader._engine.stages if stage.name == "work").waits is True
            loader._control._controller.step()  # type: ignore[attr-defined]
            events = [event for line in loader.journal for event in line["seen"].get("events", [])]
        assert [event["stage"] for event in events if event["kind"] == "waits"] == ["work"]

    def test_it_is_decided_once(self) -> None:
        clock = ManualClock()
        change = threading.Event()

        def work(batch: Any) -> Any:
            clock.advance(0.5, cpu_seconds=0.5 if change.is_set() else 0.0)
            return batch

        pipe = intune.from_iterable(range(20)).batch(1).map(work, name="work")
        with build(pipe, clock=clock) as loader:
            for _ in range(2):
                list(loader)
                assert next(stage for stage in loader._engine.stages if stage.name == "work").waits is True
                change.set()

    def test_an_item_is_measured_alone(self) -> None:
        """Once a stage is suspected of waiting, nothing else runs beside an item of it until that is decided."""
        lock = threading.Lock()
        now = 0
        beside: list[int] = []

        def work(batch: Any) -> Any:
            nonlocal now
            with lock:
                now += 1
                if batch[0] < 2:  # the second one decides, as it takes no time of the loader's clock
                    beside.append(now)
            time.sleep(0.01 if batch[0] < 2 else 0)
            with lock:
                now -= 1
            return batch

        pipe = batches(40).map(work, name="first").map(work, name="second")
        with build(pipe, clock=ManualClock(), cpus=8) as loader:
            suspect_all(loader)
            list(loader)
        assert beside == [1] * 4

    def test_a_stage_that_computes_is_never_measured_alone(self) -> None:
        """Two of its first items are inside at once: nothing waits for a measurement."""
        both = threading.Barrier(2, timeout=30)

        def work(batch: Any) -> Any:
            if 1 <= batch[0] <= 2:
                both.wait()
            return batch

        with batches(20).map(work, name="work").loader(cpus=2) as loader:
            assert len(list(loader)) == 20

    @pytest.mark.parametrize("stage", ["the one measured", "another"])
    def test_an_item_that_takes_long_does_not_stop_the_rest(self, stage: str) -> None:
        """The source is to be measured alone, but an item is in hand that takes long."""
        clock = ManualClock()
        held = Held(first=0)
        pipe = batches(20).map(held, name="held", waits=None if stage == "the one measured" else True)
        with build(pipe, clock=clock) as loader:
            suspect_all(loader)
            consumed = Consumed(loader, open_trials=True)
            wait_for(lambda: held.inside == 1 and at_rest(loader, 1))
            clock.advance(2.0)
            loader._control._controller.step()  # type: ignore[attr-defined]
            wait_for(lambda: held.inside > 1)
            held.open()
            assert consumed.join() == list(range(20))


def suspect_all(loader: Loader) -> None:
    """As if an item of each stage had looked as if it waited."""
    for stage in loader._engine.live:
        if stage.trial is not None:
            stage.trial.suspected = True


def build(pipe: Pipeline, clock: Any, cpus: int = 2) -> Loader:
    """A loader with an injected clock, on which no thread ever waits for a CPU."""
    loader = build_loader(pipe, LoaderOptions(tuner=Keep(), cpus=cpus), clock=clock)
    loader._engine.context.run_queue = lambda: 0.0
    return loader


class Job:
    """A task that notes what happens to it."""

    def __init__(self, work: Callable[[], None], holds_slot: bool = True) -> None:
        self.holds_slot = holds_slot
        self.work, self.booked = work, False

    def run(self) -> None:
        self.work()

    def done(self) -> None:
        self.booked = True


class TestSchedulerAlone:
    def scheduler(self, jobs: list[Job], slots: int = 2, threads: int = 4) -> Scheduler:
        scheduler = Scheduler("test", slots, threads)
        scheduler.pick = lambda slot_free: jobs.pop(0) if jobs and (slot_free or not jobs[0].holds_slot) else None
        return scheduler

    def test_runs_and_books_everything(self) -> None:
        jobs = [Job(lambda: None) for _ in range(200)]
        waiting = list(jobs)
        scheduler = self.scheduler(waiting)
        with scheduler.lock:
            scheduler.dispatch()
        wait_for(lambda: all(job.booked for job in jobs))
        assert scheduler.close(10) == []
        assert scheduler.used == 0
        assert 1 <= scheduler.peak_used <= 2

    def test_no_more_threads_than_allowed(self) -> None:
        gate = threading.Event()
        jobs = [Job(lambda: gate.wait(50) and None, holds_slot=False) for _ in range(20)]
        scheduler = self.scheduler(list(jobs), threads=3)
        with scheduler.lock:
            scheduler.dispatch()
        assert scheduler.threads == 3
        gate.set()
        wait_for(lambda: all(job.booked for job in jobs))
        assert scheduler.close(10) == []
        assert scheduler.threads == 0

    def test_a_nudge_is_enough(self) -> None:
        jobs: list[Job] = []
        scheduler = self.scheduler(jobs)
        for sure in (True, False, False):
            job = Job(lambda: None)
            jobs.append(job)
            with scheduler.lock:
                scheduler.nudge(sure)
            wait_for(lambda job=job: job.booked)  # type: ignore[misc]
        assert scheduler.close(10) == []

    def test_without_a_free_slot_a_nudge_wakes_nobody_unless_there_may_be_work_without_one(self) -> None:
        gate, inside = threading.Event(), threading.Event()
        jobs = [Job(lambda: inside.set() or (gate.wait(50) and None))]
        scheduler = self.scheduler(jobs, slots=1)
        with scheduler.lock:
            scheduler.dispatch()
        inside.wait(30)
        waits = Job(lambda: None, holds_slot=False)
        jobs.append(waits)
        with scheduler.lock:
            scheduler.nudge()
            assert scheduler.threads == 1
            scheduler.slotless = True
            scheduler.nudge()
            assert scheduler.threads == 2
        wait_for(lambda: waits.booked)
        gate.set()
        assert scheduler.close(10) == []

    def test_an_interrupt_while_a_thread_is_being_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(thread: threading.Thread) -> None:
            raise KeyboardInterrupt

        job = Job(lambda: None)
        scheduler = self.scheduler([job])
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt), scheduler.lock:
                scheduler.nudge()
        with scheduler.lock:
            scheduler.nudge()
        wait_for(lambda: job.booked)
        assert scheduler.close(10) == []

    def test_after_close_nothing_begins(self) -> None:
        jobs = [Job(lambda: None)]
        scheduler = self.scheduler(jobs)
        scheduler.close(1)
        with scheduler.lock:
            scheduler.dispatch()
            scheduler.nudge(sure=True)
        assert len(jobs) == 1
        assert scheduler.threads == 0

    def test_who_does_not_return_is_named(self) -> None:
        gate, inside = threading.Event(), threading.Event()
        scheduler = self.scheduler([Job(lambda: inside.set() or (gate.wait(50) and None))])
        with scheduler.lock:
            scheduler.dispatch()
        inside.wait(30)
        assert scheduler.close(0.0) == ["test-1"]
        gate.set()
        wait_for(lambda: scheduler.threads == 0)

    def test_knows_its_threads(self) -> None:
        found: list[bool] = []
        jobs = [Job(lambda: found.append(scheduler.owns(threading.current_thread())))]
        scheduler = self.scheduler(jobs)
        with scheduler.lock:
            scheduler.dispatch()
        wait_for(lambda: bool(found))
        assert found == [True]
        assert not scheduler.owns(threading.current_thread())
        scheduler.close(10)


class TestBell:
    def test_a_ring_before_the_wait_is_not_lost_and_rings_do_not_add_up(self) -> None:
        bell = Bell()
        bell.notify_all()
        bell.notify_all()
        bell.wait()
        came = threading.Event()
        waiter = threading.Thread(target=lambda: (bell.wait(), came.set()))
        waiter.start()
        assert not came.is_set()
        bell.notify_all()
        waiter.join()
        assert came.is_set()
