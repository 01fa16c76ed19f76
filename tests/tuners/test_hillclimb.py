from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, ConsumerSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot, check_tuner
from intune.tuners import HillClimb
from intune.tuners.hillclimb import Mode, latency

MODES: tuple[Mode, ...] = ("climb", "max-parallelism", "stage-based")


def stage(name: str, seconds: float | None, *, rows: float = 1.0, item_bytes: float = 0, **info: object):
    return StageSnapshot(
        StageInfo(name, "map", **info),
        None,
        1,
        items_out=10,
        source_rows_per_item=rows,
        wall_seconds_mean=seconds,
        item_bytes_mean=item_bytes,
    )


def window(stages: Sequence[StageSnapshot], trainer: float = 0.0) -> Snapshot:
    blank = blank_snapshot([stage.info for stage in stages])
    consumer = ConsumerSnapshot(100, 100, 0.01, wait_share=1 - 100 * trainer)
    return replace(blank, warm=True, stages=tuple(stages), consumer=consumer)


def propose(mode: Mode, *stages: StageSnapshot, cpus: int = 8, trainer: float = 0.0, **budget: int) -> list[int | None]:
    found = HillClimb(mode).propose(window(stages, trainer), Budget(cpus, **budget))
    assert found.slots == cpus
    return list(found.concurrency.values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_keeps_the_contract_of_tuners(mode: Mode) -> None:
    check_tuner(HillClimb(mode))


def test_another_mode_is_refused() -> None:
    with pytest.raises(PipelineError, match="mode 'hill': give one of 'climb', 'max-parallelism', 'stage-based'"):
        HillClimb("hill")  # type: ignore[arg-type]


def test_a_buffer_before_a_stage_hides_the_stages_before_it() -> None:
    one = np.array([1, 1])
    assert latency(np.array([3.0]), np.array([1])) == 3
    # As fast as each other and one place: the buffer is empty half of the time.
    assert latency(np.array([2.0, 2.0]), one) == pytest.approx(2 + 2 / 2)
    # Twice as fast as what it feeds: (1 - 2) / (1 - 2 ** 2); twice as slow: (1 - 1/2) / (1 - 1/4).
    assert latency(np.array([1.0, 2.0]), one) == pytest.approx(2 + 1 / 3)
    assert latency(np.array([2.0, 1.0]), one) == pytest.approx(1 + 2 * 2 / 3)
    assert latency(np.array([1.0, 2.0]), np.array([1, 2])) == pytest.approx(1 + 1 / 3)
    assert latency(np.array([1.0, 0.0]), one) == pytest.approx(1.0)
    assert latency(np.array([0.0, 1.0]), one) == pytest.approx(1.0)
    assert latency(np.array([2.0, 2.0]), np.array([[1, 1], [1, 2]])).shape == (2,)


def test_climbing_ends_where_the_latency_is_that_of_all_cpus() -> None:
    found = propose("climb", stage("a", 0.02), stage("b", 0.01))
    assert found == [6, 4]
    seconds = np.array([0.02, 0.01])
    assert latency(seconds, np.array(found)) < 0.03 / 8 <= latency(seconds, np.array([5, 4]))
    # It may pass the number of CPUs, as tf.data does: what ends it is the latency and not the sum.
    assert sum(found) > 8


def test_climbing_raises_what_lowers_the_latency_most() -> None:
    a, b = propose("climb", stage("a", 0.001), stage("b", 0.1))
    assert a == 1
    assert b == 8


@pytest.mark.parametrize(("mode", "split"), [("climb", [1, 8]), ("max-parallelism", [8, 8]), ("stage-based", [1, 8])])
def test_a_serial_stage_stays_at_one(mode: Mode, split: list[int]) -> None:
    assert propose(mode, stage("a", 0.01), stage("b", 0.1)) == split
    assert propose(mode, stage("a", 0.01, max_concurrency=1), stage("b", 0.1))[0] == 1


def test_max_parallelism_knows_no_cpu_limit() -> None:
    stages = [stage(f"s{place}", 0.01) for place in range(6)]
    assert propose("max-parallelism", *stages) == [8] * 6
    assert propose("max-parallelism", stage("a", 0.01, max_concurrency=3), stage("b", 1e-9)) == [3, 8]


@pytest.mark.parametrize("mode", ["climb", "max-parallelism"])
def test_a_full_memory_ends_the_climb(mode: Mode) -> None:
    stages = stage("a", 0.02, item_bytes=100), stage("b", 0.02, item_bytes=100)
    found = propose(mode, *stages, memory_bytes=1000)  # half of it for buffers: the sixth element passes it
    assert sum(x or 0 for x in found) == 6


def test_stage_based_raises_the_slowest_until_the_training_loop_is_slower() -> None:
    assert propose("stage-based", stage("a", 0.02), stage("b", 0.01), trainer=0.005) == [4, 2]
    assert propose("stage-based", stage("a", 0.02), stage("b", 0.01), trainer=0.009) == [3, 2]
    # Without a training loop to wait for it ends where the slowest cannot be raised.
    assert propose("stage-based", stage("a", 0.02), stage("b", 0.01)) == [8, 4]
    assert propose("stage-based", stage("a", 0.02, max_concurrency=2), stage("b", 0.03)) == [2, 3]


def test_stage_based_changes_nothing_where_memory_is_full() -> None:
    stages = stage("a", 0.02, item_bytes=100), stage("b", 0.02, item_bytes=100)
    assert propose("stage-based", *stages, memory_bytes=1000) == [None, None]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_the_source_are_compared_and_the_unmeasured_left_open(mode: Mode) -> None:
    direct = propose(mode, stage("a", 0.01), stage("b", 0.03))
    assert propose(mode, stage("a", 0.01), stage("b", 0.3, rows=10.0)) == direct
    assert propose(mode, stage("a", 0.01), stage("x", None), stage("b", 0.03)) == [direct[0], None, direct[1]]


def test_service_times_are_a_running_mean() -> None:
    tuner, budget = HillClimb("stage-based", newest=0.5), Budget(8)
    tuner.propose(window([stage("a", 0.01)], trainer=0.005), budget)
    found = tuner.propose(window([stage("a", 0.03)], trainer=0.005), budget)
    assert found.concurrency == {"a": 4}  # (0.01 + 0.03) / 2 is four times what the training loop needs
    assert found.reasons == {"a": "stage-based: 20 ms a source row / 4"}


def test_a_cold_window_changes_nothing() -> None:
    cold = replace(window([stage("a", 0.01)]), warm=False, allocation=Allocation({"a": 3}, 8))
    assert HillClimb().propose(cold, Budget(8)).concurrency == {"a": 3}
