"""How large what a stage gives will be, from what came in."""

WEIGHT = 1 / 32
"""Weight of the newest item, once there were as many."""


class Growth:
    """Predicts the bytes that a stage gives for an item.

    Either as many as usual, or in proportion to what came in, by whichever has been nearer lately: a stage that decodes
    or pads gives the one, a stage that transforms the other.

    All figures are bytes for each unit of an item's bound.
    """

    def __init__(self) -> None:
        self._count = 0
        self._usual = self._ratio = 0.0
        self._misses_usual = self._misses_ratio = 0.0

    @property
    def usual(self) -> float:
        """What it gives as a rule."""
        return self._usual

    def predict(self, came: float) -> float:
        """What it will give for what came in; 0 before an item has passed."""
        return self._ratio * came if self._misses_ratio < self._misses_usual else self._usual

    def add(self, came: float, gave: float) -> None:
        """An item has passed."""
        self._count += 1
        weight = max(WEIGHT, 1 / self._count)
        if self._count > 1:
            self._misses_usual += weight * (abs(self._usual - gave) - self._misses_usual)
            self._misses_ratio += weight * (abs(self._ratio * came - gave) - self._misses_ratio)
        self._usual += weight * (gave - self._usual)
        if came > 0:
            self._ratio += weight * (gave / came - self._ratio)
