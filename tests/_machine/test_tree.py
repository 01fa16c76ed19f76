"""A process and its descendants, and counters over them."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._machine import System
from intune._machine.tree import Count, Key, Process, ProcessTree, TreeCounter

ME = 100


def process(
    machine: Any, pid: int, parent: int, *, children: str | None = "", started: int = 7, name: str = "x"
) -> None:
    machine.write(f"/proc/{pid}/stat", f"{pid} ({name}) S {parent} " + "0 " * 9 + f"3 4 5 6 0 0 0 0 {started} 0\n")
    if children is not None:
        machine.write(f"/proc/{pid}/task/{pid}/children", children)


def gone(machine: Any, pid: int) -> None:
    (machine.root / f"proc/{pid}/stat").unlink()


def pids(tree: ProcessTree) -> list[int]:
    return sorted(key.pid for key in tree.members())


def test_what_stat_says_whatever_the_name(machine: Any) -> None:
    process(machine, ME, 1, started=42, name="a) S 9 (b) c")
    (found,) = ProcessTree(machine.system(), ME).members().values()
    assert found == Process(Key(ME, 42), parent=1, own_ticks=7, reaped_ticks=11)


def test_children_of_every_thread_and_theirs(machine: Any) -> None:
    process(machine, ME, 1, children="101 102 ")
    machine.write(f"/proc/{ME}/task/555/children", "103")
    process(machine, 101, ME, children="104")
    process(machine, 102, ME)
    process(machine, 103, ME)
    process(machine, 104, 101)
    process(machine, 105, 1)
    assert pids(ProcessTree(machine.system(), ME)) == [100, 101, 102, 103, 104]


def test_a_kernel_that_does_not_list_children(machine: Any) -> None:
    for pid, parent in ((ME, 1), (101, ME), (102, 101), (105, 1)):
        process(machine, pid, parent, children=None)
    assert pids(ProcessTree(machine.system(), ME)) == [100, 101, 102]


def test_a_child_that_the_list_skips_once_stays(machine: Any) -> None:
    process(machine, ME, 1, children="101")
    process(machine, 101, ME, children="102")
    process(machine, 102, 101)
    tree = ProcessTree(machine.system(), ME)
    assert pids(tree) == [100, 101, 102]
    process(machine, ME, 1, children="")
    assert pids(tree) == [100, 101, 102]
    gone(machine, 101)
    process(machine, 102, 1)  # an orphan belongs to nobody here
    assert pids(tree) == [100]


def test_an_id_that_was_given_to_another_process_is_another_key(machine: Any) -> None:
    process(machine, ME, 1, children="101")
    process(machine, 101, ME, started=7)
    tree = ProcessTree(machine.system(), ME)
    assert Key(101, 7) in tree.members()
    process(machine, 101, 1, started=8)
    process(machine, ME, 1, children="")
    assert set(tree.members()) == {Key(ME, 7)}


def test_no_process_at_all(machine: Any) -> None:
    assert ProcessTree(machine.system(), ME).members() == {}


def test_real_children_and_grandchildren() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        parents = {process.key.pid: process.parent for process in ProcessTree(System(), child.pid).members().values()}
        assert child.pid in parents
        assert list(parents.values()).count(child.pid) == 1
        child.stdin.write(b"\n")
    assert child.returncode == 0


class Family:
    """Simulated processes with the kernel's rules for what a child hands over."""

    def __init__(self) -> None:
        self.own, self.reaped, self.parent = {ME: 5}, {ME: 3}, {ME: 0}
        self.done = 0
        self._next = ME

    def pick(self, number: int) -> int:
        return sorted(self.own)[number % len(self.own)]

    def work(self, number: int, ticks: int) -> None:
        self.own[self.pick(number)] += ticks
        self.done += ticks

    def fork(self, number: int) -> None:
        parent = self.pick(number)
        self._next += 1
        self.own[self._next], self.reaped[self._next], self.parent[self._next] = 0, 0, parent

    def end(self, number: int, waited: bool) -> None:
        leaves = sorted(set(self.own) - set(self.parent.values()) - {ME})
        if leaves:
            pid = leaves[number % len(leaves)]
            total = self.own.pop(pid) + self.reaped.pop(pid)
            if waited:
                self.reaped[self.parent[pid]] += total
            del self.parent[pid]

    def growth(self, counter: TreeCounter) -> int:
        members = {Key(pid, 1): Process(Key(pid, 1), self.parent[pid], 0, 0) for pid in self.own}
        return counter.growth(members, {key: Count(self.own[key.pid], self.reaped[key.pid]) for key in members})


STEPS = st.lists(
    st.tuples(st.sampled_from(["work", "work", "fork", "end", "look"]), st.integers(0, 50), st.integers(1, 9)),
    max_size=60,
)


def run(steps: list[tuple[str, int, int]], waited: bool) -> tuple[Family, list[int]]:
    family, counter = Family(), TreeCounter()
    family.growth(counter)
    windows = []
    for step, number, ticks in steps:
        match step:
            case "work":
                family.work(number, ticks)
            case "fork":
                family.fork(number)
            case "end":
                family.end(number, waited)
            case _:
                windows.append(family.growth(counter))
    return family, [*windows, family.growth(counter)]


@given(STEPS)
def test_every_tick_is_counted_once_where_children_are_waited_for(steps: list[tuple[str, int, int]]) -> None:
    family, windows = run(steps, waited=True)
    assert sum(windows) == family.done
    assert min(windows) >= 0


@given(STEPS)
def test_children_that_nobody_waits_for_take_nothing_back(steps: list[tuple[str, int, int]]) -> None:
    family, windows = run(steps, waited=False)
    assert min(windows) >= 0
    assert sum(windows) <= family.done


def test_a_subtree_that_ends_at_once_hands_over_through_its_dead_parents() -> None:
    family, counter = Family(), TreeCounter()
    family.fork(0)
    family.fork(1)
    family.work(2, 40)
    family.growth(counter)
    family.work(2, 2)
    family.end(0, waited=True)
    family.end(0, waited=True)
    assert set(family.own) == {ME}
    assert family.growth(counter) == 2


@pytest.mark.parametrize("lost", [0, 4])
def test_a_counter_that_falls_grows_by_nothing(lost: int) -> None:
    counter = TreeCounter()
    key = Key(ME, 1)
    members = {key: Process(key, 1, 0, 0)}
    assert counter.growth(members, {key: Count(5, 5)}) == 10
    assert counter.growth(members, {key: Count(5 - lost, 5 - lost)}) == 0
