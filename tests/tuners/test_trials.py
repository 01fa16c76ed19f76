from dataclasses import replace

from intune._values import Budget, Snapshot, StageInfo, StageSnapshot
from intune.testing import blank_snapshot
from intune.tuners._beliefs import Belief
from intune.tuners._fit import Point, StageFit
from intune.tuners._plan import Line
from intune.tuners._trials import Ramp, Trials

BUDGET = Budget(cpus=32)


def window(*, wait: float = 1.0, **finished: int) -> Snapshot:
    """A window in which stages finished so many items."""
    stages = tuple(
        StageSnapshot(StageInfo(name, "map" if place else "source", max_concurrency=None), None, 1, items_out=items)
        for place, (name, items) in enumerate(finished.items())
    )
    blank = blank_snapshot([each.info for each in stages])
    return replace(blank, stages=stages, consumer=replace(blank.consumer, wait_share=wait))


def belief(name: str, busy: float, points: list[Point] | None = None, executor: str = "thread") -> Belief:
    fit = StageFit(forgetting=0.97, noise=0.05)
    if points:
        fit.observe(points)
    return Belief(StageInfo(name, "map", executor), fit, busy=busy)  # type: ignore[arg-type]


NOTHING: frozenset[str] = frozenset()


def test_stages_get_more_as_they_finish_as_much_as_half_of_what_they_have() -> None:
    ramp = Ramp()
    seen = [
        ramp.levels(window(a=done, b=other), BUDGET, {}, NOTHING)
        for done, other in ((0, 0), (2, 0), (4, 0), (4, 1), (0, 1), (9, 0), (9, 8))
    ]
    assert seen == [
        {"a": 4, "b": 4},
        {"a": 16, "b": 4},
        {"a": 16, "b": 4},
        {"b": 4},  # 8 since it has 16: it may have all
        {"b": 16},  # 2 in two windows
        {"b": 16},
        {},
    ]


def test_who_finishes_nothing_gets_no_more() -> None:
    ramp = Ramp()
    for _ in range(50):
        assert ramp.levels(window(a=0), BUDGET, {}, NOTHING) == {"a": 4}


def test_there_is_nothing_to_find_out_with_two_cpus_or_of_a_stage_for_one() -> None:
    assert Ramp().levels(window(a=0), Budget(cpus=2), {}, NOTHING) == {}
    seen = window(a=0, b=0)
    one = replace(seen.stages[0], info=replace(seen.stages[0].info, max_concurrency=1))
    assert Ramp().levels(replace(seen, stages=(one, seen.stages[1])), BUDGET, {}, NOTHING) == {"b": 4}


def test_a_stage_that_changed_starts_again_from_half_while_the_training_loop_waits() -> None:
    def after_change(stage: Belief, wait: float = 1.0) -> dict[str, int]:
        ramp = Ramp()
        for _ in range(5):
            ramp.levels(window(a=100), BUDGET, {}, NOTHING)
        return ramp.levels(window(a=100, wait=wait), BUDGET, {"a": stage}, frozenset({"a"}))

    assert after_change(belief("a", 20.0)) == {"a": 10}
    assert after_change(belief("a", 20.0), wait=0.01) == {}
    assert after_change(belief("a", 1.2)) == {}  # half of that tells nothing
    assert after_change(belief("a", 20.0, executor="process")) == {}  # they would have to be started again


def test_a_level_that_might_well_be_faster_is_tried_ever_more_seldom() -> None:
    trials, seen = Trials(every=2, worth=1.03), window(a=10)
    stage = belief("a", 6.0, [Point(6.0, 20, 0.06)])
    line = Line("a", *stage.fit.curve, 32)
    found = [trials.level(stage, line, 6, seen, changed=False) for _ in range(20)]
    assert [place for place, level in enumerate(found) if level] == [2, 11]
    assert {level for level in found if level} <= {5, 7}


def test_a_change_makes_trials_pay_again() -> None:
    trials, seen = Trials(every=2, worth=1.03), window(a=10)
    stage = belief("a", 6.0, [Point(6.0, 20, 0.06)])
    line = Line("a", *stage.fit.curve, 32)
    found = [trials.level(stage, line, 6, seen, changed=place == 4) for place in range(8)]
    assert [place for place, level in enumerate(found) if level] == [2, 5]


def test_nothing_is_tried_where_all_is_known_or_fed_or_trials_are_off() -> None:
    known = belief("a", 3.0, [Point(float(n), 10_000, 0.02 * (1 + n * (n - 1) / 9)) for n in (1, 2, 3, 4, 5)])
    line = Line("a", *known.fit.curve, 32)
    assert not any(Trials(1, 1.03).level(known, line, 3, window(a=1), changed=True) for _ in range(5))
    rough = belief("a", 6.0, [Point(6.0, 20, 0.06)])
    line = Line("a", *rough.fit.curve, 32)
    off, fed = Trials(0, 1.03), Trials(1, 1.03)
    for _ in range(5):
        assert off.level(rough, line, 6, window(a=1), changed=True) is None
        assert fed.level(rough, line, 6, window(a=1, wait=0.01), changed=True) is None


def test_no_level_above_what_is_useful_or_below_one_is_tried() -> None:
    rough = belief("a", 1.0, [Point(1.0, 20, 0.06)])
    only = Line("a", *rough.fit.curve, 1)
    assert not any(Trials(1, 1.03).level(rough, only, 1, window(a=1), changed=True) for _ in range(5))
