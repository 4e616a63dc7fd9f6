"""Triton's interpreter without what it does for nothing: tests take less than half the time."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any


class _Nothing:
    """A scope in which nothing was changed."""

    def restore(self) -> None: ...


def quicken(interpreter: ModuleType) -> None:
    """Spare `triton.runtime.interpreter` what has no effect; a release without it stays as it is.

    - For every function that a kernel calls it goes through the whole language again, to replace
      what it replaced when the kernel began.
    - It computes whether each sum of integers overflows, and drops the answer unless it debugs.
    - What a kernel reduces by a function of its own it reduces number by number.
    """
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_kernel(interpreter)
    if hasattr(getattr(interpreter, "ReduceOps", None), "generic_reduce"):
        interpreter.ReduceOps.generic_reduce = _by_pairs(interpreter.ReduceOps.generic_reduce)


def _by_pairs(one_by_one: Any) -> Any:
    def reduce(self: Any, given: Any) -> Any:
        axis = self.axis
        length = 0 if axis is None else given[0].handle.data.shape[axis]
        if length < 2 or length & (length - 1):
            return one_by_one(self, given)
        dtypes = [tensor.dtype for tensor in given]
        values = [tensor.handle.data for tensor in given]
        while length > 1:
            # Neighbours stay neighbours: functions need not commute.
            halves = [
                self.to_tensor(value.take(range(begin, length, 2), axis), dtype)
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


def _once_a_kernel(interpreter: ModuleType) -> Any:
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[int] = set()  # While a kernel runs: the modules that have been gone through.

    def patch_lang(function: Any) -> Any:
        names = function.__globals__.values()
        modules = {id(value) for value in names if any(value is module for module in language)}
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
