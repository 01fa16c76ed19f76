"""Where to ask: one root folder, the environment and three calls, so that tests can pretend another machine."""

import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple


class Reading(NamedTuple):
    """A figure and where it was read; the figure is None where it could not be read, and `read_from` says why."""

    value: float | None
    read_from: str


def _affinity() -> int:
    # Not os.cpu_count(): it counts CPUs that this process may not use.
    return len(os.sched_getaffinity(0))


def _soft_limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _hard_limit(kind: int) -> int | None:
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard


@dataclass(frozen=True, slots=True)
class System:
    """The machine that is asked.

    Attributes:
        root: Folder below which /proc, /sys and /dev lie; "/" is this machine.
        environ: Environment variables.
        affinity: Gives the number of CPUs in the affinity mask.
        soft_limit: Gives the soft limit of a `resource.RLIMIT_*` kind; None = unlimited.
        hard_limit: Gives the limit up to which this process may raise the soft one; None = unlimited.
    """

    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    affinity: Callable[[], int] = _affinity
    soft_limit: Callable[[int], int | None] = _soft_limit
    hard_limit: Callable[[int], int | None] = _hard_limit

    def path(self, path: str) -> str:
        """The real path of an absolute path of that machine."""
        return self.root.rstrip("/") + path


def read(path: str) -> str:
    """Whole text of a small system file.

    Raises:
        OSError: If it is missing or must not be read.
    """
    # Bare calls: a third of the cost of open(), and these files are read many times a second.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="replace")


def read_or_none(path: str) -> str | None:
    """Whole text of a small system file, or None if it cannot be read."""
    try:
        return read(path)
    except OSError:
        return None


def numbers(text: str | None) -> dict[str, int]:
    """The lines "name 123" and "name: 123 kB" of a text as name -> number as it stands; other lines are left out."""
    found = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1])
    return found


def picked(text: str | None, *names: str) -> dict[str, int]:
    """What `numbers` finds under these names: a third of its cost on files of which few lines are wanted."""
    return {name: int(number) for name, number in _lines_of(names).findall(text or "")}


@lru_cache(maxsize=64)
def _lines_of(names: tuple[str, ...]) -> "re.Pattern[str]":
    return re.compile(rf"^({'|'.join(map(re.escape, names))}):?[ \t]+([0-9]+)(?!\S)", re.MULTILINE)


def process_ids(system: System) -> list[int]:
    """Ids of all processes that can be seen; empty where there is no /proc."""
    try:
        return [int(name) for name in os.listdir(system.path("/proc")) if name.isdecimal()]
    except OSError:
        return []
