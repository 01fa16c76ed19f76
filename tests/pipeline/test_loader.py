"""The loader as a training loop meets it: rows, lengths, epochs, order, bounds on what runs ahead."""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Loader, LoaderError, Pipeline, SourceError
from intune._compose import build_loader
from intune.pipeline.options import LoaderOptions
from intune.testing import ManualClock, assert_exactly_once

from .resting import settle

pytestmark = pytest.mark.timeout(180)


class Rows:
    """A map-style dataset: row i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index


class Stream:
    """Begins anew each time and does not say how long it is."""

    def __init__(self, n: int | None) -> None:
        self.n, self.given = n, 0

    def __iter__(self) -> Iterator[int]:
        for i in itertools.count() if self.n is None else range(self.n):
            self.given += 1
            yield i


def write(folder: Path, *files: list[int], start: int = 0) -> Path:
    """Parquet files, each with row groups of the given sizes; `id` counts through all of them."""
    folder.mkdir(exist_ok=True)
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"{number:03}.parquet", pa.schema({"id": pa.int64()})) as writer:
            for rows in groups:
                writer.write_table(
                    pa.table({"id": pa.array(np.arange(start, start + rows))}), row_group_size=max(rows, 1)
                )
                start += rows
    return folder


def ids(batches: Any) -> list[int]:
    """The ids of all batches, in the order in which they came."""
    found: list[int] = []
    for batch in batches:
        if isinstance(batch, int):
            found.append(batch)
        else:
            found += (batch if isinstance(batch, np.ndarray) else batch["id"].to_numpy(zero_copy_only=False)).tolist()
    return found


def sources(folder: Path, n: int) -> dict[str, Pipeline]:
    groups = [13] * (n // 13) + [n % 13]
    return {
        "list": intune.from_iterable(list(range(n))),
        "iterable": intune.from_iterable(Stream(n)),
        "map-style": intune.from_dataset(Rows(n)),
        "parquet": intune.read_parquet(write(folder, groups[:3], groups[3:])),
    }


KINDS = ["list", "iterable", "map-style", "parquet"]


class TestEachRowOnce:
    """Rows of an epoch depend on neither the source's kind nor on how many work."""

    @pytest.mark.parametrize("cpus", [1, 2, 4, 7])
    @pytest.mark.parametrize("kind", KINDS)
    def test_batches(self, tmp_path: Path, kind: str, cpus: int) -> None:
        with sources(tmp_path, 103)[kind].batch(10).loader(cpus=cpus) as loader:
            batches = list(loader)
        assert ids(batches) == list(range(103))
        assert [len(batch) if isinstance(batch, np.ndarray) else batch.num_rows for batch in batches] == [10] * 10 + [3]

    @pytest.mark.parametrize("cpus", [1, 4])
    @pytest.mark.parametrize("kind", KINDS)
    def test_shuffled(self, tmp_path: Path, kind: str, cpus: int) -> None:
        with sources(tmp_path, 103)[kind].shuffle(40, seed=3).batch(10).loader(cpus=cpus) as loader:
            first, second = ids(loader), ids(loader)
        assert_exactly_once(first, 103)
        assert_exactly_once(second, 103)
        assert first != second
        assert first != list(range(103))

    @pytest.mark.parametrize("kind", KINDS)
    def test_order_does_not_depend_on_how_many_work(self, tmp_path: Path, kind: str) -> None:
        pipe = sources(tmp_path, 211)[kind].shuffle(64).batch(16)
        runs = []
        for cpus in (1, 2, 5):
            with pipe.loader(cpus=cpus, seed=11) as loader:
                runs.append([ids(loader), ids(loader)])
        assert runs[0] == runs[1] == runs[2]

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_order_each_row_still_comes_once(self, tmp_path: Path, kind: str) -> None:
        pipe = sources(tmp_path, 500)[kind]
        with pipe.map(lambda item: item).shuffle(50).batch(8).loader(cpus=4, ordered=False) as loader:
            for _ in range(3):
                batches = list(loader)
                assert_exactly_once(ids(batches), 500)
                assert len(batches) == 63

    @pytest.mark.parametrize("n", [0, 1])
    @pytest.mark.parametrize("kind", ["list", "iterable", "map-style"])
    def test_hardly_anything(self, tmp_path: Path, kind: str, n: int) -> None:
        pipe = {"list": intune.from_iterable([0] * n), "iterable": intune.from_iterable(Stream(n))}.get(
            kind, intune.from_dataset(Rows(n))
        )
        for ordered in (True, False):
            with pipe.shuffle(3).batch(10).loader(ordered=ordered) as loader:
                assert [len(batch) for batch in loader] == [1] * n
                assert [len(batch) for batch in loader] == [1] * n


