"""Several ranks: the same number of batches on each, each row once, no talking."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Pipeline, PipelineError
from intune.testing import assert_exactly_once

pytestmark = pytest.mark.timeout(180)


class Rows:
    """A map-style dataset: row i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream:
    """Begins anew each time and does not say how long it is."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def write(folder: Path, *files: list[int]) -> Path:
    """Parquet files, each with row groups of the given sizes; `id` counts through all of them."""
    folder.mkdir(exist_ok=True)
    start = 0
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"{number:03}.parquet", pa.schema({"id": pa.int64()})) as writer:
            for rows in groups:
                writer.write_table(
                    pa.table({"id": pa.array(np.arange(start, start + rows))}), row_group_size=max(rows, 1)
                )
                start += rows
    return folder


def begin(kind: str, folder: Path, groups: list[list[int]]) -> Pipeline:
    n = sum(sum(group) for group in groups)
    if kind == "parquet":
        return intune.read_parquet(write(folder, *groups))
    return intune.from_dataset(Rows(n)) if kind == "map-style" else intune.from_iterable(Stream(n))


def column(batches: list[Any], name: str = "id") -> list[Any]:
    return [
        i
        for batch in batches
        for i in (batch if isinstance(batch, np.ndarray) else batch[name].to_numpy(zero_copy_only=False)).tolist()
    ]


def run(pipe: Pipeline, world_size: int, epochs: int = 1, **options: Any) -> list[list[list[Any]]]:
    """Batches by rank and epoch."""
    found = []
    for rank in range(world_size):
        with pipe.loader(rank=rank, world_size=world_size, cpus=1 + rank % 3, **options) as loader:
            found.append([[batch for batch in loader] for _ in range(epochs)])
    return found


KINDS = ["parquet", "map-style", "iterable"]


class TestUneven:
    """5 rows, 2 ranks, batches of 2."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_drop(self, tmp_path: Path, kind: str) -> None:
        ranks = run(begin(kind, tmp_path, [[3, 2]]).batch(2), 2, on_uneven="drop")
        assert [[len(batch) for batch in rank[0]] for rank in ranks] == [[2], [2]]
        assert len(set(column(ranks[0][0]) + column(ranks[1][0]))) == 4

    @pytest.mark.parametrize("kind", KINDS)
    def test_drop_is_the_rule_where_nothing_is_said(self, tmp_path: Path, kind: str) -> None:
        ranks = run(begin(kind, tmp_path, [[3, 2]]).batch(2), 2)
        assert [len(rank[0]) for rank in ranks] == [1, 1]

    @pytest.mark.parametrize("kind", ["parquet", "map-style"])
    def test_pad_repeats_as_few_as_possible(self, tmp_path: Path, kind: str) -> None:
        ranks = run(begin(kind, tmp_path, [[3, 2]]).batch(2), 2, on_uneven="pad")
        assert [[len(batch) for batch in rank[0]] for rank in ranks] == [[2, 1], [2, 1]]
        times = Counter(column(ranks[0][0]) + column(ranks[1][0]))
        assert sorted(times) == list(range(5))
        assert sorted(times.values()) == [1, 1, 1, 1, 2]

    def test_what_pad_repeats_is_marked(self, tmp_path: Path) -> None:
        ranks = run(begin("parquet", tmp_path, [[3, 2]]).batch(2), 2, on_uneven="pad")
        rows = [pair for rank in ranks for pair in zip(column(rank[0]), column(rank[0], "is_padding"), strict=True)]
        assert sorted(i for i, padding in rows if not padding) == list(range(5))
        assert len([i for i, padding in rows if padding]) == 1

    def test_without_padding_there_is_no_mark(self, tmp_path: Path) -> None:
        ranks = run(begin("parquet", tmp_path, [[3, 2]]).batch(2), 2)
        assert ranks[0][0][0].schema.names == ["id"]

    def test_pad_needs_a_source_that_can_be_read_twice(self, tmp_path: Path) -> None:
        with pytest.raises(PipelineError, match="on_uneven='pad'"):
            begin("iterable", tmp_path, [[5]]).loader(rank=0, world_size=2, on_uneven="pad")

    @pytest.mark.parametrize("kind", KINDS)
    def test_uneven_leaves_nothing_out(self, tmp_path: Path, kind: str) -> None:
        ranks = run(begin(kind, tmp_path, [[3, 2]]).batch(2), 2, on_uneven="uneven")
        assert sorted(len(column(rank[0])) for rank in ranks) == [2, 3]
        assert_exactly_once(column(ranks[0][0]) + column(ranks[1][0]), 5)


