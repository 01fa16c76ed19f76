"""Feed a model in training as fast as the machine allows.

A pipeline is a chain of stages; a loader runs it; a tuner decides how many items each stage may work on at
once while training runs, and a guard keeps that within the budget:

               snapshot                 proposal                 allocation
    Workload ------------> Tuner.propose ---------> Budget + Guard ---------> Workload.apply
       ^  a running loader                                                         |
       +------------------ Controller: one thread, one clock, one journal ---------+

    import intune

    pipe = intune.read_parquet("clicks/*.parquet").map(transform).shuffle(rows=500_000).batch(8192).to_torch()
    loader = pipe.loader(memory="24GiB")
    for epoch in range(3):
        for batch in loader:
            step(batch)
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from intune._errors import (
        AllocationError,
        IntuneError,
        LoaderError,
        MemoryLimitError,
        PipelineError,
        SourceError,
        StageError,
        StateError,
        WorkerDiedError,
    )
    from intune._read import from_dataset, from_iterable, read_csv, read_parquet, read_tsv
    from intune._values import Allocation, Budget, Snapshot, Tuner
    from intune._watch import watch
    from intune.pipeline.chain import Pipeline
    from intune.pipeline.loader import Loader

__version__ = "0.1.0.dev0"

__all__ = [
    "Allocation",
    "AllocationError",
    "Budget",
    "IntuneError",
    "Loader",
    "LoaderError",
    "MemoryLimitError",
    "Pipeline",
    "PipelineError",
    "Snapshot",
    "SourceError",
    "StageError",
    "StateError",
    "Tuner",
    "WorkerDiedError",
    "__version__",
    "from_dataset",
    "from_iterable",
    "read_csv",
    "read_parquet",
    "read_tsv",
    "watch",
]

_PLACES = {
    "_errors": (
        "AllocationError",
        "IntuneError",
        "LoaderError",
        "MemoryLimitError",
        "PipelineError",
        "SourceError",
        "StageError",
        "StateError",
        "WorkerDiedError",
    ),
    "_read": ("from_dataset", "from_iterable", "read_csv", "read_parquet", "read_tsv"),
    "_values": ("Allocation", "Budget", "Snapshot", "Tuner"),
    "_watch": ("watch",),
    "pipeline.chain": ("Pipeline",),
    "pipeline.loader": ("Loader",),
}
"""Where the public names are. Each is imported when it is first asked for: a worker process needs none of them, and the
command is to be able to end in good order before numpy and pyarrow are there.
"""

if not typing.TYPE_CHECKING:  # a checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> object:
        module = next((module for module, names in _PLACES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module 'intune' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"intune.{module}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
