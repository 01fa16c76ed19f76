"""Pipelines in simulated time: known rates, what changes when, memory, and that nothing depends on real time."""

import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from intune._values import Allocation, Snapshot, Tuner
from intune.sim import Change, Scenario, SimMachine, SimStage, SimTrainer, discrete, play, scenario
from intune.sim.discrete import OutOfMemory, Simulation
from intune.testing import check_workload
from intune.tuners import Even, RandomMoves, Shared, Static

from .handed_over import HandedOver

READ = SimStage("read", "source")
PROCESS = SimStage("work", executor="process", lock_seconds=0.1, resident_bytes=100e6)


def uneven(**fields: Any) -> Scenario:
    costs = {"read": 0.02, "decode": 0.1, "cut": 0.01, "pack": 0.005}
    stages = tuple(
        SimStage(name, "map" if place else "source", cpu_seconds=cost)
        for place, (name, cost) in enumerate(costs.items())
    )
    return Scenario("uneven", stages, SimMachine(cpus=32), **fields)


def one(*stages: SimStage, cpus: int = 8, machine: SimMachine | None = None, **fields: Any) -> Scenario:
    """A source that costs nothing, and these."""
    return Scenario("one", (READ, *stages), machine or SimMachine(cpus=cpus), **fields)


def run(drawn: Scenario, seconds: float, allocation: dict[str, int | None] | None = None, **options: Any) -> Simulation:
    """So many seconds of it, with everything open but what is said."""
    simulation = Simulation(drawn, **options)
    names = [stage.name for stage in drawn.stages]
    simulation.apply(Allocation({**dict.fromkeys(names), **(allocation or {})}, drawn.machine.cpus))
    for _ in range(round(seconds)):
        simulation.advance(1.0)
    return simulation


def rate(drawn: Scenario, tuner: Tuner | None = None, decisions: int = 12, first: int = 4) -> float:
    """Rows a second once it has settled; a row is an item unless said otherwise."""
    return play(drawn, tuner or Shared(), decisions).rows_per_second(first)


class TestRates:
    def test_shared_slots_give_what_all_cpus_can(self) -> None:
        assert rate(uneven()) == pytest.approx(32 / 0.135, rel=0.02)

    def test_an_even_split_gives_what_its_dearest_stage_can(self) -> None:
        assert rate(uneven(), Even()) == pytest.approx(80, rel=0.02)

    def test_a_limit_holds(self) -> None:
        assert rate(uneven(), Static({"decode": 3})) == pytest.approx(30, rel=0.02)

    def test_a_stage_that_holds_the_lock_gives_one_lock_and_is_not_taken_for_one_that_waits(self) -> None:
        locked = one(SimStage("work", lock_seconds=0.01))
        trace = play(locked, Shared(), 12)
        assert trace.rows_per_second(4) == pytest.approx(100, rel=0.02)
        simulation = run(locked, 3)
        assert simulation.stages[1].waits is False
        seen = simulation.snapshot()
        assert seen.stages[1].wall_seconds_mean == pytest.approx(8 * 0.01, rel=0.1)
        assert seen.stages[1].cpu_seconds_mean == pytest.approx(0.01, rel=0.05)

    def test_a_stage_that_sleeps_is_found_to_wait_and_takes_no_slot(self) -> None:
        both = one(SimStage("fetch", wait_seconds=0.1), SimStage("work", cpu_seconds=0.02), cpus=2)
        simulation = run(both, 3)
        assert simulation.stages[1].waits is True
        assert 85 <= rate(both) <= 100  # on one thread for both it would be 17

    def test_a_disk_gives_no_more_with_more_readers(self) -> None:
        machine = SimMachine(cpus=8, disk_bytes_per_second=1e8, disk_stream_bytes_per_second=5e7)
        drawn = Scenario("disk", (replace(READ, disk_bytes=1e6), SimStage("work")), machine)
        assert rate(drawn, Static({"read": 1})) == pytest.approx(50, rel=0.02)
        assert rate(drawn, Static({"read": 2})) == pytest.approx(100, rel=0.02)
        assert rate(drawn, Static({"read": 8})) == pytest.approx(100, rel=0.02)

    def test_a_stage_that_bends_is_best_below_the_most(self) -> None:
        bent = one(SimStage("work", cpu_seconds=0.01, coherency=1 / 16))
        rates = {n: rate(bent, Static({"work": n})) for n in (1, 4, 8)}
        assert rates == {n: pytest.approx(100 * n / (1 + n * (n - 1) / 16), rel=0.03) for n in rates}


