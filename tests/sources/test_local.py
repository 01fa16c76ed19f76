"""Links, and names that are no text, in folders of this machine."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import intune
from intune._errors import SourceError
from intune.sources._files import find_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two days with a file each."""
    for day in (1, 2):
        put(tmp_path / "data" / f"day{day}" / "f.parquet")
    return tmp_path / "data"


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def found(paths: Any, folder: Path) -> list[str]:
    files = find_files(paths)
    return [files.path(index).removeprefix(f"{folder}/") for index in range(len(files))]


DAYS = ["day1/f.parquet", "day2/f.parquet"]


@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*.parquet", "*/f.parquet", "*/*"])
def test_a_link_to_a_folder_beside_it_would_give_rows_twice(folder: Path, pattern: str) -> None:
    (folder / "latest").symlink_to("day2")
    with pytest.raises(SourceError, match=r"day2/f\.parquet and .*/latest/f\.parquet are, by way of a link, the same"):
        find_files(folder / pattern)
    assert found(folder / "day*", folder) == DAYS
    assert found(folder / "latest", folder) == ["latest/f.parquet"]
    assert found(folder / "**" / "latest" / "*", folder) == ["latest/f.parquet"]


def test_a_link_to_a_file_beside_it(folder: Path) -> None:
    (folder / "day1" / "g.parquet").symlink_to("f.parquet")
    with pytest.raises(
        SourceError, match=r"day1/f\.parquet and .*/day1/g\.parquet are, by way of a link, the same file"
    ):
        find_files(folder)
    assert found(folder / "**" / "f.parquet", folder) == DAYS


def test_links_to_what_is_elsewhere_are_read(folder: Path, tmp_path: Path) -> None:
    put(tmp_path / "store" / "deep" / "s.parquet")
    (folder / "link").symlink_to(tmp_path / "store")
    (folder / "t.parquet").symlink_to("../other.parquet")
    put(tmp_path / "other.parquet")
    assert found(folder, folder) == [*DAYS, "link/deep/s.parquet", "t.parquet"]
    assert found(folder / "**" / "s.parquet", folder) == ["link/deep/s.parquet"]


@pytest.mark.parametrize("links", [{"sub/loop": ".."}, {"sub/one": "..", "sub/two": "../sub"}, {"sub/up": "../.."}])
def test_a_loop_ends_and_would_give_rows_twice(folder: Path, links: dict[str, str]) -> None:
    put(folder / "sub" / "s.parquet")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for pattern in ("", "**", "**/*.parquet"):
        with pytest.raises(SourceError, match="by way of a link, the same file"):
            find_files(folder / pattern)
    assert found(folder / "day*", folder) == DAYS


def test_links_between_folders_end(folder: Path) -> None:
    (folder / "day1" / "next").symlink_to("../day2")
    (folder / "day2" / "next").symlink_to("../day1")
    with pytest.raises(SourceError, match=r"day1/f\.parquet and .*day1/next/next/f\.parquet"):
        find_files(folder)


def test_loops_and_links_that_lead_to_none_of_the_files_do_not_matter(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "self").symlink_to(".")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "up").symlink_to("..")
    (folder / ".venv" / "gone").symlink_to("nowhere")
    (folder / "_gone").symlink_to("nowhere")
    assert found(folder, folder) == DAYS
    assert found(folder / "**" / "*.parquet", folder) == DAYS
    (folder / "readme").symlink_to("nowhere")
    assert found(folder / "**" / "*.parquet", folder) == DAYS


@pytest.mark.parametrize("target", ["nowhere.parquet", "g.parquet", "day1/f.parquet/x"])
@pytest.mark.parametrize("pattern", ["", "*", "*.parquet", "**/g.parquet", "g.parquet"])
def test_a_link_to_nothing_is_an_error(folder: Path, target: str, pattern: str) -> None:
    (folder / "g.parquet").symlink_to(target)
    with pytest.raises(SourceError, match=rf"g\.parquet is a link to nothing \(it says '{target}'\)"):
        find_files(folder / pattern)


def test_the_same_file_by_two_names_in_a_list(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    with pytest.raises(SourceError, match=r"alias/day1/f.parquet and .*data/day1/f.parquet are, by way of a link, the"):
        find_files([folder / "day1" / "f.parquet", tmp_path / "alias" / "day*"])
    below = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
    with pytest.raises(SourceError, match=r"day2/f.parquet is given on two filesystems; its rows would come twice"):
        find_files([folder / "day2", (below, "day2/f.parquet")])
    with pytest.raises(SourceError, match=r"by way of a link"):
        find_files([tmp_path / "alias" / "day2", (below, "day2/f.parquet")])


def test_hard_links_are_files_of_their_own(folder: Path) -> None:
    os.link(folder / "day1" / "f.parquet", folder / "day2" / "g.parquet")
    assert found(folder, folder) == [*DAYS, "day2/g.parquet"]


def test_as_users_call_it(tmp_path: Path) -> None:
    (tmp_path / "day3").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "day3" / "f.parquet")
    (tmp_path / "latest").symlink_to("day3")
    with pytest.raises(SourceError, match="same file"):
        intune.read_parquet(tmp_path)
    with intune.read_parquet(tmp_path / "latest").loader(cpus=1) as loader:
        assert [batch["x"].to_pylist() for batch in loader] == [[1, 2]]


def test_names_that_are_no_text(folder: Path) -> None:
    name = os.fsencode(folder) + b"/day1/bad\xff.parquet"
    Path(os.fsdecode(name)).write_bytes(b"x")
    for given in (folder, folder / "day1" / "*", folder / "**", os.fsdecode(name), [os.fsdecode(name)]):
        with pytest.raises(SourceError, match=r"bad\\xff\.parquet': the name is not valid UTF-8.*rename it"):
            find_files(given)
    assert found(folder / "*" / "f.parquet", folder) == DAYS
    with pytest.raises(SourceError, match=r"has bad\\xff\.parquet, f\.parquet"):
        find_files(folder / "day1" / "zzzzzzzzzzzz")
    below = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
    with pytest.raises(SourceError, match=r"bad\\xff\.parquet' is not a name in UTF-8"):
        find_files("", below)


def test_files_in_a_folder_whose_name_is_no_text(folder: Path) -> None:
    bad = Path(os.fsdecode(os.fsencode(folder) + b"/day\xfe"))
    put(bad / "f.parquet")
    with pytest.raises(SourceError, match=r"day\\xfe/f\.parquet': the name is not valid UTF-8"):
        intune.read_parquet(folder)
