"""A state taken in the middle of an epoch goes on with exactly what was not delivered yet."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import intune
from intune import Loader, Pipeline, StateError
from intune.testing import assert_exactly_once, assert_same_after_resume
from intune.tuners import RandomMoves, Static

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

ROWS, BATCH = 1000, 10
STOPS = [0, 1, 37, 99, 100]


class Rows:
    """A map-style dataset: row i is i."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Stream:
    """Begins anew each time and does not say how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 ids in files of row groups of 1 to 60 rows."""
    path = tmp_path_factory.mktemp("rows")
    start = 0
    for number, size in enumerate((60, 1, 7, 33)):
        rows = 400 if number == 0 else 200
        pq.write_table(
            pa.table({"id": np.arange(start, start + rows)}), path / f"{number}.parquet", row_group_size=size
        )
        start += rows
    return path


def keep_most(item: Any) -> Any:
    """All but every seventh, for a filter."""
    if isinstance(item, int):
        return item % 7 != 0
    return np.asarray(item["id"]) % 7 != 0


def split(item: Any) -> Iterator[Any]:
    """Two children of each block, i % 3 of each sample."""
    if isinstance(item, int):
        yield from [item] * (item % 3)
    else:
        yield item.slice(0, item.num_rows // 3)
        yield item.slice(item.num_rows // 3)


def same(item: Any) -> Any:
    return item


def begin(kind: str, folder: Path) -> Pipeline:
    if kind == "parquet":
        return intune.read_parquet(folder, block_rows=25)
    return intune.from_dataset(Rows()) if kind == "map-style" else intune.from_iterable(Stream())


CHAINS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "batch": lambda pipe: pipe.batch(BATCH),
    "shuffle, batch": lambda pipe: pipe.shuffle(128, seed=3).batch(BATCH),
    "small shuffle": lambda pipe: pipe.shuffle(7).batch(64),
    "one window": lambda pipe: pipe.shuffle(5000).batch(BATCH),
    "filter before": lambda pipe: pipe.filter(keep_most).shuffle(100).batch(BATCH),
    "filter between": lambda pipe: pipe.shuffle(100).filter(keep_most).batch(BATCH),
    "flat_map before": lambda pipe: pipe.flat_map(split).shuffle(90).batch(BATCH),
    "flat_map between": lambda pipe: pipe.shuffle(90).flat_map(split).batch(BATCH),
    "flat_map, no shuffle": lambda pipe: pipe.flat_map(split).filter(keep_most).batch(BATCH),
    "two shuffles": lambda pipe: pipe.shuffle(64).map(same).shuffle(33).batch(BATCH),
    "drop_last": lambda pipe: pipe.shuffle(50).batch(64, drop_last=True),
    "no batch": lambda pipe: pipe.map(same),
    "no batch, flat_map, filter": lambda pipe: pipe.flat_map(split).filter(keep_most),
    "shuffle only": lambda pipe: pipe.shuffle(77),
    "map after": lambda pipe: pipe.shuffle(77).batch(BATCH).map(same),
}


def ids(items: Any) -> list[int]:
    found: list[int] = []
    for item in items:
        if isinstance(item, int):
            found.append(item)
        else:
            found += (item["id"].to_numpy(zero_copy_only=False) if hasattr(item, "schema") else item).tolist()
    return found


def stop_after(loader: Loader, batches: int) -> tuple[list[Any], str]:
    """The first batches and the state after them, as text."""
    with loader:
        running = iter(loader)
        head = [next(running) for _ in range(batches)]
        return head, json.dumps(loader.state_dict())


def go_on(loader: Loader, state: str, epochs: int = 1) -> list[list[Any]]:
    """What comes after a state: the rest of its epoch, and further epochs."""
    with loader:
        loader.load_state_dict(json.loads(state))
        return [[item for item in loader] for _ in range(epochs)]


class TestEveryChain:
    @pytest.mark.parametrize("chain", CHAINS)
    @pytest.mark.parametrize("kind", ["parquet", "map-style", "iterable"])
    def test_the_same_rest(self, folder: Path, kind: str, chain: str) -> None:
        pipe = CHAINS[chain](begin(kind, folder))
        with pipe.loader(cpus=2, seed=7) as loader:
            n = len([item for item in loader])
        stops = sorted({37 % n, n - 1})
        assert_same_after_resume(lambda: pipe.loader(cpus=2, seed=7), at=stops)

    @pytest.mark.parametrize("stop", STOPS)
    @pytest.mark.parametrize("kind", ["parquet", "map-style", "iterable"])
    def test_nothing_is_lost_or_twice_and_later_epochs_follow(self, folder: Path, kind: str, stop: int) -> None:
        pipe = begin(kind, folder).shuffle(128).batch(BATCH)
        with pipe.loader(cpus=2) as loader:
            whole = [ids(loader) for _ in range(3)]
        assert whole[0] != whole[1] != whole[2]
        head, state = stop_after(pipe.loader(cpus=2, prefetch=8), stop)
        if stop == 100:  # the end of an epoch: the next one follows, in its own order
            assert ids(head) == whole[0]
            begun = json.loads(state)["epoch"]  # 0 where nobody could know yet that nothing follows
            rest = [ids(epoch) for epoch in go_on(pipe.loader(cpus=2), state, 3 - begun)]
            assert rest == [[], *whole[1:]][begun:]
            return
        rest, following = go_on(pipe.loader(cpus=2), state, 2)
        assert len(rest) == 100 - stop
        assert ids(head) + ids(rest) == whole[0]
        assert_exactly_once(ids(head) + ids(rest), ROWS)
        assert ids(following) == whole[1]


class TestOtherChains:
    def test_unbatched(self, folder: Path) -> None:
        pipe = begin("parquet", folder).unbatch().map(lambda row: row["id"])
        for rest in (
            pipe,
            pipe.batch(BATCH),
            pipe.shuffle(60).batch(BATCH),
            begin("parquet", folder).shuffle(60).unbatch(),
        ):
            assert_same_after_resume(lambda rest=rest: rest.loader(cpus=2), at=[0, 1, 37, 99])

    def test_what_is_skipped_stays_so(self, folder: Path) -> None:
        def fails(item: Any) -> Any:
            if (item if isinstance(item, int) else item.column("id")[0].as_py()) % 7 == 3:
                raise ValueError("not this one")
            return item

        for kind in ("parquet", "map-style", "iterable"):
            pipe = begin(kind, folder).map(fails)
            for rest in (pipe.batch(BATCH), pipe.flat_map(split).shuffle(60).map(same).batch(BATCH)):
                assert_same_after_resume(lambda rest=rest: rest.loader(cpus=2, on_error="skip"), at=[1, 37])

    def test_a_sampler(self) -> None:
        class Sampler:
            epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                return iter(np.random.default_rng(self.epoch).permutation(ROWS)[:300].tolist())

        def loader() -> Loader:
            loader = intune.from_dataset(Rows(), sampler=Sampler()).map(same).batch(BATCH).loader(cpus=2)
            loader.set_epoch(4)
            return loader

        assert_same_after_resume(loader, at=[0, 1, 17, 29])

    def test_collated_batches(self) -> None:
        pipe = intune.from_iterable(Stream()).shuffle(60).batch(BATCH, collate=tuple).map(same)
        assert_same_after_resume(lambda: pipe.loader(cpus=2), at=[0, 1, 37, 99])

    def test_one_to_many_with_nothing_in_between(self, folder: Path) -> None:
        """Stops inside what one unit gives, with units that give nothing around it."""

        def spread(block: Any) -> list[Any]:
            return [block] * (0 if block.column("id")[0].as_py() % 2 else 5)

        pipe = begin("parquet", folder).flat_map(spread)
        assert_same_after_resume(lambda: pipe.loader(cpus=2), at=range(14))


class TestOtherMachine:
    """The state knows nothing of CPUs, executors, tuners and what was ahead."""

    OTHERS: ClassVar[dict[str, dict[str, Any]]] = {
        "one cpu": {"cpus": 1, "prefetch": 1, "max_ahead": 1},
        "many cpus": {"cpus": 16, "prefetch": 9, "max_ahead": 40},
        "random moves": {"cpus": 4, "tuner": RandomMoves(3)},
        "even": {"cpus": 3, "tuner": "even"},
        "epochs known": {"cpus": 2, "epochs": 3},
        "static": {"cpus": 3, "tuner": Static({"shuffle": 1, "batch": 2})},
    }

    @pytest.mark.parametrize("other", OTHERS)
    @pytest.mark.parametrize("kind", ["parquet", "map-style"])
    def test_other_options(self, folder: Path, kind: str, other: str) -> None:
        pipe = begin(kind, folder).map(same).shuffle(128).batch(BATCH)
        with pipe.loader(cpus=2) as loader:
            whole = ids(loader)
        head, state = stop_after(pipe.loader(cpus=2), 37)
        (rest,) = go_on(pipe.loader(**self.OTHERS[other]), state)
        assert ids(head) + ids(rest) == whole
        head, again = stop_after(pipe.loader(**self.OTHERS[other]), 37)
        if kind == "parquet":  # samples go in runs, whose bounds depend on time, and so does the first one needed
            assert json.loads(again) == json.loads(state)

    @pytest.mark.parametrize("kind", ["parquet", "iterable"])
    def test_other_executor(self, folder: Path, kind: str) -> None:
        threads = begin(kind, folder).map(same).filter(keep_most).shuffle(128).batch(BATCH)
        processes = (
            begin(kind, folder)
            .map(same, executor="process", max_concurrency=1)
            .filter(keep_most, executor="process", max_concurrency=1)
            .shuffle(128)
            .batch(BATCH)
        )
        with threads.loader(cpus=2) as loader:
            whole = ids(loader)
        for one, other in ((threads, processes), (processes, threads)):
            head, state = stop_after(one.loader(cpus=2), 37)
            (rest,) = go_on(other.loader(cpus=2), state)
            assert ids(head) + ids(rest) == whole

    def test_random_functions_go_on_with_the_same_numbers(self, folder: Path) -> None:
        def noise(block: Any, rng: np.random.Generator) -> Any:
            return {"id": block["id"].to_numpy(), "noise": rng.integers(1 << 60, size=block.num_rows)}

        pipe = begin("parquet", folder).map(noise, rng=True).shuffle(64).batch(BATCH)
        assert_same_after_resume(lambda: pipe.loader(cpus=2, seed=1), at=[1, 50, 99])
        samples = begin("iterable", folder).map(lambda i, rng: (i, rng.integers(1 << 60)), rng=True).batch(BATCH)
        assert_same_after_resume(lambda: samples.loader(cpus=2, seed=1), at=[1, 50, 99])


class TestNewProcess:
    SCRIPT = """
import json, sys
import intune
folder, state = sys.argv[1], sys.argv[2]
pipe = intune.read_parquet(folder, block_rows=25).shuffle(128).batch(10)
with pipe.loader(cpus=3, seed=7) as loader:
    loader.load_state_dict(json.loads(state))
    epochs = range(json.loads(state)["epoch"], 3)
    print(json.dumps({epoch: [row for batch in loader for row in batch["id"].to_pylist()] for epoch in epochs}))
"""

    @pytest.mark.parametrize("stop", [37, 100])
    def test_goes_on_there(self, folder: Path, stop: int) -> None:
        pipe = begin("parquet", folder).shuffle(128).batch(BATCH)
        with pipe.loader(cpus=2, seed=7) as loader:
            whole = [ids(loader) for _ in range(3)]
        head, state = stop_after(pipe.loader(cpus=2, seed=7, prefetch=8), stop)
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, str(folder), state],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.stderr == ""
        rest = json.loads(done.stdout)
        assert ids(head) + rest.get("0", []) == whole[0]
        assert [rest["1"], rest["2"]] == whole[1:]


