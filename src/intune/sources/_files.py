"""Which files a reader reads: paths, patterns and folders made into one sorted list."""

import difflib
import fnmatch
import hashlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

from intune._errors import SourceError
from intune._words import count

Path: TypeAlias = str | os.PathLike[str] | tuple[Any, str | os.PathLike[str]]
"""A path, a pattern or a folder; or a pair of a filesystem and one of these on it."""

Paths: TypeAlias = Path | Sequence[Path]
"""What a reader takes: one of these, or several."""

_LISTED_IN_IDENTITY = 64
_LISTED_IN_ERROR = 5
_LOOKED_AT_FOR_SIMILAR = 10_000
_IGNORED_STARTS = ("_", ".")
_IGNORED_ENDS = (".crc", ".tmp")
_MAGIC = frozenset("*?[")


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
    """

    places: tuple[Place, ...]
    names: tuple[str, ...]
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of files."""
        return len(self.names)

    def path(self, index: int) -> str:
        """Full path of a file, for messages."""
        return self._place(index).label + self.location(index)

    def location(self, index: int) -> str:
        """Full path of a file on its filesystem."""
        return self._place(index).root + self.names[index]

    def open(self, index: int) -> pa.NativeFile:
        """Open a file for reading; the caller closes it.

        Raises:
            SourceError: If its size is no longer what it was when it was listed.
            OSError: If it cannot be opened.
        """
        stream = self._place(index).filesystem.open_input_file(self.location(index))
        size = stream.size()
        if size != self.sizes[index]:
            stream.close()
            listed = count(self.sizes[index], "byte")
            raise SourceError(
                f"{self.path(index)} has changed while it is in use: {listed} when it was listed, {size:,} now; "
                "make a new pipeline to read the new content"
            )
        return stream

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
        SourceError: If a path is missing, a pattern or folder gives nothing, or a file is given twice.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) or _is_pair(paths) else list(paths)
    if not given:
        raise SourceError("no paths given; give a file, a folder, a pattern, or a list of them")
    groups = _by_filesystem(given, filesystem)
    places, names, sizes = [], [], []
    for group in groups:
        found = group.files()
        # What the first and the last in order have in common, all have; object names need not be normal paths.
        common = os.path.commonprefix([found[0][0], found[-1][0]])  # noqa: RUF071
        root = common[: common.rfind("/") + 1]
        names += [path[len(root) :] for path, _ in found]
        sizes += [size for _, size in found]
        places.append(Place(group.filesystem, root, group.label if len(groups) > 1 else "", len(found)))
    return FileSet(tuple(places), tuple(names), np.array(sizes, np.int64))


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
        self.given.append(given)
        self.wanted.append(os.path.abspath(path) if local else path.rstrip("/") or path)

    def files(self) -> list[tuple[str, int]]:
        """Path and size of all files, sorted, each once."""
        found: list[tuple[str, int]] = []
        try:
            infos = self.filesystem.get_file_info(self.wanted)
            for given, path, info in zip(self.given, self.wanted, infos, strict=True):
                found.extend(_sized(file) for file in _files_of(self.filesystem, given, path, info))
        except OSError as error:
            raise SourceError(f"cannot list {_short(self.given)}: {error}") from error
        found.sort()
        for (path, _), (following, _) in pairwise(found):
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
    if not isinstance(path, str | os.PathLike):
        raise SourceError(
            f"paths must be str, os.PathLike or pairs of a filesystem and one of these, not {type(path).__name__}: "
            f"{path!r}"
        )
    text = os.fspath(path)
    if filesystem is not None:
        return _as_filesystem(filesystem), "", text, text
    if "://" not in text:
        return pafs.LocalFileSystem(), "", text, text
    system, location = _from_uri(text)
    return system, _label(system, text.partition("://")[0] + "://"), text, location


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
    plain = next((at for at, part in enumerate(parts) if _is_magic(part)), len(parts))
    try:
        system, path = pafs.FileSystem.from_uri("/".join(parts[:plain]) + mark + options)
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{uri!r} is not a URI that pyarrow can open ({error}); give a filesystem instead") from error
    return system, "/".join([path.rstrip("/"), *parts[plain:]])


def _files_of(system: pafs.FileSystem, given: str, path: str, info: pafs.FileInfo) -> list[pafs.FileInfo]:
    """The files that one given path stands for; never none."""
    if info.type == pafs.FileType.File:
        return [info]
    if info.type == pafs.FileType.Directory:
        files = _below(system, path)
        if not files:
            raise SourceError(
                f"the folder {given!r} has no files to read (looked below {path!r}; names that start with _ or . "
                f"or end in .crc or .tmp do not count)"
            )
        return files
    if info.type == pafs.FileType.Unknown:
        raise SourceError(f"{given!r} is neither a file nor a folder (looked at {path!r})")
    if not _is_magic(path):
        raise SourceError(f"no file or folder {given!r} (looked for {path!r}){_hint(system, path)}")
    matched: dict[str, pafs.FileInfo] = {}
    for match in _expand(system, path):
        below = _below(system, match.path) if match.type == pafs.FileType.Directory else [match]
        matched.update((file.path, file) for file in below)
    if not matched:
        raise SourceError(f"no file matches {given!r} (looked for {path!r}){_hint(system, path)}")
    return list(matched.values())


