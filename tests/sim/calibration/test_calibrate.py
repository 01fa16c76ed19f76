"""A calibrated simulator says what allocations that were never tried would give, and refuses what it cannot know."""

import itertools
import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import intune
from intune._errors import PipelineError, SourceError
from intune._values import Allocation, Budget, Snapshot
from intune.sim import (
    Calibration,
    Change,
    Scenario,
    SimMachine,
    SimStage,
    Trace,
    calibrate,
    calibrate_journal,
    play,
    scenario,
)
from intune.sim.calibration.calibrating import calibrate_lines
from intune.sim.calibration.seen import windows
from intune.sim.calibration.sweep import Sweep
from intune.tuners import Model, Shared, Static

PLAIN = Scenario(
    "plain",
    (
        SimStage("read", "source", cpu_seconds=0.005, rows=64),
        SimStage("bent", cpu_seconds=0.08, coherency=0.02),
        SimStage("work", cpu_seconds=0.06),
        SimStage("batch", "batch", cpu_seconds=0.002, rows=128),
    ),
    SimMachine(cpus=8),
)


def swept(drawn: Scenario, decisions: int = 45) -> Trace:
    return play(drawn, Sweep(2.0), decisions)


@pytest.fixture(scope="module")
def lines() -> Sequence[Any]:
    return swept(PLAIN).lines


@pytest.fixture(scope="module")
def plain(lines: Sequence[Any]) -> Calibration:
    return calibrate_lines(lines)


def measured(drawn: Scenario, concurrency: dict[str, int]) -> float:
    return play(drawn, Static(concurrency), 20).rows_per_second(6)


def untried(drawn: Scenario, trace: Trace, seen: dict[str, int]) -> Iterator[dict[str, int]]:
    """Limits that the sweep did not hold."""
    random = np.random.default_rng(drawn.seed)
    held = [each.concurrency for each in trace.intervals]
    names = [stage.name for stage in drawn.stages]
    while True:
        drawn_levels = {name: round(drawn.machine.cpus ** random.random()) for name in names if random.random() > 0.3}
        limited = {name: min(2 * seen[name], value) for name, value in drawn_levels.items()}
        if limited and {**dict.fromkeys(names), **limited} not in held:
            yield limited


class TestAnswers:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("family", "seed"),
        [("bending", 0), ("serial", 0), ("processes", 0), ("network", 0), ("slow-trainer", 0), ("rows", 1)],
    )
    def test_they_are_right_within_a_tenth_on_allocations_never_tried(self, family: str, seed: int) -> None:
        drawn = scenario(family, seed)
        trace = swept(drawn)
        found = calibrate_lines(trace.lines)
        alone = replace(found, fits=found.fits[:1])  # the interval takes several times as long
        asked = list(itertools.islice(untried(drawn, trace, dict(found.seen)), 3))
        off = [alone.what_if(concurrency=each).rows_per_second / measured(drawn, each) - 1 for each in asked]
        assert statistics.median(map(abs, off)) < 0.1, off

    def test_a_larger_machine(self, plain: Calibration) -> None:
        larger = replace(PLAIN, machine=replace(PLAIN.machine, cpus=12))
        asked = {"bent": 5}
        said = replace(plain, fits=plain.fits[:1]).what_if(cpus=12, tuner=Static(asked))
        assert said.rows_per_second == pytest.approx(measured(larger, asked), rel=0.1)

    def test_the_interval_has_the_truth_and_is_not_everything(self, plain: Calibration) -> None:
        asked = {"bent": 3, "work": 7}
        said = plain.what_if(concurrency=asked)
        assert said.low <= measured(PLAIN, asked) <= said.high
        assert said.low < said.rows_per_second < said.high < 1.5 * said.low

    def test_another_tuner_by_name_or_as_an_object_that_stays_as_it_is(self, plain: Calibration) -> None:
        alone = replace(plain, fits=plain.fits[:1])
        model = Model()
        by_name, by_object = alone.what_if(tuner="model"), alone.what_if(tuner=model)
        assert by_name == by_object
        assert not model.beliefs
        truth = play(PLAIN, "model", 45).rows_per_second(30)
        assert by_name.rows_per_second == pytest.approx(truth, rel=0.1)

    def test_the_best_of_it_is_a_scenario(self, plain: Calibration) -> None:
        assert [stage.name for stage in plain.scenario.stages] == ["read", "bent", "work", "batch"]
        bent, work = plain.scenario.stages[1:3]
        assert bent.coherency == pytest.approx(0.02, rel=0.3)
        assert (work.contention, work.coherency) == (0, 0)
        assert work.cpu_seconds == pytest.approx(0.06, rel=0.05)


