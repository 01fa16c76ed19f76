"""How well a windowed shuffle mixes files that are sorted by label."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune.pipeline.mixing import describe_mixing, units_a_window

GROUPS, ROWS = 40, 250


@pytest.fixture
def sorted_rows(tmp_path: Path) -> Path:
    """10,000 rows in 40 row groups: ids in order, the label 0 in the first half and 1 in the second."""
    ids = np.arange(GROUPS * ROWS)
    table = pa.table({"id": ids, "label": (ids >= len(ids) // 2).astype(np.int64)})
    pq.write_table(table, tmp_path / "sorted.parquet", row_group_size=ROWS)
    return tmp_path / "sorted.parquet"


def test_a_window_of_eight_groups_mixes_what_was_sorted(sorted_rows: Path) -> None:
    """Means over seeds: a single one may have bad luck with the order of the groups."""
    pure, correlated = [], []
    for seed in range(20):
        with intune.read_parquet(sorted_rows).shuffle(2_000, seed=seed).batch(100).loader(cpus=1) as loader:
            batches = list(loader)
        ids = np.concatenate([batch["id"].to_numpy() for batch in batches])
        assert sorted(ids) == list(range(GROUPS * ROWS))
        whole = [batch["label"].to_numpy().mean() for batch in batches]
        pure.append(np.mean([mean in (0.0, 1.0) for mean in whole]))
        correlated.append(abs(np.corrcoef(ids, np.arange(len(ids)))[0, 1]))
    assert np.mean(pure) < 0.1
    assert np.mean(correlated) < 0.3


def test_the_mixing_is_said(sorted_rows: Path) -> None:
    pipe = intune.read_parquet(sorted_rows)
    assert units_a_window(pipe.shuffle(2_000)) == (8.0, 40)
    assert describe_mixing(pipe.shuffle(2_000)) == (
        "Shuffle: a window mixes rows of about 8.0 of 40 units of the source."
    )
    assert str(describe_mixing(pipe.shuffle(500))).endswith("stay together: a larger window mixes more.")
    assert "40.0 of 40 units" in str(describe_mixing(pipe.shuffle(10**6)))
    with pipe.shuffle(500).batch(100).loader(cpus=1) as loader:
        list(loader)
        assert "about 2.0 of 40 units" in loader.explain()


def test_few_units_that_all_share_a_window_are_enough(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(30)}), tmp_path / "a.parquet", row_group_size=10)
    text = describe_mixing(intune.read_parquet(tmp_path).shuffle(100))
    assert text == "Shuffle: a window mixes rows of about 3.0 of 3 units of the source."


def test_where_nothing_can_be_said(sorted_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\n2\n")
    text = intune.read_tsv(tmp_path / "a.tsv", schema=pa.schema([("a", pa.int64())]))
    several = intune.read_parquet(sorted_rows).flat_map(lambda block: [block, block])
    for pipe in (intune.read_parquet(sorted_rows), intune.from_iterable([1]).shuffle(5), text.shuffle(5)):
        assert describe_mixing(pipe) is None
    assert describe_mixing(several.shuffle(5)) is None
