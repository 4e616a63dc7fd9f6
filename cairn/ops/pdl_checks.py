"""Checks for programmatic dependent launch (pdl.py): data races between consecutive kernels.

A kernel that reads arguments before `await_previous` declares them, as in
`@triton.jit(early=("weight",))`. `effects_of` derives from the source which arguments are read
early, which are written, and when the next kernel may start. Within `checked()`, a launch raises if
an earlier kernel that may still run writes what this one reads early.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cairn.ops import gpu

LOADS = {"load", "gather", "async_copy_global_to_shared"}
STORES = {"store", "scatter", "async_copy_shared_to_global"}
POINTER_PRESERVING = {"multiple_of", "max_contiguous", "to", "cast", "where", "broadcast_to"}
"""Functions whose results point into the same memory as their arguments."""
NONE: Any = ("None",)
"""Value of a parameter that is None in a call; it selects the branches of `is None` tests."""


@dataclass(frozen=True)
class Effects:
    """Effects of a kernel, by the names of its parameters.

    Attributes:
        early: parameters read before `await_previous`.
        writes: parameters written.
        waits: whether it calls `await_previous`.
        starts_next: when it allows the next kernel to start: "never", "after" `await_previous`, or
            "before".
    """

    early: frozenset[str]
    writes: frozenset[str]
    waits: bool
    starts_next: str


@dataclass
class _State:
    """State of the walk through a kernel and the functions it calls, in program order."""

    waited: bool = False
    waits: bool = False
    starts: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)

    def read(self, pointer: Any) -> None:
        if not self.waited:
            self.early |= _names(pointer)

    def write(self, pointer: Any) -> None:
        self.writes |= _names(pointer)


@functools.cache
def effects_of(kernel: Any) -> Effects:
    """Effects of a kernel, from its source and that of the functions it calls.

    Pointers are followed through additions (as the first operand), assignments, tuples and calls.
    Both branches of a condition are walked unless a constant argument decides it.
    """
    names = list(inspect.signature(kernel.fn).parameters)
    state = _State()
    _call(kernel, [frozenset((name,)) for name in names], {}, state)
    starts = "before" if "before" in state.starts else "after" if state.starts else "never"
    return Effects(frozenset(state.early), frozenset(state.writes), state.waits, starts)


def expect_declared(kernel: Any) -> None:
    """Raise AssertionError unless a kernel declares exactly the arguments that it reads early."""
    effects = effects_of(kernel)
    found = effects.early if effects.waits else None
    declared = None if kernel.early is None else frozenset(kernel.early)
    if declared != found:
        given, read = (None if names is None else sorted(names) for names in (declared, found))
        raise AssertionError(
            f"{kernel.__name__} declares early={given}, but before await_previous it reads {read}"
        )


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, frozenset):
        return value
    if isinstance(value, tuple) and value is not NONE:
        return frozenset().union(*map(_names, value))
    return frozenset()


@functools.cache
def _tree(function: Any) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _call(kernel: Any, args: Sequence[Any], named: dict[str, Any], state: _State) -> Any:
    """Walk through one call of a jitted function and return its abstract result."""
    tree = _tree(kernel.fn)
    parameters = [a.arg for a in (*tree.args.args, *tree.args.kwonlyargs)]
    walk = _Walk({**dict(zip(parameters, args, strict=False)), **named}, kernel.fn, state)
    walk.block(tree.body)
    return walk.returned


class _Walk:
    """Walks through the statements of a function. `env` maps each name to the kernel parameters
    that it may point into (a frozenset), a tuple of these, or a constant."""

    def __init__(self, env: dict[str, Any], function: Any, state: _State) -> None:
        self._env, self._globals, self._state = env, function.__globals__, state
        self.returned: Any = frozenset()

    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Walk through statements. Returns False if they end in a return."""
        return all(self._statement(statement) for statement in body)

    def _statement(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Return):
            if statement.value is not None:
                self.returned = self._eval(statement.value)
            return False
        if isinstance(statement, ast.If):
            return self._branch(statement)
        if isinstance(statement, ast.For | ast.While):
            return self._loop(statement)
        if isinstance(statement, ast.Assign):
            value = self._eval(statement.value)
            for target in statement.targets:
                self._assign(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, self._eval(statement.value))
        elif isinstance(statement, ast.AugAssign):
            value = self._eval(statement.value)
            self._assign(statement.target, _names(self._eval(statement.target)) or value)
        elif isinstance(statement, ast.Expr):
            self._eval(statement.value)
        return True

    def _loop(self, statement: ast.For | ast.While) -> bool:
        over = statement.iter if isinstance(statement, ast.For) else statement.test
        self._eval(over)
        state, waits = self._state, self._state.waits
        state.waits = False
        goes_on = self.block(statement.body)
        # Unrolled loops select one of several sizes: each program takes exactly one branch.
        unrolled = isinstance(over, ast.Call) and ast.unparse(over.func).endswith("static_range")
        state.waited = state.waited or (unrolled and state.waits)
        state.waits = state.waits or waits
        return goes_on

    def _branch(self, statement: ast.If) -> bool:
        known = self._constant(statement.test)
        if known is not None:
            return self.block(statement.body if known else statement.orelse)
        self._eval(statement.test)
        state, before, env = self._state, self._state.waited, dict(self._env)
        goes_on = self.block(statement.body)
        waited = state.waited or not goes_on
        mine, self._env, state.waited = self._env, env, before
        other = self.block(statement.orelse)
        state.waited = waited and (state.waited or not other)
        for name, value in mine.items():
            if self._env.get(name) != value:
                self._env[name] = _names(value) | _names(self._env.get(name))
        return goes_on or other

    def _constant(self, test: ast.expr) -> bool | None:
        """Value of a condition that constant arguments decide; None for others."""
        if isinstance(test, ast.Name) and isinstance(self._env.get(test.id), bool):
            return bool(self._env[test.id])
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name):
            with_none = isinstance(test.comparators[0], ast.Constant)
            if with_none and self._env.get(test.left.id) is NONE:
                return isinstance(test.ops[0], ast.Is)
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._env[target.id] = value
        elif isinstance(target, ast.Tuple):
            several = isinstance(value, tuple) and len(value) == len(target.elts)
            for n, part in enumerate(target.elts):
                self._assign(part, value[n] if several else _names(value))

    def _eval(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self._env.get(node.id, frozenset())
        if isinstance(node, ast.Constant):
            return NONE if node.value is None else node.value
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._eval(part) for part in node.elts)
        if isinstance(node, ast.BinOp):
            left, right = self._eval(node.left), self._eval(node.right)
            if not isinstance(node.op, ast.Add | ast.Sub):
                return frozenset()
            if isinstance(left, tuple) and isinstance(right, tuple):
                return left + right
            return _names(left) or _names(right)
        if isinstance(node, ast.Call):
            return self._eval_call(node)
        if isinstance(node, ast.Subscript):
            self._eval(node.slice)
            return self._eval(node.value)
        if isinstance(node, ast.IfExp):
            return _names(self._eval(node.body)) | _names(self._eval(node.orelse))
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._eval(part)
        return frozenset()

    def _eval_call(self, node: ast.Call) -> Any:
        args = [self._eval(arg) for arg in node.args]
        named = {word.arg: self._eval(word.value) for word in node.keywords if word.arg}
        function = self._resolve(node.func)
        jitted = hasattr(function, "fn") and not hasattr(function, "__triton_builtin__")
        name = getattr(getattr(function, "fn", function), "__name__", "")
        if function is None and isinstance(node.func, ast.Attribute):
            # A method of a tensor descriptor or a tensor.
            name, args = node.func.attr, [self._eval(node.func.value), *args]
        if name == "warp_specialize":
            return self._partitions(node)
        if name in ("await_previous", "launch_next"):
            self._order(name, args)
        elif name == "prefetch_l2":
            pass  # Prefetching stale data into L2 is harmless.
        elif jitted:
            return _call(function, args, named, self._state)
        elif name in LOADS:
            self._state.read(args[0])
        elif name in STORES:
            self._state.write(args[0])
        elif name.startswith("atomic_"):
            self._state.read(args[0])
            self._state.write(args[0])
        elif name in POINTER_PRESERVING:
            return frozenset().union(*map(_names, args))
        return frozenset()

    def _order(self, name: str, args: Sequence[Any]) -> None:
        state = self._state
        if args and args[0] is False:
            return
        if name == "await_previous":
            state.waited = state.waits = True
        if name == "launch_next" or len(args) < 2 or args[1] is not False:
            state.starts.add("after" if state.waited else "before")

    def _partitions(self, node: ast.Call) -> Any:
        """Walk through the partitions of gl.warp_specialize: pairs of a function and its
        arguments."""
        groups = node.args[0]
        assert isinstance(groups, ast.List)
        before = self._state.waited
        for group in groups.elts:
            assert isinstance(group, ast.Tuple)
            self._state.waited = before
            _call(self._resolve(group.elts[0]), self._eval(group.elts[1]), {}, self._state)
        return frozenset()

    def _resolve(self, node: ast.expr) -> Any:
        """The object that an expression of names and attributes refers to; None for locals."""
        if isinstance(node, ast.Name):
            return None if node.id in self._env else self._globals.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._resolve(node.value), node.attr, None)
        return None


