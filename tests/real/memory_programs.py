"""Programs that live in a memory group: `python memory_programs.py NAME`.

Each says "ready" after its imports, gets its choices as a line of JSON, and tells what it found as a last line of JSON.
"""

import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import intune
from intune import Allocation
from intune._clock import SystemClock
from intune._compose import build_loader
from intune._machine import MemoryMeter, System
from intune.control import brake
from intune.pipeline.options import LoaderOptions
from intune.testing import EmulatedClock, TokenPool
from intune.tuners import RandomMoves, Shared, Static

MIB = 2**20


def made(size: int, item: int) -> np.ndarray:
    """uint8[size], every page written; it begins with the item's number."""
    array = np.empty(size, np.uint8)
    array[::4096] = 1
    array[:8].view(np.int64)[0] = item
    return array


def item_of(array: np.ndarray) -> int:
    """The number of the item that an array stands for."""
    return int(array[:8].view(np.int64)[0])


def thread_loader(items: int, tokens: int, tuner: str = "shared", burst: int = 3, memory: int | None = None) -> Any:
    """Two stages in threads: the second one needs three times of what it gives. In bursts items are larger."""
    clock = EmulatedClock(SystemClock())
    pool = TokenPool(tokens, clock)

    def size(item: int) -> int:
        return 2 * MIB * (burst if item % 100 >= 90 else 1)

    def load(item: int) -> np.ndarray:
        out = made(size(item), item)
        pool.work(0.02)
        return out

    def decode(came: np.ndarray) -> np.ndarray:
        item = item_of(came)
        scratch = made(2 * size(item), item)
        out = made(size(item), item)
        pool.work(0.03)
        del scratch
        return out

    pipe = intune.from_iterable(range(items)).map(load).map(decode)
    chosen: Any = RandomMoves(seed=5) if tuner == "random" else tuner
    return build_loader(pipe, LoaderOptions(tuner=chosen, cpus=tokens, memory=memory), clock=clock)


def threads(choices: dict[str, Any]) -> Any:
    """All items, as fast as they come."""
    with thread_loader(choices["items"], 40, choices["tuner"]) as loader:
        return {"ids": [item_of(item) for item in loader], "said": loader.explain()}


class LowAtFirst:
    """Lets `make` do few items at once for so many decisions; then all stages are open."""

    def __init__(self, low: int, decisions: int) -> None:
        self._low, self._left = Static({"make": low}), decisions

    def propose(self, snapshot: Any, budget: Any) -> Allocation:
        self._left -= 1
        return (self._low if self._left >= 0 else Shared()).propose(snapshot, budget)


def heavy_loader(items: int, tuner: Any) -> Any:
    """A stage, "make", that takes three times what it gives; 64 items at once would take 1.5 GiB."""
    clock = EmulatedClock(SystemClock())
    pool = TokenPool(64, clock)

    def make(item: int) -> np.ndarray:
        scratch = made(16 * MIB, item)
        out = made(8 * MIB, item)
        pool.work(0.5)
        del scratch
        return out

    pipe = intune.from_iterable(range(items)).map(make, name="make")
    return build_loader(pipe, LoaderOptions(tuner=tuner, cpus=64), clock=clock)


def opened(choices: dict[str, Any]) -> Any:
    """Few items at once at first, then as many as there is memory for."""
    with heavy_loader(choices["items"], LowAtFirst(choices["low"], decisions=7)) as loader:
        return {"ids": [item_of(item) for item in loader]}


def growing(choices: dict[str, Any]) -> Any:
    """A training loop that takes 20 MiB more with each of its first steps, as optimizers and tables do."""
    held, found = [], []
    with thread_loader(choices["items"], 40) as loader:
        for item in loader:
            found.append(item_of(item))
            if len(held) < choices["steps"]:
                held.append(made(20 * MIB, 0))
                time.sleep(0.05)  # a step
    return {"ids": found, "held": len(held)}


