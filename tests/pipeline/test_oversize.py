"""Row groups that are too large for what may be in flight are named, once, with what to do."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Allocation, Budget
from intune.pipeline.oversize import describe_oversize

MIB = 2**20


class Bytes:
    """A tuner that allows so many bytes in flight."""

    def __init__(self, size: int) -> None:
        self.size = size

    def propose(self, snapshot: Any, budget: Budget) -> Allocation:
        return Allocation({stage.name: None for stage in snapshot.stages}, budget.cpus, self.size)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """One file of 3 groups of 10,000 rows (80 KB a column), one of a single group of 60,000 rows."""
    rows = np.random.default_rng(0).random((2, 60_000))
    small = pa.table({"a": rows[0][:30_000], "b": rows[1][:30_000]})
    pq.write_table(small, tmp_path / "0.parquet", row_group_size=10_000, use_dictionary=False)
    pq.write_table(pa.table({"a": rows[0], "b": rows[1]}), tmp_path / "1.parquet", use_dictionary=False)
    return tmp_path


def test_the_largest_is_named_with_its_size(files: Path) -> None:
    pipe = intune.read_parquet(files)
    bounds = [pipe.source.read_bound(unit) for unit in range(4)]
    assert bounds[3] == max(bounds) > 2 * MIB > bounds[0]
    said = describe_oversize(pipe, 2 * MIB)
    assert said is not None
    assert said.startswith("1 of 4 row groups may each need more memory to be read than may be in flight (2 MiB); ")
    assert f"the largest, {files}/1.parquet, row group 0, about {bounds[3] / MIB:.0f} MiB." in said
    assert "4 of 4 row groups" in (describe_oversize(pipe, bounds[0] - 1) or "")
    assert describe_oversize(pipe, bounds[3] - 1)
    assert describe_oversize(pipe, bounds[3]) is None
    assert describe_oversize(pipe, None) is None


def test_what_it_advises_helps(files: Path) -> None:
    limit = intune.read_parquet(files).source.read_bound(3) - 1
    assert describe_oversize(intune.read_parquet(files), limit)
    assert describe_oversize(intune.read_parquet(files, columns=["a"]), limit) is None
    assert describe_oversize(intune.read_parquet(files, block_rows=5_000), limit) is None


def test_other_sources_have_no_row_groups(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("1\n2\n")
    text = intune.read_tsv(tmp_path / "rows.tsv", schema=pa.schema([("a", pa.int64())]))
    for pipe in (text, intune.from_iterable(range(9)), intune.from_dataset([1, 2])):
        assert describe_oversize(pipe, 1) is None


def test_a_loader_warns_once_and_gives_all_rows_all_the_same(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = intune.read_parquet(files).batch(1_000)
    with caplog.at_level(logging.WARNING, "intune"):
        with pipe.loader(cpus=1, tuner=Bytes(2 * MIB)) as loader:
            for _ in range(2):
                assert sum(batch.num_rows for batch in loader) == 90_000
            assert "1.parquet, row group 0, about" in loader.explain()
        (record,) = caplog.records
        assert "1 of 4 row groups may each need" in record.getMessage()
        caplog.clear()
        with pipe.loader(cpus=1, tuner=Bytes(2000 * MIB)) as loader:
            assert "row group" not in loader.explain()
        assert not caplog.records
