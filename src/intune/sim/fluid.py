"""The fluid level: many environments at once, an interval at a time, for training a tuner.

It takes the scenarios of the discrete-event level and says the same of them, but for noise and for what happens within
an interval: items are a flow. Each interval it solves for the steady state (`steady`), lets flows move towards it as
fast as items pass through, starts processes, more and more at once, and gives the window as it would have been measured
(`measured`). Guard and brake are always there, as in a loader: what is asked for is lowered to what they allow.

What waits between stages has no size of its own: after a change of allocation nothing is worked off that had piled up.
Memory that items hold while they wait before a bottleneck is not missed elsewhere. A trainer's pauses count on average.

As in the loader's engine, a source is never found to wait, whatever it does: the draw that finds its end takes no time,
which settles it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from intune.sim.measured import Flows, measure
from intune.sim.scenario import Change, Scenario
from intune.sim.steady import Moment, Steady, solve
from intune.sim.tables import Ints, Tables, last_of
from intune.tuners.view import Bools, Floats, View

PROCESS_SHARE = 0.9 - 1 / 8
"""Share of the memory limit that the guard lets processes and everything but items take."""
CROWDED_SHARE = 0.9 - 1 / 16
"""Share of it above which it takes one process away at each step."""
WAITING_SHARE = 0.7
"""Share of an item's time asleep from which a stage counts as one that waits."""
SAMPLED_EVERY = 17
"""One item in so many has its time in the run queue measured."""
WAVE = 0.2
"""Standard deviation of how far items are ahead of a steady flow, as a share of those worked on at once."""
PEAK = 2.0
"""Standard deviations of the bytes of items in flight that a peak within an interval lies above their mean."""
CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, np.inf)


class Granted(NamedTuple):
    """An allocation within budget and memory: `asked` [E, S], `slots` [E], and where something was lowered [E]."""

    asked: Floats
    slots: Floats
    lowered: Bools


@dataclass(slots=True)
class _State:
    """What changes while time passes; [E, S] by stage, [E] otherwise.

    Attributes:
        cost: Factor on what a stage's items cost.
        size: Factor on the bytes of what it makes.
        live: Processes that are up.
        left: Seconds until those being started are up; 0 = none is.
        coming: How many these are.
        waits: Whether it waits, which is known from the start: 1 or 0.
        flow: Source rows a second that pass it.
        phase: Share of its next item that has been done.
        ahead: Items by which it is ahead of a steady flow, as items come in waves.
        seen: Items since the last whose time in the run queue was measured, plus 1.
        now: Seconds since the begin.
        cpus: CPUs.
        neighbours: Threads of others.
        limit: Memory limit; inf = none.
        device: Factor on the trainer's device seconds.
        steps: Steps of the trainer.
        rows: Source rows delivered in this epoch.
        share: CPU that something got that computed in the last interval.
        high: Most bytes that items have held.
        news: Whether budget or epoch changed since the last interval.
    """

    cost: Floats
    size: Floats
    live: Floats
    left: Floats
    coming: Floats
    waits: Floats
    flow: Floats
    phase: Floats
    ahead: Floats
    seen: Floats
    now: Floats
    cpus: Floats
    neighbours: Floats
    limit: Floats
    device: Floats
    steps: Floats
    rows: Floats
    share: Floats
    high: Floats
    news: Bools


