"""Rules of the whole project that no linter holds: import time, sizes, docstrings, paths."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cairn").rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
HEAVY = ("torch", "triton", "transformers", "numpy")

FILE_LINES = 500
KERNEL_FILE_LINES = 700
FUNCTION_LINES = 80
PARAMETERS = 8
OPS = {"ops", "sequence"}
"""Packages of ops, whose signatures are contracts."""

COMMAND = """
from cairn.cli.main import main
try:
    main({})
except SystemExit as end:
    assert not end.code
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Signature(NamedTuple):
    """Sizes of a function; `parameters` without self and cls."""

    name: str
    lines: int
    parameters: int


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements in a node; expressions, which hold none, are not searched."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.expr):
            yield from statements(child)


@cache
def functions(path: Path) -> list[Signature]:
    """The functions of a file."""
    return [
        Signature(node.name, (node.end_lineno or 0) - node.lineno + 1, len(parameters(node.args)))
        for node in statements(tree(path))
        if isinstance(node, Function)
    ]


def parameters(given: ast.arguments) -> list[str]:
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_kernel_file(path: Path) -> bool:
    return "@triton.jit" in path.read_text(encoding="utf-8")


def modules_loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('LOADED', *sorted(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.rsplit("LOADED", 1)[1].split())


@pytest.mark.parametrize(
    "code",
    [
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
    ],
)
def test_loads_no_torch(code):
    loaded = modules_loaded_by(code)
    assert not loaded.intersection(HEAVY)


def over_size(path: Path) -> Iterator[str]:
    """A file of too many lines, and its functions of too many."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > (KERNEL_FILE_LINES if is_kernel_file(path) else FILE_LINES):
        yield f"{name_of(path)} has {lines} lines"
    for function in functions(path):
        if function.lines > FUNCTION_LINES:
            yield f"{name_of(path)}: {function.name} has {function.lines} lines"


def test_size_budgets():
    assert not [found for path in FILES for found in over_size(path)]


def over_parameters(path: Path) -> Iterator[str]:
    """Functions of a file with too many parameters."""
    for function in functions(path):
        if function.parameters > PARAMETERS:
            yield f"{name_of(path)}: {function.name} has {function.parameters} parameters"


def test_parameter_budget():
    files = [path for path in SOURCES if not OPS & {*path.relative_to(ROOT).parts}]
    assert not [found for path in files for found in over_parameters(path)]


def public_without_docstring(node: ast.AST, prefix: str = "") -> list[str]:
    """Public functions, classes and methods of a module or class that carry no docstring."""
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
        module = tree(path)
        assert ast.get_docstring(module), f"{name_of(path)} itself"
        assert not public_without_docstring(module), name_of(path)


# Put together from pieces, so that this file does not contain what it looks for.
OUTSIDE = re.compile("|".join((r"\.\./" + "shared", "/work" + "/", "/ho" + "me/", "/ro" + "ot/")))


def test_stands_alone():
    found = {name_of(path): OUTSIDE.search(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {path: match for path, match in found.items() if match}
