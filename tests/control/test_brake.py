"""The brake: what items in flight may hold by what is measured; and the thread that asks for it."""

import itertools
import logging
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import intune
from intune import _shares
from intune._compose import build_loader
from intune._values import Event, InFlight, MemoryUse
from intune.control.brake import SECONDS, Brake, Brakes, BrakeThread, Reading, level
from intune.pipeline.options import LoaderOptions
from intune.testing import ManualClock, blank_snapshot

from .plant import BASE, Plant, Scene, run, scene

MIB = 2**20
STEP = 0.125
"""Seconds between readings: sums of them are exact."""


def reading(seconds: float, limit: int, memory: int, held: int, charged: int, *processes: int) -> Reading:
    """What is charged is worked on."""
    return Reading(seconds, limit, memory, InFlight(held, charged, charged), *processes)


def observed(*readings: tuple[float, int, int, int, int] | tuple[float, int, int, int, int, int]) -> int:
    """What may be in flight after these: (seconds, limit, memory, held, charged, and what processes hold)."""
    brake = Brake()
    return [brake.observe(reading(*each)).in_flight_bytes for each in readings][-1]


class TestWhatMayBeInFlight:
    @pytest.mark.parametrize(
        ("memory", "held", "charged", "allowed"),
        [
            (100, 0, 0, 96),  # an eighth of 870 - 100
            (500, 0, 0, 46),
            (500, 400, 500, 96),  # the same rest, though much more is used
            (880, 0, 0, 5),  # an eighth of 0.35 of the 120 that are left
            (1000, 0, 0, 0),
            (900, 900, 900, 108),
            (901, 900, 900, 0),
            (50, 80, 80, 108),  # what is held was not written yet: the rest is not below nothing
        ],
    )
    def test_of_the_first_reading(self, memory: int, held: int, charged: int, allowed: int) -> None:
        assert observed((0.0, 1000, memory, held, charged)) == allowed

    def test_it_grows_by_half_of_what_has_been_there_for_half_a_second(self) -> None:
        brake, allowed = Brake(), 0
        answers = []
        for step in range(16):  # items take up what they may at once, and there is memory for all of them
            answer = brake.observe(reading(step * STEP, 10_000, 500, 0, allowed))
            allowed = answer.in_flight_bytes
            answers.append(allowed)
        room = 8700 - 500
        first = room / 8
        grown, expected = [0.0, first], []
        while grown[-1] < room:
            grown.append(min(room, 1.5 * grown[-1] + first))
        for most in grown[1:]:
            expected += [most] * 5  # half a second, and the reading by which it is known
        assert answers == pytest.approx(expected[:16], abs=3)

    def test_processes_that_came_up_since_take_room_at_once(self) -> None:
        """What was least before they came says nothing of them."""
        brake = Brake()
        brake.observe(reading(0.0, 10_000, 500, 0, 0))
        said = brake.observe(reading(1.0, 10_000, 4500, 0, 0, 4000))
        assert brake.rest_bytes() == 4500
        assert said.in_flight_bytes == (8700 - 4500) // 8
        brake.observe(reading(2.0, 10_000, 2600, 100, 100, 2000))
        assert brake.rest_bytes() == 2500

    def test_the_growth_of_processes_is_not_laid_to_items(self) -> None:
        charged, room = 2000, 8700 - 3500
        readings = [(0.0, 10_000, 500, 0, 0), (1.0, 10_000, 500 + charged, charged, charged)]
        assert observed(*readings, *[(at, 10_000, 3500 + charged, charged, charged, 3000) for at in (1.5, 2.0)]) == (
            int(min(room, 1.5 * charged + room / 8))
        )

    def test_what_processes_will_hold_is_left_free_though_it_is_not_used_yet(self) -> None:
        brake = Brake()
        assert brake.observe(reading(0.0, 10_000, 500, 0, 0, 400, 6000)).in_flight_bytes == (8200 - 6000) // 8
        assert brake.rest_bytes() == 500
        assert brake.observe(reading(0.1, 10_000, 500, 0, 0, 400, 9000)).in_flight_bytes == 0
        assert not brake.holding

    def test_where_memory_grows_faster_than_what_is_charged_the_room_is_less(self) -> None:
        idle, busy = (0.0, 10_000, 500, 0, 0), (1.0, 10_000, 3500, 1500, 2000)
        after = (1.5, 10_000, 3500, 1500, 2000)
        # 3,000 more for 2,000 that are charged.
        assert observed(idle, busy, after) == int(min((8700 - 500) / 1.5, 1.5 * 2000 + (8700 - 500) / 8)) == 4025
        more = [(seconds, 10_000, 5500, 3900, 4000) for seconds in (2.0, 2.5)]
        assert observed(idle, busy, after, *more) == int((8700 - 500) / 1.5)

    def test_what_few_take_is_not_small_beside_what_waits(self) -> None:
        """They hold 100 of the 900 that are charged for them, and take 1,800; others hold 400, of 4,000 charged."""
        brake = Brake()
        brake.observe(Reading(0.0, 10_000, 500, InFlight()))
        few = InFlight(500, 4900, 900, 400)
        for seconds in (1.0, 1.5):
            answer = brake.observe(Reading(seconds, 10_000, 2700, few))
        assert answer.in_flight_bytes == 8200  # by what is charged for all, there is no end of room
        assert answer.working_bytes == int(1.5 * 900 + 8200 / 8)
        many = InFlight(4000, 4900, 4500, 400)
        for seconds in (2.0, 2.5):
            answer = brake.observe(Reading(seconds, 10_000, 6200, many))
        assert answer.working_bytes == int((8200 - 400) / ((2200 - 400) / (8200 / 8)))

    def test_what_rises_beside_the_loader_may_go_on_to_rise(self) -> None:
        """Items hold 1,000; all else takes 200 more each eighth of a second, and then no more."""
        brake = Brake()
        for step in range(9):
            answer = brake.observe(reading(step * STEP, 10_000, 1500 + 200 * step, 1000, 1000))
        rose = 200 * 4  # the least of the last half second against the least of the half before
        assert answer.in_flight_bytes == int(1.5 * 1000 + (8200 - rose) / 8)
        for step in range(9, 18):
            answer = brake.observe(reading(step * STEP, 10_000, 3100, 1000, 1000))
        assert answer.in_flight_bytes == int(1.5 * 1000 + 8200 / 8)

    def test_of_little_in_flight_nothing_is_learnt(self) -> None:
        """Something else took 300 while 1 was charged: not as if each byte took three hundred."""
        first = (8700 - 500) / 8
        noisy = [(0.0, 10_000, 500, 0, 0), (1.0, 10_000, 800, 1, 1)]
        assert observed(*noisy, (1.5, 10_000, 4000, 3500, 3500)) == int(1.5 * 1 + first)
        assert observed(*noisy, *[(seconds, 10_000, 4000, 3500, 3500) for seconds in (1.5, 2.0)]) == int(5250 + first)

    def test_what_was_charged_a_moment_ago_may_still_be_there(self) -> None:
        """Memory falls a second later than the charges do: that is not growth beside them."""
        readings = [(0.0, 10_000, 500, 0, 0), (1.0, 10_000, 4500, 4000, 4000)]
        within = [*readings, (2.0, 10_000, 4500, 0, 0), (2.125, 10_000, 500, 0, 0)]
        assert observed(*within) == int(1.5 * 4000 + 8200 / 8)
        later = [*readings, (2.125, 10_000, 4500, 0, 0), (2.25, 10_000, 500, 0, 0)]
        assert observed(*later) == int(8200 / (4000 / (8200 / 8)))

    @pytest.mark.parametrize(("moment", "remembered"), [(11.0, True), (11.125, False)])
    def test_the_proportion_is_forgotten_after_ten_seconds(self, moment: float, remembered: bool) -> None:
        readings = [(0.0, 1000, 100, 0, 0), (1.0, 1000, 700, 200, 200)]
        times = np.arange(1.5, moment + STEP, STEP)
        readings += [(float(seconds), 1000, 300, 200, 200) for seconds in times]
        assert times[-1] == moment
        # Three times of what is charged; without it no more than the ramp allows.
        assert observed(*readings) == (int(770 / 3) if remembered else int(1.5 * 200 + 770 / 8))

    def test_the_least_rest_is_forgotten_after_ten_seconds(self) -> None:
        brake = Brake()
        assert brake.rest_bytes() is None
        brake.observe(reading(0.0, 1000, 300, 200, 200))
        brake.observe(reading(10.0, 1000, 400, 100, 100))
        assert brake.rest_bytes() == 100
        brake.observe(reading(10.125, 1000, 400, 200, 200))
        assert brake.rest_bytes() == 200


