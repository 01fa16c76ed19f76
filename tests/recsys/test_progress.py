"""The lines that say how training goes."""

from intune._values import Allocation, ConsumerSnapshot, MachineSnapshot, Snapshot, StageInfo, StageSnapshot
from intune.recsys.progress import Progress


def window() -> Snapshot:
    stages = (
        StageSnapshot(StageInfo("read_tsv", "source"), concurrency=None, running=2),
        StageSnapshot(StageInfo("transform", "map"), concurrency=3, running=1),
    )
    consumer = ConsumerSnapshot(steps=10, rows=100, seconds_per_step=0.2, wait_share=0.254)
    allocation = Allocation({"read_tsv": None, "transform": 3}, slots=4)
    return Snapshot(2.0, True, stages, consumer, MachineSnapshot(4), allocation)


def test_a_line_is_due_every_two_seconds_and_counts_from_the_last() -> None:
    now = 100.0
    said: list[str] = []
    progress = Progress(said.append, lambda: now)
    now = 101.9
    assert not progress.due()
    now = 102.0
    assert progress.due()
    progress.say(epoch=0, rows=5000, loss=0.51239, window=None)
    assert not progress.due()
    now = 106.0
    progress.say(epoch=1, rows=7000, loss=0.4, window=window())
    assert said == [
        "epoch 0  5,000 rows  2,500 rows/s  loss 0.5124",
        "epoch 1  7,000 rows  500 rows/s  loss 0.4000  waited 25%  |  "
        "running/concurrency  read_tsv 2/open  transform 1/3",
    ]
