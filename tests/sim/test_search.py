"""Parameters of tuners: what may be searched, that the search is the same for all, and that it says what is chance."""

import inspect
import json
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot, Tuner
from intune.sim import HELD_OUT, TRAINED, Scenario
from intune.sim.evaluate import read_rows
from intune.sim.play import Interval, Trace
from intune.sim.search import MOST, Plan, Rung, Runs, as_json, search
from intune.sim.spaces import SPACES, Between, OneOf, Space, Whole
from intune.tuners import _BY_NAME, Shared

pytest.importorskip("scipy")

LEFT_OUT = {
    "dqn": {"weights"},
    "learned-model": {"weights"},
    "plumber": {"disk_bytes_per_second"},
    "tabular": {"seed"},
}
SMALL = Plan((Rung(4, 3), Rung(3, 2), Rung(2, 4)), validation=8, decisions=5, first_seed=0, validation_seed=100)


class Fewer:
    """Leaves all stages open, on half of the slots, on a quarter of them, and so on; none of that is of use."""

    def __init__(self, halvings: int = 3, mood: str = "any") -> None:
        self.halvings, self.mood = halvings, mood

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        slots = max(1, budget.cpus >> self.halvings)
        return Allocation(
            {stage.name: None for stage in snapshot.stages}, slots, reasons={s.name: "" for s in snapshot.stages}
        )


HALVINGS = Space("fewer", Fewer, {"halvings": Whole(0, 3)})
MOODS = Space("fewer", Fewer, {"mood": OneOf(("any", "good", "bad", "none"))})
SHARED = Space("shared", Shared, {})


def pretend(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[Tuner, Scenario], tuple[int, str | None]]) -> None:
    """Runs that take no time: rows, and what the memory was at a death."""

    def play(scenario: Scenario, tuner: Tuner, decisions: int) -> Trace:
        rows, died = outcome(tuner, scenario)
        return Trace((Interval(1.0, rows, rows, 1.0, 0, 0.0, {}, 1),), 0.0, died, ())

    monkeypatch.setattr("intune.sim.search.play", play)


@pytest.mark.parametrize("name", SPACES)
class TestSpaces:
    def test_all_parameters_that_are_no_facts_are_searched(self, name: str) -> None:
        known = set(inspect.signature(_BY_NAME[name]).parameters)
        assert set(SPACES[name].parameters) == known - LEFT_OUT.get(name, set())
        assert SPACES[name].make is _BY_NAME[name]

    def test_defaults_lie_within_the_ranges(self, name: str) -> None:
        space = SPACES[name]
        assert {key: each.allows(space.default[key]) for key, each in space.parameters.items()} == dict.fromkeys(
            space.parameters, True
        )

    def test_the_default_comes_first_and_draws_are_distinct_allowed_and_belong_to_the_seed(self, name: str) -> None:
        space = SPACES[name]
        found = space.candidates(30, 1)
        assert found[0] == space.default
        assert len({json.dumps(each, sort_keys=True) for each in found}) == 30
        for each in found:
            assert all(space.parameters[key].allows(value) for key, value in each.items())
            assert callable(space.tuner(each, 3).propose)
        assert space.candidates(30, 1) == found
        assert space.candidates(20, 1) == found[:20]
        assert space.candidates(30, 2)[1:] != found[1:]
        assert json.loads(json.dumps(found)) == found


def test_every_tuner_with_parameters_has_a_space() -> None:
    to_be_searched = {
        name
        for name, make in _BY_NAME.items()
        if set(inspect.signature(make).parameters) - LEFT_OUT.get(name, set()) and not isinstance(make, partial)
    }
    assert set(SPACES) == to_be_searched


def test_ranges() -> None:
    random = np.random.default_rng(0)
    small = [Between(0.001, 1.0, log=True).draw(random) for _ in range(300)]
    assert 0.001 <= min(small) < 0.002 < 0.5 < max(small) <= 1.0
    assert 0.02 < float(np.median(small)) < 0.05
    assert {Whole(1, 3).draw(random) for _ in range(50)} == {1, 2, 3}
    assert {OneOf(("a", "b")).draw(random) for _ in range(50)} == {"a", "b"}
    assert not Between(0.0, 1.0).allows(1.1)
    assert not Between(0.0, 1.0).allows("1")
    assert not Whole(1, 3).allows(1.5)
    assert not OneOf(("a",)).allows("b")


