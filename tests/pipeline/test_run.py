"""Whole chains on an engine without threads: with every order in which work may be done, the plan comes out."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from intune._errors import MemoryLimitError
from intune.pipeline.run import Share
from intune.sources.samples import DatasetSource, IterableSource

from .chains import Blocks, Chain, Op, arrays, batch, expand, fail, ids, keep, noise, shuffle, triple, unbatch
from .harness import Outcome, Settings, Stepped, collect, expected

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _small_emissions() -> Iterator[None]:
    """Sizes at which an engine cuts emissions and forgets positions, made for the few rows of these tests."""
    sizes = {"EMIT_ROWS": 16, "SMALL_EMIT_ROWS": 6, "SAMPLE_EMIT_ROWS": 7}
    with mock.patch.multiple("intune.pipeline.run", **sizes), mock.patch("intune.pipeline.engine.PRUNE_EVERY", 2):
        yield


small = st.integers(1, 9)


@st.composite
def chains(draw: st.DrawFn, *, fails: bool = False, most: int = 5) -> Chain:
    """A source and up to `most` stages that fit each other."""
    if draw(st.booleans()):
        units = draw(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=7))
        source: Any = Blocks(units, bound=draw(st.integers(1, 3)))
        source.kept = draw(st.sampled_from([0, 0, 8, 40, 400]))
        flow = "block"
    else:
        rows = list(range(draw(st.integers(0, 60))))
        source, flow = draw(st.sampled_from([IterableSource, DatasetSource]))(rows), "sample"
    ops, batched = list[Op](), False
    for _ in range(draw(st.integers(0, most))):
        kinds = ["triple", "noise"] + ["fail"] * fails
        if flow != "opaque":
            kinds += ["keep", "expand", "batch"] + ["shuffle"] * (not batched)
        if flow == "block":
            kinds += ["arrays", "unbatch"]
        kind = draw(st.sampled_from(kinds))
        if kind == "fail":
            ops.append(fail(draw(st.integers(5, 40)), draw(st.integers(0, 4))))
        elif kind == "keep":
            ops.append(keep(draw(st.integers(1, 4))))
        elif kind == "expand":
            ops.append(expand(draw(st.integers(1, 4))))
        elif kind == "shuffle":
            ops.append(shuffle(draw(st.integers(1, 40)), draw(st.none() | st.integers(0, 3))))
        elif kind == "batch":
            ops.append(batch(draw(small), draw(st.booleans())))
            batched, flow = True, "block" if flow == "block" else "opaque"
        else:
            ops.append({"triple": triple, "noise": noise, "arrays": arrays, "unbatch": unbatch}[kind]())
            flow = "sample" if kind == "unbatch" else flow
    return Chain(source, tuple(ops))


@st.composite
def set_ups(draw: st.DrawFn, *, ranks: bool = False, **fixed: Any) -> Settings:
    """How an engine is set up; what is `fixed` stays."""
    chosen: dict[str, Any] = {
        "slots": draw(st.integers(1, 4)),
        "prefetch": draw(st.integers(1, 3)),
        "max_ahead": draw(st.none() | st.integers(1, 8)),
        "memory": draw(st.none() | st.integers(0, 5000)),
        "busy": draw(st.sampled_from([0.0, 1.0])),
    }
    world = draw(st.integers(1, 3)) if ranks else 1
    on_uneven: Any = draw(st.sampled_from(["drop", "pad", "uneven"])) if ranks else "drop"
    chosen["share"] = Share(draw(st.integers(0, 5)), draw(st.integers(0, world - 1)), world, on_uneven)
    return Settings(**{**chosen, **fixed})


seeds = st.integers(0, 2**32 - 1)


def same(got: Outcome, wanted: Outcome) -> None:
    """Items are as they must be, and so is how it ended; too little memory for a window may end it earlier."""
    if isinstance(got.error, MemoryLimitError):
        event("memory limit")
        assert got.items == wanted.items[: len(got.items)]
        return
    assert got.items == wanted.items
    assert type(got.error) is type(wanted.error)


class TestOrder:
    @given(chains(), set_ups(ranks=True), seeds, st.integers(0, 6))
    @settings(max_examples=200)
    def test_every_order_of_work_gives_the_plan(self, chain: Chain, setup: Settings, seed: int, pause: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        got = collect(stepped, iter(stepped.loader), pause=lambda: stepped.rng.randint(0, pause))
        same(got, expected(chain, setup))
        if got.error is None:
            assert stepped.ledger.charged == 0  # before anything is swept up
        assert stepped.engine.scheduler.peak_used <= setup.slots
        stepped.close()

    @given(chains(fails=True), set_ups(), seeds)
    @settings(max_examples=100)
    def test_a_failure_comes_after_all_that_is_before_it(self, chain: Chain, setup: Settings, seed: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        same(collect(stepped, iter(stepped.loader)), expected(chain, setup))
        stepped.close()

    @given(chains(fails=True), set_ups(skip=True), seeds)
    @settings(max_examples=100)
    def test_what_fails_is_left_out_where_that_is_wanted(self, chain: Chain, setup: Settings, seed: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        got = collect(stepped, iter(stepped.loader))
        same(got, expected(chain, setup))
        if got.error is None:
            skipped = sum(stage.skipped for stage in stepped.loader.stats().stages.values())
            assert skipped == len(chain.flow(setup.share, 0, True).skipped)
            assert stepped.ledger.charged == 0
        stepped.close()

    @given(chains(), set_ups(ordered=False), seeds)
    @settings(max_examples=100)
    def test_without_order_each_row_comes_once(self, chain: Chain, setup: Settings, seed: int) -> None:
        fixed = [op for op in chain.ops if not re.match(r"noise|expand|batch.*True", op.name)]
        chain = Chain(chain.source, tuple(fixed))  # what the others give depends on the order of what they get
        stepped = Stepped(chain, setup, random.Random(seed))
        outcomes = collect(stepped, iter(stepped.loader)), expected(chain, setup)
        got, wanted = (Counter(row for item in each.items for row in np.atleast_1d(item)) for each in outcomes)
        if isinstance(outcomes[0].error, MemoryLimitError):
            assert got <= wanted
        else:
            assert got == wanted
            assert stepped.ledger.charged == 0
        stepped.close()

    @given(chains(), set_ups(epochs=2), seeds)
    @settings(max_examples=60)
    def test_an_epoch_begun_ahead_is_the_same(self, chain: Chain, setup: Settings, seed: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        for epoch in range(2):
            same(collect(stepped, iter(stepped.loader), pause=lambda: 5), expected(chain, setup, epoch))
        stepped.close()

    @given(chains(), set_ups(), seeds)
    @settings(max_examples=100)
    def test_limits_may_change_at_any_time(self, chain: Chain, setup: Settings, seed: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))

        def change() -> int:
            rng = stepped.rng
            concurrency = rng.choice([None, 1, 2, 3])
            stepped.allocate(rng.randint(1, 5), rng.choice([None, 0, 500, 5000]), concurrency)
            return rng.randint(0, 4)

        same(collect(stepped, iter(stepped.loader), pause=change), expected(chain, setup))
        stepped.close()


class TestMemory:
    MANY = 400

    def source(self) -> Blocks:
        return Blocks([[20, 20]] * self.MANY)

    @pytest.mark.parametrize(
        "ops",
        [
            (),
            (triple(), keep(2)),
            (batch(3),),
            (batch(500),),
            (expand(3), batch(7), triple()),
            (shuffle(64), batch(3)),
            (keep(3), shuffle(64), expand(3), batch(5), batch(2)),
            (unbatch(), batch(3)),
            (unbatch(), shuffle(64)),
        ],
        ids=lambda ops: " ".join(op.name for op in ops),
    )
    @pytest.mark.parametrize("ordered", [True, False])
    def test_work_stops_while_the_consumer_pauses(self, ops: tuple[Op, ...], ordered: bool) -> None:
        chain = Chain(self.source(), ops)
        stepped = Stepped(chain, Settings(slots=3, ordered=ordered), random.Random(1))
        iterator = iter(stepped.loader)
        next(iterator)
        needed = 500 // 40 if ops and ops[0].name.startswith("batch(500") else 4
        for _ in range(3):
            opened = len(chain.source.opened)
            assert stepped.go_on(10_000) < 10_000  # it came to rest
            # Two batches ready, one that waits to be put together, and what may lie ahead of it.
            assert len(chain.source.opened) < opened + max(40, 3 * (needed + 1) + stepped.engine.context.max_ahead)
            next(iterator)
        assert len(chain.source.opened) < 60 + 3 * needed
        stepped.close()

    @pytest.mark.parametrize("budget", [0, 1000, 4000])
    @pytest.mark.parametrize("pause", [0, 30])
    @pytest.mark.parametrize("ops", [(), (batch(3),), (triple(), batch(50), batch(7)), (expand(2), keep(2), batch(5))])
    def test_a_budget_is_kept_but_for_what_order_waits_for(self, ops: tuple[Op, ...], budget: int, pause: int) -> None:
        """A block has 20 rows of 8 bytes; beyond the budget may come one block, and what a batch still waits for."""
        setup = Settings(slots=4, memory=budget, max_ahead=20)
        stepped = Stepped(Chain(self.source(), ops), setup, random.Random(budget + pause))
        got = collect(stepped, iter(stepped.loader), pause=lambda: pause)
        assert got.items == expected(Chain(self.source(), ops), setup).items
        assert stepped.most_held <= budget + 3 * 20 * 8 + 2 * 50 * 8
        assert (stepped.most_in_hand > 1) == (budget > 0)
        stepped.close()

    def test_too_small_for_two_windows_is_said_after_the_first_one(self) -> None:
        """Also where only one emission may be in hand at a time."""
        setup = Settings(slots=1, memory=500, max_ahead=1, prefetch=1)
        stepped = Stepped(Chain(self.source(), (shuffle(640),)), setup, random.Random(0))
        got = collect(stepped, iter(stepped.loader))
        assert isinstance(got.error, MemoryLimitError)
        assert re.search(r"at most rows=\d+ fit", str(got.error))
        stepped.close()


class TestRanks:
    @pytest.mark.parametrize(
        "make", [lambda: Blocks([[2], [1]]), lambda: IterableSource(range(3)), lambda: DatasetSource(range(3))]
    )
    def test_more_of_them_than_rows(self, make: Callable[[], Any]) -> None:
        """None waits for ever; together they give what was promised."""
        for on_uneven, rows in [("drop", 0), ("uneven", 3)]:
            items = []
            for rank in range(4):
                setup = Settings(share=Share(0, rank, 4, on_uneven))  # type: ignore[arg-type]
                stepped = Stepped(Chain(make(), (batch(2),)), setup, random.Random(rank))
                items += [row for item in collect(stepped, iter(stepped.loader)).items for row in item]
                stepped.close()
            assert sorted(items) == list(range(rows))


class TestEndings:
    @given(chains(fails=True), set_ups(), seeds, st.integers(0, 5), st.integers(0, 60), st.booleans())
    @settings(max_examples=150)
    def test_a_stop_at_any_moment_frees_everything(
        self, chain: Chain, setup: Settings, seed: int, items: int, steps: int, drop: bool
    ) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        iterator = iter(stepped.loader)
        collect(stepped, iterator, items)
        stepped.go_on(steps)
        if drop:
            del iterator
            stepped.come_to_rest()
            stepped.engine.snapshot()
            assert stepped.ledger.charged == 0
        stepped.close()

    @given(chains(), set_ups(memory=None), seeds, st.integers(0, 60))
    @settings(max_examples=60)
    def test_the_next_epoch_is_whole_after_a_stop(self, chain: Chain, setup: Settings, seed: int, steps: int) -> None:
        stepped = Stepped(chain, setup, random.Random(seed))
        iterator = iter(stepped.loader)
        began = bool(collect(stepped, iterator, 1).items)
        stepped.go_on(steps)
        del iterator
        same(collect(stepped, iter(stepped.loader)), expected(chain, setup, 1))
        assert began or not expected(chain, setup).items
        stepped.close()


class TestResume:
    @given(chains(), set_ups(ranks=True, memory=None), st.lists(st.integers(0, 9), max_size=6), seeds)
    @settings(max_examples=300)
    def test_a_relay_of_loaders_gives_what_one_gives(
        self, chain: Chain, setup: Settings, stops: list[int], seed: int
    ) -> None:
        """Each takes some items, saves its state as text, and the next one goes on from there."""
        rng, items, state = random.Random(seed), list[Any](), "null"
        wanted = expected(chain, setup).items
        for stop in [*stops, None]:
            stepped = Stepped(chain, setup, rng)
            if json.loads(state) is not None:
                stepped.loader.load_state_dict(json.loads(state))
            iterator = iter(stepped.loader)
            most = None if stop is None else min(stop, len(wanted) - len(items))
            if most != 0 or not wanted:
                items += collect(stepped, iterator, most, pause=lambda: rng.randint(0, 5)).items
            state = json.dumps(stepped.loader.state_dict())
            stepped.close()
            if len(items) >= len(wanted):
                break
        assert items == wanted
        if items:  # a state saved at the very end goes on with the next epoch, perhaps after an empty rest of this one
            stepped = Stepped(chain, setup, rng)
            stepped.loader.load_state_dict(json.loads(state))
            if json.loads(state)["epoch"] == 0:
                rest = collect(stepped, iter(stepped.loader))
                assert (rest.items, rest.error) == ([], None)
            same(collect(stepped, iter(stepped.loader)), expected(chain, setup, 1))
            stepped.close()

    def relay(self, chain: Chain, stops: list[int]) -> list[Any]:
        """What loaders give of which each takes so many items and the last one all the rest."""
        items, state = list[Any](), None
        for stop in [*stops, None]:
            stepped = Stepped(chain, Settings(), random.Random(3))
            if state is not None:
                stepped.loader.load_state_dict(state)
            iterator = iter(stepped.loader)
            got = collect(stepped, iterator, stop)
            assert got.error is None
            items += got.items
            state = stepped.loader.state_dict()
            stepped.close()
        return items

    def test_twice_within_one_unit(self) -> None:
        assert self.relay(Chain(Blocks([[1] * 6])), [1, 2, 1]) == [[0], [1], [2], [3], [4], [5]]

    def test_at_each_sample_of_a_shuffle(self) -> None:
        """Within an emission too, after the engine has forgotten what it does not need any more."""
        chain = Chain(IterableSource(list(range(60))), (shuffle(32),))
        for stop in range(60):
            assert self.relay(chain, [stop]) == expected(chain, Settings()).items, stop


class TestWhatAnOpenUnitKeeps:
    def loader(self, units: list[list[int]], memory: int, kept: int) -> Stepped:
        source = Blocks(units)
        source.kept = kept
        return Stepped(Chain(source), Settings(slots=4, memory=memory, prefetch=1), random.Random(5))

    def test_it_is_charged_with_the_last_block_until_the_unit_is_closed(self) -> None:
        stepped = self.loader([[5, 4, 3]], 10**6, 1000)
        running = iter(stepped.loader)
        held = []
        for _ in range(3):
            next(running)
            held.append((stepped.ledger.held, stepped.ledger.charged - stepped.ledger.held))
        assert held == [(1000 + 8 * rows, 0) for rows in (5, 4, 3)]
        assert list(running) == []
        assert stepped.ledger.charged == 0
        stepped.close()

    @pytest.mark.parametrize(("memory", "most"), [(100, 1), (1000, 1), (1900, 2), (10**6, 4)])
    def test_no_more_units_are_opened_than_it_fits_for(self, memory: int, most: int) -> None:
        """But one is, however little there is."""
        stepped = self.loader([[5] * 6] * 8, memory, 700)
        seen, rows = 0, 0
        node: Any = None
        for block in stepped.loader:
            node = node or stepped.engine.runs[0].nodes[0]
            seen = max(seen, len(node._opened))
            rows += len(ids(block))
        assert (seen, rows) == (most, 240)
        stepped.close()

    def test_a_loop_that_is_left_gives_it_back(self) -> None:
        stepped = self.loader([[5] * 6] * 8, 10**6, 700)
        for _ in stepped.loader:
            assert stepped.ledger.held >= 700
            break
        stepped.close()
