from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.testing import ScriptedWorkload, blank_snapshot, check_tuner
from intune.tuners import Tabular

STAGES = [StageInfo("a", "source"), StageInfo("b", "map")]
BUDGET = Budget(cpus=6)


def window(allocation: Allocation) -> Snapshot:
    """Stage b is three times as slow as a: the best of 6 CPUs is 1 or 2 for a, the others for b."""
    split = [value or 3 for value in allocation.concurrency.values()]
    rate = min(split[0] / 0.01, split[1] / 0.03)
    found = tuple(StageSnapshot(info, None, 1, items_out=round(rate), source_rows_per_item=1.0) for info in STAGES)
    return replace(blank_snapshot(STAGES, allocation), warm=True, stages=found)


def run(tuner: Tabular, decisions: int) -> list[tuple[int | None, ...]]:
    workload = ScriptedWorkload(STAGES, window)
    for _ in range(decisions):
        workload.apply(tuner.propose(workload.snapshot(), BUDGET))
    return [tuple(allocation.concurrency.values()) for allocation in workload.applied]


def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(Tabular(3, explore=0.5))


def test_it_starts_from_the_even_split_and_moves_one_cpu_at_a_time() -> None:
    splits = run(Tabular(1, explore=0.5), 60)
    assert splits[0] in {(3, 3), (2, 3), (3, 2)}
    for before, after in pairwise(splits):
        assert sum(abs(x - y) for x, y in zip(before, after, strict=True)) <= 1
        assert sum(after) <= BUDGET.cpus
        assert min(after) >= 1


def test_it_learns_the_better_split_in_some_thousand_decisions() -> None:
    tuner = Tabular(0, explore=0.3, buckets=6)
    run(tuner, 3000)
    tuner._explore = 0.0
    last = run(tuner, 30)[-1]
    assert min(last[0] / 0.01, last[1] / 0.03) > 1.15 * 100  # the even split gives 100


def test_the_same_seed_gives_the_same_moves() -> None:
    assert run(Tabular(5), 50) == run(Tabular(5), 50)
    assert run(Tabular(5, explore=0.5), 50) != run(Tabular(6, explore=0.5), 50)


def test_memory_that_is_used_lowers_the_reward() -> None:
    def learnt(memory_bytes: int | None) -> float:
        tuner = Tabular(explore=0.0, learn=1.0, discount=0.0, hope=0.0)
        found = window(Allocation({"a": 3, "b": 3}, 6))
        machine = replace(found.machine, memory_bytes=memory_bytes, memory_limit_bytes=100)
        for _ in range(2):
            tuner.propose(replace(found, machine=machine), BUDGET)
        return float(max(row.max() for row in tuner._table.values()))

    assert learnt(None) == 1.0
    assert learnt(25) == 0.75


def test_a_table_is_saved_and_loaded_without_pickle(tmp_path: Path) -> None:
    tuner = Tabular(1, explore=0.0)
    run(tuner, 40)
    tuner.save(tmp_path / "table.npz")
    other = Tabular(1, explore=0.0)
    other.load(tmp_path / "table.npz")
    assert other._table.keys() == tuner._table.keys()
    assert all((other._table[state] == tuner._table[state]).all() for state in tuner._table)
    run(other, 5)


def test_files_that_hold_no_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.npz"
    with pytest.raises(PipelineError, match="only the table of one pipeline can be saved"):
        Tabular().save(path)
    for arrays in ({"x": np.zeros(3)}, {"states": np.zeros((2, 3)), "values": np.zeros((2, 9))}):
        np.savez(path, **arrays)
        with pytest.raises(PipelineError, match=r"no\.npz holds"):
            Tabular().load(path)
    np.savez(path, states=np.array([object()]), values=np.zeros((1, 1)))
    with pytest.raises(PipelineError, match="holds no table"):
        Tabular().load(path)
    path.write_bytes(b"PK but no archive")
    with pytest.raises(PipelineError, match="holds no table"):
        Tabular().load(path)


def test_a_cold_window_teaches_nothing() -> None:
    tuner = Tabular()
    cold = replace(window(Allocation({"a": 2, "b": 3}, 6)), warm=False)
    assert tuner.propose(cold, BUDGET).concurrency == {"a": 2, "b": 3}
    assert not tuner._table


def test_options_are_checked() -> None:
    with pytest.raises(PipelineError, match="buckets is 0, must be at least 1"):
        Tabular(buckets=0)
