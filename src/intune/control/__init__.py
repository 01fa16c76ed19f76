"""What steers a running workload: the controller, the guard, the journal, and plain words for what limits a run.

Knows workloads and tuners by their protocols only.
"""

from intune.control.allocation import open_allocation
from intune.control.controller import Controller
from intune.control.guard import Guard
from intune.control.journal import Decision, Journal, read_journal

__all__ = [
    "Controller",
    "Decision",
    "Guard",
    "Journal",
    "open_allocation",
    "read_journal",
]
