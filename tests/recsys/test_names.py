"""What `intune.recsys` offers by name, and what importing it costs."""

import inspect
import subprocess
import sys

import pytest

import intune.recsys


def test_the_public_names_are_sorted_and_say_what_they_are() -> None:
    assert intune.recsys.__all__ == sorted(intune.recsys.__all__)
    for name in intune.recsys.__all__:
        thing = getattr(intune.recsys, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            assert method.startswith("_") or inspect.getdoc(function), f"{name}.{method} has no docstring"


@pytest.mark.slow
def test_features_need_neither_torch_nor_pandas() -> None:
    program = "import sys, intune.recsys; print({'torch', 'pandas', 'typer'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "set()", "")
