"""Criteo rows from file to tensors: the pipeline against two plain loops in two processes.

R is what two copies of the plain loop deliver together: read, transform, windowed shuffle, batch, tensors, one
thread each, each on files of its own half. The pipeline gets both halves and two CPU slots. From Parquet with
categories as hex strings the plain loop makes a string of every category, as one writes it; a second one reads
dictionaries, as the pipeline does, so that what the engine costs shows apart from what its reader saves. "integers" is
Parquet with categories as integers, as `intune generate` writes it. Files are read
again and again from the page cache; the first third of each round is dropped. Arrow's allocator is the
system's for every program alike.
"""

import os

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from _rounds import alternate, arguments, report, spread

import intune
from intune.recsys.criteo import CATEGORY_COLUMNS, CriteoColumns, criteo_schema, read_criteo
from intune.recsys.generate import write_criteo
from intune.recsys.transforms import CriteoTransform

ROWS = 524_288
GROUP = 65_536
WINDOW = 262_144
BATCH = 8_192
FORMS = ("parquet", "integers", "tsv")


def make_files(folder: Path, form: str) -> list[Path]:
    """Two files of ROWS rows: "parquet" with hex strings, "integers" (Parquet too), or "tsv"."""
    paths = []
    (folder / form).mkdir(exist_ok=True)
    for number in range(2):
        kind = "tsv" if form == "tsv" else "parquet"
        path = folder / form / f"part{number}.{kind}"
        if not path.exists():
            write_criteo(path, ROWS, format=kind, hex_strings=form != "integers", seed=number)
        paths.append(path)
    return paths


def read_blocks(path: Path, form: str, dictionaries: bool) -> Iterator[pa.RecordBatch]:
    """What an engineer writes to read a file again and again, one thread."""
    if form != "tsv":
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=list(CATEGORY_COLUMNS) if dictionaries else None)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            yield table.combine_chunks().to_batches()[0]
        return
    options = pa.csv.ReadOptions(use_threads=False, block_size=16 << 20, column_names=criteo_schema().names)
    types = {name: pa.string() if name.startswith("C") else pa.int64() for name in criteo_schema().names}
    with pa.csv.open_csv(
        path,
        read_options=options,
        parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa.csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
    ) as reader:
        yield from reader


def plain_loop(path: Path, form: str, dictionaries: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as tensors, endlessly."""
    columns, transform = CriteoColumns(tuple(criteo_schema().names)), CriteoTransform()
    random = np.random.default_rng(0)
    parts: list[dict[str, np.ndarray]] = []
    have = 0
    while True:
        for block in read_blocks(path, form, dictionaries):
            part = transform(columns(block))
            parts.append(part)
            have += len(part["label"])
            if have < WINDOW:
                continue
            window = {name: np.concatenate([part[name] for part in parts]) for name in part}
            order = random.permutation(have)
            for start in range(0, have - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield {name: torch.from_numpy(column.take(chosen, axis=0)) for name, column in window.items()}
            parts, have = [], 0


def measure(batches: Iterator[dict[str, torch.Tensor]], seconds: float) -> dict[str, float]:
    """Rows a second and CPU microseconds a row of this process tree, the first third dropped."""
    process = psutil.Process()
    begin = time.perf_counter()
    rows = 0
    start = None
    for batch in batches:
        now = time.perf_counter()
        if start is None and now - begin > seconds / 3:
            start, rows, used = now, 0, _cpu(process)
        rows += len(batch["label"])
        if now - begin > seconds:
            break
    assert start is not None
    return {"rows_per_second": rows / (now - start), "cpu_us_per_row": (_cpu(process) - used) / rows * 1e6}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _loop_child(path: Path, form: str, dictionaries: bool, seconds: float, barrier, out) -> None:
    torch.set_num_threads(1)
    barrier.wait()
    out.put(measure(plain_loop(path, form, dictionaries), seconds))


def two_loops(paths: list[Path], form: str, seconds: float, dictionaries: bool = False) -> dict[str, float]:
    """Two plain loops at once; their rates summed."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=_loop_child, args=(path, form, dictionaries, seconds, barrier, out)) for path in paths
    ]
    for child in children:
        child.start()
    figures = [out.get() for _ in children]
    for child in children:
        child.join()
    return {
        "rows_per_second": sum(figure["rows_per_second"] for figure in figures),
        "cpu_us_per_row": sum(figure["cpu_us_per_row"] for figure in figures) / len(figures),
    }


def pipeline(paths: list[Path], form: str, seconds: float) -> dict[str, float]:
    """The pipeline with two slots, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    child = context.Process(target=_pipeline_child, args=(paths, form, seconds, out))
    child.start()
    figure = out.get()
    child.join()
    return figure


def _pipeline_child(paths: list[Path], form: str, seconds: float, out) -> None:
    torch.set_num_threads(1)
    pipe = read_criteo(paths).map(CriteoTransform()).shuffle(WINDOW).batch(BATCH, drop_last=True).to_torch()
    with pipe.loader(cpus=2, epochs=1_000_000) as loader:
        out.put(measure(_endless(loader), seconds))
        if "--explain" in sys.argv:
            print(loader.explain())


def _endless(loader: intune.Loader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def _ratio(ours: list[dict[str, float]], loops: list[dict[str, float]], figure: str) -> dict[str, float]:
    return spread([a[figure] / b[figure] for a, b in zip(ours, loops, strict=True)])


def main() -> None:
    """Measure all forms, or those that are named."""
    chosen = arguments(__doc__, names=FORMS)
    summary = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in chosen.names:
            paths = make_files(Path(folder), form)
            programs = {
                "plain": lambda p=paths, f=form: two_loops(p, f, chosen.seconds),
                "ours": lambda p=paths, f=form: pipeline(p, f, chosen.seconds),
            }
            if form == "parquet":
                programs["dictionaries"] = lambda p=paths, f=form: two_loops(p, f, chosen.seconds, True)
            figures = alternate(programs, chosen.rounds)
            summary[form] = {
                "R_rows_per_second": spread([figure["rows_per_second"] for figure in figures["plain"]]),
                "pipeline_rows_per_second": spread([figure["rows_per_second"] for figure in figures["ours"]]),
                "share_of_R": _ratio(figures["ours"], figures["plain"], "rows_per_second"),
                "cpu_ratio": _ratio(figures["ours"], figures["plain"], "cpu_us_per_row"),
                "cpu_us_per_row": spread([figure["cpu_us_per_row"] for figure in figures["ours"]]),
                "loop_cpu_us_per_row": spread([figure["cpu_us_per_row"] for figure in figures["plain"]]),
            }
            if form == "parquet":
                same = figures["dictionaries"]
                summary[form] |= {
                    "share_of_R_with_dictionaries": _ratio(figures["ours"], same, "rows_per_second"),
                    "cpu_ratio_with_dictionaries": _ratio(figures["ours"], same, "cpu_us_per_row"),
                }
    report("criteo_loop", summary, write=not chosen.quick and len(chosen.names) == len(FORMS))


if __name__ == "__main__":
    main()
