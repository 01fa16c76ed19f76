"""The ledger of bytes in flight, and the forecast from which reservations are made.

Pure bookkeeping without threads: the scheduler calls it under its own lock.
"""

from intune._values import InFlight
from intune.pipeline.footprint import Footprint


class Charge:
    """What one item holds: its distinct buffers, and what is reserved for it beyond them.

    Attributes:
        work: Bytes that whoever makes it, or works on it now, needs for that; 0 = nobody does.
        used: Of these, its buffers.
    """

    __slots__ = ("actual", "buffers", "owner", "reserved", "used", "uses", "work")

    def __init__(self, reserved: int, owner: "set[Charge]") -> None:
        self.reserved, self.owner = reserved, owner
        self.actual = 0
        self.buffers: Footprint = {}
        self.uses = 1
        self.work = self.used = 0

    @property
    def beyond(self) -> int:
        """Reserved bytes that are not yet taken up by buffers."""
        return max(0, self.reserved - self.actual)


class Ledger:
    """Bytes in flight: each distinct buffer once (`held`), and with what is reserved beyond (`charged`).

    What is reserved for items that wait shows nowhere in memory: `in_flight` tells them from those that are worked on.

    Args:
        budget: Bytes that may be in flight; None = no limit. May be changed at any time; nothing is taken
            back, but nothing is admitted either until use has fallen below it.

    Attributes:
        work_budget: Bytes that may be needed for the items that are worked on, when work on one more begins; None = no
            limit.
        spare: Bytes that could be taken, when memory was last measured, where something begins although the budget has
            no room for it; None = as many as it takes.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.work_budget: int | None = None
        self.spare: int | None = None
        self._taken = 0
        self.charged = 0
        self.held = 0
        self.peak = 0
        self._working = self._used = 0
        self._buffers: dict[int, list[int]] = {}

    def in_flight(self) -> InFlight:
        """What is in flight now."""
        waiting = max(0, self.held - self._used)  # items may share buffers
        return InFlight(self.held, self.charged, self._working, waiting)

    def admits_work(self, size: int) -> bool:
        """Whether work that takes so much may begin."""
        return self.work_budget is None or self._working + size <= self.work_budget

    @property
    def debt(self) -> int:
        """Bytes charged above the budget; nothing is admitted until it is repaid."""
        return 0 if self.budget is None else max(0, self.charged - self.budget)

    def admits(self, size: int) -> bool:
        """Whether a reservation of so many bytes fits the budget."""
        return self.budget is None or self.charged + size <= self.budget

    def keep_to(self, spare: int | None) -> None:
        """Memory has been measured: from now on so many bytes are to spare."""
        self.spare, self._taken = spare, 0

    def spares(self, size: int, all_reserved: bool) -> bool:
        """Whether so many bytes are to spare beside those of all buffers that came since memory was measured.

        What buffers gave back meanwhile does not count: allocators may have kept it.

        Args:
            size: The bytes.
            all_reserved: Whether what is reserved may be taken up at any moment.
        """
        if self.spare is None:
            return True
        return self._taken + (self.charged - self.held if all_reserved else 0) + size <= self.spare

    def reserve(self, size: int, owner: set[Charge]) -> Charge:
        """Reserve bytes for an item; the caller has asked `admits` or has a reason not to.

        The charge stands in `owner` until it is released, so that all of an owner's can be released at once.
        """
        charge = Charge(size, owner)
        owner.add(charge)
        self.work_on(charge, size)
        self._add(size)
        return charge

    def work_on(self, charge: Charge, size: int) -> None:
        """Somebody makes an item or works on it, which takes so many bytes, its buffers included; until `true_up`."""
        self._rests(charge)
        charge.work, charge.used = size, charge.actual
        self._working += charge.work
        self._used += charge.used

    def true_up(self, charge: Charge, buffers: Footprint) -> None:
        """An item now holds these buffers, and waits; its reservation stays for what it may still need."""
        before = charge.beyond
        self._rests(charge)
        held = self._buffers
        for key, size in buffers.items():
            entry = held.get(key)
            if entry is None:
                held[key] = [size, 1]
                self.charged += size
                self.held += size
                self._taken += size
            else:
                entry[1] += 1
        self._drop(charge.buffers)
        charge.buffers = buffers
        charge.actual = sum(buffers.values())
        self._add(charge.beyond - before)  # only now is it known whether this is a peak

    def raise_to(self, charge: Charge, size: int) -> None:
        """Reserve more for an item, so that it has `size` bytes in all; never less than it has."""
        before = charge.beyond
        charge.reserved = max(charge.reserved, size)
        self._add(charge.beyond - before)

    def lower_by(self, charge: Charge, size: int) -> None:
        """Take back as much of what is reserved for an item beyond its buffers, if there is so much."""
        taken = min(size, charge.beyond)
        if taken > 0:
            charge.reserved -= taken
            self._add(-taken)

    def settle(self, charge: Charge) -> None:
        """An item grows no more: what is reserved beyond its buffers is given back."""
        self._rests(charge)
        beyond = charge.beyond
        charge.reserved = 0
        self._add(-beyond)

    def use(self, charge: Charge, times: int) -> None:
        """An item is now held by so many more."""
        charge.uses += times

    def release(self, charge: Charge) -> None:
        """One holder let go; with the last one the item's bytes are given back."""
        charge.uses -= 1
        if charge.uses == 0:
            self._forget(charge)
            charge.owner.discard(charge)
        elif charge.uses < 0:
            raise AssertionError("a charge was released more often than it was held")

    def release_all(self, owner: set[Charge]) -> None:
        """Give back everything that an owner holds."""
        for charge in owner:
            self._forget(charge)
        owner.clear()

    def clear(self) -> None:
        """Nothing is in flight any more, whatever an interrupt of the consumer left half booked."""
        self.charged = self.held = 0
        self._working = self._used = 0
        self._buffers.clear()

    def _forget(self, charge: Charge) -> None:
        self.settle(charge)
        buffers, charge.buffers = charge.buffers, {}
        charge.actual = 0
        self._drop(buffers)

    def _rests(self, charge: Charge) -> None:
        self._working -= charge.work
        self._used -= charge.used
        charge.work = charge.used = 0

    def _add(self, size: int) -> None:
        self.charged += size
        if self.charged > self.peak:
            self.peak = self.charged

    def _drop(self, buffers: Footprint) -> None:
        held = self._buffers
        for key in buffers:
            entry = held.get(key)
            if entry is None:
                continue  # an interrupt of the consumer came after the entry was deleted
            entry[1] -= 1
            if entry[1] <= 0:
                del held[key]
                self.charged -= entry[0]
                self.held -= entry[0]


