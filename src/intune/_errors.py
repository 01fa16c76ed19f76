"""Every error that the library raises by itself.

A function of the user that raises is *not* wrapped: its own exception comes out of the loader, with
notes that name the stage, the file and the row group or byte range. These are the others:

    IntuneError
    ├── PipelineError (ValueError)      a chain that contradicts itself, found when it is built
    ├── SourceError (ValueError)        input that is missing, unreadable or not what was declared
    ├── AllocationError (ValueError)    an allocation or budget that cannot be applied
    ├── StateError (ValueError)         a saved state that does not fit this loader
    ├── LoaderError (RuntimeError)      a loader used in a way that it cannot be
    ├── MemoryLimitError (MemoryError)  what a pipeline needs does not fit its memory limit
    ├── StageError (RuntimeError)       a function failed and its own exception could not be rebuilt
    └── WorkerDiedError (RuntimeError)  a worker process ended without an answer
"""


class IntuneError(Exception):
    """Base of every error of this library."""


class PipelineError(IntuneError, ValueError):
    """A chain contradicts itself; raised where it is built, naming the stage."""


class SourceError(IntuneError, ValueError):
    """Input is missing, unreadable or differs from what was declared."""


class AllocationError(IntuneError, ValueError):
    """An allocation or a budget names an unknown stage, misses one, or has a value that is not allowed."""


class StateError(IntuneError, ValueError):
    """A saved state does not fit this loader; the message names the difference."""


class LoaderError(IntuneError, RuntimeError):
    """A loader is closed, lives in a forked child, or already has a live iterator."""


class MemoryLimitError(IntuneError, MemoryError):
    """What a pipeline needs at least does not fit its memory limit; the message has the figures."""


class StageError(IntuneError, RuntimeError):
    """A function failed in a worker process and its own exception could not be rebuilt here."""


class WorkerDiedError(IntuneError, RuntimeError):
    """A worker process ended without an answer; the message names stage, signal and memory figures."""
