"""A whole set of features: checked before anything runs, then from files to tensors."""

import pickle
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import PipelineError, SourceError
from intune.recsys import (
    Buckets,
    Cross,
    Dense,
    FeatureSpec,
    Hash,
    Hex,
    Modulo,
    MultiHot,
    Number,
    Padded,
    Sparse,
    Vocabulary,
)
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS
from intune.recsys.transforms import CriteoTransform

BIG = 2**53 + 1
EXACT = Modulo(2**62)

FLAT = FeatureSpec(
    label="click",
    dense=[Dense("price", Number(fill=1, low=0, high=10)), Dense("count", Number(log=True))],
    sparse=[Sparse("user", EXACT), Sparse(("user", "place"), Cross(1000)), Sparse("place", Vocabulary(["x", "y"]))],
)
WHOLE = replace(
    FLAT, lists=[MultiHot("items", EXACT, weights="weights", most=2), Padded("items", EXACT, 2, name="last")]
)


def block(rows: int = 4) -> pa.RecordBatch:
    """The same four rows over and over, users apart."""
    columns = {
        "click": pa.array([True, False, False, True] * rows)[:rows],
        "price": pa.array([None, 2.5, -3, 99] * rows, pa.float32())[:rows],
        "count": pa.array([0, None, -1, 1] * rows, pa.int64())[:rows],
        "user": pa.array([None if i % 4 == 1 else BIG + i for i in range(rows)], pa.int64()),
        "place": pa.array(["x", "y", None, "z"] * rows)[:rows],
        "items": pa.array([[BIG, 2, 3], None, [], [None, 7]] * rows, pa.list_(pa.int64()))[:rows],
        "weights": pa.array([[0.5, 1, 2], [], None, [3, 4]] * rows, pa.list_(pa.float32()))[:rows],
        "unused": pa.array([{"a": 1}] * rows),
    }
    return pa.RecordBatch.from_pydict(columns)


def wanted(first_user: int = BIG) -> dict[str, list[Any]]:
    """What becomes of the first four rows, but for the cross."""
    return {
        "label": [1, 0, 0, 1],
        "dense": [[1, 0], [2.5, 0], [0, 0], [10, np.log(np.float32(2))]],
        "user": [1 + first_user, 0, 3 + first_user, 4 + first_user],
        "place": [2, 3, 0, 1],
        "items": [[1 + BIG, 3], [], [], [0, 8]],
        "items_weights": [[0.5, 1], [], [], [3, 4]],
        "last": [[3, 4], [0, 0], [0, 0], [0, 8]],
        "last_lengths": [2, 0, 0, 2],
    }


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rows of a batch of tensors as plain values; a pair (values, offsets) as a tuple of each row's values."""
    columns = []
    for value in batch.values():
        if isinstance(value, tuple):
            values, offsets = (part.tolist() for part in value)
            assert offsets[0] == 0
            assert offsets[-1] == len(values)
            columns.append([tuple(values[start:end]) for start, end in pairwise(offsets)])
        else:
            columns.append([tuple(row) if isinstance(row, list) else row for row in value.tolist()])
    return list(zip(*columns, strict=True))


def test_without_lists_of_varying_length_a_block_becomes_a_dict_of_arrays() -> None:
    out = FLAT(block())
    assert isinstance(out, dict)
    assert {name: (array.shape, array.dtype.name) for name, array in out.items()} == {
        "label": ((4,), "float32"),
        "dense": ((4, 2), "float32"),
        "sparse": ((4, 3), "int64"),
    }
    expected = wanted()
    assert out["label"].tolist() == expected["label"]
    np.testing.assert_allclose(out["dense"], expected["dense"], rtol=1e-6)
    assert out["sparse"][:, 0].tolist() == expected["user"]
    assert out["sparse"][:, 2].tolist() == expected["place"]
    assert (out["sparse"][:, 1] == 0).tolist() == [False, True, True, False]
    assert FLAT.table_rows == (2**62, 1000, 4)
    with_padding = replace(FLAT, lists=[Padded("items", EXACT, 2, name="last")])(block())
    assert isinstance(with_padding, dict)
    assert with_padding["last"].tolist() == expected["last"]


