"""The fluid level: cases with known answers, bounds that always hold, and the discrete-event level beside it."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune._values import Allocation, Budget, Snapshot
from intune.sim import TRAINED, Change, Scenario, SimMachine, SimStage, SimTrainer, play, scenario
from intune.sim.fluid import Fluid
from intune.tuners import Shared, Static
from intune.tuners.view import View, view

Floats = npt.NDArray[np.float64]
INPUT, ORDER, ROOM, MEMORY, SLOT = range(5)
OPEN = np.inf


def source(cost: float = 0.01, rows: int = 1, **more: object) -> SimStage:
    """A source."""
    return SimStage("read", kind="source", cpu_seconds=cost, rows=rows, **more)  # type: ignore[arg-type]


def chain(*stages: SimStage, cpus: int = 8, trainer: SimTrainer | None = None, **machine: object) -> Scenario:
    """A scenario."""
    made = SimMachine(cpus=cpus, **machine)  # type: ignore[arg-type]
    return Scenario("case", stages, made, trainer or SimTrainer())


def steady_rate(case: Scenario, *asked: float, slots: float | None = None) -> float:
    """Of one allocation; no numbers = all open."""
    fluid = Fluid([case])
    caps = np.array([asked or [OPEN] * len(case.stages)], dtype=np.float64)
    return float(fluid.rate(caps, np.array([slots or case.machine.cpus], dtype=np.float64))[0])


def windows(case: Scenario, *asked: float, number: int = 10, seconds: float = 1.0, seed: int = 0) -> list[View]:
    """So many windows of one allocation."""
    fluid = Fluid([case], seed)
    caps = np.array([asked or [OPEN] * len(case.stages)], dtype=np.float64)
    return [fluid.step(caps, np.array([float(case.machine.cpus)]), seconds) for _ in range(number)]


class TestKnownAnswers:
    def test_one_stage_has_what_its_places_give(self) -> None:
        case = chain(source(0.1, rows=64))
        assert steady_rate(case) == pytest.approx(8 / 0.1 * 64, rel=0.05)
        assert steady_rate(case, 3) == pytest.approx(3 / 0.1 * 64, rel=0.01)
        assert steady_rate(case, OPEN, slots=2) == pytest.approx(2 / 0.1 * 64, rel=0.05)

    def test_two_stages_share_slots_or_the_narrower_one_decides(self) -> None:
        case = chain(source(0.01), SimStage("map", cpu_seconds=0.03))
        assert steady_rate(case) == pytest.approx(8 / 0.04, rel=0.01)
        assert steady_rate(case, 8, 1) == pytest.approx(1 / 0.03, rel=0.01)
        assert steady_rate(case, 1, 8) == pytest.approx(1 / 0.01, rel=0.01)

    def test_rows_of_batches_and_filters_count(self) -> None:
        case = chain(source(0.01, rows=64), SimStage("half", kept=0.5), SimStage("batch", kind="batch", rows=16))
        window = windows(case, number=30)[-1]
        assert window.visits[0] == pytest.approx([1 / 64, 1 / 64, 1 / 32])
        assert steady_rate(case) == pytest.approx(8 / 0.01 * 64, rel=0.01)

    def test_children_and_shuffled_rows_count(self) -> None:
        taken_apart = SimStage("parts", kind="flat_map", children=4)
        shuffled = SimStage("shuffle", kind="shuffle", rows=100_000)
        case = chain(source(0.01, rows=64), taken_apart, shuffled, SimStage("batch", kind="batch", rows=1000))
        visits = windows(case, number=60, seconds=10.0)[-1].visits[0]
        assert visits == pytest.approx([1 / 64, 1 / 16, 1 / 5000, 1 / 1000])

    def test_the_interpreter_lock_lets_one_through(self) -> None:
        case = chain(source(0.001), SimStage("python", lock_seconds=0.02))
        assert steady_rate(case) == pytest.approx(1 / 0.02, rel=0.05)
        last = windows(case)[-1]
        assert last.wall[0, 1] > 4 * last.cpu[0, 1]
        assert 0.02 < last.lock_wait[0] < 0.045
        assert last.used[0] < 1.2

    def test_processes_have_locks_of_their_own(self) -> None:
        case = chain(source(0.001), SimStage("python", lock_seconds=0.02, executor="process"))
        assert steady_rate(case) == pytest.approx(8 / 0.021, rel=0.05)

    def test_a_serial_section_lets_one_through(self) -> None:
        case = chain(source(0.001), SimStage("serial", serial_seconds=0.02, cpu_seconds=0.001))
        assert steady_rate(case) == pytest.approx(1 / 0.02, rel=0.05)

    def test_disk_network_and_memory_bandwidth_bound_the_rate(self) -> None:
        disk = chain(source(0.001, disk_bytes=1e8), disk_bytes_per_second=1e9, disk_stream_bytes_per_second=0.5e9)
        assert steady_rate(disk) == pytest.approx(10, rel=0.05)
        assert steady_rate(disk, 1) == pytest.approx(1 / 0.201, rel=0.05)
        moving = chain(source(0.01, moved_bytes=1e9), memory_bytes_per_second=2e11)
        assert steady_rate(moving) == pytest.approx(200, rel=0.05)
        assert steady_rate(moving, 1) == pytest.approx(100, rel=0.01)

    def test_a_slow_trainer_bounds_the_rate_and_never_starves(self) -> None:
        case = chain(source(0.01), trainer=SimTrainer(device_seconds=0.1))
        assert steady_rate(case) == pytest.approx(10, rel=0.01)
        last = windows(case, number=40)[-1]
        assert last.starved[0] == pytest.approx(0, abs=0.01)
        assert last.ready_batches[0] == 8
        assert last.wait[0, 0, ROOM] > 0.8

    def test_a_trainer_on_the_same_cpus_takes_its_share(self) -> None:
        case = chain(source(0.08), trainer=SimTrainer(cpu_seconds=0.002, threads=8))
        alone = 8 / 0.08
        training = alone * 0.004  # of the time: with as many threads as items each has half a CPU
        assert steady_rate(case) == pytest.approx(alone * (1 - training / 2), rel=0.1)
        assert windows(case)[-1].queue.shape == (1, 1)

    def test_a_bottleneck_that_bends_runs_at_its_cap(self) -> None:
        stage = SimStage("bends", cpu_seconds=0.1, coherency=0.1)
        case = chain(source(0.001), stage)
        for cap in (1, 3, 6):
            expected = cap / (0.1 * (1 + 0.1 * cap * (cap - 1)))
            assert steady_rate(case, 1, cap) == pytest.approx(expected, rel=0.02)
        assert steady_rate(case) < 0.7 * steady_rate(case, OPEN, 3)

    def test_a_stage_that_bends_and_keeps_up_does_no_harm(self) -> None:
        case = chain(source(0.4), SimStage("bends", cpu_seconds=0.001, coherency=0.05))
        assert steady_rate(case) == pytest.approx(8 / 0.401, rel=0.02)

    def test_stragglers_hold_others_back(self) -> None:
        tail = {"tail_share": 0.02, "tail_factor": 40.0}
        late = chain(source(0.001), SimStage("map", cpu_seconds=0.05, **tail))  # type: ignore[arg-type]
        assert steady_rate(late) < 0.8 * steady_rate(chain(source(0.001), SimStage("map", cpu_seconds=0.05)))

    def test_little_memory_bounds_the_rate(self) -> None:
        large = chain(source(0.1, row_bytes=30e6), SimStage("map", cpu_seconds=0.1, row_bytes=30e6), baseline_bytes=1e9)
        tight = replace(large, machine=replace(large.machine, memory_bytes=1.4e9))
        assert steady_rate(tight) < 0.7 * steady_rate(large)
        last = windows(tight, number=20)[-1]
        assert last.held_back[0] > 0.5
        assert last.wait[0, 0, MEMORY] > 0.5
        assert 0.7 < last.memory[0] < 1


class TestTime:
    def test_more_and_more_processes_start_at_once(self) -> None:
        python = SimStage("python", lock_seconds=0.1, executor="process", start_seconds=0.75, start_cpu_seconds=0.25)
        seen = windows(chain(source(0.001), python), number=12)
        assert [window.ready[0, 1] for window in seen[:9]] == [1, 2, 4, 8, 8, 8, 8, 8, 8]
        assert [window.starting[0, 1] for window in seen[:5]] == [1, 2, 4, 0, 0]
        assert np.isnan(seen[0].ready[0, 0])
        assert seen[1].items[0, 1] < seen[2].items[0, 1] < seen[-1].items[0, 1]
        assert seen[2].cap[0, 1] == 4

    @pytest.mark.parametrize("where", [1, 2])
    def test_until_the_first_is_up_nothing_passes(self, where: int) -> None:
        stages = [
            source(0.001),
            SimStage("python", lock_seconds=0.001),
            SimStage("map", moved_bytes=1e6, cpu_seconds=0.01),
        ]
        stages[where] = replace(stages[where], executor="process", start_seconds=4.5, start_cpu_seconds=0.1)
        seen = windows(chain(*stages), number=15)
        for name in ("busy", "items", "wait", "used", "rate", "starved", "lock_wait"):
            assert np.isfinite(getattr(seen[2], name)).all(), name
        assert seen[2].rate[0] == 0
        assert seen[2].cap[0, where] == 0
        assert seen[2].starved[0] == pytest.approx(1)
        assert seen[-1].rate[0] > 0

    def test_processes_end_at_once(self) -> None:
        quick = {"start_seconds": 0.01, "start_cpu_seconds": 0.01}
        python = SimStage("python", lock_seconds=0.1, executor="process", **quick)  # type: ignore[arg-type]
        fluid = Fluid([chain(source(0.001), python)])
        slots = np.array([8.0])
        assert fluid.step(np.array([[OPEN, 8]]), slots).ready[0, 1] == 8
        assert fluid.step(np.array([[OPEN, 3]]), slots).ready[0, 1] == 3

    def test_what_changes_shows(self) -> None:
        changes = (Change(20, "cost", 2.0, "read"), Change(40, "cpus", 4), Change(60, "trainer", 10.0))
        case = replace(chain(source(0.01), trainer=SimTrainer(device_seconds=0.001)), changes=changes)
        seen = windows(case, number=80)
        rates = [np.mean([window.rate[0] for window in seen[first : first + 15]]) for first in (4, 24, 44, 64)]
        assert rates == pytest.approx([800, 400, 200, 100], rel=0.05)
        assert [number for number, window in enumerate(seen) if window.changed[0]] == [0, 40]
        assert seen[50].cpus[0] == 4

    def test_neighbours_take_cpus(self) -> None:
        case = replace(chain(source(0.08)), changes=(Change(10, "neighbours", 8.0),))
        seen = windows(case, number=30)
        assert np.mean([w.rate[0] for w in seen[15:]]) == pytest.approx(50, rel=0.1)
        assert seen[-1].others[0] == pytest.approx(4, rel=0.1)
        assert seen[-1].queue.shape == (1, 1)
        assert seen[-1].wall[0, 0] == pytest.approx(2 * seen[-1].cpu[0, 0], rel=0.1)

    def test_who_needs_more_memory_than_there_is_dies_and_stays_dead_until_reset(self) -> None:
        case = replace(chain(source(0.01), memory_bytes=1e9, baseline_bytes=5e8), changes=(Change(3, "memory", 4e8),))
        other = chain(source(0.01))
        fluid = Fluid([case, other])
        asked, slots = np.full(fluid.shape, OPEN), np.array([8.0, 8.0])
        for _ in range(5):
            last = fluid.step(asked, slots)
        assert fluid.alive.tolist() == [False, True]
        assert fluid.rate(asked, slots)[0] == 0
        assert last.items[0, 0] == 0
        assert last.rate[1] > 700
        fluid.reset(np.array([0]), [case])
        assert fluid.alive.all()
        for _ in range(2):
            last = fluid.step(asked, slots)
        assert last.rate[0] > 0


class TestWindows:
    def test_the_same_seed_gives_the_same_windows(self) -> None:
        case = scenario("wild", 3)
        first, again, other = (windows(case, seed=seed, number=5)[-1] for seed in (1, 1, 2))
        for name in View.__slots__:
            np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(first.wall, other.wall, equal_nan=True)

    def test_few_items_scatter_and_many_do_not(self) -> None:
        def scatter(cost: float) -> float:
            return float(np.std([w.wall[0, 0] / cost for w in windows(chain(source(cost, spread=0.5)), number=60)]))

        assert scatter(1.0) > 5 * scatter(0.002)

    def test_what_no_item_passed_was_not_measured(self) -> None:
        seen = windows(chain(source(5.0), cpus=1), number=20)
        some = [np.isfinite(window.wall[0, 0]) for window in seen]
        assert some == [window.items[0, 0] > 0 for window in seen]
        assert 0 < sum(some) < 10

    def test_what_cannot_be_measured_is_not_a_number(self) -> None:
        lacking = frozenset({"run_queue_seconds", "lock_wait_seconds", "read_bytes", "cpu_seconds_all"})
        case = chain(source(0.001), SimStage("map", cpu_seconds=0.001), unmeasured=lacking)
        last = windows(case)[-1]
        assert np.isnan([last.queue[0, 1], last.lock_wait[0], last.read_rate[0], last.others[0], last.memory[0]]).all()
        assert np.isfinite(last.used[0])

    def test_absent_stages_are_absent(self) -> None:
        fluid = Fluid([chain(source()), chain(source(), SimStage("map", cpu_seconds=0.01))])
        last = fluid.step(np.full(fluid.shape, OPEN), np.array([8.0, 8.0]))
        assert last.present.tolist() == [[True, False], [True, True]]
        assert np.isnan(last.wall[0, 1])
        assert last.wait[0, 1].sum() == 0

    def test_behind_a_bottleneck_there_is_want_of_input_and_before_it_of_order(self) -> None:
        case = chain(source(0.001), SimStage("slow", cpu_seconds=0.1), SimStage("after", cpu_seconds=0.01))
        last = windows(case, OPEN, 1, OPEN, number=30)[-1]
        assert last.wait[0, 0, ORDER] > 0.9
        assert last.wait[0, 1].sum() < 0.1
        assert last.wait[0, 2, INPUT] > 0.9

    def test_with_all_slots_taken_the_source_waits_for_one(self) -> None:
        last = windows(chain(source(0.01), SimStage("map", cpu_seconds=0.1)), number=30)[-1]
        assert last.wait[0, 0, SLOT] > 0.9
        assert last.busy[0].sum() == pytest.approx(8, rel=0.15)


class TestAllocations:
    def test_more_processes_than_fit_are_refused(self) -> None:
        python = SimStage("python", lock_seconds=0.1, executor="process", resident_bytes=2e8, start_seconds=0.6)
        fluid = Fluid([chain(source(0.001), python, memory_bytes=1.6e9, baseline_bytes=5e8)])
        for _ in range(20):
            last = fluid.step(np.array([[OPEN, 8.0]]), np.array([8.0]))
        assert last.ready[0, 1] == last.asked[0, 1] == 3
        assert last.vetoed[0] == 1
        assert fluid.alive.all()

    def test_processes_stay_within_the_budget(self) -> None:
        stages = (source(0.001), *(SimStage(f"p{n}", lock_seconds=0.01, executor="process") for n in range(2)))
        fluid = Fluid([chain(*stages, max_processes=5)])
        for _ in range(20):
            last = fluid.step(np.array([[OPEN, OPEN, 2.0]]), np.array([8.0]))
        assert last.asked[0].tolist() == [OPEN, 3, 2]

    def test_slots_stay_within_the_cpus(self) -> None:
        last = Fluid([chain(source())]).step(np.array([[20.0]]), np.array([99.0]))
        assert (last.slots[0], last.cap[0, 0], last.vetoed[0]) == (8, 8, 1)

    def test_a_stage_that_waits_has_the_threads_that_are_left(self) -> None:
        stages = (source(0.001), SimStage("fetch", wait_seconds=0.1, waits=True))
        last = windows(chain(*stages))[-1]
        assert last.cap[0].tolist() == [8, 56]
        assert last.waits[0].tolist() == [False, True]
        assert steady_rate(chain(*stages)) == pytest.approx(560, rel=0.05)

    def test_a_stage_that_is_mostly_asleep_waits(self) -> None:
        stages = (source(0.001), SimStage("fetch", wait_seconds=0.1), SimStage("map", cpu_seconds=0.01))
        seen = windows(chain(*stages))
        assert seen[0].waits[0].tolist() == [False, True, False]
        assert seen[-1].waits[0].tolist() == [False, True, False]

    def test_best_finds_the_top_of_a_curve(self) -> None:
        case = chain(
            source(0.001), SimStage("bends", cpu_seconds=0.1, coherency=0.1), SimStage("map", cpu_seconds=0.01)
        )
        fluid = Fluid([case, chain(source(0.01), cpus=4)])
        asked, slots, rate = fluid.best()
        assert asked[0, 1] == 3
        assert rate[0] == pytest.approx(3 / 0.16, rel=0.02)
        assert rate[1] == pytest.approx(400, rel=0.05)
        np.testing.assert_allclose(fluid.rate(asked, slots), rate)
        alone = fluid.best(np.array([1]))
        assert alone[2] == pytest.approx(rate[1:])

    def test_what_does_not_fit_is_refused(self) -> None:
        fluid = Fluid([chain(source())])
        with pytest.raises(ValueError, match="2 environments to be reset, but 1 scenarios"):
            fluid.reset(np.array([0, 1]), [chain(source())])
        with pytest.raises(ValueError, match="2 stages, but these environments have at most 1"):
            fluid.reset(np.array([0]), [chain(source(), SimStage("map"))])
        roomy = Fluid([chain(source())], stages=3)
        roomy.reset(np.array([0]), [chain(source(), SimStage("map"))])
        assert roomy.shape == (1, 3)


FAMILIES = sorted(TRAINED)


class TestBounds:
    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(FAMILIES), st.integers(0, 10_000), st.data())
    def test_the_rate_passes_no_bound(self, family: str, seed: int, data: st.DataObject) -> None:
        case = scenario(family, seed)
        caps = [data.draw(st.sampled_from([1.0, 2.0, 5.0, OPEN])) for _ in case.stages]
        rate = steady_rate(case, *caps)
        last = Fluid([case]).step(np.array([caps]), np.array([float(case.machine.cpus)]), 1e4)
        assert np.isfinite(rate)
        assert rate > 0
        visits = last.visits[0]
        computing = np.array([s.cpu_seconds + s.lock_seconds + s.serial_seconds for s in case.stages])
        seconds = computing + [s.wait_seconds for s in case.stages]
        places = np.where(last.waits[0], last.cap[0], np.minimum(caps, case.machine.cpus))  # who waits holds no slot
        with np.errstate(divide="ignore"):
            bounds = [*(places / (visits * seconds)), case.machine.cpus / (visits * computing).sum()]
            bounds += [1 / (visits[n] * s.serial_seconds) for n, s in enumerate(case.stages) if s.serial_seconds]
            moved = sum(visits[n] * s.moved_bytes for n, s in enumerate(case.stages))
            bounds += [case.machine.memory_bytes_per_second / moved] if moved else []
            fetched = sum(visits[n] * s.network_bytes for n, s in enumerate(case.stages))
            bounds += [case.machine.network_bytes_per_second / fetched] if fetched else []
            rows = last.rate[0] and 1 / visits[-1]
            bounds += [rows / case.trainer.device_seconds] if case.trainer.device_seconds and rows else []
        assert rate <= min(bounds) * (1 + 1e-6)

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(["clean", "processes", "slow-trainer", "rows", "quota"]), st.integers(0, 10_000))
    def test_more_slots_never_lower_the_rate(self, family: str, seed: int) -> None:
        case = scenario(family, seed)
        cpus = case.machine.cpus
        fluid = Fluid([case] * cpus)
        rates = fluid.rate(np.full(fluid.shape, OPEN), np.arange(1.0, cpus + 1))
        assert (np.diff(rates) >= -1e-6 * rates[-1]).all()

    @settings(max_examples=20, deadline=None)
    @given(st.sampled_from(FAMILIES), st.integers(0, 10_000))
    def test_windows_are_possible(self, family: str, seed: int) -> None:
        case = scenario(family, seed)
        for window in windows(case, number=8):
            shares = window.wait[0].sum(1)
            assert (window.wait >= 0).all()
            assert (shares <= 1 + 1e-9).all()
            assert 0 <= window.starved[0] <= 1
            assert (window.items[0] >= 0).all()
            some = window.items[0] > 0
            assert (window.cpu[0][some] <= window.wall[0][some] * (1 + 1e-9)).all()
            assert np.isnan(window.queue[0][~some]).all()


class Watched:
    """Keeps what a tuner saw."""

    def __init__(self, tuner: Shared | Static) -> None:
        self._tuner = tuner
        self.views: list[View] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """What the tuner proposes."""
        self.views.append(view(snapshot, budget))
        return self._tuner.propose(snapshot, budget)


def mean(views: list[View], name: str) -> Floats:
    """Over windows, weighted with items."""
    items = np.array([each.items[0] for each in views])
    values = np.array([getattr(each, name)[0] for each in views])
    found: Floats = np.nansum(values * items, 0) / np.maximum(1, items.sum(0))
    return found


class TestBesideTheDiscreteLevel:
    @pytest.mark.parametrize("family", ["clean", "bending", "serial", "network", "slow-trainer"])
    @pytest.mark.parametrize("open_to_all", [True, False])
    def test_both_say_the_same_of_a_steady_run(self, family: str, open_to_all: bool) -> None:
        case = replace(scenario(family, 2), changes=())
        caps = {} if open_to_all else {stage.name: 1 + n % 2 for n, stage in enumerate(case.stages)}
        watched = Watched(Static(caps))
        assert play(case, watched, 24).died is None
        asked = [float(caps.get(stage.name, OPEN)) for stage in case.stages]
        there, here = watched.views[10:], windows(case, *asked, number=40)[20:]
        rate = float(np.nanmean([window.rate[0] for window in there]))
        assert steady_rate(case, *asked) == pytest.approx(rate, rel=0.12)
        for name in ("wall", "cpu", "visits"):
            np.testing.assert_allclose(mean(here, name), mean(there, name), rtol=0.2, err_msg=name)
        np.testing.assert_array_equal(here[-1].cap, there[-1].cap)
        waits_there = np.mean([window.wait[0] for window in there], axis=0)
        waits_here = np.mean([window.wait[0] for window in here], axis=0)
        assert np.abs(waits_here - waits_there).mean() < 0.1