class TestHoldingBack:
    def run(self, memory: list[int], limit: int = 1000) -> list[bool]:
        brake = Brake()
        found = []
        for step, used in enumerate(memory):
            answer = brake.observe(reading(step * STEP, limit, used, used, used))
            assert brake.holding == (answer.in_flight_bytes == 0)
            found.append(brake.holding)
        return found

    def test_past_the_hard_share_until_below_the_relaxed_one(self) -> None:
        assert self.run([901, 900, 851, 850, 849, 850]) == [True, True, True, True, False, False]
        assert self.run([900, 900, 900]) == [False, False, False]

    def test_where_the_next_step_would_pass_it(self) -> None:
        assert self.run([500, 700]) == [False, False]
        assert self.run([500, 701]) == [False, True]  # 902 would follow
        # It rose into the band, but slowly, and is let go below it only once it rises no more.
        assert self.run([500, 701, 701]) == [False, True, False]
        assert self.run([500, 701, 860, 850, 849]) == [False, True, True, True, False]

    def test_a_fall_is_no_reason_to_go_on_sooner(self) -> None:
        assert self.run([950, 910, 870]) == [True, True, True]

    def test_a_limit_that_is_lowered_and_raised(self) -> None:
        brake = Brake()
        found = []
        for step, limit in enumerate([1000, 1000, 500, 560, 589, 1000, 440]):
            answer = brake.observe(reading(step * STEP, limit, 500, 400, 400))
            found.append((brake.holding, answer.in_flight_bytes > 0))
        held = [holding for holding, _ in found]
        assert held == [False, False, True, True, False, False, True]
        assert [more for _, more in found] == [not each for each in held]

    def test_a_limit_below_what_is_needed_without_items_admits_nothing(self) -> None:
        assert observed((0.0, 1000, 300, 0, 0), (1.0, 290, 300, 0, 0)) == 0

    @pytest.mark.parametrize(("base", "usable", "relaxed", "hard"), [(0, 870, 850, 900), (800, 870, 850, 900)])
    def test_the_shares_of_a_limit(self, base: int, usable: int, relaxed: int, hard: int) -> None:
        assert [round(level(share, 1000, base)) for share in (0.87, 0.85, 0.9)] == [usable, relaxed, hard]

    def test_a_trainer_that_fills_the_memory_leaves_little_but_does_not_hold_the_loader_for_ever(self) -> None:
        """Without items 900 are used: of the 100 that are left the shares lie at 35, 25 and 50."""
        assert [round(level(share, 1000, 900)) for share in (0.87, 0.85, 0.9)] == [935, 925, 950]
        brake = Brake()
        found = []
        for step, memory in enumerate([910, 940, 955, 940, 926, 924, 920]):
            answer = brake.observe(reading(step * STEP, 1000, memory, memory - 900, memory - 900))
            found.append((brake.holding, answer.in_flight_bytes > 0))
        goes_on, held = (False, True), (True, False)
        assert found == [goes_on, held, held, held, held, goes_on, goes_on]

    def test_what_is_allowed_follows_the_limit(self) -> None:
        steady = [(step * STEP, 1000, 600, 500, 500) for step in range(8)]
        assert observed(*steady) == 770
        assert observed(*steady, (1.0, 800, 600, 500, 500)) == int(0.87 * 800 - 100)
        assert observed(*steady, (1.0, 2000, 600, 500, 500)) == int(1.5 * 500 + (0.87 * 2000 - 100) / 8)


