"""The command as tests call it, in this process; and what they begin one with that is a process of its own."""

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from intune.cli.app import app

PATIENT = "import intune.cli.stopping as ends; ends.Unwinding.__init__.__defaults__ = (None, 60.0)\n"
"""Begins a program in which the end that a signal brings may take long, as it does where the machine is busy."""


def invoke(*arguments: str) -> Result:
    """What the command did; what it did not expect comes out of it."""
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def user_error(*arguments: str) -> str:
    """The one line that a wrong command gives."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()
