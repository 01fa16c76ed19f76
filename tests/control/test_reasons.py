"""explain() says why a stage has the limit that it has, what would help, and what came of the last change."""

import re

import numpy as np

import intune
from intune._values import Allocation, Budget, Snapshot
from intune.control.outcome import LEAST_STEPS


def test_a_loader_says_why_a_stage_has_a_limit() -> None:
    pipe = intune.from_iterable(range(400)).map(lambda value: value + 1, name="work")
    with pipe.loader(cpus=4, tuner="even") as loader:
        assert sum(1 for _ in loader) == 400
        assert "Stage work: concurrency 2 (4 CPUs over 2 stages);" in loader.explain()


class Switches:
    """Gives a stage 1, and 3 from when it is told to."""

    def __init__(self) -> None:
        self.more = False

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        concurrency = {stage.name: None for stage in snapshot.stages} | {"work": 3 if self.more else 1}
        return Allocation(concurrency, budget.cpus, None, {"work": "as it was told"}, 1e4)


def test_a_loader_says_what_came_of_a_change() -> None:
    tuner = Switches()
    mixed = np.random.default_rng(0).random(20_000)
    pipe = intune.from_iterable(range(100_000)).map(lambda value: np.sort(mixed)[value % 100], name="work")
    with pipe.loader(cpus=4, tuner=tuner) as loader:
        batches = iter(loader)
        next(batches)
        controller = loader._control._controller  # type: ignore[attr-defined]
        controller.stop()  # from here on the test says when a window ends
        controller.step()

        def window() -> None:
            for _ in range(2 * LEAST_STEPS):
                next(batches)
            controller.step()

        window()
        tuner.more = True
        window()
        assert "Last change: work 1 -> 3 (work: as it was told" in loader.explain()
        assert "what it brought is not known (0 steps since that can be compared)" in loader.explain()
        for _ in range(20):  # until the loop's own part of a step was much the same on both sides
            window()
            judged = [line["judged"] for line in loader.journal if line["judged"]]
            if judged:
                break
            tuner.more = not tuner.more
            window()
        window()
        said = re.search(
            r"Last change, \d+ decisions ago: work .*; estimated ([+-][0-9]+) %, got [+-][0-9]+ % \(\d+ steps in ",
            loader.explain(),
        )
        assert said is not None
        (found,) = judged
        assert round(100 * found["expected"]) == int(said.group(1))
        assert loader.journal[found["tick"]]["applied"]["expected_rows_per_second"] == 1e4
