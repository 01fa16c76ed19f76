"""Sources of samples: any iterable, and map-style datasets."""

import functools
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
            SourceError: If the sampler gives a number that the dataset does not have.
        """
        if self._sampler is None:
            return None
        if epoch not in self._orders:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            order = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
            if len(order) and not (-len(self) <= order.min() and order.max() < len(self)):
                raise SourceError(
                    f"the sampler gives numbers {order.min()} to {order.max()} for {count(len(self), 'sample')}"
                )
            self._orders = {epoch: order}
        return self._orders[epoch]
