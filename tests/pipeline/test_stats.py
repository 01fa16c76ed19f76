"""Figures of a loader as a person reads them."""

import intune
from intune.pipeline.stats import StageTotals, Stats


def test_a_few_lines_say_what_was_done() -> None:
    stages = {"read_tsv": StageTotals(12, 245_760, 2.0, 1.5, 0), "map": StageTotals(120, 245_760, 12.0, 11.0, 3)}
    stats = Stats(10.0, 120, 245_760, 2.5, stages, ("stage 'map', item 7: ValueError('x')",), None)
    assert repr(stats).splitlines() == [
        "120 batches, 245,760 rows in 10.0 s (24,576 rows/s), waited 25%",
        "  read_tsv  12 items, 2.0 s of work, 122,880 rows/s of work",
        "  map       120 items, 12.0 s of work, 20,480 rows/s of work, 3 left out",
        "  the first that was left out: stage 'map', item 7: ValueError('x')",
    ]
    assert str(stats) == repr(stats)


def test_nothing_measured_is_not_zero() -> None:
    stats = Stats(0.0, 0, 0, 0.0, {"map": StageTotals(0, 0, 0.0, 0.0, 0)}, (), None)
    assert repr(stats).splitlines() == [
        "0 batches, 0 rows in 0.0 s (unknown rows/s), waited unknown",
        "  map  0 items, 0.0 s of work, unknown rows/s of work",
    ]


def test_those_of_a_real_loader_are_short() -> None:
    with intune.from_iterable(range(40)).map(abs).batch(10).loader(cpus=2) as loader:
        assert repr(loader) == "<Loader of from_iterable -> abs -> batch: 0 batches, 0 rows, next epoch 0>"
        assert len(list(loader)) == 4
        lines = repr(loader.stats()).splitlines()
        assert lines[0].startswith("4 batches, 40 rows in ")
        assert [line.split()[0] for line in lines[1:]] == ["from_iterable", "abs", "batch"]
        assert " 4 items, " in lines[3]
        assert max(map(len, lines)) <= 100
        assert repr(loader).endswith("4 batches, 40 rows, next epoch 1>")
    assert repr(loader).endswith("4 batches, 40 rows, closed>")
