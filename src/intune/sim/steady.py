"""The steady state of many environments at once: how fast, and how full, where stages share what there is.

The rate X in source rows a second is the largest that nothing forbids: places of stages, slots, CPUs, locks, disks,
bandwidths, order, memory, the trainer. Each gives a bound, and X is their smooth minimum: what is nearly as scarce as
the scarcest is in its way now and then. Bounds depend on how much is going on at once, as stages slow down with
concurrency and CPUs are shared, so both are found together, in a fixed number of rounds. They start with everything
full, and so end, where there are several answers, with the fullest: a stage that slows down with concurrency and has
once fallen behind gets more and more at once, and stays behind.

The constants were fitted to the discrete-event level, on scenarios of the families that are trained on.
"""

from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from intune.sim.tables import Ints, Tables, last_of
from intune.tuners.view import Bools, Floats

ROUNDS = 9
SHARPNESS = 20
"""Exponent of the smooth minimum."""
ORDER = 0.8
"""Share of the time for which order holds back what is counted: items that are late together overlap."""
QUEUE = 1.0
"""Waiting for something shared, as a multiple of what a queue with constant service would have twice."""
REST = 1.0
"""Share of the bytes of running tasks that guard and brake take to be there always."""
LARGEST = 2.5
"""Standard deviations of the logarithm that the largest of the items seen lately lies above their middle."""
TURNS_DOUBLINGS, POOL_DOUBLINGS, MEMORY_DOUBLINGS = 2, 3, 2
"""The same, as powers of 2, for what is used in turns, what is shared out, and memory, beside those who wait for it."""
TOGETHER = 6.0
"""Standard deviations above the mean number of items at once which a stage that bends must live through."""
TINY = 1e-12
LEAST = 1e-9
"""Rate of a stage none of whose processes is up."""


@dataclass(slots=True)
class Moment:
    """What is in force in each environment, and what has become of its costs.

    Attributes:
        cap: float[E, S]; the most items that each stage works on at once, not necessarily whole.
        waits: bool[E, S]; its items hold no slot.
        slots: float[E]; slots.
        cpus: float[E]; CPUs.
        neighbours: float[E]; threads of others that compute all the time.
        starting: float[E]; processes being started that compute, on average.
        cost: float[E, S]; factor on all seconds and bytes read of a stage.
        size: float[E, S]; factor on the bytes of what it makes.
        device: float[E]; device seconds of a step, pauses included.
        held: float[E]; bytes of the limit that are not for items: trainer, interpreter, processes.
        limit: float[E]; memory limit; inf = none.
    """

    cap: Floats
    waits: Bools
    slots: Floats
    cpus: Floats
    neighbours: Floats
    starting: Floats
    cost: Floats
    size: Floats
    device: Floats
    held: Floats
    limit: Floats


@dataclass(slots=True)
class Steady:
    """What comes of it.

    Attributes:
        rate: float[E]; source rows a second.
        trainer: float[E]; the rate that the trainer allows.
        wall: float[E, S]; wall seconds an item.
        cpu: float[E, S]; CPU seconds an item.
        queue: float[E, S]; seconds an item without a CPU.
        busy: float[E, S]; items being worked on.
        share: float[E]; CPU that something gets that computes.
        lock_demand: float[E]; threads that want the interpreter lock.
        places: float[E, S]; share in what holds the rate down of a stage's own places.
        slots: float[E]; the same of slots.
        memory: float[E]; the same of memory.
        consumer: float[E]; the same of the trainer.
        order: float[E, S]; share of the time in which order holds back the stages of the same segment.
        most_items: float[E]; bytes that items in flight may hold; inf = any.
        task_bytes: float[E]; bytes that running tasks hold beside their inputs.
        item_bytes: float[E]; bytes that items in flight hold.
    """

    rate: Floats
    trainer: Floats
    wall: Floats
    cpu: Floats
    queue: Floats
    busy: Floats
    share: Floats
    lock_demand: Floats
    places: Floats
    slots: Floats
    memory: Floats
    consumer: Floats
    order: Floats
    most_items: Floats
    task_bytes: Floats
    item_bytes: Floats


