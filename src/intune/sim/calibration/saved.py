"""Fitted scenarios and what was measured as JSON, and back."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from intune.control.journal import to_plain
from intune.sim.calibration.fitting import Fitted
from intune.sim.calibration.replay import Held
from intune.sim.scenario import Change, Scenario, SimMachine, SimStage, SimTrainer


def as_json(value: Any) -> Any:
    """A value and all that is in it as JSON knows them; a scenario has sets in it."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, Held):
        return as_json(value._asdict())
    if isinstance(value, tuple):
        return [as_json(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return to_plain(value)


def fitted_from(read: Mapping[str, Any]) -> Fitted:
    """A fit again.

    Raises:
        KeyError, TypeError, ValueError: If it is none.
    """
    scenario = dict(read["scenario"])
    machine = {**scenario["machine"], "unmeasured": frozenset(scenario["machine"]["unmeasured"])}
    made: dict[str, Any] = {
        **scenario,
        "stages": tuple(map(_stage, scenario["stages"])),
        "machine": SimMachine(**machine),
        "trainer": SimTrainer(**scenario["trainer"]),
        "changes": tuple(Change(**each) for each in scenario["changes"]),
    }
    return Fitted(Scenario(**made), read["names"], read["groups"], read["rows"])


def _stage(read: Mapping[str, Any]) -> SimStage:
    pairs = tuple((float(n), float(times)) for n, times in read["wait_by_crowd"])
    return SimStage(**{**read, "wait_by_crowd": pairs})
