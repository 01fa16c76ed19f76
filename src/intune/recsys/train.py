"""Train a DLRM on Criteo files: the loop that `intune train` runs, and an example of how to use the library.

read -> filter (training rows) -> transform -> shuffle -> batch -> to_torch -> model
read -> filter (held-out rows) -> transform -> batch -> to_torch -> AUC and log loss, once at the end
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import intune
from intune._errors import IntuneError, PipelineError, SourceError
from intune.pipeline.blocks import Block, block_rows
from intune.pipeline.source import BlockSource
from intune.recsys.checkpoint import load_checkpoint, save_checkpoint
from intune.recsys.config import TrainConfig
from intune.recsys.criteo import read_criteo
from intune.recsys.dlrm import DLRM
from intune.recsys.interrupts import WholeSteps
from intune.recsys.metrics import auc, log_loss
from intune.recsys.progress import Progress, Reporter, Standing
from intune.recsys.summary import Evaluation, MemoryPeak, Summary, measure

FEW_STEPS = 10


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
    the same order, as if it had never stopped.

    Args:
        config: What to do.
        resume: Go on with the run in `config.run_dir` instead of beginning a new one.
        echo: Where lines about the progress go.
        clock: Seconds, for the time limit and the progress.
        reporter: What shows how training goes; None = a line every two seconds, to `echo`.

    Raises:
        FileExistsError: If the run folder is there already and `resume` is False.
        StateError: If the run cannot be resumed: no checkpoint, or another model or other data than it began with.
        SourceError: If files are missing, are not Criteo's, or hold no rows.
        KeyboardInterrupt: On Ctrl-C, with a note that says how far it came.
        IntuneError: If the loss is not finite any more.
    """
    pipe = training_pipeline(config)
    _check_stages(config, pipe)
    loop = _Loop(config, echo, clock, reporter)
    state = loop.restore() if resume else None
    with pipe.loader(**_loader_options(config)) as trial:  # what is refused leaves no run folder behind
        if state is not None:
            trial.load_state_dict(state)
    if not resume:
        config.make_run_dir()
    journal = config.run_dir / "journal.jsonl"
    tuner = config.make_tuner()
    with pipe.loader(**_loader_options(config), tuner=tuner, epochs=config.epoch_limit, journal=journal) as loader:
        if state is not None and not loop.done:
            loader.load_state_dict(state)
        loop.rows_expected = expected_rows(config, pipe)
        loop.run(loader)
        limited_by, stats = loader.explain(), loader.stats()
        loop.memory.see_journal(loader.journal)
    evaluation = evaluate(config, loop.model) if config.held_out else None
    summary = Summary(
        rows_by_epoch=tuple(loop.rows_by_epoch),
        broken_off=loop.broken_off,
        seconds=loop.seconds,
        wait_seconds=stats.wait_seconds,
        loss_by_epoch=tuple(loop.losses.by_epoch),
        loss_first=loop.losses.first,
        loss_last=loop.losses.last,
        evaluation=evaluation,
        limited_by=limited_by,
        notes=tuple(_notes(config, loop.rows_by_epoch[0], evaluation)),
        run_dir=config.run_dir,
        measured=measure(stats, loop.seconds, loop.memory),
    )
    summary.write()
    if summary.rows_split_exactly is False:
        raise IntuneError(
            f"rows were lost or repeated: see rows_by_epoch and evaluation in {config.run_dir}/summary.json"
        )
    return summary


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
        _check_device(config.device)
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.default_generator.manual_seed(config.seed)
            self.model = DLRM(config.make_transform().table_rows, dim=config.dim).to(config.device)
        kind = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[config.optimizer]
        self.optimizer = kind(self.model.parameters(), lr=config.learning_rate)
        self.loss = nn.BCEWithLogitsLoss()
        self.losses = Losses()
        self.rows_by_epoch: list[int] = []
        self.broken_off = False
        self.seconds = 0.0
        self.memory = MemoryPeak()
        self.rows_expected: int | None = None
        self._rows_before = 0
        self._epoch = 0
        self._steps = 0
        self._saved = 0.0
        self._batches: Iterator[Any] | None = None
        self._whole = WholeSteps()

    @property
    def rows(self) -> int:
        return sum(self.rows_by_epoch)

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
        self._rows_before = self.rows
        self.echo(f"resuming after {self.rows:,} rows, in epoch {self._epoch}")
        return state

    def run(self, loader: intune.Loader) -> None:
        """Train until the epochs are done or the time is up."""
        begin = self._saved = self.clock()
        reporter = self.reporter or Progress(self.echo, self.clock)
        try:
            with self._whole:
                with reporter.running(lambda: loader.stats().window):
                    while not (self.done or self.broken_off):
                        self._train_epoch(loader, reporter, begin)
                        if not self.rows:
                            raise SourceError(f"no rows to train on: there are none in {', '.join(self.config.paths)}")
                self._save(loader)
                if self.broken_off:
                    self.losses.end_epoch()  # for the summary only: a resumed run goes on in this epoch
        except KeyboardInterrupt as stop:
            if loader.stats().batches == self._steps:  # else it came between a batch and its step
                self._save(loader)
            folder = self.config.run_dir
            saved = self.config.checkpoint.exists()
            then = f"to go on: intune train --resume {folder}" if saved else f"run folder {folder}"
            stop.add_note(f"after {self.rows:,} rows; {then}")
            raise
        finally:
            self._batches = None
            self.seconds = self.clock() - begin

    def _train_epoch(self, loader: intune.Loader, reporter: Reporter, begin: float) -> None:
        if len(self.rows_by_epoch) == self._epoch:
            self.rows_by_epoch.append(0)
        # Held here: where an iterator is dropped its epoch counts as over, and that is what would be saved.
        self._batches = iter(loader)
        for batch in self._batches:
            with self._whole.step():
                self.rows_by_epoch[-1] += self._step(batch)
                self._steps += 1
            if reporter.due():
                self._read_losses()
                reporter.say(self._standing(loader.stats().window))
            if self.config.checkpoint_seconds and self.clock() - self._saved >= self.config.checkpoint_seconds:
                self._save(loader)
            if self.config.seconds is not None and self.clock() - begin >= self.config.seconds:
                self.broken_off = True
                break
        self._read_losses()
        if not self.broken_off:
            self.losses.end_epoch()
            self._epoch += 1

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
        """Save model, optimizer and position, all after the same step."""
        if not self.config.checkpoint_seconds or not self._steps:
            return
        self._read_losses()
        position = {
            "loader": loader.state_dict(),
            "rows_by_epoch": self.rows_by_epoch,
            "losses": self.losses.as_dict(),
        }
        save_checkpoint(self.config.checkpoint, self.model, self.optimizer, position)
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
                f"the loss is not finite any more after {self.rows:,} rows; try a learning rate below "
                f"{self.config.learning_rate:g}"
            )


