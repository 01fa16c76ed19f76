"""Each memory limit with what is used of it, for whoever plans with it."""

from dataclasses import replace

import pytest

from intune._values import Budget, MemoryUse, memory_uses
from intune.testing import blank_snapshot

BUDGET = Budget(cpus=2, memory_bytes=1000)


@pytest.mark.parametrize(
    ("used", "rest", "in_flight", "told"),
    [(700, 300, 200, 300), (700, None, 200, 500), (700, None, None, 700), (100, None, 200, 0), (None, None, 200, None)],
)
def test_a_rest_that_is_not_known_is_what_items_in_flight_do_not_hold(
    used: int | None, rest: int | None, in_flight: int | None, told: int | None
) -> None:
    blank = replace(blank_snapshot([]), in_flight_bytes=in_flight)
    use = MemoryUse(1000, used, "group", rest_bytes=rest)
    several = replace(blank, machine=replace(blank.machine, memory=(use, replace(use, limit_from="tree", chosen=True))))
    assert [each.rest_bytes for each in memory_uses(several, BUDGET)] == [told, told]
    machine = replace(blank.machine, memory_bytes=used, memory_limit_bytes=800)
    (one,) = memory_uses(replace(blank, machine=machine, rest_bytes=rest), BUDGET)
    assert (one.limit_bytes, one.rest_bytes) == (800, told)


def test_the_limit_that_a_user_chose_is_as_the_budget_says() -> None:
    blank = blank_snapshot([])
    memory = MemoryUse(500, 100, "tree", chosen=True), MemoryUse(500, 100, "group")
    snapshot = replace(blank, machine=replace(blank.machine, memory=memory))
    assert [use.limit_bytes for use in memory_uses(snapshot, BUDGET)] == [1000, 500]
    assert memory_uses(snapshot, replace(BUDGET, memory_bytes=None)) == ()
