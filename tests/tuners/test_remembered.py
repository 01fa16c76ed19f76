"""What a run has learnt of its stages, given to the next one."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune._errors import PipelineError
from intune._values import Allocation, Budget
from intune.testing import check_tuner
from intune.tuners import Model

from .plant import Plant, PlantStage, run

SOURCE = PlantStage("source", 0.002)
BENDING = PlantStage("work", 0.02, bend=1 / 9)  # fastest with 3 items at once: 90 rows/s; 56 with 8
LAST = PlantStage("last", 0.001)
STAGES = (SOURCE, BENDING, LAST)


def plant(stages: Sequence[PlantStage] = STAGES, cpus: int = 8) -> Plant:
    return Plant([replace(stage) for stage in stages], cpus=cpus)


def kept(stages: Sequence[PlantStage] = STAGES, decisions: int = 30) -> dict[str, Any]:
    """What a run of them leaves, as read from a file."""
    tuner = Model()
    run(tuner, plant(stages), decisions)
    found: dict[str, Any] = json.loads(json.dumps(tuner.state_dict(), allow_nan=False))
    return found


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return kept()


def remembering(state: Mapping[str, Any]) -> Model:
    tuner = Model()
    tuner.load_state_dict(state)
    return tuner


def test_it_begins_where_the_last_run_was(state: Mapping[str, Any]) -> None:
    applied, rates = run(remembering(state), plant(), 4)  # then comes a trial
    assert [each.concurrency["work"] for each in applied] == [3] * 4
    assert {each.concurrency["last"] for each in applied} == {None}
    assert min(rates) >= 89
    cold, _ = run(Model(), plant(), 3)
    assert [each.concurrency["last"] for each in cold] == [1, 4, None]


def test_what_it_gives_before_a_run_is_what_it_was_given(state: Mapping[str, Any]) -> None:
    again = remembering(state).state_dict()
    assert again["stages"] == state["stages"]
    for one, other in zip(again["known"], state["known"], strict=True):
        assert one["fit"]["mean"] == other["fit"]["mean"]
        # It is less sure of it than the run that learnt it.
        assert np.trace(one["fit"]["information"]) < np.trace(other["fit"]["information"])


def test_nothing_is_known_before_the_first_run() -> None:
    assert Model().state_dict() == {"format": "intune model 1", "stages": [], "known": [], "slowing": []}


@pytest.mark.parametrize(
    "stages",
    [
        (SOURCE, BENDING),
        (*STAGES, PlantStage("more", 0.001)),
        (SOURCE, LAST, BENDING),
        (SOURCE, replace(BENDING, name="other"), LAST),
    ],
    ids=["fewer", "more", "another order", "another name"],
)
def test_of_other_stages_it_is_left_out_with_a_warning(state: Mapping[str, Any], stages: Sequence[PlantStage]) -> None:
    tuner = remembering(state)
    with pytest.warns(UserWarning, match=r"remembers is of stages source \(source\), work \(map\), last \(map\), not"):
        applied, rates = run(tuner, plant(stages), 20)
    assert (applied, rates) == run(Model(), plant(stages), 20)


def test_a_stage_that_runs_in_processes_now_is_unknown(state: Mapping[str, Any]) -> None:
    moved = (SOURCE, replace(BENDING, executor="process", process_bytes=2**20), LAST)
    applied, _ = run(remembering(state), plant(moved), 1)
    assert applied[0].concurrency == {"source": None, "work": 1, "last": None}


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("cpus", [2, 8, 24])
def test_on_another_machine_it_loses_little(state: Mapping[str, Any], factor: float, cpus: int) -> None:
    stages = [replace(stage, seconds=stage.seconds * factor) for stage in STAGES]
    applied, rates = run(remembering(state), plant(stages, cpus), 40)
    assert all(level is None or 1 <= level <= cpus for each in applied for level in each.concurrency.values())
    assert sum(rates) >= 0.96 * sum(run(Model(), plant(stages, cpus), 40)[1])


def test_a_stage_that_no_longer_slows_down_is_set_free(state: Mapping[str, Any]) -> None:
    applied, rates = run(remembering(state), plant((SOURCE, replace(BENDING, bend=0.0), LAST)), 40)
    assert applied[0].concurrency["work"] == 3
    assert rates[-1] >= 340


@pytest.mark.parametrize(("slope", "bend"), [(3.0, 0.0), (1.0, 0.0), (0.0, 0.2), (0.0, 1.0)])
def test_one_at_a_time_is_not_for_ever(slope: float, bend: float) -> None:
    """With one at once nothing would show that the stage no longer slows down, so more is tried now and then."""
    slow = (SOURCE, replace(BENDING, bend=bend, slope=slope), LAST)
    flat = (SOURCE, replace(BENDING, bend=0.0), LAST)
    _, rates = run(remembering(kept(slow)), plant(flat), 20)
    assert rates[-1] >= 340
    changing, tuner = plant(slow), Model()
    run(tuner, changing, 20)
    changing.stages = list(flat)
    assert run(tuner, changing, 180)[1][-1] >= 340


def test_what_still_slows_down_is_tried_ever_more_seldom() -> None:
    slow = (SOURCE, replace(BENDING, bend=0.0, slope=3.0), LAST)
    applied, _ = run(Model(), plant(slow), 700)
    tried = [place for place, each in enumerate(applied) if "may no longer slow down" in each.reasons["work"]]
    assert len(tried) == 6  # twice for three decisions
    assert tried[0] >= 128
    assert tried[3] >= 4 * 128


def test_a_tuner_that_gets_another_pipeline_begins_anew_and_says_so() -> None:
    tuner = Model()
    run(tuner, plant(), 10)
    other = (SOURCE, replace(BENDING, name="other"), LAST)
    with pytest.warns(UserWarning, match=r"other \(map\), last \(map\): it is left out"):
        again = run(tuner, plant(other), 10)
    assert again == run(Model(), plant(other), 10)


def test_where_warnings_are_errors_the_tuner_goes_on(state: Mapping[str, Any]) -> None:
    tuner = remembering(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(tuner, plant((SOURCE, LAST)), 5) == run(Model(), plant((SOURCE, LAST)), 5)


def test_a_warning_names_only_the_first_stages() -> None:
    stages = [[f"stage{place}", "map"] for place in range(10**5)]
    tuner = remembering({"format": "intune model 1", "stages": stages, "known": [], "slowing": []})
    with pytest.warns(UserWarning, match=r"stage11 \(map\) and 99988 more, not of source"):
        run(tuner, plant(), 1)


def test_a_stage_that_waits_begins_with_few_all_the_same() -> None:
    """Many fetches begun at once share a network, so that the first one would be done when the last one is."""
    fetching = (replace(SOURCE, seconds=0.05, waits=True), LAST)
    applied, _ = run(remembering(kept(fetching)), plant(fetching), 1)
    assert applied[0].concurrency == {"source": 8, "last": None}


def test_it_keeps_the_contract_of_tuners(state: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stages other than these
        check_tuner(remembering(state))


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def spoilt(state: Mapping[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(state))
    change(copy)
    return copy


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.clear(),
        lambda state: state.update(format="intune model 0"),
        lambda state: state.update(known=None),
        lambda state: state.update(stages=[["source"]]),
        lambda state: state.update(stages=state["stages"][:1]),
        lambda state: state.update(slowing=None),
        lambda state: state["known"][0].pop("fit"),
        lambda state: state["known"][0].update(cpu_seconds=-1.0),
        lambda state: state["known"][0].update(busy="many"),
        lambda state: state["known"][0]["fit"].update(seconds=0.0),
        lambda state: state["known"][0]["fit"].update(seconds=float("nan")),
        lambda state: state["known"][0]["fit"].update(misfit=0.5),
        lambda state: state["known"][0]["fit"].update(mean=[1.0, 0.0]),
        lambda state: state["known"][0]["fit"].update(mean=[1.0, 0.0, float("inf")]),
        lambda state: state["known"][0]["fit"].update(information=[[1.0, 0, 0], [0, -1.0, 0], [0, 0, 1.0]]),
        lambda state: state["known"][0]["fit"].update(information=[[1.0, 2.0, 0], [0, 1.0, 0], [0, 0, 1.0]]),
        lambda state: state["known"][0]["fit"].update(information=[[float("nan")] * 3] * 3),
        lambda state: state["known"][0]["fit"].update(information=[[1e300, 0, 0], [0, 1e300, 0], [0, 0, 1e300]]),
        lambda state: state["known"][0]["fit"].update(seconds=10**400),
        lambda state: state["known"][0]["fit"].update(seconds=5e-324),
        lambda state: state["known"][0]["fit"].update(mean=[1e300, 0.0, 0.0]),
        lambda state: state["known"][0]["fit"].update(misfit=True),
        lambda state: state["known"][0].update(waits=1),
        lambda state: state["known"][0].update(executor="gpu"),
        lambda state: state["known"][0].update(kind=b"map"),
        lambda state: state["known"][0].update(busy=None),
        lambda state: state["known"][0].update(busy=10**400),
        lambda state: state["known"][0].update(held_up=2.0),
        lambda state: state["known"][0].update(process_bytes=None),
        lambda state: state.update(format=nested(5000)),
    ],
)
def test_what_no_tuner_gave_is_refused_and_changes_nothing(
    state: Mapping[str, Any], change: Callable[[dict[str, Any]], object]
) -> None:
    tuner = Model()
    with pytest.raises(PipelineError, match=r"expected what state_dict\(\)"):
        tuner.load_state_dict(spoilt(state, change))
    assert run(tuner, plant(), 5) == run(Model(), plant(), 5)


@pytest.mark.parametrize("given", [None, [], "state", 3, np.zeros(3), np.float64(1.0)], ids=repr)
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(PipelineError, match="expected"):
        Model().load_state_dict(given)


@given(
    seconds=st.floats(1e-9, 1e3),
    mean=st.tuples(st.floats(-10, 100), st.floats(-5, 50), st.floats(-5, 50)),
    sure=st.floats(1e-6, 1e9),
    busy=st.floats(0, 1024),
    cpus=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_remembered_what_it_proposes_is_legal(
    seconds: float, mean: tuple[float, float, float], sure: float, busy: float, cpus: int
) -> None:
    fit = {"seconds": seconds, "mean": list(mean), "information": np.diag([sure] * 3).tolist(), "misfit": 1.0}
    state = kept_by_hand(fit, busy)
    tuner, made = remembering(state), plant(cpus=cpus)
    allocation = Allocation({stage.name: None for stage in STAGES}, cpus)
    for _ in range(6):
        allocation = tuner.propose(made(allocation), Budget(cpus))
        assert set(allocation.concurrency) == {stage.name for stage in STAGES}
        assert all(level is None or 1 <= level <= cpus for level in allocation.concurrency.values())
        assert 1 <= allocation.slots <= cpus


def kept_by_hand(fit: Mapping[str, Any], busy: float) -> dict[str, Any]:
    numbers = {"cpu_seconds": 0.01, "lock_share": None, "saturated": None, "process_bytes": 0, "held_up": 0.0}
    known = {"name": "work", "kind": "map", "executor": "thread", "waits": None, "fit": fit, "busy": busy, **numbers}
    stages = [["source", "source"], ["work", "map"], ["last", "map"]]
    return {"format": "intune model 1", "stages": stages, "known": [known], "slowing": ["work"]}
