"""The lines that say how training goes."""

import pytest

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.recsys.progress import Progress


def window(concurrency: dict[str, int | None], slots: int = 4) -> Snapshot:
    stages = tuple(StageSnapshot(StageInfo(name, "map"), most, running=1) for name, most in concurrency.items())
    consumer = ConsumerSnapshot(steps=10, rows=100, seconds_per_step=0.2, wait_share=0.254)
    return Snapshot(2.0, True, stages, consumer, MachineSnapshot(4), Allocation(concurrency, slots))


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_line_is_due_every_two_seconds_and_counts_from_the_last(said: list[str]) -> None:
    now = 100.0
    progress = Progress(said.append, lambda: now)
    now = 101.9
    assert not progress.due()
    now = 102.0
    assert progress.due()
    progress.say(epoch=0, rows=5000, loss=0.51239, window=None)
    assert not progress.due()
    now = 106.0
    progress.say(epoch=1, rows=7000, loss=0.4, window=window({"read_tsv": None, "transform": 3}))
    assert said == [
        "epoch 0  5,000 rows  2,500 rows/s  loss 0.5124",
        "epoch 1  7,000 rows  500 rows/s  loss 0.4000  waited 25%",
        "  4 CPU slots; most items at once: transform 3",
    ]


def test_what_was_decided_is_said_only_when_it_has_changed(said: list[str]) -> None:
    ticks = iter(range(100))
    progress = Progress(said.append, lambda: float(next(ticks)))
    for concurrency in ({"a": None, "b": None}, {"a": None, "b": None}, {"a": None, "b": 2}, {"a": 1, "b": 2}):
        progress.say(epoch=0, rows=1, loss=0.5, window=window(concurrency))
    progress.say(epoch=0, rows=1, loss=0.5, window=window({"a": 1, "b": 2}, slots=3))
    assert [line for line in said if not line.startswith("epoch")] == [
        "  4 CPU slots; most items at once: no limit",
        "  4 CPU slots; most items at once: b 2",
        "  4 CPU slots; most items at once: a 1, b 2",
        "  3 CPU slots; most items at once: a 1, b 2",
    ]


def test_every_line_fits_a_terminal(said: list[str]) -> None:
    ticks = iter((0.0, 2.0))
    progress = Progress(said.append, lambda: next(ticks))
    many = {f"a_stage_with_a_long_name_{number}": number + 1 for number in range(9)} | {"x" * 200: 5}
    progress.say(epoch=100, rows=12_345_678_901, loss=12.3456, window=window(many))
    assert max(map(len, said)) <= 80
    assert all(name in "".join(line.strip() for line in said) for name in many)