class TestRefused:
    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"cpus": 17}, "cpus=17 is more than 2 times the 8 CPUs that it was measured on: ask for at most 16, or "),
            ({"cpus": 0}, "cpus must be a whole number of at least 1, got 0"),
            ({"cpus": True}, "cpus must be a whole number of at least 1, got True"),
            ({"cpus": 2.5}, "cpus must be a whole number of at least 1, got 2.5"),
            ({"concurrency": {"work": 0}}, "work must be a whole number of at least 1, got 0"),
            ({"concurrency": {"wrok": 2}}, r"no stage 'wrok': this pipeline has \[.*\]; did you mean 'work'\?"),
            ({"concurrency": {"work": 2}, "tuner": "model"}, "give tuner or concurrency, not both"),
            ({"tuner": "modle"}, "unknown tuner 'modle'"),
            ({"tuner": Model}, "Model is a class"),
        ],
    )
    def test_what_is_wrong_is_said(self, plain: Calibration, asked: dict[str, Any], said: str) -> None:
        with pytest.raises(PipelineError, match=said):
            plain.what_if(**asked)

    def test_more_than_twice_of_what_a_stage_was_seen_working_on(self) -> None:
        held = calibrate_lines(play(PLAIN, Static({"bent": 2}), 30).lines)
        with pytest.raises(PipelineError, match="stage 'bent': 5 at once is more than 2 times the 2 that it was seen"):
            held.what_if(concurrency={"bent": 5})
        held.what_if(concurrency={"bent": 4})

    def test_what_a_stage_would_come_to(self) -> None:
        held = calibrate_lines(play(PLAIN, Static({"bent": 2}), 30).lines)
        assert held.seen["bent"] == 2
        with pytest.raises(
            PipelineError, match=r"stage 'bent' would work on \d items at once, more than 2 times the 2"
        ):
            held.what_if(tuner=Shared())

    def test_a_tuner_that_fails(self, plain: Calibration) -> None:
        class Fails:
            def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
                raise ZeroDivisionError("no")

        with pytest.raises(PipelineError, match="the tuner failed, so there is no answer: ZeroDivisionError: no"):
            plain.what_if(tuner=Fails())


class TestWhatWasRun:
    """It is answered as it was measured, whatever else is refused."""

    def test_the_default_question_is_what_ran_best(self, plain: Calibration) -> None:
        said = plain.what_if()
        assert said.measured_seconds == plain.best.seconds
        assert said.rows_per_second == max(each.measured for each in plain.held)
        assert said.low < said.rows_per_second < said.high

    @pytest.mark.parametrize("tuner", ["model", "shared"])
    def test_every_allocation_that_was_held(self, tuner: str) -> None:
        """Also where a stage that waits was open, and might have more at once than it ever came to."""
        fetch = SimStage("fetch", wait_seconds=0.2, waits=True)
        drawn = replace(PLAIN, stages=(PLAIN.stages[0], fetch, *PLAIN.stages[2:]))
        found = calibrate_lines(play(drawn, tuner, 40).lines)
        assert found.seen["fetch"] < 60
        for one in found.held:
            limits = {name: value for name, value in one.concurrency.items() if value is not None}
            said = found.what_if(concurrency=limits) if limits else found.what_if(tuner="shared")
            assert (said.rows_per_second, said.measured_seconds) == (one.measured, one.seconds)

    def test_more_slots_are_another_question(self, plain: Calibration) -> None:
        assert replace(plain, fits=plain.fits[:1]).what_if(cpus=12).measured_seconds is None


