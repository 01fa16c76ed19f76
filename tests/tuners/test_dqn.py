from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from intune._values import Allocation, Budget, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.control.allocation import check_complete
from intune.testing import ScriptedWorkload, blank_snapshot, check_tuner
from intune.tuners import DQN, _weights
from intune.tuners.dqn import ACTIONS, FORMAT, PLACES, SIZES, allowed, figures
from intune.tuners.view import view

from .plant import Plant, PlantStage, run


def stages(number: int, most: int | None = None) -> list[StageInfo]:
    return [StageInfo(f"s{place}", "map" if place else "source", max_concurrency=most) for place in range(number)]


def window(
    split: list[int | None], *, most: int | None = None, cpus: int = 8, items: int = 50, memory: int | None = None
) -> Snapshot:
    """Each stage can do 100 rows a second with each of its CPUs; the trainer was given 200."""
    infos = stages(len(split), most)
    allocation = Allocation({info.name: value for info, value in zip(infos, split, strict=True)}, cpus)
    found = tuple(
        StageSnapshot(info, value, 1, items_out=items, rows_out=items, source_rows_per_item=1.0, wall_seconds_mean=0.01)
        for info, value in zip(infos, split, strict=True)
    )
    blank = blank_snapshot(infos, allocation)
    machine = MachineSnapshot(cpus, memory_bytes=memory, memory_limit_bytes=None if memory is None else 100)
    return replace(
        blank, warm=True, stages=found, machine=machine, consumer=replace(blank.consumer, steps=200, rows=200)
    )


def wanting(tmp_path: Path, *actions: int) -> DQN:
    """A network that wants these actions most, the first one above all, whatever it sees."""
    layers = [(np.zeros(shape), np.zeros(shape[1])) for shape in pairwise(SIZES)]
    for worth, action in enumerate(reversed(actions), 1):
        layers[-1][1][action] = worth
    _weights.write(tmp_path / "dqn.npz", FORMAT, layers)
    return DQN(tmp_path / "dqn.npz")


def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(DQN())


@pytest.mark.parametrize("number", [1, 5, PLACES, PLACES + 4])
@pytest.mark.parametrize("cpus", [1, 8, 16, 128])
def test_with_any_number_of_stages_and_cpus_it_moves_one_at_most_within_the_budget(number: int, cpus: int) -> None:
    tuner, budget = DQN(), Budget(cpus)
    workload = ScriptedWorkload(stages(number), lambda now: window(list(now.concurrency.values()), cpus=cpus))
    for _ in range(30):
        workload.apply(check_complete(tuner.propose(workload.snapshot(), budget), [s.name for s in workload.stages]))
    splits = [[value or 0 for value in each.concurrency.values()] for each in workload.applied]
    assert splits[0] == [max(1, cpus // number)] * number
    for before, after in pairwise(splits):
        assert sum(abs(x - y) for x, y in zip(before, after, strict=True)) <= 1
        assert sum(after) <= max(cpus, number)
        assert min(after) >= 1
        assert after[PLACES:] == before[PLACES:]


def test_other_cpus_are_divided_anew_where_there_are_fewer_and_used_where_there_are_more(tmp_path: Path) -> None:
    tuner = wanting(tmp_path, 1)
    assert tuner.propose(window([4, 4]), Budget(8)).concurrency == {"s0": 4, "s1": 4}  # one more would be too many
    more = tuner.propose(window([4, 4]), Budget(16))
    assert (more.concurrency, more.slots) == ({"s0": 5, "s1": 4}, 16)
    less = tuner.propose(window([5, 4]), Budget(8))
    assert (less.concurrency, less.slots) == ({"s0": 4, "s1": 4}, 8)
    assert set(less.reasons.values()) == {"an even split to begin with"}
    assert tuner.propose(window([5, None]), Budget(8)).concurrency == {"s0": 4, "s1": 4}


def test_of_what_the_network_wants_it_does_the_best_that_is_allowed(tmp_path: Path) -> None:
    found = wanting(tmp_path, 2, 4, 3).propose(window([1, 3]), Budget(8))
    assert found.concurrency == {"s0": 1, "s1": 2}  # s0 has only one
    assert found.reasons["s1"] == "one less: worth 2 by the network, no change 0"
    assert wanting(tmp_path, 5).propose(window([1, 3]), Budget(8)).concurrency == {"s0": 1, "s1": 3}  # no third stage
    assert wanting(tmp_path, 3).propose(window([3, 3], most=3), Budget(8)).concurrency == {"s0": 3, "s1": 3}


def test_before_every_stage_has_finished_an_item_nothing_is_moved(tmp_path: Path) -> None:
    assert wanting(tmp_path, 1).propose(window([2, 2], items=0), Budget(8)).concurrency == {"s0": 2, "s1": 2}


def test_a_stage_that_a_user_paused_counts_as_one(tmp_path: Path) -> None:
    assert wanting(tmp_path, 3).propose(window([0, 2]), Budget(8)).concurrency == {"s0": 1, "s1": 3}


def test_what_the_network_sees() -> None:
    seen = view(window([2, 4], memory=25), Budget(8))
    shown = figures(seen, np.array([400.0]))[0]
    assert shown[:6] == pytest.approx([1, 2 / 8, 200 / (200 + 400), 1, 4 / 8, 400 / (400 + 400)])
    assert (shown[6:-2] == 0).all()
    assert shown[-2:] == pytest.approx([200 / 400, 0.75])
    cold = figures(view(blank_snapshot(stages(2), Allocation({"s0": 2, "s1": 4}, 8)), Budget(8)), np.zeros(1))[0]
    assert cold[:6] == pytest.approx([1, 2 / 8, 0, 1, 4 / 8, 0])
    assert cold[-2:] == pytest.approx([0, 1])


def test_actions_of_places_without_a_stage_are_not_allowed() -> None:
    may = allowed(view(window([2, 4]), Budget(8)))[0]
    assert may.shape == (ACTIONS,)
    assert np.flatnonzero(may).tolist() == [0, 1, 2, 3, 4]


def test_the_same_windows_give_the_same_moves_and_it_is_better_than_the_even_split_it_began_with() -> None:
    def played() -> tuple[list[Allocation], list[float]]:
        return run(DQN(), Plant([PlantStage("source", 0.002), PlantStage("work", 0.04), PlantStage("last", 0.002)]), 40)

    applied, rates = played()
    assert applied == played()[0]
    assert rates[-1] > 1.5 * rates[1]  # 2 of 8 CPUs for the only stage that costs anything
