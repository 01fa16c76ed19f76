"""Families of scenarios: each seed gives one that can be run, always the same; what is held out is in no other."""

import pytest

from intune._errors import PipelineError
from intune.sim import FAMILIES, HELD_OUT, TRAINED, Scenario, scenario

SEEDS = range(200)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_seed_gives_one_that_is_always_the_same(family: str) -> None:
    drawn = [scenario(family, seed) for seed in SEEDS]
    assert [each.name for each in drawn] == [f"{family}-{seed}" for seed in SEEDS]
    assert drawn == [scenario(family, seed) for seed in SEEDS]
    assert len({each.stages for each in drawn}) == len(drawn)
    for each in drawn:
        _check_valid(each)


def _check_valid(drawn: Scenario) -> None:
    machine, trainer = drawn.machine, drawn.trainer
    times = [change.seconds for change in drawn.changes]
    assert times == sorted(times)
    assert min(trainer.device_seconds, trainer.cpu_seconds, trainer.lock_seconds) >= 0
    for stage in drawn.stages:
        amounts = (stage.wait_seconds, stage.cpu_seconds, stage.lock_seconds, stage.serial_seconds, stage.row_bytes)
        assert min(*amounts, stage.moved_bytes, stage.contention, stage.coherency, stage.scratch_bytes) >= 0
        assert stage.rows >= 1
        assert stage.kept > 0
    if machine.memory_bytes is not None:
        residents = sum(each.resident_bytes for each in drawn.stages if each.executor == "process")
        items = 12 * max(each.row_bytes * 64 for each in drawn.stages[:1])
        assert machine.memory_bytes >= machine.baseline_bytes + residents + items


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_nothing_that_is_held_out_is_trained_on(family: str) -> None:
    for seed in SEEDS:
        drawn = scenario(family, seed)
        assert len(drawn.stages) <= 8
        for stage in drawn.stages:
            assert stage.disk_bytes == 0
            assert stage.tail_factor <= 20
            if stage.executor == "process":
                assert stage.start_seconds <= 2
            else:
                assert stage.lock_seconds == 0


def test_what_is_held_out_has_what_it_is_named_for() -> None:
    def some(family: str) -> list[Scenario]:
        return [scenario(family, seed) for seed in range(20)]

    assert not set(TRAINED) & set(HELD_OUT)
    assert all(any(s.lock_seconds and s.executor == "thread" for s in d.stages) for d in some("interpreter-lock"))
    assert all(drawn.stages[0].disk_bytes for drawn in some("disk-limited"))
    assert all(any(s.tail_factor >= 20 for s in drawn.stages) for drawn in some("ordered-stragglers"))
    assert all(any(s.start_seconds >= 5 for s in drawn.stages) for drawn in some("slow-process-start"))
    assert all(9 <= len(drawn.stages) <= 12 for drawn in some("many-stages"))
    strongest = max(s.coherency for drawn in some("strong-contention") for s in drawn.stages)
    assert strongest > max(s.coherency for drawn in some("wild") for s in drawn.stages)


def test_a_family_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(PipelineError, match=r"no family 'wlid': there are \['bandwidth', .*\]; did you mean 'wild'\?$"):
        scenario("wlid", 0)
    with pytest.raises(PipelineError, match=r"no family 'xyz': there are \[.*\]$"):
        scenario("xyz", 0)
