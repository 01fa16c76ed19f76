"""Declared types hold for the whole file: what only shows far from its beginning is found there and named."""

import gzip
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

import intune

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

SCHEMA = pa.schema([("id", pa.int64()), ("count", pa.int64())])
LINES = 100_000


def text(bad: dict[int, str], delimiter: str = "\t") -> str:
    """Lines of a number and a count that is missing everywhere but in `bad`, by line number."""
    return "".join(f"{number}{delimiter}{bad.get(number, '')}\n" for number in range(1, LINES + 1))


def same(block: Any) -> Any:
    return block


READERS = {
    "tsv": lambda path: intune.read_tsv(path, schema=SCHEMA, unit_bytes=1 << 16),
    "csv": lambda path: intune.read_csv(path, schema=SCHEMA, header=False, delimiter="\t", unit_bytes=1 << 16),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_column_that_begins_with_nothing(tmp_path: Path, reader: str, packed: bool) -> None:
    content = text({LINES: "7", 50_000: "-3"}).encode()
    (tmp_path / "a.txt").write_bytes(gzip.compress(content, 1) if packed else content)
    with READERS[reader](tmp_path).batch(10_000).loader(cpus=2) as loader:
        batches = list(loader)
    assert all(batch.schema.equals(SCHEMA) for batch in batches)
    counts = pa.Table.from_batches(batches).column("count")
    assert counts.null_count == LINES - 2
    assert counts.drop_null().to_pylist() == [-3, 7]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_value_of_another_type_is_named_with_its_line(
    tmp_path: Path, reader: str, packed: bool, executor: Any
) -> None:
    """The first file is fine; the error comes after its rows and is the same whatever follows the reader."""
    (tmp_path / "a.txt").write_text(text({1: "5"}))
    content = text({10: "4", 90_000: "12.5"}).encode()
    bad = tmp_path / "b.txt"
    bad.write_bytes(gzip.compress(content, 1) if packed else content)
    rows = 0
    pipe = READERS[reader](tmp_path).map(same, executor=executor, max_concurrency=1).batch(1_000)
    with pipe.loader(cpus=2) as loader, pytest.raises(intune.SourceError) as caught:  # noqa: PT012
        for batch in loader:
            rows += batch.num_rows
    assert str(caught.value).startswith(f"{bad}:90000: ")
    assert "'count'" in str(caught.value)
    assert "12.5" in str(caught.value)
    assert LINES <= rows < LINES + 90_000
