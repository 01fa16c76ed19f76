"""Numbers to float32, categories to rows of a table, each against plain Python."""

import datetime
import decimal
import math
import pickle
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune import PipelineError, SourceError
from intune.recsys import (
    Buckets,
    Cross,
    Encoder,
    FeatureSpec,
    Hash,
    Hex,
    Modulo,
    MultiHot,
    Number,
    Sparse,
    Vocabulary,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(-1e6, 1e6, width=32)
BIG = 2**53 + 1  # the first integer that a float64 cannot hold


def sliced(values: list[Any], kind: pa.DataType, before: int = 3) -> pa.Array:
    """The values as a slice, whose offset lies inside the buffers, with nulls before it."""
    return pa.array([None] * before + values, kind).slice(before)


@given(st.lists(st.none() | FLOATS, max_size=30), FLOATS, FLOATS, st.booleans())
def test_numbers_are_filled_clamped_and_their_logarithm_taken(
    values: list[float | None], one: float, other: float, log: bool
) -> None:
    low, high = min(one, other), max(one, other)
    number = Number(fill=low, low=low, high=high, log=log)
    expected = [min(max(low if value is None else value, low), high) for value in values]
    if log:
        expected = [math.log1p(max(value, 0)) for value in expected]
    result = number(sliced(values, pa.float32()))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.array(expected, np.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, None, False]), [1, -1, 0]),
        (pa.array([decimal.Decimal("2.25"), None], pa.decimal128(10, 2)), [2.25, -1]),
        (pa.array([3, None, 3], pa.int16()).dictionary_encode(), [3, -1, 3]),
        (pa.array([2**64 - 1, None], pa.uint64()), [2.0**64, -1]),
        (pa.array(np.array([0.5, 9], np.float16), mask=np.array([False, True])), [0.5, -1]),
        (pa.nulls(2), [-1, -1]),
        (pa.array([], pa.int8()), []),
        (np.array([True, False]), [1, 0]),
        (np.array([4, 5], np.uint8), [4, 5]),
    ],
)
def test_numbers_of_every_type_are_taken(column: Any, expected: list[float]) -> None:
    assert Number(fill=-1)(column).tolist() == expected
    assert not isinstance(column, pa.Array) or Number().accepts(column.type)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_is_an_error_or_as_if_missing(bad: float) -> None:
    column = pa.array([None, 1.0, bad, bad])
    hint = "; Number(non_finite='fill') takes such values for missing ones and gives 0"
    with pytest.raises(SourceError, match=re.escape(f"row 2 of the block: {bad} is not finite as float32{hint}")):
        Number(high=5)(column)
    assert Number(fill=2, non_finite="fill")(column).tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.date32(), pa.duration("s"), pa.string(), pa.list_(pa.int64()), pa.struct([])]
)
def test_numbers_are_not_made_of_dates_texts_and_lists(kind: pa.DataType) -> None:
    assert not Number().accepts(kind)
    with pytest.raises(TypeError, match="expected integers"):
        Number()(pa.array([None], kind))


def test_numbers_are_not_made_of_dates_of_numpy() -> None:
    for dtype in ("datetime64[D]", "timedelta64[s]"):
        with pytest.raises(TypeError, match="expected integers, floats, decimals and booleans, got dates or times"):
            Number()(np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill": math.nan}, "fill must be finite (as float32) and within low=None and high=None, got nan"),
        ({"fill": -1.0, "low": 0.0}, "fill must be finite (as float32) and within low=0.0"),
        ({"low": 2.0, "high": 1.0, "fill": 1.5}, "within low=2.0 and high=1.0, got 1.5"),
        ({"fill": 1e300, "non_finite": "fill"}, "fill must be finite (as float32) and within low=None and high=None"),
        ({"low": 1e300, "fill": 1e300}, "fill must be finite (as float32) and within low=1e+300"),
        ({"low": 1e300}, "within low=1e+300 and high=None, got 0.0"),
        ({"high": -1e300}, "within low=None and high=-1e+300, got 0.0"),
        ({"low": math.nan}, "within low=nan"),
        ({"fill": 10**400}, "low, fill and high must be numbers, got low=None, fill=1000"),
        ({"fill": "3"}, "low, fill and high must be numbers, got low=None, fill='3', high=None"),
        ({"high": [1]}, "low, fill and high must be numbers, got low=None, fill=0.0, high=[1]"),
        ({"non_finite": "drop"}, "non_finite must be 'raise' or 'fill', got 'drop'"),
    ],
)
def test_contradictions_of_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        Number(**options)