def _below(system: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """All files below a folder whose names are not ignored."""
    return [
        info
        for info in _entries(system, folder, recursive=True)
        if info.type == pafs.FileType.File and not any(map(_is_ignored, _relative(info.path, folder)))
    ]


def _expand(system: pafs.FileSystem, pattern: str) -> Iterable[pafs.FileInfo]:
    """What a pattern matches, listing only the folders that it can lead to."""
    parts = pattern.split("/")
    magic = next(at for at, part in enumerate(parts) if _is_magic(part))
    infos = system.get_file_info([_joined(parts[:magic])])
    for at in range(magic, len(parts)):
        folders = [info.path for info in infos if info.type == pafs.FileType.Directory]
        if parts[at] == "**":
            return _expand_deep(system, folders, parts[at:])
        if _is_magic(parts[at]):
            entries = (entry for folder in folders for entry in _entries(system, folder, recursive=False))
            infos = [entry for entry in entries if _name_matches(entry.base_name, parts[at])]
        else:
            infos = system.get_file_info([f"{folder.rstrip('/')}/{parts[at]}" for folder in folders])
    return [info for info in infos if info.type in (pafs.FileType.File, pafs.FileType.Directory)]


def _expand_deep(system: pafs.FileSystem, folders: list[str], parts: list[str]) -> Iterable[pafs.FileInfo]:
    for folder in folders:
        for entry in _entries(system, folder, recursive=True):
            if _matches(_relative(entry.path, folder), parts):
                yield entry


def _entries(system: pafs.FileSystem, folder: str, *, recursive: bool) -> list[pafs.FileInfo]:
    return list(system.get_file_info(pafs.FileSelector(folder, recursive=recursive)))


def _relative(path: str, folder: str) -> list[str]:
    """Names from a folder down to a path in it; some filesystems answer with another leading slash than asked with."""
    below = folder.strip("/")
    return path.strip("/")[len(below) + 1 if below else 0 :].split("/")


def _joined(parts: list[str]) -> str:
    return "/" if parts == [""] else "/".join(parts)


def _matches(names: list[str], parts: list[str]) -> bool:
    """Whether a relative path matches a pattern in which "**" stands for any number of folders."""
    if not parts:
        return not names
    if parts[0] != "**":
        return bool(names) and _name_matches(names[0], parts[0]) and _matches(names[1:], parts[1:])
    if _matches(names, parts[1:]):
        return True
    return bool(names) and not _is_ignored(names[0]) and _matches(names[1:], parts)


def _name_matches(name: str, part: str) -> bool:
    if not fnmatch.fnmatchcase(name, part):
        return False
    if name.startswith(_IGNORED_STARTS) and part[0] != name[0]:
        return False
    return not any(name.endswith(end) and not part.endswith(end) for end in _IGNORED_ENDS)


def _is_ignored(name: str) -> bool:
    return name.startswith(_IGNORED_STARTS) or name.endswith(_IGNORED_ENDS)


def _is_magic(text: str) -> bool:
    return not _MAGIC.isdisjoint(text)


def _sized(info: pafs.FileInfo) -> tuple[str, int]:
    if info.size is None:
        raise SourceError(f"the filesystem does not say how large {info.path} is")
    return info.path, info.size


def _hint(system: pafs.FileSystem, path: str) -> str:
    """What there is instead, from the deepest part of the path that exists."""
    parts = path.split("/")
    for at in range(len(parts) - 1, 0, -1):
        folder = _joined(parts[:at])
        if _is_magic(folder) or system.get_file_info([folder])[0].type != pafs.FileType.Directory:
            continue
        names = sorted(entry.base_name for entry in _entries(system, folder, recursive=False))
        similar = difflib.get_close_matches(parts[at], names[:_LOOKED_AT_FOR_SIMILAR], n=_LISTED_IN_ERROR, cutoff=0.5)
        if similar:
            return f"; {folder!r} has similar names: {', '.join(similar)}"
        if not names:
            return f"; {folder!r} is empty"
        more = ", ..." if len(names) > _LISTED_IN_ERROR else ""
        return f"; {folder!r} has {', '.join(names[:_LISTED_IN_ERROR])}{more}"
    return ""


def _short(given: Sequence[Any]) -> str:
    names = [str(path) for path in given[:_LISTED_IN_ERROR]]
    return ", ".join(names) + (f" and {len(given) - len(names):,} more" if len(given) > len(names) else "")
