"""The control groups that hold this process, from its own up to the root.

A controller (cpu, memory, pids) lives in a v1 hierarchy of its own, or in the one v2 hierarchy, or, on a hybrid
machine, some here and some there. Inside a container the path in /proc/self/cgroup may be that of the host,
which does not exist below the container's mount: then the mount itself is the container's group.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from intune._machine.system import System, read_or_none


@dataclass(frozen=True, slots=True)
class Level:
    """One control group that holds this process.

    Attributes:
        path: Its folder.
        version: 1 or 2, which decides how its files are called.
    """

    path: str
    version: Literal[1, 2]

    def file(self, name: str) -> str:
        """Path of one of its files."""
        return f"{self.path}/{name}"

    @property
    def is_machine_root(self) -> bool:
        """Whether it is the group of the whole machine, which by design has no limits (v2 only)."""
        return self.version == 2 and not os.path.exists(self.file("cgroup.events"))


@dataclass(frozen=True, slots=True)
class _Mount:
    """A place where a hierarchy can be seen; `root` is the group that lies there."""

    root: str
    point: str
    version: Literal[1, 2]
    controllers: frozenset[str]


def levels(system: System, controller: str) -> list[Level]:
    """The groups that may limit this process, v1 before v2, each from its own group up to the topmost visible one.

    Args:
        system: The machine that is asked.
        controller: "cpu", "memory" or "pids".
    """
    paths = _own_paths(read_or_none(system.path("/proc/self/cgroup")) or "")
    mounts = _mounts(read_or_none(system.path("/proc/self/mountinfo")) or "")
    found: list[Level] = []
    for version, group in ((1, paths.get(controller)), (2, paths.get(""))):
        if group is None:
            continue
        chain: list[Level] = []
        for mount in mounts:
            if mount.version == version and (version == 2 or controller in mount.controllers):
                # A hierarchy may be mounted more than once; the mount that shows most levels hides least.
                chain = max(chain, _chain(system, mount, group), key=len)
        found += chain
    return found


# Both are read each time, but hardly ever change; taking them apart costs most.


@lru_cache(maxsize=2)
def _own_paths(text: str) -> Mapping[str, str]:
    """By controller the path of the own group; "" stands for v2."""
    paths = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, found, path = rest.partition(":")
        if found:
            paths.update(dict.fromkeys(names.split(","), path))
    return paths


@lru_cache(maxsize=2)
def _mounts(text: str) -> tuple[_Mount, ...]:
    mounts = []
    for line in text.splitlines():
        head, found, tail = line.partition(" - ")
        before, after = head.split(" "), tail.split(" ")
        if not found or len(before) < 5 or after[0] not in ("cgroup", "cgroup2"):
            continue
        version: Literal[1, 2] = 2 if after[0] == "cgroup2" else 1
        options = frozenset(after[2].split(",")) if len(after) > 2 else frozenset()
        mounts.append(_Mount(_unescape(before[3]), _unescape(before[4]), version, options))
    return tuple(mounts)


def _unescape(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def _chain(system: System, mount: _Mount, group: str) -> list[Level]:
    """Levels from the own group to the mount; only the mount if the group cannot be seen below it."""
    top = system.path(mount.point)
    below = _below(mount.root, group)
    if not os.path.isdir(f"{top}/{'/'.join(below)}"):
        below = []
    paths = ["/".join([top, *below[:depth]]) for depth in range(len(below), -1, -1)]
    return [Level(path, mount.version) for path in paths]


def _below(root: str, group: str) -> list[str]:
    """The steps from a mount's group down to the own one; none where the own one lies outside."""
    root_steps = [step for step in root.split("/") if step]
    steps = [step for step in group.split("/") if step]
    # A group outside the namespace is shown as "/../..": nothing of it can be seen.
    if ".." in steps or steps[: len(root_steps)] != root_steps:
        return []
    return steps[len(root_steps) :]