class TestDoesNotFit:
    """What a simulator says of what was measured is held against that, before anything else is asked of it."""

    @staticmethod
    def off(plain: Calibration, times: float, visits: int = 4) -> Calibration:
        """One allocation off by so much."""
        first, *others = plain.held
        wrong = first._replace(simulated=first.measured * times, deviation=0.03, visits=visits)
        return replace(plain, fits=plain.fits[:1], held=(wrong, *others))

    def test_one_that_fits_has_no_misfits(self, plain: Calibration) -> None:
        assert plain.misfits == ()
        assert plain.error < 0.1

    def test_a_level_that_is_off_is_named_and_widens_the_interval_on_its_side(self, plain: Calibration) -> None:
        asked = {"bent": 3, "work": 7}
        usual = replace(plain, fits=plain.fits[:1]).what_if(concurrency=asked)
        over, under = self.off(plain, 1.3), self.off(plain, 1 / 1.3)
        assert [each.off for each in over.misfits] == [pytest.approx(0.262, abs=0.01)]
        low, high = over.what_if(concurrency=asked).low, under.what_if(concurrency=asked).high
        assert low == pytest.approx(usual.rows_per_second / 1.3, rel=0.01)
        assert high == pytest.approx(usual.rows_per_second * 1.3, rel=0.01)
        assert over.what_if(concurrency=asked).high == pytest.approx(usual.high, rel=0.01)

    @pytest.mark.parametrize("times", [1.8, 1 / 1.8])
    def test_where_it_is_off_by_half_nothing_is_simulated(self, plain: Calibration, times: float) -> None:
        wrong = self.off(plain, times)
        with pytest.raises(PipelineError, match="the simulator does not fit this pipeline, so only what was"):
            wrong.what_if(concurrency={"bent": 3, "work": 7})
        assert wrong.what_if().rows_per_second == plain.best.measured

    def test_what_was_held_once_may_have_been_disturbed(self, plain: Calibration) -> None:
        once = self.off(plain, 1.8, visits=1)
        said = once.what_if(concurrency={"bent": 3, "work": 7})
        assert said.low < said.rows_per_second / 1.7

    def test_work_that_changes_makes_everything_unsure(self) -> None:
        """Four times dearer from the middle on: what comes next is one or the other, and both are in the interval."""
        stages = (SimStage("read", "source", cpu_seconds=0.001), SimStage("work", cpu_seconds=0.04))
        changing = Scenario("c", stages, SimMachine(cpus=4), changes=(Change(45.0, "cost", 4.0, "work"),))
        found = calibrate_lines(play(changing, Sweep(2.0), 90).lines)
        said = found.what_if(concurrency={"work": 3})
        assert said.low < 19
        assert said.high > 74
        assert any("from one time to the next: the work changes" in note for note in found.notes)


@pytest.fixture(scope="module")
def crowded() -> Scenario:
    stages = (
        SimStage("read", "source", cpu_seconds=0.0005),
        SimStage("apart", executor="process", cpu_seconds=0.04, start_seconds=0.2),
        SimStage("sort", cpu_seconds=0.01),
    )
    return Scenario("crowded", stages, SimMachine(cpus=4), changes=(Change(0.0, "neighbours", 2.0),))


@pytest.fixture(scope="module")
def in_a_crowd(crowded: Scenario) -> Calibration:
    return calibrate_lines(swept(crowded).lines)


class TestOthers:
    """Other programs on the machine."""

    def test_they_are_found_and_said(self, in_a_crowd: Calibration) -> None:
        assert in_a_crowd.scenario.changes[0].value == pytest.approx(2.0, rel=0.1)
        said = (
            "other programs wanted about 2.0 of the 4 CPUs while this one did; taken to go on so, also with more CPUs"
        )
        assert any(note.startswith(said) for note in in_a_crowd.notes)

    @pytest.mark.parametrize("asked", [{"apart": 1, "sort": 1}, {"apart": 3, "sort": 1}, {"apart": 3}])
    def test_what_processes_wait_for_cpus_is_not_counted_twice(
        self, crowded: Scenario, in_a_crowd: Calibration, asked: dict[str, int]
    ) -> None:
        """It is not measured, but it is in their seconds, and the simulator adds it again."""
        truth = play(crowded, Static(asked), 25).rows_per_second(8)
        assert replace(in_a_crowd, fits=in_a_crowd.fits[:1]).what_if(
            concurrency=asked
        ).rows_per_second == pytest.approx(truth, rel=0.06)

    def test_with_more_cpus_they_take_as_many(self, crowded: Scenario, in_a_crowd: Calibration) -> None:
        larger = replace(crowded, machine=replace(crowded.machine, cpus=8))
        truth = play(larger, Shared(), 25).rows_per_second(8)
        said = in_a_crowd.what_if(cpus=8, tuner="shared")
        assert said.low <= truth <= said.high


