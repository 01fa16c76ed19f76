"""Columns from files to tensors: what is missing, hidden or large arrives as it is or not at all."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies
torch = pytest.importorskip("torch")

BIG = 2**53 + 1


def with_lists(block: Any) -> Any:
    """Lists of one row in three missing, with numbers under them that must never show."""
    ids = block.column("id").to_numpy()
    values = np.stack([ids, -1 - ids], axis=1).ravel()
    missing = ids % 3 == 1
    values[np.repeat(missing, 2)] = 98_99
    offsets = pa.array(np.arange(0, 2 * len(ids) + 1, 2, dtype=np.int32))
    lists = pa.ListArray.from_arrays(offsets, pa.array(values), mask=pa.array(missing))
    return pa.RecordBatch.from_arrays([block.column("id"), lists], ["id", "list"])


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_numbers_under_a_missing_list_never_show(tmp_path: Path, executor: Any, shuffled: bool) -> None:
    pq.write_table(pa.table({"id": np.arange(600)}), tmp_path / "rows.parquet", row_group_size=70)
    pipe = intune.read_parquet(tmp_path).map(with_lists, executor=executor, max_concurrency=1)
    if shuffled:
        pipe = pipe.shuffle(150)
    with pipe.batch(32).to_torch().loader(cpus=2) as loader:
        batches = list(loader)
    seen = []
    for batch in batches:
        values, offsets = batch["list"]
        rows = [values[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]
        assert int(offsets[-1]) == len(values)
        assert rows == [[] if i % 3 == 1 else [i, -1 - i] for i in batch["id"].tolist()]
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(600))


@pytest.mark.parametrize("rows", [[BIG, 1, 5, BIG, None, 5, BIG, 2, 3], [True, False, True, True, None, True]])
def test_a_batch_with_a_missing_number_is_an_error_and_those_before_are_exact(tmp_path: Path, rows: list[Any]) -> None:
    pq.write_table(pa.table({"a": rows}), tmp_path / "rows.parquet", row_group_size=2)
    got = []
    with intune.read_parquet(tmp_path).batch(3).to_torch().loader(cpus=2) as loader:
        with pytest.raises(ValueError, match="column 'a' has 1 missing value, the first in row 1 of the batch"):
            got.extend(loader)
        iterator = iter(loader)
        first = next(iterator)["a"]
    assert first.dtype == (torch.bool if rows[0] is True else torch.int64)
    assert first.tolist() == rows[:3]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_fill_of_ones_own_keeps_the_type_and_every_digit(tmp_path: Path, executor: Any) -> None:
    """Only the second batch has missing values."""
    rows = [BIG, 1, 5, None, BIG + 2, None, -BIG, 2, 3]
    pq.write_table(pa.table({"a": pa.array(rows, pa.int64())}), tmp_path / "rows.parquet", row_group_size=4)

    def filled(block: Any) -> Any:
        return {"a": block.column("a").fill_null(0).to_numpy(), "there": block.column("a").is_valid().to_numpy(False)}

    pipe = intune.read_parquet(tmp_path).map(filled, executor=executor, max_concurrency=1).batch(3).to_torch()
    with pipe.loader(cpus=2) as loader:
        batches = list(loader)
    assert [batch["a"].dtype for batch in batches] == [torch.int64] * 3
    assert [value for batch in batches for value in batch["a"].tolist()] == [value or 0 for value in rows]
    assert [there for batch in batches for there in batch["there"].tolist()] == [value is not None for value in rows]


def test_not_a_number_is_a_value_and_missing_is_not(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.0, float("nan")], "b": [1.0, None]}), tmp_path / "rows.parquet")
    with intune.read_parquet(tmp_path, columns=["a"]).batch(2).to_torch().loader(cpus=1) as loader:
        (batch,) = loader
        assert batch["a"].isnan().tolist() == [False, True]
    with (
        intune.read_parquet(tmp_path, columns=["b"]).batch(2).to_torch().loader(cpus=1) as loader,
        pytest.raises(ValueError, match="column 'b' has 1 missing value, the first in row 1"),
    ):
        list(loader)


def test_unsigned_numbers_above_the_signed_range_stay_what_they_are(tmp_path: Path) -> None:
    values = [2**63 - 1, 2**63 + 5, 2**64 - 1]
    pq.write_table(pa.table({"a": pa.array(values, pa.uint64())}), tmp_path / "rows.parquet")
    with intune.read_parquet(tmp_path).batch(3).to_torch().loader(cpus=1) as loader:
        (batch,) = loader
    assert batch["a"].dtype == torch.uint64
    assert batch["a"].tolist() == values


def test_all_columns_that_cannot_be_tensors_are_named_at_once(tmp_path: Path) -> None:
    table = pa.table(
        {
            "fine": [1],
            "when": pa.array([-1_000_000], pa.timestamp("us", "+02:00")),
            "day": pa.array([-1], pa.date32()),
            "price": pa.array(["2.25"]).cast(pa.decimal128(10, 2)),
            "word": ["a"],
            "raw": pa.array([b"x"]),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with (
        intune.read_parquet(tmp_path).batch(1).to_torch().loader(cpus=1) as loader,
        pytest.raises(TypeError, match="map them to numbers before to_torch") as caught,
    ):
        list(loader)
    for name in ("when", "day", "price", "word", "raw"):
        assert f"'{name}'" in str(caught.value)
    assert "fine" not in str(caught.value)
