"""What each tuner does in small pipelines whose best allocation is known, and what holds for all of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune._values import CAUSES, Budget, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot, Tuner
from intune.control.allocation import check_complete
from intune.testing import ScriptedWorkload, blank_snapshot
from intune.tuners import HillClimb, Model, Plumber, Shared, Tabular, Threshold

from .plant import Plant, PlantStage, run

pytest.importorskip("scipy")

TUNERS: dict[str, Callable[[], Tuner]] = {
    "climb": lambda: HillClimb("climb"),
    "max-parallelism": HillClimb,
    "stage-based": lambda: HillClimb("stage-based"),
    "plumber": Plumber,
    "threshold": Threshold,
    "model": Model,
}


def pipeline(**work: Any) -> list[PlantStage]:
    return [PlantStage("source", 0.002), PlantStage("work", 0.02, **work), PlantStage("last", 0.01)]


def settled(tuner: Tuner, plant: Plant) -> tuple[float, int]:
    """Rows a second after 20 decisions, and the sum of all concurrencies (open: the slots in force)."""
    applied, rates = run(tuner, plant, 30)
    last = applied[-1]
    return sum(rates[20:]) / len(rates[20:]), sum(value or last.slots for value in last.concurrency.values())


@pytest.mark.parametrize("name", TUNERS)
def test_stages_that_scale_are_fed_by_all(name: str) -> None:
    rate, _ = settled(TUNERS[name](), Plant(pipeline()))
    assert rate >= 0.99 * 250


@pytest.mark.parametrize("name", TUNERS)
def test_only_the_model_sees_that_a_stage_slows_down_with_concurrency(name: str) -> None:
    stages = [PlantStage("source", 0.002), PlantStage("work", 0.02, bend=1 / 9), PlantStage("last", 0.001)]
    rate, _ = settled(TUNERS[name](), Plant(stages))
    if name == "model":
        assert rate >= 0.99 * 90
    else:
        assert rate < 0.65 * 90  # no better than open: service times are taken not to depend on it


@pytest.mark.parametrize(
    ("name", "held"),
    [("climb", 12), ("max-parallelism", 24), ("stage-based", 13), ("plumber", 8), ("threshold", 24), ("model", 18)],
)
def test_nobody_passes_the_interpreter_lock_and_they_hold_more_or_less(name: str, held: int) -> None:
    plant = Plant([PlantStage("source", 0.002), PlantStage("py", 0.01, lock=1.0), PlantStage("last", 0.004)])
    rate, total = settled(TUNERS[name](), plant)
    assert rate == pytest.approx(100, rel=0.01)
    assert total <= held


@pytest.mark.parametrize(
    ("name", "held"),
    [("climb", 11), ("max-parallelism", 24), ("stage-based", 4), ("plumber", 9), ("threshold", 24), ("model", 15)],
)
def test_a_slow_training_loop_is_fed_by_all_with_more_or_less(name: str, held: int) -> None:
    rate, total = settled(TUNERS[name](), Plant(pipeline(), trainer=1 / 80))
    assert rate == pytest.approx(80, rel=0.01)
    assert total == held


def test_a_table_has_learnt_little_after_a_hundred_decisions() -> None:
    _, rates = run(Tabular(0, explore=0.3), Plant(pipeline()), 100)
    assert sum(rates) / len(rates) < 0.7 * run(Shared(), Plant(pipeline()), 3)[1][-1]


@st.composite
def constant(draw: st.DrawFn) -> Snapshot:
    """Any one window, good enough to learn from or not."""
    found = []
    for place in range(draw(st.integers(1, 5))):
        process = draw(st.booleans())
        info = StageInfo(
            f"s{place}",
            "map" if place else "source",
            "process" if process else "thread",
            draw(st.sampled_from((None, 1, 3))),
            None if process else draw(st.sampled_from((None, False, True))),
        )
        wall = draw(st.sampled_from((1e-4, 0.01, 0.3)))
        waits = dict(zip(CAUSES, (draw(st.floats(0, 0.2)) for _ in CAUSES), strict=True))
        found.append(
            StageSnapshot(
                info,
                None,
                1,
                items_out=draw(st.integers(0, 200)),
                source_rows_per_item=draw(st.sampled_from((1.0, 64.0, None))),
                wall_seconds_mean=wall,
                cpu_seconds_mean=wall * draw(st.floats(0, 1)),
                busy_seconds=draw(st.floats(0, 8)),
                wait_share=waits,
                item_bytes_mean=draw(st.sampled_from((None, 1e6))),
                process_resident_bytes=2**27 if process else None,
            )
        )
    blank = blank_snapshot([stage.info for stage in found])
    steps = draw(st.integers(0, 50))
    return replace(
        blank,
        warm=draw(st.sampled_from((True, True, False))),
        stages=tuple(found),
        consumer=ConsumerSnapshot(steps, steps, None, draw(st.sampled_from((0.0, 0.5, 1.0)))),
        machine=MachineSnapshot(8, lock_wait_seconds=draw(st.sampled_from((None, 1e-4, 0.01))), memory_bytes=2**29),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TUNERS, "tabular"])
@settings(max_examples=40)
@given(seen=constant(), cpus=st.integers(1, 16), memory=st.sampled_from((None, 2**30)))
def test_the_same_figures_lead_to_rest_within_the_budget(
    name: str, seen: Snapshot, cpus: int, memory: int | None
) -> None:
    tuner = Tabular(explore=0.0) if name == "tabular" else TUNERS[name]()
    workload = ScriptedWorkload([stage.info for stage in seen.stages], [seen])
    budget, names = Budget(cpus, memory_bytes=memory), [stage.name for stage in seen.stages]
    for _ in range(80):
        proposal = check_complete(tuner.propose(workload.snapshot(), budget), names)
        assert proposal.slots <= cpus
        assert set(proposal.reasons) == set(names)
        for stage in seen.stages:
            value = proposal.concurrency[stage.name]
            assert value is None or 1 <= value <= min(stage.info.max_concurrency or 64, 64)
        workload.apply(proposal)
    if name == "tabular":
        return  # it goes on trying what it has not tried yet
    last = [(dict(each.concurrency), each.slots) for each in workload.applied]
    if name == "model":
        # All have ramped up, and a trial that figures do not answer to comes ever less often: two, and the ways back.
        assert sum(before != after for before, after in pairwise(last[12:])) <= 4
    assert last[-1] == last[-3]
