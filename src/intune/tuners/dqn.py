"""A deep Q-network that moves one CPU at a time, trained on simulated pipelines.

What a plain reading of InTune (Nagrecha et al., RecSys 2023; only the abstract was at hand) gives with the plainest
network there is (Mnih et al., Nature 2015). It sees of each stage its share of the CPUs and its rate, and of the whole
the throughput and the share of the memory that is free. It gives one stage one CPU more or less, or does nothing; the
sum stays within the CPUs. It was trained for throughput times free memory (`intune.sim.train_dqn`) and does not learn
any more. It is here for comparison.

The network has places for 12 stages. Those of a longer pipeline that come after them keep what they began with, their
part of an even split.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from intune._values import Allocation, Budget, Snapshot
from intune.tuners import _weights
from intune.tuners.view import Bools, Floats, View, view

Ints = npt.NDArray[np.int64]

PLACES = 12
FIGURES = 3 * PLACES + 2
ACTIONS = 2 * PLACES + 1
SIZES = (FIGURES, 128, 128, ACTIONS)
FORMAT = "intune dqn 1"


class DQN:
    """Asks a trained network which stage gets one CPU more or less.

    Args:
        weights: A file that `intune.sim.train_dqn` made; None = the one that comes with the library.

    Raises:
        PipelineError: If the file holds no weights for it.
    """

    def __init__(self, weights: str | Path | None = None) -> None:
        path = _weights.shipped("dqn.npz") if weights is None else Path(weights)
        self._layers = _weights.read(path, FORMAT, SIZES)
        self._best_rate = 0.0

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        """One step from the split in force; an even split where none is."""
        names = [stage.name for stage in snapshot.stages]
        seen = view(snapshot, budget)
        self._best_rate = max(self._best_rate, float(np.nan_to_num(seen.rate[0])))
        split, reasons = even_split(seen)[0], dict.fromkeys(names, "an even split to begin with")
        if is_split(seen)[0]:
            values = _weights.forward(self._layers, figures(seen, np.array([self._best_rate])))
            action = best_action(values, allowed(seen))
            split = moved(seen, action)[0]
            reasons = _reasons(names, int(action[0]), values[0])
        return Allocation(dict(zip(names, map(int, split), strict=True)), budget.cpus, reasons=reasons)


def _reasons(names: list[str], action: int, values: Floats) -> dict[str, str]:
    worth = f"worth {values[action]:.3g} by the network, no change {values[0]:.3g}"
    reasons = dict.fromkeys(names, f"left as it is: {worth}")
    if action:
        reasons[names[(action - 1) // 2]] = f"one {'more' if action % 2 else 'less'}: {worth}"
    return reasons


def figures(seen: View, best_rate: Floats) -> Floats:
    """What the network sees, as float64[E, FIGURES]; what was not measured is 0.

    By stage 1 where there is one, its share of the CPUs, and the rate that it could work at with these as a share of
    what it and the whole would make together; then the throughput as a share of the best, and the free memory.

    Args:
        seen: The windows.
        best_rate: float[E]; the largest rate so far.
    """
    best, given = np.maximum(best_rate, 1e-12)[:, None], np.nan_to_num(held(seen))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        able = given / (seen.wall * seen.visits)
        share = np.where(np.isinf(able), 1.0, able / (able + best))
    stages = np.zeros((len(given), PLACES, 3))
    places = min(PLACES, given.shape[1])
    by_stage = np.stack([seen.present, given / seen.cpus[:, None], share], 2)
    stages[:, :places] = np.where(seen.present[:, :, None], np.nan_to_num(by_stage), 0.0)[:, :places]
    whole = np.stack([np.nan_to_num(seen.rate / best[:, 0]), 1 - np.clip(np.nan_to_num(seen.memory), 0.0, 1.0)], 1)
    shown: Floats = np.concatenate([stages.reshape(len(given), -1), np.minimum(whole, 1.0)], 1)
    return shown


def held(seen: View) -> Floats:
    """float[E, S]: CPUs that each stage has by the allocation in force; one that a user paused counts as 1."""
    given: Floats = np.maximum(1.0, np.where(seen.present, seen.asked, np.nan))
    return given


def is_split(seen: View) -> Bools:
    """bool[E]: whether what is in force divides the CPUs: nothing is open, and it is no more than there are."""
    given = np.where(seen.present, held(seen), 0.0).sum(1)
    return np.asarray(given <= np.maximum(seen.cpus, seen.present.sum(1)))


def even_split(seen: View) -> Floats:
    """float[E, S]: as many for each stage, at least 1; what remains is left over."""
    each = np.maximum(1.0, np.floor(seen.cpus / seen.present.sum(1)))
    split: Floats = np.minimum(each[:, None], _most(seen))
    return split


def allowed(seen: View) -> Bools:
    """bool[E, ACTIONS]: no change (0), and for each place one more (2 place + 1) or less (2 place + 2).

    Nothing but no change is, before every stage has finished an item in the window.
    """
    given, places = held(seen), min(PLACES, seen.present.shape[1])
    free = np.where(seen.present, given, 0.0).sum(1) < seen.cpus
    warm: Bools = np.all((np.nan_to_num(seen.items) > 0) | ~seen.present, axis=1)
    may = np.zeros((len(given), ACTIONS), dtype=np.bool_)
    may[:, 1 : 2 * places : 2] = (seen.present & (given + 1 <= _most(seen)) & free[:, None])[:, :places]
    may[:, 2 : 2 * places + 1 : 2] = (seen.present & (given > 1))[:, :places]
    may &= warm[:, None]
    may[:, 0] = True
    return may


def best_action(values: Floats, may: Bools) -> Ints:
    """int64[E]: the action of the largest value among those that are allowed."""
    action: Ints = np.where(may, values, -np.inf).argmax(1)
    return action


def moved(seen: View, action: Ints) -> Floats:
    """float[E, S]: the split in force after an action each."""
    given = np.minimum(held(seen), _most(seen))
    rows = np.flatnonzero(action)
    given[rows, (action[rows] - 1) // 2] += np.where(action[rows] % 2, 1.0, -1.0)
    return np.maximum(1.0, given)


def _most(seen: View) -> Floats:
    """float[E, S]: the largest number that can be of use."""
    return np.minimum(seen.most, np.where(seen.waits, seen.threads[:, None], seen.cpus[:, None]))
