"""Triton's interpreter without two things it does for nothing: tests take half the time."""

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
    """
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_kernel(interpreter)


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
