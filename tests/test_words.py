"""Counts, sizes and durations in words, at the borders of their units."""

import pytest

from intune import _words

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("number", "many", "said"),
    [(0, "", "0 rows"), (1, "", "1 row"), (2, "", "2 rows"), (12_000, "", "12,000 rows"), (1, "lots", "1 row")],
)
def test_counts(number: int, many: str, said: str) -> None:
    assert _words.count(number, "row", many) == said
    assert _words.count(3, "batch", "batches") == "3 batches"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (None, "an unknown amount"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (KIB, "1 KiB"),
        (MIB - 513, "1,023 KiB"),
        (MIB - 512, "1 MiB"),
        (MIB, "1 MiB"),
        (GIB - MIB // 2 - 1, "1,023 MiB"),
        (GIB - MIB // 2, "1.0 GiB"),
        (GIB, "1.0 GiB"),
        (int(2.04 * GIB), "2.0 GiB"),
        (2000 * GIB, "2,000.0 GiB"),
    ],
)
def test_sizes(size: int | None, said: str) -> None:
    assert _words.size(size) == said


def test_sizes_that_are_not_known_or_are_compared() -> None:
    assert _words.size(None, "no limit") == "no limit"
    assert (_words.gib(GIB // 2), _words.gib(2000 * GIB)) == ("0.5", "2,000.0")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "an unknown time"),
        (0.0, "0 us"),
        (0.00004, "40 us"),
        (0.0000994, "99 us"),
        (0.0000996, "0.1 ms"),
        (0.0005, "0.5 ms"),
        (0.00123, "1.2 ms"),
        (0.00994, "9.9 ms"),
        (0.00996, "10 ms"),
        (0.0234, "23 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (7200.0, "7,200.0 s"),
    ],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert _words.duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (200, "3:20"), (3599.6, "1:00:00"), (3800, "1:03:20")],
)
def test_durations_as_on_a_clock(seconds: float, said: str) -> None:
    assert _words.clock(seconds) == said
