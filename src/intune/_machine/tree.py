"""This process and its descendants, and counters summed over them that never run backwards."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from intune._machine.system import System, process_ids, read_or_none


class Key(NamedTuple):
    """A process, told from a later one with the same id by its start."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc/PID/stat says of a process.

    Attributes:
        key: The process.
        parent: Id of its parent.
        own_ticks: CPU time of its threads, ended ones included, in clock ticks.
        reaped_ticks: CPU time of children that ended and were waited for, and of theirs, in clock ticks.
    """

    key: Key
    parent: int
    own_ticks: int
    reaped_ticks: int


class ProcessTree:
    """The live processes of one tree, zombies included. Not safe for several threads at once."""

    def __init__(self, system: System, pid: int) -> None:
        """Args: system: the machine that is asked. pid: id of the process at the root."""
        self._system = system
        self._pid = pid
        self._last: dict[int, Process] = {}
        # Kernels without this file need a look at every process of the machine instead.
        self._lists_children = os.path.exists(system.path(f"/proc/{pid}/task/{pid}/children"))

    def members(self) -> dict[Key, Process]:
        """The processes of the tree now; empty if even its root cannot be read."""
        by_parent = None if self._lists_children else self._by_parent()
        found: dict[int, Process] = {}
        pending = [self._pid]
        while pending:
            pid = pending.pop()
            process = None if pid in found else self._process(pid)
            if process is not None:
                found[pid] = process
                pending.extend(self._children(pid) if by_parent is None else by_parent.get(pid, []))
        found |= self._overlooked(found)
        self._last = found
        return {process.key: process for process in found.values()}

    def _overlooked(self, found: Mapping[int, Process]) -> dict[int, Process]:
        """Earlier members that were not listed but still belong: the list may skip some while others end."""
        still = {}
        for pid in self._last.keys() - found.keys():
            if (process := self._process(pid)) is not None:
                still[pid] = process
        belong = {}
        for pid, process in still.items():
            above = process.parent
            while above in still:
                above = still[above].parent
            if above in found:
                belong[pid] = process
        return belong

    def _process(self, pid: int) -> Process | None:
        text = read_or_none(self._system.path(f"/proc/{pid}/stat"))
        # The name stands in brackets and may hold anything, brackets and spaces included.
        words = (text or "").rpartition(")")[2].split()
        if len(words) < 20:
            return None
        own, reaped = int(words[11]) + int(words[12]), int(words[13]) + int(words[14])
        return Process(Key(pid, int(words[19])), int(words[1]), own, reaped)

    def _children(self, pid: int) -> list[int]:
        tasks = self._system.path(f"/proc/{pid}/task")
        try:
            threads = os.listdir(tasks)
        except OSError:
            return []
        # Each thread has its own list: that of the children it started.
        texts = [read_or_none(f"{tasks}/{thread}/children") for thread in threads]
        return [int(word) for text in texts if text for word in text.split()]

    def _by_parent(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for pid in process_ids(self._system):
            if (process := self._process(pid)) is not None:
                children.setdefault(process.parent, []).append(pid)
        return children


class Count(NamedTuple):
    """A counter of one process: what it did, and what it took over from children that ended."""

    own: int
    reaped: int


class TreeCounter:
    """Growth of a counter over a tree whose members come and go.

    A child that is waited for hands its counter to its parent: that part was counted while it lived, and is
    not counted again. A child that nobody waits for hands over nothing, and nothing is taken away for it.
    """

    def __init__(self) -> None:
        """Starts with an empty tree."""
        self._last: dict[Key, tuple[Key | None, Count]] = {}

    def growth(self, members: Mapping[Key, Process], counts: Mapping[Key, Count]) -> int:
        """Growth since the last call, at least 0; of a new member everything counts.

        Args:
            members: The processes of the tree.
            counts: The counters of those members that could be read.
        """
        keys = {key.pid: key for key in members}
        inherited = self._handed_over(counts)
        grown = 0
        for key, count in counts.items():
            before = self._last[key][1] if key in self._last else Count(0, 0)
            taken_over = count.reaped - before.reaped - inherited.get(key, 0)
            grown += max(0, count.own - before.own) + max(0, taken_over)
        self._last = {key: (keys.get(members[key].parent), count) for key, count in counts.items()}
        return grown

    def _handed_over(self, counts: Mapping[Key, Count]) -> dict[Key, int]:
        """By survivor, what members that are gone had counted and may have handed to it."""
        inherited: dict[Key, int] = {}
        for key, (parent, count) in self._last.items():
            if key in counts:
                continue
            heir = parent
            while heir is not None and heir not in counts:
                heir = self._last[heir][0] if heir in self._last else None
            if heir is not None:
                inherited[heir] = inherited.get(heir, 0) + count.own + count.reaped
        return inherited
