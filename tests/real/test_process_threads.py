"""A worker process counts as one CPU: what the maths libraries in it use, and what the training process keeps."""

import os
import sys
import threading
import time
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

import intune

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ARROW_IO_THREADS")


def multiply(kind: str) -> dict[str, Any]:
    """Products of matrices for a while: wall and CPU seconds, and threads that are not Python's."""
    if kind == "numpy":
        a: Any = np.ones((600, 600))
        threads = None
    else:
        import torch

        a, threads = torch.ones(600, 600), torch.get_num_threads()
    a @ a  # starts what threads there are
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(30):
        a @ a
    return {
        "pid": os.getpid(),
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "native": len(os.listdir("/proc/self/task")) - threading.active_count(),
        "arrow": (pa.cpu_count(), pa.io_thread_count()),
        "torch": threads,
    }


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("how", ["map", "dataset"])
def test_each_uses_one_cpu_though_the_parent_has_the_libraries_loaded(
    kind: str, how: str, unset: pytest.MonkeyPatch
) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    np.ones((600, 600)) @ np.ones((600, 600))

    class Products:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return multiply(kind)

    if how == "map":
        pipe = intune.from_iterable([kind] * 6).map(multiply, executor="process", max_concurrency=1)
    else:
        pipe = intune.from_dataset(Products(), executor="process", max_concurrency=1)
    before = dict(os.environ), pa.cpu_count(), pa.io_thread_count()
    with pipe.loader(cpus=2) as loader:
        found = list(loader)
    assert (dict(os.environ), pa.cpu_count(), pa.io_thread_count()) == before
    assert os.getpid() not in {each["pid"] for each in found}
    for each in found:
        assert each["cpu"] <= 1.15 * each["wall"]
        assert each["native"] <= 2
        assert each["arrow"] == (1, 1)
        assert each["torch"] in (None, 1)


def test_what_the_user_chose_stays(unset: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    unset.setenv("OMP_NUM_THREADS", "2")
    unset.setenv("MKL_NUM_THREADS", "3")

    def look(kind: str) -> Any:
        return {name: os.environ[name] for name in NAMES}, multiply(kind)

    pipe = intune.from_iterable(["torch"]).map(look, executor="process", max_concurrency=1)
    with pipe.loader(cpus=2) as loader:
        ((environment, figures),) = loader
    assert environment == {**dict.fromkeys(NAMES, "2"), "MKL_NUM_THREADS": "3"}
    assert figures["arrow"][0] == 2
    assert figures["torch"] == 2
    assert torch.get_num_threads() == threads
