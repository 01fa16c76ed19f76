"""Limits that are lowered while a loader runs: what may be taken below them, and when it is said that nothing can."""

import re

import numpy as np
import pytest

from intune._values import MemoryUse
from intune.control.lowered import STUCK_READINGS, STUCK_SECONDS, LoweredLimits

MIB = 2**20
STEP = 0.125
"""Seconds between readings: sums of them are exact."""


class Work:
    """Lacks so many MiB wherever fewer are to spare; keeps what it was told."""

    def __init__(self, needs: int | None = None) -> None:
        self.needs = needs
        self.spare: list[int | None] = []
        self.given_up: list[str] = []

    def keep_to(self, spare_bytes: int | None) -> None:
        self.spare.append(spare_bytes)

    def lacks(self) -> int | None:
        spare = self.spare[-1]
        short = self.needs is not None and spare is not None and self.needs * MIB > spare
        return self.needs * MIB if short and self.needs is not None else None

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


def use(limit: int, used: int, name: str = "group", *, resident: bool = True) -> MemoryUse:
    return MemoryUse(limit * MIB, used * MIB, name, with_processes=resident)


class Bench:
    """Readings an eighth of a second apart."""

    def __init__(self, needs: int | None = None) -> None:
        self.work = Work(needs)
        self.limits, self.now = LoweredLimits(self.work), 0.0

    def read(self, *uses: MemoryUse, held: int = 0, seconds: float = STEP) -> bool:
        self.now += seconds
        return self.limits.observe(self.now, uses, held * MIB)


class TestWhatIsToSpare:
    def test_a_limit_that_was_there_from_the_start_keeps_nothing_back(self) -> None:
        bench = Bench(needs=10**6)
        for used in (100, 990, 1100):
            assert not bench.read(use(1000, used))
        assert (bench.work.spare, bench.work.given_up) == ([], [])

    def test_one_that_was_lowered_leaves_what_is_not_used_up_to_a_fiftieth_below_it(self) -> None:
        bench = Bench()
        for limit, used in ((1000, 100), (500, 100), (500, 480), (500, 495), (400, 100)):
            bench.read(use(limit, used))
        assert bench.work.spare == [390 * MIB, 10 * MIB, -5 * MIB, 292 * MIB]

    def test_told_at_each_reading_as_what_was_taken_since_the_last_one_counts(self) -> None:
        bench = Bench()
        for limit in (1000, 500, 500, 500):
            bench.read(use(limit, 100))
        assert bench.work.spare == [390 * MIB] * 3

    def test_once_it_is_what_it_was_nothing_is_kept_back(self) -> None:
        bench = Bench()
        for limit in (1000, 500, 999, 1000, 1000, 2000, 1500):
            bench.read(use(limit, 100))
        assert [None if spare is None else round(spare / MIB) for spare in bench.work.spare] == [390, 879, None, 1370]

    def test_one_that_was_set_later_counts_as_lowered(self) -> None:
        bench = Bench()
        bench.read(use(10_000, 100, "machine"))
        bench.read(use(10_000, 100, "machine"), use(500, 100))
        assert bench.work.spare == [390 * MIB]

    def test_the_one_with_the_least_to_spare_holds(self) -> None:
        bench = Bench()
        bench.read(use(1000, 100), use(2000, 900, "machine"))
        bench.read(use(900, 100), use(1000, 900, "machine"))
        assert bench.work.spare == [80 * MIB]

    def test_address_space_is_not_looked_at(self) -> None:
        """Much of what is taken of it may be free."""
        bench = Bench(needs=500)
        for limit in (1000, 500):
            bench.read(use(limit, 450, "RLIMIT_AS", resident=False))
        assert bench.work.spare == []

    def test_where_nothing_is_read_any_more_nothing_is_kept_back(self) -> None:
        bench = Bench()
        bench.read(use(1000, 100))
        bench.read(use(500, 100))
        bench.limits.forget()
        bench.limits.forget()
        assert bench.work.spare == [390 * MIB, None]
        bench.read(use(500, 100))
        assert bench.work.spare[2:] == [390 * MIB]  # it still is lower than it was


class TestGivingUp:
    def test_after_ten_seconds_in_which_nothing_could_go_on(self) -> None:
        bench = Bench(needs=41)
        bench.read(use(1000, 100))
        times = []
        for _ in range(120):
            bench.read(use(500, 450), held=300)
            times += [bench.now] * (len(bench.work.given_up) - len(times))
        assert times == [2 * STEP + STUCK_SECONDS]

    def test_the_error_has_the_figures(self) -> None:
        bench = Bench(needs=41)
        bench.read(use(1000, 100))
        for _ in range(82):
            bench.read(use(500, 450), held=300)
        (why,) = bench.work.given_up
        came, needed = (
            "was lowered from 1,000 MiB to 500 MiB",
            "501 MiB are needed for the next item alone, 150 MiB of them",
        )
        assert re.search(rf"\(group\) {came} .* {needed}", why)

    def test_of_a_limit_that_was_set_there_is_none_before(self) -> None:
        bench = Bench(needs=41)
        bench.read(use(9000, 100, "machine"))
        for _ in range(82):
            bench.read(use(9000, 450, "machine"), use(500, 450))
        (why,) = bench.work.given_up
        assert "(group) was set to 500 MiB" in why

    @pytest.mark.parametrize("good", [use(1000, 450), use(500, 440), use(532, 450)], ids=["raised", "freed", "enough"])
    def test_a_single_reading_with_room_begins_the_time_anew(self, good: MemoryUse) -> None:
        bench = Bench(needs=41)
        bench.read(use(1000, 100))
        for _ in range(3):
            for _ in range(80):
                bench.read(use(500, 450))
            bench.read(good)
        assert bench.work.given_up == []

    def test_late_readings_do_not_stand_for_many(self) -> None:
        bench = Bench(needs=41)
        bench.read(use(1000, 100))
        for count in range(1, STUCK_READINGS):
            bench.read(use(500, 450), seconds=5.0)
            assert bench.work.given_up == [], count
        bench.read(use(500, 450), seconds=5.0)
        assert len(bench.work.given_up) == 1

    def test_memory_is_asked_back_once_before_that(self) -> None:
        bench = Bench(needs=41)
        bench.read(use(1000, 100))
        asked = [bench.read(use(500, 450)) for _ in range(20)]
        assert asked == [True] + [False] * 19

    def test_never_where_something_else_is_missing(self) -> None:
        rng, bench = np.random.default_rng(0), Bench(needs=None)
        bench.read(use(1000, 100))
        for _ in range(500):
            assert not bench.read(use(int(rng.integers(100, 1000)), int(rng.integers(0, 1000))))
        assert bench.work.given_up == []
