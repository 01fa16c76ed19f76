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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shared", Shared),
        ("even", Even),
        ("proportional", Proportional),
        ("hillclimb", HillClimb),
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
            "unknown tuner 'sharde': give one of 'dqn', 'even', 'hillclimb', 'learned-model', 'model', 'pl",
        ),
        ("static", "or an object such as Static"),
        (Shared, r"Shared is a class: give an object, Shared\(\.\.\.\)"),
        (3, "3 is no tuner: it needs a method propose"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(given: object, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        make_tuner(given)  # type: ignore[arg-type]
