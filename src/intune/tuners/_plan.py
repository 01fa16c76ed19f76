"""Arithmetic of rates: what a pipeline of known curves delivers, and the most that it can.

All rates are in source rows a second. A stage of curve `seconds(n)` works at n items at once at the rate
n / seconds(n). At a rate X it is busy on the *least* n that reaches X. What bounds X: the slots, shared by
all stages that hold one wherever they are needed; the concurrency of each stage; the interpreter lock, which the
threads of one process hold one at a time; CPUs; the training loop; processes and their memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

STEPS = 30
"""Halvings of a bisection: beyond the precision of any measurement."""


ITEMS_LEAST = 1 / 8
"""Share of the bytes of processes and items that items get even if processes want more."""


@dataclass(frozen=True, slots=True)
class Line:
    """One stage, as far as rates go.

    Attributes:
        name: The stage.
        base: Seconds a source row of one item alone, above 0.
        slope: Seconds more for each other item at once, at least 0.
        bend: Seconds more for each pair of items at once, at least 0.
        most: The largest concurrency that may be given to it.
        holds_slot: Whether its items hold a CPU slot while they are worked on.
        process: Whether it runs in processes, one for each item at once.
        process_bytes: What one of them holds.
        lock_seconds: Seconds a source row for which it holds the interpreter lock.
        cpu_seconds: CPU seconds a source row.
    """

    name: str
    base: float
    slope: float
    bend: float
    most: int
    holds_slot: bool = True
    process: bool = False
    process_bytes: int = 0
    lock_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def seconds(self, busy: float) -> float:
        """Seconds a source row with so many items at once."""
        more = max(0.0, busy - 1)
        return self.base + self.slope * more + self.bend * more * busy

    def rate(self, busy: float) -> float:
        """Source rows a second with so many items at once."""
        return busy / self.seconds(busy)

    @property
    def slows(self) -> bool:
        """Whether it takes longer with more items at once."""
        return self.slope > 0 or self.bend > 0

    @property
    def peak(self) -> float:
        """Items at once, at least 1, beyond which the rate falls; infinite where it never does."""
        if self.slope >= self.base:
            return 1.0
        return max(1.0, math.sqrt((self.base - self.slope) / self.bend)) if self.bend > 0 else math.inf

    def best_within(self, concurrency: int) -> int:
        """The concurrency up to this one at which its rate is largest."""
        peak = min(self.peak, float(concurrency))
        return max(math.ceil(peak), math.floor(peak), key=self.rate)

    def need(self, rate: float) -> float:
        """The least number of items at once that reach a rate, below 1 for part of the time; infinite if none do."""
        if rate * self.base <= 1:
            return rate * self.base
        if self.slope >= self.base:
            return math.inf
        # rate (base + slope (n - 1) + bend n (n - 1)) = n, in the form that does not cancel for a small bend.
        square, linear, constant = (
            rate * self.bend,
            1 - rate * (self.slope - self.bend),
            rate * (self.base - self.slope),
        )
        under = linear * linear - 4 * square * constant
        if linear <= 0 or under < -1e-9 * linear * linear:  # at the peak itself rounding may give less than 0
            return math.inf
        return 2 * constant / (linear + math.sqrt(max(0.0, under)))


@dataclass(frozen=True, slots=True)
class Limits:
    """What all stages share.

    Attributes:
        slots: CPU slots.
        trainer: Source rows a second that the training loop takes at most.
        processes: Processes of all stages.
        process_bytes: Bytes that they may hold together.
        all_bytes: Bytes that they and items in flight may hold together.
        bytes_per_rate: Bytes of items in flight that it takes for each source row a second; 0 = memory is plentiful.
    """

    slots: int
    trainer: float = math.inf
    processes: int = 2**31
    process_bytes: float = math.inf
    all_bytes: float = math.inf
    bytes_per_rate: float = 0.0

    def rate_in_memory(self, held: float) -> float:
        """The most that memory allows while processes hold so much of it; infinite where it is plentiful."""
        if not self.bytes_per_rate or math.isinf(self.all_bytes):
            return math.inf
        return max(self.all_bytes - held, ITEMS_LEAST * self.all_bytes) / self.bytes_per_rate


@dataclass(frozen=True, slots=True)
class Best:
    """The most that a pipeline can deliver.

    Attributes:
        rate: Source rows a second.
        bound: What holds it there: "trainer", "lock", "slots", "processes", "memory", or the name of a stage.
    """

    rate: float
    bound: str


def predict(lines: Sequence[Line], concurrency: Mapping[str, int], limits: Limits) -> float:
    """Source rows a second under these concurrencies.

    A stage that is pushed beyond its peak, since items wait for it and slots are free, gets slower by it and stays
    there. So what a stage does with all that it may take counts where that is less.
    """
    reached = {line.name: line.rate(line.best_within(concurrency[line.name])) for line in lines}
    upper, _ = _upper(lines, limits, reached)
    rate = _largest(upper, lambda rate: _slots(lines, rate) <= limits.slots)
    collapsed = (_collapsed(line, lines, concurrency[line.name], rate, limits.slots) for line in lines)
    held = sum(concurrency[line.name] * line.process_bytes for line in lines if line.process)
    return min([rate, limits.rate_in_memory(held), *collapsed])


def best(lines: Sequence[Line], limits: Limits) -> Best:
    """The largest rate that some concurrencies reach."""
    reached = {line.name: line.rate(line.best_within(line.most)) for line in lines}
    upper, bound = _upper(lines, limits, reached)
    by_slots = _largest(upper, lambda rate: _slots(lines, rate) <= limits.slots)
    by_processes = _largest(by_slots, lambda rate: _processes_fit(lines, rate, limits))
    rate = _largest(by_processes, lambda rate: rate <= limits.rate_in_memory(_processes(lines, rate)[1]))
    if rate < by_processes:
        return Best(rate, "memory")
    if rate < by_slots:
        return Best(rate, "processes")
    return Best(rate, bound if by_slots >= upper else "slots")


def enough(line: Line, rate: float, margin: float) -> int:
    """The least concurrency for a rate with a margin for variability, as far as it isn't slower than without."""
    least = max(1, math.ceil(min(line.need(rate), line.best_within(line.most)) - 1e-6))
    wanted = min(line.most, math.ceil(least + margin * min(line.need(rate), least) - 1e-6))
    while wanted > least and line.rate(wanted) < rate:
        wanted -= 1
    return wanted


