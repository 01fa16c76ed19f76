"""A signal handler that interrupts `next` and asks the loader for something is refused: it would wait for itself."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import intune
from intune.pipeline.loader import Loader


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Sets what SIGUSR1 does, until the end of the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda call: signal.signal(signal.SIGUSR1, lambda *_: call()) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "ask", [lambda loader: loader.state_dict(), lambda loader: loader.stats(), lambda loader: loader._engine.snapshot()]
)
def test_within_next_it_is_refused_and_the_loop_goes_on(
    ask: Callable[[Loader], Any], on_signal: Callable[[Callable[[], Any]], None]
) -> None:
    refused: list[str] = []
    with intune.from_dataset(range(40)).batch(4).loader(cpus=2) as loader:
        engine = loader._engine
        observe = engine._observe

        def handler() -> None:
            try:
                ask(loader)
            except intune.LoaderError as error:
                refused.append(str(error))

        def interrupted() -> None:  # the lock is held here, by the thread that is inside `next`
            signal.raise_signal(signal.SIGUSR1)
            observe()

        on_signal(handler)
        iterator = iter(loader)
        first = next(iterator)
        engine._observe = interrupted  # type: ignore[method-assign]
        second = next(iterator)
        engine._observe = observe  # type: ignore[method-assign]
        assert [*first, *second] == list(range(8))
        assert len(refused) == 1
        assert "set a flag" in refused[0]
        assert [row for batch in iterator for row in batch] == list(range(8, 40))


def test_between_two_batches_it_is_answered(on_signal: Callable[[Callable[[], Any]], None]) -> None:
    answers: list[Any] = []
    with intune.from_dataset(range(40)).batch(4).loader(cpus=2) as loader:
        on_signal(lambda: answers.append((loader.state_dict()["epoch"], loader.stats().batches)))
        iterator = iter(loader)
        next(iterator)
        signal.raise_signal(signal.SIGUSR1)
        assert answers == [(0, 1)]
        assert len(list(iterator)) == 9
