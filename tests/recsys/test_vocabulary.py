"""Look-up of known values, against a dict."""

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intune import PipelineError, SourceError
from intune.recsys import Vocabulary, _lookup, hash64, vocabulary
from intune.recsys._lookup import KeyIndex

BIG = 2**53 + 1
INT64 = st.integers(-(2**63), 2**63 - 1)
FEW = st.integers(-3, 3) | st.sampled_from([BIG - 1, BIG, BIG + 1]) | INT64
WORDS = st.text(max_size=2)


def expected(keys: Sequence[Any], values: Sequence[Any], unknown_rows: int) -> list[int]:
    """Rows by a dict; -1 where it is one of several for the unknown."""
    known = {key: 1 + unknown_rows + place for place, key in enumerate(keys)}
    unknown = 1 if unknown_rows == 1 else -1
    return [0 if value is None else known.get(value, unknown) for value in values]


KEYS_AND_VALUES = st.one_of(
    st.tuples(st.lists(FEW, min_size=1, max_size=20, unique=True), st.lists(st.none() | FEW, max_size=30)),
    st.tuples(st.lists(WORDS, min_size=1, max_size=20, unique=True), st.lists(st.none() | WORDS, max_size=30)),
)


@pytest.fixture(params=[10_000, 0], ids=["few keys", "many keys"])
def _few_and_many_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_FEW_KEYS", request.param)


def column_of(keys: list[Any], values: list[Any]) -> pa.Array:
    """The values and all keys, as a slice."""
    return pa.array([keys[0], None, *values, *keys], pa.string() if isinstance(keys[0], str) else pa.int64()).slice(2)


@pytest.mark.usefixtures("_few_and_many_keys")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KEYS_AND_VALUES, st.integers(1, 4))
def test_values_have_the_row_of_their_key(data: tuple[list[Any], list[Any]], unknown_rows: int) -> None:
    keys, values = data
    words = Vocabulary(keys, unknown_rows)
    column = column_of(keys, values)
    rows = words(column)
    assert rows.dtype == np.int64
    for row, want in zip(rows.tolist(), expected(keys, [*values, *keys], unknown_rows), strict=True):
        assert row == want or (want == -1 and 1 <= row <= unknown_rows)
    assert words(column.dictionary_encode()).tolist() == rows.tolist()
    assert words.table_rows == 1 + unknown_rows + len(keys)
    copy = pickle.loads(pickle.dumps(words))
    assert copy == words
    assert copy(column).tolist() == rows.tolist()


@pytest.mark.parametrize("text", [False, True])
def test_places_among_very_many_keys(text: bool) -> None:
    numbers = np.random.default_rng(8).permutation(300_000) * 7 - 1000
    column = pa.array(numbers.astype("S") if text else numbers)
    column = column.cast(pa.large_binary()) if text else column
    keys, others = column.slice(50_000), column.slice(0, 50_000)
    index = KeyIndex(keys)
    assert (index.find(others) == -1).all()
    random = np.random.default_rng(9).integers(0, len(keys), 20_000)
    assert (index.find(keys.take(pa.array(random))) == random).all()


def test_the_one_integer_whose_hash_is_the_highest_is_found_only_where_it_is_a_key() -> None:
    mask = 2**64 - 1

    def unmix(x: int) -> int:
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            x ^= (x >> shift) ^ (x >> 2 * shift)
            x = x * pow(factor, -1, 2**64) & mask
        return (x - 0x9E3779B97F4A7C15) & mask

    base = 0xE220A8397B1DCDAF  # of seed 0
    highest = pa.array([unmix(mask) ^ base], pa.uint64())
    assert hash64(highest)[0].tolist() == [mask]
    other = pa.array([5], pa.uint64())
    assert KeyIndex(other).find(highest).tolist() == [-1]
    assert KeyIndex(highest).find(highest).tolist() == [0]
    assert KeyIndex(pa.concat_arrays([other, highest])).find(highest).tolist() == [1]


def test_texts_of_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(column: pa.Array, seed: int = 0) -> Any:
        hashes, missing = hash64(column, seed)
        return (hashes & np.uint64(7) if seed < 3 else hashes), missing

    monkeypatch.setattr(_lookup, "hash64", poor)
    keys = pa.array([b"%d" % i for i in range(40)], pa.large_binary())
    assert KeyIndex(keys).find(keys).tolist() == list(range(40))
    monkeypatch.setattr(_lookup, "hash64", lambda column, seed=0: (np.full(len(column), 9, np.uint64), None))
    assert KeyIndex(keys.slice(0, 1)).find(keys).tolist() == [0] + [-1] * 39


