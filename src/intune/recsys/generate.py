"""Made-up click logs in Criteo's format, as skewed, gappy and dependent as the real ones, with a label to be learnt.

Rows are drawn from facts about the Kaggle file (`criteo_facts`): its vocabularies, quantiles, absences and
dependencies. The label is not: it is drawn from a known probability (`truth`), so that the best AUC is known, too.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from intune._errors import PipelineError
from intune.recsys.clicks import Chunk, draw_chunk
from intune.recsys.truth import IdealAuc
from intune.recsys.write import FileFormat, check_format, write_batches

CHUNK_ROWS = 65_536


@dataclass(frozen=True)
class Written:
    """What a file got.

    Attributes:
        path: The file.
        rows: Rows in it.
        size_bytes: Its size.
        ideal_auc: The AUC on these rows of a model that knows their click probabilities, in expectation over labels;
            None for no rows.
    """

    path: Path
    rows: int
    size_bytes: int
    ideal_auc: float | None


def generate_rows(rows: int, *, seed: int = 0, day: int = 0, drift: float = 0.0) -> Iterator[pa.RecordBatch]:
    """Draw rows in batches of `CHUNK_ROWS`; a longer run begins with the rows of a shorter one of whole batches.

    The memory does not depend on how many rows are drawn.

    Args:
        rows: How many, at least 0.
        seed: Same seed, same rows; at least 0.
        day: Another day has other rows, at least 0.
        drift: What share of each vocabulary is replaced from one day to the next, 0 to 1, and by how much the logits
            of clicks and of absences move (`clicks.draw_chunk`). With 0 all days have the same distribution.

    Returns:
        Record batches with the columns of `criteo_schema`, drawn one at a time.

    Raises:
        PipelineError: If a number is out of its range.
    """
    return (chunk.batch for chunk in _chunks(rows, seed, day, drift))


def stated_auc(*, rows: int = 4 * CHUNK_ROWS, seed: int = 0, day: int = 0, drift: float = 0.0) -> float:
    """The AUC that an ideal model reaches on rows of this distribution: the bound for any other, luck aside.

    Rows are drawn and scored by their true logits, and each counts as a click by its true probability
    (`truth.IdealAuc`), so the figure has no noise of labels; that of the rows is below 0.001 for the default number.

    Args:
        rows: How many rows to draw, at least 1.
        seed: As of `generate_rows`.
        day: As of `generate_rows`; without drift all days have the same.
        drift: As of `generate_rows`.

    Raises:
        PipelineError: If a number is out of its range.
    """
    ideal = IdealAuc()
    for chunk in _chunks(rows, seed, day, drift):
        ideal.add(chunk.logit)
    if ideal.value is None:
        raise PipelineError(f"rows must be at least 1, got {rows}")
    return ideal.value


def write_criteo(
    path: str | os.PathLike[str],
    rows: int,
    *,
    format: FileFormat = "parquet",
    hex_strings: bool = False,
    seed: int = 0,
    day: int = 0,
    drift: float = 0.0,
    progress: Callable[[int], object] | None = None,
) -> Written:
    """Write made-up rows to one new file, which appears when it is whole.

    Args:
        path: The file; its folder is made where needed. An existing file is never overwritten.
        rows: How many, at least 0.
        format: "parquet" (a row group for each `CHUNK_ROWS` rows) or "tsv" (as Criteo ships it, without header).
        hex_strings: Whether Parquet holds categories as strings of 8 hex digits; text always does.
        seed: Same seed, same rows in both formats.
        day: As of `generate_rows`.
        drift: As of `generate_rows`.
        progress: Called after each chunk with the rows drawn so far.

    Raises:
        FileExistsError: If the file is there.
        PipelineError: If the format is unknown or a number is out of its range.
        IntuneError: If the file cannot be written, as on a full disk; nothing is left of it.
    """
    ideal = IdealAuc()

    def batches(chunks: Iterator[Chunk]) -> Iterator[pa.RecordBatch]:
        done = 0
        for chunk in chunks:
            yield chunk.batch
            ideal.add(chunk.logit)
            done += chunk.batch.num_rows
            if progress:
                progress(done)

    target = Path(path)
    write_batches(target, batches(_chunks(rows, seed, day, drift)), format, hex_strings)
    return Written(target, rows, target.stat().st_size, ideal.value)


def write_days(
    folder: str | os.PathLike[str],
    rows: int,
    *,
    days: int,
    format: FileFormat = "parquet",
    hex_strings: bool = False,
    seed: int = 0,
    drift: float = 0.0,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Written]:
    """Write the days `day_0`, `day_1`, ... of a log, a file each; Parquet files end in `.parquet`.

    Args:
        folder: Where; made where needed. If any of the files is there, none is written.
        rows: How many in each file.
        days: How many files, at least 1.
        format: As of `write_criteo`.
        hex_strings: As of `write_criteo`.
        seed: As of `write_criteo`.
        drift: As of `generate_rows`.
        progress: Called after each chunk with the rows drawn so far, of all days.

    Yields:
        What each file got, when it is whole. The next is written when the next is asked for.

    Raises:
        FileExistsError: If one of the files is there.
        PipelineError: If the format is unknown or a number is out of its range.
        IntuneError: If a file cannot be written; those before it stay.
    """
    if days < 1:
        raise PipelineError(f"days must be at least 1, got {days}")
    ending = ".parquet" if format == "parquet" else ""
    check_format(format)
    _check_no_day(Path(folder), ending, days)

    def file(day: int) -> Path:
        return Path(folder) / f"day_{day}{ending}"

    def write(day: int) -> Written:
        def said(done: int) -> None:
            if progress:
                progress(day * rows + done)

        return write_criteo(
            file(day), rows, format=format, hex_strings=hex_strings, seed=seed, day=day, drift=drift, progress=said
        )

    return map(write, range(days))


def _check_no_day(folder: Path, ending: str, days: int) -> None:
    """Refuse to write if one of the files is there; by a look at the folder, as there may be very many days."""
    day_of = re.compile(rf"day_(0|[1-9]\d*){re.escape(ending)}")
    there = map(day_of.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ())
    taken = [int(match[1]) for match in there if match and int(match[1]) < days]
    if taken:
        raise FileExistsError(f"{folder / f'day_{min(taken)}{ending}'} is there already; name a new folder")


def _chunks(rows: int, seed: int, day: int, drift: float) -> Iterator[Chunk]:
    for name, number in (("rows", rows), ("seed", seed), ("day", day)):
        if number < 0:
            raise PipelineError(f"{name} must be at least 0, got {number}")
    if not 0 <= drift <= 1:
        raise PipelineError(f"drift must be from 0 to 1, got {drift}")
    starts = enumerate(range(0, rows, CHUNK_ROWS))
    return (
        draw_chunk(min(CHUNK_ROWS, rows - start), np.random.default_rng((seed, day, chunk)), drift=day * drift)
        for chunk, start in starts
    )
