"""Tuners: decisions without clock, thread or I/O, each in a file of its own.

`shared` leaves everything open, `even` and `proportional` divide the CPUs, `model` fits how stages depend on
concurrency and solves for the best. `hillclimb`, `plumber`, `threshold` and `tabular` decide as other systems do,
`dqn` and `learned-model` with networks that were trained on simulated pipelines. `Static` is what a user wants, and
`RandomMoves` is for tests.
"""

from collections.abc import Callable, Iterable
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
    "NAMES",
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
    "unknown_tuner",
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


NAMES = tuple(_BY_NAME)
"""Names of tuners that need nothing else."""


def unknown_tuner(name: str, names: Iterable[str], more: str = "") -> PipelineError:
    """That there is no tuner of a name, which names there are, and which of them may be meant.

    Args:
        name: What was given.
        names: Those that are allowed.
        more: What else is.
    """
    known = sorted(names)
    near = get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return PipelineError(f"unknown tuner {name!r}: give one of {', '.join(map(repr, known))}{more}{meant}")


def make_tuner(name_or_object: str | Tuner) -> Tuner:
    """A new tuner by its name, or the given object itself.

    Raises:
        PipelineError: If there is no tuner of that name, or the object has no method `propose`.
    """
    if isinstance(name_or_object, str):
        if name_or_object not in _BY_NAME:
            raise unknown_tuner(name_or_object, NAMES, ", or an object such as Static")
        return _BY_NAME[name_or_object]()
    if isinstance(name_or_object, type):
        raise PipelineError(f"{name_or_object.__name__} is a class: give an object, {name_or_object.__name__}(...)")
    if not callable(getattr(name_or_object, "propose", None)):
        raise PipelineError(f"{name_or_object!r} is no tuner: it needs a method propose(snapshot, budget)")
    return name_or_object
