"""What departures from the fitted model gain, found by paired runs of simulated pipelines.

At some decisions of a run the process forks, once for each move and once to follow the model. Each child makes its move,
goes on as the present agent would, and says after `HORIZON` decisions what went through. All children have the same
past and the same costs of items before them, so that what differs is the move's doing, and most of the noise falls out.
"""

import itertools
import math
import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from intune._values import Allocation, Budget, Snapshot
from intune.control import Controller, Guard, Journal
from intune.control.controller import intervals as until_next
from intune.sim.discrete import OutOfMemory, Simulation
from intune.sim.families import scenario
from intune.tuners._moves import Move
from intune.tuners._rows import rows_finished
from intune.tuners._senses import Seen
from intune.tuners.agent import HORIZON, Agent, Weights

EARLY = 4
"""Decisions at the start of a run, where most is still unknown: half of the states come from them."""

DEATH, LEAST, MOST = -4.0, -3.0, 1.0
"""Gain of a move after which memory ran out; bounds of all others."""

CHANCE_ITEMS = 2.0
"""Items by which what went through is rough: they are added on both sides before logarithms are taken."""

PROCESS_COST = 0.01
"""Gain that a worker process for each CPU must bring."""


@dataclass(frozen=True)
class Job:
    """A scenario to be played.

    Attributes:
        family: Its family.
        seed: Its seed, and that of the moments at which moves are tried.
        decisions: Length of the run.
        moments: How many of its decisions are tried.
        chance: Of a move at random instead of what the agent would do.
    """

    family: str
    seed: int
    decisions: int = 36
    moments: int = 6
    chance: float = 0.1


@dataclass(frozen=True)
class Example:
    """A state, and what was gained from there.

    Attributes:
        family: Of the scenario.
        seed: Of the scenario.
        at: Number of the decision.
        seen: The state.
        moves: float32[C, S, MOVE_FEATURES]; following the model comes first.
        names: Of the moves.
        gains: float32[C]; logarithm of what went through, less that of following the model.
        items: Items that went through when following the model.
    """

    family: str
    seed: int
    at: int
    seen: Seen
    moves: npt.NDArray[np.float32]
    names: tuple[str, ...]
    gains: npt.NDArray[np.float32]
    items: float


@dataclass
class _Outcome:
    """What a child saw: items that went through since, worker processes on average, whether memory ran out."""

    items: float
    processes: float
    died: bool


@dataclass
class _Branch:
    """What a child knows: where it began, and whom it tells."""

    at: int
    pipe: int
    items: float
    processes: list[int] = field(default_factory=list)


class Explorer(Agent):
    """The agent, which at given decisions tries all that it could do.

    Args:
        weights: Of the present agent; None = the model decides alone.
        moments: Numbers of the decisions at which everything is tried.
        chance: Of a move at random.
        random: What is drawn from.
    """

    def __init__(
        self, weights: Weights | None, moments: frozenset[int], chance: float, random: np.random.Generator
    ) -> None:
        super().__init__(weights or {})
        self._learned = weights is not None
        self._moments, self._chance, self._random = moments, chance, random
        self._decision, self._items, self._processes, self._cpus = -1, 0.0, 0, 1
        self.branch: _Branch | None = None
        self.found: list[tuple[int, Seen, npt.NDArray[np.float32], tuple[str, ...], list[_Outcome]]] = []

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """As the agent."""
        self._decision += 1
        self._items += through(snapshot)
        self._cpus = budget.cpus
        self._processes = sum((s.processes_live or 0) + (s.processes_starting or 0) for s in snapshot.stages)
        if self.branch is not None:
            self.branch.processes.append(self._processes)
        elif self._decision in self._moments:
            self._left = 0  # whatever is going on, all is open now
        return super().propose(snapshot, budget)

    def choose(self, seen: Seen, choices: Sequence[Move], features: npt.NDArray[np.float32]) -> Move | None:
        """What the agent thinks best, or something at random; first, where it is to be tried, everything."""
        if self.branch is None and self._decision in self._moments:
            options = [None, *choices]
            outcomes = []
            for option in options:
                outcome = self._try()
                if outcome is None:
                    return option
                outcomes.append(outcome)
            self.found.append((self._decision, seen, features, tuple(move.name for move in choices), outcomes))
        if self.branch is None and self._random.random() < self._chance:
            return choices[self._random.integers(len(choices))]
        return super().choose(seen, choices, features) if self._learned else None

    def _try(self) -> _Outcome | None:
        """Fork. Returns what the child saw, or in the child None."""
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no thread of this process does anything but wait
            child = os.fork()
        if child == 0:
            os.close(reading)
            self.branch = _Branch(self._decision, writing, self._items)
            return None
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        if not told:
            raise RuntimeError("a process that tried a move ended without a word")
        outcome: _Outcome = pickle.loads(told)  # of a child of this process, never from a file
        return outcome

    def tell(self, died: bool) -> None:
        """In a child: say what was seen, and end."""
        assert self.branch is not None
        processes = float(np.mean(self.branch.processes or [0])) / self._cpus
        os.write(self.branch.pipe, pickle.dumps(_Outcome(self._items - self.branch.items, processes, died)))
        os._exit(0)


def through(snapshot: Snapshot) -> float:
    """Items of the source that went through in a window: half by the last stage, half by what the training loop took."""
    last = snapshot.stages[-1]
    return ((rows_finished(last) or 0.0) + snapshot.consumer.steps * (last.source_rows_per_item or 0.0)) / 2


def explore(weights: Weights | None, job: Job) -> list[Example]:
    """Play a scenario and try moves on the way.

    Args:
        weights: Of the present agent; None = the model decides alone.
        job: What is played.
    """
    random = np.random.default_rng([job.seed, 1])
    early = random.choice(EARLY, job.moments // 2, replace=False)
    late = random.choice(np.arange(EARLY, job.decisions - HORIZON), job.moments - len(early), replace=False)
    explorer = Explorer(weights, frozenset(map(int, [*early, *late])), job.chance, random)
    drawn = scenario(job.family, job.seed)
    simulation = Simulation(drawn)
    controller = Controller(
        simulation,
        explorer,
        budget=simulation.budget,
        guard=Guard(),
        journal=Journal(None, clock=simulation.clock),
        clock=simulation.clock,
    )
    died = False
    try:
        for seconds in itertools.islice(until_next(1.0), job.decisions):
            controller.step()
            if explorer.branch is not None and explorer.branch.processes[HORIZON - 1 :]:
                break
            simulation.advance(seconds)
    except OutOfMemory:
        died = True
    if explorer.branch is not None:
        explorer.tell(died)
    simulation.close()
    unit = float(drawn.stages[0].rows)
    return [_example(job, unit, *each) for each in explorer.found]


def _example(
    job: Job,
    unit: float,
    at: int,
    seen: Seen,
    features: npt.NDArray[np.float32],
    names: tuple[str, ...],
    outcomes: Sequence[_Outcome],
) -> Example:
    follow = outcomes[0]
    items = follow.items / unit
    found = [
        DEATH
        if each.died
        else min(MOST, max(LEAST, math.log((each.items / unit + CHANCE_ITEMS) / (items + CHANCE_ITEMS))))
        - PROCESS_COST * (each.processes - follow.processes)
        for each in outcomes
    ]
    return Example(job.family, job.seed, at, seen, features, names, np.array(found, np.float32), items)
