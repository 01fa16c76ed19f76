"""What may be searched of each tuner that has parameters: for each parameter a range or choices.

`SPACES` is all of it. Left out are facts that a user states and nobody should guess (what a disk can read), files of
weights, and seeds.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from intune._errors import PipelineError
from intune._values import Tuner
from intune.tuners import HillClimb, LearnedModel, Model, Plumber, Proportional, Tabular, Threshold

Value = bool | int | float | str
Parameters = Mapping[str, Value]

TRIES = 100
"""Draws for each candidate that is wanted after which a space is found to have too few."""


@dataclass(frozen=True, slots=True)
class Between:
    """Any number from `low` to `high`, in three digits; evenly drawn, or with `log` evenly in the logarithm."""

    low: float
    high: float
    log: bool = False

    def draw(self, random: np.random.Generator) -> float:
        """One of them."""
        if self.log:
            drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = random.uniform(self.low, self.high)
        return min(self.high, max(self.low, float(f"{drawn:.3g}")))

    def allows(self, value: object) -> bool:
        """Whether it is one of them."""
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`."""

    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        """One of them."""
        return int(random.integers(self.low, self.high, endpoint=True))

    def allows(self, value: object) -> bool:
        """Whether it is one of them."""
        return isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]

    def draw(self, random: np.random.Generator) -> str:
        """One of them."""
        return self.words[int(random.integers(len(self.words)))]

    def allows(self, value: object) -> bool:
        """Whether it is one of them."""
        return value in self.words


@dataclass(frozen=True, slots=True)
class Space:
    """What may be searched of one tuner.

    Attributes:
        name: Of the tuner.
        make: Makes one from named parameters; all that are searched have a default.
        parameters: By name, what each may be.
        seeded: It draws random numbers from a `seed`, so each scenario gives it another one.
    """

    name: str
    make: Callable[..., Tuner]
    parameters: Mapping[str, Between | Whole | OneOf]
    seeded: bool = False

    @property
    def default(self) -> Parameters:
        """What the tuner takes when nothing is said.

        Raises:
            PipelineError: If it has no such parameter, or one without a default.
        """
        known = inspect.signature(self.make).parameters
        for name in self.parameters:
            if name not in known or known[name].default is inspect.Parameter.empty:
                raise PipelineError(f"tuner {self.name!r} has no parameter {name!r} with a default: it has {[*known]}")
        return {name: known[name].default for name in self.parameters}

    def candidates(self, number: int, seed: int) -> list[Parameters]:
        """The default and then distinct random draws.

        Raises:
            PipelineError: If the space has fewer.
        """
        random = np.random.default_rng([seed, *self.name.encode()])
        found = [self.default]
        for _ in range(TRIES * number):
            if len(found) == number:
                return found
            drawn = {name: parameter.draw(random) for name, parameter in self.parameters.items()}
            if drawn not in found:
                found.append(drawn)
        raise PipelineError(f"tuner {self.name!r}: {number} candidates were asked for, its space seems to have fewer")

    def tuner(self, parameters: Parameters, seed: int) -> Tuner:
        """A new one; `seed` is that of the scenario."""
        return self.make(**parameters, **({"seed": seed} if self.seeded else {}))


SPACES: Mapping[str, Space] = {
    space.name: space
    for space in (
        Space(
            "hillclimb",
            HillClimb,
            {
                "mode": OneOf(("climb", "max-parallelism", "stage-based")),
                "newest": Between(0.1, 1.0),
                "memory_share": Between(0.1, 1.0),
            },
        ),
        Space("learned-model", LearnedModel, {"margin": Between(0.0, 1.0), "keep": Between(0.9, 1.0)}),
        Space(
            "model",
            Model,
            {
                "forgetting": Between(0.8, 1.0),
                "margin": Between(0.0, 1.0),
                "keep": Between(0.9, 1.0),
                "try_every": Whole(0, 20),
                "least_items": Whole(1, 10),
                "noise": Between(0.01, 0.3, log=True),
            },
        ),
        Space("plumber", Plumber, {"every": Whole(1, 20), "rounding": OneOf(("nearest", "up"))}),
        Space(
            "proportional",
            Proportional,
            {"keep": Between(0.8, 1.0), "margin": Between(0.0, 2.0), "spare": Between(0.0, 2.0)},
        ),
        Space(
            "tabular",
            Tabular,
            {
                "explore": Between(0.0, 0.5),
                "learn": Between(0.05, 1.0),
                "discount": Between(0.0, 0.99),
                "buckets": Whole(1, 12),
                "hope": Between(0.0, 10.0),
            },
            seeded=True,
        ),
        Space(
            "threshold",
            Threshold,
            {
                "start": Whole(1, 16),
                "step": Whole(1, 8),
                "difference": Between(0.0, 0.9),
                "busy": Between(0.3, 1.0),
                "idle": Between(0.0, 0.7),
                "scarce": Between(0.0, 1.0),
                "starved": Between(0.0, 0.3),
            },
        ),
    )
}
"""By name, the tuners that have parameters."""
