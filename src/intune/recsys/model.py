"""What a training run begins with: a model that fits its configuration, the machine and the device."""

import torch
from torch import nn

from intune._errors import MemoryLimitError, PipelineError
from intune._machine import System, memory_limit
from intune._words import size
from intune.recsys.config import TrainConfig
from intune.recsys.dlrm import DLRM


def make_model(config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A DLRM with fresh weights of the configured seed, on its device, and its optimizer.

    Raises:
        PipelineError: If the device cannot be used.
        MemoryLimitError: If they do not fit into memory.
    """
    _check_device(config.device)
    table_rows = config.make_transform().table_rows
    kind = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[config.optimizer]
    copies = 2 if config.optimizer == "adagrad" else 1  # the sums of squares, too
    needed, limit = copies * 4 * config.dim * sum(table_rows), memory_limit(System()).limit_bytes
    too_large = f"rows_per_table={config.rows_per_table} takes {size(needed)} for the model and its optimizer"
    if limit is not None and needed > limit and config.device == "cpu":  # later the system would end the process
        raise MemoryLimitError(f"{too_large}, and this machine gives {size(limit)}: lower rows_per_table or dim")
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.default_generator.manual_seed(config.seed)
            model = DLRM(table_rows, dim=config.dim).to(config.device)
        return model, kind(model.parameters(), lr=config.learning_rate)
    except (RuntimeError, MemoryError) as error:  # what PyTorch raises where there is too little
        raise MemoryLimitError(f"{too_large}, which cannot be had: {str(error).splitlines()[0]}") from error


def _check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).item()  # "meta" makes tensors, but has no values
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch was built without CUDA
        raise PipelineError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
