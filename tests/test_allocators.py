"""Giving back to the system what allocators keep."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from intune._allocators import release_unused

MIB = 2**20


def in_a_fresh_process(program: str, *arguments: str) -> Any:
    """What it prints as JSON."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["main", "another"])
def test_arrow_and_the_c_library_give_back_what_they_keep(asks: str) -> None:
    """In a fresh process: what was freed is resident until it is asked for, by a thread that had none of it, too."""
    program = """
import json, sys, threading
import pyarrow as pa
from intune._allocators import release_unused
from intune._machine import System, own_memory

def resident():
    return own_memory(System()).value

pool = pa.default_memory_pool()
held = [pa.allocate_buffer(1 << 20, memory_pool=pool) for _ in range(64)]
for buffer in held:
    memoryview(buffer).cast("B")[::4096] = bytes([1]) * 256
small = [bytearray(100_000) for _ in range(640)]  # of the heap: too small for mappings of their own
for each in small:
    each[::4096] = bytes([1]) * len(each[::4096])
kept = bytearray(100_000)  # the end of the heap stays in use
full = resident()
del held, buffer, small, each
for _ in range(2):
    if sys.argv[1] == "main":
        release_unused()
    else:
        thread = threading.Thread(target=release_unused)
        thread.start()
        thread.join()
print(json.dumps([full, resident()]))
"""
    full, after = in_a_fresh_process(program, asks)
    assert full - after > 110 * MIB


@pytest.mark.slow
def test_where_arrow_had_nothing_it_is_left_alone() -> None:
    """Its first bytes would cost two megabytes, in each worker process that only imported it."""
    program = """
import json
import pyarrow as pa
from intune._allocators import release_unused
release_unused()
print(json.dumps(pa.default_memory_pool().max_memory()))
"""
    assert in_a_fresh_process(program) == 0


def test_it_can_be_asked_for_at_any_time() -> None:
    release_unused()
