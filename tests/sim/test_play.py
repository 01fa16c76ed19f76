"""A tuner plays a scenario: by its name, as an object, and when it fails."""

import pytest

from intune._errors import PipelineError
from intune._values import Allocation, Budget, Snapshot
from intune.sim import Scenario, SimMachine, SimStage, play
from intune.tuners import Even

DRAWN = Scenario("plain", (SimStage("read", "source"), SimStage("work", cpu_seconds=0.04)), SimMachine(cpus=4))


class Fails:
    """Decides as `even` does, and fails from one decision on."""

    def __init__(self, first: int) -> None:
        self._left = first
        self._even = Even()

    def propose(self, snapshot: Snapshot, budget: Budget) -> Allocation:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("no more")
        return self._even.propose(snapshot, budget)


def test_a_name_stands_for_a_new_tuner() -> None:
    assert play(DRAWN, "even", 6) == play(DRAWN, Even(), 6)
    assert play(DRAWN, "even", 6) != play(DRAWN, "shared", 6)


def test_what_is_no_tuner_is_refused() -> None:
    with pytest.raises(PipelineError, match="unknown tuner 'evne': give one of "):
        play(DRAWN, "evne", 6)
    with pytest.raises(PipelineError, match="3 is no tuner: it needs a method propose"):
        play(DRAWN, 3, 6)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="Even is a class"):
        play(DRAWN, Even, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (0, "ZeroDivisionError: no more; replaced by every stage open"),
        (3, "ZeroDivisionError: no more; replaced by its last good allocation"),
        (6, "ZeroDivisionError: no more; replaced by its last good allocation"),
        (7, None),
    ],
)
def test_a_run_says_that_its_tuner_failed(first: int, said: str | None) -> None:
    found = play(DRAWN, Fails(first), 6)
    assert found.tuner_failed == said
    assert len(found.intervals) == 6


def test_that_it_failed_is_known_after_the_journal_has_forgotten_it() -> None:
    found = play(DRAWN, Fails(1), 1005, interval_seconds=0.01)
    assert not any(line["vetoed"] for line in found.lines)
    assert found.tuner_failed is not None
