"""Project rules that no linter checks: import time, sizes, docstrings, paths."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cairn").rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
HEAVY = ("torch", "triton", "transformers", "numpy")

FILE_LINES = 500
KERNEL_FILE_LINES = 700
FUNCTION_LINES = 80
PARAMETERS = 8
OPS = {"ops", "sequence"}
"""Packages of ops, whose signatures are API contracts."""

COMMAND = """
from cairn.cli.main import main
try:
    main({})
except SystemExit as end:
    assert not end.code
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Signature(NamedTuple):
    """Size of a function; `parameters` without self and cls."""

    name: str
    lines: int
    parameters: int


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements in a node; expressions contain none and are not searched."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.expr):
            yield from statements(child)


class Parsed(NamedTuple):
    """A file's functions, and its public names without a docstring."""

    functions: list[Signature]
    undocumented: list[str]


@cache
def parsed(path: Path) -> Parsed:
    """A file is read once for all tests."""
    module = tree(path)
    functions = [
        Signature(node.name, (node.end_lineno or 0) - node.lineno + 1, len(parameters(node.args)))
        for node in statements(module)
        if isinstance(node, Function)
    ]
    whole = [] if ast.get_docstring(module) else ["the file itself"]
    return Parsed(functions, whole + public_without_docstring(module))


def parameters(given: ast.arguments) -> list[str]:
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_kernel_file(path: Path) -> bool:
    return "@triton.jit" in path.read_text(encoding="utf-8")


LIGHT = (
    "import cairn",
    "import cairn.types, cairn.errors, cairn.names, cairn.config",
    "import cairn.obs.log, cairn.obs.progress",
    "from cairn import SamplingParams",
    "import cairn.cli.main",
    COMMAND.format(["--help"]),
    COMMAND.format(["serve", "--help"]),
    COMMAND.format(["generate", "--help"]),
    COMMAND.format(["bench", "latency", "--help"]),
    COMMAND.format(["eval", "needle", "--help"]),
)
"""Loads nothing heavy."""
WITHOUT_TORCH = (
    "import cairn.cache.paged, cairn.cache.invariants",
    "from cairn.config import default_model_path\n"
    "from cairn.models.registry import load_spec\n"
    "load_spec(default_model_path())",
    "import cairn.engine.client",
    "import cairn.server.app",
)
"""Loads neither torch nor triton nor transformers; NumPy may be loaded."""


def test_loads_nothing_heavy():
    """One process for all: what is loaded stays so, and the first that loads it is named."""
    script = "import sys\n" + "".join(
        f"exec({code!r}, {{}})\nassert not {set(heavy)} & set(sys.modules), {code!r}\n"
        for codes, heavy in ((LIGHT, HEAVY), (WITHOUT_TORCH, HEAVY[:3]))
        for code in codes
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr


def over_size(path: Path) -> Iterator[str]:
    """A file with too many lines, and its functions with too many."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > (KERNEL_FILE_LINES if is_kernel_file(path) else FILE_LINES):
        yield f"{name_of(path)} has {lines} lines"
    for function in parsed(path).functions:
        if function.lines > FUNCTION_LINES:
            yield f"{name_of(path)}: {function.name} has {function.lines} lines"


def test_size_budgets():
    assert not [found for path in FILES for found in over_size(path)]


def over_parameters(path: Path) -> Iterator[str]:
    """Functions of a file with too many parameters."""
    for function in parsed(path).functions:
        if function.parameters > PARAMETERS:
            yield f"{name_of(path)}: {function.name} has {function.parameters} parameters"


def test_parameter_budget():
    files = [path for path in SOURCES if not OPS & {*path.relative_to(ROOT).parts}]
    assert not [found for path in files for found in over_parameters(path)]


def public_without_docstring(node: ast.AST, prefix: str = "") -> list[str]:
    """Public functions, classes and methods of a module or class without a docstring."""
    missing = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef) or child.name.startswith("_"):
            continue
        decorators = {ast.unparse(d) for d in getattr(child, "decorator_list", [])}
        inherited = any(d.endswith((".setter", "override", "overload")) for d in decorators)
        if not inherited and ast.get_docstring(child) is None:
            missing.append(prefix + child.name)
        if isinstance(child, ast.ClassDef):
            missing += public_without_docstring(child, f"{prefix}{child.name}.")
    return missing


def test_public_names_have_docstrings():
    for path in SOURCES:
        assert not parsed(path).undocumented, name_of(path)


# Concatenated, so that this file does not contain the searched text.
OUTSIDE = re.compile("|".join((r"\.\./" + "shared", "/work" + "/", "/ho" + "me/", "/ro" + "ot/")))


def test_stands_alone():
    found = {name_of(path): OUTSIDE.search(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {path: match for path, match in found.items() if match}