class Fluid:
    """E environments, each of them a scenario being run.

    Args:
        scenarios: One for each environment.
        seed: Of all noise; the same seed and the same calls give the same windows.
        stages: Columns for stages; None = as many as the largest scenario has. Later ones must fit in.

    Attributes:
        alive: bool[E]; False after more memory was needed than there is: nothing flows any more.
    """

    def __init__(self, scenarios: Sequence[Scenario], seed: int = 0, stages: int | None = None) -> None:
        columns = stages or max(len(scenario.stages) for scenario in scenarios)
        self._tables = Tables.empty(len(scenarios), columns)
        self._random = np.random.default_rng(seed)
        self._changes: list[list[Change]] = [[] for _ in scenarios]
        self._names: list[list[str]] = [[] for _ in scenarios]
        self._next_change = np.full(len(scenarios), np.inf)
        self._state = _empty_state(len(scenarios), columns)
        self.alive = np.ones(len(scenarios), dtype=np.bool_)
        self.reset(np.arange(len(scenarios)), scenarios)

    @property
    def shape(self) -> tuple[int, int]:
        """(E, S)."""
        workloads, stages = self._tables.present.shape
        return workloads, stages

    def reset(self, rows: Ints, scenarios: Sequence[Scenario]) -> None:
        """Let some environments begin anew.

        Args:
            rows: int64[n]; their numbers.
            scenarios: One for each of them.

        Raises:
            ValueError: If there are not as many of one as of the other, or one has more stages than there are columns.
        """
        if len(rows) != len(scenarios):
            raise ValueError(f"{len(rows)} environments to be reset, but {len(scenarios)} scenarios")
        t, s = self._tables, self._state
        for row, scenario in zip(rows.tolist(), scenarios, strict=True):
            t.put(row, scenario)
            self._changes[row] = sorted(scenario.changes, key=lambda change: change.seconds)
            self._names[row] = [stage.name for stage in scenario.stages]
            self._next_change[row] = min((change.seconds for change in scenario.changes), default=np.inf)
        for ones in (s.cost, s.size, s.device, s.share):
            ones[rows] = 1.0
        for zeros in (s.live, s.left, s.coming, s.flow, s.ahead, s.now, s.neighbours, s.steps, s.rows, s.high):
            zeros[rows] = 0.0
        s.waits[rows] = np.where(np.isnan(t.declared), _asleep(t) > WAITING_SHARE, t.declared)[rows]
        s.phase[rows] = self._random.random((len(rows), self.shape[1]))
        s.seen[rows] = self._random.integers(0, SAMPLED_EVERY, (len(rows), self.shape[1]))
        s.cpus[rows], s.limit[rows] = t.cpus[rows], t.limit[rows]
        s.news[rows] = True
        self.alive[rows] = True

    def step(self, asked: Floats, slots: Floats, seconds: Floats | float = 1.0) -> View:
        """Put allocations into force, let time pass, and say what was measured meanwhile.

        Args:
            asked: float[E, S]; concurrency by stage, at least 1; inf = open. Columns without a stage do not matter.
            slots: float[E]; CPU slots.
            seconds: float[E] or one for all; length of the interval.
        """
        passed = np.broadcast_to(np.asarray(seconds, dtype=np.float64), self.alive.shape)
        t, s = self._tables, self._state
        self._change(s.now + passed / 2)
        granted = self._grant(asked, slots)
        before, starting = self._start_processes(granted, passed)
        moment = self._moment(granted, (before + s.live) / 2, starting)
        steady = solve(t, moment)
        deviation = self._random.standard_normal((4, *self.shape))
        flows = self._flow(steady, passed, deviation[0], deviation[3])
        s.share = steady.share
        memory = self._memory(steady, deviation[2])
        window = measure(t, moment, steady, flows, self._caps(granted, s.live), deviation[1:3])
        window.asked = np.where(t.present, granted.asked, np.nan)
        window.ready = np.where(t.process, s.live, np.nan)
        window.starting = np.where(t.process, s.coming, np.nan)
        window.memory = np.where(t.sees_used[:, 1] & np.isfinite(s.limit), memory / s.limit, np.nan)
        window.threads, window.cpus = t.max_threads.copy(), np.maximum(1.0, np.floor(s.cpus))
        window.vetoed = granted.lowered.astype(float)
        window.changed = s.news.astype(float)
        s.news = s.rows >= t.epoch_rows
        s.rows[s.news] = 0.0
        return window

    def rate(self, asked: Floats, slots: Floats) -> Floats:
        """float[E]: steady source rows a second of an allocation by what holds now, with all its processes up."""
        granted = self._grant(asked, slots, settled=True)
        moment = self._moment(granted, _targets(self._tables, granted), np.zeros_like(granted.slots))
        return np.where(self.alive, solve(self._tables, moment).rate, 0.0)

    def best(self, rows: Ints | None = None, sweeps: int = 2) -> tuple[Floats, Floats, Floats]:
        """A good static allocation by what holds now: (asked [n, S], slots [n], rate [n]).

        Concurrencies are tried one stage after another, then slots, from all open; what gives the same rate leaves as
        it was. It is no exact optimum, but none of its single changes is better.

        Args:
            rows: int64[n]; environments; None = all.
            sweeps: How often all stages are gone through.
        """
        chosen = self if rows is None else self._part(rows)
        workloads, stages = chosen.shape
        asked, slots = np.full((workloads, stages), np.inf), np.maximum(1.0, np.floor(chosen._state.cpus))
        rate = chosen.rate(asked, slots)
        for _ in range(sweeps):
            for column in range(stages):
                for value in CANDIDATES:
                    tried = asked.copy()
                    tried[:, column] = value
                    asked, slots, rate = chosen._better((asked, slots, rate), (tried, slots))
            for part in (0.5, 0.75, 0.9, 1.0):
                fewer = np.maximum(1.0, np.round(part * np.floor(chosen._state.cpus)))
                asked, slots, rate = chosen._better((asked, slots, rate), (asked, fewer))
        return asked, slots, rate

    # --- allocations

    def _better(self, now: tuple[Floats, Floats, Floats], tried: tuple[Floats, Floats]) -> tuple[Floats, ...]:
        rate = self.rate(*tried)
        gains = rate > now[2] * (1 + 1e-6)
        asked = np.where(gains[:, None], tried[0], now[0])
        return asked, np.where(gains, tried[1], now[1]), np.where(gains, rate, now[2])

    def _part(self, rows: Ints) -> "Fluid":
        """The same environments by themselves, for `rate`."""
        part = object.__new__(Fluid)
        part._tables, part.alive = self._tables.take(rows), self.alive[rows]
        part._state = _State(*(getattr(self._state, each.name)[rows] for each in fields(_State)))
        return part

    def _grant(self, asked: Floats, slots: Floats, settled: bool = False) -> Granted:
        """What budget and guard allow; `settled` = as if nothing but this allocation had ever been."""
        t, s = self._tables, self._state
        waiting = t.present & (s.waits == 1)
        most = np.minimum(np.maximum(1.0, np.floor(s.cpus)), t.max_threads - waiting.sum(1))
        slots_now = np.clip(np.floor(slots), 1.0, most)
        wanted = np.maximum(1.0, np.floor(asked))
        now = np.where(np.isinf(wanted), wanted, np.minimum(wanted, np.minimum(t.most, t.max_threads[:, None])))
        if waiting.any():
            opened = (waiting & np.isinf(now)).sum(1)
            now = _levelled(now, waiting & np.isfinite(now), t.max_threads - slots_now - opened)
        if t.process.any():
            now = self._grant_processes(now, slots_now, settled)
        return Granted(now, slots_now, ((now != wanted) & t.present).any(1) | (slots_now < slots))

    def _grant_processes(self, asked: Floats, slots: Floats, settled: bool) -> Floats:
        t, s = self._tables, self._state
        target = _targets(t, Granted(asked, slots, self.alive))
        granted = _levelled(target, t.process, t.max_processes)
        live = np.where(t.process, 1.0, 0.0) if settled else s.live + s.coming
        known = t.process & (live > 0) & np.isfinite(s.limit)[:, None]
        rest = self._rest() + (live * t.resident).sum(1)
        room = np.where(np.isfinite(s.limit), PROCESS_SHARE * s.limit - rest, np.inf)
        for column in np.flatnonzero(known.any(0)):
            each, more = t.resident[:, column], np.maximum(0.0, granted[:, column] - live[:, column])
            fits = np.clip(np.floor(room / np.maximum(each, 1.0)), 0.0, more)
            fits = np.where(known[:, column], fits, more)
            room = room - fits * each * known[:, column]
            granted[:, column] -= more - fits
        if not settled:
            self._cut(granted, live, rest)
        return np.where(t.process & (granted < target), np.maximum(1.0, granted), asked)

    def _cut(self, granted: Floats, live: Floats, rest: Floats) -> None:
        """Take one process away where items have too little room, from the stage whose processes hold most."""
        t, limit = self._tables, self._state.limit
        holds = np.where(live > 1, live * t.resident, 0.0)
        rows = np.flatnonzero((rest > CROWDED_SHARE * limit) & (holds.max(1) > 0))
        columns = holds[rows].argmax(1)
        granted[rows, columns] = np.minimum(granted[rows, columns], live[rows, columns] - 1)

    def _rest(self) -> Floats:
        """Bytes that neither items nor processes hold."""
        t, s = self._tables, self._state
        return t.baseline + t.growth * np.minimum(1.0, s.steps / np.maximum(1.0, t.growth_steps))

    def _caps(self, granted: Granted, live: Floats) -> Floats:
        """What an allocation amounts to."""
        t = self._tables
        waits = t.present & (self._state.waits == 1)
        open_to = np.maximum(1.0, np.floor((t.max_threads - granted.slots) / np.maximum(1, waits.sum(1))))
        opened = np.where(waits, open_to[:, None], granted.slots[:, None])
        cap = np.minimum(np.where(np.isinf(granted.asked), opened, granted.asked), t.most)
        cap = np.where(waits, cap, np.minimum(cap, granted.slots[:, None]))
        return np.where(t.process, np.minimum(cap, live), np.where(t.present, cap, 0.0))

    def _moment(self, granted: Granted, live: Floats, starting: Floats) -> Moment:
        t, s = self._tables, self._state
        return Moment(
            cap=self._caps(granted, live),
            waits=t.present & (s.waits == 1),
            slots=granted.slots,
            cpus=s.cpus,
            neighbours=s.neighbours,
            starting=starting,
            cost=s.cost,
            size=s.size,
            device=t.device * s.device + t.pause,
            held=self._rest() + ((live + s.coming) * t.resident).sum(1),
            limit=s.limit,
        )

    # --- time

    def _change(self, until: Floats) -> None:
        s = self._state
        for row in np.flatnonzero(self._next_change <= until).tolist():
            budget = (np.floor(s.cpus[row]), s.limit[row])
            left = self._changes[row]
            while left and left[0].seconds <= until[row]:
                self._apply(row, left.pop(0))
            self._next_change[row] = left[0].seconds if left else np.inf
            s.news[row] |= budget != (np.floor(s.cpus[row]), s.limit[row])

    def _apply(self, row: int, change: Change) -> None:
        s = self._state
        if change.what in ("cost", "bytes"):
            column = self._names[row].index(change.stage or "")
            (s.cost if change.what == "cost" else s.size)[row, column] = change.value
        else:
            whole = {"cpus": s.cpus, "memory": s.limit, "trainer": s.device, "neighbours": s.neighbours}
            whole[change.what][row] = change.value

    def _start_processes(self, granted: Granted, seconds: Floats) -> tuple[Floats, Floats]:
        """Let processes start and end: (those up at the begin [E, S], those that compute while starting [E])."""
        t, s = self._tables, self._state
        if not t.process.any():
            return s.live.copy(), np.zeros_like(seconds)
        target = _targets(t, granted)
        s.live = np.minimum(s.live, target)
        s.coming = np.clip(s.coming, 0.0, target - s.live)
        before = s.live.copy()
        each = np.maximum(t.start_wait + t.start_cpu / np.maximum(s.share, 1e-3)[:, None], 1e-6)
        passes = np.repeat(seconds[:, None], target.shape[1], 1)
        started = np.zeros_like(each)
        while True:
            missing = target - s.live
            begin = (s.coming <= 0) & (missing > 0)
            # As many at once as are there, and have done an item: each round of starts doubles them.
            s.coming = np.where(begin, np.minimum(missing, np.maximum(1.0, s.live)), s.coming)
            s.left = np.where(begin, each, s.left)
            passing = np.where(s.coming > 0, np.minimum(s.left, passes), 0.0)
            started += passing * s.coming
            s.left, passes = s.left - passing, passes - passing
            up = (s.coming > 0) & (s.left <= 0)
            if not up.any():
                break
            s.live = s.live + np.where(up, s.coming, 0.0)
            s.coming = np.where(up, 0.0, s.coming)
        computing = started * t.start_cpu / (each * np.maximum(s.share, 1e-3)[:, None])
        return before, computing.sum(1) / seconds

    def _flow(self, steady: Steady, seconds: Floats, deviation: Floats, wave: Floats) -> Flows:
        """What passes each stage: flows follow the steady state as fast as items get through."""
        t, s = self._tables, self._state
        after = np.cumsum(steady.wall, 1)
        x = np.where(self.alive, steady.rate, 0.0)
        gathered = np.where(t.gathers, 0.5 * t.source_rows / np.maximum(x, 1e-9)[:, None], 0.0)
        lag = np.maximum(after + np.cumsum(np.minimum(gathered, 1e3), 1), 1e-6)
        away, ratio = s.flow - x[:, None], seconds[:, None] / lag
        fading = np.exp(-ratio)
        mean = x[:, None] + away * (1 - fading) / ratio
        s.flow = x[:, None] + away * fading
        expected = mean * t.visits * seconds[:, None]
        # Items cost more or less than usual: a window with dear ones has fewer.
        sigma = np.sqrt(np.log1p(t.variation**2 / np.maximum(1.0, expected)))
        dearer = np.exp(sigma * deviation - sigma**2 / 2)
        work = steady.busy / np.maximum(steady.busy.sum(1, keepdims=True), 1e-12)
        free = 1 - steady.consumer
        factor = 1 + free * (1 / np.maximum(1e-3, (work * dearer).sum(1) + (1 - work.sum(1))) - 1)
        # Those that began together end together: items come in waves, as large as what a stage works on at once.
        largest = np.maximum.accumulate(steady.busy / np.maximum(t.visits, 1e-12), 1) * t.visits
        lasting = np.exp(-seconds[:, None] / np.maximum(np.maximum.accumulate(steady.wall, 1), 1e-6))
        ahead = lasting * s.ahead + np.sqrt(1 - lasting**2) * WAVE * largest * wave
        s.phase = s.phase + expected * factor[:, None] + np.where(self.alive[:, None], ahead - s.ahead, 0.0)
        s.ahead = ahead
        items = np.where(self.alive[:, None], np.maximum(0.0, np.floor(s.phase + 1e-9)), 0.0)
        s.phase = s.phase - items
        whole = np.take_along_axis(items * t.source_rows, last_of(t)[:, None], 1)[:, 0]
        used = mean * factor[:, None]
        s.rows, s.steps = s.rows + whole, s.steps + whole / t.batch_rows
        s.seen = s.seen + items
        sampled = np.floor(s.seen / SAMPLED_EVERY)
        s.seen = s.seen - SAMPLED_EVERY * sampled
        s.now = s.now + seconds
        return Flows(seconds=seconds, rate=used, items=items, sampled=sampled, dearer=dearer, delivered=whole)

    def _memory(self, steady: Steady, deviation: Floats) -> Floats:
        """Bytes at the end of the interval; who needed more than there is in it is dead."""
        t, s = self._tables, self._state
        flowing = np.where(self.alive, steady.item_bytes + steady.task_bytes, 0.0)
        pieces = np.maximum(1.0, steady.busy.sum(1))
        spread = flowing * np.sqrt(np.expm1((t.bytes_spread**2).max(1)) / pieces)
        now = np.maximum(0.0, flowing + spread * 0.5 * deviation[:, 0])
        s.high = np.maximum(s.high, np.minimum(now, steady.most_items))
        processes = ((s.live + s.coming) * t.resident).sum(1)
        held: Floats = self._rest() + processes + now + t.kept * np.maximum(0.0, s.high - now)
        within = np.minimum(spread * PEAK, np.maximum(0.0, steady.most_items - now))
        self.alive &= ~(held + within > s.limit)
        return held


