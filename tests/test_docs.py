"""The code of the documentation runs, page by page, as a reader would run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ["calibrate.md", "index.md", "from-a-dataloader.md", "questions.md", "simulator.md", "tuners.md"]


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(ROOT / "docs" / page)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_page_with_code_is_forgotten() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert [str(page.relative_to(ROOT / "docs")) for page in pages if blocks(page)] == sorted(PAGES)


def test_the_code_of_the_readme_is_python() -> None:
    """It speaks of the reader's own files and steps, so it cannot run here."""
    found = blocks(ROOT / "README.md")
    assert found
    for number, code in enumerate(found):
        compile(code, f"README.md, block {number}", "exec")
