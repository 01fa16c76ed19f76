"""The losses of a training run's steps and epochs."""

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

FEW_STEPS = 10


class Losses:
    """Losses of steps. They stay on the device until they are read, so that a GPU need not be waited for."""

    def __init__(
        self,
        by_epoch: Iterable[float] = (),
        first: Iterable[float] = (),
        last: Iterable[float] = (),
        total: float = 0.0,
        rows: int = 0,
    ) -> None:
        """Begin with none, or where `as_dict` said."""
        self.by_epoch = list(by_epoch)
        self._unread: list[tuple[Tensor, int]] = []
        self._first = list(first)
        self._last: deque[float] = deque(last, maxlen=FEW_STEPS)
        self._sum, self._rows = total, rows

    def as_dict(self) -> dict[str, Any]:
        """JSON of what was read so far, for a checkpoint."""
        return {
            "by_epoch": self.by_epoch,
            "first": self._first,
            "last": list(self._last),
            "total": self._sum,
            "rows": self._rows,
        }

    @property
    def first(self) -> float:
        """Mean of the first steps that were read, at most 10; NaN before."""
        return _mean(self._first)

    @property
    def last(self) -> float:
        """Mean of the last steps that were read, at most 10; NaN before."""
        return _mean(self._last)

    def add(self, loss: Tensor, rows: int) -> None:
        """Note the mean loss of a step's rows without reading it."""
        self._unread.append((loss, rows))

    def read(self) -> float:
        """Read what was noted and give the sum of all rows' losses in this epoch: not finite if any of them is not."""
        if self._unread:
            losses = torch.stack([loss for loss, _ in self._unread]).tolist()
            self._sum += sum(loss * rows for loss, (_, rows) in zip(losses, self._unread, strict=True))
            self._rows += sum(rows for _, rows in self._unread)
            self._first += losses[: FEW_STEPS - len(self._first)]
            self._last.extend(losses)
            self._unread.clear()
        return self._sum

    def end_epoch(self) -> None:
        """Note the mean loss of the rows since the last epoch's end."""
        self.by_epoch.append(self._sum / self._rows if self._rows else math.nan)
        self._sum, self._rows = 0.0, 0


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan
