"""`intune doctor`: what this machine gives, what the library would make of it, and what to fix."""

from typing import Annotated

import typer

from intune._machine import System
from intune.cli.endings import clean_endings, say

SERIOUS = 1
"""Exit code where something would break training or slow it down badly."""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Import PyTorch and ask it for its CUDA devices.")] = False,
) -> None:
    """Say what this machine gives and what to fix; exit code 1 if training would break or be badly slowed."""
    from intune.cli.facts import gather
    from intune.cli.findings import findings
    from intune.cli.plain import to_json, to_lines

    with clean_endings():
        facts = gather(System(), ask_torch=gpu)
        found = findings(facts)
        for line in [to_json(facts, found)] if json else to_lines(facts, found):
            say(line)
        if any(finding.severity == "serious" for finding in found):
            raise typer.Exit(SERIOUS)
