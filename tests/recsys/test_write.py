"""Files of made-up rows: whole or not there at all, never overwritten, days beside each other."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from intune import IntuneError, PipelineError
from intune.recsys.criteo import criteo_schema, read_criteo
from intune.recsys.generate import CHUNK_ROWS, generate_rows, write_criteo, write_days
from intune.recsys.write import write_batches


@pytest.mark.parametrize("format", ["parquet", "tsv"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_is_broken_off_leaves_nothing(
    tmp_path: Path, format: Literal["parquet", "tsv"], error: type[BaseException]
) -> None:
    def break_off(rows: int) -> None:
        assert rows == 500
        assert [file.suffix for file in tmp_path.iterdir()] == [".tmp"]
        raise error

    with pytest.raises(error):
        write_criteo(tmp_path / "rows", 500, format=format, progress=break_off)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "tsv"])
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, format: str) -> None:
    """The limit of a file's size stands for the disk; only in a process of its own, for nothing lifts it again."""
    program = (
        "import resource, sys\n"
        "from intune.recsys.generate import write_criteo\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        f"write_criteo(sys.argv[1], 20_000, format={format!r})\n"
    )
    target = tmp_path / "rows"
    ended = subprocess.run([sys.executable, "-c", program, target], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == f"intune._errors.IntuneError: {target} was not written: File too large; nothing is left of it"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(IntuneError, match="was not written: File name too long"):
        write_batches(tmp_path / ("x" * 255), [], "tsv", True)


def test_a_file_that_comes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    with pytest.raises(FileExistsError, match=r"rows\.parquet is there already; name a new file"):
        write_criteo(file, 5, progress=lambda rows: file.write_text("mine"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_slice_of_a_batch_is_written_as_it_is(tmp_path: Path) -> None:
    (batch,) = generate_rows(300)
    write_batches(tmp_path / "rows.parquet", [batch.slice(13, 100)], "parquet", True)
    write_batches(tmp_path / "rows.tsv", [batch.slice(13, 100)], "tsv", True)
    for file in tmp_path.iterdir():
        with read_criteo(file).loader(cpus=1) as loader:
            assert pa.Table.from_batches(loader).equals(pa.Table.from_batches([batch.slice(13, 100)]))


# ---- days -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "ending"), [("tsv", ""), ("parquet", ".parquet")])
def test_each_day_is_a_file_of_its_own(tmp_path: Path, format: Literal["parquet", "tsv"], ending: str) -> None:
    done: list[int] = []
    written = list(write_days(tmp_path / "log", 300, days=3, format=format, seed=4, drift=0.1, progress=done.append))
    assert [new.path for new in written] == [tmp_path / "log" / f"day_{day}{ending}" for day in range(3)]
    assert done == [300, 600, 900]
    for day, new in enumerate(written):
        assert (new.rows, new.size_bytes) == (300, new.path.stat().st_size)
        assert new.ideal_auc is not None
        with read_criteo(new.path).loader(cpus=1) as loader:
            found = pa.Table.from_batches(loader)
        assert found.equals(pa.Table.from_batches(generate_rows(300, seed=4, day=day, drift=0.1), criteo_schema()))


def test_if_one_day_is_there_none_is_written(tmp_path: Path) -> None:
    (tmp_path / "day_2").touch()
    with pytest.raises(FileExistsError, match="day_2 is there already"):
        write_days(tmp_path, 10, days=3, format="tsv")
    assert [file.name for file in tmp_path.iterdir()] == ["day_2"]


def test_no_days_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="days must be at least 1, got 0"):
        write_days(tmp_path, 10, days=0)


@pytest.mark.slow
def test_a_row_group_for_each_chunk(tmp_path: Path) -> None:
    write_criteo(tmp_path / "rows.parquet", CHUNK_ROWS + 7)
    footer = pq.read_metadata(tmp_path / "rows.parquet")
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [CHUNK_ROWS, 7]
