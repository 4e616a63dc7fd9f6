"""Speeds up Triton's interpreter: tests take less than half the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any


class _Nothing:
    """A scope without changes."""

    def restore(self) -> None: ...


def quicken(interpreter: ModuleType) -> None:
    """Skip work of `triton.runtime.interpreter` that has no effect; other releases stay unchanged.

    - For every function that a kernel calls it goes through the whole language again, to replace
      what it replaced when the kernel began.
    - It computes whether each sum of integers overflows, and drops the answer unless it debugs.
    - What a kernel reduces by a function of its own it reduces number by number.
    - Every value has its shape as objects of the language, and every type its name, made anew;
      shapes are made objects of the language once more whenever they are compared.
    - It looks for the type and the shape that two operands have in common also where they have
      the same, and makes a block of a constant anew for every operation with it.
    - Whatever a kernel calls of the language goes through two functions more.
    """
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_kernel(interpreter)
    if hasattr(getattr(interpreter, "ReduceOps", None), "generic_reduce"):
        interpreter.ReduceOps.generic_reduce = _by_pairs(interpreter.ReduceOps.generic_reduce)
    core = interpreter.tl.core
    core.block_type.__init__ = _once_a_type(core.block_type.__init__, core.constexpr)
    core.tensor.__init__ = _with_shapes(core)
    core.tuple.__eq__ = _comparing_lists(core)
    semantic = interpreter.TritonSemantic
    checked = semantic.binary_op_type_checking_impl
    semantic.binary_op_type_checking_impl = _unless_alike(checked, core.tensor)
    semantic.broadcast_impl_value = _unless_of_one_shape(semantic.broadcast_impl_value)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    if hasattr(interpreter, "_patch_attr"):
        interpreter._patch_attr = _straight(semantic)


def _once_a_type(initialise: Callable[..., None], constexpr: type) -> Any:
    known: dict[Any, dict[str, Any]] = {}  # By element and shape: the attributes of such a type.

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        attributes = known.get((element_ty.name, sizes))
        if attributes is None:
            initialise(self, element_ty, shape)
            known[element_ty.name, sizes] = dict(vars(self))
        else:
            vars(self).update(attributes)

    return init


def _with_shapes(core: ModuleType) -> Any:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            own = core.tuple([core.constexpr(size) for size in sizes])
            known[sizes] = own, core.constexpr(math.prod(sizes))
        self.shape, self.numel = known[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _comparing_lists(core: ModuleType) -> Any:
    def equal(self: Any, other: Any) -> Any:
        return core.constexpr(self.values == list(other))

    return equal


_KEPT = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp32"}
"""Types whose operations with operands of the same type give that type."""


def _unless_alike(check: Callable[..., Any], tensor: type) -> Any:
    known: dict[Any, Any] = {}  # By constant, and the type and shape beside it: such a block.

    def checked(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is not tensor or (name := lhs.dtype.name) not in _KEPT:
            return check(self, lhs, rhs, *args, **kwargs)
        if type(rhs) is tensor:
            if name == rhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
        elif type(rhs) in (bool, int, float):
            key = type(rhs), rhs, name, id(lhs.shape), args, *kwargs.items()
            if key in known:
                return lhs, known[key]
            first, second = check(self, lhs, rhs, *args, **kwargs)
            if first is lhs and second.shape is lhs.shape:
                second.handle.data.flags.writeable = False
                known[key] = second
            return first, second
        return check(self, lhs, rhs, *args, **kwargs)

    return checked


def _unless_of_one_shape(broadcast: Callable[..., Any]) -> Any:
    def value(self: Any, lhs: Any, rhs: Any) -> Any:
        # Equal shapes are the same object, see _with_shapes.
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return value


def _once_a_name(find: Callable[[Any], Any]) -> Any:
    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return find_once


def _by_pairs(one_by_one: Any) -> Any:
    def reduce(self: Any, given: Any) -> Any:
        axis = self.axis
        length = 0 if axis is None else given[0].handle.data.shape[axis]
        if length < 2 or length & (length - 1):
            return one_by_one(self, given)
        dtypes = [tensor.dtype for tensor in given]
        values = [tensor.handle.data for tensor in given]
        before = [slice(None)] * (axis or 0)
        while length > 1:
            # Keep the order of neighbours: functions need not be commutative.
            halves = [
                self.to_tensor(value[*before, begin::2], dtype)
                for begin in (0, 1)
                for value, dtype in zip(values, dtypes, strict=True)
            ]
            found = self.combine_fn.fn(*halves)
            found = found if isinstance(found, tuple) else (found,)
            values = [tensor.handle.data for tensor in found]
            length //= 2
        if not self.keep_dims:
            values = [value.squeeze(axis) for value in values]
        return [self.to_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]

    return reduce


def _straight(semantic_of: Any) -> Any:
    def patch_attr(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = semantic_of(builder)
        # The decorator of builtins checks whether this argument is passed.
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(of, name, call)

    return patch_attr


def _once_a_kernel(interpreter: ModuleType) -> Any:
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[int] = set()  # While a kernel runs: the modules that have been gone through.
    # Keyed by the identity of a module's dict, which the entry keeps alive: the language's modules.
    known: dict[int, tuple[Any, set[int]]] = {}

    def of_language(names: dict[str, Any]) -> set[int]:
        if id(names) not in known:
            found = {id(value) for value in names.values() if any(value is m for m in language)}
            known[id(names)] = names, found
        return known[id(names)][1]

    def patch_lang(function: Any) -> Any:
        modules = of_language(function.__globals__)
        if patched and modules <= patched:
            return _Nothing()
        scope = patch(function)
        if not patched:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    return patch_lang