def address_space(choices: dict[str, Any]) -> Any:
    """Its address space may grow by so much; threads take some for themselves."""
    limit = psutil.Process().memory_info().vms + choices["room"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with heavy_loader(choices["items"], "shared") as loader:
        found = [item_of(item) for item in loader]
        snapshot = loader.stats().window
        assert snapshot is not None
        return {"ids": found, "limits": [use.limit_from for use in snapshot.machine.memory]}


def killed_worker(choices: dict[str, Any]) -> Any:
    """One item takes, the first time, all memory there is, in a worker process."""

    def work(item: int) -> int:
        if item == 20 and not os.path.exists(choices["marker"]):
            with open(choices["marker"], "w"):
                pass
            taken = []
            while True:
                taken.append(made(16 * MIB, item))
        return item

    with intune.from_iterable(range(60)).map(work, name="work", executor="process").loader(cpus=3) as loader:
        found = list(loader)
        loader._control._controller.step()  # by then all that happened is in the journal
        seen = [event for line in loader.journal for event in line["seen"].get("events", [])]
        return {"ids": found, "died": [event["detail"] for event in seen if event["kind"] == "worker_died"]}


def lowered(choices: dict[str, Any]) -> Any:
    """Tells of each tenth item: the nearest limit, and what may be in flight; goes on until it is told to stop."""
    told = threading.Event()
    listener = threading.Thread(target=lambda: (sys.stdin.readline(), told.set()))
    listener.start()
    found = []
    with thread_loader(1_000_000, 40, burst=1, memory=choices.get("memory")) as loader:
        for item in loader:
            found.append(item_of(item))
            if len(found) % 10 == 0:
                window = loader.stats().window
                limits = (
                    (window.machine.memory_limit_bytes, window.in_flight_bytes_limit) if window is not None else (0, 0)
                )
                print(len(found), *(limit or 0 for limit in limits), flush=True)
            if told.is_set():
                break
    listener.join()
    return {"ids": found}


def windows(choices: dict[str, Any]) -> Any:
    """Rows of 1 MiB through windows of rising size; tells of the first batch, goes on when told, and after an error.

    What comes of the rest, with a state taken after the error, is what a loader with room for it gives.
    """

    def row(item: int) -> np.ndarray:
        time.sleep(0.005)  # 40 MiB between two readings of the brake
        return made(MIB, item)

    rows = intune.from_iterable(range(choices["rows"])).map(row, waits=False)
    pipe = rows.shuffle(choices["window"], seed=3).batch(4)
    found: list[int] = []
    said = None
    with pipe.loader(cpus=2, tuner="shared") as loader:
        try:
            for batch in loader:
                found += [item_of(each) for each in batch]
                del batch
                if len(found) == 4:
                    print("begun", flush=True)
                    limit = int(sys.stdin.readline())
                    until(partial(known, loader, limit))
        except intune.MemoryLimitError as error:
            said = str(error)
        state = loader.state_dict()
    print("ended", flush=True)
    sys.stdin.readline()
    rest: list[int] = []
    with pipe.loader(cpus=2, tuner="shared") as loader:
        if said is not None:
            loader.load_state_dict(state)
            rest = [item_of(each) for batch in loader for each in batch]
    return {"ids": found, "said": said, "rest": rest}


def known(loader: Any, limit: int) -> bool:
    """Whether the loader has seen this limit."""
    return limit in [use.limit_bytes for use in loader._control._brake.brakes._uses.values()]


def paused(choices: dict[str, Any]) -> Any:
    """Takes some items, then none: what is used once all is at rest, and after thirty more readings of the brake."""
    with thread_loader(1_000_000, 16, burst=1) as loader:
        running = iter(loader)
        first = [item_of(next(running)) for _ in range(60)]
        engine, brakes = loader._engine, loader._control._brake.brakes

        def quiet() -> bool:
            with engine.scheduler.lock:
                return engine.scheduler.used == 0

        def latest() -> float:
            return max(brake._moments[-1].seconds for brake in brakes._brakes.values())

        def readings(count: int) -> None:
            begun = latest()
            until(lambda: latest() >= begun + count / 10)

        until(quiet)
        readings(10)
        until(quiet)
        before, waiting = used(), engine.snapshot().in_flight_items
        readings(30)
        after = used()
        rest = [item_of(next(running)) for _ in range(60)]
        return {"before": before, "after": after, "waiting": waiting, "ids": first + rest}


def bursts(choices: dict[str, Any]) -> Any:
    """Pauses until all is at rest, and takes as many items as come within a second; the brake looks once a second."""
    brake.SECONDS = brake.SECONDS_MOST = 1.0
    with thread_loader(1_000_000, 16, burst=1) as loader:
        running, engine = iter(loader), loader._engine
        found = [item_of(next(running)) for _ in range(40)]
        for _ in range(3):
            time.sleep(1.5)
            until(lambda: engine.scheduler.used == 0)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                found.append(item_of(next(running)))
        return {"ids": found}


def processes(choices: dict[str, Any]) -> Any:
    """Samples of 200 MB from worker processes, with a limit that the loader is told."""

    def load(item: int) -> np.ndarray:
        return made(200_000_000, item)

    pipe = intune.from_iterable(range(choices["items"])).map(load, executor="process", max_concurrency=4)
    with pipe.loader(memory="900MiB", cpus=4) as loader:
        return {"ids": [item_of(sample) for sample in loader]}


def many_processes(choices: dict[str, Any]) -> Any:
    """As many processes as there are slots; each makes 100 MB with its first item, once no more of them come up."""
    go = choices["go"]

    class Heavy:
        def __init__(self) -> None:
            while not os.path.exists(go):
                time.sleep(0.02)
            self.weights = made(100_000_000, 0)

        def __call__(self, item: int) -> int:
            time.sleep(0.02)
            return item + int(self.weights[4096])

    pipe = intune.from_iterable(itertools.count()).map(Heavy, executor="process", max_concurrency=24)
    with pipe.loader(memory=choices["memory"], cpus=24) as loader:
        (pool,) = (stage.pool for stage in loader._engine.live if stage.pool is not None)

        def settled() -> Callable[[], bool]:
            """Whether their number has not changed for two seconds."""
            last, since = (-1, 0), time.monotonic()

            def check() -> bool:
                nonlocal last, since
                now = pool.live, pool.starting
                if now != last:
                    last, since = now, time.monotonic()
                return now[0] > 0 and not now[1] and time.monotonic() - since > 2

            return check

        def let_go() -> None:
            until(settled())
            open(go, "w").close()

        thread, running = threading.Thread(target=let_go), iter(loader)
        thread.start()
        found = [next(running)]
        thread.join()
        until(settled(), lambda: found.append(next(running)))
        return {"ids": found, "live": pool.live}


class OneMore:
    """Concurrency 1, and one more with each decision, up to a most."""

    def __init__(self, most: int) -> None:
        self.counts = itertools.chain(range(1, most + 1), itertools.repeat(most))

    def propose(self, snapshot: Any, budget: Any) -> Allocation:
        count = next(self.counts)
        names = [stage.name for stage in snapshot.stages]
        return Allocation(dict.fromkeys(names, count), budget.cpus, None, dict.fromkeys(names, "one more"))


def small_rows(choices: dict[str, Any]) -> Any:
    """Rows of 64 KiB in batches, more and more at once, for a slow consumer."""
    base = used()
    print(base, flush=True)

    def row(item: int) -> np.ndarray:
        return made(64 * 1024, item)

    pipe = intune.from_iterable(range(choices["rows"])).map(row).batch(16)
    found = []
    pause = threading.Event()
    with pipe.loader(memory=base + 64 * MIB, cpus=8, tuner=OneMore(8)) as loader:
        for batch in loader:
            found += [item_of(row) for row in batch]
            pause.wait(0.05)
    return {"ids": found}


def tiny_rows(choices: dict[str, Any]) -> Any:
    """Rows of 8 bytes through a window of 100,000, in small batches."""
    base = used()
    print(base, flush=True)
    pipe = intune.from_iterable(range(choices["rows"])).shuffle(100_000, seed=1).batch(choices["batch"])
    with pipe.loader(memory=base + 64 * MIB, cpus=2) as loader:
        return {"sum": sum(int(batch.sum()) for batch in loader)}


def open_path(path: str) -> tuple[int, str]:
    """As if it was opened."""
    return os.getpid(), path[-8:]


class Vocabulary:
    """Made once in each worker."""

    def __init__(self) -> None:
        self.numbers = {name: number for number, name in enumerate(paths())}

    def __call__(self, path: str) -> tuple[int, int]:
        return os.getpid(), self.numbers[path]


def paths() -> list[str]:
    """300,000 texts."""
    return [f"/data/images/class-{number % 1000:04d}/picture-{number:08d}.jpg" for number in range(300_000)]


def read_only(choices: dict[str, Any]) -> Any:
    """Private bytes of the workers after the first items, and after two epochs."""
    names = paths()
    size = sys.getsizeof(names) + sum(map(sys.getsizeof, names))
    function: Any = Vocabulary if choices["what"] == "vocabulary" else open_path
    pipe = intune.from_iterable(names).map(function, executor="process", max_concurrency=4)
    with pipe.loader(cpus=4, tuner=Fixed(4)) as loader:
        (pool,) = (stage.pool for stage in loader._engine.live if stage.pool is not None)
        until(lambda: pool.live == 4)
        counts, after_first = [], 0
        for _ in range(2):
            count = 0
            for _ in loader:
                count += 1
                if count == 100 and not after_first:
                    pids = pool.pids()
                    after_first = private(pids)
            counts.append(count)
        return {
            "counts": counts,
            "size": size,
            "first": after_first,
            "last": private(pids),
            "same": sorted(pids) == sorted(pool.pids()),
        }


class Fixed:
    """The same concurrency for all, whatever it is at the time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def propose(self, snapshot: Any, budget: Any) -> Allocation:
        names = [stage.name for stage in snapshot.stages]
        return Allocation(dict.fromkeys(names, self.count), budget.cpus, None, dict.fromkeys(names, "fixed"))


def few_files(choices: dict[str, Any]) -> Any:
    """All batches are kept, and few files may be open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    executor = choices["executor"]

    def row(item: int) -> np.ndarray:
        return made(choices["bytes"], item)

    pipe = intune.from_iterable(range(2000)).map(row, executor=executor, max_concurrency=2).batch(4)
    with pipe.loader(cpus=2) as loader:
        kept = list(loader)
        return {"ids": [item_of(row) for batch in kept for row in batch], "open": len(os.listdir("/proc/self/fd"))}


def epochs(choices: dict[str, Any]) -> Any:
    """What is used after each of ten epochs over a Parquet file, and the sum of each."""
    found, sums = [], []
    pipe = intune.read_parquet(choices["file"]).map(lambda block: block).batch(8192)
    with pipe.loader(cpus=2, epochs=choices.get("epochs", 10)) as loader:
        for _ in range(choices.get("epochs", 10)):
            sums.append(sum(int(np.asarray(batch["x3"]).sum()) for batch in loader))
            found.append(used())
    return {"used": found, "sums": sums, "pool": pa.total_allocated_bytes()}


def fewer(choices: dict[str, Any]) -> Any:
    """What is used with four worker processes of 100 MB each, and with one."""

    class Heavy:
        def __init__(self) -> None:
            self.weights = made(100_000_000, 0)

        def __call__(self, item: int) -> int:
            time.sleep(0.005)  # so that all four get some
            return item + int(self.weights[8])

    tuner = Fixed(4)
    pipe = intune.from_iterable(itertools.count()).map(Heavy, executor="process", max_concurrency=4)
    with pipe.loader(cpus=4, tuner=tuner, memory="4GiB") as loader:
        (pool,) = (stage.pool for stage in loader._engine.live if stage.pool is not None)
        running: Iterator[int] = iter(loader)
        next(running)
        until(lambda: pool.live == 4 and used() > 400_000_000, lambda: next(running))
        many, tuner.count = used(), 1
        until(lambda: used() < many - 250_000_000, lambda: next(running))
        return {"live": pool.live, "many": many, "few": used()}


def used() -> int:
    """Anonymous and shared bytes of this process and its descendants."""
    size = MemoryMeter(System(), SystemClock()).tree().value
    assert size is not None
    return int(size)


def private(pids: list[int]) -> int:
    """Bytes that these processes share with nobody, together."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def until(happened: Callable[[], bool], meanwhile: Callable[[], Any] = lambda: time.sleep(0.01)) -> None:
    """Wait for something; a minute is a hang."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        meanwhile()


NAMES = (
    threads,
    lowered,
    opened,
    growing,
    address_space,
    killed_worker,
    windows,
    paused,
    bursts,
    processes,
    many_processes,
    small_rows,
    tiny_rows,
    read_only,
    few_files,
    epochs,
    fewer,
)

if __name__ == "__main__":
    chosen = {program.__name__: program for program in NAMES}[sys.argv[1]]
    print("ready", flush=True)
    print(json.dumps(chosen(json.loads(sys.stdin.readline()))), flush=True)
