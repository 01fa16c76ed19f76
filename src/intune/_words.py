"""Counts, sizes and durations as a person reads them, the same wherever they are said."""

_SIZES = ((2**30, "GiB", ".1f"), (2**20, "MiB", ".0f"), (2**10, "KiB", ".0f"))


def count(number: int, one: str, many: str = "") -> str:
    """A number of things: "1 batch", "2 batches", "12,000 rows".

    Args:
        number: How many.
        one: The word for one of them.
        many: The word for any other number; "" = that for one with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def size(size_bytes: int | None, unknown: str = "an unknown amount") -> str:
    """Bytes: "640 bytes", "12 KiB", "512 MiB", "1,234.5 GiB"; a unit ends where the next one reads better.

    Args:
        size_bytes: How many; None = not known.
        unknown: What is said then.
    """
    if size_bytes is None:
        return unknown
    for unit, name, form in _SIZES:
        if size_bytes >= unit - unit // 2048:  # what would be rounded to 1,024 of the unit below
            return f"{size_bytes / unit:,{form}} {name}"
    return count(size_bytes, "byte")


def gib(size_bytes: int) -> str:
    """Bytes in GiB without the unit, for sizes that are compared: "0.5", "1,234.5"."""
    return f"{size_bytes / 2**30:,.1f}"


def duration(seconds: float | None) -> str:
    """Seconds: "40 us", "0.5 ms", "23 ms", "7,200.0 s"; None = "an unknown time"."""
    if seconds is None:
        return "an unknown time"
    if seconds >= 0.9995:
        return f"{seconds:,.1f} s"
    if seconds >= 0.00995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2g} ms" if seconds >= 0.0000995 else f"{seconds * 1e6:.0f} us"


def clock(seconds: float) -> str:
    """Seconds as on a clock, where they are many: "42 s", "3:20", "1:03:20"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def or_open(concurrency: int | None) -> str:
    """A limit of a stage's concurrency: "4", or "open"."""
    return "open" if concurrency is None else str(concurrency)