class Losses:
    """Losses of steps. They stay on the device until they are read, so that a GPU need not be waited for."""

    def __init__(
        self,
        by_epoch: Iterable[float] = (),
        first: Iterable[float] = (),
        last: Iterable[float] = (),
        total: float = 0.0,
        rows: int = 0,
    ) -> None:
        """Begin with none, or where `as_dict` said."""
        self.by_epoch = list(by_epoch)
        self._unread: list[tuple[Tensor, int]] = []
        self._first = list(first)
        self._last: deque[float] = deque(last, maxlen=FEW_STEPS)
        self._sum, self._rows = total, rows

    def as_dict(self) -> dict[str, Any]:
        """JSON of what was read so far, for a checkpoint."""
        return {
            "by_epoch": self.by_epoch,
            "first": self._first,
            "last": list(self._last),
            "total": self._sum,
            "rows": self._rows,
        }

    @property
    def first(self) -> float:
        """Mean of the first steps that were read, at most 10; NaN before."""
        return _mean(self._first)

    @property
    def last(self) -> float:
        """Mean of the last steps that were read, at most 10; NaN before."""
        return _mean(self._last)

    def add(self, loss: Tensor, rows: int) -> None:
        """Note the mean loss of a step's rows without reading it."""
        self._unread.append((loss, rows))

    def read(self) -> float:
        """Read what was noted and give the sum of all rows' losses in this epoch: not finite if any of them is not."""
        if self._unread:
            losses = torch.stack([loss for loss, _ in self._unread]).tolist()
            self._sum += sum(loss * rows for loss, (_, rows) in zip(losses, self._unread, strict=True))
            self._rows += sum(rows for _, rows in self._unread)
            self._first += losses[: FEW_STEPS - len(self._first)]
            self._last.extend(losses)
            self._unread.clear()
        return self._sum

    def end_epoch(self) -> None:
        """Note the mean loss of the rows since the last epoch's end."""
        self.by_epoch.append(self._sum / self._rows if self._rows else math.nan)
        self._sum, self._rows = 0.0, 0


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _loader_options(config: TrainConfig) -> dict[str, Any]:
    one_process = {"rank": 0, "world_size": 1}  # gradients are not shared, so each process trains on all rows
    return {"memory": config.memory, "cpus": config.cpus, "seed": config.seed, **one_process}


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch was built without CUDA
        raise PipelineError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


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
