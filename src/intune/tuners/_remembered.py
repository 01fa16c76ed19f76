"""What a run has learnt of its stages, for the next one: kept as JSON, and of use to the same stages only."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from intune._errors import PipelineError
from intune._values import Snapshot
from intune.tuners._beliefs import Beliefs

FORMAT = "intune model 1"
"""What a kept state says of itself. Raised with each change of what is in it."""

LONGEST, MOST_SAID = 300, 12
"""Characters of an error, and stages in a warning."""

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
    def of(cls, last: Snapshot | None, beliefs: Beliefs, slowing: Collection[str]) -> "Remembered":
        """What a run knows of its stages, those of the last snapshot; None = it has not begun."""
        return cls(stage_keys(last) if last else [], beliefs, slowing)

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
                raise ValueError(f"its format is not {FORMAT!r}")
            beliefs.remember(state["known"])
            stages = [(str(name), str(kind)) for name, kind in state["stages"]]
            if not set(beliefs.stages) <= {name for name, _ in stages}:
                raise ValueError("it has figures of stages that are not among its own")
            return cls(stages, beliefs, frozenset(map(str, state["slowing"])) & beliefs.stages.keys())
        # By what is wrong with it, Python and numpy raise errors of a dozen classes, OverflowError and RecursionError
        # among them.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:LONGEST]
            raise PipelineError(f"expected what state_dict() of a tuner gave, got something else: {why}") from error

    def state_dict(self) -> dict[str, Any]:
        """Small, JSON."""
        known = self.beliefs.state_dict()
        return {"format": FORMAT, "stages": [*map(list, self.stages)], "known": known, "slowing": sorted(self.slowing)}

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether these are the stages that it is of, in the same order; if not, a warning says so.

        A stage that ran in processes then and runs on threads now, or the other way round, is as good as unknown.
        """
        if not same_stages(self.stages, snapshot):
            return False
        for info in (stage.info for stage in snapshot.stages):
            if belief := self.beliefs.stages.get(info.name):
                if belief.info.executor != info.executor:
                    del self.beliefs.stages[info.name]
                belief.info = replace(info, waits=belief.info.waits if info.waits is None else info.waits)
        return True


def stage_keys(snapshot: Snapshot) -> list[StageKey]:
    """What tells the stages of one pipeline from those of another."""
    return [(stage.info.name, stage.info.kind) for stage in snapshot.stages]


def same_stages(known: Sequence[StageKey], snapshot: Snapshot) -> bool:
    """Whether these are the stages of a snapshot, in the same order; if not, a warning says so."""
    here = stage_keys(snapshot)
    if known == here:
        return True
    said = f"what the tuner remembers is of stages {_said(known)}, not of {_said(here)}: it is left out"
    with suppress(UserWarning):  # where warnings are errors: a tuner that raises would be put aside for it
        warnings.warn(said, stacklevel=2)
    return False


def _said(stages: Sequence[StageKey]) -> str:
    said = ", ".join(f"{name} ({kind})" for name, kind in stages[:MOST_SAID]) or "none"
    return f"{said} and {len(stages) - MOST_SAID} more" if len(stages) > MOST_SAID else said
