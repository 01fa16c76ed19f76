"""Columns whose values stand in the names of folders: "day=3/country=de/part-0.parquet"."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs

from intune._errors import SourceError
from intune.sources._files import FileSet

Partitioning: TypeAlias = Literal["hive"] | pa.Schema | pads.HivePartitioning | None
"""How folders become columns: found and typed by their names, of declared names and types, or not at all."""

_DICTIONARY = pa.dictionary(pa.int32(), pa.string())


class Partitions:
    """The partition columns of a list of files; immutable.

    A folder `name=value` is the value of the column `name` for all files below it; pyarrow reads the names. Names and
    values are percent-decoded, and `__HIVE_DEFAULT_PARTITION__` is null. Without declared types a column whose values
    are all whole numbers that fit it is int32, and any other a dictionary of strings. So is one where some values have
    leading zeros and others fewer digits (01 and 1): as numbers these would be the same.

    Attributes:
        schema: Names and types of the columns.
    """

    def __init__(self, files: FileSet, partitioning: Partitioning) -> None:
        """Read the names of the folders.

        Raises:
            SourceError: If a value does not fit its type, or `partitioning` is something else.
        """
        self._files = files
        self._keys: dict[str, dict[str, Any]] = {}
        self.schema, reader = pa.schema([]), None
        if partitioning is not None:
            folders = {_folder(files, index): index for index in reversed(range(len(files)))}
            self.schema, reader = _schema_and_reader(files, folders, partitioning)
        if reader is None or not len(self.schema):
            return
        for folder, index in folders.items():
            _check_once(folder, self.schema.names, files.path(index))
            try:
                self._keys[folder] = pads.get_partition_keys(reader.parse(folder))
            except (pa.ArrowException, ValueError) as error:
                raise _unreadable(f"the folders of {files.path(index)}", error) from error

    def has(self, file: int, name: str) -> bool:
        """Whether a file is in a folder that has a column's value."""
        return name in self._keys.get(_folder(self._files, file), ())

    def column(self, file: int, name: str, rows: int) -> pa.Array:
        """A column's value for a file, so many times."""
        kind = self.schema.field(name).type
        value = self._keys[_folder(self._files, file)][name]
        if not pa.types.is_dictionary(kind):
            return pa.repeat(pa.scalar(value, kind), rows)
        index = pa.scalar(None if value is None else 0, kind.index_type)
        values = [] if value is None else [value]
        return pa.DictionaryArray.from_arrays(pa.repeat(index, rows), pa.array(values, kind.value_type))

    def width(self, name: str) -> int:
        """The most bytes of a value."""
        kind = self.schema.field(name).type
        if pa.types.is_dictionary(kind):
            return int(kind.index_type.bit_width) // 8
        values = {keys[name] for keys in self._keys.values() if name in keys}
        return max((int(pa.array([value], kind).nbytes) for value in values), default=0)

    def identity(self, names: Sequence[str]) -> dict[str, Any]:
        """JSON that tells columns from others with the same relative paths of files: types, and folders above these."""
        above = [part for place in self._files.places for part in place.root.split("/") if "=" in part]
        return {"types": {name: str(self.schema.field(name).type) for name in names}, "above": above}


def _schema_and_reader(
    files: FileSet, folders: dict[str, int], partitioning: Partitioning
) -> tuple[pa.Schema, pads.HivePartitioning]:
    """The columns as they come out, and what reads values from the path of a folder."""
    if isinstance(partitioning, pads.HivePartitioning):
        return partitioning.schema, partitioning
    if isinstance(partitioning, pa.Schema):
        return partitioning, _hive(partitioning)
    if partitioning != "hive":
        raise SourceError(
            "partitioning must be 'hive', None, a pyarrow.Schema with names and types, or what "
            f"pyarrow.dataset.partitioning(schema, flavor='hive') gives, not {partitioning!r}"
        )
    found = _inferred([folder for folder in folders if "=" in folder])
    zeros = _with_uneven_zeros(folders)
    found = pa.schema([field.with_type(pa.string()) if field.name in zeros else field for field in found if field.name])
    typed = [field.with_type(_DICTIONARY) if field.type == pa.string() else field for field in found]
    return pa.schema(typed), _hive(found)


def _with_uneven_zeros(folders: Iterable[str]) -> set[str]:
    """Names of which some values have leading zeros, and not all as many digits."""
    widths: dict[str, set[int]] = defaultdict(set)
    padded = set()
    for folder in folders:
        for part in folder.split("/"):
            name, _, value = part.partition("=")
            digits = unquote(value)
            if not digits.removeprefix("-").isdecimal():
                continue
            widths[unquote(name)].add(len(digits))
            if digits.startswith("-0") or (digits.startswith("0") and len(digits) > 1):
                padded.add(unquote(name))
    return {name for name in padded if len(widths[name]) > 1}


def _inferred(folders: list[str]) -> pa.Schema:
    """Names and types that pyarrow finds; nothing is opened for it."""
    if not folders:
        return pa.schema([])
    options = pads.FileSystemFactoryOptions(exclude_invalid_files=False)
    options.partitioning_factory = pads.HivePartitioning.discover()
    try:
        paths = [f"{folder}file" for folder in folders]
        factory = pads.FileSystemDatasetFactory(pafs.LocalFileSystem(), paths, pads.ParquetFileFormat(), options)
        return factory.inspect(fragments=0)
    except pa.ArrowException as error:
        raise _unreadable("the folders", error) from error


def _hive(schema: pa.Schema) -> pads.HivePartitioning:
    """A reader of plain values: of dictionaries pyarrow would want to know all values first."""
    plain = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    return pads.HivePartitioning(pa.schema(plain))


def _check_once(folder: str, names: list[str], path: str) -> None:
    keys = [part.partition("=")[0] for part in folder.split("/") if "=" in part]
    for name in names:
        if keys.count(name) > 1:
            raise SourceError(
                f"{path} is in two folders {name}=...; which is its value? partitioning=None reads neither"
            )


def _folder(files: FileSet, index: int) -> str:
    return files.location(index).rpartition("/")[0] + "/"


def _unreadable(what: str, error: Exception) -> SourceError:
    return SourceError(
        f"{what} cannot be read as partitions: {error}; declare other types with partitioning=pyarrow.schema(...), or "
        "say partitioning=None to read the files alone"
    )