def _upper(lines: Sequence[Line], limits: Limits, reached: Mapping[str, float]) -> tuple[float, str]:
    """What bounds the rate apart from slots and processes, and which of them is the least."""
    lock = sum(line.lock_seconds for line in lines if not line.process)
    cpu = sum(line.cpu_seconds for line in lines)
    bounds = {
        **reached,
        "lock": 1 / lock if lock > 0 else math.inf,
        "slots": limits.slots / cpu if cpu > 0 else math.inf,
        "trainer": limits.trainer,
    }
    least = min(bounds, key=lambda name: bounds[name])
    return bounds[least], least


def _slots(lines: Sequence[Line], rate: float) -> float:
    return sum(line.need(rate) for line in lines if line.holds_slot)


def _processes_fit(lines: Sequence[Line], rate: float, limits: Limits) -> bool:
    """Whether the processes for a rate are allowed; one for each stage always is."""
    number, held = _processes(lines, rate)
    one_each = [line.process_bytes for line in lines if line.process]
    return number <= max(limits.processes, len(one_each)) and held <= max(limits.process_bytes, sum(one_each))


def _processes(lines: Sequence[Line], rate: float) -> tuple[float, float]:
    """Processes that a rate takes, and the bytes that they hold; infinite where no number of them reaches it."""
    number = held = 0.0
    for line in lines:
        if line.process:
            needed = line.need(rate)
            if math.isinf(needed):
                return math.inf, math.inf
            each = max(1, math.ceil(needed - 1e-6))
            number += each
            held += each * line.process_bytes
    return number, held


def _collapsed(line: Line, lines: Sequence[Line], concurrency: int, rate: float, slots: int) -> float:
    """The rate of a stage that takes what it may, the others what they need beside it; infinite if it isn't less."""
    peak = line.best_within(concurrency)
    if line.rate(concurrency) >= rate:
        return math.inf
    others = [other for other in lines if other.holds_slot and other is not line]
    more = float(concurrency - peak)
    if line.holds_slot:
        # The more it takes the slower it is, and the less the others need.
        more = _largest(more, lambda more: peak + more + _slots(others, line.rate(peak + more)) <= slots)
    slowed = line.rate(peak + more)
    return slowed if slowed < rate else math.inf


def _largest(upper: float, allowed: Callable[[float], bool]) -> float:
    """The largest value up to `upper` that is allowed; what is allowed must be so for all below."""
    if math.isinf(upper) or allowed(upper):
        return upper
    low, high = 0.0, upper
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
