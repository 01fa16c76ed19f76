"""Learning on a pipeline that nothing learnt before fits: what is surely faster is kept, the rest rolled back.

One stage at a time is given a multiple of its concurrency for a block of decisions, then has what it had before for a
block, and so on: a switchback experiment, in which both sides see the same drift. After each pair of blocks the mean of
the logarithms of their rates has an interval by Student's t; once it excludes 0 the multiple is kept or dropped. Which
stage and which multiple come next is a bandit's choice: the best by what was found so far, those tried seldom first.

It is bounded: multiples of multiples stay within `LEAST` and `MOST`, a block that is much slower ends at once, and the
pause after experiments that found nothing grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

ARMS = (0.5, 2.0)
"""What a stage's concurrency is multiplied by in an experiment."""

LEAST, MOST = 1 / 8, 8.0
"""Bounds of all that was kept for a stage, multiplied."""

BLOCK, SETTLE = 6, 2
"""Decisions of a block, and how many of these pass before its rate counts."""

STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Quantiles of 97.5 % of Student's t by number of pairs; after the last one there is no more to be said."""

MUCH_SLOWER = 0.7
"""Share of the rate of the block before at which a block is ended early."""

PAUSE, LONGEST_PAUSE = 10, 320
"""Decisions between two experiments; twice as many after each that found nothing."""


@dataclass(slots=True)
class Experiment:
    """One stage with a multiple of its concurrency, against the same without.

    Attributes:
        stage: The stage.
        arm: The multiple.
        differences: Of each pair of blocks, log(rate with / rate without).
        treated: Whether this block is one with it.
        rates: Of this block, once it has settled.
        passed: Decisions of this block.
        before: Mean rate of the block before; None = it was the first.
    """

    stage: str
    arm: float
    differences: list[float] = field(default_factory=list)
    treated: bool = False
    rates: list[float] = field(default_factory=list)
    passed: int = 0
    before: float | None = None

    def observe(self, rate: float) -> None:
        """The rate of the last decision; ends the block where that is due."""
        self.passed += 1
        if self.passed > SETTLE:
            self.rates.append(rate)
        hopeless = self.treated and self.before and self.rates and self.rates[-1] < MUCH_SLOWER * self.before
        if self.passed < BLOCK and not hopeless:
            return
        mean = sum(self.rates) / len(self.rates)
        if self.treated and self.before is not None:
            self.differences.append(math.log(max(mean, 1e-3 * self.before) / self.before) if self.before else 0.0)
        self.treated, self.rates, self.passed, self.before = not self.treated, [], 0, mean

    def verdict(self) -> bool | None:
        """True = it is faster, False = it isn't, None = more pairs are needed."""
        count = len(self.differences)
        if self.treated or count < min(STUDENT):
            return None
        mean, deviation = float(np.mean(self.differences)), float(np.std(self.differences, ddof=1))
        half = STUDENT[count] * deviation / math.sqrt(count)
        if mean - half > 0:
            return True
        return False if mean + half < 0 or count == max(STUDENT) else None


class Switchback:
    """Experiments on one pipeline, one after another.

    Attributes:
        factors: By stage, what was kept: its concurrency is multiplied by this.
        experiment: What is going on; None = a pause.
    """

    def __init__(self, factors: Mapping[str, float] | None = None) -> None:
        self.factors: dict[str, float] = dict(factors or {})
        self.experiment: Experiment | None = None
        self._values: dict[tuple[str, float], float] = {}
        self._tries: dict[tuple[str, float], int] = {}
        self._pause = PAUSE
        self._rest = PAUSE

    def observe(self, rate: float, stages: Sequence[str]) -> str | None:
        """Go on by a decision.

        Args:
            rate: Of the window just ended.
            stages: Those that may be experimented on, the likeliest to matter first.

        Returns:
            What was found, in words, where an experiment has just ended.
        """
        if self.experiment is None:
            self._rest -= 1
            if self._rest <= 0 and stages:
                self._begin(stages)
            return None
        self.experiment.observe(rate)
        verdict = self.experiment.verdict()
        return None if verdict is None else self._end(self.experiment, verdict)

    def multiple(self, stage: str) -> float:
        """What the concurrency of a stage is to be multiplied by now."""
        kept = self.factors.get(stage, 1.0)
        now = self.experiment
        return kept * now.arm if now is not None and now.treated and now.stage == stage else kept

    def stop(self) -> None:
        """Break off what is going on; what was kept stays."""
        self.experiment, self._rest = None, self._pause

    def _begin(self, stages: Sequence[str]) -> None:
        choices = [
            (stage, arm) for stage in stages for arm in ARMS if LEAST <= self.factors.get(stage, 1.0) * arm <= MOST
        ]
        if not choices:
            self._rest = LONGEST_PAUSE
            return
        # Optimism: what was never tried comes first, in the order given.
        chosen = max(choices, key=lambda each: self._values.get(each, 1.0) / (1 + self._tries.get(each, 0)))
        self.experiment = Experiment(*chosen)

    def _end(self, done: Experiment, better: bool) -> str:
        key = done.stage, done.arm
        gain = float(np.mean(done.differences))
        self._values[key], self._tries[key] = gain, self._tries.get(key, 0) + 1
        self.experiment = None
        self._pause = PAUSE if better else min(LONGEST_PAUSE, 2 * self._pause)
        self._rest = self._pause
        if better:
            self.factors[done.stage] = self.factors.get(done.stage, 1.0) * done.arm
            self._tries.clear()  # what did not help before may help now
        said = "kept" if better else "rolled back"
        return f"{done.stage} with {done.arm:g} times its concurrency: {math.expm1(gain):+.0%}, {said}"
