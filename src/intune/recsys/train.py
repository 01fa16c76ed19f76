"""Train a DLRM on Criteo files: the loop that `intune train` runs, and an example of how to use the library.

read -> filter (training rows) -> transform -> shuffle -> batch -> to_torch -> model
read -> filter (held-out rows) -> transform -> batch -> to_torch -> AUC and log loss, once at the end
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import intune
from intune._errors import IntuneError, PipelineError, SourceError, StateError
from intune._words import count
from intune.pipeline.blocks import Block, block_rows
from intune.pipeline.source import BlockSource
from intune.recsys.checkpoint import load_checkpoint, load_position, save_checkpoint
from intune.recsys.config import TrainConfig
from intune.recsys.criteo import read_criteo
from intune.recsys.interrupts import BrokenOff, Interrupts
from intune.recsys.losses import Losses
from intune.recsys.metrics import auc, log_loss
from intune.recsys.model import make_model
from intune.recsys.progress import Progress, Reporter, Standing
from intune.recsys.recall import kept, recall
from intune.recsys.run_folder import RunFolder
from intune.recsys.summary import Evaluation, Measured, MemoryPeak, Summary, limited_by, measure


@dataclass(frozen=True)
class EveryKth:
    """A filter of blocks by position: the last of each k rows of a block is held out, or all but it are kept.

    The two choices split any block exactly. Blocks depend on files and options only, so the split is the same in
    every epoch and on every machine.
    """

    k: int
    held_out: bool

    def __call__(self, block: Block) -> npt.NDArray[np.bool_]:
        """Say which rows to keep: bool[n]."""
        last: npt.NDArray[np.bool_] = np.arange(1, block_rows(block) + 1) % self.k == 0
        return last if self.held_out else ~last


def training_pipeline(config: TrainConfig) -> intune.Pipeline:
    """The pipeline that trains: dicts of `label` float32[n], `dense` float32[n, 13] and `sparse` int64[n, 26]."""
    pipe = _transformed(config, held_out=False)
    if config.shuffle_rows:
        pipe = pipe.shuffle(config.shuffle_rows)
    return pipe.batch(config.batch_size).to_torch(device=config.device)


def evaluation_pipeline(config: TrainConfig) -> intune.Pipeline:
    """The same over the held-out rows, in the order of the files."""
    return _transformed(config, held_out=True).batch(config.batch_size).to_torch(device=config.device)


def _transformed(config: TrainConfig, *, held_out: bool) -> intune.Pipeline:
    pipe = read_criteo(config.paths, format=config.format, executor=config.executor)
    if config.held_out:
        pipe = pipe.filter(
            EveryKth(config.hold_out_every, held_out), name="held_out_rows" if held_out else "training_rows"
        )
    return pipe.map(config.make_transform(), name="criteo_transform", executor=config.executor)


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    echo: Callable[[str], object] = print,
    clock: Callable[[], float] = time.perf_counter,
    reporter: Reporter | None = None,
) -> Summary:
    """Train, evaluate, and leave config.json, journal.jsonl, checkpoint.npz and summary.json in the run folder.

    A run that was stopped, by whatever means, goes on from its last checkpoint: each row is trained on as often, and in
    the same order, as if it had never stopped. One that fails before its first step leaves no run folder.

    Args:
        config: What to do.
        resume: Go on with the run in `config.run_dir` instead of beginning a new one.
        echo: Where lines about the progress go.
        clock: Seconds, for the time limit and the progress.
        reporter: What shows how training goes; None = a line every two seconds, to `echo`.

    Raises:
        FileExistsError: If the run folder is there already and `resume` is False.
        StateError: If the run cannot be resumed: no checkpoint, another model or other data than it began with,
            nothing left to do, or another process has it in hand.
        SourceError: If files are missing, are not Criteo's, or hold no rows.
        KeyboardInterrupt: On Ctrl-C, and on any signal whose handler raises it, with a note that says how far it came.
            While it trains, the step in hand is done and all is saved first; what a second signal finds unfinished two
            seconds later is broken off. The last checkpoint stands then.
        IntuneError: If the loss is not finite any more, or something cannot be written.
    """
    with RunFolder(config.run_dir) as folder:
        if resume:
            folder.claim()
            if finished := already_finished(config):
                raise StateError(finished)
        pipe = training_pipeline(config)
        _check_stages(config, pipe)
        loop = _Loop(config, echo, clock, reporter)
        state = loop.restore() if resume else None
        with pipe.loader(**_loader_options(config)) as trial:  # what is refused makes no run folder
            if state is not None:
                trial.load_state_dict(state)
        with _gone_unless_begun(folder, loop), loop.noting_interrupts():
            if not resume:
                folder.make(config.as_json())
            return _train_and_evaluate(config, pipe, loop, state)


@contextmanager
def _gone_unless_begun(folder: RunFolder, loop: "_Loop") -> Iterator[None]:
    """Delete a run folder that this run has made if it ends by an error before its first step."""
    try:
        yield
    except BaseException as error:
        if not loop.begun:
            try:
                folder.remove()
            except OSError as left:
                error.add_note(f"the run folder {folder.path} could not be removed: {left.strerror or left}")
        raise


def already_finished(config: TrainConfig) -> str | None:
    """What there is to say if all epochs of a run are trained and evaluated; None if something is left to do.

    Raises:
        StateError: If it has no checkpoint, or has begun more epochs than it is to have.
    """
    position = load_position(config.checkpoint)
    rows_by_epoch: list[int] = position["rows_by_epoch"]
    trained, begun, limit = position["loader"]["epoch"], len(rows_by_epoch), config.epoch_limit
    if limit is None or trained < limit:
        return None
    try:
        evaluated = json.loads((config.run_dir / "summary.json").read_text(encoding="utf-8"))["rows_by_epoch"]
    except (OSError, ValueError, KeyError, TypeError):  # it was stopped before, or while, that was written
        evaluated = None
    if trained == begun and evaluated == rows_by_epoch:
        return (
            f"the run in {config.run_dir} is already finished after {count(begun, 'epoch')}, "
            f"{count(sum(rows_by_epoch), 'row')}; to go on, epochs must be above {begun}"
        )
    if begun > limit:
        raise StateError(f"epochs must be at least {begun}: so many are begun in {config.run_dir}, got {limit}")
    return None


def _train_and_evaluate(
    config: TrainConfig, pipe: intune.Pipeline, loop: "_Loop", state: Mapping[str, Any] | None
) -> Summary:
    if loop.done:  # it was stopped before it was evaluated
        measured = Measured(wait_share=_share(loop.wait_seconds, loop.seconds))
    else:
        measured = _train_on(config, pipe, loop, state)
    evaluation = evaluate(config, loop.model) if config.held_out else None
    summary = Summary(
        rows_by_epoch=tuple(loop.rows_by_epoch),
        broken_off=loop.broken_off,
        seconds=loop.seconds,
        wait_seconds=loop.wait_seconds,
        loss_by_epoch=tuple(loop.losses.by_epoch),
        loss_first=loop.losses.first,
        loss_last=loop.losses.last,
        evaluation=evaluation,
        limited_by=limited_by(_journal(config)),
        notes=tuple(_notes(config, loop.rows_by_epoch[0], evaluation)),
        run_dir=config.run_dir,
        measured=measured,
    )
    try:
        summary.write()
    except IntuneError as error:
        error.add_note(loop.how_to_go_on())
        raise
    if summary.rows_split_exactly is False:
        raise IntuneError(
            f"rows were lost or repeated: see rows_by_epoch and evaluation in {config.run_dir}/summary.json"
        )
    return summary


def _journal(config: TrainConfig) -> Path:
    return config.run_dir / "journal.jsonl"


def _train_on(config: TrainConfig, pipe: intune.Pipeline, loop: "_Loop", state: Mapping[str, Any] | None) -> Measured:
    """Train from a state on; what was measured."""
    options = {**_loader_options(config), "tuner": loop.tuner, "journal": _journal(config)}
    with pipe.loader(**options, epochs=config.epoch_limit) as loader:
        if state is not None:
            loader.load_state_dict(state)
        loop.rows_expected = expected_rows(config, pipe)
        loop.run(loader)
        stats = loader.stats()
        loop.memory.see_journal(loader.journal)
    return measure(replace(stats, wait_seconds=loop.wait_seconds), loop.seconds, loop.memory)


def expected_rows(config: TrainConfig, pipe: intune.Pipeline) -> int | None:
    """About how many rows an epoch trains on, where the files say how many they hold; None where they do not."""
    known = pipe.source.unit_rows() if isinstance(pipe.source, BlockSource) else None
    if known is None:
        return None
    rows = sum(known)
    return rows - rows // config.hold_out_every if config.held_out else rows


def evaluate(config: TrainConfig, model: nn.Module) -> Evaluation:
    """Predict the held-out rows and compare; the loader's stages stay open, whatever the tuner of the training."""
    labels, logits = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    with evaluation_pipeline(config).loader(**_loader_options(config)) as loader, torch.inference_mode():
        for batch in loader:
            labels.append(batch["label"].cpu().numpy())
            logits.append(model(batch["dense"], batch["sparse"]).cpu().numpy())
        reader = next(iter(loader.stats().stages.values()))
    truth, scores = np.concatenate(labels), np.concatenate(logits)
    return Evaluation(len(truth), reader.rows, auc(truth, scores), log_loss(truth, scores))


