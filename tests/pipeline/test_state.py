"""Saved positions: what tells one loader from another, and what is refused."""

import copy
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune
from intune import StateError
from intune.pipeline.chain import Pipeline
from intune.pipeline.run import Position, Share
from intune.pipeline.state import digest, identity, make_state, read_state
from intune.sources.samples import DatasetSource, IterableSource


def double(value: int) -> int:
    return value * 2


def keep(value: int) -> bool:
    return value > 0


class Scale:
    def __call__(self, value: int) -> int:
        return value


def chain(**changes: Any) -> Pipeline:
    """A chain; changes name what is different."""
    options = {"n": 10, "function": double, "rng": False, "rows": 8, "seed": None, "size": 3, "drop_last": False}
    options |= changes
    pipe = Pipeline(changes.get("source") or IterableSource(list(range(options["n"]))))
    pipe = pipe.map(options["function"], name=options.get("name"), rng=options["rng"]).filter(keep)
    pipe = pipe.shuffle(options["rows"], seed=options["seed"])
    return pipe.batch(options["size"], drop_last=options["drop_last"], collate=options.get("collate"))


def known(share: Share | None = None, **changes: Any) -> dict[str, Any]:
    return identity(chain(**changes), share or Share())


numbers = st.integers(0, 2**60)
positions = st.builds(Position, numbers, st.tuples(*[st.tuples(numbers, numbers)] * 2), numbers)


class TestRoundTrip:
    @given(numbers, positions)
    def test_through_text(self, epoch: int, position: Position) -> None:
        state = make_state(known(), epoch, position)
        assert read_state(json.loads(json.dumps(state)), known(), 2) == (epoch, position)
        assert read_state(state, known(), 2) == (epoch, position)

    def test_of_a_chain_that_has_not_begun(self) -> None:
        state = json.loads(json.dumps(make_state(known(), 5, Position())))
        assert read_state(state, known(), 2) == (5, Position())

    def test_is_json_also_where_a_source_has_tuples(self) -> None:
        class Tuples(IterableSource):
            def identity(self) -> dict[str, Any]:
                return {"files": [("a", 1), ("b", 2)], 5: None}

        mine = known(source=Tuples([1]))
        state = make_state(mine, 0, Position())
        assert state == json.loads(json.dumps(state))
        assert read_state(state, mine, 2) == (0, Position())

    def test_is_small(self) -> None:
        position = Position(10**9, ((10**9, 10**9), (10**9, 10**9)), 10**6)
        assert len(json.dumps(make_state(known(), 1000, position))) < 2000

    def test_is_not_changed_with_what_it_was_made_of(self) -> None:
        mine = known()
        state = make_state(mine, 0, Position())
        before = copy.deepcopy(state)
        mine["source"]["length"] = -1
        mine["chain"].clear()
        assert state == before