@st.composite
def readings(draw: st.DrawFn) -> list[Reading]:
    """Some seconds of a run, of which nothing holds but that time goes on and what is held is charged."""
    seconds, found = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        limit = draw(st.sampled_from([100, 1000, 1000, 1000, 5000]))
        memory = draw(st.integers(0, int(1.1 * limit)))
        held = draw(st.integers(0, 1200))
        waiting = draw(st.integers(0, held))
        reserved = draw(st.integers(0, 300))
        flight = InFlight(held, held + reserved, held - waiting + draw(st.integers(0, reserved)), waiting)
        found.append(Reading(seconds, limit, memory, flight))
        seconds += draw(st.sampled_from([STEP, STEP, 4 * STEP, 1.0, 9.875, 10.0, 30.0]))
    return found


class TestWhateverIsRead:
    @given(readings())
    def test_never_above_what_is_planned_with_less_the_least_rest(self, given: list[Reading]) -> None:
        brake = Brake()
        for index, now in enumerate(given):
            answer = brake.observe(now).in_flight_bytes
            lately = [each for each in given[: index + 1] if now.seconds - each.seconds <= 10.0]
            rest = min(max(0, each.memory_bytes - each.flight.held_bytes) for each in lately)
            assert brake.rest_bytes() == rest
            assert 0 <= answer <= max(0.0, level(0.87, now.limit_bytes, rest) - rest)

    @given(readings())
    def test_never_above_one_and_a_half_times_what_was_charged_and_a_first_share(self, given: list[Reading]) -> None:
        brake = Brake()
        for index, now in enumerate(given):
            answer = brake.observe(now).in_flight_bytes
            ages = [(now.seconds - each.seconds, each.flight.charged_bytes) for each in given[: index + 1]]
            charged = max((size for age, size in ages if 0.5 <= age <= 10.0), default=0)
            assert answer <= 1.5 * charged + 0.87 * now.limit_bytes / 8

    @given(readings())
    @example([reading(0.0, 1000, 950, 0, 0), reading(1.0, 1000, 880, 0, 0), reading(2.0, 1000, 880, 0, 0)])
    @example([reading(0.0, 1000, 500, 0, 0), reading(1.0, 1000, 849, 0, 0), reading(2.0, 1000, 855, 0, 0)])
    def test_nothing_past_the_hard_share_until_below_the_relaxed_one(self, given: list[Reading]) -> None:
        brake, holding, before = Brake(), False, given[0]
        for index, now in enumerate(given):
            answer = brake.observe(now)
            lately = [each for each in given[: index + 1] if now.seconds - each.seconds <= 10.0]
            rest = min(max(0, each.memory_bytes - each.flight.held_bytes) for each in lately)
            rise = now.memory_bytes - before.memory_bytes if now.seconds - before.seconds <= 10.0 else 0
            most = now.memory_bytes + max(0, rise)
            if most > level(0.9, now.limit_bytes, rest):
                holding = True
            elif now.memory_bytes < level(0.85, now.limit_bytes, rest):
                holding = False
            before = now
            assert brake.holding is holding
            assert not (holding and answer.in_flight_bytes)

    @given(readings())
    def test_what_was_read_ten_seconds_ago_makes_no_difference(self, given: list[Reading]) -> None:
        """But for whether it holds back."""
        later = given[-1].seconds + 10.125
        calm = [reading(later + step * STEP, 1000, 300, 200, 250) for step in range(12)]
        one, other = Brake(), Brake()
        for now in given:
            one.observe(now)
        one.observe(calm[0])  # the rise since the last one may count once
        other.observe(calm[0])
        for now in calm[1:]:
            assert one.observe(now).in_flight_bytes == other.observe(now).in_flight_bytes > 0

    @given(readings())
    def test_memory_is_given_back_seldom_and_only_where_much_is_used(self, given: list[Reading]) -> None:
        brake, last = Brake(), None
        for now in given:
            if brake.observe(now).release:
                assert now.memory_bytes > 0.7 * now.limit_bytes
                assert last is None or now.seconds - last >= 0.5
                last = now.seconds


