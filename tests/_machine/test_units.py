"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import AllocationError
from intune._machine import parse_bytes
from intune._machine.units import parse_share

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "Gi": 2**30}


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        (25769803776, 25769803776),
        ("4096", 4096),
        ("24GiB", 24 * 2**30),
        ("512MB", 512_000_000),
        ("0.5GiB", 2**29),
        (" 1.5 kib ", 1536),
        ("0.1GB", 100_000_000),
        (".5 MB", 500_000),
        ("2.B", 2),
        ("1.9B", 1),
        ("+7tb", 7 * 10**12),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes(size: int | str, count: int) -> None:
    assert parse_bytes(size) == count


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.booleans())
def test_every_unit_in_any_case(number: int, unit: str, lower: bool) -> None:
    assert parse_bytes(f"{number} {unit.lower() if lower else unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("", "'' is not a size"),
        ("GiB", "'GiB' is not a size"),
        ("1 2GB", "is not a size"),
        ("inf", "is not a size"),
        ("1e9", "is not a size"),
        ("24GiB!", "is not a size"),
        ("3 apples", "unknown unit 'apples'"),
        ("24G", r"may mean 24GB \(1000 based\) or 24GiB \(1024 based\)"),
        ("0.5", "'0.5' has no unit"),
        ("0", "at least one byte; '0' was given"),
        ("0.4B", "at least one byte"),
        ("-1GiB", "at least one byte; '-1GiB'"),
        (0, "at least one byte; 0 was given"),
        (-5, "at least one byte"),
        (True, r"cannot be True \(bool\)"),
        (0.5, r"cannot be 0.5 \(float\)"),
        (None, r"cannot be None \(NoneType\)"),
    ],
)
def test_what_is_no_size_says_what_is_allowed(size: int | str, message: str) -> None:
    with pytest.raises(AllocationError, match=message):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("50%", 0.5),
        (" 12.5 % ", 0.125),
        ("100%", 1.0),
        (".1%", 0.001),
        ("0.5", 0.5),
        (".25", 0.25),
        ("1.0", 1.0),
        ("1", None),
        ("4GiB", None),
        ("0.5GiB", None),
        ("lots", None),
        ("%", None),
        ("50 % of it", None),
    ],
)
def test_shares(text: str, share: float | None) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "0.0", "1.5", "-0.5"])
def test_what_is_no_share_says_what_is_allowed(text: str) -> None:
    with pytest.raises(AllocationError, match=f"'{text}' is not a share: it must be above 0 and at most all, \"50%\""):
        parse_share(text)
