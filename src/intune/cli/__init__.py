"""The command `intune`; needs the extra `cli` (`pip install "intune[cli]"`)."""

import sys


def main() -> int:
    """Run the command, or say how to install what it needs."""
    try:
        from intune.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        print(f'error: the command needs {error.name}: pip install "intune[cli]"', file=sys.stderr)
        return 2
    app()
    return 0