def test_a_space_that_does_not_fit_its_tuner_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"tuner 'x' has no parameter 'slots' with a default: it has \['halvings'"):
        Space("x", Fewer, {"slots": Whole(1, 2)}).candidates(1, 0)
    with pytest.raises(PipelineError, match="'fewer': 5 candidates were asked for, its space seems to have fewer"):
        HALVINGS.candidates(5, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rungs": (Rung(4, 2), Rung(6, 2), Rung(2, 2))}, r"rounds of \[4, 6, 2\] candidates: each must be no larger"),
        ({"rungs": (Rung(4, 2), Rung(3, 2))}, r"rounds of \[4, 3\] candidates: .* the last 2"),
        ({"rungs": ()}, r"rounds of \[\] candidates"),
        ({"rungs": (Rung(2, 0),)}, "scenarios of round 1: 0, must be at least 1"),
        ({"decisions": 0}, "decisions: 0, must be at least 1"),
        ({"validation": -1}, "validation: -1, must be at least 1"),
        ({"first_seed": -5}, "must not be below 0"),
        ({"first_seed": 0, "validation_seed": 50}, "seeds from 50 on are those of search and of validation"),
    ],
)
def test_plans_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Plan(**wrong)


@pytest.mark.slow
def test_the_best_parameter_of_a_made_up_tuner_is_found_in_real_runs(tmp_path: Path) -> None:
    told: list[str] = []
    found = search(HALVINGS, SMALL, Runs(tmp_path / "runs.jsonl"), SHARED, told.append)
    assert (found.default, found.best) == ({"halvings": 3}, {"halvings": 0})
    assert found.better
    assert found.search is not None
    assert found.search.low > 0
    # No halving is what the reference does.
    assert found.best_score == 0 > found.default_score
    assert found.died == (0, 0)
    assert [line.split(":")[1].split(",")[0] for line in told] == [
        " 4 candidates on 3 scenarios",
        " 3 candidates on 2 scenarios",
        " 2 candidates on 4 scenarios",
        " validated on 8 scenarios",
    ]
    assert json.loads(json.dumps(as_json(found)))["better"] is True


@pytest.mark.slow
def test_processes_give_the_same(tmp_path: Path) -> None:
    plan = Plan((Rung(2, 2),), validation=2, decisions=5)
    one, two = Runs(tmp_path / "one.jsonl"), Runs(tmp_path / "two.jsonl", jobs=2)
    space = SPACES["threshold"]
    assert search(space, plan, one, SHARED) == search(space, plan, two, SHARED)


def by_chance(tuner: Tuner, scenario: Scenario) -> tuple[int, str | None]:
    """Rows that depend on the scenario, and on the parameters in a way that means nothing."""
    words = f"{scenario.name} {sorted(vars(tuner).items(), key=str) if isinstance(tuner, Fewer) else ''}"
    return 1000 + zlib.crc32(words.encode()) % 500, None


@pytest.mark.slow
def test_what_is_ahead_by_chance_is_not_called_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, by_chance)
    rungs, ahead = (Rung(4, 8), Rung(2, 8)), []
    for number in range(40):
        first = 1000 * number
        plan = Plan(rungs, validation=32, first_seed=first, validation_seed=first + 500, draw=number)
        found = search(MOODS, plan, Runs(tmp_path / f"{number}.jsonl"), SHARED)
        ahead += [found] if found.best != found.default else []
    assert len(ahead) > 20
    # An interval of 95 % lies above 0 in one of forty.
    assert sum(found.better for found in ahead) <= 3
    # In the scenarios that chose it the best seems better than it is.
    validated = [found.validation.value for found in ahead if found.validation is not None]
    assert np.mean([found.best_score - found.default_score for found in ahead]) > 0.02 > np.mean(validated)


