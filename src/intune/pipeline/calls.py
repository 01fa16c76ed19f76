"""What a stage does to one item: the same code runs in a thread and in a worker process.

An item is a block, a run of samples (a list), or one opaque object. Errors, skips and random generators
are per sample, whatever the length of the run.
"""

import hashlib
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from intune.pipeline.blocks import as_block, block_mask, block_rows, block_to_rows, rows_to_block
from intune.pipeline.order import generator

Flow = Literal["block", "sample", "opaque"]
Keys = range | list[tuple[int, ...]]
"""Sequence numbers of a run's samples: a range of single numbers, or a path each."""


def key_at(keys: Keys, position: int) -> tuple[int, ...]:
    """The sequence number of one sample of a run."""
    return (keys[position],) if isinstance(keys, range) else keys[position]


def pick_keys(keys: Keys, keep: list[int]) -> Keys:
    """The sequence numbers of the samples at the given positions."""
    if len(keep) == len(keys):
        return keys
    return [key_at(keys, position) for position in keep]


@dataclass(slots=True)
class Failure:
    """A function raised. `key`: sequence number of the item or sample; `rows`: rows that it had.

    `fatal`: no item could ever pass, as a class could not be made; "skip" must not hide that.
    """

    error: BaseException
    key: tuple[int, ...]
    rows: int = 1
    fatal: bool = False

    def line(self) -> str:
        """One line that names the error."""
        return "".join(traceback.format_exception_only(self.error)).strip().splitlines()[0]


@dataclass(slots=True)
class Output:
    """What came of one item.

    Attributes:
        payload: The block, run or object.
        keys: Sequence numbers of a run's samples, else None.
        failure: The function raised here; the payload has the samples before it.
        skipped: Failures left out by "skip".
    """

    payload: Any
    keys: Keys | None = None
    failure: Failure | None = None
    skipped: tuple[Failure, ...] = ()


