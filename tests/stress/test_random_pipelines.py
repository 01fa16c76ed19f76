"""Five hundred random pipelines, each run for real and compared with plain Python.

A seed that fails shows its description. To run it alone (or some: "3,17" or "100-149"):

    INTUNE_STRESS_SEEDS=17 python -m pytest tests/stress/test_random_pipelines.py
"""

import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import intune
import intune._compose
import intune.pipeline.gather as gather
import intune.pipeline.run as plan
from intune import MemoryLimitError
from intune.control import Controller

from .building import build, write_files
from .drawing import draw, otherwise, with_shuffles
from .pipelines import Boom, Description, Row, rows_of
from .reference import EmissionRows, Failed, Outcome, outcome
from .watching import NEVER_TOO_LITTLE, opened

PIPELINES, CHUNK = 500, 50

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]


def _chunks() -> list[list[int]]:
    named = os.environ.get("INTUNE_STRESS_SEEDS")
    if not named:
        return [list(range(first, first + CHUNK)) for first in range(0, PIPELINES, CHUNK)]
    bounds = [[int(bound) for bound in part.split("-")] for part in named.split(",")]
    return [list(range(part[0], part[-1] + 1)) for part in bounds]


@pytest.mark.parametrize("seeds", _chunks(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_pipelines(seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        description = draw(seed)
        with monkeypatch.context() as patch, tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            if not description.run.ticks:  # else what misses its turn would be woken within a second
                patch.setattr(intune._compose, "Controller", partial(Controller, interval_seconds=3600.0))
            if description.short_emissions:
                patch.setattr(plan, "EMIT_ROWS", 64)
                patch.setattr(plan, "SMALL_EMIT_ROWS", 16)
                patch.setattr(plan, "SAMPLE_EMIT_ROWS", 8)
            try:
                check(description, Path(folder))
            except BaseException as error:
                error.add_note(f"{description}\nrun it alone: INTUNE_STRESS_SEEDS={seed} python -m pytest {__file__}")
                raise


def check(description: Description, folder: Path) -> None:
    """Run a pipeline in all ways that its description asks for."""
    write_files(description.source, folder)
    cases = [Case(description, folder, rank) for rank in range(description.world_size)]
    for case in cases:
        case.check()
    given = [case.given for case in cases]
    if len(cases) > 1 and all(rows is not None for rows in given) and _shares_all(description):
        alone = outcome(replace(description, world_size=1), 0, 0, cases[0].emissions)
        assert sum((rows for rows in given if rows is not None), Counter()) == _rows(alone.items), "the ranks' union"


def _shares_all(description: Description) -> bool:
    """Whether the ranks together give what one alone does: no row left out or read twice, none depends on others."""
    alike = all(stage.op not in ("add_rows", "empty", "copies") and not stage.drop_last for stage in description.stages)
    return alike and description.on_uneven == "uneven" and description.source.kind != "sampler" and not description.skip


class Refused(NamedTuple):
    """A loader that had too little memory: what it gave before it said so, in which epoch."""

    description: Description
    got: list[list[Row]]
    error: MemoryLimitError
    epoch: int


class Case:
    """One rank of a pipeline.

    Attributes:
        emissions: How shuffles give their windows.
        given: The rows of the first epoch, once they were given to its end.
    """

    def __init__(self, description: Description, folder: Path, rank: int) -> None:
        self._description, self._folder, self._rank = description, folder, rank
        self.emissions = EmissionRows(plan.EMIT_ROWS, min(plan.EMIT_ROWS, plan.SMALL_EMIT_ROWS))
        self._expected: dict[int, Outcome] = {}
        self._known: set[int] = set()
        self.given: Counter[tuple[int, int]] | None = None

    def check(self) -> None:
        """Run it in all ways that are asked for."""
        ways = [self._whole]
        if self._description.resumes:
            ways.append(self._resumed)
        if self._description.has_rng and self._description.ordered:
            ways.append(self._again)
        for way in ways:
            refused = way()
            if refused is not None:
                self._check_too_little(*refused)

    def _whole(self) -> Refused | None:
        """All epochs, the first one perhaps left early."""
        description = self._description
        with opened(description, self._folder, self._rank) as loader:
            self._check_length(loader)
            for epoch in range(description.epochs):
                items = self._outcome(epoch).items
                stop = None
                if epoch == 0 and description.breaks is not None:
                    stop = max(1, int(description.breaks * len(items))) if items else None
                got, error = taken(loader, description.form, stop)
                if isinstance(error, MemoryLimitError):
                    return Refused(description, got, error, epoch)
                self._judge(epoch, got, error, stop)
                if epoch == 0 and stop is None and error is None:
                    self.given = _rows(got)
            self._check_stats(loader)
        return None

    def _resumed(self) -> Refused | None:
        """A state is taken, another loader goes on, perhaps to the next state, and then to the end."""
        description, position, state = self._description, 0, None
        epoch = description.seed % 2
        expected = self._outcome(epoch)
        for turn, share in enumerate(description.resumes):
            other = otherwise(description, turn) if turn else description
            with opened(other, self._folder, self._rank) as loader:
                _go_on(loader, epoch, state)
                count = int(share * (len(expected.items) - position))
                running = iter(loader)
                try:
                    got = [rows_of(next(running), description.form) for _ in range(count)]
                except MemoryLimitError as refused:
                    return Refused(other, [], refused, epoch)
                self._same(epoch, got, expected.items[position : position + count])
                position += count
                state = json.loads(json.dumps(loader.state_dict()))
        other = otherwise(description, 77)
        with opened(other, self._folder, self._rank) as loader:
            _go_on(loader, epoch, state)
            for number in (epoch, epoch + 1):
                rest = self._outcome(number)
                if state is not None and number < state["epoch"]:
                    position = 0
                    continue  # saved at the very end: it goes on with the next epoch
                got, error = taken(loader, description.form, None)
                if isinstance(error, MemoryLimitError):
                    return Refused(other, [], error, number)
                _unexpected(error, rest.failed)
                self._same(number, got, rest.items[position:])
                self._same_error(rest.failed, error)
                position = 0
        return None

    def _again(self) -> Refused | None:
        """What is random is the same in another run."""
        other = otherwise(self._description, 99)
        with opened(other, self._folder, self._rank) as loader:
            for epoch in range(self._description.epochs):
                got, error = taken(loader, other.form, None)
                if isinstance(error, MemoryLimitError):
                    return Refused(other, got, error, epoch)
                _unexpected(error, self._outcome(epoch).failed)
                self._same(epoch, got, self._outcome(epoch).items)
                self._same_error(self._outcome(epoch).failed, error)
        return None

    # --- what has to come

    def _outcome(self, epoch: int) -> Outcome:
        if epoch not in self._expected:
            self._expected[epoch] = outcome(self._description, epoch, self._rank, self.emissions)
        return self._expected[epoch]

    def _undropped(self, epoch: int, *, fails: bool = True) -> Outcome:
        """The same, but the last batch is kept: without order, which rows it has depends on timing."""
        description = self._description
        source, stages = description.source, tuple(replace(stage, drop_last=False) for stage in description.stages)
        if not fails:
            source, stages = replace(source, fails_at=None), tuple(replace(stage, fails_at=None) for stage in stages)
        return outcome(replace(description, source=source, stages=stages), epoch, self._rank, self.emissions)

    def _judge(self, epoch: int, got: list[list[Row]], error: BaseException | None, stop: int | None) -> None:
        expected = self._outcome(epoch)
        if not self._description.ordered:
            self._judge_unordered(epoch, got, error, stop)
            return
        _unexpected(error, expected.failed)
        self._same(epoch, got, expected.items[:stop])
        if stop is None:
            self._same_error(expected.failed, error)
            if self._description.has_rng:
                expected.items, self._known = got, self._known | {epoch}

    def _judge_unordered(self, epoch: int, got: list[list[Row]], error: BaseException | None, stop: int | None) -> None:
        description, expected = self._description, self._outcome(epoch)
        drops = any(stage.drop_last for stage in description.stages)
        rows, most = _rows(got), _rows(self._undropped(epoch, fails=False).items)
        assert not rows - most, f"rows that must not come: {_first(rows - most)}"
        if description.fails_at is not None:
            # Whether what fails comes before the break, or is left over by drop_last, depends on the order, too.
            if not description.skip and (error is not None or (stop is None and not drops)):
                _unexpected(error, self._undropped(epoch).failed)
                self._same_error(self._undropped(epoch).failed, error)
            return
        _unexpected(error, None)
        if stop is not None and len(got) == stop:
            return
        if not drops:
            assert not most - rows, f"rows that are missing: {_first(most - rows)}"
        if description.stages and description.stages[-1].kind == "batch":
            assert sorted(map(len, got)) == sorted(map(len, expected.items))

    def _same(self, epoch: int, got: list[list[Row]], expected: list[list[Row]]) -> None:
        if self._description.has_rng and epoch not in self._known:
            got = [[(number, x, 0) for number, x, _ in rows] for rows in got]
        for place, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
            assert ours == theirs, f"item {place} of epoch {epoch}: {ours}\nexpected {theirs}"
        assert len(got) == len(expected), f"{len(got)} items of epoch {epoch}, expected {len(expected)}"

    def _same_error(self, failed: Failed | None, error: BaseException | None) -> None:
        if failed is None:
            assert error is None
            return
        assert error is not None, f"{failed!r} did not come"
        kinds: dict[str, Any] = {"boom": Boom, "value": ValueError, "key": KeyError, "source": intune.SourceError}
        assert isinstance(error, kinds.get(failed.kind, RuntimeError)), repr(error)
        if failed.kind == "stop":
            assert "StopIteration" in str(error)
        elif failed.kind == "boom":
            assert error.args == (failed.row, "no luck")
        notes = " ".join(getattr(error, "__notes__", []))
        stages = build(self._description, self._folder, self._rank, []).stages
        name = stages[failed.stage - 1].name if failed.stage else ""
        assert f"intune: raised in stage '{name}" in notes, f"stage {name!r} is not named: {notes}"

    def _check_length(self, loader: intune.Loader) -> None:
        """The length is what comes, or a TypeError where it cannot be known."""
        description, outcome = self._description, self._outcome(0)
        if outcome.failed is not None or outcome.skipped or any(stage.op == "empty" for stage in description.stages):
            return  # these change what was promised
        kinds = [stage.kind for stage in description.stages]
        source = description.source
        known = source.kind != "object" and not (source.kind == "tsv" and description.world_size == 1)
        known &= not {"filter", "flat_map"} & set(kinds)
        known &= source.form != "arrow" or bool({"shuffle", "batch", "unbatch"} & set(kinds))
        if known:
            assert len(loader) == len(outcome.items)
        else:
            with pytest.raises(TypeError, match="cannot be known"):
                len(loader)

    def _check_stats(self, loader: intune.Loader) -> None:
        description = self._description
        outcomes = [self._outcome(epoch) for epoch in range(description.epochs)]
        if description.breaks is not None or not description.ordered or any(one.failed for one in outcomes):
            return
        stats = loader.stats()
        assert stats.batches == sum(len(one.items) for one in outcomes)
        assert stats.rows == sum(len(rows) for one in outcomes for rows in one.items)
        skipped = [stage.skipped for stage in stats.stages.values()]
        assert skipped == [sum(one.skipped[n] for one in outcomes) for n in range(len(skipped))]

    def _check_too_little(
        self, description: Description, got: list[list[Row]], error: MemoryLimitError, epoch: int
    ) -> None:
        """Too little memory is for a shuffle that does not fit; with the rows that are named it does.

        Blocks of few rows take several times more bytes a row than others, so that a shuffle may be refused anew
        when it meets such; it has to be for fewer rows each time.
        """
        in_flight = description.run.in_flight
        if in_flight is None or in_flight >= NEVER_TOO_LITTLE:
            raise AssertionError(f"memory is not short: {error}") from error
        if description.ordered:
            self._same(epoch, got, self._outcome(epoch).items[: len(got)])
        named = re.match(r"shuffle\(rows=(\d+)\) holds two windows .* at most rows=(\d+) fit", str(error))
        assert named is not None, str(error)
        size, fits = int(named[1]), int(named[2])
        stages = [number for number, stage in enumerate(description.stages) if stage.kind == "shuffle"]
        blamed = {number: fits for number in stages if description.stages[number].size == size}
        assert blamed, f"no shuffle has {size} rows: {error}"
        assert fits < size, str(error)
        if fits:
            smaller = with_shuffles(replace(description, run=replace(description.run, churn=False)), blamed)
            case = Case(smaller, self._folder, self._rank)
            with opened(smaller, self._folder, self._rank) as loader:
                got, again = taken(loader, smaller.form, None)
            if isinstance(again, MemoryLimitError):
                case._check_too_little(smaller, got, again, 0)
            else:
                case._judge(0, got, again, None)


def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that change places in a batch do not go unseen."""
    right = gather.put_together

    def wrong(order: Any, flow: Any) -> Any:
        rows = right(order, flow)
        return [*rows[1:], rows[0]] if isinstance(rows, list) else rows

    seed = next(seed for seed in range(100) if [stage.kind for stage in draw(seed).stages] == ["batch"])
    description = draw(seed)
    assert description.source.form != "arrow"
    check(description, tmp_path)
    monkeypatch.setattr(gather, "put_together", wrong)
    with pytest.raises(AssertionError, match="item 0 of epoch 0"):
        check(description, tmp_path)


def taken(loader: intune.Loader, form: str, stop: int | None) -> tuple[list[list[Row]], BaseException | None]:
    """The rows of the items of one epoch, up to some of them, and what ended it."""
    got: list[list[Row]] = []
    try:
        for item in loader:
            got.append(rows_of(item, form))
            if len(got) == stop:
                break
    except AssertionError:
        raise
    except Exception as error:
        if isinstance(error, intune.LoaderError):
            raise
        return got, error
    return got, None


def _unexpected(error: BaseException | None, failed: Failed | None) -> None:
    if error is not None and failed is None:
        raise AssertionError(f"{error!r} came, but nothing fails") from error


def _go_on(loader: intune.Loader, epoch: int, state: Any) -> None:
    if state is None:
        loader.set_epoch(epoch)
    else:
        loader.load_state_dict(state)


def _rows(items: list[list[Row]]) -> Counter[tuple[int, int]]:
    return Counter((number, x) for rows in items for number, x, _ in rows)


def _first(rows: Counter[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(rows.elements())[:10]