class TestHowOftenItLooks:
    def seconds(self, memory: list[int], *, charged: int = 0, limit: int = 1000) -> list[float]:
        """Until the next reading, after each of these a tenth of a second apart."""
        brake = Brake()
        readings = (reading(step * SECONDS, limit, used, charged, charged) for step, used in enumerate(memory))
        return [round(brake.observe(now).seconds, 3) for now in readings]

    def test_ten_times_a_second_until_a_second_is_known(self) -> None:
        assert self.seconds([100] * 12) == [0.1] * 10 + [0.45] * 2

    @pytest.mark.parametrize(
        ("memory", "seconds"), [(0, 0.5), (200, 0.4), (500, 0.25), (700, 0.15), (800, 0.1), (880, 0.1), (950, 0.1)]
    )
    def test_the_more_often_the_more_is_used(self, memory: int, seconds: float) -> None:
        """Growing by a whole limit a second from then on, memory would at most be half way to it."""
        assert self.seconds([memory] * 12)[-1] == seconds
        assert memory + 1000 * seconds <= (1000 + memory) / 2 or seconds == SECONDS

    @pytest.mark.parametrize(("rise", "seconds"), [(20, 0.39), (21, 0.1)])
    def test_more_often_for_a_second_after_a_rise(self, rise: int, seconds: float) -> None:
        found = self.seconds([200] * 20 + [200 + rise] * 20)
        assert found[20] == seconds
        assert found[-1] == pytest.approx((1 - (200 + rise) / 1000) / 2, abs=0.001)

    def test_more_often_while_more_than_half_of_what_is_allowed_is_in_flight(self) -> None:
        # A little more than (870 - 100) / 8 and half of what is there may be in flight.
        assert self.seconds([100] * 12, charged=40)[-1] == 0.45
        assert self.seconds([500] * 12, charged=500)[-1] == 0.1

    def test_the_shares_of_the_limit_are_in_their_order(self) -> None:
        rising = [
            _shares.RELEASE, _shares.CROWDED, _shares.RELAXED, _shares.BRAKE_PLANS, _shares.HARD, 1
        ]  # fmt: skip
        assert rising == sorted(set(rising))
        assert _shares.BRAKE_PLANS < _shares.GUARD_PLANS <= _shares.HARD == _shares.COMPARED


