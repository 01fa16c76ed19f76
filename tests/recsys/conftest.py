"""What the tests with models share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Steps this small are slower with several threads, far slower on a busy machine."""
    try:
        import torch
    except ModuleNotFoundError:  # the tests without models go on
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
