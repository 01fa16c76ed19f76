"""Which files a reader reads: paths, patterns and folders made into one sorted list."""

import hashlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

from intune._errors import SourceError
from intune._words import count
from intune.sources._listing import LISTED_IN_ERROR, as_entry, files_of, is_magic
from intune.sources._local import Entry, check_distinct, check_names, local_path

Path: TypeAlias = str | os.PathLike[str] | tuple[Any, str | os.PathLike[str]]
"""A path, a pattern or a folder; or a pair of a filesystem and one of these on it."""

Paths: TypeAlias = Path | Sequence[Path]
"""What a reader takes: one of these, or several."""

_LISTED_IN_IDENTITY = 64
_SECOND = 10**9  # nanoseconds


@dataclass(frozen=True, slots=True)
class Place:
    """A filesystem with files on it.

    Attributes:
        filesystem: Where they are.
        root: What all their paths begin with, "/" included; "" if nothing.
        label: What tells it from the others in messages: "s3://"; "" for local files, or where it is the only one.
        count: How many files.
    """

    filesystem: pafs.FileSystem
    root: str
    label: str
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class FileSet:
    """Files, one filesystem after another in the order in which they were first given, sorted by path on each.

    Attributes:
        places: The filesystems.
        names: Path of each file below the root of its filesystem.
        sizes: int64 [files], bytes of each file when it was listed.
        times: int64 [files], when each was last changed when it was listed: nanoseconds since 1970, or -1 where the
            filesystem doesn't say.
    """

    places: tuple[Place, ...]
    names: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of files."""
        return len(self.names)

    def path(self, index: int) -> str:
        """Full path of a file, for messages."""
        return self._place(index).label + self.location(index)

    def location(self, index: int) -> str:
        """Full path of a file on its filesystem."""
        return self._place(index).root + self.names[index]

    @contextmanager
    def open(self, index: int) -> Iterator[pa.NativeFile]:
        """Open a file for reading, and close it in the end.

        Where the filesystem says when a file was changed, that is compared too: in whole seconds but for local files,
        as object stores give other fractions in a listing. Local files are compared again in the end, as they may be
        written over while they are read; what other filesystems have open stays as it was.

        Raises:
            SourceError: If its size or time is no longer what it was when it was listed.
            OSError: If it cannot be opened.
        """
        with self._place(index).filesystem.open_input_file(self.location(index)) as stream:
            size = stream.size()
            if size != self.sizes[index]:
                listed = count(self.sizes[index], "byte")
                raise self._changed(index, f"{listed} when it was listed, {size:,} now")
            self._check_time(index)
            yield stream
            if isinstance(self._place(index).filesystem, pafs.LocalFileSystem):
                self._check_time(index)

    def modified(self) -> list[int | None] | str | None:
        """When each file was changed when it was listed: nanoseconds since 1970, or a digest where there are many.

        None where the filesystem doesn't say. No part of `identity`: a copy has another time.
        """
        if (self.times < 0).all():
            return None
        if len(self) > _LISTED_IN_IDENTITY:
            return hashlib.sha256(self.times.astype("<i8", copy=False).tobytes()).hexdigest()[:16]
        return [None if time < 0 else time for time in self.times.tolist()]

    def identity(self) -> dict[str, Any]:
        """JSON of a bounded size that tells this list from another: relative paths and sizes, never contents."""
        digest = hashlib.sha256()
        for name, size in zip(self.names, self.sizes.tolist(), strict=True):
            digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
        identity: dict[str, Any] = {"count": len(self), "bytes": int(self.sizes.sum()), "digest": digest.hexdigest()}
        if len(self) <= _LISTED_IN_IDENTITY:
            identity["files"] = [[name, size] for name, size in zip(self.names, self.sizes.tolist(), strict=True)]
        if len(self.places) > 1:
            identity["on_filesystems"] = [place.count for place in self.places]
        return identity

    def _check_time(self, index: int) -> None:
        listed = int(self.times[index])
        if listed < 0:
            return
        system = self._place(index).filesystem
        now = system.get_file_info([self.location(index)])[0].mtime_ns
        fraction = 1 if isinstance(system, pafs.LocalFileSystem) else _SECOND
        if now is not None and now // fraction != listed // fraction:  # None: removed, and the open file is the old one
            raise self._changed(index, f"written {_moment(listed)} when it was listed, {_moment(now)} now")

    def _changed(self, index: int, how: str) -> SourceError:
        return SourceError(
            f"{self.path(index)} has changed while it is in use: {how}; make a new pipeline to read the new content"
        )

    def _place(self, index: int) -> Place:
        if len(self.places) == 1:
            return self.places[0]
        return self.places[bisect_right(list(accumulate(place.count for place in self.places)), index)]


def find_files(paths: Paths, filesystem: Any = None) -> FileSet:
    """List the files that `paths` stand for.

    Args:
        paths: Files are taken as given. Folders are listed with all that is below them, but for names that
            start with "_" or "." or end in ".crc" or ".tmp". Patterns (`*`, `?`, `[...]` within a name, `**`
            for any number of folders) stand for the files and folders that they match; names of that kind are
            matched only where the pattern spells out what makes them so. URIs and pairs (filesystem, path) may be
            on several filesystems.
        filesystem: A pyarrow or fsspec filesystem that all paths are on. None: the local one, what a URI such as
            "s3://bucket/folder" says, or that of the pair.

    Raises:
        SourceError: If a path is missing, a pattern or folder gives nothing, a file is given twice, also by way of a
            link, a link leads to nothing, or a name is not valid UTF-8.
    """
    if not isinstance(paths, Iterable | os.PathLike) or isinstance(paths, bytes):
        raise _no_path(paths)
    given = [paths] if isinstance(paths, str | os.PathLike) or _is_pair(paths) else list(paths)
    if not given:
        raise SourceError("no paths given; give a file, a folder, a pattern, or a list of them")
    groups = _by_filesystem(given, filesystem)
    places, names, sizes, times = [], [], [], []
    listed = [group.files() for group in groups]
    local = (
        local_path(group.filesystem, path) for group, files in zip(groups, listed, strict=True) for path, *_ in files
    )
    check_distinct(path for path in local if path is not None)
    for group, found in zip(groups, listed, strict=True):
        # What the first and the last in order have in common, all have; object names need not be normal paths.
        common = os.path.commonprefix([found[0][0], found[-1][0]])  # noqa: RUF071
        root = common[: common.rfind("/") + 1]
        names += [path[len(root) :] for path, *_ in found]
        sizes += [size for _, size, _ in found]
        times += [time for *_, time in found]
        places.append(Place(group.filesystem, root, group.label if len(groups) > 1 else "", len(found)))
    return FileSet(tuple(places), tuple(names), np.array(sizes, np.int64), np.array(times, np.int64))


@contextmanager
def reading(describe: Callable[[], str]) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a SourceError that says where it happened."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{describe()}: cannot be read: {error}") from error


@dataclass(slots=True)
class _Group:
    """Given paths on one filesystem: as they were given, and in its terms."""

    filesystem: pafs.FileSystem
    label: str
    given: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)

    def add(self, given: str, path: str) -> None:
        """One more path; local ones become absolute."""
        local = isinstance(self.filesystem, pafs.LocalFileSystem)
        if local and not path:
            raise SourceError('a path is "", which is nothing; say "." for the current folder')
        if "\0" in path:
            raise SourceError(f"{given!r} is not the path of a file: it has a NUL in it")
        check_names([path])
        self.given.append(given)
        self.wanted.append(os.path.abspath(path) if local else path.rstrip("/") or path)

    def files(self) -> list[tuple[str, int, int]]:
        """Path, size and time of all files, sorted, each once."""
        found: list[tuple[str, int, int]] = []
        try:
            infos = map(as_entry, self.filesystem.get_file_info(self.wanted))
            for given, path, info in zip(self.given, self.wanted, infos, strict=True):
                found.extend(_sized(file) for file in files_of(self.filesystem, given, path, info))
        except UnicodeDecodeError as error:
            raise SourceError(
                f"cannot list {_short(self.given)}: {error.object!r} is not a name in UTF-8, and such files cannot be "
                "read: rename it"
            ) from None
        except OSError as error:
            raise SourceError(f"cannot list {_short(self.given)}: {error}") from error
        check_names(path for path, *_ in found)
        found.sort()
        for (path, *_), (following, *_) in pairwise(found):
            if path == following:
                raise SourceError(f"{path} is given more than once by {_short(self.given)}; its rows would come twice")
        return found


def _by_filesystem(given: Sequence[Any], filesystem: Any) -> list[_Group]:
    """The paths by filesystem, in the order in which each was first given."""
    groups: list[_Group] = []
    for path in given:
        system, label, text, location = _placed(path, filesystem)
        group = next((group for group in groups if group.filesystem == system), None)
        if group is None:
            group = _Group(system, label)
            groups.append(group)
        group.add(text, location)
    return groups


def _placed(path: Any, filesystem: Any) -> tuple[pafs.FileSystem, str, str, str]:
    """Filesystem of one given path, its label, the path as it was given, and in the filesystem's terms."""
    if _is_pair(path):
        if filesystem is not None:
            raise SourceError(f"filesystem= is given, and {path!r} brings another one; give either")
        system, text = _as_filesystem(path[0]), os.fspath(path[1])
        return system, _label(system, f"{system.type_name}:"), text, text
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise _no_path(path)
    if filesystem is not None:
        return _as_filesystem(filesystem), "", text, text
    if "://" not in text:
        return pafs.LocalFileSystem(), "", text, text
    system, location = _from_uri(text)
    return system, _label(system, text.partition("://")[0] + "://"), text, location


