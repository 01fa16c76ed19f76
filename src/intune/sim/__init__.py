"""Simulated pipelines: to train an agent on, to compare tuners, and to ask what would happen on another machine."""

from intune.sim.calibration import Answer, Calibration, calibrate, calibrate_journal
from intune.sim.families import FAMILIES, HELD_OUT, TRAINED, scenario
from intune.sim.play import Interval, Trace, play
from intune.sim.scenario import Change, Scenario, SimMachine, SimStage, SimTrainer

__all__ = [
    "FAMILIES",
    "HELD_OUT",
    "TRAINED",
    "Answer",
    "Calibration",
    "Change",
    "Interval",
    "Scenario",
    "SimMachine",
    "SimStage",
    "SimTrainer",
    "Trace",
    "calibrate",
    "calibrate_journal",
    "play",
    "scenario",
]