def test_unknown_values_spread_over_their_rows_and_stay_there() -> None:
    words = Vocabulary(["a"], unknown_rows=10)
    texts = pa.array([f"word {i}" for i in range(1000)])
    rows = words(texts)
    assert set(rows.tolist()) == set(range(1, 11))
    assert words(texts.slice(500)).tolist() == rows[500:].tolist()
    assert pickle.loads(pickle.dumps(words)) == words != Vocabulary(["b"], unknown_rows=10)


def test_without_rows_for_them_unknown_values_are_errors() -> None:
    words = Vocabulary([5, BIG], unknown_rows=0)
    assert words(pa.array([None, BIG, 5])).tolist() == [0, 2, 1]
    with pytest.raises(SourceError, match=f"row 2: {BIG - 1} is not in the vocabulary of 2 keys"):
        words(pa.array([5, None, BIG - 1]))
    column = pa.array([5, 6, 5]).dictionary_encode()
    assert words(column.filter(pa.array([True, False, True]))).tolist() == [1, 1]
    with pytest.raises(SourceError, match="row 1: 6 is not in"):
        words(column)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8"])
def test_integers_of_every_width_are_looked_up(dtype: str) -> None:
    values = np.array([1, 2, 3], dtype)
    for keys in ([3, 1], pa.array([3, 1], pa.int8()), np.array([3, 1], "u8")):
        assert Vocabulary(keys)(values).tolist() == [3, 1, 2]


def test_integers_above_int64_need_keys_above_it() -> None:
    words = Vocabulary([2**63, 7])
    assert words(pa.array([2**63, 2**63 + 1, None, 7], pa.uint64())).tolist() == [2, 1, 0, 3]
    assert not words.accepts(pa.int64())
    assert not Vocabulary([7]).accepts(pa.uint64())
    with pytest.raises(TypeError, match=r"expected integers that fit int64, dates and times, .*, got uint64"):
        Vocabulary([7])(pa.array([7], pa.uint64()))


def test_texts_are_compared_by_their_bytes() -> None:
    words = Vocabulary(["a", "ä"])
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()):
        assert words(pa.array(["ä", None, "A"]).cast(kind)).tolist() == [3, 0, 1]
    assert Vocabulary([b"a", b"\xff"])(pa.array(["a", "b"])).tolist() == [2, 1]
    with pytest.raises(TypeError, match="expected strings or bytes, as the keys are, got int64"):
        words(pa.array([1]))
    with pytest.raises(TypeError, match="as the keys are integers, got string"):
        Vocabulary([1])(pa.array(["1"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "a vocabulary needs at least one key"),
        ([1, 2, 1], "keys must be distinct; 1 is there 2 times"),
        (["a", None], "keys must not be missing; key 1 is"),
        ([1.5], "keys must be integers, or strings, or bytes, got double"),
        ([1, "a"], "keys must be integers, or strings, or bytes: "),
        ([-1, 2**63], "keys must be integers, or strings, or bytes: "),
        ([[1]], "keys must be integers, or strings, or bytes, got list<"),
    ],
)
def test_keys_are_distinct_integers_or_texts(keys: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        Vocabulary(keys)


@pytest.mark.parametrize("rows", [-1, 1.0, True])
def test_rows_for_the_unknown_are_counted(rows: Any) -> None:
    with pytest.raises(PipelineError, match="unknown_rows must be an int of at least 0, got"):
        Vocabulary([1], rows)


def test_keys_come_from_the_files_of_a_folder_in_their_order(tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int32(), pa.string())
    for name, keys in {"b": ["x"], "a": ["z", "y", "w"]}.items():
        table = pa.table({"other": range(len(keys)), "key": pa.array(keys).cast(kind)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    words = Vocabulary.from_parquet(tmp_path, "key", unknown_rows=2)
    assert words == Vocabulary(["z", "y", "w", "x"], unknown_rows=2)
    assert words(pa.array(["x", "z"])).tolist() == [6, 3]
    with pytest.raises(SourceError, match=re.escape("has no column 'kee'; it has ['other', 'key']")):
        Vocabulary.from_parquet(tmp_path / "a.parquet", "kee")
    with pytest.raises(SourceError, match="missing"):
        Vocabulary.from_parquet(tmp_path / "missing.parquet", "key")
