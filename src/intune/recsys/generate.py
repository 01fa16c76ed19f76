"""Made-up rows in Criteo's format with a label that can be learnt, the same for the same seed.

Categories follow a Zipf-like law, counts are log-normal with missing values, and the label is drawn from a
logistic function of three counts and four categories. It is a workload for trials, not a model of real clicks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from intune._errors import PipelineError
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, criteo_schema

CHUNK_ROWS = 65_536

_VOCABULARIES = np.geomspace(4, 1_000_000, len(CATEGORY_COLUMNS)).astype(np.int64)
_BASE_LOGIT = -1.8
_LABEL_CATEGORIES = (2, 4, 6, 8)
_LABEL_COUNTS = (0, 3, 7)
_MISSING_CATEGORY_SHARE = 0.03
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def generate_rows(rows: int, *, seed: int = 0) -> Iterator[pa.RecordBatch]:
    """Draw rows in batches of `CHUNK_ROWS`; a longer run begins with the rows of a shorter one of whole batches.

    Args:
        rows: How many, at least 0.
        seed: Same seed, same rows.

    Yields:
        Record batches with the columns of `criteo_schema`; about a quarter of the labels are 1.
    """
    for chunk, start in enumerate(range(0, rows, CHUNK_ROWS)):
        yield _draw(min(CHUNK_ROWS, rows - start), np.random.default_rng((seed, chunk)))


def write_criteo(
    path: str | os.PathLike[str],
    rows: int,
    *,
    format: Literal["parquet", "tsv"] = "parquet",
    hex_strings: bool = False,
    seed: int = 0,
) -> None:
    """Write made-up rows to one new file.

    Args:
        path: The file; its folder is made where needed. An existing file is never overwritten.
        rows: How many, at least 0.
        format: "parquet" (a row group for each `CHUNK_ROWS` rows) or "tsv" (as Criteo ships it, without header).
        hex_strings: Whether Parquet holds categories as strings of 8 hex digits; text always does.
        seed: Same seed, same rows in both formats.

    Raises:
        FileExistsError: If the file is there.
        PipelineError: If the format is unknown or rows is negative.
    """
    if format not in ("parquet", "tsv"):
        raise PipelineError(f"format must be 'parquet' or 'tsv', got {format!r}")
    if rows < 0:
        raise PipelineError(f"rows must be at least 0, got {rows}")
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"{target} is there already; name a new file")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".tmp")  # readers ignore these, should the writing be broken off
    text = hex_strings or format == "tsv"
    schema = _text_schema() if text else criteo_schema()
    with open(partial, "wb") as file, _writer(file, format, schema) as writer:
        for batch in generate_rows(rows, seed=seed):
            writer.write_batch(_with_hex_strings(batch) if text else batch)
    partial.rename(target)


def _writer(file: IO[bytes], format: str, schema: pa.Schema) -> Any:
    if format == "parquet":
        return pq.ParquetWriter(file, schema)
    options = pacsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    return pacsv.CSVWriter(file, schema, write_options=options)


def _draw(rows: int, random: np.random.Generator) -> pa.RecordBatch:
    logit = np.full(rows, _BASE_LOGIT)
    counts, categories = [], []
    for j in range(len(COUNT_COLUMNS)):
        log_count = random.normal(0.4 * j, 1.5, rows)
        missing = random.random(rows) < j * 7 % 13 / 26
        count = np.minimum(np.exp(log_count), 2**31 - 1).astype(np.int64)
        if j == 1:
            count -= 2  # as in the real data, one column has a few negative counts
        if j in _LABEL_COUNTS:
            logit += np.where(missing, 0, 0.6 * (log_count - 0.4 * j))
        counts.append(pa.array(count, mask=missing))
    for j, vocabulary in enumerate(_VOCABULARIES):
        rank = np.power(float(vocabulary), random.random(rows)).astype(np.int64)
        missing = random.random(rows) < _MISSING_CATEGORY_SHARE
        if j in _LABEL_CATEGORIES:
            logit += np.where(missing, 0, 1.5 * np.sin(12.9898 * rank + j))
        # An odd factor modulo 2**32 scatters the ranks over all 32 bits and lets no two of a column collide.
        categories.append(pa.array((rank + 1_000_003 * j) * 2_654_435_761 & 0xFFFFFFFF, mask=missing))
    label = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int32)
    return pa.RecordBatch.from_arrays([pa.array(label), *counts, *categories], schema=criteo_schema())


def _with_hex_strings(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [_hex(batch[name]) if name in CATEGORY_COLUMNS else batch[name] for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=_text_schema())


def _text_schema() -> pa.Schema:
    return pa.schema([f.with_type(pa.string()) if f.name in CATEGORY_COLUMNS else f for f in criteo_schema()])


def _hex(column: pa.Array) -> pa.Array:
    """Write int64 categories as 8 hex digits each, whole column at once."""
    octets = column.fill_null(0).to_numpy().astype(">u4").view(np.uint8).reshape(-1, 4)
    digits = _HEX_DIGITS[np.stack([octets >> 4, octets & 15], axis=-1)]
    offsets = np.arange(0, 8 * len(column) + 1, 8, dtype=np.int32)
    buffers = [pa.py_buffer(offsets), pa.py_buffer(digits.tobytes())]
    strings = pa.StringArray.from_buffers(len(column), *buffers)
    return pc.if_else(column.is_valid(), strings, pa.scalar(None, pa.string()))