@pytest.mark.parametrize("options", [{"low": -1e300, "high": 1e300}, {"low": -math.inf}, {"fill": 3e38}])
def test_limits_beyond_float32_are_none(options: dict[str, Any]) -> None:
    numbers = Number(non_finite="fill", **options)(pa.array([-3e38, 3e38, 1e300, None]))
    fill = np.float32(options.get("fill", 0))
    assert numbers.tolist() == [np.float32(-3e38), np.float32(3e38), fill, fill]


@given(
    st.lists(st.none() | st.floats(), max_size=10),
    *([st.none() | st.floats() | st.integers(-(10**40), 10**40)] * 2),
    st.floats() | st.integers(-(10**40), 10**40),
    st.booleans(),
)
def test_numbers_are_finite_and_within_their_limits_whatever_they_are(
    values: list[float | None], low: float | None, high: float | None, fill: float, log: bool
) -> None:
    try:
        number = Number(fill=fill, low=low, high=high, log=log, non_finite="fill")
    except PipelineError:
        return
    numbers = number(pa.array(values, pa.float64()))
    assert np.isfinite(numbers).all()
    if not log:
        with np.errstate(over="ignore"):
            assert low is None or (numbers >= np.float32(low)).all()
            assert high is None or (numbers <= np.float32(high)).all()


@given(
    st.lists(st.none() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=30),
    st.lists(st.floats(-100, 100) | st.integers(-5, 5), min_size=1, max_size=8, unique=True),
)
def test_floats_fall_into_buckets(values: list[float | None], boundaries: list[float]) -> None:
    buckets = Buckets(sorted(boundaries))
    rows = buckets(sliced(values, pa.float64()))
    expected = [
        0 if value is None or math.isnan(value) else 1 + sum(bound <= value for bound in boundaries) for value in values
    ]
    assert rows.dtype == np.int64
    assert rows.tolist() == expected
    assert buckets.table_rows == len(boundaries) + 2


@given(
    st.lists(st.none() | st.integers(0, 2**8 - 1) | INT64, max_size=30),
    st.lists(INT64 | st.floats(-1e20, 1e20) | st.integers(-3, 300), min_size=1, max_size=8, unique=True),
)
def test_integers_fall_into_buckets_exactly(values: list[int | None], boundaries: list[float]) -> None:
    buckets = Buckets(sorted(boundaries))
    expected = [0 if value is None else 1 + sum(bound <= value for bound in boundaries) for value in values]
    assert buckets(sliced(values, pa.int64())).tolist() == expected
    unsigned = [value for value in values if value is None or 0 <= value < 256]
    expected = [0 if value is None else 1 + sum(bound <= value for bound in boundaries) for value in unsigned]
    assert buckets(sliced(unsigned, pa.uint8())).tolist() == expected


def test_nan_is_missing_and_infinities_are_not() -> None:
    buckets = Buckets([0, 1])
    values = [math.nan, -math.inf, 0.0, -0.0, math.inf]
    assert buckets(np.array(values)).tolist() == [0, 1, 2, 2, 3]
    for kind in (pa.float32(), pa.float64()):
        assert buckets(pa.array([*values, None], kind)).tolist() == [0, 1, 2, 2, 3, 0]


def test_integers_above_float_precision_and_of_64_bits_keep_their_bucket() -> None:
    buckets = Buckets([BIG, 2**63])
    assert buckets(pa.array([BIG - 1, BIG, None, 2**63 - 1])).tolist() == [1, 2, 0, 2]
    assert buckets(pa.array([2**63 - 1, 2**63, 2**64 - 1], pa.uint64())).tolist() == [2, 3, 3]


@pytest.mark.parametrize("boundaries", [[], [1, 1], [2, 1], [0, math.inf], [math.nan]])
def test_boundaries_rise_and_are_finite(boundaries: list[float]) -> None:
    with pytest.raises(PipelineError, match="boundaries must be finite and rise"):
        Buckets(boundaries)


