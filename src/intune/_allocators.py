"""Giving back to the system what allocators of this process keep unused."""

import ctypes
import sys
from typing import Any


def release_unused() -> None:
    """Give back what Arrow's pool keeps, if Arrow is in use at all, and the C library where it can."""
    arrow: Any = sys.modules.get("pyarrow")  # a worker process may do without it
    if arrow is not None and arrow.default_memory_pool().max_memory() != 0:  # else all of this would only cost memory
        # One of Arrow's allocators, mimalloc, does nothing in a thread that has not had memory of it.
        arrow.allocate_buffer(64)
        arrow.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
