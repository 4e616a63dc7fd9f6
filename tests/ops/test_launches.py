"""Launches pass what kernels declare. Without a GPU most launches never run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import cairn.ops

FOLDER = Path(cairn.ops.__file__).parent
OPTIONS = {
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "launch_pdl",
    "launch_cooperative_grid",
}
TREES = {
    path: ast.parse(text)
    for path in sorted(FOLDER.rglob("*.py"))
    if "_kernel" in (text := path.read_text())
}


def jitted() -> Iterator[ast.FunctionDef]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "jit" in "".join(
                map(ast.unparse, node.decorator_list)
            ):
                yield node


def launches() -> Iterator[tuple[str, str, ast.Call]]:
    """Kernel, where it is launched, and the call `kernel[grid](...)`."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                if isinstance(kernel, ast.Name) and kernel.id.endswith("_kernel"):
                    yield kernel.id, f"{path.relative_to(FOLDER)}:{node.lineno}", node


def test_keywords_are_parameters_and_all_of_them():
    kernels: dict[str, list[tuple[set[str], set[str]]]] = {}
    for function in jitted():
        own = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        names = [argument.arg for argument in own]
        optional = set(names[len(names) - len(function.args.defaults) :])
        kernels.setdefault(function.name, []).append((set(names), optional))
    found = 0
    for name, place, call in launches():
        given = {keyword.arg for keyword in call.keywords}
        whole = None not in given and not call.args
        fits = [
            given - {None} - OPTIONS <= names and (not whole or names - optional <= given)
            for names, optional in kernels.get(name, [])
        ]
        assert not fits or any(fits), f"{place} launches {name} with {sorted(given - {None})}"
        found += len(fits) > 0
    assert found > 100
