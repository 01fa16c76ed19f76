"""Checks of the values that a scenario is made of: each error names the field, what was given and what is allowed."""

import math
from collections.abc import Iterable
from numbers import Integral, Real


class Checks:
    """Checks the fields of one object.

    Args:
        of: What the object is called in errors.
        values: The object; its fields are looked up by name.
    """

    def __init__(self, of: str, values: object) -> None:
        self._of = of
        self._values = values

    def amounts(self, *names: str, above: bool = False) -> None:
        """Finite numbers of at least 0, or above it."""
        for name in names:
            value = getattr(self._values, name)
            if not is_number(value) or value < 0 or (above and value == 0):
                raise self.wrong(name, f"a finite number {'above' if above else 'of at least'} 0")

    def shares(self, *names: str) -> None:
        """Numbers from 0 to 1."""
        for name in names:
            value = getattr(self._values, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise self.wrong(name, "a number from 0 to 1")

    def counts(self, *names: str, least: int = 1, optional: bool = False) -> None:
        """Whole numbers of at least so much, or None where that is allowed."""
        for name in names:
            value = getattr(self._values, name)
            if optional and value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise self.wrong(name, f"a whole number of at least {least}{' or None' if optional else ''}")

    def one_of(self, name: str, allowed: Iterable[object]) -> None:
        """One of some values."""
        value, choices = getattr(self._values, name), list(allowed)
        if not any(value is each or (type(value) is type(each) and value == each) for each in choices):
            raise self.wrong(name, f"one of {', '.join(map(repr, choices))}")

    def wrong(self, name: str, allowed: str) -> ValueError:
        """The error about a field, not raised yet."""
        return ValueError(f"{self._of}: {name} must be {allowed}, got {getattr(self._values, name)!r}")


def is_number(value: object) -> bool:
    """Whether it is a number that is neither infinite nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
