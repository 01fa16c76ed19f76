"""What a path, a folder or a pattern stands for on a filesystem."""

import difflib
import fnmatch
import os
from collections.abc import Callable, Iterable

import pyarrow.fs as pafs

from intune._errors import SourceError
from intune.sources._local import Entry, entries, names_in

LISTED_IN_ERROR = 5
"""Names in a message."""

_LOOKED_AT_FOR_SIMILAR = 10_000
_IGNORED_STARTS = ("_", ".")
_IGNORED_ENDS = (".crc", ".tmp")
_MAGIC = frozenset("*?[")


def files_of(system: pafs.FileSystem, given: str, path: str, info: Entry) -> list[Entry]:
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
    if isinstance(system, pafs.LocalFileSystem) and os.path.islink(path):
        raise _dangling(path)
    if not is_magic(path):
        raise SourceError(f"no file or folder {given!r} (looked for {path!r}){_hint(system, path)}")
    matched: dict[str, Entry] = {}
    for match in _expand(system, path):
        below = _below(system, match.path) if match.type == pafs.FileType.Directory else [match]
        matched.update((file.path, file) for file in below if file.type == pafs.FileType.File)
        if match.type == pafs.FileType.NotFound:
            raise _dangling(match.path)
    if not matched:
        raise SourceError(f"no file matches {given!r} (looked for {path!r}){_hint(system, path)}")
    return list(matched.values())


def _below(system: pafs.FileSystem, folder: str) -> list[Entry]:
    """All files below a folder whose names are not ignored."""
    files = []
    for info in _entries(system, folder, _is_ignored, recursive=True):
        if info.type == pafs.FileType.NotFound:
            raise _dangling(info.path)
        if info.type == pafs.FileType.File and not any(map(_is_ignored, _relative(info.path, folder))):
            files.append(info)
    return files


def _expand(system: pafs.FileSystem, pattern: str) -> Iterable[Entry]:
    """What a pattern matches, listing only the folders that it can lead to."""
    parts = pattern.split("/")
    magic = next(at for at, part in enumerate(parts) if is_magic(part))
    infos = [as_entry(info) for info in system.get_file_info([_joined(parts[:magic])])]
    for at in range(magic, len(parts)):
        folders = [info.path for info in infos if info.type == pafs.FileType.Directory]
        if parts[at] == "**":
            return _expand_deep(system, folders, parts[at:])
        if is_magic(parts[at]):
            found = (entry for folder in folders for entry in _entries(system, folder, _never, recursive=False))
            infos = [entry for entry in found if _name_matches(entry.name, parts[at])]
        else:
            infos = [
                as_entry(info) for info in system.get_file_info([f"{each.rstrip('/')}/{parts[at]}" for each in folders])
            ]
    return infos


def _expand_deep(system: pafs.FileSystem, folders: list[str], parts: list[str]) -> Iterable[Entry]:
    def skip(name: str) -> bool:
        return _is_ignored(name) and not any(_name_matches(name, part) for part in parts if part != "**")

    for folder in folders:
        for entry in _entries(system, folder, skip, recursive=True):
            if _matches(_relative(entry.path, folder), parts):
                yield entry


def _entries(system: pafs.FileSystem, folder: str, skip: Callable[[str], bool], *, recursive: bool) -> Iterable[Entry]:
    """What is in or below a folder; names to skip may be left out."""
    if isinstance(system, pafs.LocalFileSystem):
        return entries(folder, skip, recursive=recursive)
    return map(as_entry, system.get_file_info(pafs.FileSelector(folder, recursive=recursive)))


def as_entry(info: pafs.FileInfo) -> Entry:
    return Entry(info.path, info.type, info.size, info.mtime_ns)


def _never(name: str) -> bool:
    return False


def _dangling(path: str) -> SourceError:
    return SourceError(
        f"{path} is a link to nothing (it says {os.readlink(path)!r}); mend or remove it, as its rows would be missing"
    )


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


def is_magic(text: str) -> bool:
    return not _MAGIC.isdisjoint(text)


def _hint(system: pafs.FileSystem, path: str) -> str:
    """What there is instead, from the deepest part of the path that exists."""
    parts = path.split("/")
    for at in range(len(parts) - 1, 0, -1):
        folder = _joined(parts[:at])
        if is_magic(folder) or system.get_file_info([folder])[0].type != pafs.FileType.Directory:
            continue
        names = sorted(_names(system, folder))
        similar = difflib.get_close_matches(parts[at], names[:_LOOKED_AT_FOR_SIMILAR], n=LISTED_IN_ERROR, cutoff=0.5)
        if similar:
            return f"; {folder!r} has similar names: {', '.join(similar)}"
        if not names:
            return f"; {folder!r} is empty"
        more = ", ..." if len(names) > LISTED_IN_ERROR else ""
        return f"; {folder!r} has {', '.join(names[:LISTED_IN_ERROR])}{more}"
    return ""


def _names(system: pafs.FileSystem, folder: str) -> list[str]:
    if isinstance(system, pafs.LocalFileSystem):
        return names_in(folder)
    return [entry.base_name for entry in system.get_file_info(pafs.FileSelector(folder))]
