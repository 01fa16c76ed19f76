"""Made-up rows: the same for a seed in every format, with the marks of Criteo's files."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from intune import PipelineError
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, criteo_schema
from intune.recsys.generate import CHUNK_ROWS, generate_rows, write_criteo


def table(rows: int, seed: int = 0) -> pa.Table:
    return pa.Table.from_batches(generate_rows(rows, seed=seed), criteo_schema())


def test_the_same_seed_gives_the_same_rows_and_another_one_others() -> None:
    rows = table(500, seed=3)
    assert rows.num_rows == 500
    assert rows.equals(table(500, seed=3))
    assert not rows.equals(table(500, seed=4))


@pytest.mark.slow
def test_whole_batches_do_not_depend_on_how_many_follow() -> None:
    longer = list(generate_rows(CHUNK_ROWS + 10))
    assert [batch.num_rows for batch in longer] == [CHUNK_ROWS, 10]
    assert longer[0].equals(next(generate_rows(CHUNK_ROWS)))
    assert not longer[1].equals(longer[0].slice(0, 10))


def test_no_rows() -> None:
    assert list(generate_rows(0)) == []


def test_values_look_like_those_of_criteo() -> None:
    rows = table(20_000)
    assert 0.1 < pc.mean(rows["label"]).as_py() < 0.4
    assert rows["label"].null_count == 0
    least = [pc.min(rows[name]).as_py() for name in COUNT_COLUMNS]
    assert least[1] == -2
    assert all(value >= 0 for j, value in enumerate(least) if j != 1)
    assert sum(rows[name].null_count > 0 for name in COUNT_COLUMNS) > 10
    above = [pc.mean(pc.cast(pc.greater(rows[name], 2**31 - 1), pa.float64())).as_py() for name in CATEGORY_COLUMNS]
    assert sum(above) / len(above) > 0.3
    assert all(0 <= pc.min(rows[name]).as_py() <= pc.max(rows[name]).as_py() < 2**32 for name in CATEGORY_COLUMNS)
    assert all(rows[name].null_count for name in CATEGORY_COLUMNS)
    commonest = pc.max(pc.value_counts(rows["C20"]).field("counts")).as_py()
    assert commonest > 20 * 20_000 / pc.count_distinct(rows["C20"]).as_py()


def test_the_label_follows_from_what_it_is_said_to_follow_from() -> None:
    rows = table(20_000)
    clicked = rows["label"].to_numpy() == 1
    means = [pc.mean(rows["I1"].filter(pa.array(chosen))).as_py() for chosen in (clicked, ~clicked)]
    assert means[0] > 1.5 * means[1]


@pytest.mark.parametrize(("format", "hex_strings"), [("parquet", False), ("parquet", True), ("tsv", True)])
def test_every_format_holds_the_same_rows(tmp_path: Path, format: Literal["parquet", "tsv"], hex_strings: bool) -> None:
    file = tmp_path / "deep" / f"rows.{format}"
    write_criteo(file, 300, format=format, hex_strings=hex_strings, seed=5)
    assert rows_in(file) == [tuple(row.values()) for row in table(300, seed=5).to_pylist()]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def rows_in(file: Path) -> list[tuple[int | None, ...]]:
    """Rows of a file by plain Python, categories as integers."""

    def read(value: Any, position: int) -> int | None:
        if value in ("", None):
            return None
        return int(value, 16) if position > 13 and isinstance(value, str) else int(value)

    if file.suffix == ".parquet":
        rows = [list(row.values()) for row in pq.read_table(file).to_pylist()]
    else:
        rows = [line.split("\t") for line in file.read_text(encoding="ascii").split("\n")[:-1]]
    assert all(len(row) == 40 for row in rows)
    return [tuple(read(value, position) for position, value in enumerate(row)) for row in rows]


def test_hex_has_eight_lower_case_digits(tmp_path: Path) -> None:
    write_criteo(tmp_path / "rows.tsv", 200, format="tsv")
    words = {w for line in (tmp_path / "rows.tsv").read_text().splitlines() for w in line.split("\t")[14:]} - {""}
    assert {len(word) for word in words} == {8}
    assert set("".join(words)) == set("0123456789abcdef")


def test_a_row_group_for_each_chunk(tmp_path: Path) -> None:
    write_criteo(tmp_path / "rows.parquet", CHUNK_ROWS + 7)
    footer = pq.read_metadata(tmp_path / "rows.parquet")
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [CHUNK_ROWS, 7]


@pytest.mark.parametrize("format", ["parquet", "tsv"])
def test_a_file_of_no_rows(tmp_path: Path, format: Literal["parquet", "tsv"]) -> None:
    write_criteo(tmp_path / f"none.{format}", 0, format=format)
    assert rows_in(tmp_path / f"none.{format}") == []


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=r"rows\.tsv is there already"):
        write_criteo(file, 5, format="tsv")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("rows", "format", "message"), [(-1, "tsv", "rows must be at least 0, got -1"), (1, "csv", "got 'csv'")]
)
def test_nonsense_is_refused(tmp_path: Path, rows: int, format: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        write_criteo(tmp_path / "x", rows, format=format)
    assert list(tmp_path.iterdir()) == []


def test_scores_by_the_true_features_beat_chance() -> None:
    from intune.recsys.metrics import auc

    rows = table(10_000)
    score = np.log1p(rows["I1"].fill_null(0).to_numpy())
    assert auc(rows["label"].to_numpy(), score) > 0.53  # type: ignore[operator]
