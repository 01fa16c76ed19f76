"""Windows of the fluid level as they would have been measured: from what flows, with the noise of what was counted.

Means over few items scatter as those items' costs do, and what none passed was not measured. What waits for whom
follows from what holds the rate down: behind it stages want input, before it order or room. All items of a window count
as worked on beside as many as there were on average.
"""

from dataclasses import dataclass

import numpy as np

from intune._values import CROWDS
from intune.sim.resources import LOCK_TURN_SECONDS
from intune.sim.steady import Moment, Steady, widest
from intune.sim.tables import Tables, last_of
from intune.tuners.view import Bools, Floats, View

FULL = 0.85
"""Exponent of the number of places in how seldom all of them are taken."""
SLOT_INSIDE, SLOT_GATHER = 0.06, 0.12
"""Shares of the time in which a stage with input waits for a slot while the source has none: deeper ones go first."""
INPUT, ORDER, ROOM, MEMORY, SLOT = range(5)


@dataclass(slots=True)
class Flows:
    """What passed in an interval.

    Attributes:
        seconds: float[E]; its length.
        rate: float[E, S]; source rows a second.
        items: float[E, S]; whole items that were finished.
        sampled: float[E, S]; those of them whose time in the run queue was measured.
        dearer: float[E, S]; their mean cost over the usual.
        delivered: float[E]; source rows in the items that the last stage finished.
    """

    seconds: Floats
    rate: Floats
    items: Floats
    sampled: Floats
    dearer: Floats
    delivered: Floats


def measure(tables: Tables, moment: Moment, steady: Steady, flows: Flows, cap: Floats, deviation: Floats) -> View:
    """The window.

    Args:
        tables: The environments.
        moment: What was in force in the interval, on average.
        steady: Where flows were going.
        flows: What passed.
        cap: float[E, S]; the most items that each stage may work on at the end.
        deviation: float[2, E, S]; from a normal distribution.

    Returns:
        All but what only the state knows: `asked`, `ready`, `starting`, `memory`, `threads`, `cpus`, `vetoed` and
        `changed`.
    """
    t, seconds = tables, flows.seconds
    some = t.present & (flows.items > 0)
    unknown = np.full_like(seconds, np.nan)
    by_stage = np.full(t.present.shape, np.nan)
    wall = np.where(some, steady.wall * flows.dearer, np.nan)
    busy = np.where(some, flows.items * steady.wall * flows.dearer / seconds[:, None], 0.0)
    crowd_items, crowd_wall = _crowds(t, flows, np.nan_to_num(busy), np.nan_to_num(wall), cap)
    cpu_used = (flows.rate * t.visits * steady.cpu * flows.dearer).sum(1)
    steps = np.take_along_axis(flows.rate, last_of(t)[:, None], 1)[:, 0] / t.batch_rows
    training = steps * (t.trainer_cpu * t.trainer_threads + t.trainer_lock)
    busy_trainer = np.minimum(1.0, steps * t.batch_rows / steady.trainer)
    wait = _waits(t, moment, steady, flows, deviation[1])
    at_once = np.maximum(2.0, widest(t, moment.cap, moment.waits, moment.slots))
    run_queue, lock_wait, read, everybody = t.measured.T
    return View(
        present=t.present.copy(),
        process=t.process.copy(),
        waits=moment.waits.copy(),
        gathers=t.gathers.copy(),
        most=np.where(t.present, t.most, np.nan),
        asked=by_stage,
        cap=np.where(t.present, cap, np.nan),
        busy=np.where(t.present, busy, np.nan),
        items=np.where(t.present, flows.items, np.nan),
        visits=np.where(some, t.visits, np.nan),
        wall=wall,
        crowd_items=crowd_items,
        crowd_wall=crowd_wall,
        cpu=np.where(some, steady.cpu * flows.dearer, np.nan),
        queue=_run_queue(t, steady, flows, run_queue, deviation[0]),
        wait=wait,
        ready=by_stage.copy(),
        starting=by_stage.copy(),
        resident=np.where(t.process & np.isfinite(moment.limit)[:, None], t.resident / moment.limit[:, None], np.nan),
        seconds=seconds.copy(),
        rate=np.where((flows.delivered == 0) & (steady.consumer > 0.5), np.nan, flows.delivered / seconds),
        starved=1 - busy_trainer,
        ready_batches=np.round(at_once * steady.consumer),
        cpus=unknown,
        slots=moment.slots.copy(),
        threads=unknown.copy(),
        used=np.where(t.sees_used[:, 0], cpu_used + training + moment.starting * steady.share, np.nan),
        others=np.where(t.sees_used[:, 0] & everybody, moment.neighbours * steady.share, np.nan),
        lock_wait=np.where(lock_wait, LOCK_TURN_SECONDS * steady.lock_demand, np.nan),
        read_rate=np.where(read, (flows.rate * t.visits * t.disk).sum(1), np.nan),
        memory=unknown.copy(),
        held_back=wait[:, 0, MEMORY] * (1 - wait[:, 0, SLOT]),
        vetoed=unknown.copy(),
        changed=unknown.copy(),
    )