class TestIdentity:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"n": 11}, "identity.source.length is 10 in the state and 11 here"),
            ({"source": IterableSource(range(10))}, "identity.source.type is 'list' in the state and 'range' here"),
            ({"source": DatasetSource([0] * 10)}, "'from_iterable' in the state and 'from_dataset' here"),
            ({"function": abs}, r"identity.chain\[0\].function is '.*\.double' in the state and 'builtins.abs' here"),
            ({"name": "other"}, r"identity.chain\[0\].name is 'double' in the state and 'other' here"),
            ({"rng": True}, r"identity.chain\[0\].rng is False in the state and True here"),
            ({"rows": 9}, r"identity.chain\[2\].rows is 8 in the state and 9 here"),
            ({"seed": 0}, r"identity.chain\[2\].seed is None in the state and 0 here"),
            ({"size": 4}, r"identity.chain\[3\].size is 3 in the state and 4 here"),
            ({"drop_last": True}, r"identity.chain\[3\].drop_last is False in the state and True here"),
            ({"collate": tuple}, r"identity.chain\[3\].function is None in the state and 'builtins.tuple' here"),
            ({"share": Share(seed=1)}, "identity.seed is 0 in the state and 1 here"),
            ({"share": Share(rank=1, world_size=2)}, "identity.rank is 0 in the state and 1 here"),
            ({"share": Share(world_size=2)}, "identity.world_size is 1 in the state and 2 here"),
            ({"share": Share(on_uneven="pad")}, "identity.on_uneven is 'drop' in the state and 'pad' here"),
        ],
    )
    def test_each_difference_is_named(self, changes: dict[str, Any], says: str) -> None:
        state = make_state(known(), 0, Position())
        with pytest.raises(StateError, match="the state was saved by another loader: .*" + says):
            read_state(state, known(**changes), 2)

    def test_a_stage_more_or_less_is_named(self) -> None:
        longer = identity(chain().map(len), Share())
        with pytest.raises(
            StateError,
            match=r"identity.chain\[4\] is missing in the state and {'kind': 'map', 'function': 'builtins.len'",
        ):
            read_state(make_state(known(), 0, Position()), longer, 2)
        with pytest.raises(
            StateError, match=r"identity.chain\[4\] is {'kind': 'map', .*} in the state and missing here"
        ):
            read_state(make_state(longer, 0, Position()), known(), 2)

    def test_the_first_difference_is_named(self) -> None:
        with pytest.raises(StateError, match=r"identity.chain\[0\].kind is 'map' in the state and 'filter' here"):
            read_state(
                make_state(known(), 0, Position()),
                identity(Pipeline(IterableSource([0] * 10)).filter(keep), Share()),
                0,
            )

    def test_the_machine_makes_no_difference(self) -> None:
        def on(device: str, **options: Any) -> dict[str, Any]:
            pipe = Pipeline(IterableSource([1])).map(double, **options).batch(2)
            return identity(pipe.to_torch(device, groups={"all": ["a"]}), Share())

        assert on("cpu") == on("cuda:0")
        assert on("cpu") == on("cpu", executor="process", max_concurrency=3)
        assert on("cpu") == on("cpu", waits=True)

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (double, "double"),
            (functools.partial(double), "double"),
            (functools.partial(functools.partial(int, base=8), base=2), "builtins.int"),
            (Scale, "Scale"),
            (Scale(), "Scale"),
            (Scale().__call__, "Scale.__call__"),
            (np.negative, "negative"),
            (np.asarray, "numpy.asarray"),
            ("text".startswith, "str.startswith"),
            (lambda value: value, "TestIdentity.<lambda>"),
        ],
    )
    def test_functions_go_by_name(self, function: Callable[..., Any], name: str) -> None:
        stage = known(function=function)["chain"][0]
        assert stage["function"].endswith(name)
        assert stage == known(function=function)["chain"][0]

    def test_an_attribute_that_is_called_func_is_not_the_function(self) -> None:
        scale = Scale()
        scale.func = double  # type: ignore[attr-defined]
        assert known(function=scale)["chain"][0]["function"].endswith("Scale")


class Numbers(list[int]):
    """A sampler whose order is set from outside."""


class TestOrder:
    """The order that a sampler gives an epoch is known by a digest."""

    def known(self, order: list[int]) -> dict[str, Any]:
        return identity(Pipeline(DatasetSource(range(50), sampler=Numbers(order))), Share())

    def test_the_same_order_goes_on(self) -> None:
        state = make_state(self.known([4, 2, 49]), 3, Position(2))
        assert read_state(json.loads(json.dumps(state)), self.known([4, 2, 49]), 0) == (3, Position(2))
        assert len(state["order"]) == 16

    @pytest.mark.parametrize("other", [[4, 49, 2], [4, 2], [4, 2, 48], [4, 2, 49, 0], []])
    def test_another_order_is_refused_with_what_to_do(self, other: list[int]) -> None:
        state = make_state(self.known([4, 2, 49]), 3, Position(2))
        with pytest.raises(StateError, match=r"epoch 3 in another order than .* set_epoch\(epoch\), or .* \.shuffle"):
            read_state(state, self.known(other), 0)

    def test_before_an_epoch_any_order_will_do(self) -> None:
        state = make_state(self.known([4, 2, 49]), 3, Position())
        assert "order" not in state
        assert read_state(state, self.known([1]), 0) == (3, Position())

    def test_without_a_sampler_there_is_none(self) -> None:
        mine = identity(Pipeline(DatasetSource(range(50))), Share())
        state = make_state(mine, 3, Position(2))
        assert "order" not in state
        assert read_state(state, mine, 0) == (3, Position(2))

    def test_a_state_that_lost_its_digest_is_refused(self) -> None:
        state = make_state(self.known([4, 2, 49]), 3, Position(2))
        del state["order"]
        with pytest.raises(StateError, match="another order"):
            read_state(state, self.known([4, 2, 49]), 0)


