from dataclasses import replace
from itertools import pairwise

import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.testing import check_tuner
from intune.tuners import Model, Shared

from .plant import Plant, PlantStage, run

SOURCE = PlantStage("source", 0.002)
BUDGET = Budget(cpus=8)


def source() -> PlantStage:
    return replace(SOURCE)


def bending(seconds: float = 0.02, **changes: object) -> PlantStage:
    """Fastest with 3 items at once: 90 rows/s; 56 with 8."""
    return PlantStage("work", seconds, bend=1 / 9, **changes)  # type: ignore[arg-type]


def first(plant: Plant, slots: int = 8) -> Snapshot:
    return plant(Allocation({stage.name: None for stage in plant.stages}, slots))


def changes(applied: list[Allocation]) -> int:
    said = [(dict(each.concurrency), each.slots) for each in applied]
    return sum(before != after for before, after in pairwise(said))


@pytest.mark.parametrize("tuner", [Model(), Model(margin=0.0, try_every=1), Model(forgetting=1.0, least_items=0)])
def test_it_keeps_the_contract_of_tuners(tuner: Model) -> None:
    check_tuner(tuner)


def test_stages_that_scale_stay_open_after_one_trial() -> None:
    applied, rates = run(Model(), Plant([source(), PlantStage("a", 0.02), PlantStage("b", 0.01)]), 60)
    assert applied[0].concurrency == {"source": None, "a": 3, "b": None}  # half of what it was busy on, once
    assert {each.slots for each in applied} == {8}
    assert changes(applied) == 1
    assert set(applied[1].concurrency.values()) == {None}
    assert min(rates[2:]) >= 249
    assert rates[0] > 140


@pytest.mark.parametrize(("noise", "within"), [(0.0, 3), (0.1, 4)])
def test_a_stage_that_bends_is_limited_to_its_peak(noise: float, within: int) -> None:
    plant = Plant([source(), bending(), PlantStage("last", 0.001)], noise=noise)
    applied, rates = run(Model(), plant, 40)
    assert {each.concurrency["work"] for each in applied[within:]} == {3}
    assert {each.concurrency["source"] for each in applied} == {None}
    assert sum(rates[within:]) / len(rates[within:]) == pytest.approx(90, rel=0.01)
    assert run(Shared(), Plant([source(), bending(), PlantStage("last", 0.001)]), 5)[1][-1] < 60


def test_a_disk_that_bends_is_limited_though_it_needs_no_slot() -> None:
    disk = PlantStage("source", 0.02, bend=1 / 16, waits=True)
    applied, rates = run(Model(), Plant([disk, PlantStage("a", 0.02)]), 20)
    assert applied[-1].concurrency == {"source": 4, "a": None}
    assert rates[-1] == pytest.approx(114.3, rel=0.01)


def test_threads_that_hold_the_lock_get_no_more_than_two() -> None:
    plant = Plant([source(), PlantStage("py", 0.01, lock=1.0), PlantStage("b", 0.004)])
    applied, rates = run(Model(), plant, 20)
    assert {each.concurrency["py"] for each in applied[1:]} == {2}
    assert "holds the interpreter lock" in applied[1].reasons["py"]
    assert min(rates) == pytest.approx(100, rel=0.02)


def test_a_slow_training_loop_gets_its_rate_with_fewer_resources() -> None:
    plant = Plant([source(), PlantStage("a", 0.02), PlantStage("b", 0.01)], trainer=1 / 80)
    applied, rates = run(Model(), plant, 20)
    assert applied[0].concurrency == {"source": 2, "a": 3, "b": 2}
    assert changes(applied) == 0
    assert min(rates) == pytest.approx(80, abs=1)
    assert applied[0].slots == 8


def test_worker_processes_are_as_many_as_are_needed() -> None:
    work = PlantStage("work", 0.02, executor="process", process_bytes=2**28)
    applied, rates = run(Model(), Plant([source(), work, PlantStage("b", 0.01)], trainer=1 / 80), 10)
    assert applied[-1].concurrency["work"] == 3
    assert min(rates) == pytest.approx(80, abs=1)


def test_worker_processes_fit_into_memory_and_into_their_budget() -> None:
    work = PlantStage("work", 0.02, executor="process", process_bytes=2**28)
    tuner, plant = Model(), Plant([source(), work])
    tuner.update(first(plant))
    # The plant holds 1 GiB without processes: 0.775 * 2.5 - 1 leaves 0.94 GiB, room for 3.
    roomy, tight = replace(BUDGET, memory_bytes=2**33), replace(BUDGET, memory_bytes=5 * 2**29)
    assert tuner.target(roomy).concurrency["work"] == 8
    assert tuner.target(tight).concurrency["work"] == 3
    assert tuner.target(replace(BUDGET, max_processes=2)).concurrency["work"] == 2
    assert tuner.predict(tuner.target(tight), tight) == pytest.approx(150, rel=0.01)


def test_it_follows_a_stage_that_changes() -> None:
    work = bending()
    plant = Plant([source(), work, PlantStage("last", 0.001)], noise=0.05)
    tuner = Model()
    applied, _ = run(tuner, plant, 20)
    work.bend = 0.0  # now it scales: 350 rows/s with all slots
    applied, rates = run(tuner, plant, 20, start=applied[-1])
    assert min(rates[8:]) > 330
    assert applied[-1].concurrency["work"] is None
    work.bend = 1 / 9
    applied, rates = run(tuner, plant, 20, start=applied[-1])
    assert min(rates[8:]) > 80
    assert applied[-1].concurrency["work"] == 3


