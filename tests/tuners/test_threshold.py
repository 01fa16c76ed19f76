from collections.abc import Mapping
from dataclasses import replace

import pytest

from intune._errors import PipelineError
from intune._values import Budget, Cause, ConsumerSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot, check_tuner
from intune.tuners import Threshold

BUDGET = Budget(cpus=8)


def mindspore() -> Threshold:
    """With the numbers that MindSpore has."""
    return Threshold(start=4, step=2, difference=0.35, busy=0.75, idle=0.35, scarce=0.5, starved=0.05)


def stage(lacking: Mapping[Cause, float], busy: float, *, cpu_share: float = 1.0, **info: object) -> StageSnapshot:
    return StageSnapshot(
        StageInfo("work", "map", **info),
        None,
        1,
        items_out=10,
        wall_seconds_mean=0.01,
        cpu_seconds_mean=0.01 * cpu_share,
        busy_seconds=busy,
        wait_share=lacking,
    )


def window(found: StageSnapshot, now: int | None = 4, starved: float = 0.5) -> Snapshot:
    blank = blank_snapshot([found.info])
    return replace(
        blank,
        warm=True,
        stages=(found,),
        consumer=ConsumerSnapshot(1, 1, 0.1, starved),
        allocation=replace(blank.allocation, concurrency={"work": now}, slots=8),
    )


def decide(found: StageSnapshot, now: int | None = 4, starved: float = 0.5) -> int | None:
    return mindspore().propose(window(found, now, starved), BUDGET).concurrency["work"]


def test_it_keeps_the_contract_of_tuners() -> None:
    check_tuner(Threshold())


def test_a_stage_with_input_before_it_and_room_behind_it_is_raised() -> None:
    assert decide(stage({"slot": 0.9}, 2.0)) == 6
    assert decide(stage({"input": 0.3, "room": 0.2}, 2.0)) == 6  # 70 % before, 20 % behind
    assert decide(stage({"input": 0.5, "room": 0.1, "order": 0.1}, 2.0)) == 4  # 50 % and 20 %
    assert decide(stage({"room": 0.3, "order": 0.4}, 2.0)) == 4  # 100 % and 70 %


def test_a_stage_whose_workers_compute_all_the_time_is_raised() -> None:
    short_of_input: Mapping[Cause, float] = {"input": 0.7}
    assert decide(stage(short_of_input, 3.2)) == 6
    assert decide(stage(short_of_input, 2.9)) == 4
    assert decide(stage(short_of_input, 3.2, cpu_share=0.5)) == 4
    assert decide(stage(short_of_input, 3.2, cpu_share=0.0, waits=True)) == 6


def test_nothing_is_raised_for_a_training_loop_that_does_not_wait() -> None:
    assert decide(stage({"slot": 0.9}, 3.9), starved=0.01) == 4


def test_an_idle_stage_is_lowered_by_one() -> None:
    assert decide(stage({"input": 0.7}, 1.0)) == 3
    assert decide(stage({"room": 0.9, "input": 0.5}, 1.0)) == 3
    assert decide(stage({"room": 0.5}, 1.0), starved=0.0) == 4
    assert decide(stage({"input": 0.7}, 0.1), now=1) == 1


def test_it_starts_in_the_middle_and_stays_within_what_is_useful() -> None:
    assert decide(stage({}, 8.0), now=None) == 6
    assert decide(stage({}, 8.0), now=7) == 8
    assert decide(stage({}, 8.0, max_concurrency=3), now=None) == 3
    assert decide(stage({}, 60.0, waits=True), now=63) == 64
    cold = replace(window(stage({}, 8.0), now=None), warm=False)
    assert Threshold(start=2).propose(cold, BUDGET).concurrency == {"work": 2}


def test_reasons_say_what_was_seen() -> None:
    found = mindspore().propose(window(stage({"input": 0.3, "room": 0.2}, 2.0)), BUDGET)
    assert found.reasons == {"work": "slow: input side 70% full, output side 20%, workers use 50% of a CPU"}


def test_options_are_checked() -> None:
    with pytest.raises(PipelineError, match="start is 0 and step 8, must be at least 1"):
        Threshold(start=0)
