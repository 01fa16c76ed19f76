"""What a run has learnt of its stages, for the next one: kept as JSON, and of use to the same stages only."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from intune._errors import PipelineError
from intune._values import StageInfo
from intune.tuners._beliefs import Beliefs

FORMAT = "intune model 1"
"""What a kept state says of itself. Raised with each change of what is in it."""

StageKey = tuple[str, str]
"""Name and kind of a stage."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is kept.

    Attributes:
        stages: All of the pipeline, in order.
        beliefs: What is known of those that were measured.
        slowing: Names of those that were last found to slow down with concurrency.
    """

    stages: Sequence[StageKey]
    beliefs: Beliefs
    slowing: Collection[str]

    @classmethod
    def of(cls, infos: Sequence[StageInfo], beliefs: Beliefs, slowing: Collection[str]) -> "Remembered":
        """What a run knows of its stages."""
        return cls([_key(info) for info in infos], beliefs, slowing)

    @classmethod
    def read(cls, state: Mapping[str, Any], beliefs: Beliefs) -> "Remembered":
        """The same from what `state_dict` gave.

        Args:
            state: What was kept; nothing in it is ever executed.
            beliefs: New ones, which get what is known.

        Raises:
            PipelineError: If it is something else.
        """
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']!r}, this version reads {FORMAT!r}")
            beliefs.remember(state["known"])
            stages = [(str(name), str(kind)) for name, kind in state["stages"]]
            if strange := set(beliefs.stages) - {name for name, _ in stages}:
                raise ValueError(f"figures of stages that are not among its own: {sorted(strange)}")
            return cls(stages, beliefs, frozenset(map(str, state["slowing"])) & beliefs.stages.keys())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PipelineError(
                f"expected what state_dict() of the tuner gave, got something else: {error!r}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Small, JSON."""
        known = self.beliefs.state_dict()
        return {"format": FORMAT, "stages": [*map(list, self.stages)], "known": known, "slowing": sorted(self.slowing)}

    def fits(self, infos: Sequence[StageInfo]) -> bool:
        """Whether these are the stages that it is of, in the same order; if not, a warning says so.

        A stage that ran in processes then and runs on threads now, or the other way round, is as good as unknown.
        """
        here = [_key(info) for info in infos]
        if self.stages != here:
            told = f"what the tuner remembers is of stages {_said(self.stages)}, not of {_said(here)}: it is left out"
            warnings.warn(told, stacklevel=2)
            return False
        for info in infos:
            if belief := self.beliefs.stages.get(info.name):
                if belief.info.executor != info.executor:
                    del self.beliefs.stages[info.name]
                belief.info = replace(info, waits=belief.info.waits if info.waits is None else info.waits)
        return True


def _key(info: StageInfo) -> StageKey:
    return info.name, info.kind


def _said(stages: Sequence[StageKey]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in stages) or "none"
