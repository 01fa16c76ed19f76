"""The program that soaks: thread stages, a process stage and windows under slow random moves, for a slow trainer.

It imports, says "ready", and begins at the next line of input, which says for how many seconds. Then it tells each
second of that by a line of JSON, and at the end what it found. What comes out is checked: each item once an epoch.
"""

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil

import intune
from intune import Allocation
from intune._clock import SystemClock
from intune._compose import build_loader
from intune.pipeline.options import LoaderOptions
from intune.testing import EmulatedClock, TokenPool
from intune.tuners import RandomMoves

ITEMS = 1500
"""In an epoch."""

TOKENS, PROCESSES = 6, 3
WINDOW, BATCH = 48, 8
MOVE_SECONDS = 12.0
STEP_SECONDS = 0.12
PAUSE_EVERY, PAUSE_SECONDS = 150, 3.0


class Slowly:
    """Random moves, each of which holds for some time: starting a process for each second costs more than the rest.

    They are the same in each third of the run, so that these can be compared.
    """

    def __init__(self, seconds: float) -> None:
        self._count = max(1, round(seconds / 3 / MOVE_SECONDS))
        self._each, self._began = seconds / 3 / self._count, time.monotonic()
        self._number = -1
        self._kept: Allocation | None = None

    def propose(self, snapshot: Any, budget: Any) -> Allocation:
        """The next move, or the last one while it holds."""
        number = int((time.monotonic() - self._began) / self._each) % self._count
        if self._kept is None or number != self._number:
            self._number, self._kept = number, RandomMoves(number).propose(snapshot, budget)
        return self._kept


def size(item: int) -> int:
    """Bytes of an item: long waves, and now and then a burst."""
    wave = 1.5 + np.sin(2 * np.pi * item / 400)
    return int(2**17 * wave) * (3 if item % 250 >= 235 else 1)


def made(size: int, item: int) -> np.ndarray:
    """uint8[size], every page written; it begins with the item's number."""
    array = np.empty(size, np.uint8)
    array[::4096] = 1
    array[:8].view(np.int64)[0] = item
    return array


def item_of(array: np.ndarray) -> int:
    """The number of the item that an array stands for."""
    return int(array[:8].view(np.int64)[0])


def in_process(came: np.ndarray) -> np.ndarray:
    """Sleeps, beside memory of its own."""
    scratch, out = made(came.nbytes, 0), made(came.nbytes, item_of(came))
    time.sleep(0.03)
    del scratch
    return out


def together(samples: list[np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of samples of different sizes."""
    return {"ids": np.array([item_of(sample) for sample in samples]), "bytes": np.concatenate(samples)}


def loader(seconds: float) -> Any:
    """Thread, process, thread, windows, batches."""
    clock = EmulatedClock(SystemClock())
    tokens = TokenPool(TOKENS, clock)

    def load(item: int) -> np.ndarray:
        out = made(size(item), item)
        tokens.work(0.03)
        return out

    def decode(came: np.ndarray) -> np.ndarray:
        scratch, out = made(2 * came.nbytes, 0), made(2 * came.nbytes, item_of(came))
        tokens.work(0.02)
        del scratch
        return out

    pipe = (
        intune.from_iterable(range(ITEMS))
        .map(load, name="load")
        .map(in_process, name="process", executor="process", max_concurrency=PROCESSES)
        .map(decode, name="decode")
        .shuffle(WINDOW, seed=3)
        .batch(BATCH, collate=together)
    )
    return build_loader(pipe, LoaderOptions(tuner=Slowly(seconds), cpus=TOKENS), clock=clock)


class Told:
    """What happened since the last line, and what there is now."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._lock = loader, threading.Lock()
        self.batches, self.gap = 0, 0.0

    def took(self, gap: float) -> None:
        """A batch came after so many seconds of waiting."""
        with self._lock:
            self.batches, self.gap = self.batches + 1, max(self.gap, gap)

    def line(self) -> dict[str, Any]:
        """And begin anew."""
        with self._lock:
            batches, gap, self.batches, self.gap = self.batches, self.gap, 0, 0.0
        window = self._loader.stats().window
        return {
            "batches": batches,
            "gap": round(gap, 3),
            "limit": window.machine.memory_limit_bytes if window is not None else None,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "processes": len(psutil.Process().children(recursive=True)),
        }


def soak(seconds: float) -> dict[str, Any]:
    """Train for so long: epochs, and what went wrong."""
    epochs, wrong = 0, 0
    with loader(seconds) as made_loader:
        told, stop = Told(made_loader), threading.Event()

        def tell() -> None:
            while not stop.wait(1.0):
                print(json.dumps(told.line()), flush=True)

        teller = threading.Thread(target=tell)
        teller.start()
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            seen = np.zeros(ITEMS, np.int64)
            asked = time.monotonic()
            for batch in made_loader:
                told.took(time.monotonic() - asked)
                np.add.at(seen, batch["ids"], 1)
                count += 1
                time.sleep(PAUSE_SECONDS if count % PAUSE_EVERY == 0 else STEP_SECONDS)
                asked = time.monotonic()
                if asked > end:
                    break
            else:
                epochs += 1
                wrong += int((seen != 1).sum())
        stop.set()
        teller.join()
        said = made_loader.explain()
    return {"epochs": epochs, "wrong_items": wrong, "said": said, "cpu_seconds": sum(os.times()[:4])}


if __name__ == "__main__":
    print("ready", flush=True)
    print(json.dumps(soak(float(sys.stdin.readline()))), flush=True)