UTC2 = datetime.timezone(datetime.timedelta(hours=2))
BEFORE_1970 = datetime.datetime(1969, 12, 31, 23, 59, 59)


@pytest.mark.parametrize(
    ("column", "number"),
    [
        (pa.array([BEFORE_1970], pa.timestamp("us")), -1_000_000),
        (pa.array([datetime.date(1969, 12, 31)], pa.date32()), -1),
        (pa.array([datetime.date(1969, 12, 31)], pa.date64()), -86_400_000),
        (pa.array([datetime.datetime(1970, 1, 1, 2, tzinfo=UTC2)], pa.timestamp("ns", "+02:00")), 0),
        (pa.array([datetime.time(0, 0, 7)], pa.time32("s")), 7),
        (pa.array([datetime.timedelta(milliseconds=-5)], pa.duration("ms")), -5),
        (np.array(["1970-01-03"], "datetime64[D]"), 2),
        (pa.array([True]), 1),
    ],
)
def test_dates_and_times_are_integers_in_their_own_unit(column: Any, number: int) -> None:
    for encoder in (Modulo(2**40), Hash(10**6), Buckets([number - 1, number]), Vocabulary([number, number + 1])):
        assert encoder(column).tolist() == encoder(np.array([number])).tolist()
        assert not isinstance(column, pa.Array) or encoder.accepts(column.type)


def test_not_a_time_is_missing() -> None:
    column = np.array(["NaT", "1970-01-02T00:00:00"], "datetime64[s]")
    assert Modulo(10**6)(column).tolist() == [0, 1 + 86_400]


def test_decimals_have_buckets_but_are_no_ids() -> None:
    column = pa.array([decimal.Decimal("2.25"), decimal.Decimal("2.24"), None], pa.decimal128(10, 2))
    assert Buckets([2.25])(column).tolist() == [2, 1, 0]
    for encoder in (Modulo(5), Hash(5), Vocabulary([2])):
        assert not encoder.accepts(column.type)
        with pytest.raises(TypeError, match="expected"):
            encoder(column)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary(), pa.string_view()])
def test_hex_strings_of_every_kind(kind: pa.DataType) -> None:
    values = ["0000000a", None, "", "FFffFFff", "7"]
    column = sliced(values, pa.string()).cast(kind)
    assert Hex(Modulo(2**40))(column).tolist() == [11, 0, 0, 2**32, 8]
    assert Hex(Modulo(2**40))(column.cast(pa.string()).dictionary_encode()).tolist() == [11, 0, 0, 2**32, 8]
    assert Hex(Hash(77)).table_rows == 77


def test_what_is_not_hex_is_named_with_its_row() -> None:
    column = pa.array(["ab", "xy", "ab"])
    for given_column in (column, column.dictionary_encode()):
        with pytest.raises(SourceError, match="row 1: 'xy' is not a hexadecimal number"):
            Hex(Hash(5))(given_column.slice(0))
    unused = column.dictionary_encode().filter(pa.array([True, False, True]))
    assert Hex(Modulo(2**40))(unused).tolist() == [172, 172]
    with pytest.raises(TypeError, match="expected strings or bytes of 1 to 8 hexadecimal digits, got int64"):
        Hex(Hash(5))(pa.array([1]))
    with pytest.raises(PipelineError, match="Hex gives int64, but Vocabulary takes strings"):
        Hex(Vocabulary(["a"]))


ENCODERS: list[tuple[Encoder, list[Any], pa.DataType]] = [
    (Modulo(50), [BIG, -3, None, 7, BIG], pa.int64()),
    (Hash(50), [BIG, -3, None, 7, BIG], pa.int64()),
    (Hash(50), ["a", "", None, "abcdefghijk", "a"], pa.string()),
    (Hex(Hash(50)), ["ff", "", None, "12", "ff"], pa.string()),
    (Buckets([0, 5.5]), [1.0, math.nan, None, -1.0, 1.0], pa.float64()),
    (Vocabulary(["a", "b"]), ["a", "", None, "z", "a"], pa.string()),
    (Vocabulary([7, BIG], unknown_rows=3), [BIG, -3, None, 7, BIG], pa.int64()),
]


