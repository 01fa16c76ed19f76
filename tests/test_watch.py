import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune
from intune.testing import ManualClock


class Loader:
    """Batches 0, 1, ... that each take so many seconds of a clock to come, and what a user asks of a loader."""

    def __init__(self, clock: ManualClock, waits: list[float], last: float = 0.0) -> None:
        self.clock, self.waits, self.last, self.epoch = clock, waits, last, 0

    def __iter__(self) -> Iterator[int]:
        for number, wait in enumerate(self.waits):
            self.clock.advance(wait)
            yield number
        self.clock.advance(self.last)

    def __len__(self) -> int:
        return len(self.waits)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def watched(waits: list[float], steps: float, passes: int = 1, **options: Any) -> tuple[Any, list[str], list[int]]:
    """Loop over a loader with so many seconds a step; the watched loader, the lines, the batches."""
    clock, lines, seen = ManualClock(), [], []
    loader = intune.watch(Loader(clock, waits), report=lines.append, clock=clock, **options)
    for _ in range(passes):
        for batch in loader:
            seen.append(batch)
            clock.advance(steps)
    return loader, lines, seen


def test_a_loop_that_waits() -> None:
    loader, lines, seen = watched([3.0, *[1.0] * 11], steps=1.0)
    report = loader.report()
    assert seen == list(range(12))
    assert (report.batches, report.seconds, report.wait_seconds, report.first_wait_seconds) == (12, 26.0, 14.0, 3.0)
    assert (report.wait_share, report.limited, report.largest_speedup) == (14 / 26, True, 26 / 12)
    assert report.wait_largest_seconds == 3.0
    assert report.wait_median_seconds == pytest.approx(1.0, rel=0.42)
    assert lines == [
        "intune: the loop waited for data 53.8 % of the time (12 batches in 26.0 s; half of the waits for a batch took "
        "at most about 741 ms, the longest 3.0 s). The loader is a limit: with every batch ready the loop would be "
        "2.17 times as fast."
    ]


def test_a_loop_that_does_not_wait() -> None:
    loader, lines, _ = watched([0.01] * 100, steps=1.0)
    assert loader.report().limited is False
    assert loader.report().wait_share == pytest.approx(0.01 / 1.01)
    assert lines[0].endswith("The loader is not the limit: what the loop does with the batches is.")


def test_a_loop_that_does_nothing_else() -> None:
    loader, lines, _ = watched([0.5] * 10, steps=0.0)
    assert (loader.report().limited, loader.report().largest_speedup) == (True, None)
    assert lines[0].endswith("The loop did nothing but wait.")


def test_starting_that_takes_most_of_the_waiting_is_said_apart() -> None:
    _, lines, _ = watched([5.0, 0.1, 0.1], steps=2.0)
    assert "5.0 s of the waiting came before the first batch of a pass" in lines[0]
    _, lines, _ = watched([0.1] * 3, steps=2.0)
    assert "first batch" not in lines[0]


@pytest.mark.parametrize(
    ("batches", "wait", "judged"), [(9, 1.0, False), (10, 1.0, True), (10, 0.09, False), (200, 0.004, False)]
)
def test_a_short_pass_has_its_figures_and_no_verdict(batches: int, wait: float, judged: bool) -> None:
    loader, lines, _ = watched([wait] * batches, steps=wait / 10)
    report = loader.report()
    assert report.wait_share == pytest.approx(1 / 1.1)
    assert report.limited is (True if judged else None)
    assert f"{batches} batches in" in lines[0]
    end = "Too short to judge whether the loader is the limit: that takes 10 batches and 1.0 s."
    assert lines[0].endswith(end) is not judged
    assert ("The loader is" in lines[0]) is judged


def test_short_passes_add_up_to_something_to_judge() -> None:
    loader, lines, _ = watched([0.1] * 4, steps=0.1, passes=3)
    assert all("Too short to judge" in line for line in lines)
    assert loader.report().limited is True
    assert "The loader is a limit" in str(loader.report())


def test_one_batch() -> None:
    _, lines, _ = watched([2.0], steps=2.0)
    assert lines[0].startswith(
        "intune: the loop waited for data 50.0 % of the time (1 batch in 4.0 s; 2.0 s of the waiting came before the "
        "first batch of a pass). Too short"
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 us"),
        (0.0000994, "99 us"),
        (0.0009996, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (7200.0, "7,200.0 s"),
    ],
)
def test_times_are_shown_in_the_unit_that_fits(seconds: float, shown: str) -> None:
    _, lines, _ = watched([seconds, 0.0], steps=0.0)
    assert f"(2 batches in {shown}; " in lines[0]


def test_each_pass_has_its_line_and_the_report_has_all() -> None:
    loader, lines, seen = watched([1.0, 1.0], steps=1.0, passes=3)
    assert len(lines) == 3
    assert all("50.0 % of the time (2 batches in 4.0 s" in line for line in lines)
    report = loader.report()
    assert (report.batches, report.seconds, report.wait_seconds, report.first_wait_seconds) == (6, 12.0, 6.0, 3.0)
    assert seen == [0, 1] * 3


def test_lines_while_a_pass_goes_on() -> None:
    _, lines, _ = watched([1.0] * 10, steps=1.0, every=6.0)
    assert [line.split("(")[1].split(" in")[0] for line in lines] == [
        "4 batches",
        "7 batches",
        "10 batches",
        "10 batches",
    ]


