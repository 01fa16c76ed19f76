"""Random pipelines whose memory is hard to keep under a limit, and the functions of their stages.

A scenario is drawn from its number alone, so that the list is fixed before the first run. Its functions are the
same for every program: each holds one of N tokens for its seconds (a token stands for a CPU), in which it allocates
what it says, and gives back an array of the size that stage and item number decide.
"""

import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SEED = 20261130
MIB = 2**20
MOST_BYTES_PER_SECOND = 1200 * MIB
"""What a pipeline could allocate at most with all tokens: more would measure how fast the kernel clears pages."""
MOST_SECONDS = 0.5
"""An item takes no longer than this, so that many pass in a run of some seconds."""


@dataclass(frozen=True)
class StageLaw:
    """One mapped stage.

    Attributes:
        seconds: How long an item holds its token.
        element_bytes: Size of what it gives.
        scratch_share: Size of what it allocates beside that while it works, as a share of it.
        tail_share: Share of items that are `tail_factor` times as large.
        tail_factor: See above.
        processes: The most worker processes; 0 = it runs in threads.
    """

    seconds: float
    element_bytes: int
    scratch_share: float = 0.0
    tail_share: float = 0.0
    tail_factor: float = 1.0
    processes: int = 0


@dataclass(frozen=True)
class Scenario:
    """One pipeline with its limit.

    Attributes:
        number: Its number.
        tokens: Functions that may be at work at once.
        extra_bytes: The limit, beyond what the larger program needs after its imports.
        stages: Its mapped stages.
        window: Items of a shuffle after the first stage; 0 = none.
        burst_every: Every so many items a tenth of them is three times as large; 0 = never.
        step_seconds: What the consumer does with each item; 0 = it takes them as they come.
        pause_seconds: A pause of the consumer in the middle; 0 = none.
    """

    number: int
    tokens: int
    extra_bytes: int
    stages: tuple[StageLaw, ...]
    window: int
    burst_every: int
    step_seconds: float
    pause_seconds: float

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Scenario":
        """What `as_json` gave."""
        return Scenario(**{**values, "stages": tuple(StageLaw(**stage) for stage in values["stages"])})


def scenario(number: int) -> Scenario:
    """The scenario with this number."""
    rng = np.random.default_rng([SEED, number])
    tokens = int(rng.choice([8, 16, 32, 64]))
    extra = int(rng.uniform(0.5, 4.0) * 1024 * MIB)
    count = int(rng.integers(2, 8))
    seconds = np.exp(rng.uniform(np.log(0.004), np.log(0.12), count))
    sizes = np.exp(rng.uniform(np.log(0.25 * MIB), np.log(16 * MIB), count)).astype(int)
    seconds *= max(1.0, min(MOST_SECONDS, sizes.sum() * tokens / MOST_BYTES_PER_SECOND) / seconds.sum())
    sizes = (sizes * min(1.0, MOST_BYTES_PER_SECOND * seconds.sum() / tokens / sizes.sum())).astype(int)
    tailed = int(rng.integers(count)) if rng.random() < 1 / 3 else -1
    # One item alone must be possible anywhere: the largest stays below a sixteenth of what is there.
    factor = min(float(rng.uniform(4, 16)), extra / 16 / float(sizes[tailed])) if tailed >= 0 else 1.0
    processes = int(rng.integers(count)) if rng.random() < 1 / 4 else -1
    stages = tuple(
        StageLaw(
            seconds=float(seconds[i]),
            element_bytes=int(sizes[i]),
            scratch_share=float(rng.uniform(0.5, 2.0)) if rng.random() < 1 / 4 else 0.0,
            tail_share=0.03 if i == tailed and factor > 1 else 0.0,
            tail_factor=max(1.0, factor) if i == tailed else 1.0,
            processes=int(rng.integers(2, 7)) if i == processes else 0,
        )
        for i in range(count)
    )
    most_window = int(0.1 * extra / sizes[0])
    window = min(256, most_window) if rng.random() < 1 / 4 and most_window >= 8 else 0
    rate = tokens / float(seconds.sum())
    step = float(rng.uniform(0.5, 2.0) / rate) if rng.random() < 1 / 3 else 0.0
    return Scenario(
        number=number,
        tokens=tokens,
        extra_bytes=extra,
        stages=stages,
        window=window,
        burst_every=int(rng.integers(100, 400)) if rng.random() < 1 / 4 else 0,
        step_seconds=step,
        pause_seconds=1.5 if rng.random() < 1 / 3 else 0.0,
    )


def item_bytes(chosen: Scenario, place: int, item: int) -> int:
    """Size of what the stage at this place gives for an item."""
    stage = chosen.stages[place]
    size = float(stage.element_bytes)
    if stage.tail_share:
        word = int.from_bytes(hashlib.blake2b(f"{chosen.number}/{place}/{item}".encode(), digest_size=4).digest())
        if word / 2**32 < stage.tail_share:
            size *= stage.tail_factor
    if chosen.burst_every and item % chosen.burst_every < chosen.burst_every / 10:
        size *= 3
    return max(8, int(size))


def item_of(array: np.ndarray) -> int:
    """The number of the item that an array stands for."""
    return int(array[:8].view(np.int64)[0])


def made(size: int, item: int) -> np.ndarray:
    """uint8[size], every page written; it begins with the item's number."""
    array = np.empty(size, np.uint8)
    array[::4096] = 1
    array[:8].view(np.int64)[0] = item
    return array


def function_of(
    chosen: Scenario, place: int, at_work: Callable[[], AbstractContextManager[None]]
) -> Callable[[Any], np.ndarray]:
    """The function of a stage. The first one gets item numbers, the others arrays.

    All that it does, to allocate too, it does within `at_work`, which takes a token.
    """
    stage = chosen.stages[place]

    def function(given: Any) -> np.ndarray:
        item = item_of(given) if isinstance(given, np.ndarray) and given.ndim else int(given)
        size = item_bytes(chosen, place, item)
        with at_work():
            until = time.perf_counter() + stage.seconds
            scratch = made(int(size * stage.scratch_share), item) if stage.scratch_share else None
            out = made(size, item)
            threading.Event().wait(max(0.0, until - time.perf_counter()))
            del scratch
        return out

    return function


def consume(batches: Any, chosen: Scenario, seconds: float) -> dict[str, float]:
    """What a training loop does: counts items, pauses, stops after so many seconds from the first item."""
    begun, count, paused, first = time.perf_counter(), 0, chosen.pause_seconds == 0, 0.0
    for _ in batches:
        count += 1
        now = time.perf_counter()
        first = first or now - begun
        if now - begun > seconds:
            break
        if not paused and now - begun > seconds / 3:
            paused = True
            time.sleep(chosen.pause_seconds)
        if chosen.step_seconds:
            time.sleep(chosen.step_seconds)
    passed = time.perf_counter() - begun
    return {"items": count, "seconds": passed, "first_seconds": first}


class Counting:
    """Whole numbers without end."""

    def __iter__(self) -> Any:
        """A new count."""
        return itertools.count()