@dataclass
class StageCall:
    """A stage's function with what is needed to apply it to an item. Picklable by cloudpickle.

    Args:
        kind: "map", "map_rows", "filter", "flat_map", "unbatch", "to_torch", or "get" for samples by number.
        flow: What comes in.
        function: The user's function, or a class that is made once for each worker.
        rng: Whether the function gets a generator seeded by (seed, epoch, stage, seq).
        seed: Seed of the loader and its rank.
        stage: Number of the stage in its pipeline.
        skip: Leave out what fails instead of stopping there.
        reseed: Seed the process's own generators (random, numpy, torch) for each item or sample: in worker
            processes, which nobody else draws from.
    """

    kind: str
    flow: Flow
    function: Callable[..., Any]
    rng: bool = False
    seed: tuple[int, ...] = (0,)
    stage: int = 0
    skip: bool = False
    reseed: bool = False

    def __call__(self, payload: Any, keys: Any, epoch: int) -> Output:
        """Apply the function to one item; `keys` is the item's path, or the run's sequence numbers."""
        try:
            self._set_up()
        except Exception as error:
            return Output(None, failure=self._not_made(error, keys))
        if self.flow == "sample" and self.kind in _SAMPLE_KINDS:
            return self._run(payload, keys, epoch)
        try:
            return getattr(self, f"_{self.kind}")(payload, keys, epoch)  # type: ignore[no-any-return]
        except Exception as error:
            rows = block_rows(payload) if self.flow == "block" else 1
            failure = Failure(error, keys, rows)
            return Output(None, skipped=(failure,)) if self.skip else Output(None, failure=failure)

    def draw(self, payload: Any, keys: Any, epoch: int) -> Iterator[tuple[tuple[int, ...], Any]]:
        """flat_map: children one after another with their sequence numbers, drawn as they are asked for.

        A failure comes as a `Failure` in place of a child and ends the drawing unless it is skipped.
        """
        try:
            self._set_up()
        except Exception as error:
            failure = self._not_made(error, keys)
            yield failure.key, failure
            return
        parents = payload if self.flow == "sample" else [payload]
        for position, parent in enumerate(parents):
            key = key_at(keys, position) if self.flow == "sample" else keys
            number = 0
            try:
                for child in _iterate(self._apply(parent, key, epoch)):
                    yield (*key, number), as_block(child) if self.flow == "block" else child
                    number += 1
            except Exception as error:
                yield (*key, number), Failure(error, key)
                if not self.skip:
                    return

    def close(self) -> None:
        """Close what a class made, where it has a `close`."""
        close = getattr(self.function, "close", None)
        if callable(close) and not isinstance(self.function, type):
            close()

    def _set_up(self) -> None:
        if isinstance(self.function, type):
            self.function = self.function()

    def _not_made(self, error: Exception, keys: Any) -> Failure:
        return Failure(error, keys if isinstance(keys, tuple) else key_at(keys, 0), fatal=True)

    def _apply(self, value: Any, key: tuple[int, ...], epoch: int) -> Any:
        if self.reseed:
            _seed_globals((*self.seed, epoch, self.stage, *key))
        if self.rng:
            return self.function(value, generator(*self.seed, epoch, self.stage, *key))
        return self.function(value)

    def _run(self, samples: list[Any], keys: Keys, epoch: int) -> Output:
        out: list[Any] = []
        keep: list[int] = []
        skipped: list[Failure] = []
        function, plain = self.function, not (self.rng or self.reseed)
        filters, maps = self.kind == "filter", self.kind == "map"
        position, failure = -1, None
        samples_left = enumerate(samples)
        while True:
            try:
                for position, sample in samples_left:
                    result = function(sample) if plain else self._apply(sample, key_at(keys, position), epoch)
                    if filters:
                        if _truth(result):
                            out.append(sample)
                            keep.append(position)
                    elif result is None and maps:
                        raise _no_result()
                    else:
                        out.append(result)
                        keep.append(position)
                break
            except BaseException as error:  # also SystemExit: the samples before it are delivered
                failure = Failure(error, key_at(keys, position))
                if not (self.skip and isinstance(error, Exception)):
                    break
                skipped.append(failure)
                failure = None
        return Output(out, pick_keys(keys, keep), failure, tuple(skipped))

    def _map(self, payload: Any, key: tuple[int, ...], epoch: int) -> Output:
        result = self._apply(payload, key, epoch)
        if result is None:
            raise _no_result()
        return Output(as_block(result) if self.flow == "block" else result)

    def _map_rows(self, block: Any, key: tuple[int, ...], epoch: int) -> Output:
        done: list[Any] = []
        skipped: list[Failure] = []
        failure = None
        for position, row in enumerate(block_to_rows(block)):
            try:
                done.append(_row(self._apply(row, (*key, position), epoch)))
            except Exception as error:
                failure = Failure(error, (*key, position))
                if not self.skip:
                    break
                skipped.append(failure)
                failure = None
        return Output(rows_to_block(done, block) if done else None, None, failure, tuple(skipped))

    def _filter(self, block: Any, key: tuple[int, ...], epoch: int) -> Output:
        keep = self._apply(block, key, epoch)
        if isinstance(keep, (pa.Array, pa.ChunkedArray)):
            keep = keep.to_numpy(zero_copy_only=False)
        keep, rows = np.asarray(keep), block_rows(block)
        if keep.dtype != np.bool_ or keep.shape != (rows,):
            raise TypeError(
                f"a filter of blocks gives one bool a row: expected bool[{rows}], got {keep.dtype}{list(keep.shape)}"
            )
        return Output(block_mask(block, keep))

    def _unbatch(self, block: Any, key: tuple[int, ...], epoch: int) -> Output:
        rows = block_to_rows(block)
        return Output(rows, [(*key, position) for position in range(len(rows))])

    def _to_torch(self, block: Any, key: tuple[int, ...], epoch: int) -> Output:
        return Output(self.function(block))


_SAMPLE_KINDS = ("get", "map", "filter")


def _iterate(children: Any) -> Iterable[Any]:
    if children is None or isinstance(children, (str, bytes, dict)) or not isinstance(children, Iterable):
        raise TypeError(f"flat_map needs a function that gives an iterable of items, got {type(children).__name__}")
    return children


def _row(result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        return result
    if result is None:
        raise _no_result()
    raise TypeError(f"map_rows gives a dict for each row, got {type(result).__name__}: {result!r:.80}")


def _truth(result: Any) -> bool:
    if isinstance(result, (bool, np.bool_)):
        return bool(result)
    raise TypeError(f"a filter gives True or False for each sample, got {type(result).__name__}: {result!r:.80}")


def _seed_globals(key: tuple[int, ...]) -> None:
    # A hash spreads neighbouring keys as well as a SeedSequence, at a tenth of its 6 us an item.
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def _no_result() -> TypeError:
    return TypeError("the function gave None: did you forget `return`?")