class TestJournals:
    def test_one_that_stayed_at_one_level_is_not_sure_of_another(self) -> None:
        """The tuner found at once that the stage is best alone, and stayed there: two at once were seen in passing."""
        stages = (SimStage("read", "source", cpu_seconds=0.0002), SimStage("work", cpu_seconds=0.0224, coherency=0.7))
        slows = Scenario("slows", stages, SimMachine(cpus=4))
        trace = play(slows, "model", 120)
        assert sum(each.concurrency["work"] == 1 for each in trace.intervals) > 110
        said = calibrate_lines(trace.lines).what_if(concurrency={"work": 2})
        truth = measured(slows, {"work": 2})
        assert said.low <= truth <= said.high
        assert said.rows_per_second == pytest.approx(truth, rel=0.15)

    def test_one_level_alone_leaves_open_which_is_faster(self) -> None:
        stages = (SimStage("read", "source", cpu_seconds=0.0002), SimStage("work", cpu_seconds=0.02, coherency=0.7))
        found = calibrate_lines(play(Scenario("s", stages, SimMachine(cpus=4)), Static({"work": 1}), 30).lines)
        alone, two = found.what_if(), found.what_if(concurrency={"work": 2})
        assert two.low < alone.rows_per_second < two.high

    def test_a_run_of_whatever_tuner_will_do(self) -> None:
        found = calibrate_lines(play(PLAIN, "model", 45).lines)
        said = replace(found, fits=found.fits[:1]).what_if(concurrency={"bent": 4})
        assert said.rows_per_second == pytest.approx(measured(PLAIN, {"bent": 4}), rel=0.1)

    def test_what_is_no_line_is_named_by_file_and_line(self, lines: Sequence[Any], tmp_path: Path) -> None:
        file = tmp_path / "journal.jsonl"
        wrong = {"schema": 1, "tick": 7, "full": True, "seen": {"stages": {}}}
        text = [json.dumps(each) for each in (*lines[:3], wrong, *lines[3:])]
        file.write_text("\n".join(text) + "\n")
        with pytest.raises(SourceError, match=r"journal.jsonl, line 4: the line of tick 7 is none that") as said:
            calibrate_journal(file)
        assert "record one with Pipeline.loader(journal=PATH)" in str(said.value)

    def test_a_file_with_too_little_is_named(self, lines: Sequence[Any], tmp_path: Path) -> None:
        file = tmp_path / "journal.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
        with pytest.raises(PipelineError, match=r"journal.jsonl: only \d windows in which something was finished"):
            calibrate_journal(file)

    def test_a_file_with_an_older_run_and_a_torn_last_line(
        self, lines: Sequence[Any], plain: Calibration, tmp_path: Path
    ) -> None:
        file = tmp_path / "journal.jsonl"
        older = play(scenario("clean", 0), "shared", 3).lines
        text = "".join(json.dumps(line) + "\n" for line in (*older, *lines))
        file.write_text(text + '{"schema":1,"tick":61,"ti')
        assert calibrate_journal(file) == plain

    @pytest.mark.parametrize("line", [{}, {"tick": 3, "seen": {}}, {"seen": {"stages": [1]}}, {"seen": None}])
    def test_what_is_no_line(self, line: dict[str, Any]) -> None:
        with pytest.raises(SourceError, match=f"the line of tick {line.get('tick')!r} is none that a loader"):
            windows([line])

    def test_an_allocation_holds_once_its_processes_are_up(self, lines: Sequence[Any]) -> None:
        some = [json.loads(json.dumps(line)) for line in lines[5:8]]
        for line in some:
            line["seen"]["allocation"], line["seen"]["window_seconds"] = some[0]["seen"]["allocation"], 1.0
        assert [window.held_seconds for window in windows(some)] == [1.0, 2.0, 3.0]
        some[0]["seen"]["stages"]["work"]["processes_starting"] = 1
        assert [window.held_seconds for window in windows(some)] == [0.0, 0.0, 1.0]

    def test_too_few(self, lines: Sequence[Any]) -> None:
        with pytest.raises(PipelineError, match="only 2 windows in which something was finished, at least 3 are"):
            calibrate_lines(lines[:3])
        with pytest.raises(PipelineError, match="only 0 windows"):
            calibrate_lines([])

    def test_fields_of_a_later_version_are_left_out(self, lines: Sequence[Any]) -> None:
        line = json.loads(json.dumps(lines[5]))
        plain = windows([line])
        line["seen"]["later"] = line["seen"]["stages"]["work"]["later"] = 1
        assert windows([line]) == plain


