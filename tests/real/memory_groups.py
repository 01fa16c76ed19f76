"""Memory limits that the kernel keeps: v1 control groups, with a program in each from its first instruction on."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from intune._machine import System
from intune._machine.cgroups import levels

MIB = 2**20
HANG_SECONDS = 100.0
SAMPLE_SECONDS = 0.02
PROGRAMS = Path(__file__).parent / "memory_programs.py"


class MemoryGroup:
    """A control group and the program that runs in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.peak_bytes = path, 0
        self._child: subprocess.Popen[str] | None = None
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._sample)

    def start(self, name: str, **choices: Any) -> int:
        """Start one of the programs; gives what it uses after its imports, and lets it wait for `go`."""
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._child = subprocess.Popen(
            ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"', sys.executable, str(PROGRAMS), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._watch.start()
        assert self.line() == "ready"
        self._choices = choices
        return self.used()

    def go(self, **choices: Any) -> None:
        """Let the program begin."""
        self.tell(json.dumps({**self._choices, **choices}))

    def tell(self, line: str) -> None:
        """A line for the program."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def line(self) -> str:
        """The program's next line."""
        assert self._child is not None
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            self._fail()
        return line

    def limit(self, size: int) -> bool:
        """Set the limit; the kernel refuses one that is below what cannot be dropped."""
        try:
            (self.path / "memory.limit_in_bytes").write_text(str(size))
        except OSError:
            return False
        return True

    def used(self) -> int:
        """Anonymous and shared bytes, of everything in it."""
        lines = (self.path / "memory.stat").read_text().splitlines()
        found = {name: int(value) for name, value in (line.split() for line in lines)}
        return found["total_rss"] + found["total_shmem"]

    def kills(self) -> int:
        """Processes that the kernel killed for their memory."""
        lines = (self.path / "memory.oom_control").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    @contextmanager
    def neighbour(self, size: int) -> Iterator[None]:
        """Another program in the group, no child of its first one, that has so many bytes."""
        take = f"import sys; held = b'1' * {size}; print('ready', flush=True); sys.stdin.readline()"
        inside = f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"'
        command = ["sh", "-c", inside, sys.executable, "-c", take]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            try:
                assert program.stdout.readline() == "ready\n"
                yield
            finally:
                program.communicate("\n", timeout=HANG_SECONDS)

    def end(self, kills: int = 0) -> Any:
        """What the program says last, as JSON; so many in its group were killed, and it said nothing else."""
        assert self._child is not None
        out, err = self._child.communicate(timeout=HANG_SECONDS)
        if (self._child.returncode, self.kills(), err) != (0, kills, ""):
            self._fail(err)
        return json.loads(out.splitlines()[-1])

    def close(self) -> None:
        """End the program if it still runs, and remove the group."""
        self._done.set()
        if self._child is not None:
            self._watch.join()
            self._child.kill()
            self._child.communicate()
        deadline = time.monotonic() + 10
        while True:
            try:
                self.path.rmdir()
                return
            except OSError:  # for a moment after its last process was waited for
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _fail(self, said: str | None = None) -> NoReturn:
        assert self._child is not None
        said = self._child.communicate(timeout=HANG_SECONDS)[1] if said is None else said
        limit = int((self.path / "memory.limit_in_bytes").read_text())
        figures = f"{self.kills()} kills for memory, at most {self.peak_bytes / MIB:.0f} of {limit / MIB:.0f} MiB used"
        pytest.fail(f"the program ended with {self._child.returncode}, {figures}: {said}")

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self.used())


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group without a limit; skips the test where none can be made."""
    own = [level for level in levels(System(), "memory") if level.version == 1]
    if not own:
        pytest.skip("no v1 hierarchy with memory is mounted")
    path = Path(own[0].path) / f"intune-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made for a test: {error}")
    group = MemoryGroup(path)
    try:
        if not (path / "memory.oom_control").exists() or "oom_kill " not in (path / "memory.oom_control").read_text():
            pytest.skip("this kernel does not count the processes that it kills for their memory")
        yield group
    finally:
        group.close()