@pytest.mark.parametrize(("encoder", "values", "kind"), ENCODERS)
def test_an_encoder_is_the_same_for_dictionaries_slices_empty_and_missing_columns(
    encoder: Encoder, values: list[Any], kind: pa.DataType
) -> None:
    column = pa.array(values, kind)
    rows = encoder(column).tolist()
    assert rows[2] == 0
    assert rows[0] == rows[4] != 0
    assert all(0 <= row < encoder.table_rows for row in rows)
    assert encoder(sliced(values, kind)).tolist() == rows
    assert encoder(column.dictionary_encode()).tolist() == rows
    assert encoder(column.dictionary_encode().slice(1, 2)).tolist() == rows[1:3]
    with_null = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 2, 0]), pa.array([values[0], None, values[3]], kind)
    )
    assert encoder(with_null).tolist() == [rows[0], 0, 0, rows[3], rows[0]]
    assert encoder(column.slice(0, 0)).tolist() == []
    assert encoder(pa.nulls(3, kind)).tolist() == encoder(pa.nulls(3)).tolist() == [0, 0, 0]
    assert encoder.accepts(pa.null())
    assert encoder.accepts(pa.dictionary(pa.int32(), kind))
    assert encoder.accepts(kind)
    assert pickle.loads(pickle.dumps(encoder)) == encoder


@pytest.mark.parametrize(("encoder", "values", "kind"), ENCODERS)
def test_what_no_encoder_takes_is_refused(encoder: Encoder, values: list[Any], kind: pa.DataType) -> None:
    wrong = [pa.list_(kind), pa.struct([("a", kind)]), pa.map_(pa.string(), kind), pa.month_day_nano_interval()]
    for other in wrong:
        assert not encoder.accepts(other)
        with pytest.raises(TypeError, match="expected"):
            encoder(pa.array([None], other))
    with pytest.raises(TypeError, match="one value a row, got an array of shape"):
        encoder(np.zeros((2, 2), np.int64))


def test_ids_keep_all_64_bits_beside_a_null() -> None:
    encoder = Modulo(2**62)
    for values in ([BIG, 4, 5], [BIG, None, 5], [None, None, None]):
        rows = encoder(pa.array(values, pa.int64()))
        assert rows.dtype == np.int64
        assert rows.tolist() == [0 if value is None else 1 + value for value in values]
    assert not encoder.accepts(pa.uint64())


@dataclass(frozen=True)
class Parity(Encoder):
    """An encoder as a user may write it."""

    @property
    def table_rows(self) -> int:
        return 3

    @property
    def expects(self) -> str:
        return "integers"

    def accepts_plain(self, kind: pa.DataType) -> bool:
        return bool(pa.types.is_integer(kind))

    def encode(self, column: Any) -> Any:
        return np.array([0 if value is None else 1 + value % 2 for value in column.to_pylist()], np.int64)


def test_an_encoder_of_ones_own_gets_plain_columns() -> None:
    spec = FeatureSpec(
        sparse=[Sparse("a", Parity()), Sparse(("a", "b"), Cross(99, encoders=[Parity(), None]))],
        lists=[MultiHot("l", Parity())],
    )
    columns = {
        "a": pa.array([True, None, False]),
        "b": pa.array([1, 1, 1]),
        "l": pa.array([[3, None], [], None], pa.list_(pa.dictionary(pa.int8(), pa.int64()))),
    }
    out = spec(pa.RecordBatch.from_pydict(columns))
    assert [row[0] for row in out["sparse"].to_pylist()] == [2, 0, 1]
    assert out["sparse"].to_pylist()[1][1] == 0
    assert out["l"].to_pylist() == [[2, 0], [], []]
    with pytest.raises(SourceError, match="column 'b' is double; allowed are integers"):
        replace(spec, sparse=[Sparse("b", Parity())]).check(pa.schema([("b", pa.float64()), ("l", pa.null())]))


@pytest.mark.parametrize("rows", [1, 0, -2, 2.5, True, None])
def test_a_table_has_two_rows_at_least(rows: Any) -> None:
    for kind in (Modulo, Hash):
        with pytest.raises(PipelineError, match="rows must be an int of at least 2, got"):
            kind(rows)