class _Loop:
    """The training loop and what it counts."""

    def __init__(
        self,
        config: TrainConfig,
        echo: Callable[[str], object],
        clock: Callable[[], float],
        reporter: Reporter | None,
    ) -> None:
        self.config = config
        self.echo = echo
        self.clock = clock
        self.reporter = reporter
        self.model, self.optimizer = make_model(config)
        self.tuner = config.make_tuner()
        self.loss = nn.BCEWithLogitsLoss()
        self.losses = Losses()
        self.rows_by_epoch: list[int] = []
        self.broken_off = False
        self.seconds = self.wait_seconds = 0.0
        """Of all sessions, as the rows are."""
        self.memory = MemoryPeak()
        self.rows_expected: int | None = None
        self._rows_before = 0
        self._seconds_before = self._wait_before = 0.0
        self._rows_saved: int | None = None
        self._epoch = 0
        self._steps = 0
        self._stepped = self._over = False
        self._began = self._saved = 0.0
        self._stop = Interrupts(lambda: None)

    @property
    def rows(self) -> int:
        return sum(self.rows_by_epoch)

    @property
    def begun(self) -> bool:
        """Whether a step was done, now or in an earlier session."""
        return bool(self._steps or self._rows_before)

    @property
    def done(self) -> bool:
        """Whether all epochs have been trained."""
        limit = self.config.epoch_limit
        return limit is not None and self._epoch >= limit

    def restore(self) -> dict[str, Any]:
        """Take up the run from its checkpoint; the state of its loader."""
        position = load_checkpoint(self.config.checkpoint, self.model, self.optimizer)
        self.rows_by_epoch = position["rows_by_epoch"]
        self.losses = Losses(**position["losses"])
        state: dict[str, Any] = position["loader"]
        self._epoch = state["epoch"]
        if len(self.losses.by_epoch) < self._epoch:  # it was saved after the epoch's last step
            self.losses.end_epoch()
        recall(self.config.tuner, self.tuner, position.get("tuner"), self.echo)
        self._rows_before = self._rows_saved = self.rows
        self.seconds = self._seconds_before = position["seconds"]
        self.wait_seconds = self._wait_before = position["wait_seconds"]
        self.echo(f"resuming after {count(self.rows, 'row')}, in epoch {self._epoch}")
        return state

    def run(self, loader: intune.Loader) -> None:
        """Train until the epochs are done or the time is up.

        Raises:
            KeyboardInterrupt: After a signal, with a note; what was done by then is saved.
        """
        self._began = self._saved = self.clock()
        reporter = self.reporter or Progress(self.echo, self.clock)
        wrong = ""
        with Interrupts(lambda: self._position(loader)) as self._stop:
            try:
                with reporter.running(lambda: loader.stats().window):
                    while not (self.done or self.broken_off or self._stop.asked):
                        self._train_epoch(loader, reporter)
                        if not self.rows and not self._stop.asked:
                            raise SourceError(f"no rows to train on: there are none in {', '.join(self.config.paths)}")
                self._save(loader)
            except BrokenOff:
                wrong = "what was in hand did not end in time, so they are not saved"
            except KeyboardInterrupt as stop:  # raised by other means than a signal
                stop.add_note(self._how_far("they are not saved"))
                raise
            except IntuneError as error:
                if not self._stop.asked:
                    raise
                wrong = f"they are not saved, for {error}"
            finally:
                self._count_seconds(loader)
        try:
            self._stop.deliver()
        except KeyboardInterrupt as stop:
            stop.add_note(self._how_far(wrong))
            raise
        self._over = True
        if self.broken_off:
            self.losses.end_epoch()  # for the summary only: a resumed run goes on in this epoch

    def _train_epoch(self, loader: intune.Loader, reporter: Reporter) -> None:
        if len(self.rows_by_epoch) == self._epoch:
            self.rows_by_epoch.append(0)
        self._stepped = False
        batches = iter(loader)
        while (batch := self._stop.wait(lambda: next(batches, None))) is not None:
            self.rows_by_epoch[-1] += self._step(batch)
            self._steps += 1
            self._stepped = True
            if reporter.due():
                self._read_losses()
                reporter.say(self._standing(loader.stats().window))
            if self.config.checkpoint_seconds and self.clock() - self._saved >= self.config.checkpoint_seconds:
                self._save(loader)
            if self.config.seconds is not None and self.clock() - self._began >= self.config.seconds:
                self.broken_off = True
                break
        self._read_losses()
        if not (self.broken_off or self._stop.asked):
            self.losses.end_epoch()
            self._epoch += 1

    def _position(self, loader: intune.Loader) -> dict[str, Any] | None:
        """Where the loader stands while the loop waits for it; None = it has just handed something over."""
        if not self._steps:  # nothing to save, so the start will do
            return {}
        state = loader.state_dict()
        # Before the first step of an epoch the loader may be just about to begin it, and count it as begun.
        fits = state["epoch"] == self._epoch or (state["epoch"] == self._epoch + 1 and self._stepped)
        return state if fits and loader.stats().batches == self._steps else None

    def _count_seconds(self, loader: intune.Loader) -> None:
        self.seconds = self._seconds_before + self.clock() - self._began
        self.wait_seconds = self._wait_before + loader.stats().wait_seconds

    @contextmanager
    def noting_interrupts(self) -> Iterator[None]:
        """Have an interrupt that comes when training is over say so."""
        try:
            yield
        except KeyboardInterrupt as stop:
            if (self._over or self.done) and not getattr(stop, "__notes__", ()):
                stop.add_note(f"after training, before all of its summary was written; {self.how_to_go_on()}")
            raise

    def how_to_go_on(self) -> str:
        """What is kept of the run, for a person."""
        folder = self.config.run_dir
        if not self.begun:
            return f"the run folder {folder} is removed again"
        if self._rows_saved is None:
            return f"there is no checkpoint in the run folder {folder}"
        saved = (
            "" if self._rows_saved == self.rows else f"the checkpoint after {count(self._rows_saved, 'row')} stands; "
        )
        return f"{saved}to go on: intune train --resume {folder}"

    def _how_far(self, wrong: str) -> str:
        if not self._steps:
            return f"before the first step, so nothing was saved; {self.how_to_go_on()}"
        if not self.config.checkpoint_seconds:
            wrong = "they are not saved, as checkpoint_seconds=0 has it"
        said = [f"after {count(self.rows, 'row')}", wrong, self.how_to_go_on()]
        return "; ".join(said if self._rows_saved != self.rows else [said[0], said[2]])

    def _standing(self, window: intune.Snapshot | None) -> Standing:
        self.memory.see(window)
        epochs = self.config.epoch_limit
        of_one = self.rows_by_epoch[0] if self._epoch else self.rows_expected  # each has as many as the first
        return Standing(
            epoch=self._epoch,
            rows=self.rows,
            loss=self.losses.last,
            window=window,
            rows_before=self._rows_before,
            rows_total=None if epochs is None or of_one is None else epochs * of_one,
            seconds_limit=self.config.seconds,
        )

    def _save(self, loader: intune.Loader) -> None:
        """Save model, optimizer and position, all after the same step.

        Raises:
            IntuneError: If that fails; an older checkpoint stands.
        """
        if not self.config.checkpoint_seconds or not self._steps:
            return
        self._read_losses()
        state = self._stop.position if self._stop.broke_wait else loader.state_dict()
        if state is None:
            raise IntuneError("where the loader stands could not be found out in time")
        self._count_seconds(loader)
        position = {
            "loader": state,
            "rows_by_epoch": self.rows_by_epoch,
            "losses": self.losses.as_dict(),
            "seconds": self.seconds,
            "wait_seconds": self.wait_seconds,
            "tuner": kept(self.config.tuner, self.tuner),
        }
        try:
            save_checkpoint(self.config.checkpoint, self.model, self.optimizer, position)
        except OSError as error:
            raise IntuneError(f"{self.config.checkpoint} cannot be written: {error.strerror or error}") from error
        self._rows_saved = self.rows
        self._saved = self.clock()

    def _step(self, batch: Mapping[str, Tensor]) -> int:
        label = batch["label"]
        loss = self.loss(self.model(batch["dense"], batch["sparse"]), label)
        self.optimizer.zero_grad()
        loss.backward()
        # Without a yes or no to these checks, PyTorch warns.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.losses.add(loss.detach(), len(label))
        return len(label)

    def _read_losses(self) -> None:
        if not math.isfinite(self.losses.read()):
            raise IntuneError(
                f"the loss is not finite any more after {count(self.rows, 'row')}; try a learning rate below "
                f"{self.config.learning_rate:g}"
            )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def _loader_options(config: TrainConfig) -> dict[str, Any]:
    one_process = {"rank": 0, "world_size": 1}  # gradients are not shared, so each process trains on all rows
    return {"memory": config.memory, "cpus": config.cpus, "seed": config.seed, **one_process}


def _check_stages(config: TrainConfig, pipe: intune.Pipeline) -> None:
    names = [pipe.source.kind, *(stage.name for stage in pipe.stages)]
    if unknown := [name for name in config.concurrency if name not in names]:
        raise PipelineError(f"no stage {unknown[0]!r} to set the concurrency of; there are {', '.join(names)}")


def _notes(config: TrainConfig, rows: int, evaluation: Evaluation | None) -> Iterator[str]:
    if config.batch_size > rows:
        yield f"the batch size ({config.batch_size:,}) is larger than the {rows:,} training rows: one step an epoch"
    if evaluation is None:
        return
    if not evaluation.rows:
        yield f"no rows were held out: no block has {config.hold_out_every:,} rows; AUC is undefined"
    elif evaluation.auc is None:
        yield "AUC is undefined: all held-out labels are the same"