class TestTrainers:
    def test_a_slow_one_takes_what_it_can_and_never_waits(self) -> None:
        simulation = run(uneven(trainer=SimTrainer(device_seconds=0.05)), 4)
        simulation.snapshot()
        simulation.advance(10.0)
        consumer = simulation.snapshot().consumer
        assert consumer.steps == pytest.approx(200, abs=1)
        assert consumer.wait_share == pytest.approx(0, abs=1e-6)
        assert consumer.ready > 0

    def test_one_that_computes_takes_cpus_from_the_stages(self) -> None:
        """A step takes 2 threads 20 ms, an item 40 ms: 80 ms of CPU a row on 4 CPUs."""
        alone = one(SimStage("work", cpu_seconds=0.04), cpus=4)
        beside = replace(alone, trainer=SimTrainer(cpu_seconds=0.02, threads=2))
        assert rate(alone) == pytest.approx(100, rel=0.02)
        found = rate(beside, decisions=20)
        assert 45 * 0.75 < found <= 50.5
        assert rate(beside, Static({"work": 2})) == pytest.approx(
            50, rel=0.05
        )  # slots below the CPUs: nobody is slowed

    def test_pauses_cost_their_time(self) -> None:
        drawn = one(SimStage("work", cpu_seconds=0.001), trainer=SimTrainer(0.05, pause_every=20, pause_seconds=1.0))
        assert run(drawn, 20).steps == pytest.approx(200, abs=3)


class TestChanges:
    @pytest.fixture
    def plain(self) -> Scenario:
        return one(SimStage("work", cpu_seconds=0.04, rows=1), cpus=4)

    def rates(self, drawn: Scenario, change: Change) -> tuple[float, float]:
        trace = play(replace(drawn, changes=(change,)), Shared(), 20)
        return trace.rows_per_second(2, 10), trace.rows_per_second(12)

    @pytest.mark.parametrize(
        ("what", "value", "before", "after"),
        [("cost", 2.0, 100, 50), ("cpus", 2, 100, 50), ("neighbours", 4.0, 100, 50)],
    )
    def test_what_slows_stages_down(
        self, plain: Scenario, what: Any, value: float, before: float, after: float
    ) -> None:
        found = self.rates(plain, Change(10.0, what, value, "work" if what == "cost" else None))
        assert found == (pytest.approx(before, rel=0.03), pytest.approx(after, rel=0.03))

    def test_the_trainer(self, plain: Scenario) -> None:
        drawn = replace(plain, trainer=SimTrainer(device_seconds=0.02))
        assert self.rates(drawn, Change(10.0, "trainer", 2.0)) == (pytest.approx(50, abs=1), pytest.approx(25, abs=1))

    def test_the_size_of_items(self, plain: Scenario) -> None:
        drawn = replace(plain, changes=(Change(5.0, "bytes", 3.0, "work"),))
        simulation = run(drawn, 4)
        before = simulation.snapshot().stages[1].item_bytes_mean
        simulation.advance(2.0)
        simulation.snapshot()
        simulation.advance(1.0)
        after = simulation.snapshot().stages[1].item_bytes_mean
        assert (before, after) == (pytest.approx(1000), pytest.approx(3000))

    def test_the_budget(self, plain: Scenario) -> None:
        changes = (Change(2.0, "cpus", 2.5), Change(3.0, "memory", 2e9))
        simulation = Simulation(replace(plain, machine=SimMachine(cpus=4, memory_bytes=4e9), changes=changes))
        found = []
        for _ in range(4):
            budget = simulation.budget()
            found.append((budget.cpus, budget.memory_bytes))
            simulation.advance(1.0)
        assert found == [(4, 4e9), (4, 4e9), (2, 4e9), (2, 2e9)]
        assert {event.detail for event in simulation.snapshot().events} >= {
            "cpus is 2.5 from now on",
            "memory is 2e+09 from now on",
        }

    def test_they_are_relative_to_the_start(self, plain: Scenario) -> None:
        drawn = replace(plain, changes=(Change(4.0, "cost", 2.0, "work"), Change(8.0, "cost", 1.0, "work")))
        assert play(drawn, Shared(), 20).rows_per_second(10) == pytest.approx(100, rel=0.03)


