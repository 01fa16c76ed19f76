"""What would help a run, by how much at most, and what only the next run can change.

It says no more than the figures carry. "Up to 2.1 times as fast" is a bound: what the training loop, the slots and the
limits of other stages would still allow. That items took longer with many at once does not show that they hinder each
other, as dear items make crowds by themselves; that they took no longer does show that they do not.
"""

from collections.abc import Callable, Mapping

from intune._values import Snapshot, StageSnapshot
from intune._words import count
from intune.control.bounds import bound_without, crowding, most_at_once, slots_bound, trainer_bound
from intune.control.lock import HELD_SECONDS, IN_USE_SECONDS, MOVABLE
from intune.control.turns import may_take_turns

WORTH = 1.05
"""Less is not worth doing anything for."""

FLAT = 1.25
"""How many times as long items may take with many at once and still count as taking no longer."""

LONGER = 1.5
"""How many times as long items must take with many at once for a limit on them to be worth naming."""

TELLING = 10.0
"""A bound beyond this says nothing."""

OTHERS_SHARE = 0.2
"""Share of the CPUs' time from which other programs are named."""

UNKNOWN = "cannot be told"

NOT_TURNS = "not where its items take turns (a lock, a disk)"

THROTTLED_SHARE = 0.05
"""Share of the CPUs' time that a quota takes from which a higher one is worth naming."""


def advice(snapshot: Snapshot, kind: str, name: str | None) -> str | None:
    """What would help where a run is limited so, as a sentence; None where nothing can be said.

    Args:
        snapshot: The window.
        kind: What limits the run, one of `explain.Kind`.
        name: The stage that is named for it, if any.
    """
    stage = next((stage for stage in snapshot.stages if stage.name == name), None)
    found = _BY_KIND[kind](snapshot, stage) if kind in _BY_KIND else None
    if found is None:
        return None
    return f"What would help {found}." if found.startswith(UNKNOWN) else f"What would help: {found}."