class TestSeveralLimits:
    """Of a tree and of the group that it is in, whose other members use 3,000."""

    def observed(self, *steps: tuple[float, int, int, int], group: int = 5000) -> tuple[int, Brakes]:
        """(seconds, used of the tree, used of the group, charged), with limits of 2,000 and 5,000."""
        brakes = Brakes()
        for seconds, tree, all_of_it, charged in steps:
            uses = [MemoryUse(2000, tree, "tree", chosen=True), MemoryUse(group, all_of_it, "group")]
            said = brakes.observe(seconds, uses, Work(charged))
        return said.in_flight_bytes, brakes

    def test_the_least_of_what_they_allow_holds(self) -> None:
        roomy = Brake().observe(reading(0.0, 5000, 3100, 0, 0)).in_flight_bytes
        tight = Brake().observe(reading(0.0, 2000, 100, 0, 0)).in_flight_bytes
        assert self.observed((0.0, 100, 3100, 0))[0] == min(roomy, tight) == roomy
        assert self.observed((0.0, 100, 3100, 0), group=9000)[0] == tight

    def test_the_least_that_was_used_of_one_is_no_rest_of_another(self) -> None:
        """The group becomes the nearer one as its others take more: of it 3,000 are not ours to use."""
        steady = [(step * STEP, 600, 600 if step < 8 else 4000, 500) for step in range(100)]
        allowed, brakes = self.observed(*steady)
        assert (brakes.rest_bytes("tree"), brakes.rest_bytes("group")) == (100, 3500)
        assert brakes.rest_bytes("none") is None
        assert allowed == int(level(0.87, 5000, 3500)) - 3500

    def test_it_holds_while_any_of_them_is_passed_and_names_that_one(self) -> None:
        brakes = Brakes()
        held = []
        for step, (tree, all_of_it) in enumerate([(100, 3100), (100, 4600), (1900, 4600), (1900, 3100), (100, 3100)]):
            uses = [MemoryUse(2000, tree, "tree"), MemoryUse(5000, all_of_it, "group")]
            said = brakes.observe(20.0 * step, uses, Work(1000))
            assert (said.in_flight_bytes == 0) == (brakes.holding is not None)
            held.append(brakes.holding)
        names = [None if use is None else (use.limit_from, use.used_bytes) for use in held]
        assert names == [None, ("group", 4600), ("tree", 1900), ("tree", 1900), None]

    def test_processes_count_only_where_the_limit_is_for_them(self) -> None:
        uses = [MemoryUse(9000, 900, "tree"), MemoryUse(9000, 900, "space", with_processes=False)]
        brakes = Brakes()
        brakes.observe(0.0, uses, Work())
        brakes.observe(1.0, uses, Work(processes=500))
        assert (brakes.rest_bytes("tree"), brakes.rest_bytes("space")) == (900, 900)
        assert [brake._moments[-1].rest for brake in brakes._brakes.values()] == [400, 900]

    def test_a_process_that_came_up_since_the_last_reading_counts_in_a_snapshot(self) -> None:
        uses = (MemoryUse(9000, 1400, "tree"), MemoryUse(9000, 1400, "space", with_processes=False))
        brakes = Brakes()
        brakes.observe(0.0, uses, Work(processes=500))
        blank = blank_snapshot([])
        told = brakes.told(replace(blank, machine=replace(blank.machine, memory=uses)), 1000)
        assert [use.rest_bytes for use in told.machine.memory] == [1900, 1400]

    def test_a_rest_that_is_asked_for_while_all_is_forgotten_is_not_known(self) -> None:
        """Another thread asks, between what is forgotten first and what is forgotten next."""
        brakes = Brakes()
        brakes.observe(0.0, [MemoryUse(9000, 1400, "tree")], Work())
        brakes._uses = {}
        assert brakes.rest_bytes("tree", 0) is None

    def test_a_limit_that_is_no_more_is_forgotten(self) -> None:
        brakes = Brakes()
        brakes.observe(0.0, [MemoryUse(1000, 950, "old"), MemoryUse(9000, 100, "new")], Work(900))
        assert brakes.holding is not None
        assert brakes.observe(0.1, [MemoryUse(9000, 100, "new")], Work()).in_flight_bytes > 0
        assert (brakes.holding, brakes.rest_bytes("old")) == (None, None)

    def test_a_snapshot_is_told_the_rest_of_each_and_of_the_nearest(self) -> None:
        _, brakes = self.observed((0.0, 100, 3100, 0))
        blank = blank_snapshot([])
        memory = tuple(MemoryUse(5000, 3200, name) for name in ("group", "tree", "new"))
        machine = replace(blank.machine, memory=memory, read_from={"memory_limit_bytes": "group"})
        told = brakes.told(replace(blank, machine=machine), 0)
        assert [use.rest_bytes for use in told.machine.memory] == [3100, 100, None]
        assert told.rest_bytes == 3100