class TestRows:
    def test_epochs_end_and_follow_each_other(self) -> None:
        drawn = one(SimStage("work", cpu_seconds=0.01), cpus=1, epoch_items=50)
        simulation = run(drawn, 2)
        seen = simulation.snapshot()
        assert seen.epoch in (3, 4)
        kinds = [event.kind for event in seen.events]
        assert kinds.count("epoch_end") == seen.epoch
        assert simulation.rows == pytest.approx(200, abs=4)

    def test_filters_expansions_and_batches_keep_count(self) -> None:
        stages = (
            SimStage("read", "source", rows=64, cpu_seconds=0.01),
            SimStage("half", kept=0.5),
            SimStage("each", "flat_map", children=4, cpu_seconds=0.001),
            SimStage("batch", "batch", rows=16),
        )
        simulation = run(Scenario("rows", stages, SimMachine(cpus=1)), 2)
        simulation.snapshot()
        simulation.advance(10.0)
        seen = {stage.name: stage for stage in simulation.snapshot().stages}
        each = {name: stage.rows_out / stage.items_out for name, stage in seen.items()}
        assert each == {"read": 64, "half": 32, "each": 8, "batch": 16}
        assert seen["each"].items_out == pytest.approx(4 * seen["half"].items_out, rel=0.02)
        per_item = {name: stage.source_rows_per_item for name, stage in seen.items()}
        assert per_item == pytest.approx({"read": 64, "half": 64, "each": 16, "batch": 32}, rel=0.01)
        assert seen["read"].items_out == pytest.approx(10 / 0.014, rel=0.02)

    def test_where_nothing_takes_time_none_passes(self) -> None:
        with pytest.raises(ValueError, match="one: neither a stage nor the trainer takes any time"):
            one(SimStage("work"))

    def test_a_shuffle_puts_rows_together(self) -> None:
        stages = (SimStage("read", "source", rows=64, cpu_seconds=0.001), SimStage("shuffle", "shuffle", rows=1024))
        simulation = run(Scenario("mixed", stages, SimMachine(cpus=2)), 3)
        assert simulation.rows > 64 * 1000

    def test_gathers_have_the_names_that_a_pipeline_gives_them(self) -> None:
        batches = (replace(READ, cpu_seconds=0.01), SimStage("batch", "batch"), SimStage("batch_2", "batch", rows=3))
        assert [stage.name for stage in run(Scenario("two", batches), 1).stages] == ["read", "batch", "batch_2"]
        with pytest.raises(ValueError, match="two: a batch cannot be named 'pack': in a pipeline it is 'batch_2'"):
            Scenario("two", (*batches[:2], SimStage("pack", "batch")))


class TestProcesses:
    def test_more_and_more_start_at_once_and_cost_memory(self) -> None:
        drawn = one(replace(PROCESS, start_seconds=0.8, start_cpu_seconds=0.2))
        simulation = run(drawn, 0)
        found = []
        for _ in range(5):
            simulation.advance(1.0)
            seen = simulation.snapshot().stages[1]
            found.append((seen.processes_live, seen.processes_starting))
        # A start more begins with each item that a process does first, 0.1 s after it is up.
        assert found == [(1, 1), (2, 2), (4, 4), (8, 0), (8, 0)]
        assert simulation.memory_bytes == pytest.approx(500e6 + 100e6 * simulation.processes, rel=0.01)

    def test_they_go_when_they_are_not_wanted_and_give_their_memory_back(self) -> None:
        simulation = run(one(PROCESS), 8)
        assert simulation.processes == 8
        simulation.apply(Allocation({"read": None, "work": 2}, 8))
        simulation.advance(1.0)
        assert simulation.processes == 2
        assert simulation.memory_bytes == pytest.approx(700e6, rel=0.01)

    def test_they_do_not_share_a_lock(self) -> None:
        assert rate(one(PROCESS), decisions=20, first=10) == pytest.approx(80, rel=0.03)


