"""Sources of samples: any iterable, and map-style datasets."""

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from intune._errors import PipelineError, SourceError
from intune._words import count
from intune.pipeline.chain import Executor


class IterableSource:
    """Samples of any iterable, one pass an epoch.

    Args:
        iterable: A list, or any object with `__iter__`; one that is its own iterator serves for one epoch.
    """

    kind = "from_iterable"

    def __init__(self, iterable: Iterable[Any]) -> None:
        if not isinstance(iterable, Iterable):
            raise PipelineError(f"from_iterable needs something to iterate, got {type(iterable).__name__}")
        if isinstance(iterable, (str, bytes)):
            raise PipelineError(f"from_iterable got one {type(iterable).__name__}: give a list of samples")
        self._iterable = iterable
        self._used = False

    def identity(self) -> dict[str, Any]:
        """Type, and length where there is one: the samples themselves are not looked at."""
        return {"type": type(self._iterable).__qualname__, "length": self.length()}

    def length(self) -> int | None:
        """Number of samples where the iterable says it, else None."""
        return len(self._iterable) if isinstance(self._iterable, Sized) else None

    def iterate(self) -> Iterator[Any]:
        """A new pass.

        Raises:
            SourceError: If the iterable is an iterator that was already drawn from.
        """
        if isinstance(self._iterable, Iterator):
            if self._used:
                raise SourceError(
                    f"from_iterable got a {type(self._iterable).__name__}, which can be read only once, and has been: "
                    "give a list, or an object whose __iter__ begins anew"
                )
            self._used = True
        return iter(self._iterable)


class DatasetSource:
    """Samples of a map-style dataset by number.

    Args:
        dataset: Has `__getitem__` and `__len__`; `__getitem__` is called from several threads at once, or in processes.
        sampler: Gives the numbers of an epoch in order, those of this rank; iterated once an epoch, after
            `set_epoch` where it has one.
        executor: Where samples are read.
        max_concurrency: The most samples read at once.
    """

    kind = "from_dataset"

    def __init__(
        self, dataset: Any, sampler: Any = None, executor: Executor = "thread", max_concurrency: int | None = None
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise PipelineError(
                f"from_dataset needs a map-style dataset with __getitem__ and __len__, got {type(dataset).__name__}: "
                "use from_iterable for what can only be iterated"
            )
        if sampler is not None and not isinstance(sampler, Iterable):
            raise PipelineError(f"sampler= needs something that gives numbers, got {type(sampler).__name__}")
        if executor not in ("thread", "process", "auto"):
            raise PipelineError(f"from_dataset: executor must be 'thread', 'process' or 'auto', got {executor!r}")
        if max_concurrency is not None and (
            isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1
        ):
            raise PipelineError(f"from_dataset: max_concurrency must be at least 1 or None, got {max_concurrency!r}")
        self.executor: Executor = executor
        self.max_concurrency = max_concurrency
        self.get = functools.partial(operator.getitem, dataset)
        """The sample with a number. A worker process gets it with the dataset, and without the sampler."""
        self._dataset, self._sampler = dataset, sampler
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._digests: dict[int, str] = {}  # kept when the order is not: a state may be asked for afterwards
        self._drawn: tuple[Iterator[Any], int] | None = None  # what the last order came from, and its length

    def identity(self) -> dict[str, Any]:
        """Types and length: the samples themselves are not looked at."""
        sampler = type(self._sampler).__qualname__ if self._sampler is not None else None
        return {"type": type(self._dataset).__qualname__, "length": len(self), "sampler": sampler}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._dataset)

    def order(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """The sampler's numbers for an epoch, drawn once; None without a sampler.

        Raises:
            SourceError: If the sampler gives what is no number of a sample of the dataset, or nothing at all because
                it can be read only once, and has been.
        """
        if self._sampler is None:
            return None
        if epoch not in self._orders:
            order = self._draw(self._sampler, epoch)
            self._orders = {epoch: order}
            self._digests[epoch] = hashlib.sha256(order.astype("<i8", copy=False).tobytes()).hexdigest()[:16]
        return self._orders[epoch]

    def order_digest(self, epoch: int) -> str | None:
        """What tells the order that was last drawn for an epoch from every other one; None without a sampler."""
        if self._sampler is not None and epoch not in self._digests:
            self.order(epoch)
        return self._digests.get(epoch)

    def _draw(self, sampler: Any, epoch: int) -> npt.NDArray[np.int64]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        numbers = iter(sampler)
        length = len(self)
        checked = (_sample_number(value, place, length) for place, value in enumerate(numbers))
        order = np.fromiter(checked, dtype=np.int64)
        if self._drawn is not None and self._drawn[0] is numbers and self._drawn[1] and not len(order):
            raise SourceError(
                f"sampler= got a {type(numbers).__name__}, which can be read only once, and has been: give a list, or "
                "an object whose __iter__ begins anew each epoch, such as a torch Sampler"
            )
        self._drawn = numbers, len(order)
        return order


def _sample_number(value: Any, place: int, length: int) -> int:
    """A number that a sampler gave, exactly as it is meant.

    Raises:
        SourceError: If it is no whole number, or the dataset has no such sample.
    """
    number = value if type(value) is int else _whole(value, place)
    if not -length <= number < length:
        raise SourceError(
            f"the sampler gives number {number!s:.40}, at place {place:,} of its order, for "
            f"{count(length, 'sample')}; the first is 0, and negative numbers count from the end"
        )
    return number


def _whole(value: Any, place: int) -> int:
    dtype = str(getattr(value, "dtype", type(value).__name__))
    try:
        if "bool" not in dtype and not getattr(value, "ndim", 0):
            return operator.index(value)
    except TypeError:
        pass
    hint = ""
    if "bool" in dtype:
        hint = "; of a mask, give the places where it is true"
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        hint = "; if it gives batches, give the sampler inside it, and say .batch(n)"
    raise SourceError(
        f"the sampler gives a {type(value).__name__}, {value!r:.80}, at place {place:,} of its order, where the whole "
        f"number of a sample is expected{hint}"
    )