def _trainer(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    if snapshot.window_seconds <= 0:
        return "a faster step"
    busy = snapshot.allocation.slots / slots_bound(snapshot)
    free = snapshot.allocation.slots - busy
    if free < 0.5:
        return (
            f"a faster step, and a faster loader too: {busy:.1f} of {count(snapshot.allocation.slots, 'slot')} are busy"
        )
    return f"a faster step; the loader is busy on {busy:.1f} of {count(snapshot.allocation.slots, 'slot')} only"


def _cpu(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    machine, slots = snapshot.machine, snapshot.allocation.slots
    said = []
    cpus = machine.cpus * snapshot.window_seconds
    if (machine.throttled_seconds or 0.0) >= THROTTLED_SHARE * cpus:
        said.append("a higher CPU quota")
    if stage is None or _others(snapshot) >= OTHERS_SHARE * cpus:
        said.append("CPUs that other programs leave alone")
    if stage is None:
        return " or ".join(said)
    busy = sum(each.busy_seconds for each in snapshot.stages if not each.info.waits)
    most = trainer_bound(snapshot)
    if busy > 0:
        half = 1 / (1 - stage.busy_seconds / busy / 2)
        said.append(f"stage {stage.name} at half its cost{_times(min(half, most))}")
    more = f"the {machine.cpus} CPUs that there are" if slots < machine.cpus else "twice the CPUs"
    factor = machine.cpus / slots if slots < machine.cpus else 2.0
    said.append(f"{more}{_times(min(factor, most), ', if its stages scale')}")
    return ", or ".join(said) + _hindered(stage)


def _hindered(stage: StageSnapshot) -> str:
    """That a limit might help a stage, where its items took much longer with many at once."""
    found = crowding(stage)
    if found is None or found.ratio < LONGER:
        return ""
    longer = f"with more than {found.few} at once its items took {found.ratio:.1f} times as long as with fewer"
    return f'; {longer}: if not because dear ones came together, a limit on it helps (tuner="model" finds one)'


def _concurrency(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    if stage is None:
        return None
    most, own = most_at_once(stage), stage.info.max_concurrency
    times = bound_without(snapshot, stage)
    if stage.info.kind == "source" and own == 1:
        how = "less work in the source, which gives one item after another: a map behind it does several at once"
    elif own is not None and most == own:
        how = f"a larger max_concurrency of stage {stage.name} in the next run, if what it does allows that"
    elif (withheld := _withheld(snapshot, stage)) is not None:
        return f"a higher memory limit{_times(times)}; as it is, stage {stage.name} has {withheld}"
    elif stage.concurrency is not None and most == stage.concurrency:
        why = snapshot.allocation.reasons.get(stage.name)
        return f"less work in stage {stage.name}; it was given {most}{f' ({why})' if why else ''}"
    else:
        how = f"more processes for stage {stage.name}: it may have more than the {most} that are up"
    if times < WORTH:
        little = "more at once would gain little, as slots or the training loop are full too"
        return f"less work in stage {stage.name}; {little}"
    holds = ", unless they only wait for the interpreter lock" if _python(snapshot, stage) else ""
    if may_take_turns(snapshot, stage):
        holds = f", {NOT_TURNS}"
    return f"{how}{_times(times, holds)}"


def _withheld(snapshot: Snapshot, stage: StageSnapshot) -> str | None:
    """How many processes of how many memory left it in the last decision, and why; None where it left it all."""
    vetoes = (event.detail for event in snapshot.events if (event.kind, event.stage) == ("vetoed", stage.name))
    return next(vetoes, None)


def _waits(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    """For a stage that waits: more at once, or to hold no slot meanwhile; each only where it is known to help."""
    if stage is None:
        return None
    why = snapshot.allocation.reasons.get(stage.name)
    if stage.info.waits and why and stage.concurrency is not None and most_at_once(stage) == stage.concurrency:
        return f"less waiting in stage {stage.name}; it was given {stage.concurrency} ({why})"
    found = crowding(stage)
    times = _times(bound_without(snapshot, stage) if stage.info.waits else trainer_bound(snapshot))
    if stage.info.waits and most_at_once(stage) == stage.info.max_concurrency is not None:
        how = f"a larger max_concurrency of stage {stage.name} in the next run"
    elif stage.info.waits:
        how = f"more at once in stage {stage.name}"
    elif stage.info.kind in MOVABLE and stage.info.executor == "thread":
        how = f"waits=True on stage {stage.name} in the next run, so that it waits without a slot"
    else:
        how = f"more slots than CPUs (cpus=) in the next run, so that stage {stage.name} waits for more at once"
    if (snapshot.machine.lock_wait_seconds or 0.0) >= IN_USE_SECONDS and not stage.info.waits:
        return (
            f"cannot be told, as stage {stage.name} may wait for the interpreter lock, which Python code holds at times"
        )
    if found is None:
        where = f"where what it waits for serves more at once (a network), {NOT_TURNS}"
        return f"perhaps {how}: that helps {where}"
    levels = f"with more than {found.few} at once its items took"
    if found.ratio <= FLAT:
        return f"{how}{times}: {levels} no longer than with fewer"
    either = "either dear items came together, or they take turns (a lock, a disk), and then more at once gain nothing"
    return f"{UNKNOWN}: {levels} {found.ratio:.1f} times as long as with fewer; {either}"


def _disk(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    found = None if stage is None else crowding(stage)
    less = "faster storage, or less to read (fewer columns, better compressed files)"
    times = _times(bound_without(snapshot, stage))
    if stage is None or found is None:
        return f"{less}{times}"
    levels = f"with more than {found.few} at once its items took"
    if found.ratio <= FLAT:
        return f"more at once in stage {stage.name}{times}: {levels} no longer than with fewer"
    longer = f"{levels} {found.ratio:.1f} times as long as with fewer, so that more at once may gain nothing"
    return f"{less}{times}; {longer}"


def _memory(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    kinds = [each.info.kind for each in snapshot.stages if each.info.kind in ("shuffle", "batch")]
    smaller = f"a smaller {' or '.join(dict.fromkeys(kinds))}, or " if kinds else ""
    return f"{smaller}a higher memory limit"


def _order(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    times = min(trainer_bound(snapshot), slots_bound(snapshot))
    rest = "ordered=False where order does not matter, a larger max_ahead, or items of more even cost, in the next run"
    if stage is not None and may_take_turns(snapshot, stage):
        return f"perhaps {rest}: that helps where items of stage {stage.name} are slow by themselves, {NOT_TURNS}"
    return rest if times < WORTH else f"{rest}{_times(times)}"


def _turns(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    if stage is None:
        return None
    return (
        f"less time in what the items of stage {stage.name} take turns for, or more of that; "
        "more at once, more CPUs or another order gain nothing"
    )


def _paused(snapshot: Snapshot, stage: StageSnapshot | None) -> str | None:
    return None if stage is None else f"to resume stage {stage.name}"


def _others(snapshot: Snapshot) -> float:
    """CPU seconds of other programs on the CPUs of this process; 0 where that is not known."""
    machine = snapshot.machine
    used, everything = machine.cpu_seconds_used, machine.cpu_seconds_all
    # Of a machine with more CPUs than this process may use, the sum over all programs says nothing.
    if used is None or everything is None or everything > 1.1 * machine.cpus * snapshot.window_seconds:
        return 0.0
    return max(0.0, everything - used)


def _python(snapshot: Snapshot, stage: StageSnapshot) -> bool:
    """Whether its threads may find the interpreter lock held for long."""
    held = (snapshot.machine.lock_wait_seconds or 0.0) >= HELD_SECONDS
    return held and stage.info.executor == "thread"


def _times(factor: float, only: str = "") -> str:
    """A bound in brackets, and what it holds under; nothing where it says nothing."""
    if factor < WORTH:
        return " (little by itself: the training loop or another stage is hardly faster)"
    return "" if factor > TELLING else f" (up to {factor:.1f} times as fast{only})"


_BY_KIND: Mapping[str, Callable[[Snapshot, StageSnapshot | None], str | None]] = {
    "trainer": _trainer,
    "cpu": _cpu,
    "concurrency": _concurrency,
    "waits": _waits,
    "disk": _disk,
    "memory": _memory,
    "order": _order,
    "turns": _turns,
    "paused": _paused,
}
