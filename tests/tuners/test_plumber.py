import builtins
import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot, check_tuner
from intune.tuners import Plumber

pytest.importorskip("scipy")


def stage(name: str, cpu: float | None, *, wall: float | None = None, rows: float = 1.0, **info: object):
    return StageSnapshot(
        StageInfo(name, "map", **info),
        None,
        1,
        items_out=100,
        source_rows_per_item=rows,
        cpu_seconds_mean=cpu,
        wall_seconds_mean=cpu if wall is None else wall,
    )


def window(*stages: StageSnapshot, read_bytes: int | None = None) -> Snapshot:
    blank = blank_snapshot([stage.info for stage in stages])
    machine = replace(blank.machine, read_bytes=read_bytes)
    return replace(blank, warm=True, stages=stages, machine=machine, allocation=replace(blank.allocation, slots=8))


def propose(*stages: StageSnapshot, cpus: int = 8, **options: object) -> list[int | None]:
    found = Plumber(**options).propose(window(*stages), Budget(cpus))
    assert found.slots == cpus
    return list(found.concurrency.values())


@pytest.mark.slow
def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(Plumber())
    check_tuner(Plumber(every=1, rounding="nearest", disk_bytes_per_second=1e8))


def test_cores_are_divided_by_cpu_cost() -> None:
    assert propose(stage("a", 0.01), stage("b", 0.03)) == [2, 6]
    assert propose(stage("a", 0.01, rows=1.0), stage("b", 0.1, rows=10.0)) == [4, 4]
    # CPU seconds count, not wall seconds, but for a stage that waits, which needs no core.
    assert propose(stage("a", 0.01, wall=0.5), stage("b", 0.03)) == [2, 6]
    assert propose(stage("a", 0.0001, wall=0.05, waits=True), stage("b", 0.01)) == [40, 8]


def test_a_limited_stage_leaves_the_others_no_more_than_it_needs() -> None:
    assert propose(stage("a", 0.03), stage("b", 0.01, max_concurrency=1), cpus=32) == [3, 1]


def test_fractions_are_rounded() -> None:
    thirds = stage("a", 0.014), stage("b", 0.016)  # 3.73 and 4.27 cores
    assert propose(*thirds) == [4, 5]
    assert propose(*thirds, rounding="nearest") == [4, 4]
    assert propose(stage("a", 0.0001), stage("b", 0.03), rounding="nearest")[0] == 1


def test_a_disk_bounds_the_rate_where_it_is_known() -> None:
    stages = stage("a", 0.01), stage("b", 0.03)
    tuner = Plumber(disk_bytes_per_second=5000)
    # 10,000 bytes for 100 rows: 50 rows/s is all that the disk gives.
    found = tuner.propose(window(*stages, read_bytes=10_000), Budget(8))
    assert found.concurrency == {"a": 1, "b": 2}
    assert found.reasons["b"] == "1.50 cores for 50 source rows/s"
    assert tuner.propose(window(*stages), Budget(9)).concurrency == {"a": 3, "b": 7}


def test_it_decides_anew_only_now_and_then_but_at_once_for_another_budget() -> None:
    tuner = Plumber(every=3)
    first = tuner.propose(window(stage("a", 0.01), stage("b", 0.03)), Budget(8))
    other = window(stage("a", 0.03), stage("b", 0.01))
    assert [tuner.propose(other, Budget(8)).concurrency == first.concurrency for _ in range(3)] == [True, True, False]
    assert tuner.propose(other, Budget(16)).concurrency == {"a": 12, "b": 4}


def test_too_little_measured_leaves_it_as_it_is() -> None:
    assert propose(stage("a", None), stage("b", 0.03)) == [None, 8]
    cold = replace(window(stage("a", 0.1)), warm=False, allocation=Allocation({"a": 2}, 8))
    assert Plumber().propose(cold, Budget(8)).concurrency == {"a": 2}
    assert propose(stage("a", 0.0)) == [None]


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 32)), min_size=1, max_size=8), st.integers(1, 64))
def test_the_program_agrees_with_the_closed_form(stages: list[tuple[float, int]], cpus: int) -> None:
    found = propose(*(stage(f"s{k}", cost, max_concurrency=most) for k, (cost, most) in enumerate(stages)), cpus=cpus)
    rate = min([cpus / sum(cost for cost, _ in stages), *(min(most, cpus) / cost for cost, most in stages)])
    for (cost, _), given_ in zip(stages, found, strict=True):
        assert given_ is not None
        assert abs(given_ - rate * cost) < 1 + 1e-4 or given_ == 1
        assert given_ >= math.floor(rate * cost)


def test_options_are_checked() -> None:
    with pytest.raises(PipelineError, match="every is 0, must be at least 1"):
        Plumber(every=0)
    with pytest.raises(PipelineError, match="rounding 'down': give 'nearest' or 'up'"):
        Plumber(rounding="down")  # type: ignore[arg-type]


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PipelineError, match=r"needs scipy: pip install 'intune\[sim\]'"):
        Plumber()