class TestWhenTaken:
    def test_again_and_again(self, folder: Path) -> None:
        """A run that is stopped after every seventh batch and resumed gives what one without stops gives."""
        pipe = begin("parquet", folder).map(same).shuffle(50).flat_map(split).batch(BATCH)
        with pipe.loader(cpus=2) as loader:
            whole = ids(loader)
        got: list[int] = []
        state = None
        for _ in range(15):
            with pipe.loader(cpus=2) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                for number, batch in enumerate(loader):
                    got += ids([batch])
                    if number == 6:
                        state = json.dumps(loader.state_dict())
                        break
                else:
                    break
        assert got == whole

    def test_taking_it_changes_nothing(self, folder: Path) -> None:
        pipe = begin("parquet", folder).shuffle(50).batch(BATCH)
        with pipe.loader(cpus=2) as loader:
            whole = ids(loader)
        with pipe.loader(cpus=2) as loader:
            got = []
            for batch in loader:
                loader.state_dict()
                got += ids([batch])
                assert loader.state_dict() == loader.state_dict()
        assert got == whole

    def test_between_epochs_and_before_the_first(self, folder: Path) -> None:
        pipe = begin("parquet", folder).shuffle(50).batch(BATCH)
        with pipe.loader() as loader:
            whole = [ids(loader) for _ in range(3)]
        with pipe.loader() as loader:
            fresh = json.dumps(loader.state_dict())
            ids(loader)
            after_one = json.dumps(loader.state_dict())
            loader.set_epoch(2)
            before_third = json.dumps(loader.state_dict())
        assert ids(go_on(pipe.loader(), fresh)[0]) == whole[0]
        assert ids(go_on(pipe.loader(), after_one)[0]) == whole[1]
        assert ids(go_on(pipe.loader(), before_third)[0]) == whole[2]

    def test_loading_twice_and_changing_ones_mind(self, folder: Path) -> None:
        pipe = begin("parquet", folder).shuffle(50).batch(BATCH)
        _, early = stop_after(pipe.loader(), 10)
        _, late = stop_after(pipe.loader(), 60)
        with pipe.loader() as loader:
            whole = ids(loader)
            loader.load_state_dict(json.loads(late))
            loader.load_state_dict(json.loads(early))
            assert json.loads(json.dumps(loader.state_dict())) == json.loads(early)
            assert ids(loader) == whole[100:]
            loader.load_state_dict(json.loads(late))
            loader.set_epoch(0)
            assert ids(loader) == whole

    def test_is_refused_while_an_iterator_is_live(self, folder: Path) -> None:
        pipe = begin("parquet", folder).batch(BATCH)
        _, state = stop_after(pipe.loader(), 10)
        with pipe.loader() as loader:
            running = iter(loader)
            next(running)
            with pytest.raises(intune.LoaderError, match="live"):
                loader.load_state_dict(json.loads(state))
            del running

    def test_it_is_small_and_does_not_grow(self, folder: Path) -> None:
        pipe = begin("parquet", folder).flat_map(split).shuffle(50).shuffle(20).batch(BATCH)
        with pipe.loader() as loader:
            sizes = [len(json.dumps(loader.state_dict())) for _ in loader]
        assert max(sizes) < 2000
        assert max(sizes) - min(sizes) < 150

    def test_the_other_ranks_have_their_own(self, folder: Path) -> None:
        pipe = begin("parquet", folder).shuffle(100).batch(BATCH)
        for rank in range(3):
            options: dict[str, Any] = {"rank": rank, "world_size": 3, "seed": 2}
            assert_same_after_resume(lambda options=options: pipe.loader(**options), at=[0, 1, 20, 33])

    def test_padded_ranks_too(self, folder: Path) -> None:
        for kind in ("parquet", "map-style"):
            pipe = begin(kind, folder).batch(BATCH)
            options: dict[str, Any] = {"rank": 6, "world_size": 7, "on_uneven": "pad"}
            assert_same_after_resume(lambda pipe=pipe, options=options: pipe.loader(**options), at=[0, 1, 13, 14])