class TestGivingMemoryBack:
    def times(self, memory: list[int], brake: Brake | None = None, begin: float = 0.0) -> list[float]:
        """When it is asked for."""
        brake = brake or Brake()
        times = (begin + step * STEP for step in range(len(memory)))
        wanted = [
            (now, brake.observe(reading(now, 1000, used, 100, 100)).release)
            for now, used in zip(times, memory, strict=True)
        ]
        return [now for now, release in wanted if release]

    def test_only_past_seven_tenths(self) -> None:
        assert self.times([700] * 100) == []
        assert self.times([700, 701]) == [STEP]

    def test_it_waits_twice_as_long_each_time_that_it_was_not_worth_it(self) -> None:
        assert self.times([800] * 8 * 100) == [0, 1, 3, 7, 15, 31, 61, 91]

    def test_where_it_was_worth_it_the_next_one_comes_soon(self) -> None:
        brake = Brake()
        assert self.times([800] * 8 * 16, brake) == [0, 1, 3, 7, 15]
        # 2 % of the limit came back after this one.
        assert self.times([800] * 8 * 15 + [800, *[780] * 7], brake, 16.0)[-2:] == [31.0, 31.5]

    @pytest.mark.parametrize(("gained", "next_one"), [(20, 0.5), (19, 1.0)])
    def test_worth_it_is_a_fiftieth_of_the_limit(self, gained: int, next_one: float) -> None:
        assert self.times([800, *[800 - gained] * 12])[:2] == [0.0, next_one]


def tight(number: int) -> tuple[Scene, Plant]:
    """A scene, with a limit that it would pass by itself, and that run; anywhere the largest item fits 16 times."""
    chosen = scene(number)
    free = run(chosen, number, 8.0, braked=False)
    each = max(size * (2 + scratch) for size, scratch in zip(chosen.sizes, chosen.scratch, strict=True))
    largest = each * chosen.tail[1] * (3 if chosen.burst_every else 1)
    share = float(np.random.default_rng([23, number]).uniform(0.3, 0.9))
    chosen.extra = int(max(16 * largest, share * (max(free.peaks) - BASE)))
    return chosen, free


@pytest.mark.slow
class TestTheWholeLoop:
    def test_memory_never_passes_the_limit(self) -> None:
        peaks, rates = {}, []
        for number in range(100):
            chosen, free = tight(number)
            if max(free.peaks) > BASE + chosen.extra:
                braked = run(chosen, number, 8.0)
                peaks[number] = max(braked.peaks) / (BASE + chosen.extra)
                rates.append(braked.done / free.done)
        assert len(peaks) >= 30
        assert {number: peak for number, peak in peaks.items() if peak > 1} == {}
        # It is of use, too: what there is gets used, and work goes on.
        assert np.median(list(peaks.values())) > 0.8
        assert min(rates) > 0.02
        assert np.median(rates) > 0.25

    def test_a_limit_that_falls_while_running_is_kept_within_two_seconds(self) -> None:
        """And work goes on below it; when it rises again more is in flight again."""
        passed, grown = {}, []
        for number in range(50):
            chosen, free = tight(number)
            if max(free.peaks) < BASE + 2 * chosen.extra:
                continue
            # Twice the limit for 4 s, then the limit, then twice as much again.
            braked = run(chosen, number, 16.0, lambda now, limit: limit if 4 <= now < 9 else 2 * limit - BASE)
            peaks = braked.peaks
            passed[number] = max(peaks[60:90]) / (BASE + chosen.extra)
            grown.append(max(peaks[120:]) > max(peaks[70:90]))
            assert braked.done_at[90] > braked.done_at[60]
        assert len(passed) >= 5
        assert {number: peak for number, peak in passed.items() if peak > 1} == {}
        assert sum(grown) >= 0.9 * len(grown)


# --- The thread


