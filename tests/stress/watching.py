"""Loaders under watch: none may hang, none may leave anything, and some are disturbed while they run."""

import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import intune
from intune import Allocation
from intune.pipeline.engine import Engine

from .building import build, loader_of
from .pipelines import Description

WATCHDOG_SECONDS = 60.0
GRACE_SECONDS = 5.0
TURN_SECONDS = 2e-5
NEVER_TOO_LITTLE = 64 << 20
"""Bytes in flight that are enough for every shuffle here."""


@contextmanager
def opened(description: Description, folder: Path, rank: int) -> Iterator[intune.Loader]:
    """A loader that is watched, perhaps disturbed, closed at the end, and must leave nothing."""
    before = _held(description)
    instances: list[Any] = []
    loader = loader_of(description, build(description, folder, rank, instances), rank)
    churn = Churn(loader._engine, description.run.seed) if description.run.churn else None
    try:
        with watched(loader):
            if churn is not None:
                churn.start()
            yield loader
    finally:
        if churn is not None:
            churn.end()
        loader.close()
    assert not instances, f"instances that were not closed: {instances}"
    engine = loader._engine
    in_hand = (engine.context.ledger.charged, engine.scheduler.used, engine.context.busy)
    assert in_hand == (0, 0, 0), f"bytes, slots and tasks still in hand: {in_hand}\n{state_of(engine)}"
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _left(before, _held(description)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.001)


def _held(description: Description) -> tuple[set[Any], set[Any], list[str]]:
    """Threads, children where there may be some, and descriptors."""
    processes = any(stage.executor == "process" for stage in description.stages)
    children = set(psutil.Process().children()) if processes else set()
    return set(threading.enumerate()), children, os.listdir("/proc/self/fd")


def _left(before: tuple[set[Any], set[Any], list[str]], now: tuple[set[Any], set[Any], list[str]]) -> list[Any]:
    left: list[Any] = [*(now[0] - before[0]), *(now[1] - before[1])]
    if len(now[2]) > len(before[2]):
        links = [Path("/proc/self/fd", number) for number in now[2]]
        left.append([str(link.readlink()) for link in links if link.is_symlink()])
    return left


@contextmanager
def watched(loader: intune.Loader, seconds: float = WATCHDOG_SECONDS) -> Iterator[None]:
    """Fail what does not finish in time, and say where everything stood."""
    found: list[str] = []

    def fire() -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            found.append(f"{state_of(loader._engine)}\n{stacks.read()}")
        loader.close()  # who waits for an item gets an error

    timer = threading.Timer(seconds, fire)
    timer.start()
    try:
        yield
    except BaseException as error:
        timer.cancel()
        timer.join()
        if found:
            raise AssertionError(f"not finished after {seconds:g} s\n{found[0]}") from error
        raise
    finally:
        timer.cancel()
        timer.join()


def state_of(engine: Engine) -> str:
    """Where an engine stands; its lock is not waited for long."""
    locked = engine.scheduler.lock.acquire(timeout=1.0)
    try:
        lines = ["lock free" if locked else "LOCK HELD", _told(engine), _told(engine.scheduler), _told(engine.context)]
        lines.append(_told(engine.context.ledger))
        for run in engine.runs:
            lines += [_told(run), _told(run.delivery), *map(_told, run.segments)]
            lines += [f"{_told(one)}; {_told(one.sequencer)}" for one in run.sequences]
            for node in run.nodes:
                gates = dict(zip(("input", "order", "room", "memory"), node.gates(), strict=True))
                lines.append(f"{_told(node)}; {_told(node.stage)}; waiting {len(node.waiting())}; gates {gates}")
        return "\n".join(lines)
    finally:
        if locked:
            engine.scheduler.lock.release()


def _told(thing: Any) -> str:
    """What it is, and its fields as far as they say something."""
    fields = {name: repr(value) for name, value in vars(thing).items()}
    told = [f"{name}={value[:120]}" for name, value in fields.items() if " object at 0x" not in value[:60]]
    return f"{type(thing).__name__}({', '.join(told)})"


class Churn(threading.Thread):
    """Applies random legal allocations as fast as it can; a stage that it pauses it lets go on at once after.

    Meanwhile threads take turns far more often than usual, so that rare orders of events are less rare.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(name="churn")
        self._engine, self._random, self._end = engine, random.Random(seed), threading.Event()

    def run(self) -> None:
        """Apply one after another."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(TURN_SECONDS)
        try:
            self._churn()
        finally:
            sys.setswitchinterval(usual)

    def _churn(self) -> None:
        processes = any(stage.executor == "process" for stage in self._engine.stages)
        while not self._end.wait(0.05 if processes else 0.0005):
            self._engine.apply(self._allocation(0))
            self._engine.apply(self._allocation(1))

    def end(self) -> None:
        """Stop."""
        if self.ident is not None:
            self._end.set()
            self.join()

    def _allocation(self, least: int) -> Allocation:
        chance, stages = self._random, self._engine.stages
        concurrency = {
            stage.name: chance.choice((None, chance.randint(1 if stage.executor == "process" else least, 6)))
            for stage in stages
        }
        small = () if any(stage.kind == "shuffle" for stage in stages) else (0, 1, 500, 10_000)
        in_flight = chance.choice((None, NEVER_TOO_LITTLE, 10**9, *small))
        return Allocation(concurrency, chance.randint(1, 4), in_flight)
