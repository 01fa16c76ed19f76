import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.tuners._plan import Best, Limits, Line, best, enough, predict

FLAT = Line("flat", 0.01, 0.0, 0.0, 8)
BENT = Line("bent", 0.02, 0.0, 0.02 / 9, 8)
"""Fastest at 3 items at once: 90 rows/s; 55.8 at 8."""


@st.composite
def lines(draw: st.DrawFn) -> list[Line]:
    found = []
    for place in range(draw(st.integers(1, 5))):
        base = draw(st.floats(1e-4, 1.0))
        found.append(
            Line(
                f"s{place}",
                base,
                base * draw(st.sampled_from((0.0, 0.1, 1.5))),
                base * draw(st.sampled_from((0.0, 0.001, 0.05, 0.5))),
                draw(st.integers(1, 32)),
                holds_slot=draw(st.booleans()),
                process=draw(st.booleans()),
                process_bytes=draw(st.integers(0, 100)),
                lock_seconds=base * draw(st.sampled_from((0.0, 0.5))),
                cpu_seconds=base,
            )
        )
    return found


limits = st.builds(
    Limits,
    st.integers(1, 32),
    st.sampled_from((math.inf, 5.0, 500.0)),
    st.integers(1, 40),
    st.sampled_from((math.inf, 250.0)),
    st.sampled_from((math.inf, 400.0)),
    st.sampled_from((0.0, 0.5, 20.0)),
)


def test_a_line_is_fastest_at_its_peak() -> None:
    assert BENT.peak == pytest.approx(3)
    assert [BENT.best_within(most) for most in (1, 2, 3, 8)] == [1, 2, 3, 3]
    assert BENT.rate(3) == pytest.approx(90)
    assert BENT.rate(0.5) == pytest.approx(25)
    assert FLAT.peak == math.inf
    assert FLAT.best_within(8) == 8
    assert Line("serial", 0.01, 0.01, 0.0, 8).peak == 1
    assert Line("worse", 0.01, 0.02, 0.0, 8).best_within(8) == 1


@given(lines(), st.floats(0.01, 1e4))
def test_the_need_is_the_least_that_reaches_a_rate(found: list[Line], rate: float) -> None:
    for line in found:
        need = line.need(rate)
        if math.isinf(need):
            assert line.rate(line.best_within(10_000)) <= rate * (1 + 1e-6)
        else:
            assert line.rate(need) == pytest.approx(rate, rel=1e-6)
            assert need <= line.peak * (1 + 1e-6)


def test_slots_are_shared_by_all_that_hold_one() -> None:
    pair = [FLAT, Line("other", 0.03, 0.0, 0.0, 8)]
    assert best(pair, Limits(8)) == Best(pytest.approx(200), "slots")
    assert predict(pair, {"flat": 8, "other": 8}, Limits(8)) == pytest.approx(200)
    waiting = [FLAT, Line("other", 0.03, 0.0, 0.0, 60, holds_slot=False)]
    assert best(waiting, Limits(8)) == Best(pytest.approx(800), "flat")


def test_each_bound_is_named() -> None:
    assert best([FLAT, BENT], Limits(8)).bound == "bent"
    assert best([FLAT], Limits(8, trainer=10)) == Best(10, "trainer")
    locked = [Line("py", 0.01, 0.0, 0.0, 8, lock_seconds=0.005), Line("too", 0.01, 0.0, 0.0, 8, lock_seconds=0.005)]
    assert best(locked, Limits(8)) == Best(pytest.approx(100), "lock")
    process = Line("p", 0.01, 0.0, 0.0, 8, process=True, process_bytes=10)
    assert best([process], Limits(8, processes=3)) == Best(pytest.approx(300), "processes")
    assert best([process], Limits(8, process_bytes=45)) == Best(pytest.approx(400), "processes")
    assert best([process], Limits(8, process_bytes=5)).rate == pytest.approx(100)  # one is always allowed
    computing = Line("cpu", 0.01, 0.0, 0.0, 60, holds_slot=False, cpu_seconds=0.01)
    assert best([computing], Limits(8)) == Best(pytest.approx(800), "slots")


def test_memory_is_for_processes_and_for_the_items_that_a_rate_takes() -> None:
    process = Line("p", 0.01, 0.0, 0.0, 8, process=True, process_bytes=10)
    short = Limits(8, all_bytes=100, bytes_per_rate=0.1)
    assert best([process], short) == Best(pytest.approx(500), "memory")  # 5 processes, and 50 bytes of items
    rates = {number: predict([process], {"p": number}, short) for number in (2, 5, 6, 8)}
    assert rates == pytest.approx({2: 200, 5: 500, 6: 400, 8: 200})
    # However much processes hold, items get an eighth.
    assert predict([process], {"p": 8}, Limits(8, all_bytes=80, bytes_per_rate=0.1)) == pytest.approx(100)
    assert best([FLAT], Limits(8, all_bytes=100, bytes_per_rate=0.5)) == Best(pytest.approx(200), "memory")


def test_a_stage_that_may_take_more_than_its_peak_is_predicted_to_do_so() -> None:
    fast = Line("fast", 0.001, 0.0, 0.0, 8)
    assert predict([fast, BENT], {"fast": 8, "bent": 3}, Limits(8)) == pytest.approx(90)
    # With all slots but what the other needs at the rate that this comes to.
    assert predict([fast, BENT], {"fast": 8, "bent": 8}, Limits(8)) == pytest.approx(BENT.rate(7.944), rel=1e-3)
    # Nothing is pushed where the training loop takes less than the stage does at its worst.
    assert predict([fast, BENT], {"fast": 8, "bent": 8}, Limits(8, trainer=40)) == 40
    waiting = Line("waits", 0.02, 0.0, 0.02 / 9, 8, holds_slot=False)
    assert predict([waiting], {"waits": 8}, Limits(1)) == pytest.approx(BENT.rate(8))


def test_enough_has_a_margin_that_costs_nothing() -> None:
    assert enough(FLAT, 300, 0.0) == 3
    assert enough(FLAT, 300, 0.25) == 4
    assert enough(FLAT, 799, 0.25) == 8
    assert enough(FLAT, 10, 0.25) == 2
    assert enough(BENT, BENT.rate(3), 0.5) == 3  # at 4 it does less
    assert enough(BENT, BENT.rate(2), 0.5) == 3
    assert enough(BENT, 1e6, 0.5) == 3


@given(lines(), limits, st.data())
def test_nothing_is_predicted_above_the_best(found: list[Line], shared: Limits, data: st.DataObject) -> None:
    given_ = {line.name: data.draw(st.integers(1, line.most)) for line in found}
    most = best(found, Limits(shared.slots, shared.trainer))
    assert predict(found, given_, shared) <= most.rate * (1 + 1e-6)
    assert best(found, shared).rate <= most.rate * (1 + 1e-6)


@given(lines(), limits, st.floats(0, 1))
def test_enough_of_each_reaches_the_best(found: list[Line], shared: Limits, margin: float) -> None:
    most = best(found, shared)
    spare = 0.0 if shared.bytes_per_rate else margin  # processes more than needed take the place of items
    given_ = {line.name: enough(line, most.rate, spare if line.process else margin) for line in found}
    assert all(1 <= given_[line.name] <= line.most for line in found)
    assert predict(found, given_, shared) >= most.rate * (1 - 1e-6)
