"""Made-up rows: the same for a seed in every format and however many follow."""

import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from intune import PipelineError
from intune.recsys.criteo import criteo_schema
from intune.recsys.generate import CHUNK_ROWS, generate_rows, stated_auc, write_criteo


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


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_rows() -> None:
    def peak(chunks: int) -> int:
        tracemalloc.reset_peak()
        arrow = max(pa.total_allocated_bytes() for _ in generate_rows(chunks * CHUNK_ROWS))
        return tracemalloc.get_traced_memory()[1] + arrow

    tracemalloc.start()
    try:
        list(generate_rows(1))  # the laws are made once
        assert peak(6) < 1.1 * peak(2)
    finally:
        tracemalloc.stop()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"day": -1}, "day must be at least 0, got -1"),
        ({"drift": 1.5}, "drift must be from 0 to 1, got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        generate_rows(5, **options)


def test_what_was_written_is_told(tmp_path: Path) -> None:
    done: list[int] = []
    written = write_criteo(tmp_path / "rows.tsv", 2000, format="tsv", progress=done.append)
    assert (written.path, written.rows) == (tmp_path / "rows.tsv", 2000)
    assert written.size_bytes == written.path.stat().st_size
    assert written.ideal_auc == pytest.approx(stated_auc(rows=2000))
    assert done == [2000]
    assert write_criteo(tmp_path / "none.tsv", 0, format="tsv").ideal_auc is None
