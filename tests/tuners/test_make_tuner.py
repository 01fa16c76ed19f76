import pytest

from intune._errors import PipelineError
from intune.tuners import (
    DQN,
    Even,
    HillClimb,
    LearnedModel,
    Model,
    Plumber,
    Proportional,
    Shared,
    Static,
    Tabular,
    Threshold,
    make_tuner,
)

from .plant import Plant, PlantStage, run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shared", Shared),
        ("even", Even),
        ("proportional", Proportional),
        ("hillclimb", HillClimb),
        ("hillclimb-climb", HillClimb),
        ("hillclimb-stage-based", HillClimb),
        ("plumber", Plumber),
        ("threshold", Threshold),
        ("tabular", Tabular),
        ("model", Model),
        ("dqn", DQN),
        ("learned-model", LearnedModel),
    ],
)
def test_a_name_makes_a_new_tuner(name: str, kind: type) -> None:
    if name == "plumber":
        pytest.importorskip("scipy")
    made = make_tuner(name)
    assert type(made) is kind
    assert make_tuner(name) is not made


def test_an_object_is_taken_as_it_is() -> None:
    tuner = Static({})
    assert make_tuner(tuner) is tuner


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "sharde",
            "unknown tuner 'sharde': give one of 'dqn', 'even', 'hillclimb', 'hillclimb-climb'",
        ),
        ("static", "or an object such as Static"),
        (Shared, r"Shared is a class: give an object, Shared\(\.\.\.\)"),
        (3, "3 is no tuner: it needs a method propose"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(given: object, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        make_tuner(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "meant"), [("modle", "model"), ("hilclimb-climb", "hillclimb-climb")])
def test_a_name_that_is_nearly_one_is_told_which(wrong: str, meant: str) -> None:
    with pytest.raises(PipelineError, match=f"unknown tuner '{wrong}': .*; did you mean '{meant}'"):
        make_tuner(wrong)


@pytest.mark.parametrize("mode", ["climb", "stage-based"])
def test_modes_of_autotune_have_names_of_their_own(mode: str) -> None:
    stages = [PlantStage("source", 0.001), PlantStage("work", 0.02)]
    named, _ = run(make_tuner(f"hillclimb-{mode}"), Plant(stages), 5)
    assert mode in named[-1].reasons["work"]