def test_it_predicts_what_was_never_in_force() -> None:
    stages = source(), bending(), PlantStage("last", 0.001)
    tuner = Model()
    run(tuner, Plant(stages), 10)
    for work, slots in ((1, 8), (2, 8), (5, 8), (8, 8), (None, 4)):
        allocation = Allocation({"source": None, "work": work, "last": None}, slots)
        plant = Plant([replace(stage) for stage in stages])
        for _ in range(3):
            plant(allocation)
        predicted = tuner.predict(allocation, BUDGET)
        assert predicted == pytest.approx(plant.rates[-1], rel=0.06)


def test_what_is_uncertain_becomes_certain_by_a_trial() -> None:
    tuner, plant = Model(), Plant([source(), PlantStage("a", 0.02)])
    tuner.propose(first(plant), BUDGET)
    before = tuner.deviation["a"]
    tuner.propose(first(plant, slots=4), BUDGET)
    assert tuner.deviation["a"] < 0.25 < before


@pytest.mark.parametrize(
    "changed",
    [
        lambda seen: replace(seen, warm=False),
        lambda seen: replace(seen, stages=tuple(replace(stage, items_out=3) for stage in seen.stages)),
        lambda seen: replace(seen, stages=tuple(replace(stage, wall_seconds_mean=None) for stage in seen.stages)),
        lambda seen: replace(seen, stages=tuple(replace(stage, processes_starting=1) for stage in seen.stages)),
    ],
)
def test_some_windows_teach_nothing(changed: object) -> None:
    tuner = Model()
    seen = changed(first(Plant([source(), PlantStage("a", 0.02)])))  # type: ignore[operator]
    found = tuner.propose(seen, BUDGET)
    assert not tuner.beliefs
    assert found.concurrency == {"source": None, "a": None}
    assert found.slots == 8
    assert tuner.predict(found, BUDGET) is None
    assert tuner.target(BUDGET).concurrency == found.concurrency


def test_no_trial_while_the_training_loop_does_not_wait_or_where_it_is_not_wanted() -> None:
    seen = first(Plant([source(), PlantStage("a", 0.02)]))
    assert Model().propose(seen, BUDGET).concurrency["a"] == 4
    assert Model(try_every=0).propose(seen, BUDGET).concurrency["a"] is None
    fed = replace(seen, consumer=replace(seen.consumer, wait_share=0.01))
    assert Model().propose(fed, BUDGET).concurrency["a"] is None
    assert Model().propose(seen, Budget(cpus=1)).concurrency["a"] is None
    serial = first(Plant([source(), PlantStage("a", 0.02, max_concurrency=1)]))
    assert Model().propose(serial, BUDGET).concurrency["a"] is None


def test_a_trial_ends_no_processes() -> None:
    work = PlantStage("work", 0.02, executor="process", process_bytes=2**28)
    found = Model().propose(first(Plant([source(), work])), BUDGET)
    assert (found.slots, found.concurrency["work"]) == (4, 8)
    assert found.reasons["work"] == "a trial at 4 instead of 7.3: does it slow down with concurrency?"


def test_a_stage_that_bends_a_little_is_kept_from_taking_all() -> None:
    # Its rate rises up to 8, but an item takes 1.4 times as long then as with the 3 that it needs.
    plant = Plant([PlantStage("source", 0.02), PlantStage("work", 0.01, slope=0.1)])
    applied, _ = run(Model(), plant, 20)
    assert applied[-1].concurrency == {"source": None, "work": 4}
    assert applied[-1].slots == 8


def test_threads_for_the_lock_take_no_slots_from_others_where_slots_are_scarce() -> None:
    # The lock is in use for 85 % of the time, and threads that wait for it would hold slots.
    stages = PlantStage("source", 0.0012, lock=1.0), PlantStage("py", 0.0012, lock=1.0), PlantStage("work", 0.02)
    applied, rates = run(Model(), Plant([replace(stage) for stage in stages]), 20)
    assert applied[-1].concurrency == {"source": 1, "py": 1, "work": None}
    assert rates[-1] > 1.02 * run(Shared(), Plant(stages), 5)[1][-1]


def test_what_is_nearly_the_best_stays() -> None:
    tuner = Model(try_every=0)
    plant = Plant([source(), PlantStage("a", 0.02), PlantStage("b", 0.01)], trainer=1 / 80)
    applied = Allocation({"source": 3, "a": 4, "b": 2}, 8)
    found = tuner.propose(plant(applied), BUDGET)
    assert found.concurrency == applied.concurrency
    assert found.reasons["a"].startswith("as before: predicted at 100% of the best, 79.8 source rows/s, what the train")
    wasteful = Allocation({"source": 8, "a": 8, "b": 8}, 8)
    assert tuner.propose(plant(wasteful), BUDGET).concurrency == {"source": 2, "a": 3, "b": 2}


def test_a_cut_of_the_budget_is_answered_at_once() -> None:
    tuner, plant = Model(), Plant([source(), bending(), PlantStage("last", 0.001)])
    run(tuner, plant, 10)
    cut = tuner.propose(plant(Allocation({"source": None, "work": 3, "last": None}, 8)), Budget(cpus=2))
    assert cut.slots == 2
    assert (cut.concurrency["work"] or 2) <= 3


def test_before_any_window_there_is_no_target() -> None:
    with pytest.raises(PipelineError, match="no window was seen yet"):
        Model().target(BUDGET)
    assert Model().predict(Allocation({"a": None}, 8), BUDGET) is None


@pytest.mark.parametrize("wrong", [{"forgetting": 0.0}, {"keep": 1.5}, {"margin": -1.0}, {"noise": 0.0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(PipelineError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
        Model(**wrong)
