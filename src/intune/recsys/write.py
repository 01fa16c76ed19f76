"""Writes batches of Criteo columns to a file, as text or Parquet; the file is there when it is whole, or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from intune._errors import IntuneError, PipelineError
from intune.recsys.criteo import CATEGORY_COLUMNS, criteo_schema
from intune.recsys.whole import whole_file

FileFormat: TypeAlias = Literal["parquet", "tsv"]

_DIGITS = np.array([f"{i:04x}" for i in range(65_536)], "S4").view(np.uint32)


def check_format(format: str) -> None:
    """Refuse what cannot be written.

    Raises:
        PipelineError: If the format is unknown.
    """
    if format not in ("parquet", "tsv"):
        raise PipelineError(f"format must be 'parquet' or 'tsv', got {format!r}")


def _check_new(path: Path) -> None:
    if os.path.exists(path):  # unlike Path.exists, no error where the name is too long
        raise FileExistsError(f"{path} is there already; name a new file")


def write_batches(path: Path, batches: Iterable[pa.RecordBatch], format: FileFormat, hex_strings: bool) -> None:
    """Write a new file under a temporary name that readers ignore, then give it its own.

    Args:
        path: The file; its folder is made where needed.
        batches: Rows with the columns of `criteo_schema`; each batch becomes a row group of Parquet.
        format: "parquet", or "tsv": as Criteo ships it, without header, an empty field where missing.
        hex_strings: Whether Parquet holds categories as strings of 8 hex digits; text always does.

    Raises:
        FileExistsError: If the file is there.
        PipelineError: If the format is unknown.
        IntuneError: If it cannot be written, as on a full disk. What was written of it is deleted then, as after
            every other error, Ctrl-C among them.
    """
    check_format(format)
    _check_new(path)
    text = hex_strings or format == "tsv"
    schema = _text_schema() if text else criteo_schema()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IntuneError(f"the folder {path.parent} cannot be made: {error.strerror or error}") from error
    try:
        with whole_file(path, replace=False) as file, _writer(file, format, schema) as writer:
            for batch in batches:
                writer.write_batch(_with_hex_strings(batch) if text else batch)
    except OSError as error:
        if isinstance(error, FileExistsError) and not error.errno:  # ours
            raise
        raise IntuneError(f"{path} was not written: {error.strerror or error}; nothing is left of it") from error


def _writer(file: IO[bytes], format: str, schema: pa.Schema) -> Any:
    if format == "parquet":
        return pq.ParquetWriter(file, schema)
    options = pacsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    return pacsv.CSVWriter(file, schema, write_options=options)


def _text_schema() -> pa.Schema:
    return pa.schema([f.with_type(pa.string()) if f.name in CATEGORY_COLUMNS else f for f in criteo_schema()])


def _with_hex_strings(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [_hex(batch[name]) if name in CATEGORY_COLUMNS else batch[name] for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=_text_schema())


def _hex(column: pa.Array) -> pa.Array:
    """Write int64 categories of a whole batch as 8 hex digits each: two looked up groups of 4."""
    value = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    digits = np.empty((len(column), 2), np.uint32)
    _DIGITS.take(value >> 16 & 0xFFFF, out=digits[:, 0], mode="clip")
    _DIGITS.take(value & 0xFFFF, out=digits[:, 1], mode="clip")
    offsets = np.arange(0, 8 * len(column) + 1, 8, dtype=np.int32)
    # A missing value has digits too, which nobody sees.
    valid = None if not column.null_count else pc.is_valid(column).buffers()[1]
    return pa.StringArray.from_buffers(len(column), pa.py_buffer(offsets), pa.py_buffer(digits), valid)
