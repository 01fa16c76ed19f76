"""What a training run is told."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from intune._errors import IntuneError, PipelineError, StateError
from intune._values import Tuner
from intune.recsys.criteo import Format
from intune.recsys.transforms import CriteoTransform
from intune.tuners import NAMES, RandomMoves, Static, make_tuner, unknown_tuner

OptimizerName: TypeAlias = Literal["adagrad", "sgd"]

OPTIMIZERS: tuple[OptimizerName, ...] = ("adagrad", "sgd")

MAY_CHANGE = frozenset(
    {"epochs", "seconds", "tuner", "concurrency", "cpus", "memory", "executor", "device", "checkpoint_seconds"}
)
"""Fields that may be others when a run is resumed: neither the rows nor what the model makes of them depend on them."""

_BEGAN_IN = "began_in"
"""In config.json beside the fields: the folder that relative paths start from."""

_LEAST_HELD_OUT = 1e-9
"""No block has so many rows that less would hold one out."""

TUNERS = (*NAMES, "static", "random")


@dataclass(frozen=True)
class TrainConfig:
    """What to train on, for how long and how.

    Attributes:
        paths: Files, folders or patterns of Criteo data (`read_criteo`).
        run_dir: Folder that is made for this run; it must not be there yet.
        format: "tsv", "parquet" or "auto".
        epochs: Passes over the training rows; None = one, or as many as fit `seconds` where that is given.
        seconds: Stop training after so many seconds; None = when the epochs are done.
        batch_size: Rows a step.
        shuffle_rows: Rows of a shuffle window; 0 = the order of the files.
        held_out: Share of the rows that is kept for evaluation, 0 or 1e-9 to 0.5: every k-th row of a block,
            k = round(1 / share).
        tuner: While training, one of `intune.tuners.NAMES`, or "static", or "random", which is for tests.
        concurrency: By stage, the most items it works on at once; for the tuner "static", which needs it.
        cpus: CPU slots of the loader; None = what the machine gives.
        memory: Limit for the whole process: "4GiB", bytes, or a share of what the machine gives, "50%" or 0.5; None =
            what the machine gives.
        seed: Seed of the row order, the first weights and a random tuner, 0 to 2**63-1.
        executor: Where filter and transform run: "thread" or "process".
        device: Where the model lives: "cpu", "cuda", "cuda:1".
        rows_per_table: Rows of each of the 26 embedding tables.
        dim: Width of the embeddings.
        optimizer: "adagrad" or "sgd".
        learning_rate: Step of the optimizer.
        checkpoint_seconds: How often model, optimizer and position are saved, apart from the end and a Ctrl-C; 0 =
            never.
    """

    paths: tuple[str, ...]
    run_dir: Path
    format: Format = "auto"
    epochs: int | None = None
    seconds: float | None = None
    batch_size: int = 2048
    shuffle_rows: int = 200_000
    held_out: float = 0.1
    tuner: str = "model"
    concurrency: Mapping[str, int] = field(default_factory=dict)
    cpus: int | None = None
    memory: str | int | float | None = None
    seed: int = 0
    executor: Literal["thread", "process"] = "thread"
    device: str = "cpu"
    rows_per_table: int = 100_000
    dim: int = 16
    optimizer: OptimizerName = "adagrad"
    learning_rate: float = 0.02
    checkpoint_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained with."""
        allowed = {
            "paths": (bool(self.paths), "at least one path"),
            "epochs": (self.epochs is None or self.epochs >= 1, "at least 1"),
            "seconds": (self.seconds is None or self.seconds > 0, "more than 0"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "shuffle_rows": (self.shuffle_rows >= 0, "at least 0; 0 = no shuffle"),
            "held_out": (
                0 <= self.held_out <= 0.5 and not 0 < self.held_out < _LEAST_HELD_OUT,
                f"a share from 0 to 0.5, so that rows are left to train on, and 0 or at least {_LEAST_HELD_OUT:g}",
            ),
            "seed": (0 <= self.seed < 2**63, "from 0 to 2**63-1"),
            "dim": (self.dim >= 1, "at least 1"),
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "learning_rate": (self.learning_rate > 0, "more than 0"),
            "checkpoint_seconds": (self.checkpoint_seconds >= 0, "at least 0; 0 = no checkpoints"),
        }
        for name, (fine, text) in allowed.items():
            if not fine:
                raise PipelineError(f"{name} must be {text}, got {getattr(self, name)!r}")
        self.make_transform()
        self.make_tuner()

    @property
    def epoch_limit(self) -> int | None:
        """Epochs to train at most; None = until the time is up."""
        return 1 if self.epochs is None and self.seconds is None else self.epochs

    def make_transform(self) -> CriteoTransform:
        """The transform that fits the model's tables."""
        return CriteoTransform(self.rows_per_table)

    def make_tuner(self) -> Tuner:
        """A new tuner.

        Raises:
            PipelineError: If there is none of that name, or "static" and `concurrency` do not come together.
        """
        if (self.tuner == "static") != bool(self.concurrency):
            raise PipelineError(
                f"the tuner 'static' and a concurrency of stages need each other, got tuner {self.tuner!r} and "
                f"concurrency {dict(self.concurrency)}"
            )
        if self.tuner not in TUNERS:
            raise unknown_tuner(self.tuner, TUNERS)
        if self.tuner == "static":
            return Static(self.concurrency)
        return RandomMoves(self.seed) if self.tuner == "random" else make_tuner(self.tuner)

    @classmethod
    def read(cls, run_dir: Path, changes: Mapping[str, Any]) -> "TrainConfig":
        """The configuration of an earlier run, to go on with it.

        Args:
            run_dir: Its folder.
            changes: Fields that are given now. Those of `MAY_CHANGE` may have other values than the run began with, the
                rest must have the same; paths are the same however they are written.

        Raises:
            StateError: If the folder is not one of a run, or a change would make it another run.
        """
        try:
            fields = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise TypeError(f"config.json holds {json.dumps(fields)[:40]} in place of names and values")
            began_in = fields.pop(_BEGAN_IN, os.curdir)
            here = os.path.samefile(began_in, os.curdir) if os.path.isdir(began_in) else False
            paths = tuple(path if here else _absolute(path, began_in) for path in fields["paths"])
            fields |= {"run_dir": run_dir, "paths": paths}
            _check_unchanged(fields, changes, began_in)
            return cls(**fields | {name: changes[name] for name in changes if name in MAY_CHANGE})
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, IntuneError):
                raise
            raise StateError(f"{run_dir} is not the folder of a run that could be resumed: {error}") from error

    @property
    def checkpoint(self) -> Path:
        """File of the run's checkpoint."""
        return self.run_dir / "checkpoint.npz"

    @property
    def hold_out_every(self) -> int:
        """k: each k-th row of a block is held out; 0 = none is."""
        return round(1 / self.held_out) if self.held_out else 0

    def as_json(self) -> str:
        """What `read` reads: the fields, and the folder that relative paths start from."""
        fields = asdict(self) | {"run_dir": str(self.run_dir), _BEGAN_IN: os.getcwd()}
        return json.dumps(fields, indent=2) + "\n"


