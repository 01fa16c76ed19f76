"""Simulated pipelines: to train an agent on, to compare tuners, and to ask what would happen on another machine."""

from intune.sim.families import FAMILIES, HELD_OUT, TRAINED, scenario
from intune.sim.play import Interval, Trace, play
from intune.sim.scenario import Change, Scenario, SimMachine, SimStage, SimTrainer

__all__ = [
    "FAMILIES",
    "HELD_OUT",
    "TRAINED",
    "Change",
    "Interval",
    "Scenario",
    "SimMachine",
    "SimStage",
    "SimTrainer",
    "Trace",
    "play",
    "scenario",
]
