import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import SourceError
from intune.sources._hex import first_non_hex, hex_to_int64

HEX = st.text("0123456789abcdefABCDEF", min_size=0, max_size=8)


def test_values_above_the_signed_range_stay_positive() -> None:
    given_strings = ["00000000", "7fffffff", "80000000", "80e26c9b", "FFFFFFFF", "ffffffff", ""]
    result = hex_to_int64(pa.array(given_strings))
    assert result.type == pa.int64()
    assert result.to_pylist() == [0, 2147483647, 2147483648, 2162322587, 4294967295, 4294967295, None]


@given(st.lists(st.none() | HEX), st.sampled_from([pa.string(), pa.binary()]), st.integers(0, 3))
def test_equals_int_of_each_value(values: list[str | None], kind: pa.DataType, skipped: int) -> None:
    array = pa.array(values, pa.string()).cast(kind).slice(skipped)
    expected = [int(value, 16) if value else None for value in values[skipped:]]
    assert hex_to_int64(array).to_pylist() == expected


def test_all_full_length_needs_no_validity() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 10_000)
    result = hex_to_int64(pa.array([f"{value:08x}" for value in values]))
    assert result.null_count == 0
    np.testing.assert_array_equal(result.to_numpy(), values)


@pytest.mark.parametrize("under", [["zzzzzzzz", "00000009"], ["9", "notahexnumber"], ["zzzzzzzz", ""]])
@pytest.mark.parametrize("valid", [["0000000a", "00000001", "0000000b"], ["0000000a", "1", "b"]])
def test_bytes_under_a_null_do_not_count(valid: list[str], under: list[str]) -> None:
    strings = pa.array([valid[0], under[0], valid[1], under[1], valid[2]])
    validity = pa.array([0b10101], pa.uint8()).buffers()[1]
    masked = pa.Array.from_buffers(pa.string(), 5, [validity, *strings.buffers()[1:]])
    assert masked.to_pylist() == [valid[0], None, valid[1], None, valid[2]]
    assert hex_to_int64(masked).to_pylist() == [10, None, 1, None, 11]


@pytest.mark.parametrize("bad", ["0x10", "g", "-1", " 1", "1 ", "+1", "123456789", "12 4", "é", "0000000g", "1\n"])
@pytest.mark.parametrize("before", [["0000000a"] * 3, ["", None, "a"]], ids=["full", "mixed"])
def test_anything_else_is_an_error_with_row_and_value(bad: str, before: list[str | None]) -> None:
    array = pa.array([*before, bad, "ffffffff"])
    assert first_non_hex(array) == 3
    with pytest.raises(SourceError, match="row 3") as caught:
        hex_to_int64(array)
    assert repr(bad) in str(caught.value)


def test_two_wrong_lengths_do_not_cancel_out() -> None:
    # The length in all is that of two full values.
    assert hex_to_int64(pa.array(["1234567", "12345678"])).to_pylist() == [0x1234567, 0x12345678]
    with pytest.raises(SourceError, match="123456789"):
        hex_to_int64(pa.array(["1234567", "123456789"]))


@pytest.mark.parametrize("values", [[], [None], [None, None], [""]])
def test_nothing_in_it(values: list[str | None]) -> None:
    result = hex_to_int64(pa.array(values, pa.string()))
    assert (result.type, len(result), result.null_count) == (pa.int64(), len(values), len(values))


def test_other_types_are_refused() -> None:
    with pytest.raises(SourceError, match="int32"):
        hex_to_int64(pa.array([1], pa.int32()))