def _no_path(path: Any) -> SourceError:
    return SourceError(
        f"paths must be str, os.PathLike or pairs of a filesystem and one of these, not {type(path).__name__}: {path!r}"
    )


def _is_pair(path: Any) -> bool:
    if not isinstance(path, tuple) or len(path) != 2:
        return False
    return not isinstance(path[0], str | os.PathLike) and isinstance(path[1], str | os.PathLike)


def _label(system: pafs.FileSystem, label: str) -> str:
    return "" if isinstance(system, pafs.LocalFileSystem) else label


def _as_filesystem(filesystem: Any) -> pafs.FileSystem:
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    fsspec = sys.modules.get("fsspec")  # whoever has such an object has imported it
    if fsspec is not None and isinstance(filesystem, fsspec.AbstractFileSystem):
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    raise SourceError(
        f"filesystem must be a pyarrow.fs.FileSystem or an fsspec filesystem, not {type(filesystem).__name__}: "
        f"{filesystem!r}"
    )


def _from_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    """Filesystem and path of a URI whose path may be a pattern; "?" begins its options, as in every URI."""
    location, mark, options = uri.partition("?")
    parts = location.split("/")
    plain = next((at for at, part in enumerate(parts) if is_magic(part)), len(parts))
    try:
        system, path = pafs.FileSystem.from_uri("/".join(parts[:plain]) + mark + options)
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{uri!r} is not a URI that pyarrow can open ({error}); give a filesystem instead") from error
    return system, "/".join([path.rstrip("/"), *parts[plain:]])


def _sized(file: Entry) -> tuple[str, int, int]:
    if file.size is None:
        raise SourceError(f"the filesystem does not say how large {file.path} is")
    return file.path, file.size, -1 if file.modified is None else file.modified


def _moment(nanoseconds: int) -> str:
    """A time in UTC, with as many digits as tell two writes apart."""
    seconds, rest = divmod(nanoseconds, _SECOND)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09}".rstrip("0").rstrip(".") + " UTC"


def _short(given: Sequence[Any]) -> str:
    names = [str(path) for path in given[:LISTED_IN_ERROR]]
    return ", ".join(names) + (f" and {len(given) - len(names):,} more" if len(given) > len(names) else "")
