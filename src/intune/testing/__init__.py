"""For tests of pipelines, tuners and workloads: a clock set by hand, a scripted workload, emulated work, checks."""

from intune.testing.checks import check_tuner, check_workload
from intune.testing.clock import ManualClock
from intune.testing.emulate import EmulatedClock, TokenPool, emulated
from intune.testing.loaders import assert_exactly_once, assert_same_after_resume
from intune.testing.workload import ScriptedWorkload, blank_snapshot

__all__ = [
    "EmulatedClock",
    "ManualClock",
    "ScriptedWorkload",
    "TokenPool",
    "assert_exactly_once",
    "assert_same_after_resume",
    "blank_snapshot",
    "check_tuner",
    "check_workload",
    "emulated",
]
