"""Tasks of several parts take as long as their parts, whoever was in those parts before."""

import pytest

from intune.sim.resources import Part, Resources, Task
from intune.sim.scenario import SimMachine, SimStage

MACHINE = SimMachine(cpus=2, network_stream_bytes_per_second=10.0, network_bytes_per_second=10.0)


def alone(resources: Resources, parts: list[tuple[Part, float]]) -> Task:
    """Run one task to its end, and nothing else."""
    resources.begin(Task(SimStage("fetch"), False, parts, resources.now))
    while (end := resources.next_end()) is not None:
        for task in resources.advance(end):
            return task
    raise AssertionError("it never ended")


def test_a_later_task_gets_nothing_for_free() -> None:
    resources = Resources(MACHINE)
    for number in (1, 2, 3):
        task = alone(resources, [("wait", 1.0), ("network", 20.0), ("cpu", 0.5)])
        assert resources.now == pytest.approx(number * 3.5)
        assert task.cpu_seconds == pytest.approx(0.5)
    assert resources.cpu_used == pytest.approx(1.5)