class TestSaved:
    def test_it_is_the_same_again(self, plain: Calibration, tmp_path: Path) -> None:
        plain.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == plain

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "no calibration as it is written by save"),
            ("[1]", "no calibration"),
            ('{"schema": 2}', "schema 2, this version reads 1"),
            ('{"schema": 1}', "no calibration as it is written by save: 'fits'"),
        ],
    )
    def test_what_is_none(self, text: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(SourceError, match=said):
            Calibration.load(tmp_path / "c.json")


class TestTurns:
    FEED = SimStage("feed", "source", cpu_seconds=0.001, rows=1)
    SERIAL = SimStage("serial", serial_seconds=0.01)
    ASLEEP = SimStage("asleep", wait_seconds=0.05, waits=True)

    def drawn(self, *stages: SimStage) -> Scenario:
        return Scenario("turns", (self.FEED, *stages), SimMachine(cpus=8))

    def test_a_stage_whose_items_take_turns_is_named_and_scales_no_further(self) -> None:
        found = calibrate_lines(swept(self.drawn(self.SERIAL)).lines)
        (note,) = [note for note in found.notes if "take turns" in note]
        assert note.startswith("serial: gives hardly more with ")
        assert all(abs(each.off) < 0.1 for each in found.held)
        alone = replace(found, fits=found.fits[:1])
        rates = [alone.what_if(concurrency={"serial": most}).rows_per_second for most in (1, 7)]
        assert rates == pytest.approx([100, 100], rel=0.15)

    def test_one_that_scales_is_not(self) -> None:
        found = calibrate_lines(swept(self.drawn(self.ASLEEP)).lines)
        assert not [note for note in found.notes if "turns" in note]

    def test_one_that_was_never_alone_may_take_turns(self) -> None:
        full = [line for line in play(self.drawn(self.ASLEEP), Static({"asleep": 16}), 20).lines if line["tick"] > 6]
        found = calibrate_lines(full)
        (note,) = [note for note in found.notes if "turns" in note]
        assert note.startswith("asleep: never seen with fewer than 16 at once, so what it waits alone is taken to be")


def test_a_source_that_is_known_not_to_wait_may_wait_for_as_long_as_it_was_seen_to() -> None:
    """It is no multiple of what it computes."""
    source = SimStage("read", "source", cpu_seconds=0.002, wait_seconds=0.02, rows=8, max_concurrency=1, waits=False)
    found = calibrate_lines(
        swept(Scenario("reads", (source, SimStage("work", cpu_seconds=0.001)), SimMachine(cpus=4))).lines
    )
    read = found.scenario.stages[0]
    assert read.waits is False
    assert read.waiting(1) == pytest.approx(0.02, rel=0.1)
    assert read.cpu_seconds == pytest.approx(0.002, rel=0.1)


class TestLive:
    @pytest.mark.slow
    def test_a_pipeline_with_a_filter_a_flat_map_and_a_step(self) -> None:
        pause = threading.Event()
        steps = []

        def work(number: int) -> int:
            pause.wait(0.004)
            return number

        pipe = (
            intune.from_iterable(range(200))
            .map(work, waits=True)
            .filter(lambda number: number % 4 > 0, name="keep")
            .flat_map(lambda number: [number, number], name="twice")
            .batch(6)
        )
        found = calibrate(pipe, 2.0, step=steps.append, cpus=2)
        assert steps
        assert list(found.seen) == ["from_iterable", "work", "keep", "twice", "batch"]
        # Waiting for 4 ms one at a time: no more than 250 numbers a second, of which 375 rows come.
        said = replace(found, fits=found.fits[:1]).what_if(concurrency={"work": 1})
        assert said.rows_per_second == pytest.approx(375, rel=0.35)

    def test_what_can_be_read_once_is_enough_if_it_is_long(self) -> None:
        pause = threading.Event()
        once = intune.from_iterable(iter(range(3000)))
        pipe = once.map(lambda number: (pause.wait(0.002), number)[1], name="work", max_concurrency=2)
        assert calibrate(pipe, 100.0, cpus=2).seen["work"] == 2

    def test_a_pipeline_that_gives_nothing(self) -> None:
        with pytest.raises(PipelineError, match="the pipeline gave no batch"):
            calibrate(intune.from_iterable([]), 5.0)

    def test_an_error_of_a_function_comes_out(self) -> None:
        with pytest.raises(ZeroDivisionError):
            calibrate(intune.from_iterable([1, 0]).map(lambda number: 1 // number), 5.0)

    @pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "9"])
    def test_what_is_no_time(self, seconds: Any) -> None:
        with pytest.raises(PipelineError, match="seconds must be a number above 0"):
            calibrate(intune.from_iterable([1]), seconds)

    def test_what_is_no_pipeline(self) -> None:
        with pytest.raises(PipelineError, match="calibrate needs a pipeline, got list"):
            calibrate([1])  # type: ignore[arg-type]
