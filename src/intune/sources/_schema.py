"""One schema over many files, decided before anything is read and whatever the order of the files."""

import difflib
from collections.abc import Sequence

import pyarrow as pa

from intune._errors import SourceError

_MOST_NAMES = 100
"""Names of columns in a message."""


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings or bytes of any length, which Parquet may store through a dictionary."""
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def merge_schemas(found: Sequence[tuple[str, pa.Schema]], columns: Sequence[str] | None) -> pa.Schema:
    """The schema to which every file can be cast without loss.

    Integers widen to the narrowest type that holds both (int32 and uint32 to int64), floats to the wider float.
    Everything else must be equal. A column is nullable if it is in any file. Metadata is dropped.

    Args:
        found: Path and schema of each file; of files with equal schemas one is enough.
        columns: Wanted columns in their order; None: those of the first file, which all must have, and no others.

    Raises:
        SourceError: If columns are missing (all of a file are listed), or types cannot be joined; the message has
            files, columns, types.
    """
    for path, schema in found:
        _check_unique(path, schema)
    first_path, first = found[0]
    names = list(first.names if columns is None else columns)
    for path, schema in found:
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise SourceError(_missing(path, missing, schema, "" if columns is not None else f" as {first_path} has"))
        extra = [name for name in schema.names if name not in names]
        if columns is None and extra:
            raise SourceError(
                f"{path} has a column {extra[0]!r} that {first_path} has not; name the columns to read with columns="
            )
    return pa.schema([_merge_field(name, [(path, schema.field(name)) for path, schema in found]) for name in names])


def check_columns(columns: Sequence[str] | None) -> None:
    """Refuse a list of columns that is empty, has a name twice, or is a plain string."""
    if columns is None:
        return
    if isinstance(columns, str):
        raise SourceError(f"columns must be a list of names, not the string {columns!r}")
    if not columns:
        raise SourceError("columns is empty; leave it out to read all columns")
    if len(set(columns)) < len(columns):
        raise SourceError(f"columns has a name twice: {', '.join(columns)}")


def _check_unique(path: str, schema: pa.Schema) -> None:
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise SourceError(f"{path} has more than one column {twice!r}; write it again with distinct names")


def _missing(path: str, missing: Sequence[str], schema: pa.Schema, whose: str) -> str:
    """All columns that a file lacks, each with the names that are close to it, and what there is, close ones first."""
    there = list(dict.fromkeys(schema.names))
    wanted, close = [], []
    for name in missing:
        similar = difflib.get_close_matches(name, there, n=3)
        wanted.append(repr(name) + (f" (similar: {', '.join(similar)})" if similar else ""))
        close += similar
    names = list(dict.fromkeys([*close, *there]))
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return (
        f"{path} has no column{'s' if len(missing) > 1 else ''} {', '.join(wanted)}{whose}; "
        f"it has {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"
    )


def _merge_field(name: str, fields: Sequence[tuple[str, pa.Field]]) -> pa.Field:
    merged = fields[0][1].type
    for path, field in fields[1:]:
        wider = _wider(merged, field.type)
        if wider is None:
            # Joining is associative, so one of the earlier files cannot be joined with this one on its own.
            other, kind = next((o, f.type) for o, f in fields if _wider(f.type, field.type) is None)
            raise SourceError(
                f"column {name!r} is {kind} in {other} and {field.type} in {path}; these cannot be joined without "
                f"loss, so write one of them again or read them as two pipelines"
            )
        merged = wider
    return pa.field(name, merged, any(field.nullable for _, field in fields))


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds all values of both, or None."""
    if one == other:
        return one
    both = (one, other)
    if all(map(pa.types.is_floating, both)):
        return max(both, key=lambda kind: kind.bit_width)
    if not all(map(pa.types.is_integer, both)):
        return None
    unsigned = [kind for kind in both if pa.types.is_unsigned_integer(kind)]
    if len(unsigned) != 1:  # both or none
        return max(both, key=lambda kind: kind.bit_width)
    bits = max(kind.bit_width * (2 if kind in unsigned else 1) for kind in both)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)
