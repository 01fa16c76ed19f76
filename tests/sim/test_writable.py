"""Whether a file or folder can be written, and that looking leaves all as it was."""

from pathlib import Path

import pytest

from intune.sim.writable import check_file, make_folder


def test_a_file_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"kept")
    check_file(there)
    check_file(tmp_path / "new")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("there", b"kept")]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "new"
    with pytest.raises(FileNotFoundError) as error:
        check_file(path)
    assert error.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        check_file(tmp_path)


def test_a_folder_is_made_and_stays_empty(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_in_which_no_files_can_be_made_is_named() -> None:
    with pytest.raises(OSError, match=r"/proc'$") as error:  # there not even root may
        make_folder(Path("/proc"))
    assert error.value.filename == "/proc"