def test_where_nothing_is_ahead_the_default_stays_and_nothing_is_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda tuner, scenario: (1000, None))
    found = search(MOODS, SMALL, Runs(tmp_path / "runs.jsonl"), SHARED)
    assert found.best == found.default == {"mood": "any"}
    assert (found.search, found.validation, found.died, found.better) == (None, None, None, False)
    assert found.best_score == found.default_score == 0
    assert all(row["seed"] < SMALL.validation_seed for row in read_rows(tmp_path / "runs.jsonl"))


def test_deaths_failures_and_standstills_count_as_very_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(tuner: Tuner, scenario: Scenario) -> tuple[int, str | None]:
        mood = getattr(tuner, "mood", None)
        died = "8 GiB" if mood == "bad" and scenario.seed % 2 else None
        return {"any": 0, "none": 1}.get(str(mood), 1000), died

    pretend(monkeypatch, outcome)
    found = search(MOODS, SMALL, Runs(tmp_path / "runs.jsonl"), SHARED)
    assert found.best == {"mood": "good"}
    assert found.default_score == pytest.approx(-MOST)
    assert found.better
    assert found.validation is not None
    assert found.validation.value == pytest.approx(MOST)
    space = Space("fewer", Fewer, {"mood": OneOf(("any", "bad"))})
    plan = Plan((Rung(2, 4),), validation=4, decisions=5)
    found = search(space, plan, Runs(tmp_path / "runs.jsonl"), SHARED)
    assert (found.best, found.best_score) == ({"mood": "bad"}, pytest.approx(-MOST / 2))
    assert found.died == (0, 2)


@pytest.mark.parametrize("name", SPACES)
def test_each_tuner_gets_the_same_number_of_decisions_on_trained_families_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    parameters: Counter[str] = Counter()

    def outcome(tuner: Tuner, scenario: Scenario) -> tuple[int, str | None]:
        return 1000 + zlib.crc32(f"{scenario.name} {tuner.__class__} {len(parameters)}".encode()) % 100, None

    pretend(monkeypatch, outcome)
    found = search(SPACES[name], plan, Runs(tmp_path / "runs.jsonl"), SPACES["model"])
    rows = read_rows(tmp_path / "runs.jsonl")
    searched = range(plan.first_seed, plan.first_seed + plan.scenarios)
    own = [row for row in rows if row["tuner"] == name and row["seed"] in searched]
    assert sum(row["decisions"] for row in own) == plan.search_decisions == found.decisions
    default = [row["family"] for row in own if row["parameters"] == found.default]
    assert Counter(default) == dict.fromkeys(TRAINED, plan.scenarios / len(TRAINED))
    assert not {row["family"] for row in rows} & set(HELD_OUT)


def test_a_search_that_was_stopped_goes_on_and_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, by_chance)
    whole = search(MOODS, SMALL, Runs(tmp_path / "whole.jsonl"), SHARED)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    played: list[str] = []

    def counted(tuner: Tuner, scenario: Scenario) -> tuple[int, str | None]:
        played.append(scenario.name)
        if len(lines) // 2 + len(played) > len(lines) - 3 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return by_chance(tuner, scenario)

    stopped: list[bool] = []
    pretend(monkeypatch, counted)
    path = tmp_path / "half.jsonl"
    path.write_text("".join([*lines[: len(lines) // 2], lines[-1][:40]]))  # the last one is torn
    with pytest.raises(KeyboardInterrupt):
        search(MOODS, SMALL, Runs(path), SHARED)
    assert search(MOODS, SMALL, Runs(path), SHARED) == whole
    assert len(played) == len(lines) - len(lines) // 2 + 1  # the one that was stopped was begun twice
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)


def test_random_tuners_get_another_seed_in_each_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, set[Any]] = {}

    def outcome(tuner: Tuner, scenario: Scenario) -> tuple[int, str | None]:
        states.setdefault(scenario.name, set()).add(tuner._random.getstate())  # type: ignore[attr-defined]
        return 1000, None

    pretend(monkeypatch, outcome)
    search(SPACES["tabular"], SMALL, Runs(tmp_path / "runs.jsonl"), SPACES["tabular"])
    assert len(states) == SMALL.scenarios
    assert {len(each) for each in states.values()} == {1}
    assert len(set.union(*states.values())) == SMALL.scenarios
