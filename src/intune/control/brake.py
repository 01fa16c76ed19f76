"""The brake: what items in flight may hold, by what is measured up to ten times a second.

The guard predicts once in an interval, from figures of the tuner's windows. Between two of them items may turn out
larger than any before, functions may allocate what nobody can see from outside, and others may take memory. The brake
looks more often and knows less: the memory that is used of the limit, and what the ledger has charged.

Let `rest` be the memory that is measured less what items in flight and worker processes hold. Its least value over the
last ten seconds, with what the processes of now hold, is what would remain without items (the trainer, the interpreter,
idle workers): processes that came up meanwhile did not show when it was least. Above that, memory is taken to grow in
proportion to what is charged, and the proportion is the largest of the last ten seconds: it covers what functions
allocate while they run, copies, and what allocators keep. So items may hold

    (0.87 limit - least rest) / proportion

and no more than 1.5 times what was charged at any time until half a second ago, and an eighth of the room: so that what
comes of more in flight shows before still more is.

Where a stage is kept to few items at once, what these take is little beside what is reserved for the many that wait:
the proportion says nothing of the moment at which that stage may do more. So the same is asked once more of the items
that are worked on alone. What is measured above what waiting items hold is set in proportion to what work on them
needs, and no further work begins beyond

    (0.87 limit - least rest - what waiting items hold) / proportion

or beyond 1.5 times what was needed until half a second ago, and an eighth of the room.

By as much as `rest` has risen within half a second the room is taken to be smaller: what takes memory beside the
loader, such as a trainer in its first steps, may go on to do so.

Past 0.9 of the limit, or where the next tenth of a second would bring it there, nothing goes on but what order waits
for, until memory has fallen below 0.85.

It looks ten times a second while memory is near the limit, is moving, or may soon hold items back; else after half of
the time in which memory would be full if it grew by a whole limit a second, and at least twice a second. Near the limit
it could not stop a growth as fast as that either.

Where more than 0.8 of the limit is used without items, these shares are laid into what is left above that, as they lie
between 0.8 and 1: a trainer that fills the memory leaves the loader little, but does not hold it for ever.

Several limits may hold at once: the user's for the process tree, those of control groups for all that is in them, the
machine's. What is used of one says nothing of another, so each has a brake of its own, and the least of what they allow
holds.

While nothing goes on, no worker process is started either: what it will hold does not show yet.

What order waits for is kept back only by limits that were lowered while the loader ran, see `lowered`.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from intune._clock import Clock
from intune._periodic import Periodic
from intune._shares import BRAKE_PLANS, CROWDED, HARD, RELAXED, RELEASE
from intune._values import Event, InFlight, MemoryUse, Snapshot
from intune._words import size
from intune.control.lowered import LoweredLimits, Stalling

_log = logging.getLogger(__name__)

SECONDS, SECONDS_MOST = 0.1, 0.5
"""Between two readings: while memory is near the limit, and where it is far from it."""

STEADY = 0.02
"""Memory that rose by less than this share of the limit in the last second is taken to be steady."""

REMEMBERED_SECONDS = 10.0
LAG_SECONDS = 1.0
RAMP_SECONDS = 0.5
RISE_SECONDS = 0.5
RAMP = 1.5
FIRST_SHARE = 1 / 8

RELEASE_SECONDS, RELEASE_SECONDS_MOST = 0.5, 30.0
WORTH_SHARE = 0.02
"""A release that gave back less of the limit than this was not worth it, and the next one waits twice as long."""

EPOCH_RELEASE_SECONDS = 10.0
"""Epochs that end sooner after the last release give nothing back: the next one would only fault it all in again."""

LEAST_CHANGE = 0.02
"""Changes of less than this share are not applied."""


class Reading(NamedTuple):
    """What is measured at one moment.

    Attributes:
        seconds: The time.
        limit_bytes: A memory limit.
        memory_bytes: What is used of it.
        flight: Bytes of items in flight, as the ledger knows them.
        process_bytes: What worker processes hold of it.
        process_growth: What they will hold beside that, once each has done an item.
    """

    seconds: float
    limit_bytes: int
    memory_bytes: int
    flight: InFlight
    process_bytes: int = 0
    process_growth: int = 0


@dataclass(frozen=True, slots=True)
class Braking:
    """What the brake says.

    Attributes:
        in_flight_bytes: The most bytes that items in flight may hold; 0 = nothing is admitted.
        working_bytes: The most that work on items may need when it begins on one more.
        release: Whether memory that allocators keep unused should be given back now.
        seconds: After how many seconds the next reading should be taken.
    """

    in_flight_bytes: int
    working_bytes: int
    release: bool
    seconds: float


class _Moment(NamedTuple):
    read: Reading
    charged: int
    """The most that was charged within the last second."""
    working: int
    """The most that work on items needed, within the last second."""

    @property
    def seconds(self) -> float:
        return self.read.seconds

    @property
    def rest(self) -> int:
        """Memory that neither items in flight nor worker processes explain."""
        return self.read.memory_bytes - self.read.flight.held_bytes - self.read.process_bytes

    @property
    def above_processes(self) -> int:
        """Memory beside that of worker processes, and of what they will hold.

        They may hold that already, as they are looked at less often.
        """
        return self.read.memory_bytes - self.read.process_bytes - self.read.process_growth


class Brake:
    """One limit. Pure: a reading in, a decision out. Remembers the last ten seconds."""

    def __init__(self) -> None:
        self._moments: deque[_Moment] = deque()
        self._holding = False
        self._released_at: float | None = None
        self._release_seconds = RELEASE_SECONDS
        self._before_release: int | None = None

    @property
    def holding(self) -> bool:
        """Whether nothing is admitted now."""
        return self._holding

    def rest_bytes(self, process_bytes: int | None = None) -> int | None:
        """Memory that items in flight do not explain; None = nothing measured.

        What neither they nor processes explain is the least of the last ten seconds.

        Args:
            process_bytes: What processes hold now; None = what they held at the last reading.
        """
        moments = list(self._moments)  # another thread may ask
        return _base(moments, process_bytes) if moments else None

    def forget(self) -> None:
        """Nothing is measured any more: what was is no basis for decisions."""
        self._moments.clear()
        self._holding = False

    def observe(self, now: Reading) -> Braking:
        """Decide by a reading and those before it."""
        # What was charged is freed later than it is discharged, by functions and by allocators.
        lately = [now.flight, *(m.read.flight for m in self._moments if now.seconds - m.seconds <= LAG_SECONDS)]
        charged = max(each.charged_bytes for each in lately)
        working = max(each.working_bytes for each in lately)
        self._moments.append(_Moment(now, charged, working))
        while now.seconds - self._moments[0].seconds > REMEMBERED_SECONDS:
            self._moments.popleft()
        base = _base(self._moments)
        rise = now.memory_bytes - self._moments[-2].read.memory_bytes if len(self._moments) > 1 else 0
        if now.memory_bytes + max(0, rise) > level(HARD, now.limit_bytes, base):
            self._holding = True
        elif now.memory_bytes < level(RELAXED, now.limit_bytes, base):
            self._holding = False
        release = self._wants_release(now)
        most, working = (0, 0) if self._holding else self._most(now, base)
        return Braking(most, working, release, self._next_seconds(now, most))

    def _most(self, now: Reading, base: int) -> tuple[int, int]:
        """Bytes that items may hold, and that work on them may need."""
        room = level(BRAKE_PLANS, now.limit_bytes, base) - base - now.process_growth - self._rising(now.seconds)
        if room <= 0:
            return 0, 0
        # Of little in flight nothing can be learnt: what is measured beside it is the noise of everything else.
        enough = FIRST_SHARE * room
        least = base - now.process_bytes
        above = [(m, m.above_processes - least) for m in self._moments]
        of_all = max(size / max(m.charged, enough) for m, size in above)
        of_work = max((size - m.read.flight.waiting_bytes) / max(m.working, enough) for m, size in above)
        seen = [m.read.flight for m in self._moments if now.seconds - m.seconds >= RAMP_SECONDS]
        charged = max((each.charged_bytes for each in seen), default=0)
        working = max((each.working_bytes for each in seen), default=0)
        left = max(0.0, room - now.flight.waiting_bytes)
        return (
            int(min(room / max(1.0, of_all), RAMP * charged + enough)),
            int(min(left / max(1.0, of_work), RAMP * working + enough)),
        )

    def _rising(self, seconds: float) -> int:
        """By how much what nothing explains has risen within half a second, as a trainer does, and may go on to."""
        rests = [(seconds - m.seconds, m.rest) for m in self._moments]
        before = [rest for age, rest in rests if RISE_SECONDS < age <= 2 * RISE_SECONDS]
        return max(0, min(rest for age, rest in rests if age <= RISE_SECONDS) - min(before)) if before else 0

    def _next_seconds(self, now: Reading, most: int) -> float:
        known = now.seconds - self._moments[0].seconds >= LAG_SECONDS
        least = min(m.read.memory_bytes for m in self._moments if now.seconds - m.seconds <= LAG_SECONDS + SECONDS_MOST)
        steady = known and now.memory_bytes - least <= STEADY * now.limit_bytes
        if not steady or 2 * now.flight.charged_bytes > most:
            return SECONDS
        return min(SECONDS_MOST, max(SECONDS, (1 - now.memory_bytes / now.limit_bytes) / 2))

    def _wants_release(self, now: Reading) -> bool:
        if self._before_release is not None:
            gained = self._before_release - now.memory_bytes
            worth = gained >= WORTH_SHARE * now.limit_bytes
            self._release_seconds = RELEASE_SECONDS if worth else min(RELEASE_SECONDS_MOST, 2 * self._release_seconds)
            self._before_release = None
        if now.memory_bytes <= RELEASE * now.limit_bytes:
            return False
        if self._released_at is not None and now.seconds - self._released_at < self._release_seconds:
            return False
        self._released_at, self._before_release = now.seconds, now.memory_bytes
        return True


def _base(moments: Sequence[_Moment], process_bytes: int | None = None) -> int:
    """What would remain without items, by what was seen up to the last moment; processes as then, if not said."""
    processes = moments[-1].read.process_bytes if process_bytes is None else process_bytes
    return max(0, min(moment.rest for moment in moments) + processes)


def level(share: float, limit: int, base: int) -> float:
    """Bytes at which a share of a limit lies, where `base` bytes are used without items."""
    crowded = base + (share - CROWDED) / (1 - CROWDED) * (limit - base)
    return max(share * limit, crowded) if base < limit else share * limit


def _nearly(size: int, applied: int) -> bool:
    return size == applied or (size > 0 and abs(size - applied) < LEAST_CHANGE * applied)


class Brakes:
    """A brake for each limit, and the least of what they allow."""

    def __init__(self) -> None:
        self._brakes: dict[str, Brake] = {}
        self._uses: dict[str, MemoryUse] = {}

    @property
    def holding(self) -> MemoryUse | None:
        """The limit for which nothing is admitted now, with what is used of it; None = there is none."""
        return next((self._uses[name] for name, brake in self._brakes.items() if brake.holding), None)

    def rest_bytes(self, limit_from: str | None, process_bytes: int | None = None) -> int | None:
        """Of what is used of this limit, what items in flight do not explain; None = not known.

        Args:
            limit_from: Where the limit was read.
            process_bytes: What worker processes hold now, as one may have started since the last reading; None = what
                they held at that.
        """
        if limit_from is None:
            return None
        brake, use = self._brakes.get(limit_from), self._uses.get(limit_from)  # the brake's thread may forget any time
        if brake is None or use is None:
            return None
        return brake.rest_bytes(process_bytes if use.with_processes else None)

    def told(self, snapshot: Snapshot, process_bytes: int) -> Snapshot:
        """A snapshot with the rest of each of its limits, where processes hold so much."""
        machine = snapshot.machine
        memory = tuple(
            replace(use, rest_bytes=self.rest_bytes(use.limit_from, process_bytes)) for use in machine.memory
        )
        rest = self.rest_bytes(machine.read_from.get("memory_limit_bytes"), process_bytes)
        return replace(snapshot, machine=replace(machine, memory=memory), rest_bytes=rest)

    def forget(self) -> None:
        """Nothing is measured any more."""
        self._brakes, self._uses = {}, {}

    def observe(self, seconds: float, uses: Sequence[MemoryUse], work: "Brakable") -> Braking:
        """Decide by what is used of each limit, of which there is one at least, and what is known of that."""
        flight = work.in_flight()
        processes, growth = work.process_bytes()
        self._uses = {use.limit_from: use for use in uses}
        self._brakes = {name: self._brakes.get(name) or Brake() for name in self._uses}  # some may be no more
        said = []
        for name, use in self._uses.items():
            assert use.used_bytes is not None
            own = (processes, growth) if use.with_processes else ()
            reading = Reading(seconds, use.limit_bytes, use.used_bytes, flight, *own)
            said.append(self._brakes[name].observe(reading))
        return Braking(
            min(each.in_flight_bytes for each in said),
            min(each.working_bytes for each in said),
            any(each.release for each in said),
            min(each.seconds for each in said),
        )


class Brakable(Protocol):
    """A workload that the brake can hold back."""

    epochs_ended: int
    """Epochs that were delivered to their end: allocators may give back what they kept for them."""

    def in_flight(self) -> InFlight:
        """Bytes of items in flight."""
        ...

    def process_bytes(self) -> tuple[int, int]:
        """Bytes that worker processes were last seen to hold, and how many more once each has done an item."""
        ...

    def hold_back(self, in_flight_bytes: int | None, working_bytes: int | None) -> None:
        """Let items in flight hold no more than this, whatever the allocation says; None = no such limit.

        `working_bytes` is the most that work on items may need when it begins on one more. With 0 no worker process is
        started either, but for a stage that has none.
        """
        ...


class BrakeThread:
    """Runs the brake, as often as it asks for.

    Args:
        workload: What is held back.
        read: Each limit with what is used of it; none = not known.
        tell: Called with what a person should know: that it holds back, and that it does so no more.
        release: Gives unused memory of allocators back to the system.
        clock: Time between readings.
        stalling: The same workload, for limits that are lowered while it runs.

    Attributes:
        brakes: What decides.
        seconds: When the next step is due, from the last one on.
    """

    def __init__(
        self,
        workload: Brakable,
        read: Callable[[], Sequence[MemoryUse]],
        tell: Callable[[Event], None],
        release: Callable[[], None],
        clock: Clock,
        stalling: Stalling,
    ) -> None:
        self._workload, self._read, self._tell, self._clock = workload, read, tell, clock
        self._release = release
        self.brakes, self._lowered = Brakes(), LoweredLimits(stalling)
        self._applied: tuple[int, int] | None = None
        self.seconds = SECONDS
        self._held: tuple[float, str] | None = None
        self._over: set[str] = set()
        self._epochs_ended = workload.epochs_ended
        self._released_at = clock.wall()
        self._thread = Periodic("intune-control-brake", self._steps, clock)

    def step(self) -> None:
        """One reading and what follows from it, in the calling thread."""
        now = self._clock.wall()
        if self._epochs_ended != self._workload.epochs_ended and now - self._released_at >= EPOCH_RELEASE_SECONDS:
            self._epochs_ended = self._workload.epochs_ended
            self._give_back(now)
        held = self._workload.in_flight().held_bytes  # before memory is read: what they take meanwhile is not room
        uses = self._read()
        if not uses:
            self._forget()
            self.seconds = SECONDS
            return
        before = self.brakes.holding
        braking = self.brakes.observe(now, uses, self._workload)
        self.seconds = braking.seconds
        self._apply((braking.in_flight_bytes, braking.working_bytes))
        if self._lowered.observe(now, uses, held) or braking.release:
            self._give_back(now)
        if (self.brakes.holding is None) != (before is None):
            self._say(now, uses)
        for use in uses:
            self._watch_limit(use, held)

    def start(self) -> None:
        """A first step now, before any item begins; then go on in a thread until `stop`.

        Nothing happens if it runs already.
        """
        if not self._thread.started and self._try_step():
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._thread.stop()

    def _steps(self) -> Generator[float, None, None]:
        yield self.seconds
        while self._try_step():
            yield self.seconds

    def _try_step(self) -> bool:
        try:
            self.step()
        except Exception:
            _log.exception("The memory brake failed; training goes on by the guard's limits alone")
            self._forget()
            return False
        return True

    def _forget(self) -> None:
        self.brakes.forget()
        self._lowered.forget()
        self._apply(None)

    def _apply(self, most: tuple[int, int] | None) -> None:
        if most == self._applied or (most and self._applied and all(map(_nearly, most, self._applied))):
            return
        self._applied = most
        self._workload.hold_back(*(most or (None, None)))

    def _give_back(self, now: float) -> None:
        self._released_at = now
        self._release()

    def _watch_limit(self, use: MemoryUse, held: int) -> None:
        """Tell once that a limit was passed, which what order waits for may do, until use has fallen well below it."""
        assert use.used_bytes is not None
        if use.used_bytes < RELAXED * use.limit_bytes:
            self._over.discard(use.limit_from)
        if use.used_bytes <= use.limit_bytes or use.limit_from in self._over:
            return
        self._over.add(use.limit_from)
        told = (
            f"{size(use.used_bytes)} are used of a limit of {size(use.limit_bytes)} ({use.limit_from}), {size(held)} "
            "of that by items in flight. What order waits for goes on all the same, as else nothing would: "
            "give more memory, or make shuffle windows, batches or what is read at once (block_rows=) smaller"
        )
        _log.warning("A memory limit is passed: %s", told)
        self._tell(Event("over_limit", None, told))

    def _say(self, now: float, uses: Sequence[MemoryUse]) -> None:
        holding, held = self.brakes.holding, self._workload.in_flight().held_bytes
        if holding is not None:
            self._held = (now, holding.limit_from)
        elif self._held is None:
            return
        since, name = self._held
        use = next((use for use in uses if use.limit_from == name), uses[0])  # perhaps it is no limit any more
        used = f"{size(use.used_bytes)} of {size(use.limit_bytes)} are used, {size(held)} of that by items in flight"
        went_on = f"all go on again after {now - since:.1f} s: "
        self._tell(
            Event("braked", None, f"{went_on if holding is None else 'only what order waits for goes on: '}{used}")
        )
