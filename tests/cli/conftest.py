"""A machine made of files, as the tests of what asks the system have it."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _fakes() -> ModuleType:
    file = Path(__file__).parents[1] / "_machine" / "conftest.py"
    spec = importlib.util.spec_from_file_location("fake_machine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    return _fakes().FakeMachine(tmp_path / "machine")
