"""CPUs of the whole machine, whoever uses them."""

from typing import Any

import pytest

from intune._machine import (
    System,
    cpu_model,
    frequency_share,
    nvidia_driver,
    online_cpus,
    steal_share,
    throttled_share,
)

POINT = "/sys/fs/cgroup"
STAT = "cpu  100 20 30 600 50 0 0 200 7 8\ncpu0 1 2 3 4 5 6 7 8\ncpu13 1 2 3 4 5 6 7 8\nintr 1\n"


def test_cpus_and_their_name(machine: Any) -> None:
    machine.write("/proc/stat", STAT)
    machine.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: A  CPU @ 2.50GHz\nmodel name : another\n")
    assert (online_cpus(machine.system()), cpu_model(machine.system())) == (2, "A CPU @ 2.50GHz")


def test_steal_is_a_share_of_all_time_and_guests_are_not_counted_twice(machine: Any) -> None:
    machine.write("/proc/stat", STAT)
    reading = steal_share(machine.system())
    assert reading == (0.2, f"steal since boot in {machine.root}/proc/stat")


def test_the_lowest_frequency_cap_counts(machine: Any) -> None:
    for cpu, allowed in ((0, "3000000"), (1, "1500000"), (2, "odd")):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cpufreq"
        machine.write(f"{folder}/scaling_max_freq", f"{allowed}\n")
        machine.write(f"{folder}/cpuinfo_max_freq", "3000000\n")
    assert frequency_share(machine.system()).value == 0.5


@pytest.mark.parametrize("kind", ["v2", "cpu"])
def test_the_level_that_is_held_back_most_counts(machine: Any, kind: str) -> None:
    machine.mount(kind, POINT, group="/pod/job")
    machine.level(f"{POINT}/pod", {"cpu.stat": "nr_periods 200\nnr_throttled 50\n"})
    machine.level(f"{POINT}/pod/job", {"cpu.stat": "nr_periods 100\nnr_throttled 10\n"})
    reading = throttled_share(machine.system())
    assert reading == (0.25, f"nr_throttled / nr_periods in {machine.root}{POINT}/pod/cpu.stat")


def test_a_group_without_a_quota_has_no_periods(machine: Any) -> None:
    machine.mount("v2", POINT)
    machine.level(POINT, {"cpu.stat": "usage_usec 5\nnr_periods 0\nnr_throttled 0\n"})
    assert throttled_share(machine.system()) == (None, "no cpu.stat counts periods")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n",
    ],
)
def test_the_driver_of_gpus(machine: Any, text: str) -> None:
    assert nvidia_driver(machine.system()) is None
    machine.write("/proc/driver/nvidia/version", text)
    assert nvidia_driver(machine.system()) == "550.54.15"


def test_what_cannot_be_read_is_none(machine: Any) -> None:
    system = machine.system()
    figures = [online_cpus(system), cpu_model(system)]
    assert figures == [None, None]
    assert [ask(system).value for ask in (steal_share, frequency_share, throttled_share)] == [None] * 3


def test_this_machine() -> None:
    cpus = online_cpus(System())
    assert cpus is not None
    assert cpus >= System().affinity()
    share = steal_share(System()).value
    assert share is None or 0 <= share < 1
