"""Memory that worker processes keep after large items, as the system counts it. Real processes."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pyarrow as pa
import pytest

import intune
from intune._values import Allocation
from intune.pipeline.process import ProcessPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MIB = 2**20
LARGE = 100 * MIB
SECONDS = 20.0


def arrow(size: int) -> int:
    """Makes Arrow arrays of so many bytes, one after another, and lets go of them."""
    import pyarrow.compute as pc

    held = pa.repeat(1, size // 8)
    return int(pc.sum(pc.add(held, 1)).as_py())


class Heap:
    """Makes many pieces that are too small for mappings of their own, and keeps the last one."""

    def __call__(self, size: int) -> int:
        pieces = [bytes([1]) * 50_000 for _ in range(max(1, size // 50_000))]
        self.kept = pieces[-1]
        return sum(map(len, pieces))


def own(pid: int) -> int:
    """Bytes that a process shares with nobody."""
    size: int = psutil.Process(pid).memory_full_info().uss
    return size


def until(happened: Callable[[], bool], meanwhile: Callable[[], Any] = lambda: time.sleep(0.02)) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        meanwhile()


@pytest.fixture(params=[arrow, Heap()], ids=["arrow", "heap"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    pool = ProcessPool("work", request.param)
    pool.resize(1)
    yield pool
    pool.close()


def test_an_idle_worker_gives_back_what_its_last_items_needed(pool: ProcessPool) -> None:
    pool.call(1000)
    (pid,) = pool.pids()
    small = own(pid)
    for _ in range(3):
        pool.call(LARGE)
    until(lambda: own(pid) < small + 30 * MIB)
    assert pool.call(100_000) > 0
    assert pool.pids() == [pid]


def test_a_busy_worker_does_when_it_is_asked_to(pool: ProcessPool) -> None:
    """In an item's time it is never idle for a second."""
    pool.call(1000)
    (pid,) = pool.pids()
    small = own(pid)
    for _ in range(3):
        pool.call(LARGE)
    pool.release_unused()
    pool.call(1000)
    pool.call(1000)  # it is asked for this one when it has done with the one before
    assert own(pid) < small + 30 * MIB


def test_the_brake_asks_all_workers_of_a_loader() -> None:
    class Steady:
        def propose(self, snapshot: Any, budget: Any) -> Allocation:
            names = [stage.name for stage in snapshot.stages]
            return Allocation({**dict.fromkeys(names), "work": 2}, 2, None, dict.fromkeys(names, "as told"))

    sizes = [LARGE] * 8 + [1000] * 1_000_000
    pipe = intune.from_iterable(sizes).map(arrow, name="work", executor="process")
    with pipe.loader(cpus=2, tuner=Steady(), memory="4GiB") as loader:
        running = iter(loader)
        for _ in range(10):
            next(running)
        (pool,) = (stage.pool for stage in loader._engine.live if stage.pool is not None)
        until(lambda: len(pool.pids()) == 2, lambda: next(running))
        loader._control._brake._give_back(0.0)  # type: ignore[attr-defined]
        until(lambda: max(map(own, pool.pids())) < 80 * MIB, lambda: next(running))
