"""The shape of the library, read from its source: who may import whom, what is light, and how long things are."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "intune"
MODULES = sorted(SOURCE.rglob("*.py"))

ROOT = {"__init__"}
VALUES = {"_values", "_errors", "_words", "_shares"}
BASE = VALUES | {"_clock", "_periodic", "_allocators"}
CORE = BASE | {"_machine", "metrics", "pipeline", "sources", "tuners", "control", "_compose", "_read", "_watch"}

MAY_IMPORT = {
    "_values": VALUES,
    "_errors": set(),
    "_words": set(),
    "_shares": set(),
    "_clock": VALUES,
    "_allocators": set(),
    "_periodic": VALUES | {"_clock"},
    "_machine": BASE,
    "metrics": BASE | {"_machine"},
    "pipeline": BASE | {"_machine", "metrics"},
    "sources": BASE | {"_machine", "metrics", "pipeline"},
    "tuners": VALUES,
    "control": BASE,
    "_watch": BASE,
    "_read": BASE | {"pipeline", "sources"},
    "_compose": BASE | {"_machine", "metrics", "pipeline", "tuners", "control"},
    "__init__": CORE,
    "sim": BASE | {"_machine", "metrics", "pipeline", "tuners", "control"},
    "testing": CORE | ROOT,
    "adapters": CORE | ROOT,
    "recsys": CORE | ROOT,
    "report": VALUES | {"control"},
    "cli": CORE | ROOT | {"adapters", "recsys", "report", "sim", "testing"},
}
"""By part of the library (a module or a folder at its top), the other parts that it may import.

A decision (`tuners`) has no clock, and what steers (`control`) knows a workload by its protocol only. Nobody imports
what sits on top (adapters, recsys, report), but the command.
"""

LAZY_EXCEPTIONS = {("pipeline/chain.py", "_compose")}
"""`Pipeline.loader` reaches the root that joins pipeline, tuners and control, from inside the method."""

CORE_NEEDS = {"numpy", "pyarrow", "psutil", "cloudpickle"}
EXTRAS = {"torch", "typer", "rich", "ray", "pyspark", "tensorflow", "jax", "scipy", "sklearn", "fsspec", "pandas"} | {
    "gymnasium",
    "matplotlib",
}
MAY_PRINT = ("cli/", "recsys/train", "_watch")


@dataclass(frozen=True)
class Import:
    """One name that a module imports: where, what, and whether only once a function is called."""

    module: str
    line: int
    target: str
    lazy: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def part_of(path: str) -> str:
    """The part at the top of the library that a file belongs to: "pipeline/chain.py" -> "pipeline"."""
    return path.split("/")[0].removesuffix(".py")


def imports_of(tree: ast.Module, module: str, package: str) -> list[Import]:
    """All imports of a module, those in functions too; relative ones are made absolute."""

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, child.lineno, alias.name, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, base] if base else above)
                for alias in child.names:
                    yield Import(module, child.lineno, f"{base}.{alias.name}", lazy, typing_only)
            else:
                inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                guarded = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
                yield from walk(child, inside, typing_only or guarded)

    return list(walk(tree, lazy=False, typing_only=False))


def read(path: Path) -> tuple[str, ast.Module]:
    return path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def all_imports() -> list[Import]:
    found = []
    for path in MODULES:
        name, tree = read(path)
        found += imports_of(tree, name, ".".join(["intune", *path.relative_to(SOURCE).parent.parts]))
    return found


def parts() -> set[str]:
    return {part_of(path.relative_to(SOURCE).as_posix()) for path in MODULES}


def imported_part(target: str) -> str | None:
    """The part of this library that an import reaches, or None: "intune.pipeline.chain.Pipeline" -> "pipeline"."""
    names = target.split(".")
    if names[0] != "intune":
        return None
    return names[1] if len(names) > 1 and names[1] in MAY_IMPORT.keys() | parts() else "__init__"


def test_every_part_has_its_place() -> None:
    unknown = parts() - set(MAY_IMPORT)
    assert not unknown, f"{sorted(unknown)}: say in MAY_IMPORT what the new part may import"


def test_every_folder_is_a_package() -> None:
    without = {path.parent for path in MODULES if not (path.parent / "__init__.py").exists()}
    assert not without


def test_imports_follow_the_arrows() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if (target := imported_part(found.target)) is not None
        and target != part_of(found.module)
        and target not in MAY_IMPORT[part_of(found.module)]
        and not (found.lazy and (found.module, target) in LAZY_EXCEPTIONS)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_only_its_four_dependencies_when_it_is_imported() -> None:
    allowed = CORE_NEEDS | {"intune"} | sys.stdlib_module_names
    wrong = [
        str(found)
        for found in all_imports()
        if part_of(found.module) in CORE | ROOT
        and not found.lazy
        and not found.typing_only
        and found.target.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_importing_the_library_loads_nothing_heavy() -> None:
    program = f"import sys; from intune import *; print(*sorted({EXTRAS!r} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, [], "")


def test_only_the_command_and_the_training_loop_print() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in map(read, MODULES)
        if not name.startswith(MAY_PRINT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_are_short() -> None:
    lines = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 500} == {}
    assert statistics.median(lines.values()) <= 200


def test_functions_are_short() -> None:
    lengths = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in map(read, MODULES)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    share_over = sum(length > 60 for length in lengths.values()) / len(lengths)
    longest = sorted(lengths.items(), key=lambda entry: -entry[1])[:10]
    assert share_over <= 0.05, f"{share_over:.1%} of functions have more than 60 lines; the longest: {longest}"


@pytest.mark.parametrize(
    ("line", "package", "target", "lazy"),
    [
        ("import intune.pipeline.chain", "intune", "intune.pipeline.chain", False),
        ("from intune import pipeline", "intune.control", "intune.pipeline", False),
        ("from . import plan", "intune.pipeline", "intune.pipeline.plan", False),
        ("from ..tuners.shared import Shared", "intune.pipeline", "intune.tuners.shared.Shared", False),
        ("from .. import _compose", "intune.pipeline", "intune._compose", False),
        ("try:\n    import torch\nexcept ImportError: pass", "intune", "torch", False),
        ("class A:\n    import torch", "intune", "torch", False),
        ("class A:\n    def f(self):\n        if self:\n            import torch", "intune", "torch", True),
    ],
)
def test_the_reader_of_imports_sees(line: str, package: str, target: str, lazy: bool) -> None:
    (found,) = imports_of(ast.parse(line), "module.py", package)
    assert (found.target, found.lazy) == (target, lazy)
