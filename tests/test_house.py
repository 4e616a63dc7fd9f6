"""Rules of the whole project that no linter holds: import time, sizes, docstrings, paths."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cairn").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
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


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


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


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_size_budgets(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (KERNEL_FILE_LINES if is_kernel_file(path) else FILE_LINES)
    for function in functions(path):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{function.name} has {length} lines"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if not OPS & {*p.relative_to(ROOT).parts}], ids=name_of
)
def test_parameter_budget(path):
    for function in functions(path):
        given = function.args
        names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len([n for n in names if n not in ("self", "cls")])
        assert count <= PARAMETERS, f"{function.name} has {count} parameters"


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


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_names_have_docstrings(path):
    module = tree(path)
    assert ast.get_docstring(module), "the module itself"
    assert not public_without_docstring(module)


# Put together from pieces, so that this file does not contain what it looks for.
OUTSIDE = re.compile("|".join((r"\.\./" + "shared", "/work" + "/", "/ho" + "me/", "/ro" + "ot/")))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_stands_alone(path):
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if OUTSIDE.search(line)]
    assert not found