def _crowds(t: Tables, flows: Flows, busy: Floats, wall: Floats, cap: Floats) -> tuple[Floats, Floats]:
    """float[E, S, K]: items by how many were at work beside them, and their wall seconds.

    A quarter of the items each has clearly fewer and more beside it than the mean; no more than the stage may have.
    They differ in what computing costs there.
    """
    items, seconds = np.zeros((*busy.shape, len(CROWDS))), np.zeros((*busy.shape, len(CROWDS)))
    most, mean = np.maximum(np.nan_to_num(cap), 1.0), np.maximum(busy, 1.0)
    usual = _slowdown(t, mean)
    for share, times in ((0.25, 0.6), (0.5, 1.0), (0.25, 1.4)):
        crowd = np.clip(mean * times, 1.0, most)
        place = np.searchsorted(CROWDS, crowd, side="right") - 1
        here = np.where(t.present, share * flows.items, 0.0)
        took = wall * _slowdown(t, crowd) / usual
        at = (*np.indices(busy.shape), place)
        items[at] += here
        seconds[at] += here * took
    whole = np.where(items >= 0.5, np.round(items), 0.0)
    return whole, np.where(whole > 0, seconds / np.maximum(items, 1e-9), 0.0)


def _slowdown(t: Tables, at_once: Floats) -> Floats:
    """How much longer computing takes with so many items of a stage at once."""
    more = at_once - 1
    return 1 + t.contention * more + t.coherency * at_once * more


def _run_queue(t: Tables, steady: Steady, flows: Flows, measured: Bools, deviation: Floats) -> Floats:
    """Of one task in seventeen; half of a source's find only the end of a unit."""
    few = np.maximum(1.0, flows.sampled)
    queue = steady.queue * flows.dearer * np.exp(0.3 * deviation / np.sqrt(few) - 0.045 / few)
    seen = t.present & ~t.process & (flows.sampled > 0) & measured[:, None]
    return np.where(seen, queue, np.nan)


def _waits(t: Tables, moment: Moment, steady: Steady, flows: Flows, deviation: Floats) -> Floats:
    """float[E, S, 5]: shares of the window by cause."""
    cap = np.maximum(moment.cap, 1e-9)
    below = 1 - np.clip(steady.busy / cap, 0.0, 1.0) ** (np.maximum(cap, 1.0) ** FULL)
    shares = np.zeros((*t.present.shape, 5))
    before, same, behind = _around(t, steady.places)
    order = np.minimum(1.0, same + steady.order)
    slots, memory, consumer = steady.slots[:, None], steady.memory[:, None], steady.consumer[:, None]
    # A consumer that takes less than there could be leaves either no room or, until there is none, no slot.
    filling = consumer * np.minimum(1.0, slots / np.maximum(1 - consumer, 1e-12))
    taken = np.where(moment.waits, 0.0, steady.busy).sum(1, keepdims=True) / moment.slots[:, None]
    filling *= np.minimum(1.0, taken)
    slots, consumer = slots + filling, consumer - filling
    # What begins an item asks for all gates; a stage inside a segment only for input, memory and a slot.
    opening = np.stack([0 * order, order, behind + consumer, memory + 0 * order, slots + 0 * order], axis=2)
    gathering = opening.copy()
    gathering[:, :, INPUT] = before + memory + (1 - SLOT_GATHER) * slots
    gathering[:, :, MEMORY] = 0.0
    gathering[:, :, SLOT] = SLOT_GATHER * slots
    inside = np.zeros_like(shares)
    inside[:, :, INPUT] = 1 - SLOT_INSIDE * slots
    inside[:, :, SLOT] = SLOT_INSIDE * slots
    chosen = np.where(t.gathers[:, :, None], gathering, np.where(t.opens[:, :, None], opening, inside))
    # What waits needs no slot: it is held back by order, or by want of input, while others use the slots.
    chosen[:, :, ORDER] += np.where(moment.waits & t.opens & ~t.gathers, chosen[:, :, SLOT], 0.0)
    chosen[:, :, INPUT] += np.where(moment.waits & ~(t.opens & ~t.gathers), chosen[:, :, SLOT], 0.0)
    chosen[:, :, SLOT] = np.where(moment.waits, 0.0, chosen[:, :, SLOT])
    total = chosen.sum(2, keepdims=True)
    shares = below[:, :, None] * chosen / np.maximum(total, 1e-9)
    scatter = 0.5 * np.sqrt(np.clip(below * (1 - below), 0.0, 1.0) / np.maximum(1.0, flows.items)) * deviation
    scaled = np.clip(below + scatter, 0.0, 1.0) / np.maximum(below, 1e-9)
    return np.where(t.present[:, :, None], shares * np.minimum(scaled, 1 / np.maximum(below, 1e-9))[:, :, None], 0.0)


def _around(t: Tables, places: Floats) -> tuple[Floats, Floats, Floats]:
    """Of each stage the shares of places before its segment, of others in it, and behind it."""
    before, same, behind = np.zeros_like(places), np.zeros_like(places), np.zeros_like(places)
    for number in range(int(t.segment.max()) + 1):
        inside = t.segment == number
        here = (places * inside).sum(1, keepdims=True)
        before += here * (t.segment > number)
        same += np.where(inside, here - places, 0.0)
        behind += here * (t.present & (t.segment < number))
    return before, same, behind
