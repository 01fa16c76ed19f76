"""A machine made of files, and a clock that stands still until a test moves it."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from intune._machine import System


class FakeMachine:
    """Files below a folder that look like /proc and /sys of some machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts: list[str] = []
        self._groups: list[str] = []

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, kind: str, point: str, *, group: str = "/", root: str = "/", own: bool = True) -> None:
        """Mount a hierarchy ("v2", or the controllers of a v1 one), in which this process is in `group`."""
        (self.root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        number = 30 + len(self._mounts)
        tail = "cgroup2 cgroup2 rw,nsdelegate" if kind == "v2" else f"cgroup cgroup rw,{kind}"
        self._mounts.append(f"{number} 1 0:{number} {root} {point} rw,relatime shared:9 - {tail}\n")
        if own:
            self._groups.append(f"0::{group}\n" if kind == "v2" else f"{number}:{kind}:{group}\n")
        self.write("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/root rw\n" + "".join(self._mounts))
        self.write("/proc/self/cgroup", "1:name=systemd:/x\n" + "".join(self._groups))

    def level(self, path: str, files: Mapping[str, str]) -> None:
        """A v2 group that is not the machine's root, with these files."""
        for name, text in {"cgroup.events": "populated 1\n", **files}.items():
            self.write(f"{path}/{name}", text)

    def system(
        self,
        *,
        affinity: int = 12,
        environ: Mapping[str, str] | None = None,
        soft_limit: Callable[[int], int | None] = lambda kind: None,
    ) -> System:
        return System(str(self.root), environ or {}, lambda: affinity, soft_limit)


class ManualClock:
    """Time that only a test moves; `cpu` may be moved by what is measured, too."""

    def __init__(self) -> None:
        self.wall_seconds = 100.0
        self.cpu_seconds = 0.0

    def wall(self) -> float:
        return self.wall_seconds

    def cpu(self) -> float:
        return self.cpu_seconds

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        self.wall_seconds += seconds
        return wake.is_set()


@pytest.fixture(scope="session")
def machine_at() -> type[FakeMachine]:
    """For property tests, which need a new machine for each example."""
    return FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