@dataclass(frozen=True)
class _Launch:
    """A kernel that may still run, and the address ranges that it writes."""

    name: str
    writes: tuple[tuple[int, int], ...]


class _Order:
    """Tracks the launches of a thread. Launches by other libraries are not tracked. Those kernels
    finish before the next kernel starts, so the check may raise where there is no race."""

    def __init__(self) -> None:
        self._running: list[_Launch] = []

    def __call__(self, kernel: Any, given: dict[str, Any]) -> None:
        expect_declared(kernel)
        effects = effects_of(kernel)
        running = self._running if given["launch_pdl"] else []
        for name, before in itertools.product(kernel.early or (), running):
            for begin, end in _extents(given[name]):
                if any(begin < stop and start < end for start, stop in before.writes):
                    raise AssertionError(
                        f"{kernel.__name__} reads {name!r} before {before.name}, which writes it, "
                        f"is done: launch it without PDL, or read {name!r} after await_previous"
                    )
        if effects.starts_next == "never":
            self._running = []
            return
        written = (part for name in effects.writes for part in _extents(given.get(name)))
        own = _Launch(kernel.__name__, tuple(written))
        self._running = [*(running if effects.starts_next == "before" else ()), own]


def _extents(value: Any) -> Iterator[tuple[int, int]]:
    """Address range [begin, end) of a tensor or of the tensor of a descriptor; empty for others."""
    tensor = getattr(value, "base", value) if gpu.is_descriptor(value) else value
    if isinstance(tensor, Tensor) and tensor.numel():
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in dims)
        yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within the block, launches of this thread raise AssertionError if a kernel reads undeclared
    arguments early, or reads early what an earlier kernel that may still run writes. For tests:
    launches are slow, and the launch cache is not used."""
    before, gpu.watch.order = gpu.watch.order, _Order()
    try:
        yield
    finally:
        gpu.watch.order = before