class TestEmptyFiles:
    """Zero rows contribute nothing and change nothing."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "data", [0], [3, 0, 3], [5])

    def test_functions_never_see_zero_rows(self, folder: Path) -> None:
        seen: list[int] = []
        pipe = intune.read_parquet(folder).map(lambda block: seen.append(block.num_rows) or block)
        with pipe.batch(4).loader() as loader:
            assert ids(loader) == list(range(11))
        assert sorted(seen) == [3, 3, 5]

    def test_ranks_share_the_rows(self, folder: Path) -> None:
        found = []
        for rank in range(2):
            with intune.read_parquet(folder).batch(2, drop_last=True).loader(rank=rank, world_size=2) as loader:
                batches = list(loader)
            assert [batch.num_rows for batch in batches] == [2, 2]
            found += ids(batches)
        assert len(set(found)) == 8

    @pytest.mark.parametrize(
        "rest", [lambda pipe: pipe, lambda pipe: pipe.shuffle(4).batch(2), lambda pipe: pipe.unbatch()]
    )
    def test_nothing_but_empty_files(self, tmp_path: Path, rest: Callable[[Pipeline], Pipeline]) -> None:
        pipe = rest(intune.read_parquet(write(tmp_path / "empty", [0], [0], [0, 0])))
        with pipe.loader(epochs=2) as loader:
            assert list(loader) == []
            assert list(loader) == []


class TestLength:
    """Exact, or refused; never a guess."""

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("kind", ["list", "map-style", "parquet"])
    @pytest.mark.parametrize("shuffled", [False, True])
    def test_batches(self, tmp_path: Path, kind: str, drop_last: bool, shuffled: bool) -> None:
        pipe = sources(tmp_path, 103)[kind]
        pipe = pipe.shuffle(17) if shuffled else pipe
        with pipe.batch(10, drop_last=drop_last).map(lambda batch: batch).loader() as loader:
            assert len(loader) == (10 if drop_last else 11)
            assert sum(1 for _ in loader) == len(loader)

    def test_row_groups_of_odd_sizes(self, tmp_path: Path) -> None:
        pipe = intune.read_parquet(write(tmp_path, [7, 13, 1, 29]))
        with pipe.batch(8).loader(cpus=3) as loader:
            assert [batch.num_rows for batch in loader] == [8, 8, 8, 8, 8, 8, 2]
            assert len(loader) == 7
        with pipe.batch(8, drop_last=True).loader(cpus=3) as loader:
            assert len(loader) == 6 == len(list(loader))

    def test_a_filter_makes_it_unknown(self, tmp_path: Path) -> None:
        pipe = intune.read_parquet(write(tmp_path, [7, 13, 1, 29]))
        with pipe.filter(lambda block: block.column("id").to_numpy() % 2 == 0).batch(8).loader(cpus=3) as loader:
            assert [batch.num_rows for batch in loader] == [8, 8, 8, 1]
            with pytest.raises(TypeError, match="cannot be known"):
                len(loader)

    @pytest.mark.parametrize(
        "pipe",
        [
            intune.from_iterable(Stream(3)),
            intune.from_iterable(range(3)).flat_map(lambda i: [i]),
            intune.from_iterable(range(3)).filter(lambda i: True).batch(2),
        ],
        ids=["iterable", "flat_map", "filter"],
    )
    def test_what_cannot_be_known_is_refused(self, pipe: Pipeline) -> None:
        with pipe.loader() as loader, pytest.raises(TypeError, match="cannot be known"):
            len(loader)

    @pytest.mark.parametrize("kind", ["list", "map-style"])
    def test_samples_count_as_items(self, tmp_path: Path, kind: str) -> None:
        with sources(tmp_path, 29)[kind].map(lambda i: i).loader() as loader:
            assert len(loader) == 29 == len(list(loader))

    def test_rows_of_files_count_as_samples(self, tmp_path: Path) -> None:
        with intune.read_parquet(write(tmp_path, [5, 6])).shuffle(4).unbatch().loader() as loader:
            assert len(loader) == 11 == len(list(loader))

    def test_a_length_that_was_promised_is_kept(self, tmp_path: Path) -> None:
        pipe = intune.read_parquet(write(tmp_path, [5, 6])).map(lambda block: block.slice(0, 4), name="cut")
        with pipe.batch(2).loader() as loader:
            assert len(loader) == 6
            with pytest.raises(ValueError, match="map gave 4 rows for a block of 5") as caught:
                list(loader)
        assert any("'cut'" in note for note in caught.value.__notes__)

    def test_list_of_a_loader_is_no_promise(self, tmp_path: Path) -> None:
        """`list` asks for the length by itself; a loop over the same loader would just go on."""
        pipe = intune.read_parquet(write(tmp_path, [5, 6])).map(lambda block: block.slice(0, 4))
        with pipe.batch(2).loader() as loader:
            assert ids(list(loader)) == [0, 1, 2, 3, 5, 6, 7, 8]

    def test_a_sampler_says_how_many(self) -> None:
        with intune.from_dataset(Rows(100), sampler=[5, 3, 99, 3]).batch(3).loader() as loader:
            assert len(loader) == 2
            assert ids(loader) == [5, 3, 99, 3]


class TestEpochs:
    def test_the_kth_iteration_is_epoch_k_also_when_one_was_left(self) -> None:
        pipe = intune.from_iterable(range(60)).shuffle(20).batch(7)
        with pipe.loader(seed=5) as loader:
            whole = [ids(loader) for _ in range(4)]
        assert len({tuple(epoch) for epoch in whole}) == 4
        with pipe.loader(seed=5) as loader:
            assert ids(loader) == whole[0]
            for _ in loader:
                break
            assert ids(loader) == whole[2]
            loader.set_epoch(1)
            assert ids(loader) == whole[1]
            assert ids(loader) == whole[2]
            loader.set_epoch(0)
            assert ids(loader) == whole[0]

    def test_an_iterator_that_was_never_asked_begins_nothing(self) -> None:
        with intune.from_iterable(range(30)).shuffle(30).batch(30).loader() as loader:
            iter(loader), iter(loader)
            first = ids(loader)
            loader.set_epoch(0)
            assert ids(loader) == first

    @pytest.mark.parametrize("epoch", [-1, 1.5, "2", None, True])
    def test_epochs_are_numbers(self, epoch: Any) -> None:
        with intune.from_iterable(range(3)).loader() as loader, pytest.raises((ValueError, TypeError), match="epoch"):
            loader.set_epoch(epoch)

    def test_another_seed_gives_another_order(self) -> None:
        orders = []
        for seed in (0, 1, 0):
            with intune.from_iterable(range(50)).shuffle(50).loader(seed=seed) as loader:
                orders.append(ids(loader))
        assert orders[0] == orders[2] != orders[1]

    def test_a_seed_of_the_shuffle_outranks_the_loaders(self) -> None:
        orders = []
        for seed in (0, 1):
            with intune.from_iterable(range(50)).shuffle(50, seed=9).loader(seed=seed) as loader:
                orders.append(ids(loader))
        assert orders[0] == orders[1]

    @pytest.mark.parametrize("ordered", [True, False])
    def test_epochs_known_ahead_give_the_same(self, tmp_path: Path, ordered: bool) -> None:
        pipe = intune.read_parquet(write(tmp_path, [5] * 10, [7] * 4)).shuffle(20).batch(4)
        with pipe.loader(seed=1) as loader:
            whole = [ids(loader) for _ in range(4)]
        with pipe.loader(seed=1, epochs=3, ordered=ordered) as loader:
            ahead = [ids(loader) for _ in range(4)]  # more than was said is allowed
        if ordered:
            assert ahead == whole
        else:
            for epoch in ahead:
                assert_exactly_once(epoch, 78)

    def test_the_next_epoch_begins_while_this_one_ends(self, tmp_path: Path) -> None:
        opened: list[int] = []
        pipe = intune.read_parquet(write(tmp_path, [4] * 3)).map(
            lambda block: opened.append(block.column("id")[0].as_py()) or block
        )
        with pipe.batch(4).loader(cpus=1, epochs=2, prefetch=3) as loader:
            running = iter(loader)
            next(running)
            settle(loader)
            assert opened[:3] == [0, 4, 8]
            assert len(opened) > 3
            assert ids(running) == list(range(4, 12))
            assert ids(loader) == list(range(12))
            settle(loader)
        assert len(opened) == 6

    def test_what_was_begun_ahead_is_dropped_by_set_epoch(self, tmp_path: Path) -> None:
        pipe = intune.read_parquet(write(tmp_path, [4] * 5)).shuffle(8).batch(4)
        with pipe.loader(seed=2) as loader:
            loader.set_epoch(2)
            expected = ids(loader)
        with pipe.loader(seed=2, epochs=5) as loader:
            ids(loader)
            loader.set_epoch(2)
            assert ids(loader) == expected
            settle(loader)
        assert loader._engine.context.ledger.charged == 0

    def test_a_generator_is_refused_at_the_second_epoch(self) -> None:
        with intune.from_iterable(i for i in range(5)).loader() as loader:
            assert list(loader) == [0, 1, 2, 3, 4]
            with pytest.raises(SourceError, match="read only once"):
                list(loader)

    def test_a_generator_is_refused_also_if_it_was_left_early(self) -> None:
        with intune.from_iterable(i for i in range(5)).loader() as loader:
            for _ in loader:
                break
            with pytest.raises(SourceError, match="read only once"):
                list(loader)

    def test_a_sampler_is_told_the_epoch(self) -> None:
        class Sampler:
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                return iter(range(self.epoch, self.epoch + 3))

        with intune.from_dataset(Rows(10), sampler=Sampler()).loader() as loader:
            assert [ids(loader) for _ in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]

    def test_a_sampler_that_asks_for_what_is_not_there(self) -> None:
        with intune.from_dataset(Rows(3), sampler=[0, 7]).loader() as loader, pytest.raises(SourceError, match="7"):
            list(loader)


class TestIterators:
    def test_each_is_a_new_object(self) -> None:
        with intune.from_iterable(range(3)).loader() as loader:
            assert iter(loader) is not iter(loader)
            iterator = iter(loader)
            assert iter(iterator) is iterator

    def test_a_second_live_one_is_refused(self) -> None:
        with intune.from_iterable(range(100)).loader() as loader:
            first, second = iter(loader), iter(loader)
            assert next(first) == 0
            with pytest.raises(LoaderError, match="another iterator of this loader is live"):
                next(second)
            assert next(first) == 1
            with pytest.raises(LoaderError, match="live"):
                list(zip(loader, loader, strict=True))
            assert list(first) == list(range(2, 100))
            assert list(loader) == list(range(100))

    def test_dropping_the_first_makes_room(self) -> None:
        with intune.from_iterable(range(100)).loader() as loader:
            first = iter(loader)
            next(first)
            del first
            assert next(iter(loader)) == 0

    def test_an_iterator_that_has_ended_stays_so(self) -> None:
        with intune.from_iterable(range(2)).loader() as loader:
            iterator = iter(loader)
            assert list(iterator) == [0, 1]
            assert list(iterator) == []
            with pytest.raises(StopIteration):
                next(iterator)
            assert list(loader) == [0, 1]

    def test_two_loaders_do_not_meet(self) -> None:
        pipe = intune.from_iterable(range(40)).map(lambda i: i)
        with pipe.loader() as one, pipe.loader() as other:
            assert list(zip(one, other, strict=True)) == [(i, i) for i in range(40)]

    def test_leaving_early_and_a_full_pass_after_it(self, tmp_path: Path) -> None:
        for kind, pipe in sources(tmp_path, 300).items():
            with pipe.map(lambda item: item).shuffle(30).batch(10).loader(cpus=3) as loader:
                for _ in range(5):
                    for number, _batch in enumerate(loader):
                        if number == 2:
                            break
                assert_exactly_once(ids(loader), 300), kind
                settle(loader)
                assert loader._engine.context.ledger.charged == 0

    def test_take_is_for_a_look(self) -> None:
        pipe = intune.from_iterable(Stream(None)).batch(3)
        assert ids(pipe.take(2)) == [0, 1, 2, 3, 4, 5]
        assert pipe.take(0) == []
        assert ids(intune.from_iterable(range(4)).batch(3).take(9)) == [0, 1, 2, 3]

    def test_many_short_epochs_leave_no_thread_behind(self) -> None:
        with intune.from_iterable(range(5)).map(lambda i: i).batch(2).loader(cpus=3) as loader:
            list(loader)
            threads = threading.active_count()
            for _ in range(60):
                assert len(list(loader)) == 3
            assert threading.active_count() <= threads + 3


class TestOrder:
    """One slow item: what others may do meanwhile."""

    def run(self, n: int, slow: Callable[[int], None], **options: Any) -> Loader:
        def work(batch: np.ndarray) -> np.ndarray:
            slow(int(batch[0]))
            return batch

        return intune.from_iterable(range(n)).batch(1).map(work, waits=True).loader(cpus=4, **options)

    def test_in_order_others_are_done_meanwhile(self) -> None:
        """The first item ends only when all others have: only so can the test come to its end."""
        left = threading.Semaphore(0)

        def slow(number: int) -> None:
            if number == 10:  # the ones before measure what the source costs
                for _ in range(53):
                    assert left.acquire(timeout=30)
            elif number > 10:
                left.release()

        with self.run(64, slow, max_ahead=64) as loader:
            assert ids(loader) == list(range(64))

    def test_in_order_no_more_than_allowed_run_ahead(self) -> None:
        reached: list[int] = []
        go = threading.Event()

        def slow(number: int) -> None:
            reached.append(number)
            if number == 10:
                assert go.wait(30)

        with self.run(200, slow, max_ahead=8) as loader:
            running = iter(loader)
            got = [next(running)[0] for _ in range(10)]
            deadline = time.monotonic() + 30
            while len(reached) < 18 and time.monotonic() < deadline:
                time.sleep(0.001)
            settle(loader, 1)
            assert sorted(reached) == list(range(18))
            go.set()
            assert got + ids(running) == list(range(200))

    def test_as_they_come(self) -> None:
        go = threading.Event()

        def slow(number: int) -> None:
            if number == 10:
                assert go.wait(30)

        with self.run(64, slow, ordered=False) as loader:
            running = iter(loader)
            got = [int(next(running)[0]) for _ in range(63)]
            assert 10 not in got
            go.set()
            assert [int(batch[0]) for batch in running] == [10]
            assert_exactly_once([*got, 10], 64)

    def test_as_they_come_has_no_position(self) -> None:
        with (
            self.run(3, lambda number: None, ordered=False) as loader,
            pytest.raises(LoaderError, match="ordered=True"),
        ):
            loader.state_dict()


class TestPausedConsumer:
    """A training loop that takes one batch and then does something else for long: nothing grows."""

    CHAINS: ClassVar[dict[str, Callable[[Pipeline], Pipeline]]] = {
        "samples": lambda pipe: pipe.map(lambda i: i),
        "batch": lambda pipe: pipe.map(lambda i: i).batch(10),
        "map after batch": lambda pipe: pipe.batch(10).map(lambda batch: batch),
        "shuffle": lambda pipe: pipe.shuffle(50).batch(10),
        "two shuffles": lambda pipe: pipe.shuffle(50).map(lambda i: i).shuffle(20).batch(10),
        "flat_map": lambda pipe: pipe.flat_map(lambda i: [i] * 3).batch(10),
        "endless flat_map": lambda pipe: pipe.flat_map(lambda i: itertools.count(i)).batch(10),
        "filter": lambda pipe: pipe.filter(lambda i: i % 3 == 0).batch(10),
    }

    @pytest.mark.parametrize("ordered", [True, False])
    @pytest.mark.parametrize("chain", CHAINS)
    def test_bounded(self, chain: str, ordered: bool) -> None:
        stream = Stream(None)
        pipe = self.CHAINS[chain](intune.from_iterable(stream))
        with pipe.loader(cpus=2, max_ahead=4, prefetch=2, ordered=ordered) as loader:
            running = iter(loader)
            next(running)
            settle(loader)
            first, bytes_held = stream.given, loader._engine.context.ledger.charged
            # Samples go in runs of up to 512, and so many runs may be ahead in each of at most three segments.
            assert first <= 3 * (4 + 2) * 512
            loader._engine.refresh()
            settle(loader)
            assert stream.given == first
            assert loader._engine.context.ledger.charged == bytes_held
            for _ in range(50):
                next(running)
            settle(loader)
            assert loader._engine.context.ledger.charged <= 40 * max(bytes_held, 1 << 16)
            for run in loader._engine.runs:
                assert len(run.delivery.ready) <= 2 + 4  # those in hand when two waited are finished
                assert all(segment.live <= 2 * (4 + 2) for segment in run.segments)

    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_batches_that_wait(self, prefetch: int) -> None:
        made: list[int] = []
        pipe = intune.from_iterable(Stream(None)).batch(1)
        pipe = pipe.map(lambda batch: made.append(int(batch[0])) or batch, waits=False)  # else as many as may wait
        with pipe.loader(cpus=1, prefetch=prefetch, max_ahead=16) as loader:
            running = iter(loader)
            for taken in range(1, 8):
                next(running)
                if taken > 3:  # until sizes are known from three samples, one goes at a time
                    settle(loader)
                    assert made == list(range(taken + prefetch))

    def test_units_of_files(self, tmp_path: Path) -> None:
        folder = write(tmp_path, [4] * 50)
        for ordered in (True, False):
            opened: list[int] = []
            pipe = intune.read_parquet(folder).map(lambda block, opened=opened: opened.append(1) or block)
            with pipe.batch(2).loader(cpus=2, max_ahead=3, prefetch=1, ordered=ordered) as loader:
                next(iter_kept := iter(loader))
                settle(loader)
                assert len(opened) <= 12
                del iter_kept


class TestFigures:
    def test_stats_of_a_lifetime(self) -> None:
        with intune.from_iterable(range(40)).map(lambda i: i).batch(10).loader() as loader:
            assert loader.stats().batches == 0
            assert loader.stats().seconds == 0
            list(loader), list(loader)
            stats = loader.stats()
            assert (stats.batches, stats.rows) == (8, 80)
            assert list(stats.stages) == ["from_iterable", "map", "batch"]
            assert [stage.rows for stage in stats.stages.values()] == [80, 80, 80]
            assert stats.stages["batch"].items == 8
            assert 0 <= stats.wait_seconds <= stats.seconds
            assert stats.skipped == ()

    def test_explain_and_journal(self) -> None:
        with intune.from_iterable(range(40)).loader() as loader:
            assert "measured" in loader.explain()
            list(loader)
            assert loader.journal
            assert all(isinstance(line, dict) for line in loader.journal)

    def test_explain_after_a_pause_speaks_of_the_last_work(self) -> None:
        """A window in which the trainer only saved its model says nothing about the stages."""
        clock = ManualClock()
        pipe = intune.from_iterable(range(40)).batch(4)
        with build_loader(pipe, LoaderOptions(cpus=1), clock=clock) as loader:
            batches = iter(loader)
            next(batches)
            clock.advance(0.1)
            before = loader.explain()
            assert "Stage batch:" in before
            control: Any = loader._control
            while control.last().consumer.steps or any(stage.items_out for stage in control.last().stages):
                clock.advance(2.0)
                control._controller.step()
            assert "Stage batch:" in loader.explain()

    def test_explain_of_a_run_that_ended_says_so_and_what_limited_it_for_longest(self) -> None:
        """The last window is one in which the source had nothing more, and then nothing went on at all."""
        clock = ManualClock()
        pipe = intune.from_iterable(range(40)).map(lambda i: (clock.advance(1.0), i)[1], name="work", max_concurrency=1)
        with build_loader(pipe.batch(4), LoaderOptions(cpus=1), clock=clock) as loader:
            batches = iter(loader)
            next(batches)
            assert "ended" not in loader.explain()
            list(batches)
            control: Any = loader._control
            for _ in range(3):
                control._controller.step()
                clock.advance(5.0)
            at_rest = loader.explain()
            assert at_rest.startswith("The run has ended or rests: no iterator is live. What limited it for ")
            assert "Stage work is the limit" in at_rest.splitlines()[1]
            assert "ended" not in next(map(lambda _: loader.explain(), loader))
        closed = loader.explain()
        assert closed.startswith("The run has ended: the loader is closed. What limited it for ")
        assert "Stage work is the limit" in closed.splitlines()[1]

    def test_explain_of_a_loader_that_was_closed_before_it_ran(self) -> None:
        loader = intune.from_iterable(range(40)).loader()
        loader.close()
        assert loader.explain() == (
            "The run has ended: the loader is closed; nothing was measured, as no stage finished anything."
        )

    def test_dropped_without_close_leaves_nothing(self) -> None:
        before = threading.active_count()
        loader = intune.from_iterable(range(1000)).map(lambda i: i).loader(cpus=3)
        running = iter(loader)
        next(running)
        del running, loader
        gc.collect()
        deadline = time.monotonic() + 30
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert threading.active_count() == before
