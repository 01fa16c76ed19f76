"""What may be given as the limit of a loader's memory."""

from pathlib import Path
from typing import Any

import pytest

import intune
from intune import PipelineError
from intune._compose import machine_budget
from intune._machine import System, memory_limit

GIB = 2**30


def limit_of(memory: Any, system: System | None = None) -> int | None:
    return machine_budget(system or System(), 1, memory).memory_bytes


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (8 * GIB, 8 * GIB),
        ("8GiB", 8 * GIB),
        (" 8 GiB ", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("1048576", 2**20),
        ("0.5GiB", GIB // 2),
    ],
)
def test_sizes(memory: int | str, size: int) -> None:
    assert limit_of(memory) == size


@pytest.mark.parametrize("memory", ["50%", " 50 % ", "0.5", 0.5, ".5"])
def test_shares_of_what_the_machine_allows(memory: str | float) -> None:
    whole = memory_limit(System()).limit_bytes
    assert whole is not None
    assert limit_of(memory) == int(0.5 * whole)
    assert limit_of("100%") == limit_of(1.0) == limit_of(None) == whole


@pytest.mark.parametrize("memory", ["50%", 0.5])
def test_a_share_of_nothing_known_asks_for_bytes(memory: str | float, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=f"memory={memory!r} is a share, but no limit .* give bytes"):
        limit_of(memory, System(str(tmp_path)))


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ("8g", "'8g' may mean 8GB .* or 8GiB"),
        ("lots", "'lots' is not a size in bytes"),
        ("150%", "'150%' is not a share"),
        ("1.5", "'1.5' is not a share"),
        (0, "must be at least one byte; 0 was given"),
        (-1, "must be at least one byte; -1 was given"),
        (1.5, "got 1.5: a float is a share"),
        (0.0, "got 0.0: a float is a share"),
        (float("nan"), "got nan"),
        (True, r"got True \(bool\)"),
        (b"8GiB", r"got b'8GiB' \(bytes\)"),
    ],
)
def test_what_is_neither_says_what_is_allowed(memory: Any, says: str) -> None:
    pipe = intune.from_iterable(range(10))
    with pytest.raises(PipelineError, match=says) as wrong:
        pipe.loader(memory=memory)
    assert "GiB" in str(wrong.value)
    assert "50%" in str(wrong.value)