class TestTimes:
    """A file that was changed since is said, and does not keep anybody from going on."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number in range(8):
            pq.write_table(pa.table({"x": [number] * 10}), tmp_path / f"{number}.parquet")
        return tmp_path

    def known(self, folder: Path) -> dict[str, Any]:
        return identity(intune.read_parquet(folder), Share())

    def test_the_same_files_say_nothing(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        state = json.loads(json.dumps(make_state(self.known(folder), 0, Position(1))))
        assert read_state(state, self.known(folder), 0) == (0, Position(1))
        assert not caplog.records

    def test_a_copy_is_said_once_and_goes_on(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
    ) -> None:
        copied = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "copy")
        for number in (1, 7):
            os.utime(copied / f"{number}.parquet", ns=(0, 5))
        state = json.loads(json.dumps(make_state(self.known(folder), 0, Position(1))))
        assert read_state(state, self.known(copied), 0) == (0, Position(1))
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("intune", "WARNING")
        assert record.getMessage().startswith("1.parquet, 7.parquet: changed at another time than when the state was")
        for number in range(8):
            os.utime(copied / f"{number}.parquet", ns=(0, 5))
        read_state(state, self.known(copied), 0)
        assert "4.parquet and 3 more files: changed" in caplog.messages[-1]

    def test_of_many_files_a_digest_is_kept(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for number in range(70):
            pq.write_table(pa.table({"x": [1]}), tmp_path / f"{number:02}.parquet")
        state = json.loads(json.dumps(make_state(self.known(tmp_path), 0, Position(1))))
        assert len(state["modified"]) == 16
        read_state(state, self.known(tmp_path), 0)
        assert not caplog.records
        os.utime(tmp_path / "33.parquet", ns=(0, 5))
        assert read_state(state, self.known(tmp_path), 0) == (0, Position(1))
        assert caplog.messages[0].startswith("files: changed at another time")

    def test_another_size_is_refused_as_before(self, folder: Path) -> None:
        state = make_state(self.known(folder), 0, Position(1))
        pq.write_table(pa.table({"x": list(range(10))}), folder / "3.parquet")
        with pytest.raises(StateError, match=r"identity\.source\.files"):
            read_state(state, self.known(folder), 0)


class TestDamage:
    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(make_state(known(), 1, Position(2, ((3, 4), (5, 6)), 7))))  # type: ignore[no-any-return]

    @pytest.mark.parametrize("state", [None, [], "text", 5, {}, {"epoch": 1}])
    def test_what_is_no_state(self, state: Any) -> None:
        with pytest.raises(StateError, match=r"expected what state_dict\(\) gave, got"):
            read_state(state, known(), 2)

    @pytest.mark.parametrize("name", ["version", "plan_version"])
    @pytest.mark.parametrize("value", [0, 99, None, "1"])
    def test_of_another_version(self, name: str, value: Any) -> None:
        with pytest.raises(
            StateError, match=f"the state has {name} {value!r}, this release reads 1: start the epoch anew"
        ):
            read_state({**self.state(), name: value}, known(), 2)

    @pytest.mark.parametrize("name", ["epoch", "source", "drop", "sequencers"])
    def test_without_a_part(self, name: str) -> None:
        state = self.state()
        del state[name]
        with pytest.raises(StateError, match=f"the state is damaged: KeyError.*{name}"):
            read_state(state, known(), 2)

    @pytest.mark.parametrize("name", ["epoch", "source", "drop", "emission", "row"])
    @pytest.mark.parametrize("value", [-1, 2.5, "3", True, None, [1]])
    def test_with_a_position_that_is_none(self, name: str, value: Any) -> None:
        state = self.state()
        place = state if name in state else state["sequencers"][1]
        place[name] = value
        with pytest.raises(StateError, match=r"the state is damaged: ValueError.*expected a number >= 0, got"):
            read_state(state, known(), 2)

    @pytest.mark.parametrize("sequencers", ["text", [5], [{"emission": 1}], 7, None])
    def test_with_other_things_in_place_of_sequencers(self, sequencers: Any) -> None:
        with pytest.raises(StateError, match="the state is damaged"):
            read_state({**self.state(), "sequencers": sequencers}, known(), 2)

    def test_with_another_number_of_sequencers(self) -> None:
        with pytest.raises(StateError, match="it has 2 sequencers, the chain has 1"):
            read_state(self.state(), known(), 1)

    def test_without_an_identity(self) -> None:
        state = self.state()
        del state["identity"]
        with pytest.raises(StateError, match=r"another loader: identity is None in the state and \{"):
            read_state(state, known(), 2)

    def test_a_long_difference_is_cut_short(self) -> None:
        state = self.state()
        state["identity"]["source"] = {"files": ["x" * 50] * 1000}
        with pytest.raises(StateError) as caught:
            read_state(state, known(), 2)
        assert len(str(caught.value)) < 600


def test_digests_are_the_same_whatever_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len(digest(None)) == 16
