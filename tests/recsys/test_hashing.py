"""The hash against its definition in plain Python, and what follows from it."""

import hashlib
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune import PipelineError
from intune.recsys import Buckets, Cross, Hash, Modulo, hash64

MASK = 2**64 - 1
SEEDS = st.integers(0, MASK)
INT64 = st.integers(-(2**63), 2**63 - 1)
WORD = st.binary(max_size=40)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_of(value: int | bytes, seed: int) -> int:
    base = mix(seed)
    if isinstance(value, int):
        return mix((value & MASK) ^ base)
    words = [int.from_bytes(value[i : i + 8], "little") for i in range(0, len(value), 8)]
    total = len(value) + sum(mix(word ^ mix((base + k) & MASK)) for k, word in enumerate(words))
    return mix(base ^ (total & MASK))


def row_of(value: int, rows: int) -> int:
    return 1 + value % (rows - 1)


def test_the_mixing_function_is_that_of_splitmix64() -> None:
    # The first three outputs of the published generator for seed 0.
    state, outputs = 0, []
    for _ in range(3):
        outputs.append(mix(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(st.none() | INT64, max_size=30), SEEDS)
def test_integers_have_the_documented_hash(values: list[int | None], seed: int) -> None:
    hashes, missing = hash64(pa.array([7, *values], pa.int64()).slice(1), seed)
    absent = [False] * len(values) if missing is None else missing.tolist()
    assert absent == [value is None for value in values]
    for value, found in zip(values, hashes.tolist(), strict=True):
        assert value is None or found == hash_of(value, seed)


@given(st.lists(st.none() | WORD, max_size=30), SEEDS, st.integers(0, 3))
def test_texts_have_the_documented_hash(values: list[bytes | None], seed: int, before: int) -> None:
    for kind in (pa.binary(), pa.large_binary()):
        column = pa.array([b"before"] * before + values + [b"after"], kind).slice(before, len(values))
        rows = Hash(1000, seed)(column)
        assert rows.tolist() == [0 if value is None else row_of(hash_of(value, seed), 1000) for value in values]


def test_these_hashes_never_change() -> None:
    integers, _ = hash64(np.array([0, 1, -1, 2**63 - 1]))
    assert integers.tolist() == [0xA706DD2F4D197E6F, 0x8B4FDA8C892B50E, 0x2DD82C88FA32B270, 0xC7B1E67948F2A0D0]
    texts, _ = hash64(pa.array(["", "a", "abcdefgh", "übermäßig lang"]), seed=42)
    assert texts.tolist() == [0x57E1FABA65107204, 0xC65BC5640BBB9BDF, 0x78F89E1570994228, 0x2C122845A0A6177E]


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_an_integer_has_the_same_row_in_columns_of_every_width(dtype: str) -> None:
    values = np.array([0, 1, 100], dtype)
    assert Hash(10**9)(values).tolist() == Hash(10**9)(pa.array([0, 1, 100])).tolist()
    if dtype[0] == "i":
        assert Hash(10**9)(np.array([-1], dtype)).tolist() == Hash(10**9)(pa.array([-1])).tolist()
    assert Hash(10**9)(np.array([2**64 - 1], "u8")).tolist() == Hash(10**9)(np.array([-1])).tolist()


def test_a_text_has_the_same_row_in_columns_of_every_kind() -> None:
    texts = ["a", None, "", "a much longer one, of several words", "a", "ä"]
    column = pa.array(texts)
    rows = Hash(10**9, seed=3)(column).tolist()
    assert rows[0] == rows[4] != rows[2] != 0 == rows[1]
    for kind in (pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()):
        assert Hash(10**9, seed=3)(column.cast(kind)).tolist() == rows
    assert Hash(10**9, seed=3)(column.dictionary_encode()).tolist() == rows
    present = [text for text in texts if text is not None]
    for array in (np.array(present), np.array(present, object)):
        assert Hash(10**9, seed=3)(array).tolist() == rows[:1] + rows[2:]
    fixed = pa.array([b"abc", None], pa.binary(3))
    assert Hash(10**9)(fixed).tolist() == Hash(10**9)(pa.array(["abc", None])).tolist()


def test_bytes_under_a_null_do_not_show_and_neighbours_do_not_matter() -> None:
    data = pa.py_buffer(b"abcdefghSECRETxyz")
    offsets = pa.py_buffer(np.array([0, 8, 14, 17], np.int32))
    column = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(bytes([0b101])), offsets, data])
    assert column.to_pylist() == ["abcdefgh", None, "xyz"]
    assert Hash(10**6)(column).tolist() == Hash(10**6)(pa.array(["abcdefgh", None, "xyz"])).tolist()