def _targets(tables: Tables, granted: Granted) -> Floats:
    """float[E, S]: processes that an allocation wants; 0 for threads."""
    wanted = np.where(np.isinf(granted.asked), granted.slots[:, None], granted.asked)
    return np.where(tables.process, np.minimum(wanted, tables.most), 0.0)


def _asleep(t: Tables) -> Floats:
    """float[E, S]; share of an item's time, on an idle machine, in which it waits for an answer."""
    asleep = t.wait + t.latency + t.disk / t.disk_stream[:, None] + t.network / t.network_stream[:, None]
    return np.asarray(asleep / np.maximum(asleep + t.serial + t.lock + t.cpu, 1e-12))


def _levelled(wanted: Floats, among: Bools, total: Floats) -> Floats:
    """What is wanted, with the largest among some lowered until those are together at most `total`; at least 1."""
    chosen = np.where(among, wanted, 0.0)
    over = chosen.sum(1) > total
    if not over.any():
        return wanted.copy()
    low, high = np.ones_like(total), np.maximum(1.0, chosen.max(1))
    for _ in range(8):
        middle = np.ceil((low + high) / 2)
        fits = np.minimum(chosen, middle[:, None]).sum(1) <= total
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        high = np.maximum(high, low)
    return np.where(among & over[:, None], np.minimum(wanted, low[:, None]), wanted)


def _empty_state(workloads: int, stages: int) -> _State:
    made: dict[str, Any] = {}
    for number, each in enumerate(fields(_State)):
        shape = (workloads, stages) if number < _BY_STAGE else (workloads,)
        made[each.name] = np.zeros(shape, dtype=np.bool_ if each.name == "news" else np.float64)
    return _State(**made)


_BY_STAGE = [each.name for each in fields(_State)].index("now")