class Forecast:
    """Bytes that an item will hold at its largest, from a bound known before and from what others held.

    With ratios (bytes for each unit of bound) of mean m, standard deviation s and largest x, n items in flight hardly
    hold more than n m + 3 s sqrt(n) + (x - m) together: the spread of items that do not depend on each other, and one
    that is as large as any. So each is reserved the n-th part of that: few items are reserved for as if each might be
    the largest, and with many one outlier does not make the run wait. What is remembered fades over some hundred items.
    Where the last few on their way were larger than usual, so is what is reserved.
    Until three items have passed all stages it is the largest ratio seen so far, of items on their way included; before
    anything was seen there is no estimate, and one item at a time is let in.
    """

    SPREAD, MARGIN, ENOUGH = 3.0, 1.05, 3
    WEIGHT, FADING, LATELY = 1 / 128, 1 / 256, 1 / 8

    def __init__(self) -> None:
        self._count = 0
        self._lately = 1.0
        self._mean = self._variance = self._largest = 0.0
        self.known = False
        """Whether there is an estimate."""

    @property
    def mean(self) -> float:
        """Mean bytes for each unit of bound; the largest until enough were seen."""
        return self._mean if self.enough else self._largest

    @property
    def enough(self) -> bool:
        """Whether enough items have passed for mean and spread to say what the next ones need."""
        return self._count >= self.ENOUGH

    def note(self, bound: int, size: int) -> None:
        """An item with this bound, on its way, holds so much now."""
        self._largest = max(self._largest, size / max(1, bound))
        self.known = self.known or size > 0

    def compare(self, times: float) -> None:
        """An item on its way is so many times as large as usual: the next ones may be so too."""
        self._lately += self.LATELY * (times - self._lately)

    def add(self, bound: int, peak: int) -> None:
        """An item with this bound held `peak` bytes at its largest."""
        ratio = peak / max(1, bound)
        self._count += 1
        weight = max(self.WEIGHT, 1 / self._count)
        away = ratio - self._mean
        self._mean += weight * away
        self._variance = (1 - weight) * (self._variance + weight * away * away)
        self._largest = max(ratio, self._largest - self.FADING * (self._largest - self._mean))
        self.known = True

    def bytes(self, bound: int, budget: int, beside: int = 0) -> int:
        """Bytes to reserve for an item with this bound where `budget` bytes may be in flight.

        Where there is no estimate it is the bound itself. `beside` is what the item holds beside what is forecast.
        """
        if not self.known:
            return bound
        ratio = self._largest
        if self.enough and self._mean > 0:
            items = max(1.0, budget / (max(1, bound) * self._mean + beside))
            spread = self.SPREAD * (self._variance / items) ** 0.5 + (self._largest - self._mean) / items
            ratio = min(ratio, (self._mean + spread) * max(1.0, self._lately))
        return int(bound * ratio * self.MARGIN)
