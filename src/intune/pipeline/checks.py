"""Whether an allocation is one for these stages."""

from intune._errors import AllocationError
from intune._values import Allocation


def check_allocation(allocation: Allocation, names: list[str]) -> None:
    """Refuse an allocation that is not complete or has a value that is not allowed; nothing is clamped.

    Args:
        allocation: What is to be put into force.
        names: The stages.

    Raises:
        AllocationError: If an entry is unknown, missing or not allowed.
    """
    unknown = sorted(set(allocation.concurrency) - set(names))
    missing = [name for name in names if name not in allocation.concurrency]
    if unknown or missing:
        raise AllocationError(
            f"an allocation needs one entry for each of {names}: unknown {unknown}, missing {missing}"
        )
    for name, value in allocation.concurrency.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise AllocationError(f"concurrency of {name!r} must be an int >= 0 or None, got {value!r}")
    if not isinstance(allocation.slots, int) or allocation.slots < 1:
        raise AllocationError(f"slots must be an int >= 1, got {allocation.slots!r}")
    size = allocation.in_flight_bytes
    if size is not None and (not isinstance(size, int) or size < 0):
        raise AllocationError(f"in_flight_bytes must be an int >= 0 or None, got {size!r}")
