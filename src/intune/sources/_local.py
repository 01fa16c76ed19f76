"""Files on this machine: what is below a folder, through links too, and which names are one and the same file."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow.fs as pafs

from intune._errors import SourceError


@dataclass(frozen=True, slots=True)
class Entry:
    """What a path stands for.

    Attributes:
        path: The path.
        type: A file, a folder, something else (`Unknown`), or nothing (`NotFound`): a link to nothing.
        size: Bytes of a file; None = the filesystem doesn't say.
        modified: Nanoseconds since 1970 when it was last changed; None = the filesystem doesn't say.
    """

    path: str
    type: pafs.FileType
    size: int | None = None
    modified: int | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


def local_path(system: pafs.FileSystem, path: str) -> str | None:
    """The path on this machine of one in a filesystem's terms; None where there is none."""
    if isinstance(system, pafs.LocalFileSystem):
        return path
    if isinstance(system, pafs.SubTreeFileSystem):
        return local_path(system.base_fs, f"{system.base_path.rstrip('/')}/{path.lstrip('/')}")
    return None


def entries(folder: str, skip: Callable[[str], bool], *, recursive: bool) -> Iterator[Entry]:
    """What is in a folder, or all that is below it, but for names that are to be skipped.

    Links to folders are followed. A folder that is reached again from within itself is gone through once more, but
    not the links in it: so that what comes twice is seen to, and the walk ends.
    """
    todo: list[tuple[str, tuple[str, ...], bool]] = [(folder, (os.path.realpath(folder),), True)]
    while todo:
        here, real, follow = todo.pop()
        for entry in _scan(here):
            if skip(entry.name):
                continue
            found = _entry(entry)
            if found is None:
                continue
            yield found
            link = entry.is_symlink()
            if not recursive or found.type != pafs.FileType.Directory or (link and not follow):
                continue
            there = os.path.realpath(entry.path) if link else os.path.join(real[-1], entry.name)
            todo.append((entry.path, (*real, there), follow and there not in real))


def names_in(folder: str) -> list[str]:
    """Names in a folder, for messages; those that are no text are shown with backslashes."""
    return [os.fsencode(name).decode(errors="backslashreplace") for name in os.listdir(folder)]


def check_distinct(paths: Iterable[str]) -> None:
    """Refuse paths of this machine of which two are the same file through links.

    Hard links are files of their own: neither of two names is the other's link.

    Raises:
        SourceError: If two are; with both names, and the name without links.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        real = os.path.join(folders[folder], name)
        if os.path.islink(real):
            real = os.path.realpath(real)
        if real in seen:
            both = f"{path} is given on two filesystems"
            if seen[real] != path:
                both = f"{seen[real]} and {path} are, by way of a link, the same file, {real}"
            raise SourceError(f"{both}; its rows would come twice: give it once, or a pattern that leaves the link out")
        seen[real] = path


def check_names(paths: Iterable[str]) -> None:
    """Refuse names of files that are not text, which nothing here can open.

    Raises:
        SourceError: For the first one; with the name as Python writes it.
    """
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"{os.fsencode(path)!r}: the name is not valid UTF-8, and such files cannot be read: rename it, or "
                "give a pattern that leaves it out"
            ) from None


def _scan(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


def _entry(entry: os.DirEntry[str]) -> Entry | None:
    """What an entry of a folder stands for; None = it has gone meanwhile."""
    try:
        stat = entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return Entry(entry.path, pafs.FileType.NotFound) if entry.is_symlink() else None
    if entry.is_dir():
        return Entry(entry.path, pafs.FileType.Directory)
    if entry.is_file():
        return Entry(entry.path, pafs.FileType.File, stat.st_size, stat.st_mtime_ns)
    return Entry(entry.path, pafs.FileType.Unknown)
