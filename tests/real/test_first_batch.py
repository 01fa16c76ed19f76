"""The first shuffled batch does not wait for a full window."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune

pytestmark = pytest.mark.timeout(180)

GROUPS, ROWS = 40, 250


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": np.arange(GROUPS * ROWS)}), path, row_group_size=ROWS)
    return path


class Gate:
    """Lets the first blocks that were read pass, and the others once it is opened, whatever threads come first."""

    def __init__(self, free: int) -> None:
        self.opened = threading.Event()
        self._free, self._read = free, list[int]()

    def note(self, block: Any) -> Any:
        self._read.append(block["id"][0].as_py())
        return block

    def __call__(self, block: Any) -> Any:
        if block["id"][0].as_py() not in self._read[: self._free] and not self.opened.wait(20):
            raise TimeoutError("more was asked for before the first batch came")
        return block


@pytest.mark.parametrize(
    ("window", "units"), [(None, 1), (2_000, 1), (8_000, 2), (10_000, 3), (1_000, 1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_needs_at_most_three_times_the_units_that_it_needs_without(
    file: Path, window: int | None, units: int, seed: int
) -> None:
    """A window of 2,000 rows is eight units, one of 10,000 all of them."""
    gate = Gate(free=units)
    pipe = intune.read_parquet(file).map(gate.note, executor="thread").map(gate, waits=True, name="gate")
    if window is not None:
        pipe = pipe.shuffle(window)
    with pipe.batch(100).loader(cpus=1, seed=seed) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert first.num_rows == 100
        gate.opened.set()
        ids = [first, *iterator]
    assert sorted(i for batch in ids for i in batch.column("id").to_pylist()) == list(range(GROUPS * ROWS))


def test_the_gate_holds_what_needs_more(file: Path) -> None:
    gate = Gate(free=2)
    gate.opened.wait = lambda timeout=None: False  # type: ignore[method-assign]
    pipe = intune.read_parquet(file).map(gate.note, executor="thread").map(gate, waits=True, name="gate").batch(700)
    with pipe.loader(cpus=1) as loader, pytest.raises(TimeoutError, match="before the first batch"):
        next(iter(loader))
