"""Memory groups of version 1 for programs of their own: made, filled from the first instruction on, read, removed."""

import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from intune._machine import System
from intune._machine.cgroups import levels


@contextmanager
def memory_group() -> Iterator[Path]:
    """A memory group below the one that holds this process, removed at the end."""
    own = [level for level in levels(System(), "memory") if level.version == 1]
    if not own:
        raise SystemExit("no memory hierarchy of version 1 is mounted: this benchmark needs one that it may write to")
    path = Path(own[0].path) / f"intune-bench-{uuid.uuid4().hex}"
    path.mkdir()
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a group; for a moment after its last process ended the kernel may call it busy."""
    for _ in range(500):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{path} is still in use")


def start(command: Sequence[str], group: Path) -> subprocess.Popen[str]:
    """A program, inside its group from its first instruction on, that has done its imports and said "ready"."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    inside = f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
    child = subprocess.Popen(
        ["sh", "-c", inside, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if line.strip() != "ready":
        child.kill()
        raise RuntimeError(f"{command} did not start: {child.communicate()[1][-2000:]}")
    return child


def stat(group: Path) -> dict[str, int]:
    """What a group says of its memory."""
    lines = (group / "memory.stat").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


def used(group: Path) -> int:
    """Anonymous and shared bytes of a group."""
    found = stat(group)
    return found["total_rss"] + found.get("total_shmem", 0)


def kills(group: Path) -> int:
    """Processes of a group that the kernel killed for their memory."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(dict(line.split() for line in lines).get("oom_kill", 0))


def set_limit(group: Path, size: int) -> bool:
    """Set a group's limit; the kernel refuses one that is below what cannot be dropped."""
    try:
        (group / "memory.limit_in_bytes").write_text(str(size))
    except OSError:
        return False
    return True