class TestMeasurements:
    def test_what_cannot_be_measured_is_none(self) -> None:
        names = ("run_queue_seconds", "lock_wait_seconds", "read_bytes", "cpu_seconds_all")
        drawn = one(SimStage("work", cpu_seconds=0.01))
        known = run(drawn, 3).snapshot()
        lacking = replace(drawn, machine=SimMachine(cpus=8, unmeasured=frozenset(names)))
        unknown = run(lacking, 3).snapshot()
        for name in names[1:]:
            assert getattr(known.machine, name) is not None
            assert getattr(unknown.machine, name) is None
            assert name not in unknown.machine.read_from
        assert unknown.stages[1].run_queue_seconds is None
        assert known.stages[1].run_queue_seconds is not None

    def test_seconds_without_a_cpu_are_in_the_run_queue(self) -> None:
        """Eight at once on 8 slots, while neighbours take half of the CPUs."""
        drawn = one(SimStage("work", cpu_seconds=0.01), changes=(Change(0.0, "neighbours", 8.0),))
        simulation = run(drawn, 3)
        simulation.snapshot()
        simulation.advance(10.0)
        work = simulation.snapshot().stages[1]
        assert work.cpu_seconds_mean == pytest.approx(0.01, rel=0.02)
        assert work.wall_seconds_mean == pytest.approx(0.02, rel=0.05)
        assert work.run_queue_seconds == pytest.approx(work.busy_seconds / 2, rel=0.1)
        assert simulation.cpu_seconds == pytest.approx(4 * 13, rel=0.05)

    def test_it_is_a_workload_like_any_other(self) -> None:
        for number in range(3):
            simulation = run(scenario("wild", number), 3)
            check_workload(simulation)
            simulation.close()


class TestSimulatedTime:
    @pytest.mark.parametrize("name", [("wild", 3), ("processes", 2), ("memory", 1)])
    def test_the_same_run_twice_is_equal_in_every_figure(self, name: tuple[str, int]) -> None:
        first, second = (play(scenario(*name), RandomMoves(7), 15) for _ in range(2))
        assert first == second
        assert first != play(scenario(*name), RandomMoves(8), 15)

    def test_there_is_no_thread_and_no_sleep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **named: Any) -> None:
            raise AssertionError("real time")

        monkeypatch.setattr(time, "sleep", refuse)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        monkeypatch.setattr(threading.Condition, "wait", refuse)
        monkeypatch.setattr(threading.Event, "wait", refuse)
        for family in ("wild", "processes", "memory", "quota"):
            assert len(play(scenario(family, 0), Shared(), 5).intervals) == 5

    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_an_interrupt_in_the_middle_of_a_task_ends_the_run(self, executor: Any) -> None:
        """The engine keeps what a task raises; here all is one thread, and an interrupt may come anywhere."""
        real, made = discrete.blank_block, [0]

        def interrupted(rows: int, row_bytes: float) -> Any:
            made[0] += 1
            if made[0] == 100:
                raise KeyboardInterrupt
            return real(rows, row_bytes)

        drawn = one(SimStage("work", cpu_seconds=0.01, executor=executor))
        with mock.patch.object(discrete, "blank_block", interrupted), pytest.raises(KeyboardInterrupt):
            play(drawn, Shared(), 20)
        assert made[0] < 150

    def test_an_interval_for_each_decision(self) -> None:
        trace = play(uneven(), Shared(), 6, interval_seconds=0.5)
        assert [each.seconds for each in trace.intervals] == pytest.approx([0.125, 0.25, 0.5, 1, 1.5, 2])
        assert len(trace.lines) == 7
        assert sum(each.rows for each in trace.intervals) / 2 == pytest.approx(trace.rows_per_second())
        assert sum(each.cpu_seconds for each in trace.intervals) <= 2 * 32


