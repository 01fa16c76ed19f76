"""What can be chosen when a loader is made."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from intune._errors import PipelineError
from intune._values import Tuner

if TYPE_CHECKING:
    from intune.pipeline.order import OnUneven


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of `Pipeline.loader`, which explains them.

    Raises:
        PipelineError: If a value is not allowed.
    """

    memory: str | int | float | None = None
    tuner: "str | Tuner" = "model"
    cpus: int | None = None
    seed: int = 0
    rank: int | None = None
    world_size: int | None = None
    epochs: int | None = None
    ordered: bool = True
    on_uneven: "OnUneven | None" = None
    on_error: Literal["raise", "skip"] = "raise"
    journal: str | os.PathLike[str] | None = None
    max_ahead: int | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        """Check each value on its own."""
        _at_least("seed", self.seed, 0)
        least_of = {"cpus": 1, "prefetch": 1, "epochs": 1, "max_ahead": 1, "rank": 0, "world_size": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, least)
        if self.on_error not in ("raise", "skip"):
            raise PipelineError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")
        if self.on_uneven not in (None, "drop", "pad", "uneven"):
            raise PipelineError(f"on_uneven must be 'drop', 'pad', 'uneven' or None, got {self.on_uneven!r}")
        if self.journal is not None and not isinstance(self.journal, str | os.PathLike):
            raise PipelineError(f"journal must be the path of a file or None, got {self.journal!r}")
        if not isinstance(self.ordered, bool):
            raise PipelineError(f"ordered must be True or False, got {self.ordered!r}")


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PipelineError(f"{name} must be an int >= {least}, got {value!r}")