class TestRefusals:
    """A state of another loader is refused, and the message says what differs."""

    def state(self, folder: Path) -> dict[str, Any]:
        _, text = stop_after(begin("parquet", folder).map(same).shuffle(50).batch(BATCH).loader(), 3)
        state: dict[str, Any] = json.loads(text)
        return state

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda pipe: pipe.map(same).shuffle(51).batch(BATCH), "50.*51"),
            (lambda pipe: pipe.map(same).shuffle(50).batch(11), "10.*11"),
            (lambda pipe: pipe.map(same).shuffle(50).batch(BATCH, drop_last=True), "drop_last"),
            (lambda pipe: pipe.map(same).shuffle(50, seed=4).batch(BATCH), "seed"),
            (lambda pipe: pipe.map(keep_most, name="same").shuffle(50).batch(BATCH), "same.*keep_most"),
            (lambda pipe: pipe.map(same, rng=True).shuffle(50).batch(BATCH), "rng"),
            (lambda pipe: pipe.shuffle(50).batch(BATCH), "chain"),
        ],
    )
    def test_another_chain(self, folder: Path, change: Callable[[Pipeline], Pipeline], says: str) -> None:
        with change(begin("parquet", folder)).loader() as loader, pytest.raises(StateError, match=says):
            loader.load_state_dict(self.state(folder))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"seed": 1}, "seed is 0 in the state and 1 here"),
            ({"rank": 0, "world_size": 2}, "world_size is 1 .* 2 here"),
        ],
    )
    def test_another_share(self, folder: Path, options: dict[str, Any], says: str) -> None:
        with begin("parquet", folder).map(same).shuffle(50).batch(BATCH).loader(**options) as loader:  # noqa: SIM117
            with pytest.raises(StateError, match=says):
                loader.load_state_dict(self.state(folder))

    def test_other_files(self, folder: Path, tmp_path: Path) -> None:
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "0.parquet")
        with begin("parquet", tmp_path).map(same).shuffle(50).batch(BATCH).loader() as loader:  # noqa: SIM117
            with pytest.raises(StateError, match="source"):
                loader.load_state_dict(self.state(folder))

    def test_the_same_files_in_another_place(self, folder: Path, tmp_path: Path) -> None:
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        with begin("parquet", tmp_path).map(same).shuffle(50).batch(BATCH).loader() as loader:
            loader.load_state_dict(self.state(folder))
            assert len(list(loader)) == 97

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda state: None,
            lambda state: [],
            lambda state: {},
            lambda state: {**state, "version": 99},
            lambda state: {**state, "plan_version": 0},
            lambda state: {**state, "epoch": "x"},
            lambda state: {**state, "source": -1},
            lambda state: {**state, "sequencers": [{"emission": 1, "row": 0}]},
            lambda state: {**state, "sequencers": [{"emission": 1}]},
            lambda state: {**state, "sequencers": 3},
            lambda state: {key: value for key, value in state.items() if key != "drop"},
            lambda state: {key: value for key, value in state.items() if key != "identity"},
        ],
    )
    def test_what_is_no_state_or_damaged(self, folder: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
        with begin("parquet", folder).map(same).shuffle(50).batch(BATCH).loader() as loader:
            with pytest.raises(StateError):
                loader.load_state_dict(spoil(self.state(folder)))
            assert_exactly_once(ids(loader), ROWS)

    def test_positions_that_contradict_each_other(self, folder: Path) -> None:
        state = self.state(folder)
        for level in state["sequencers"]:
            level["row"] += 10_000
        with begin("parquet", folder).map(same).shuffle(50).batch(BATCH).loader() as loader:
            loader.load_state_dict(state)
            with pytest.raises((StateError, ValueError)):
                list(loader)
