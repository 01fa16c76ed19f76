"""The names that users may rely on, locked: adding or removing one is a decision, taken here."""

import importlib.metadata
import inspect
import subprocess
import sys
import types

import pytest

import intune

PIPELINES = ["Loader", "Pipeline", "from_dataset", "from_iterable", "read_csv", "read_parquet", "read_tsv", "watch"]
TUNING = ["Allocation", "Budget", "Snapshot", "Tuner"]
ERRORS = {
    "IntuneError": Exception,
    "PipelineError": ValueError,
    "SourceError": ValueError,
    "AllocationError": ValueError,
    "StateError": ValueError,
    "LoaderError": RuntimeError,
    "MemoryLimitError": MemoryError,
    "StageError": RuntimeError,
    "WorkerDiedError": RuntimeError,
}


def test_the_public_names_are_these_and_sorted() -> None:
    assert intune.__all__ == sorted([*PIPELINES, *TUNING, *ERRORS, "__version__"])


def test_nothing_else_looks_public() -> None:
    seen = {name for name in dir(intune) if not isinstance(getattr(intune, name), types.ModuleType)}
    assert {name for name in seen if not name.startswith("_")} == set(intune.__all__) - {"__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'intune' has no attribute 'read_orc'"):
        _ = intune.read_orc  # type: ignore[attr-defined]
    assert not hasattr(intune, "__wrapped__")


@pytest.mark.slow
def test_importing_it_waits_for_nothing_heavy_and_a_star_brings_all() -> None:
    program = (
        "import sys, intune, intune.cli.stopping\n"
        "assert not {'numpy', 'pyarrow'} & sys.modules.keys()\n"
        "from intune import *\n"
        "names = {name for name in globals() if name in intune.__all__}\n"
        "assert names == set(intune.__all__), names\n"
        "assert all(intune.__dict__[name] is globals()[name] for name in names)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("name", [*PIPELINES, *TUNING, *ERRORS])
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(intune, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
    for method, function in inspect.getmembers(thing, inspect.isfunction):
        if not method.startswith("_"):
            assert inspect.getdoc(function), f"{name}.{method} has no docstring"


@pytest.mark.parametrize(("name", "kind"), ERRORS.items())
def test_every_error_is_in_the_tree_and_of_its_built_in_kind(name: str, kind: type[Exception]) -> None:
    error = getattr(intune, name)
    assert issubclass(error, intune.IntuneError)
    assert issubclass(error, kind)
    assert name in (inspect.getmodule(error).__doc__ or ""), f"{name} is not drawn in the tree of errors"


def test_the_version_is_that_of_the_installed_package() -> None:
    assert intune.__version__ == importlib.metadata.version("intune")


def test_a_loader_can_be_used_where_a_torch_loader_is_expected() -> None:
    for method in ("__iter__", "__len__", "set_epoch", "state_dict", "load_state_dict", "close", "explain", "stats"):
        assert callable(getattr(intune.Loader, method)), method
