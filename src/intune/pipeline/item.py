"""An item on its way through a segment."""

from collections.abc import Callable
from typing import Any

from intune.pipeline.calls import Failure, Keys
from intune.pipeline.ledger import Charge, Forecast
from intune.pipeline.sequence import Path


class Item:
    """One block, run of samples or object on its way through a segment.

    Attributes:
        path: Place in the order of its segment.
        position: What a resumed run has to begin with to see it again: unit, sample number or emission.
        keys: Sequence numbers of a run's samples; None for blocks and objects, whose path is theirs.
        payload: The data.
        rows: Its rows.
        before: Items (samples one by one) at the same position that came before it.
        source_rows: Source rows that it stands for.
        charge: What it holds in the ledger.
        bound: What was known of its size before it was made.
        forecast: What its bytes are forecast by; learns what it held at its largest.
        peak: Bytes that it held at its largest, while a stage had both what came in and what went out.
        origin: Where it comes from, for messages.
        failure: A function raised after the rows that it has.
        failed_stage: The stage in which it did.
        way: Of each stage that it has passed: what that forecasts the rest of the way by, the bytes that the item came
            with, and what it held there at its largest.
    """

    __slots__ = (
        "before",
        "bound",
        "charge",
        "failed_stage",
        "failure",
        "forecast",
        "keys",
        "origin",
        "path",
        "payload",
        "peak",
        "position",
        "rows",
        "source_rows",
        "way",
    )

    def __init__(
        self, path: Path, position: int, charge: Charge, bound: int, forecast: Forecast, origin: Callable[[], str]
    ) -> None:
        self.path, self.position, self.charge, self.origin = path, position, charge, origin
        self.bound, self.forecast = bound, forecast
        self.keys: Keys | None = None
        self.payload: Any = None
        self.rows = self.before = 0
        self.source_rows = 0.0
        self.peak = 0
        self.failure: Failure | None = None
        self.failed_stage = ""
        self.way: list[tuple[Forecast, int, int]] = []

    @property
    def count(self) -> int:
        """Items that it counts as: samples are counted one by one."""
        return len(self.keys) if self.keys is not None else 1

    def held(self, size: int) -> None:
        """It holds so many bytes now: what is forecast for others takes notice at once."""
        if size > self.peak:
            self.peak = size
            if self.bound:
                self.forecast.note(self.bound, size)

    def teach(self) -> None:
        """It has come to the end of its way: what it held is what others are forecast by."""
        if not self.bound:
            return
        self.forecast.add(self.bound, self.peak)
        most = 0
        for further, came, held in reversed(self.way):
            most = max(most, held)
            further.add(self.bound, max(0, most - came))
        self.way.clear()

    def fail(self, failure: Failure, stage: str) -> None:
        """A function raised; an earlier failure of the same item gives way, its rows come later."""
        self.failure, self.failed_stage = failure, stage