class TestMemory:
    BIG = SimStage("work", cpu_seconds=0.05, row_bytes=50e6)

    @pytest.fixture
    def tight(self) -> Scenario:
        return one(self.BIG, cpus=16, machine=SimMachine(cpus=16, memory_bytes=1e9), trainer=SimTrainer(0.1))

    def test_what_passes_the_limit_ends_it(self, tight: Scenario) -> None:
        with pytest.raises(OutOfMemory, match=r"1,\d\d\d MB of 1,000 MB at \d"):
            run(tight, 20, brake=False)

    def test_guard_and_brake_keep_it_below(self, tight: Scenario) -> None:
        trace = play(tight, Shared(), 20)
        assert trace.died is None
        assert trace.peak_bytes <= 0.95e9
        assert trace.rows_per_second(5) == pytest.approx(10, rel=0.05)

    def test_a_death_is_told_and_counts_as_nothing(self) -> None:
        hopeless = one(self.BIG, machine=SimMachine(cpus=1, memory_bytes=510e6))
        trace = play(hopeless, Shared(), 20)
        assert trace.died is not None
        assert trace.rows_per_second() == 0.0

    def test_processes_that_came_up_lately_count_at_once(self) -> None:
        """They come up faster than what remained without items is forgotten."""
        stage = replace(PROCESS, start_seconds=0.3, start_cpu_seconds=0.1, lock_seconds=0.05)
        drawn = one(stage, machine=SimMachine(cpus=32, memory_bytes=2e9), cpus=32)
        trace = play(drawn, Shared(), 30)
        assert trace.died is None
        assert trace.peak_bytes <= 0.93 * 2e9
        assert 8 <= trace.intervals[-1].processes <= 12

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["memory", "processes", "wild"])
    def test_no_tuner_runs_out_of_memory(self, family: str) -> None:
        for seed in range(10):
            for tuner in (Shared(), RandomMoves(seed)):
                assert play(scenario(family, seed), tuner, 25).died is None, (family, seed, tuner)

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("scratch", [1.0, 2.0, 3.0])
    @pytest.mark.parametrize("low", [2, 8, 32])
    def test_a_stage_that_was_kept_low_may_do_many_at_once(self, low: int, scratch: float, place: int) -> None:
        """What a few items take beside their buffers tells what many will, however many wait meanwhile."""
        heavy = SimStage("heavy", cpu_seconds=0.4, spread=0.0, row_bytes=8e6, scratch_bytes=scratch * 8e6)
        stages = [SimStage("light", cpu_seconds=0.06, spread=0.0, row_bytes=1e6)]
        stages.insert(place, heavy)
        drawn = one(*stages, cpus=64, machine=SimMachine(cpus=64, memory_bytes=1.5e9))
        for decisions in (3, 6):
            trace = play(drawn, HandedOver({"heavy": low}, decisions, Shared()), decisions + 6)
            assert trace.died is None
            assert trace.peak_bytes <= 0.95 * 1.5e9

    def test_a_limit_that_falls_is_obeyed(self, tight: Scenario) -> None:
        wide = replace(tight, machine=SimMachine(cpus=16, memory_bytes=2e9), changes=(Change(8.0, "memory", 1.6e9),))
        assert play(wide, Shared(), 20).died is None


def test_a_snapshot_is_one_of_the_engine() -> None:
    simulation = run(uneven(), 2)
    seen: Snapshot = simulation.snapshot()
    assert [stage.info.kind for stage in seen.stages] == ["source", "map", "map", "map"]
    assert seen.warm
    assert seen.rest_bytes is None  # no limit, no brake
    with pytest.raises(RuntimeError, match="nothing may sleep in simulated time"):
        simulation.clock.sleep(1.0, threading.Event())