def _check_unchanged(fields: Mapping[str, Any], given: Mapping[str, Any], began_in: str) -> None:
    """Refuse what would make a run another one.

    Args:
        fields: What it began with.
        given: What is given now.
        began_in: Folder that relative paths started from.
    """
    fixed = sorted(set(given) - MAY_CHANGE)
    other = [name for name in fixed if _alike(name, given[name], os.curdir) != _alike(name, fields[name], began_in)]
    if other:
        was, now = (", ".join(f"{name}={_shown(side[name])}" for name in other) for side in (fields, given))
        may = ", ".join(f"{name}=" for name in sorted(MAY_CHANGE))
        raise StateError(
            f"the run in {fields['run_dir']} was begun with {was} and keeps that, got {now}; leave it out, or begin "
            f"a new run; what may be given anew: {may}"
        )


def _alike(name: str, value: Any, folder: str) -> Any:
    """A value in the form in which two of them can be compared."""
    if name == "paths":
        return sorted({_real(path, folder) for path in value})
    return os.path.realpath(value) if name == "run_dir" else value


def _real(path: str, folder: str) -> str:
    absolute = _absolute(path, folder)
    return absolute.rstrip("/") if "://" in absolute else os.path.realpath(absolute)


def _absolute(path: str, folder: str) -> str:
    """The path, where it is relative from that folder on; URIs stay."""
    return path if "://" in path else os.path.join(folder, path)


def _shown(value: Any) -> str:
    return repr(" ".join(value)) if isinstance(value, tuple | list) else repr(str(value))
