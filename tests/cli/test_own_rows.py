from pathlib import Path

import pyarrow.parquet as pq
import pytest

from intune import IntuneError, __version__
from intune.cli.own_rows import own_rows


def test_rows_are_made_once_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = own_rows(500)
    assert file == tmp_path / "intune" / f"clicks-500-{__version__}.parquet"
    assert pq.read_metadata(file).num_rows == 500
    assert capsys.readouterr().out == f"no PATH given: making 500 rows of click logs in {file}, once\n"
    made = file.stat().st_mtime_ns
    assert own_rows(500) == file
    assert file.stat().st_mtime_ns == made
    assert capsys.readouterr().out == f"no PATH given: using the made-up rows in {file}\n"


def test_without_the_variable_it_is_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_rows(10).parent == tmp_path / ".cache" / "intune"


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "intune").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(IntuneError, match=r"the folder .*intune cannot be made: File exists"):
        own_rows(10)