def test_with_them_it_becomes_a_record_batch_of_the_same_and_lists() -> None:
    out = WHOLE(block())
    assert isinstance(out, pa.RecordBatch)
    assert out.schema == pa.schema(
        [
            ("label", pa.float32()),
            ("dense", pa.list_(pa.float32(), 2)),
            ("sparse", pa.list_(pa.int64(), 3)),
            ("items", pa.large_list(pa.int64())),
            ("items_weights", pa.large_list(pa.float32())),
            ("last", pa.list_(pa.int64(), 2)),
            ("last_lengths", pa.int64()),
        ]
    )
    flat = FLAT(block())
    for name in ("label", "dense", "sparse"):
        assert out[name].to_pylist() == flat[name].tolist()
    expected = wanted()
    for name in ("items", "items_weights", "last", "last_lengths"):
        assert out[name].to_pylist() == expected[name]
    assert WHOLE.outputs == tuple(out.schema.names)
    assert WHOLE.list_table_rows == {"items": 2**62, "last": 2**62}
    assert WHOLE.columns == ("click", "price", "count", "user", "place", "items", "weights")


def test_a_slice_an_empty_block_and_a_dict_give_the_same() -> None:
    doubled = WHOLE(block(8))
    assert WHOLE(block(8).slice(3, 4)) == doubled.slice(3, 4)
    assert WHOLE(block(8).slice(0, 0)).schema == doubled.schema
    without_nulls = {"click": np.array([0, 1]), "a": np.array([BIG, 5]), "l": np.array([[1, 2], [3, 4]])}
    spec = FeatureSpec(label="click", sparse=[Sparse("a", EXACT)], lists=[MultiHot("l", EXACT)])
    of_dict = spec({**without_nulls, "other": np.zeros((2, 2, 2))})
    assert of_dict["sparse"].to_pylist() == [[BIG + 1], [6]]
    assert of_dict["l"].to_pylist() == [[2, 3], [4, 5]]
    assert of_dict["label"].to_pylist() == [0, 1]
    with pytest.raises(SourceError, match=re.escape("column 'a' is not there; there are ['click']")):
        spec({"click": np.array([0, 1])})


def test_ids_are_exact_in_batches_with_and_without_nulls() -> None:
    spec = FeatureSpec(sparse=[Sparse("id", EXACT)])
    for values in ([BIG, 4, 5], [BIG, None, 5], [None] * 3):
        out = spec(pa.RecordBatch.from_pydict({"id": pa.array(values, pa.int64())}))["sparse"]
        assert out.dtype == np.int64
        assert out.tolist() == [[0 if value is None else 1 + value] for value in values]


def test_all_that_does_not_fit_is_listed_at_once_before_anything_runs() -> None:
    schema = pa.schema(
        [
            ("click", pa.string()),
            ("prise", pa.float32()),
            ("count", pa.timestamp("us")),
            ("user", pa.string()),
            ("place", pa.float64()),
            ("items", pa.list_(pa.list_(pa.int64()))),
            ("weights", pa.list_(pa.string())),
        ]
    )
    numbers, texts = "integers, floats, decimals and booleans", "integers, dates, times, strings or bytes"
    ids = "integers that fit int64, dates and times (for strings: Hash, Hex or Vocabulary)"
    problems = [
        "column 'click' is string; allowed are integers, floats and booleans that are 0 or 1",
        "column 'price' is not there; there are ['prise', 'place']",
        f"column 'count' is timestamp[us]; allowed are {numbers}",
        f"column 'user' is string; allowed are {ids}",
        f"column 'place' is double; allowed are {texts}",
        "column 'place' is double; allowed are strings or bytes, as the keys are",
        f"column 'items' is list<item: list<item: int64>>; allowed are lists (one level deep) of {ids}",
        f"column 'weights' is list<item: string>; allowed are lists (one level deep) of {numbers}",
    ]
    with pytest.raises(SourceError) as caught:
        WHOLE.check(schema)
    assert str(caught.value) == "\n  ".join(["the columns do not fit the features:", *problems])
    with pytest.raises(SourceError, match="column 'click' is string"):
        WHOLE(pa.RecordBatch.from_pylist([], schema=schema))
    WHOLE.check(block().schema)
    WHOLE.check(pa.schema([(name, pa.null()) for name in WHOLE.columns[1:]]).append(pa.field("click", pa.bool_())))


