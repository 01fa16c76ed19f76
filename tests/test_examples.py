"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

from intune.recsys.generate import write_criteo

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(example: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_a_dlrm_on_criteo_rows_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_criteo(tmp_path / "clicks.parquet", 3000)
    first = run("criteo_dlrm.py", "clicks.parquet", folder=tmp_path)
    assert first.startswith("epoch 0: 3,000 rows, mean loss ")
    again = run("criteo_dlrm.py", "clicks.parquet", "--epochs", "2", folder=tmp_path)
    assert again.startswith("epoch 1: 3,000 rows, mean loss ")
    loss = [float(text.splitlines()[0].rsplit(" ", 1)[1]) for text in (first, again)]
    assert loss[1] < loss[0]


@pytest.mark.slow
def test_lists_of_different_lengths(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines = run("jagged_features.py", folder=tmp_path).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"epoch {epoch}: 20" for epoch in range(3)]
    loss = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert loss[2] < loss[1] < loss[0]