class TestManyRows:
    """1,003 rows in files of 700, 200 and 103, 4 ranks, batches of 50."""

    GROUPS = ([100] * 7, [200], [1, 100, 2])

    @pytest.mark.parametrize("shuffled", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_drop(self, tmp_path: Path, kind: str, shuffled: bool) -> None:
        pipe = begin(kind, tmp_path, list(self.GROUPS))
        ranks = run((pipe.shuffle(300) if shuffled else pipe).batch(50, drop_last=True), 4)
        assert [len(rank[0]) for rank in ranks] == [5] * 4
        found = [i for rank in ranks for i in column(rank[0])]
        assert len(found) == len(set(found)) == 1000
        assert [len(batch) for rank in ranks for batch in rank[0]] == [50] * 20

    @pytest.mark.parametrize("on_uneven", ["drop", "pad", "uneven"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_length_is_exact_on_each_rank(self, tmp_path: Path, kind: str, on_uneven: Any) -> None:
        pipe = begin(kind, tmp_path, list(self.GROUPS)).batch(7)
        if kind == "iterable" and on_uneven != "uneven":
            return
        for rank in range(4):
            with pipe.loader(rank=rank, world_size=4, on_uneven=on_uneven) as loader:
                if kind == "iterable":
                    with pytest.raises(TypeError):
                        len(loader)
                else:
                    assert len(loader) == len(list(loader))

    def test_length_of_a_list_is_exact_on_each_rank(self) -> None:
        for on_uneven in ("drop", "uneven"):
            for rank in range(4):
                pipe = intune.from_iterable(list(range(30))).batch(3)
                with pipe.loader(rank=rank, world_size=4, on_uneven=on_uneven) as loader:
                    assert len(loader) == len(list(loader))

    @pytest.mark.parametrize("kind", ["parquet", "map-style"])
    def test_all_ranks_agree_on_the_order_of_the_epoch(self, tmp_path: Path, kind: str) -> None:
        """Epochs differ, ranks share rows without overlap in each, and the same seed gives the same again."""
        pipe = begin(kind, tmp_path, list(self.GROUPS)).shuffle(100)
        ranks = run(pipe.batch(50), 3, epochs=3, seed=4, on_uneven="uneven")
        epochs = [[column(rank[epoch]) for rank in ranks] for epoch in range(3)]
        for epoch in epochs:
            assert_exactly_once([i for rank in epoch for i in rank], 1003)
        assert epochs[0] != epochs[1] != epochs[2]
        assert [set(rank) for rank in epochs[0]] != [set(rank) for rank in epochs[1]]
        again = run(pipe.batch(50), 3, epochs=3, seed=4, on_uneven="uneven")
        assert [[column(rank[epoch]) for rank in again] for epoch in range(3)] == epochs

    def test_without_a_shuffle_ranks_take_consecutive_rows(self, tmp_path: Path) -> None:
        ranks = run(begin("parquet", tmp_path, list(self.GROUPS)).batch(50), 4, on_uneven="uneven")
        assert [i for rank in ranks for i in column(rank[0])] == list(range(1003))

    def test_an_iterable_goes_round(self, tmp_path: Path) -> None:
        ranks = run(begin("iterable", tmp_path, [[11]]).batch(2), 3, on_uneven="uneven")
        assert [column(rank[0]) for rank in ranks] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


class TestFewerUnitsThanRanks:
    @pytest.mark.parametrize("shuffled", [False, True])
    def test_row_groups_are_split(self, tmp_path: Path, shuffled: bool) -> None:
        pipe = begin("parquet", tmp_path, [[50, 50]])
        ranks = run((pipe.shuffle(40) if shuffled else pipe).batch(5), 4)
        assert [len(rank[0]) for rank in ranks] == [5] * 4
        assert_exactly_once([i for rank in ranks for i in column(rank[0])], 100)

    def test_streamed_row_groups_are_split(self, tmp_path: Path) -> None:
        write(tmp_path, [97])
        ranks = run(intune.read_parquet(tmp_path, block_rows=10).batch(5), 4, on_uneven="uneven")
        assert [i for rank in ranks for i in column(rank[0])] == list(range(97))

    def test_fewer_rows_than_ranks_is_refused_at_the_start(self, tmp_path: Path) -> None:
        pipe = begin("parquet", tmp_path, [[3]]).batch(5)
        with pytest.raises(PipelineError, match="3 rows for 4 ranks"):
            pipe.loader(rank=0, world_size=4)

    @pytest.mark.parametrize("kind", KINDS)
    def test_fewer_rows_than_ranks_by_the_rule_chosen(self, tmp_path: Path, kind: str) -> None:
        pipe = begin(kind, tmp_path, [[3]]).batch(5)
        assert run(pipe, 4, on_uneven="drop") == [[[]]] * 4
        uneven = run(pipe, 4, on_uneven="uneven")
        assert_exactly_once([i for rank in uneven for i in column(rank[0])], 3)
        if kind != "iterable":
            padded = run(pipe, 4, on_uneven="pad")
            assert [len(column(rank[0])) for rank in padded] == [1] * 4
            assert set(column([batch for rank in padded for batch in rank[0]])) == {0, 1, 2}

    @pytest.mark.parametrize("kind", ["map-style", "list"])
    def test_known_lengths_of_samples_are_checked_too(self, kind: str) -> None:
        pipe = intune.from_dataset(Rows(3)) if kind == "map-style" else intune.from_iterable([0, 1, 2])
        with pytest.raises(PipelineError, match="3 rows for 4 ranks"):
            pipe.loader(rank=0, world_size=4)


class TestCountsThatCouldDiffer:
    @pytest.mark.parametrize("add", [lambda p: p.filter(lambda i: True), lambda p: p.flat_map(lambda i: [i])])
    def test_what_changes_the_number_of_rows_is_refused(self, tmp_path: Path, add: Any) -> None:
        pipe = add(begin("parquet", tmp_path, [[10]]))
        with pytest.raises(PipelineError, match="on_uneven='uneven'"):
            pipe.loader(rank=0, world_size=2)
        pipe.loader(rank=0, world_size=2, on_uneven="uneven").close()
        pipe.loader().close()

    def test_a_map_that_changes_the_number_of_rows_raises_on_ranks(self, tmp_path: Path) -> None:
        pipe = begin("parquet", tmp_path, [[10, 10]]).map(lambda block: block.slice(1), name="cut")
        with pytest.raises(ValueError, match="map gave 9 rows for a block of 10"):
            run(pipe.batch(2), 2)
        ranks = run(pipe.batch(2), 2, on_uneven="uneven")
        assert sorted(i for rank in ranks for i in column(rank[0])) == [*range(1, 10), *range(11, 20)]


class TestWhoIsWhich:
    def test_the_environment_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = begin("map-style", tmp_path, [[10]]).batch(5)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pipe.loader() as loader:
            assert column(list(loader)) == [5, 6, 7, 8, 9]
        with pipe.loader(rank=0, world_size=2) as loader:
            assert column(list(loader)) == [0, 1, 2, 3, 4]

    def test_nonsense_in_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "one")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(PipelineError, match="RANK='one'"):
            begin("map-style", tmp_path, [[10]]).loader()

    def test_a_sampler_has_this_ranks_rows_already(self) -> None:
        pipe = intune.from_dataset(Rows(10), sampler=[8, 6, 4]).batch(2)
        with pipe.loader(rank=1, world_size=2) as loader:
            assert column(list(loader)) == [8, 6, 4]
            assert len(loader) == 2
