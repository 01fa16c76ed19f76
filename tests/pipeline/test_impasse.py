"""What memory alone keeps from going on: found where it is so and nowhere else, and ended with an error in order."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from intune._errors import MemoryLimitError
from intune.pipeline.impasse import Impasse

from .chains import Blocks, Chain, Op, batch, shuffle, triple, unbatch
from .harness import Deadlock, Settings, Stepped, collect, expected
from .test_run import chains, same, seeds, set_ups


class Tight(Stepped):
    """Is told what is to spare at random moments; `stuck` is called where nothing can go on for want of it."""

    def __init__(self, chain: Chain, setup: Settings, rng: random.Random, most: int, stuck: Callable[[], None]) -> None:
        super().__init__(chain, setup, rng)
        self.impasse, self.most, self.stuck = Impasse(self.engine), most, stuck
        self.read()

    def read(self) -> None:
        self.impasse.keep_to(self.rng.randint(-10, self.most))

    def wait(self) -> None:
        """The consumer waits: what lacks memory does so exactly where nothing can go on."""
        if self.rng.random() < 0.2:
            self.read()
        if self.go_on(1):
            return
        if self.impasse.lacks() is None and self.impasse.lacks() is None:  # at first it gives up what is ahead
            raise Deadlock(f"{self.runs()}, {self.ledger.charged} bytes of {self.ledger.budget}")
        self.stuck()


@given(chains(), set_ups(), seeds, st.sampled_from([0, 50, 500, 5000]))
@settings(max_examples=150)
def test_what_is_lacking_is_enough_to_go_on(chain: Chain, setup: Settings, seed: int, most: int) -> None:
    """The plan comes out, whatever there was to spare at times."""

    def enough() -> None:
        event("stuck")
        lacking = tight.impasse.lacks()
        assert lacking is not None
        tight.impasse.keep_to(lacking - 1)
        assert tight.impasse.lacks() == lacking
        tight.impasse.keep_to(lacking)
        assert tight.impasse.lacks() is None
        assert tight.go_on(1) == 1

    tight = Tight(chain, replace(setup, memory=setup.memory or 0), random.Random(seed), most, enough)
    same(collect(tight, iter(tight.loader)), expected(chain, setup))
    tight.close()


@given(chains(), set_ups(), seeds, st.sampled_from([0, 50, 500]))
@settings(max_examples=150)
def test_the_error_comes_after_all_that_is_ready_and_another_loader_goes_on(
    chain: Chain, setup: Settings, seed: int, most: int
) -> None:
    tight = Tight(chain, replace(setup, memory=0), random.Random(seed), most, lambda: tight.impasse.give_up("why"))
    got, wanted = collect(tight, iter(tight.loader)), expected(chain, setup).items
    state = json.dumps(tight.loader.state_dict())
    tight.close()
    assert got.items == wanted[: len(got.items)]
    if got.error is None:
        assert got.items == wanted
        return
    event("stuck")
    assert isinstance(got.error, MemoryLimitError)
    free = Stepped(chain, replace(setup, memory=None), random.Random(seed))
    free.loader.load_state_dict(json.loads(state))
    assert got.items + collect(free, iter(free.loader)).items == wanted
    free.close()


def stuck(ops: tuple[Op, ...], spare: int, taken: int = 1, **options: Any) -> tuple[Tight, str]:
    """A loader of 200 units of two blocks of 20 rows, 160 bytes each, that comes to an end with an error; and its text.

    After some items were taken memory is as lacking as it is said to be.
    """

    def give_up() -> None:
        tight.impasse.give_up("the limit fell")

    setup = Settings(memory=10**6, **options)
    tight = Tight(Chain(Blocks([[20, 20]] * 200), ops), setup, random.Random(0), 0, give_up)
    tight.read = lambda: None  # type: ignore[method-assign]
    iterator = iter(tight.loader)
    collect(tight, iterator, taken)
    tight.allocate(2, 0)
    tight.impasse.keep_to(spare)
    got = collect(tight, iterator)
    assert isinstance(got.error, MemoryLimitError)
    return tight, str(got.error)


class TestWhatItSays:
    def test_a_window_of_a_shuffle(self) -> None:
        tight, said = stuck((shuffle(1600),), 4000, taken=4)
        assert said.startswith("the limit fell. Items in flight hold ")
        assert "the next one of 'blocks' takes about 160 bytes more" in said
        found = re.search(
            r"of the ([\d,]+) rows that 'shuffle' puts together ([\d,]+) have come, .* about (\d+) KiB", said
        )
        assert found is not None
        rows, come, kib = (int(each.replace(",", "")) for each in found.groups())
        assert come < rows <= 1600
        assert kib == round(rows * 8 / 1024)
        assert "state_dict" in said
        assert "fewer rows in shuffle" in said
        tight.close()

    def test_what_is_made_of_a_window(self) -> None:
        tight, said = stuck((shuffle(1600), batch(10)), 3000)
        assert re.search(r"the next one of 'shuffle' takes about \d+ KiB more", said)
        assert "fewer rows in shuffle" in said
        tight.close()

    def test_a_large_batch(self) -> None:
        tight, said = stuck((batch(500),), 1000)
        assert re.search(r"of the 500 rows that 'batch' puts together \d+ have come, .* about 4 KiB", said)
        assert "shuffle" not in said
        tight.close()

    @pytest.mark.parametrize("ops", [(), (triple(),), (unbatch(), triple())], ids=len)
    def test_a_single_item(self, ops: tuple[Op, ...]) -> None:
        tight, said = stuck(ops, 10)
        assert re.search(
            r"hold \d+ (bytes|KiB), and the next one of '[a-z]+' takes about \d+ (bytes|KiB) more. Nothing is left",
            said,
        )
        tight.close()


def test_an_epoch_that_was_begun_ahead_is_given_up_first() -> None:
    """What it holds may be enough, and the next loop begins it again."""
    asked: list[int] = []

    def more() -> None:
        asked.append(sum(not run.cancelled for run in tight.engine.runs))
        tight.impasse.keep_to(10**6)

    chain, setup = Chain(Blocks([[20, 20]] * 4), (batch(5),)), Settings(epochs=2, memory=10**6)
    tight = Tight(chain, setup, random.Random(0), 0, more)
    tight.read = lambda: None  # type: ignore[method-assign]
    tight.impasse.keep_to(None)
    iterator = iter(tight.loader)
    first = collect(tight, iterator, 20).items
    while len(tight.engine.runs) == 1:
        assert tight.go_on(1)
    tight.allocate(2, 0)
    tight.impasse.keep_to(-1)
    first += collect(tight, iterator).items
    second = collect(tight, iter(tight.loader)).items
    assert (first, second) == (expected(chain, setup).items, expected(chain, setup, 1).items)
    assert asked
    assert set(asked) == {1}
    tight.close()


def test_nothing_is_lacking_while_the_consumer_is_elsewhere() -> None:
    """It may give back what it holds before it asks again."""
    tight = Tight(Chain(Blocks([[20]] * 9)), Settings(memory=0, prefetch=1), random.Random(0), 0, lambda: None)
    tight.read = lambda: None  # type: ignore[method-assign]
    tight.impasse.keep_to(10**6)
    iterator = iter(tight.loader)
    next(iterator)
    tight.go_on(1000)
    tight.impasse.keep_to(-1)
    assert tight.impasse.lacks() is None
    tight.impasse.give_up("never")
    tight.impasse.keep_to(None)
    assert collect(tight, iterator).error is None
    tight.close()