def solve(tables: Tables, moment: Moment) -> Steady:
    """The steady state of each environment."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _Solver(tables, moment).run()


def admitted(limit: Floats, rest: Floats) -> Floats:
    """Bytes that guard and brake let items in flight hold, where everything else holds `rest` of a limit."""
    guard = np.maximum(0.9 * limit - rest, np.minimum(limit / 8, limit - rest))
    brake = np.maximum(0.87 * limit - rest, 0.35 * (limit - rest))
    return np.where(np.isfinite(limit), np.maximum(0.0, np.minimum(guard, brake)), np.inf)


def widest(tables: Tables, cap: Floats, waits: Bools, slots: Floats) -> Floats:
    """Items that may be worked on at once: as many as there are slots, or as a stage that waits may."""
    waiting: Floats = np.where(waits & tables.present, cap, 0.0).max(1)
    return np.maximum(slots, waiting)


def _power(x: Floats) -> Floats:
    """To the power -SHARPNESS, much faster than in general."""
    y: Floats = 1 / np.maximum(x, LEAST)
    y *= y
    y *= y
    square = y * y
    return np.asarray(y * square * square)


def _root(x: Floats) -> Floats:
    """Back from that power."""
    root: Floats = x ** (-1 / SHARPNESS)
    return root


def _beside(bound: Floats, crowd: Floats, doublings: int) -> Floats:
    """To the power of `_power`, what something shared adds to a bound by those who hold places while they wait for it.

    Where both are near, less gets through than either allows: they are all there, but not always there. The smooth
    minimum of the two has an exponent of 2 to the power `doublings`.
    """
    ratio = np.minimum(bound / crowd, crowd / bound)
    for _ in range(doublings):
        ratio = ratio * ratio
    ratio += 1
    for _ in range(doublings):
        ratio = np.sqrt(ratio)
    return np.maximum(_power(np.minimum(bound, crowd) / ratio) - _power(crowd), 0.0)


def _sum(values: Floats) -> Floats:
    """Over stages; much faster than `sum` over so few."""
    total: Floats = values @ np.ones(values.shape[1])
    return total


def _normal(x: Floats) -> Floats:
    """Distribution function of the normal distribution, to three digits."""
    return 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def _excess(mean: Floats, sigma: Floats, bound: Floats) -> Floats:
    """Mean of what a log-normal variable is above a bound."""
    sigma = np.maximum(sigma, 1e-3)
    away = np.log(np.maximum(mean, TINY) / np.maximum(bound, TINY)) / sigma
    return np.maximum(0.0, mean * _normal(away + sigma / 2) - bound * _normal(away - sigma / 2))


def _queue(load: Floats, servers: Floats | float, used: Floats, room: Floats) -> Floats:
    """Waiting as a multiple of the time in use: as in an open queue while short, else as all places full make it."""
    load = np.minimum(load, 0.9999)
    many = 1.0 if isinstance(servers, float) else np.sqrt(2 * (servers + 1)) - 1
    waiting = QUEUE * load**many / (servers * (1 - load))
    full = room / np.maximum(used, TINY)
    return waiting * full / np.maximum(waiting + full, TINY)


class _Solver:
    """The rounds of `solve`: each method is one relation, the attributes are what is known so far.

    All rates are in source rows a second; `need` is seconds of places for each source row.
    """

    def __init__(self, tables: Tables, moment: Moment) -> None:
        t, m = tables, moment
        self.t, self.m, self.v = t, m, t.visits
        self.cap = np.where(t.present, m.cap, 0.0)
        self.some = np.maximum(self.cap, 1.0)
        self.holds = (t.present & ~m.waits).astype(float)
        self.inside = [(t.segment == number).astype(float) for number in range(int(t.segment.max()) + 1)]
        self._costs()
        self._bytes()
        self.ahead = widest(t, m.cap, m.waits, m.slots)
        self.ahead = self.ahead + np.maximum(4, np.floor(self.ahead / 2))
        self.starts = self._by_segment(np.where(t.opens, self.v, 0.0))
        # What is filled round by round.
        zeros = np.zeros_like(m.slots)
        self.busy = np.minimum(self.cap, m.slots[:, None])
        self.share, self.active = np.ones_like(zeros), np.ones_like(zeros)
        self.lock_demand, self.order, self.stall = zeros, zeros, np.zeros_like(self.cap)
        self.lost = np.zeros_like(self.cap)
        self.most_items = np.where(np.isfinite(m.limit), m.limit, 1e15)

    def run(self) -> Steady:
        """All rounds, and what stands at the end of them."""
        for number in range(ROUNDS):
            self._walls()
            self._memory()
            self._bounds()
            self._queues()
            if number > 2:
                self._order()
            self._populations()
            self._cpus()
        return self._result()

    # --- what stays as it is

    def _costs(self) -> None:
        t, m, v = self.t, self.m, self.v
        disk, network = t.disk * m.cost, t.network * m.cost
        self.serial, self.lock, self.compute = t.serial * m.cost, t.lock * m.cost, t.cpu * m.cost
        self.thread_lock = np.where(t.process, 0.0, self.lock)
        self.moved = t.moved * m.cost
        self.bent = np.nonzero((t.contention > 0) | (t.coherency > 0))
        contention, coherency = t.contention[self.bent], t.coherency[self.bent]
        peak = np.sqrt(np.maximum(0.0, 1 - contention) / np.maximum(coherency, TINY))
        self.peak = np.where(coherency > 0, np.maximum(1.0, peak), np.inf)
        self.disk, self.network = disk / t.disk_stream[:, None], network / t.network_stream[:, None]
        self.uses = (v * disk, v * network, v * self.moved)
        self.idle = t.wait * m.cost + t.latency + self.disk + self.network
        self.disk_bound = t.disk_rate / np.maximum(_sum(v * disk), TINY)
        self.network_bound = t.network_rate / np.maximum(_sum(v * network), TINY)
        # Shares of CPUs come near what fits round by round; whatever is left over, there are no more CPUs than that.
        self.cpu_bound = m.cpus / np.maximum(_sum(v * (self.serial + self.lock + self.compute)), TINY)

    def _bytes(self) -> None:
        t, m = self.t, self.m
        self.made = t.out_bytes * m.size
        self.came = t.in_bytes * _shifted(m.size)
        copies = np.where(t.opens, 0.0, np.where(t.process, 2.0, 1.0)) * self.came
        peak = copies + self.made
        spread = np.expm1(t.bytes_spread**2)
        variance = copies**2 * _shifted(spread) + self.made**2 * spread
        variation = np.sqrt(variance) / np.maximum(peak, TINY)
        self.largest, self.variation = np.zeros_like(peak), np.zeros_like(peak)
        for inside in self.inside:
            among = inside * peak
            self.largest += inside * among.max(1, keepdims=True)
            self.variation += inside * np.take_along_axis(variation, among.argmax(1)[:, None], 1)

    def _by_segment(self, values: Floats) -> Floats:
        """Sums over the stages of a segment, given to each of them."""
        total = np.zeros_like(values)
        for inside in self.inside:
            total += inside * _sum(values * inside)[:, None]
        return total

    # --- the relations

    def _slowdown(self, n: Floats, at: tuple[Ints, ...] | EllipsisType = ...) -> Floats:
        """Of an item among n on average, at some places of the tables: it meets more than the average."""
        some = self.some[at]
        more = np.clip(n + 1 - n / some, 1.0, some)
        return 1 + (more - 1) * (self.t.contention[at] + self.t.coherency[at] * more)

    def _walls(self) -> None:
        """Seconds an item, without waiting for what is shared but CPUs."""
        self.slow = self._slowdown(self.busy)
        self.computing = self.slow * (self.serial + self.lock + self.compute)
        self.bare = self.idle + self.computing / self.share[:, None]
        self.need = self.v * self.bare

    def _bounds(self) -> None:
        """The smooth minimum of what everything allows."""
        t, m, v, share = self.t, self.m, self.v, self.share
        at = self.bent
        best = np.clip(self.peak, self.busy[at], self.cap[at])
        seconds = self.bare.copy()
        seconds[at] = self.idle[at] + self.computing[at] * (self._slowdown(best, at) / self.slow[at]) / share[at[0]]
        # With as many places as slots, slots are what it lacks.
        counts = t.present & ((self.holds == 0) | (self.cap < m.slots[:, None]))
        filled = np.where(counts, np.maximum(LEAST, self.cap / np.maximum(v * seconds, TINY)), np.inf)
        held = m.slots / np.maximum(_sum(self.holds * self.need), TINY)
        places, slots = _power(filled), _power(held)
        self.serial_bound = share[:, None] / np.maximum(v * self.slow * self.serial, TINY)
        lock = _sum(v * self.slow * self.thread_lock) + t.trainer_lock / t.batch_rows
        self.lock_bound = share / np.maximum(lock, TINY)
        self.traffic_bound = t.traffic_rate / np.maximum(_sum(v * self.slow * self.moved), TINY)
        most = np.minimum(filled, held[:, None])
        serial = _beside(self.serial_bound, most, TURNS_DOUBLINGS)
        lock = _beside(self.lock_bound, self._crowd(v * self.thread_lock, most), TURNS_DOUBLINGS)
        shared = np.stack([self.disk_bound, self.network_bound, self.traffic_bound])
        shared = _beside(shared, np.stack([self._crowd(use, most) for use in self.uses]), POOL_DOUBLINGS)
        memory = _beside(self.memory_bound, held, MEMORY_DOUBLINGS)
        self.own_serial = serial
        loader = _sum(places + serial) + lock + shared.sum(0) + slots + memory
        self.step = m.device + (t.trainer_cpu + t.trainer_lock * (1 + self.lock_demand)) / self.active
        self.trainer = t.batch_rows / np.maximum(self.step, TINY)
        calm = 1 / (1 + self.order)
        consumer = _power(self.trainer / calm)
        self.rate = np.minimum(_root(loader + consumer) * calm, self.cpu_bound)
        self.parts = (places, slots, memory, consumer, loader + consumer)

    def _crowd(self, use: Floats, filled: Floats) -> Floats:
        """The rate at which those who use something shared have all places taken, or all slots, by what they use."""
        total = _sum(use)
        return np.where(total > 0, total / np.maximum(_sum(use / filled), TINY), np.inf)

    def _memory(self) -> None:
        """Items are admitted while what they may come to hold fits; one is in any case."""
        t, m = self.t, self.m
        self.task_bytes = _sum(self.busy * (t.scratch + self.made))
        if not np.isfinite(m.limit).any():
            self.memory_bound = np.full_like(m.slots, np.inf)
            return
        self.most_items = admitted(m.limit, m.held + REST * self.task_bytes)
        fit = np.maximum(1.0, self.most_items[:, None] / np.maximum(self.largest, TINY))
        largest = np.exp(LARGEST * np.sqrt(np.log1p(self.variation**2)))
        more = 1 + 3 * self.variation / np.sqrt(fit) + (largest - 1) / fit
        reserved = 1.05 * self.largest * np.minimum(more, largest)
        stay = np.where(t.opens, self.starts * self._by_segment(self.bare) * reserved, 0.0)
        a_row = _sum(stay + np.where(t.gathers, self.need * self.came, 0.0))
        through = np.maximum(_sum(self.need), TINY)
        waiting = 0.5 * _sum(np.where(t.gathers, self.came, 0.0))
        items = np.maximum(1.0, (self.most_items - waiting) / np.maximum(a_row / through, TINY) - 0.5)
        self.memory_bound = np.where(np.isfinite(m.limit), items / through, np.inf)

    def _queues(self) -> None:
        """What waits for something that all share, while it holds its place: as many as there are places left."""
        t, m, v, share = self.t, self.m, self.v, self.share[:, None]
        x = self.rate[:, None]
        busy = np.minimum(self.cap, x * self.need)
        self.free = np.maximum(0.0, m.slots - _sum(self.holds * busy))
        room = self.cap - busy
        room = np.where(self.holds > 0, np.minimum(room, self.free[:, None]), room)
        serial = self.slow * self.serial / share
        extra = serial * _queue(x / self.serial_bound, 1.0, x * v * serial, room)
        lock = self.slow * self.thread_lock / share
        waiting = self._pool(self.lock_bound, 1.0, lock, room)
        self.lock_demand = self.rate * _sum(v * (lock + waiting))
        moving = np.where(self.moved > 0, self.slow * self.compute / share, 0.0)
        movers = np.maximum(1.0, _sum(v * moving) * self.traffic_bound)
        self.stall = self._pool(self.traffic_bound, movers, moving, room)
        extra += waiting + self.stall
        extra += self._pool(self.disk_bound, t.disk_rate / t.disk_stream, self.disk, room)
        extra += self._pool(self.network_bound, t.network_rate / t.network_stream, self.network, room)
        self.wall = self.bare + extra

    def _pool(self, bound: Floats, servers: Floats | float, seconds: Floats, room: Floats) -> Floats:
        """Seconds that items wait for what several stages share, each in proportion to its own use."""
        if not seconds.any():
            return np.zeros_like(seconds)
        used = self.rate * _sum(self.v * seconds)
        room = np.where(seconds > 0, room, 0.0)
        holding = room * self.holds
        places = np.minimum(_sum(holding), self.free) + _sum(room - holding)
        return seconds * _queue(self.rate / bound, servers, used, places)[:, None]

    def _order(self) -> None:
        """An item that takes longer than those that may go past it need holds all others back."""
        t, wall = self.t, self.bare
        starts = np.maximum(self.rate, TINY)[:, None] * self.starts
        slack = self.ahead[:, None] / np.maximum(starts, TINY)
        stay = self._by_segment(wall)
        squares = (wall * t.spread) ** 2
        square = self._by_segment(squares)
        usual = stay + self._by_segment((t.rest_factor - 1) * wall)
        lost = np.where(t.opens, _excess(usual, np.sqrt(square) / np.maximum(usual, TINY), slack), 0.0)
        if t.tail.any():
            late = stay + (t.tail_factor - 1) * wall
            sigma = np.sqrt(square + (t.tail_factor**2 - 1) * squares) / np.maximum(late, TINY)
            lost = lost + t.tail * _excess(late, sigma, slack)
        self.lost = starts * lost
        # Not all at once: what is lost grows steeply with the rate.
        self.order = self.order + 0.4 * (ORDER * _sum(self.lost) - self.order)

    def _populations(self) -> None:
        """A stage that bends has as many at once as what comes needs, however little its own places then give."""
        places, slots, _, _, total = self.parts
        self.busy = np.minimum(self.cap, self.rate[:, None] * self.v * self.wall)
        e, at = self.bent[0], self.bent
        others = np.maximum(total[e] - places[at] - self.own_serial[at], 1e-250)
        calm = 1 / (1 + self.order[e])
        behind = np.minimum(self.cap[at], _root(others) * calm * self.v[at] * self.wall[at])
        keeping_up = self._keeping_up(np.maximum(others - slots[e], 1e-250), calm)
        self.busy[at] = np.where(np.isfinite(keeping_up), keeping_up, behind)

    def _keeping_up(self, others: Floats, calm: Floats) -> Floats:
        """Items at once of stages that bend while they keep up; not a number where one will fall behind.

        It falls behind for good once so many have come together that they come faster than they get through.
        """
        e, at = self.bent[0], self.bent
        v, cap, share, holds, idle = self.v[at], self.cap[at], self.share[e], self.holds[at], self.idle[at]
        alone = self.computing[at] / self.slow[at] / share
        held = _sum(self.holds * self.need)[e] - holds * self.need[at]
        n, coming = np.minimum(cap, 1.0), np.zeros_like(cap)
        for _ in range(3):
            need = v * (idle + alone * self._slowdown(n, at))
            coming = _root(others + _power(self.m.slots[e] / np.maximum(held + holds * need, TINY))) * calm
            n = np.minimum(cap, coming * need)
        many = np.minimum(cap, n + TOGETHER * np.sqrt(n) + 1)
        slow = self._slowdown(many, at)
        through = many / np.maximum(v * (idle + alone * slow), TINY)
        through = np.minimum(through, share / np.maximum(v * self.serial[at] * slow, TINY))
        return np.where(through > 1.05 * coming, n, np.nan)

    def _cpus(self) -> None:
        """CPUs are shared with the trainer while it computes, and with others all the time."""
        t, m = self.t, self.m
        runnable = self.rate * _sum(self.v * self.computing) / self.share
        others = np.minimum(runnable, _sum(self.busy)) + m.neighbours + m.starting
        calm = np.minimum(1.0, m.cpus / np.maximum(others, TINY))
        self.active = np.minimum(1.0, m.cpus / np.maximum(others + t.trainer_threads * (t.trainer_cpu > 0), TINY))
        training = np.minimum(1.0, self.rate / t.batch_rows * (self.step - m.device))
        share = (1 - training) * calm + training * self.active
        self.share = 0.5 * (self.share + share)

    # --- the end

    def _result(self) -> Steady:
        t, x, share = self.t, self.rate, self.share[:, None]
        places, slots, memory, consumer, total = self.parts
        busy = x[:, None] * self.v * self.wall
        ready = np.take_along_axis(self.made, last_of(t)[:, None], 1)[:, 0] * self.ahead * consumer / total
        items = _sum(busy * np.where(t.opens, 0.0, self.came)) + ready
        items += _sum(np.where(t.gathers, (0.5 + busy) * self.came, 0.0))
        return Steady(
            rate=x,
            trainer=self.trainer,
            wall=self.wall,
            cpu=self.computing + self.stall * share,
            queue=self.computing * (1 - share) / share + self.stall * (1 - share),
            busy=busy,
            share=self.share,
            lock_demand=self.lock_demand + x / t.batch_rows * t.trainer_lock * (1 + self.lock_demand) / self.active,
            places=places / total[:, None],
            slots=slots / total,
            memory=memory / total,
            consumer=consumer / total,
            order=self._by_segment(self.lost) / (1 + _sum(self.lost))[:, None],
            most_items=self.most_items,
            task_bytes=self.task_bytes,
            item_bytes=np.minimum(items, self.most_items),
        )


def _shifted(values: Floats) -> Floats:
    """What the stage before has; zeros for the first."""
    return np.concatenate([np.zeros_like(values[:, :1]), values[:, :-1]], axis=1)