def test_seeds_give_other_rows_and_rows_spread() -> None:
    ids = np.arange(100_000)
    one, other = Hash(1001, seed=1)(ids), Hash(1001, seed=2)(ids)
    assert (one == other).mean() < 0.01
    counts = np.bincount(one, minlength=1001)
    assert counts[0] == 0
    # 1,000 rows of 100 expected: chi-square of 999 degrees of freedom lies within 999 +- 6 * sqrt(2 * 999).
    assert abs(((counts[1:] - 100) ** 2 / 100).sum() - 999) < 270


def test_texts_that_are_alike_do_not_collide() -> None:
    texts = [
        f"{prefix}{i:04}{suffix}" for i in range(2000) for prefix in ("", "a" * 8) for suffix in ("", "\0", "b" * 9)
    ]
    hashes, _ = hash64(pa.array(texts))
    assert len(set(hashes.tolist())) == len(set(texts)) == len(texts)


@given(st.lists(st.tuples(st.none() | INT64, st.none() | WORD, st.none() | st.floats()), max_size=20), SEEDS)
def test_crosses_have_the_documented_hash(rows: list[tuple[Any, Any, Any]], seed: int) -> None:
    ints, texts, floats = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    columns = [pa.array(ints, pa.int64()), pa.array(texts, pa.binary()), pa.array(floats, pa.float64())]
    buckets = Buckets([0.0, 1.0])
    found = Cross(1000, seed, [None, None, buckets])(columns).tolist()
    for row, (integer, text, bucket) in enumerate(zip(ints, texts, buckets(columns[2]).tolist(), strict=True)):
        combined = mix(seed)
        for value in (integer, text, bucket):
            combined = mix(combined ^ (0 if value is None else hash_of(value, seed)))
        missing = integer is None or text is None or bucket == 0
        assert found[row] == (0 if missing else row_of(combined, 1000))


def test_the_order_of_crossed_columns_counts() -> None:
    one, other = np.arange(1, 1000), np.arange(2000, 2999)
    there, back = Cross(10**9)([one, other]), Cross(10**9)([other, one])
    assert (there == back).mean() < 0.01
    assert len(np.unique(there)) == len(one)
    assert (Cross(10**9)([one, one]) == Cross(10**9)([one, one])).all()


def test_a_cross_needs_two_columns_and_an_encoder_for_each() -> None:
    with pytest.raises(ValueError, match="expected two or more columns to cross, got 1"):
        Cross(10)([np.arange(3)])
    with pytest.raises(ValueError, match="expected 3 columns to cross, got 2"):
        Cross(10, encoders=[None, None, Modulo(3)])([np.arange(3), np.arange(3)])


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1"])
def test_seeds_are_64_bits(seed: Any) -> None:
    for kind in (Hash, Cross):
        with pytest.raises(PipelineError, match=re.escape(f"seed must be an int in 0..2**64-1, got {seed!r}")):
            kind(10, seed)


@pytest.mark.parametrize("column", [pa.array([1.5]), np.array([1.5]), pa.array([[1]])])
def test_floats_and_lists_have_no_hash(column: Any) -> None:
    with pytest.raises(TypeError, match="expected integers, dates, times, strings or bytes, got"):
        hash64(column)


def test_a_long_text_among_short_ones() -> None:
    long = hashlib.sha512(b"x").digest() * 500
    values = [b"a", long, b"", long[:-1], b"b" * 8]
    hashes, _ = hash64(pa.array(values))
    assert hashes.tolist() == [hash_of(value, 0) for value in values]