def test_three_columns_of_texts_are_three_lines_of_one_error() -> None:
    spec = FeatureSpec(dense=[Dense(name) for name in ("a", "b", "c", "d")])
    schema = pa.schema([("a", pa.string()), ("b", pa.int8()), ("c", pa.large_string()), ("d", pa.string_view())])
    with pytest.raises(SourceError) as caught:
        spec.check(schema)
    assert [line.split("'")[1] for line in str(caught.value).splitlines()[1:]] == ["a", "c", "d"]


def test_the_file_whose_columns_do_not_fit_is_named(tmp_path: Path) -> None:
    spec = FeatureSpec(dense=[Dense("a")], sparse=[Sparse("b", EXACT)])
    kinds = [pa.uint16(), pa.uint32(), pa.uint64(), pa.uint64()]
    for number, kind in enumerate(kinds):
        table = pa.table({"a": pa.array([1.5]), "b": pa.array([1], kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    pipe = intune.read_parquet(tmp_path, columns=spec.columns)
    message = (
        f"the columns of {tmp_path}/2.parquet do not fit the features:\n  column 'b' is uint64; allowed are integers"
    )
    with pytest.raises(SourceError, match=re.escape(message)):
        spec.check(pipe)
    spec.check(intune.read_parquet([tmp_path / "0.parquet", tmp_path / "1.parquet"], columns=spec.columns))
    with pytest.raises(SourceError, match=r"2\.parquet has no columns 'x', 'c'; it has a, b"):
        intune.read_parquet(tmp_path / "2.parquet", columns=["x", "a", "c"])


def test_columns_that_folders_have_are_checked_too(tmp_path: Path) -> None:
    spec = FeatureSpec(dense=[Dense("day")], sparse=[Sparse("country", Vocabulary(["de"])), Sparse("a", EXACT)])
    (tmp_path / "day=3" / "country=de").mkdir(parents=True)
    pq.write_table(pa.table({"a": [5]}), tmp_path / "day=3" / "country=de" / "0.parquet")
    pipe = intune.read_parquet(tmp_path, columns=spec.columns)
    spec.check(pipe)
    with pipe.map(spec).loader(cpus=1) as loader:
        (out,) = loader
    assert (out["dense"].tolist(), out["sparse"].tolist()) == ([[3]], [[2, 6]])
    with pytest.raises(
        SourceError, match=r"the columns of .*0\.parquet do not fit.*\n  column 'country' is dictionary"
    ):
        FeatureSpec(dense=[Dense("country")]).check(pipe)


def test_check_takes_schemas_and_pipelines_that_only_read_blocks(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tx\n")
    text = intune.read_tsv(tmp_path, schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
    FeatureSpec(dense=[Dense("a")]).check(text)
    with pytest.raises(SourceError, match="the columns do not fit the features:\n  column 'b' is string"):
        FeatureSpec(dense=[Dense("b")]).check(text)
    for other in (text.batch(3), intune.from_iterable([1])):
        with pytest.raises(
            PipelineError, match="check takes a schema, or a pipeline that reads blocks and has no other"
        ):
            FeatureSpec(dense=[Dense("a")]).check(other)


def test_a_column_that_is_there_twice_is_named() -> None:
    schema = pa.schema([("a", pa.int64()), ("a", pa.int64())])
    with pytest.raises(SourceError, match="column 'a' is there 2 times"):
        FeatureSpec(dense=[Dense("a")]).check(schema)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("click", pa.array([1, None, 0, 1]), "column 'click', row 1 of the block: must be 0 or 1, is missing"),
        ("click", pa.array([1, 0, 2, 1]), "column 'click', row 2 of the block: must be 0 or 1, is 2"),
        ("price", pa.array([1, 0, np.nan, 1]), "column 'price': row 2 of the block: nan is not finite as float32"),
        ("weights", pa.nulls(4), "column 'weights': row 0 of the block: 0 weights for 3 values"),
    ],
)
def test_a_bad_value_is_named_with_column_and_row(column: str, values: pa.Array, message: str) -> None:
    columns = dict(zip(block().schema.names, block().columns, strict=True))
    with pytest.raises(SourceError, match=re.escape(message)):
        WHOLE(pa.RecordBatch.from_pydict({**columns, column: values}))


def test_contradictions_are_refused_when_a_spec_is_made() -> None:
    with pytest.raises(PipelineError, match="a spec needs at least one of dense, sparse, lists and label"):
        FeatureSpec()
    with pytest.raises(PipelineError, match=re.escape("several outputs are called ['dense', 'ids']")):
        FeatureSpec(
            dense=[Dense("a")],
            lists=[MultiHot("ids", EXACT), Padded("ids", EXACT, 2), MultiHot("dense", EXACT)],
        )
    with pytest.raises(PipelineError, match=re.escape("Cross takes two columns or more, got 'a'")):
        Sparse("a", Cross(10))
    with pytest.raises(PipelineError, match=re.escape("Cross takes two columns or more, got ['a']")):
        Sparse(["a"], Cross(10))
    with pytest.raises(PipelineError, match=re.escape("Hash takes one column, got ('a', 'b')")):
        Sparse(("a", "b"), Hash(10))
    with pytest.raises(PipelineError, match=re.escape("3 encoders for the columns ('a', 'b') to cross")):
        Sparse(("a", "b"), Cross(10, encoders=[None, None, None]))


def test_a_spec_travels_and_serves_several_threads() -> None:
    copy = pickle.loads(pickle.dumps(WHOLE))
    assert copy == WHOLE
    blocks = [block(1000).slice(i) for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(copy, blocks)) == [WHOLE(one) for one in blocks]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_from_files_through_shuffle_and_batch_to_tensors(tmp_path: Path, executor: Any) -> None:
    torch = pytest.importorskip("torch")
    rows = 1000
    pq.write_table(pa.Table.from_batches([block(rows)]), tmp_path / "rows.parquet", row_group_size=130)
    WHOLE.check(pq.read_schema(tmp_path / "rows.parquet"))
    for spec in (WHOLE, FLAT):
        pipe = intune.read_parquet(tmp_path, columns=spec.columns).map(spec, executor=executor)
        with pipe.shuffle(300, seed=5).batch(64).to_torch().loader(cpus=2) as loader:
            batches = list(loader)
        assert [len(batch["label"]) for batch in batches] == [64] * 15 + [40]
        for batch in batches:
            assert batch["dense"].shape[1:] == (2,)
            assert batch["sparse"].shape[1:] == (3,)
            assert (batch["dense"].dtype, batch["sparse"].dtype) == (torch.float32, torch.int64)
            assert list(batch) == list(spec.outputs)
        direct = intune.read_parquet(tmp_path, columns=spec.columns).map(spec).batch(rows).to_torch()
        with direct.loader(cpus=1) as loader:
            (whole,) = loader
        found = [row for batch in batches for row in rows_of(batch)]
        assert found != rows_of(whole)
        assert Counter(found) == Counter(rows_of(whole))
        expected = wanted()
        assert whole["sparse"][:4, 0].tolist() == expected["user"]
        for name in spec.outputs[3:]:
            assert [row[spec.outputs.index(name)] for row in rows_of(whole)[:4]] == [
                tuple(row) if isinstance(row, list) else row for row in expected[name]
            ]


def test_a_batch_without_any_values_has_empty_tensors_of_the_right_kind(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    column = pa.array([None, [], None, [], [4]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": column}), tmp_path / "rows.parquet")
    spec = FeatureSpec(lists=[MultiHot("ids", EXACT)])
    with intune.read_parquet(tmp_path, columns=spec.columns).map(spec).batch(4).to_torch().loader(cpus=1) as loader:
        first, second = loader
    values, offsets = first["ids"]
    assert (values.shape, values.dtype) == ((0,), torch.int64)
    assert (offsets.tolist(), offsets.dtype) == ([0] * 5, torch.int64)
    assert [part.tolist() for part in second["ids"]] == [[5], [0, 1]]


OPEN_BANDIT = FeatureSpec(
    label="label",
    dense=[Dense("item_feature_0", Number(low=-1, high=1)), Dense("affinity_shown", Number(log=True))],
    sparse=[
        Sparse("timestamp", EXACT),
        Sparse("user_feature_0", EXACT),
        Sparse("user_feature_1", Hash(1000, seed=1)),
        Sparse("position", Buckets([2, 3])),
        Sparse("policy", Vocabulary(["bts"])),
        Sparse(("campaign", "item_id"), Cross(500)),
    ],
    lists=[
        MultiHot("aff_items", Vocabulary(list(range(80))), weights="aff_weights", most=3),
        Padded("aff_items", EXACT, 2, name="seen"),
    ],
)


def plain_rows(rows: Iterable[dict[str, Any]]) -> Iterable[tuple[Any, ...]]:
    """What can be said of Open Bandit rows without a hash, in plain Python."""
    for row in rows:
        items, weights = row["aff_items"] or [], row["aff_weights"] or []
        yield (
            float(row["label"]),
            min(max(row["item_feature_0"], -1), 1),
            1 + row["timestamp"],
            1 + row["user_feature_0"],
            1 + sum(bound <= row["position"] for bound in (2, 3)),
            2 if row["policy"] == "bts" else 1,
            tuple(2 + item for item in items[:3]),
            tuple(weights[:3]),
            tuple([1 + item for item in items[-2:]] + [0, 0])[:2],
            len(items[-2:]),
        )


@pytest.mark.slow
def test_weighted_lists_of_a_real_file_arrive_whole(shared_data: Path) -> None:
    pytest.importorskip("torch")
    path = shared_data / "open_bandit" / "obd_60k_nested.parquet"
    OPEN_BANDIT.check(pq.read_schema(path))
    pipe = intune.read_parquet(path, columns=OPEN_BANDIT.columns).map(OPEN_BANDIT)
    with pipe.shuffle(20_000, seed=1).batch(4096).to_torch().loader(cpus=2) as loader:
        batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [4096] * 14 + [60_000 - 14 * 4096]
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        assert int(batch["sparse"].min()) >= 1
        assert (batch["sparse"].numpy() < OPEN_BANDIT.table_rows).all()
        for label, dense, sparse, items, weights, seen, lengths in rows_of(batch):
            stamp, user, _, position, policy, _ = sparse
            found[label, dense[0], stamp, user, position, policy, items, weights, seen, lengths] += 1
    table = pq.read_table(path, columns=list(OPEN_BANDIT.columns), use_threads=False)
    assert found == Counter(plain_rows(table.to_pylist()))
    assert sum(bool(row[6]) * count for row, count in found.items()) == 2677


def test_a_spec_of_criteo_columns_gives_what_the_transform_of_criteo_gives() -> None:
    random = np.random.default_rng(3)
    columns = {
        name: pa.array(random.integers(-3, 2**32, 50), mask=random.random(50) < 0.3)
        for name in (*COUNT_COLUMNS, *CATEGORY_COLUMNS)
    }
    batch = pa.RecordBatch.from_pydict({"label": pa.array([0, 1] * 25), **columns})
    rows = range(2, 28)
    spec = FeatureSpec(
        label="label",
        dense=[Dense(name, Number(fill=4, log=True)) for name in COUNT_COLUMNS],
        sparse=[Sparse(name, Modulo(count)) for name, count in zip(CATEGORY_COLUMNS, rows, strict=True)],
    )
    expected = CriteoTransform(tuple(rows), missing_count=4)(batch)
    out = spec(batch)
    assert list(out) == ["label", "dense", "sparse"]
    assert spec.table_rows == tuple(rows)
    for name, array in expected.items():
        np.testing.assert_array_equal(out[name], array)


def test_hex_strings_and_dictionaries_in_a_spec() -> None:
    columns = {"c": pa.array(["ff", None, "", "ff"]).dictionary_encode(), "d": pa.array(["a", "b", None, "a"])}
    spec = FeatureSpec(sparse=[Sparse("c", Hex(EXACT)), Sparse(["c", "d"], Cross(100, encoders=[Hex(EXACT), None]))])
    out = spec(pa.RecordBatch.from_pydict(columns))["sparse"]
    assert out[:, 0].tolist() == [256, 0, 0, 256]
    assert out[0, 1] == out[3, 1] != 0
    assert out[1:3, 1].tolist() == [0, 0]
    with pytest.raises(SourceError, match="column 'c x d': row 0: 'zz' is not a hexadecimal number"):
        FeatureSpec(sparse=[spec.sparse[1]])(pa.RecordBatch.from_pydict({**columns, "c": pa.array(["zz"] * 4)}))


# ---- what is refused when it is written down, and arrays of numpy as they come -----------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureSpec(dense=["a"]), "each of dense must be Dense, got 'a'"),
        (lambda: FeatureSpec(dense="ab"), "each of dense must be Dense, got 'a'"),
        (lambda: FeatureSpec(dense=Dense("a")), "dense must be Sequence, got Dense("),
        (lambda: FeatureSpec(sparse=[Dense("a")]), "each of sparse must be Sparse, got Dense("),
        (lambda: FeatureSpec(lists=[Sparse("a", Hash(9))]), "each of lists must be MultiHot or Padded, got Sparse("),
        (lambda: FeatureSpec(label=3), "the label must be str or None, got 3"),
        (lambda: Dense(3), "the column must be str, got 3"),
        (lambda: Dense("a", Hash(9)), "the number of 'a' must be Number, got Hash("),
        (lambda: Sparse("a", "b"), "the encoder of 'a' must be Encoder or Cross, got 'b'"),
        (lambda: Sparse("a", Hash), "the encoder of 'a' must be Encoder or Cross, got <class"),
        (lambda: Sparse(("a", 3), Cross(9)), "each column must be str, got 3"),
        (lambda: MultiHot("a", "b"), "the encoder of 'a' must be Encoder, got 'b'"),
        (lambda: MultiHot("a", Hash(9), weights=3), "weights must be str or None, got 3"),
        (lambda: Padded(3, Hash(9), 2), "the column must be str, got 3"),
        (lambda: Padded("a", Number(), 2), "the encoder of 'a' must be Encoder, got Number("),
        (lambda: Hex("a"), "the encoder of Hex must be Encoder, got 'a'"),
        (lambda: Cross(9, encoders=[None, "a"]), "each of the encoders of Cross must be Encoder or None, got 'a'"),
        (lambda: Hash(2**63), "rows must be an int of at most 2**63-1, got 9223372036854775808"),
        (lambda: Hash(2**64), "rows must be an int of at most 2**63-1"),
        (lambda: Cross(2**64), "rows must be an int of at most 2**63-1"),
        (lambda: Modulo(2**64), "rows must be an int of at most 2**63-1"),
        (lambda: Vocabulary(None), "keys must be integers, or strings, or bytes"),
    ],
)
def test_what_can_be_no_feature_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("encoder", [Hash(2**63 - 1), Modulo(2**63 - 1)])
def test_the_largest_tables_have_no_negative_rows(encoder: Any) -> None:
    values = pa.array([-(2**63), 2**63 - 1, -1, 0, None, *range(1000)])
    rows = encoder(values)
    assert rows.dtype == np.int64
    assert (rows >= 0).all()
    assert (rows == 0).tolist() == [value is None for value in values.to_pylist()]


def test_arrays_of_the_other_byte_order_are_worth_what_they_say() -> None:
    spec = FeatureSpec(
        label="y", dense=[Dense("x")], sparse=[Sparse("i", Hash(1000))], lists=[Padded("l", Modulo(100), 2)]
    )
    here = {
        "y": np.array([0, 1]),
        "x": np.array([1.5, -2.0]),
        "i": np.array([BIG, -3]),
        "l": np.array([[1, 2], [3, 4]]),
    }
    other = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in here.items()}
    assert all(np.array_equal(array, spec(other)[name]) for name, array in spec(here).items())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1j]), "values of the numpy type complex128 are not taken"),
        (np.ones(1, np.clongdouble), "are not taken"),
        (np.ones(1, np.longdouble), f"values of the numpy type {np.dtype(np.longdouble)} are not taken"),
        (np.zeros(1, [("a", int)]), "the columns do not fit|are not taken"),
        pytest.param(np.array([object()]), "values of the numpy type object are not taken", id="objects"),
        (np.ones(()), r"expected an array \[n\], or \[n, length\] for lists, got one of shape \(\)"),
        (np.ones((1, 2, 3)), r"got one of shape \(1, 2, 3\)"),
    ],
    ids=str,
)
def test_arrays_that_are_no_column_are_named(array: Any, message: str) -> None:
    with pytest.raises(SourceError, match=f"column 'x'.*(?:{message})|{message}"):
        FeatureSpec(dense=[Dense("x")])({"x": array})


def test_lists_without_length_are_lists_without_values() -> None:
    for rows in (0, 3):
        out: Any = FeatureSpec(lists=[MultiHot("l", Hash(9)), Padded("l", Hash(9), 2, name="p")])(
            {"l": np.empty((rows, 0), np.int64)}
        )
        assert out.column(0).to_pylist() == [[]] * rows
        assert out.column(1).to_pylist() == [[0, 0]] * rows
        assert out.column(2).to_pylist() == [0] * rows


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(SourceError, match=r"the columns have \[1, 2\] rows: they must have equally many"):
        FeatureSpec(label="y", dense=[Dense("x")])({"y": np.zeros(2), "x": np.zeros(1)})
