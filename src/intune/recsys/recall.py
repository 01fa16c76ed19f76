"""What a run's tuner has learnt, kept in the checkpoint for the session that resumes the run."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from intune._errors import PipelineError
from intune._values import Tuner


@runtime_checkable
class Remembers(Protocol):
    """A tuner whose knowledge can be kept."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt: JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with it."""
        ...


def kept(name: str, tuner: Tuner) -> dict[str, Any] | None:
    """What a tuner of this name has learnt; None if it is one that keeps nothing."""
    return {"name": name, "state": tuner.state_dict()} if isinstance(tuner, Remembers) else None


def recall(name: str, tuner: Tuner, position: object, echo: Callable[[str], object]) -> None:
    """Give a tuner what one of the same name had learnt; where that is of no use it says so and begins anew.

    Args:
        name: Of the tuner.
        tuner: A new one.
        position: What `kept` gave; None = nothing.
        echo: Is told where it cannot be used: no run ends because of it.
    """
    if not isinstance(position, Mapping) or not isinstance(tuner, Remembers) or position.get("name") != name:
        return
    try:
        tuner.load_state_dict(position.get("state", {}))
    except PipelineError as error:
        echo(f"the tuner begins anew: {error}")