class Work:
    """Keeps what it was told; what it has in flight is set by a test."""

    def __init__(self, in_flight: int = 0, processes: int = 0) -> None:
        self.bytes = InFlight(in_flight, in_flight, in_flight)
        self.processes = processes
        self.epochs_ended = 0
        self.told: list[int | None] = []
        self.spares: list[int | None] = []
        self.lacking: int | None = None
        self.given_up: list[str] = []

    def in_flight(self) -> InFlight:
        return self.bytes

    def process_bytes(self) -> tuple[int, int]:
        return self.processes, 0

    def hold_back(self, in_flight_bytes: int | None, working_bytes: int | None) -> None:
        self.told.append(in_flight_bytes)

    def keep_to(self, spare_bytes: int | None) -> None:
        self.spares.append(spare_bytes)

    def lacks(self) -> int | None:
        return self.lacking

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


class Bench:
    """A brake thread with everything around it."""

    def __init__(self) -> None:
        self.work, self.clock = Work(), ManualClock()
        self.found: list[MemoryUse] | Exception = [MemoryUse(1000 * MIB, 100 * MIB)]
        self.events: list[Event] = []
        self.released = 0
        self.thread = BrakeThread(self.work, self.read, self.events.append, self.release, self.clock, self.work)

    def read(self) -> list[MemoryUse]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def release(self) -> None:
        self.released += 1

    def step(self, memory: int, in_flight: int = 0, *, limit: int = 1000) -> None:
        """A tenth of a second later, with so many MiB."""
        self.found = [MemoryUse(limit * MIB, memory * MIB, "a test")]
        self.work.bytes = InFlight(in_flight * MIB, in_flight * MIB, in_flight * MIB)
        self.clock.advance(SECONDS)
        self.thread.step()

    def pass_time(self) -> None:
        """A tenth of a second in which the thread takes one reading."""
        self.clock.wait_for_sleepers()
        self.clock.advance(SECONDS)
        self.clock.wait_for_sleepers()


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestOneStep:
    def test_what_it_says_is_applied(self, bench: Bench) -> None:
        bench.step(100)
        assert bench.work.told == [int((870 - 100) * MIB / 8)]

    def test_only_changes_of_a_fiftieth_and_more_are(self, bench: Bench) -> None:
        for _ in range(8):
            bench.step(600, 500)
        bench.work.told.clear()
        # The room is 770 MiB; a fiftieth of it is 15.4.
        for limit, applied in ((1000, []), (1017, []), (1018, [785.66]), (1000, []), (999, [769.13])):
            bench.step(600, 500, limit=limit)
            assert [round(told / MIB, 2) for told in bench.work.told if told is not None] == applied
            bench.work.told.clear()

    def test_many_small_changes_are_one_large_one(self, bench: Bench) -> None:
        for _ in range(8):
            bench.step(700, 700)
        bench.work.told.clear()
        for limit in range(1000, 1060, 2):
            bench.step(700, 700, limit=limit)
        applied = [told / MIB for told in bench.work.told if told is not None]
        assert 2 <= len(applied) <= 3
        assert all(later >= 1.02 * before for before, later in zip([870, *applied], applied, strict=False))

    def test_nothing_and_something_are_never_nearly_the_same(self, bench: Bench) -> None:
        bench.step(950, 900)
        bench.step(950, 900)
        bench.step(840, 640)
        bench.step(950, 900)
        allowed = (870 - 50) / 8 * MIB  # half a second ago nothing was in flight
        assert bench.work.told == [0, pytest.approx(allowed, abs=2), 0]

    def test_it_tells_once_that_it_holds_back_and_once_that_it_does_so_no_more(self, bench: Bench) -> None:
        for memory in (700, 880, 930, 930, 890, 840, 830, 830):
            bench.step(memory, 400)
        assert [(event.kind, event.stage) for event in bench.events] == [("braked", None)] * 2
        begun, ended = (event.detail for event in bench.events)
        assert "goes on" in begun
        assert re.search(r"880 (MiB )?of 1,000 MiB are used, 400 ", begun)
        assert re.search(r"again after 0\.4 s: 840 (MiB )?of 1,000 MiB are used, 400 ", ended)

    def test_a_limit_that_is_passed_is_told_once_until_use_was_well_below_it(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        for memory in (700, 1000, 1001, 1100, 990, 1002, 860, 1003, 849, 1010):
            bench.step(memory, 400)
        told = [event.detail for event in bench.events if event.kind == "over_limit"]
        assert [detail[:58] for detail in told] == [
            "1,001 MiB are used of a limit of 1,000 MiB (a test), 400 M",
            "1,010 MiB are used of a limit of 1,000 MiB (a test), 400 M",
        ]
        assert [record.getMessage() for record in caplog.records] == [f"A memory limit is passed: {d}" for d in told]

    def test_memory_is_given_back_when_the_brake_says_so(self, bench: Bench) -> None:
        bench.step(700)
        assert bench.released == 0
        bench.step(701)
        assert bench.released == 1

    def test_short_epochs_give_memory_back_now_and_then_only(self, bench: Bench) -> None:
        """Giving back at each end of an epoch of a second would have the next one fault all of it in again."""
        seconds = []
        for tenth in range(400):
            bench.work.epochs_ended = tenth // 10
            before = bench.released
            bench.step(100)
            seconds += [bench.clock.wall()] * (bench.released - before)
        assert len(seconds) == 3
        assert all(later - earlier >= 10 - 1e-6 for earlier, later in itertools.pairwise([0.0, *seconds]))

    def test_it_brakes_no_more_when_nothing_can_be_read(self, bench: Bench) -> None:
        bench.step(950, 900)
        bench.found = []
        bench.thread.step()
        bench.thread.step()
        assert bench.work.told == [0, None]
        bench.step(950, 900)
        assert bench.work.told == [0, None, 0]

    def test_below_a_limit_that_was_lowered_it_says_what_is_to_spare_and_gives_up_at_last(self, bench: Bench) -> None:
        bench.step(450, 300)
        bench.work.lacking = 60 * MIB
        for _ in range(110):
            bench.step(450, 300, limit=500)
        assert set(bench.work.spares) == {40 * MIB}
        assert len(bench.work.given_up) == 1
        assert (
            "520 MiB are needed for the next item alone, 150 MiB of them by all but items in flight"
            in bench.work.given_up[0]
        )
        assert bench.released >= 1
        bench.found = []
        bench.thread.step()
        assert bench.work.spares[-1] is None

    def test_where_nothing_can_be_read_from_the_start_nothing_is_applied(self, bench: Bench) -> None:
        bench.found = []
        bench.thread.step()
        assert bench.work.told == []


class TestTheThread:
    def test_it_looks_less_often_where_memory_is_far_from_its_limit(self, bench: Bench) -> None:
        bench.thread.start()
        for _ in range(10):
            bench.pass_time()
        looked = []
        bench.thread._read = lambda: (looked.append(bench.clock.wall()), bench.found)[1]  # type: ignore[func-returns-value,assignment]
        for _ in range(10):
            bench.pass_time()
        far = len(looked)
        assert 2 <= far <= 3  # every 0.45 s, seen in steps of 0.1
        bench.found = [MemoryUse(1000 * MIB, 850 * MIB)]
        for _ in range(10):
            bench.pass_time()
        bench.thread.stop()
        near = looked[far:]
        assert len(near) >= 6
        assert np.diff(near) == pytest.approx(SECONDS)

    def test_a_reading_each_tenth_of_a_second_until_it_is_stopped(self, bench: Bench) -> None:
        bench.thread.start()
        bench.thread.start()
        bench.pass_time()
        assert bench.work.told == [int(770 * MIB / 8)]
        bench.found = [MemoryUse(1000 * MIB, 950 * MIB)]
        bench.pass_time()
        assert bench.work.told[1:] == [0]
        bench.thread.stop()
        bench.thread.stop()
        bench.clock.advance(1)
        assert len(bench.work.told) == 2

    def test_it_can_be_started_again(self, bench: Bench) -> None:
        for _ in range(2):
            bench.thread.start()
            bench.pass_time()
            bench.thread.stop()
        assert bench.thread.brakes.rest_bytes("") == 100 * MIB

    def test_a_reader_that_fails_ends_it_with_a_line_and_without_a_limit(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        ended = threading.Event()
        bench.thread.start()
        bench.pass_time()
        bench.found = OSError("no such file")
        told = bench.work.hold_back
        bench.work.hold_back = lambda *sizes: (told(*sizes), ended.set())[0]  # type: ignore[method-assign,func-returns-value]
        with caplog.at_level(logging.ERROR):
            bench.clock.advance(SECONDS)
            assert ended.wait(10)
            bench.thread.stop()
        assert bench.work.told == [int(770 * MIB / 8), None]
        (line,) = caplog.records
        assert "brake failed" in line.message
        assert line.exc_info is not None
        assert str(line.exc_info[1]) == "no such file"


def test_a_loader_is_braked_before_its_first_item() -> None:
    """A tenth of a second is enough to start as many items as there are threads."""
    clock = ManualClock()
    pipe = intune.from_iterable(range(3)).map(lambda item: item)
    with build_loader(pipe, LoaderOptions(cpus=2, memory="4GiB"), clock=clock) as loader:
        assert next(iter(loader)) == 0
        held_back = loader._engine._most_bytes
    assert held_back is not None
    assert 0 < held_back <= 0.87 * 2**32 / 8