def test_waiting_for_the_end_counts() -> None:
    clock, lines = ManualClock(), []
    loader = intune.watch(Loader(clock, [1.0], last=7.0), report=lines.append, clock=clock)
    assert list(loader) == [0]
    assert loader.report().wait_seconds == 8.0
    assert loader.report().largest_speedup is None
    assert "100.0 % of the time (1 batch in 8.0 s)" in lines[0]


def test_a_loop_that_is_left_early_is_reported_once() -> None:
    clock, lines = ManualClock(), []
    loader = intune.watch(Loader(clock, [1.0] * 5), report=lines.append, clock=clock)
    for batch in loader:
        clock.advance(1.0)
        if batch == 2:
            break
    gc.collect()
    assert len(lines) == 1
    assert "3 batches" in lines[0]


def test_an_error_of_the_loader_passes_through_and_is_reported() -> None:
    class BrokenError(Exception):
        pass

    def broken() -> Iterator[int]:
        yield 1
        raise BrokenError("as it was")

    lines: list[str] = []
    with pytest.raises(BrokenError, match="as it was"):
        list(intune.watch(broken(), report=lines.append))
    assert len(lines) == 1


def test_it_looks_like_the_loader() -> None:
    loader, _, _ = watched([1.0, 1.0], steps=1.0)
    assert len(loader) == 2
    loader.set_epoch(5)
    assert loader.epoch == 5
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such
    with pytest.raises(TypeError, match="has no len"):
        len(intune.watch(iter([1])))


def test_a_loader_of_torch() -> None:
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    loader = intune.watch(torch.utils.data.DataLoader(dataset, batch_size=4), report=lambda line: None)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (len(loader), loader.batch_size, loader.dataset) == (3, 4, dataset)
    assert loader.report().batches == 3


def test_a_loader_of_ours() -> None:
    with intune.from_iterable(range(10)).batch(4).loader(cpus=1) as loader:
        watched = intune.watch(loader, report=lambda line: None)
        assert [batch.tolist() for batch in watched] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert watched.report().batches == watched.stats().batches == 3


def test_copies() -> None:
    loader = intune.watch([1, 2, 3])
    assert list(copy.copy(loader)) == list(pickle.loads(pickle.dumps(loader))) == [1, 2, 3]


def test_nothing_asked_and_nothing_there() -> None:
    clock, lines = ManualClock(), []
    loader = intune.watch(Loader(clock, [], last=1.5), report=lines.append, clock=clock)
    assert str(loader.report()) == "no batch has come yet."
    assert (loader.report().limited, loader.report().wait_share, loader.report().wait_p99_seconds) == (None,) * 3
    assert list(loader) == []
    assert lines == ["intune: no batch came; the loop waited 1.5 s for one."]
    assert (loader.report().limited, loader.report().wait_share) == (None, 1.0)


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(intune.watch([1])) == [1]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("intune: the loop waited for data ")


def test_batches_are_not_kept_alive() -> None:
    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    loader = intune.watch(Batch() for _ in range(3))
    for batch in loader:
        assert Batch.alive == 1
        del batch
        assert Batch.alive == 0


@pytest.mark.parametrize("every", [0, -1.0, float("nan")])
def test_intervals_that_make_no_sense(every: float) -> None:
    with pytest.raises(ValueError, match="every must be a number of seconds above 0"):
        intune.watch([], every=every)


def test_what_is_not_iterable() -> None:
    with pytest.raises(TypeError, match="an iterable of batches, got int"):
        intune.watch(5)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=30))
def test_times_add_up(times: list[tuple[int, int]]) -> None:
    """Wait and step microseconds of each batch."""
    clock, lines = ManualClock(), []
    loader = intune.watch(Loader(clock, [wait * 1e-6 for wait, _ in times]), report=lines.append, clock=clock)
    for (_, step), _ in zip(times, loader, strict=True):
        clock.advance(step * 1e-6)
    report = loader.report()
    waits = sorted(wait * 1e-6 for wait, _ in times)
    assert report.batches == len(times)
    assert report.wait_seconds == pytest.approx(sum(waits), abs=1e-9)
    assert report.seconds == pytest.approx(sum(wait + step for wait, step in times) * 1e-6, abs=1e-9)
    if waits:
        median = waits[(len(waits) + 1) // 2 - 1]
        assert report.wait_largest_seconds == pytest.approx(waits[-1], abs=1e-9)
        assert report.wait_median_seconds == pytest.approx(median, rel=0.42, abs=1e-6)


# ---- a report that fails ---------------------------------------------------------------------------------------------


def failing(line: str) -> None:
    raise RuntimeError("the report broke")


def test_a_report_that_fails_is_logged_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    loader = intune.watch(Loader(clock, [1.0] * 3), every=1.0, report=failing, clock=clock)
    assert list(loader) == [0, 1, 2]
    assert loader.report().batches == 3
    assert [record.name for record in caplog.records] == ["intune._watch"] * 4
    assert caplog.messages[-1].startswith("RuntimeError: the report broke, while it was told: intune: the loop waited")


def test_a_report_that_fails_does_not_hide_the_error_of_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        list(intune.watch(broken(), report=failing))
    assert caught.value.__context__ is None
    assert len(caplog.records) == 1


def test_a_report_may_be_interrupted() -> None:
    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(intune.watch([1], report=interrupted))


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_where_stderr_takes_nothing_training_goes_on(stderr: str) -> None:
    program = "import intune; list(intune.watch(range(20))); list(intune.watch([1])); print('went on')"
    command = ["sh", "-c", f'exec "$0" -c "$1" {stderr}', sys.executable, program]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert run.stdout == "went on\n"
