"""Sizes as people write them."""

import re
from fractions import Fraction

from intune._errors import AllocationError

_UNITS = {"b": 1} | {
    prefix + end: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for end, base in (("b", 1000), ("ib", 1024), ("i", 1024))
}
_ALLOWED = 'Allowed: whole bytes, or a number with B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB ("24GiB").'


def parse_bytes(size: int | str) -> int:
    """Bytes in a size: 1024, "24GiB" (1024 based), "512MB" (1000 based), "0.5 GiB", in any case.

    Parts of a byte are dropped.

    Raises:
        AllocationError: If it is no size, or less than one byte; the message says what is allowed.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise AllocationError(f"A size in bytes cannot be {size!r} ({type(size).__name__}). {_ALLOWED}")
    count = size if isinstance(size, int) else _parse(size)
    if count < 1:
        raise AllocationError(f"A size must be at least one byte; {size!r} was given. {_ALLOWED}")
    return count


def parse_share(text: str) -> float | None:
    """The share of something in a text: "50%" and "0.5" are 0.5; None = the text is no share, but may be a size.

    Raises:
        AllocationError: If it is a share of nothing, or of more than all.
    """
    match = re.fullmatch(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*%\s*|\s*([+-]?\d*\.\d+)\s*", text, re.ASCII)
    if match is None:
        return None
    share = Fraction(match[1]) / 100 if match[1] else Fraction(match[2])
    if not 0 < share <= 1:
        raise AllocationError(
            f'{text!r} is not a share: it must be above 0 and at most all, "50%" or 0.5. A size needs a unit ("24GiB").'
        )
    return float(share)


def _parse(text: str) -> int:
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None:
        raise AllocationError(f"{text!r} is not a size in bytes. {_ALLOWED}")
    number, unit = match[1], match[2].lower()
    if len(unit) == 1 and unit in "kmgtp":
        names = f"{number}{unit.upper()}B (1000 based) or {number}{unit.upper()}iB (1024 based)"
        raise AllocationError(f"{text!r} may mean {names}: write the one you mean.")
    if unit and unit not in _UNITS:
        raise AllocationError(f"{text!r} has the unknown unit {match[2]!r}. {_ALLOWED}")
    if not unit and not number.lstrip("+-").isdecimal():
        raise AllocationError(f"{text!r} has no unit, so it must be whole bytes. {_ALLOWED}")
    return int(Fraction(number) * _UNITS.get(unit, 1))
