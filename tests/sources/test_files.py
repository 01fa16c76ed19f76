import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest

from intune._errors import SourceError
from intune.sources._files import FileSet, find_files, reading


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of which each has its own size."""
    names = [
        "b.parquet", "a.parquet", "_SUCCESS", ".a.parquet.crc", "p.tmp", "a.parquet.crc", "note.txt",
        "day=1/x.parquet", "day=1/_temporary/y.parquet", "day=2/x.parquet", "day=2/deep/er/z.parquet",
        ".hidden/h.parquet", "odd[1].parquet",
    ]  # fmt: skip
    for size, name in enumerate(names, 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def names(files: FileSet, tree: Path) -> list[str]:
    return [files.path(index).removeprefix(f"{tree}/") for index in range(len(files))]


ALL = [
    "a.parquet", "b.parquet", "day=1/x.parquet", "day=2/deep/er/z.parquet", "day=2/x.parquet", "note.txt",
    "odd[1].parquet",
]  # fmt: skip


def test_a_folder_stands_for_all_below_it_but_ignored_names(tree: Path) -> None:
    assert names(find_files(tree), tree) == ALL
    assert names(find_files(f"{tree}/"), tree) == ALL


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["a.parquet", "b.parquet", "odd[1].parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        ("[!a].parquet", ["b.parquet"]),
        ("day=*/*.parquet", ["day=1/x.parquet", "day=2/x.parquet"]),
        ("day=*/x.parquet", ["day=1/x.parquet", "day=2/x.parquet"]),
        ("*/deep/*/*", ["day=2/deep/er/z.parquet"]),
        ("day=*", ["day=1/x.parquet", "day=2/deep/er/z.parquet", "day=2/x.parquet"]),
        ("**", ALL),
        ("**/*", ALL),
        ("**/*.parquet", [name for name in ALL if name != "note.txt"]),
        ("**/x.parquet", ["day=1/x.parquet", "day=2/x.parquet"]),
        ("day=2/**/*.parquet", ["day=2/deep/er/z.parquet", "day=2/x.parquet"]),
        ("**/er/**", ["day=2/deep/er/z.parquet"]),
        ("*", ALL),
        ("odd[1].parquet", ["odd[1].parquet"]),  # a name that exists is no pattern
        ("odd[[]1].parquet", ["odd[1].parquet"]),
        ("_*", ["_SUCCESS"]),
        ("*.tmp", ["p.tmp"]),
        (".hidden/*", [".hidden/h.parquet"]),
    ],
)
def test_patterns(tree: Path, pattern: str, expected: list[str]) -> None:
    assert names(find_files(tree / pattern), tree) == expected


@pytest.mark.parametrize("name", ["_SUCCESS", ".a.parquet.crc", "p.tmp", ".hidden/h.parquet"])
def test_a_path_that_is_spelled_out_is_taken_as_given(tree: Path, name: str) -> None:
    assert names(find_files(str(tree / name)), tree) == [name]


def test_several_kinds_at_once_come_sorted_with_their_sizes(tree: Path) -> None:
    files = find_files([tree / "day=2", str(tree / "b*.parquet"), tree / "_SUCCESS"])
    assert names(files, tree) == ["_SUCCESS", "b.parquet", "day=2/deep/er/z.parquet", "day=2/x.parquet"]
    assert files.sizes.dtype == np.int64
    assert [Path(files.path(index)).stat().st_size for index in range(4)] == files.sizes.tolist()


def test_relative_paths(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "day=1")
    assert names(find_files(["../day=2/x.parquet", "x.parquet", "../?.parquet"]), tree) == [
        "a.parquet",
        "b.parquet",
        "day=1/x.parquet",
        "day=2/x.parquet",
    ]
    monkeypatch.chdir(tree)
    assert names(find_files("."), tree) == ALL
    assert names(find_files("**"), tree) == ALL


@pytest.mark.parametrize("twice", [["a.parquet", "*.parquet"], ["a.parquet", "./a.parquet"], ["day=2", "**"]])
def test_a_file_given_twice_is_refused(tree: Path, twice: list[str]) -> None:
    with pytest.raises(SourceError, match="more than once") as caught:
        find_files([f"{tree}/{name}" for name in twice])
    assert "parquet is given" in str(caught.value)


def test_a_missing_file_says_what_was_given_where_it_was_looked_for_and_what_is_there(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(SourceError) as caught:
        find_files("day=1/x.parqet")
    message = str(caught.value)
    assert "'day=1/x.parqet'" in message
    assert f"{tree}/day=1/x.parqet" in message
    assert "x.parquet" in message.split(";")[1]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("dai=1/x.parquet", "similar names: day=1, day=2"),
        ("c.parqet", "a.parquet"),
        ("*.parket", "parquet"),
        ("day=1/*.csv", "x.parquet"),
        ("dai=1/*.parquet", "day=1"),
        ("zzzzzzzzzz", "has .a.parquet.crc, .hidden, _SUCCESS, a.parquet, a.parquet.crc, ..."),
    ],
)
def test_hints(tree: Path, given: str, hint: str) -> None:
    with pytest.raises(SourceError, match=re.escape(hint)):
        find_files(tree / given)


def test_folders_without_files(tree: Path) -> None:
    (tree / "empty").mkdir()
    (tree / "marks").mkdir()
    (tree / "marks" / "_SUCCESS").touch()
    for name in ("empty", "marks", "empty/*", "empty/**", "marks/*"):
        with pytest.raises(SourceError, match=re.escape(str(tree / name))):
            find_files(tree / name)
    with pytest.raises(SourceError, match="no paths given"):
        find_files([])


@pytest.mark.parametrize("bad", [[3], [None], [b"a"]])
def test_paths_of_another_type(bad: list[object]) -> None:
    with pytest.raises(SourceError, match=re.escape(type(bad[0]).__name__)):
        find_files(bad)  # type: ignore[arg-type]


def test_identity_is_about_names_and_sizes_below_the_common_folder(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("copy") / "elsewhere"
    for name in ALL:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes((tree / name).read_bytes())
    identity = find_files(tree).identity()
    assert identity == find_files(other).identity()
    assert identity["files"][0] == ["a.parquet", 2]
    assert (identity["count"], identity["bytes"]) == (len(ALL), sum((tree / name).stat().st_size for name in ALL))
    (other / "a.parquet").write_bytes(b"yy")  # same size: contents do not count
    assert identity == find_files(other).identity()
    (other / "a.parquet").write_bytes(b"yyy")
    assert identity["digest"] != find_files(other).identity()["digest"]
    (other / "a.parquet").write_bytes(b"yy")
    (other / "b.parquet").rename(other / "c.parquet")
    assert identity["digest"] != find_files(other).identity()["digest"]


def test_identity_of_many_files_stays_small(tmp_path: Path) -> None:
    for index in range(100):
        (tmp_path / f"part-{index:03}").touch()
    identity = find_files(tmp_path).identity()
    assert (identity["count"], len(identity["digest"])) == (100, 64)
    assert "files" not in identity


def test_common_root(tree: Path) -> None:
    assert find_files(tree / "a.parquet").names == ("a.parquet",)
    assert find_files([tree / "day=1", tree / "day=2/x.parquet"]).names == ("day=1/x.parquet", "day=2/x.parquet")


def test_uris(tree: Path) -> None:
    uri = tree.as_uri()
    assert names(find_files(uri), tree) == ALL
    assert names(find_files(f"{uri}/day=*/x.parquet"), tree) == ["day=1/x.parquet", "day=2/x.parquet"]
    assert names(find_files([f"{uri}/a.parquet", tree / "b.parquet"]), tree) == ["a.parquet", "b.parquet"]
    with pytest.raises(SourceError, match=r"nosuch://here.*give a filesystem instead"):
        find_files("nosuch://here/a")


def mock(*files: tuple[str, bytes]) -> pafs.FileSystem:
    """A filesystem in memory, unlike every other one."""
    system = pafs._MockFileSystem()
    for path, content in files:
        system.create_dir(path.rpartition("/")[0])
        with system.open_output_stream(path) as stream:
            stream.write(content)
    return system


def test_paths_on_several_filesystems_come_one_filesystem_after_the_other(tree: Path) -> None:
    one = mock(("bucket/b.parquet", b"12345"), ("bucket/a.parquet", b"1234"))
    two = mock(("bucket/a.parquet", b"123"))
    below = pafs.SubTreeFileSystem(str(tree / "day=2"), pafs.LocalFileSystem())
    files = find_files([(one, "bucket"), tree / "b.parquet", (two, "bucket/*")])
    assert [files.path(index) for index in range(len(files))] == [
        "mock:bucket/a.parquet", "mock:bucket/b.parquet", f"{tree}/b.parquet", "mock:bucket/a.parquet"
    ]  # fmt: skip
    assert files.sizes.tolist() == [4, 5, 1, 3]
    contents = []
    for index in range(len(files)):
        with files.open(index) as stream:
            contents.append(stream.read())
    assert contents == [b"1234", b"12345", b"x", b"123"]
    mixed = find_files([f"{tree.as_uri()}/a.parquet", (below, "x.parquet"), str(tree / "b.parquet"), (below, "deep")])
    assert [mixed.location(index).removeprefix(f"{tree}/").lstrip("/") for index in range(4)] == [
        "a.parquet", "b.parquet", "deep/er/z.parquet", "x.parquet"
    ]  # fmt: skip
    assert mixed.path(2).startswith("subtree:")


def test_identity_on_several_filesystems(tree: Path) -> None:
    files = [("bucket/day/a", b"1"), ("bucket/day/b", b"22")]
    identity = find_files([tree / "day=1", (mock(*files), "bucket")]).identity()
    assert identity == find_files([tree / "day=1", (mock(*files, ("k/c", b"")), "bucket/day/*")]).identity()
    assert identity["on_filesystems"] == [1, 2]
    assert identity["count"] == 3
    assert identity != find_files([(mock(*files), "bucket"), tree / "day=1"]).identity()
    alone = find_files((mock(*files), "bucket"))
    assert alone.path(0) == "bucket/day/a"
    assert "on_filesystems" not in alone.identity()


def test_mistakes_with_several_filesystems(tree: Path) -> None:
    one = mock(("bucket/a", b"1"))
    with pytest.raises(SourceError, match=r"no file or folder 'bucket/c'.*'bucket' has a"):
        find_files([tree, (one, "bucket/c")])
    with pytest.raises(SourceError, match="bucket/a is given more than once"):
        find_files([(one, "bucket"), tree, (one, "bucket/a")])
    with pytest.raises(SourceError, match=r"filesystem= is given, and .* brings another one"):
        find_files([(one, "bucket")], pafs.LocalFileSystem())
    with pytest.raises(SourceError, match=r"pyarrow\.fs\.FileSystem or an fsspec filesystem, not int"):
        find_files([(3, "bucket")])  # type: ignore[list-item]
    (tree / "b.parquet").write_bytes(b"longer")
    files = find_files([(one, "bucket"), tree / "b.parquet"])
    with one.open_output_stream("bucket/a") as stream:
        stream.write(b"123")
    with pytest.raises(SourceError, match="mock:bucket/a has changed"), files.open(0):
        pass


def test_a_pyarrow_filesystem(tree: Path) -> None:
    below = pafs.SubTreeFileSystem(str(tree), pafs.LocalFileSystem())
    for given, expected in [
        ("day=2", ["day=2/deep/er/z.parquet", "day=2/x.parquet"]),
        ("day=*/x.parquet", ["day=1/x.parquet", "day=2/x.parquet"]),
        ("**/x.parquet", ["day=1/x.parquet", "day=2/x.parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        ("", ALL),
        ("**", ALL),
    ]:
        files = find_files(given, below)
        assert [files.path(index).lstrip("/") for index in range(len(files))] == expected, given
        with files.open(0) as stream:
            assert stream.size() == files.sizes[0]
    with pytest.raises(SourceError, match=r"c\.parquet"):
        find_files("c.parquet", below)


def test_an_fsspec_filesystem(tree: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name in ALL:
        memory.pipe(f"/data/{name}", (tree / name).read_bytes())
    try:
        for given in ("/data", "/data/**", "data/"):
            files = find_files(given, memory)
            assert [files.path(index).removeprefix("/data/") for index in range(len(files))] == ALL
        files = find_files(["/data/day=*/x.parquet", "/data/a.parquet"], memory)
        assert files.names == ("a.parquet", "day=1/x.parquet", "day=2/x.parquet")
        with files.open(1) as stream:
            assert stream.read() == (tree / "day=1/x.parquet").read_bytes()
        with pytest.raises(SourceError, match=r"a\.parquet"):
            find_files("/data/A.parquet", memory)
    finally:
        memory.store.clear()


def test_another_object_is_no_filesystem(tree: Path) -> None:
    with pytest.raises(SourceError, match=r"pyarrow\.fs\.FileSystem or an fsspec filesystem, not str"):
        find_files(tree, "s3")


def test_a_file_that_changes_its_size_is_noticed_and_not_left_open(tree: Path) -> None:
    files = find_files(tree / "a.parquet")
    (tree / "a.parquet").write_bytes(b"longer than before")
    with pytest.raises(SourceError, match=r"a\.parquet has changed.*2 bytes.*18 now"), files.open(0):
        pass


@pytest.mark.parametrize("way", ["replaced", "written over", "touched"])
def test_a_file_of_the_same_size_that_was_changed_is_noticed(tree: Path, way: str) -> None:
    files = find_files(tree)
    path = tree / "b.parquet"
    with files.open(1) as stream:
        assert stream.read() == b"x"
    before = path.stat().st_mtime_ns
    if way == "replaced":
        (tree / "new").write_bytes(b"y")
        (tree / "new").rename(path)
    elif way == "written over":
        path.write_bytes(b"y")
    os.utime(path, ns=(before, before + 1))  # the least that can be told
    with pytest.raises(SourceError, match=r"b\.parquet has changed while it is in use: written .* UTC"), files.open(1):
        pass
    with files.open(0) as stream:
        assert stream.read() == b"xx"


def test_a_file_that_is_written_over_while_it_is_open_is_noticed_in_the_end(tree: Path) -> None:
    files = find_files(tree / "b.parquet")
    before = (tree / "b.parquet").stat().st_mtime_ns

    def write_over() -> None:
        with files.open(0):
            (tree / "b.parquet").write_bytes(b"y")
            os.utime(tree / "b.parquet", ns=(0, before - 5))

    with pytest.raises(SourceError, match="has changed"):
        write_over()


def test_a_file_that_is_removed_while_it_is_open_is_still_what_it_was(tree: Path) -> None:
    files = find_files(tree / "a.parquet")
    with files.open(0) as stream:
        (tree / "a.parquet").unlink()
        assert stream.read() == b"xx"
    with pytest.raises(FileNotFoundError), files.open(0):
        pass


def test_other_filesystems_are_compared_in_whole_seconds(tree: Path) -> None:
    below = pafs.SubTreeFileSystem(str(tree), pafs.LocalFileSystem())
    os.utime(tree / "b.parquet", ns=(0, 5_000_000_001))
    files = find_files("b.parquet", below)
    os.utime(tree / "b.parquet", ns=(0, 5_900_000_000))
    with files.open(0) as stream:
        assert stream.read() == b"x"
    os.utime(tree / "b.parquet", ns=(0, 6_000_000_000))
    with (
        pytest.raises(SourceError, match=r"written 1970-01-01 00:00:05\.000000001 UTC .* 00:00:06 UTC now"),
        files.open(0),
    ):
        pass


def test_where_no_time_is_known_sizes_are_compared(tree: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/data/a", b"1")
    try:
        files = find_files("/data/a", memory)
        assert files.modified() is None
        memory.pipe("/data/a", b"2")
        with files.open(0) as stream:
            assert stream.read() == b"2"
    finally:
        memory.store.clear()


def test_times_are_told_beside_the_identity(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    os.utime(tree / "a.parquet", ns=(0, 7))
    files = find_files([tree / "a.parquet", tree / "b.parquet"])
    assert files.modified() == [7, (tree / "b.parquet").stat().st_mtime_ns]
    mixed = find_files([tree / "a.parquet", (mock(("bucket/a", b"")), "bucket")])
    assert isinstance(mixed.modified(), list)
    many = tmp_path_factory.mktemp("many")
    for index in range(100):
        (many / f"{index:03}").touch()
    digest = find_files(many).modified()
    assert isinstance(digest, str)
    assert digest == find_files(many).modified()
    os.utime(many / "050", ns=(0, 0))
    assert digest != find_files(many).modified()


@pytest.mark.parametrize("bad", [None, 5, b"a", 2.5])
def test_what_is_no_path_at_all(bad: object) -> None:
    with pytest.raises(SourceError, match=f"paths must be str.* not {type(bad).__name__}"):
        find_files(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", [""], ["a.parquet", ""]])
def test_an_empty_path_is_not_the_current_folder(tree: Path, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    for system in (None, pafs.LocalFileSystem()):
        with pytest.raises(SourceError, match=r'say "\." for the current folder'):
            find_files(given, system)


def test_a_path_with_a_nul(tree: Path) -> None:
    for given in ("a\0b", f"{tree}/*\0"):
        with pytest.raises(SourceError, match="has a NUL in it"):
            find_files(given)


def test_reading_errors_name_the_place_and_memory_errors_pass() -> None:
    with pytest.raises(SourceError, match=r"^here: cannot be read: no such thing$") as caught, reading(lambda: "here"):
        raise OSError("no such thing")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(MemoryError), reading(lambda: "here"):
        raise MemoryError
    with pytest.raises(KeyError), reading(lambda: "here"):
        raise KeyError
