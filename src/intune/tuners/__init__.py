"""Tuners: decisions without clock, thread or I/O, each in a file of its own.

`shared` leaves everything open, `even` and `proportional` divide the CPUs, `model` fits how stages depend on
concurrency and solves for the best. `hillclimb`, `plumber`, `threshold` and `tabular` decide as other systems do,
`dqn` and `learned-model` with networks that were trained on simulated pipelines. `Static` is what a user wants, and
`RandomMoves` is for tests.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from intune._errors import PipelineError
from intune._values import Tuner
from intune.tuners.dqn import DQN
from intune.tuners.even import Even
from intune.tuners.hillclimb import HillClimb
from intune.tuners.learned_model import LearnedModel
from intune.tuners.model import Model
from intune.tuners.plumber import Plumber
from intune.tuners.proportional import Proportional
from intune.tuners.random_moves import RandomMoves
from intune.tuners.shared import Shared
from intune.tuners.static import Static
from intune.tuners.tabular import Tabular
from intune.tuners.threshold import Threshold

__all__ = [
    "DQN",
    "Even",
    "HillClimb",
    "LearnedModel",
    "Model",
    "Plumber",
    "Proportional",
    "RandomMoves",
    "Shared",
    "Static",
    "Tabular",
    "Threshold",
    "make_tuner",
]

_BY_NAME: dict[str, Callable[[], Tuner]] = {
    "dqn": DQN,
    "even": Even,
    "hillclimb": HillClimb,
    "hillclimb-climb": partial(HillClimb, "climb"),
    "hillclimb-stage-based": partial(HillClimb, "stage-based"),
    "learned-model": LearnedModel,
    "model": Model,
    "plumber": Plumber,
    "proportional": Proportional,
    "shared": Shared,
    "tabular": Tabular,
    "threshold": Threshold,
}


def make_tuner(name_or_object: str | Tuner) -> Tuner:
    """A new tuner by its name, or the given object itself.

    Raises:
        PipelineError: If there is no tuner of that name, or the object has no method `propose`.
    """
    if isinstance(name_or_object, str):
        if name_or_object not in _BY_NAME:
            names, near = ", ".join(map(repr, sorted(_BY_NAME))), get_close_matches(name_or_object, _BY_NAME, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise PipelineError(
                f"unknown tuner {name_or_object!r}: give one of {names}, or an object such as Static{meant}"
            )
        return _BY_NAME[name_or_object]()
    if isinstance(name_or_object, type):
        raise PipelineError(f"{name_or_object.__name__} is a class: give an object, {name_or_object.__name__}(...)")
    if not callable(getattr(name_or_object, "propose", None)):
        raise PipelineError(f"{name_or_object!r} is no tuner: it needs a method propose(snapshot, budget)")
    return name_or_object
