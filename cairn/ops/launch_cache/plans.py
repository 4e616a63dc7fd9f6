"""Which calls are recorded and replayed; recording.py says how, and why that is exact.

Recording a call costs the host two to three times a plain call, replaying it a fifth to a half. So
signatures that never come again should not be recorded (what a step does once, with another number
of tokens in each prefill). Of calls that cannot be replayed, such as products by a library, not all
arguments should be inspected each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cairn.ops import gpu
from cairn.ops.launch_cache.recording import PLAIN_TENSORS, Plan, Recording, call_of

MOST_PLANS = 64
"""Signatures that an op remembers. Every layer of a step has the same; the next step may be of any
number of tokens."""
_is_compiling = torch.compiler.is_compiling
_active_modes = torch._C._len_torch_dispatch_stack


class Plans:
    """The plans of an op, by their signatures."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        # Shapes with which no plan came of a call: nobody looks at the rest of the arguments then.
        self._hopeless: set[tuple[Any, ...]] = set()
        # What has come once, and whether the last plan was of use: where each call is of another
        # number of tokens, plans would be made for nothing.
        self._seen: set[tuple[Any, ...]] = set()
        self._useful = True

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function, of which calls whose first argument, as given, is a tensor on CUDA are
        replayed."""

        def plainly(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            first: Any = args[0] if args else next(iter(kwargs.values()), None)
            if is_traced(first) or not first.is_cuda:
                return function(*args, **kwargs)
            return self.run(plainly, args, kwargs)

        return call

    def forget(self) -> None:
        """What ops choose has changed, or there are too many."""
        self._plans.clear()
        self._hopeless.clear()
        self._seen.clear()

    def run(
        self,
        plainly: Callable[[Sequence[Any], dict[str, Any]], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """What plainly(args, kwargs) gives; the tensors lie on one CUDA device."""
        if self._hopeless and _shapes(args) in self._hopeless:
            return plainly(args, kwargs)
        if gpu.watch.by is not None or gpu.watch.order is not None or gpu.hooked():
            return plainly(args, kwargs)
        call = call_of(args, kwargs)
        if call is None or not gpu.is_current(call.device):
            return plainly(args, kwargs)
        try:
            plan = self._plans.get(call.signature)
        except TypeError:  # a list in a tuple: the call says what it thinks of that
            return plainly(args, kwargs)
        if plan is not None:
            self._useful = True
            return plan.run(call, gpu.stream_of(call.device))
        if call.signature in self._plans or not self._worth_it(call.signature):
            return plainly(args, kwargs)
        gpu.watch.by = recording = Recording(call)
        try:
            result = plainly(args, kwargs)
        finally:
            gpu.watch.by = None
        if len(self._plans) >= MOST_PLANS:
            self.forget()
        self._useful = False
        plan = self._plans[call.signature] = recording.plan(result)
        if plan is None and (shapes := _shapes(args)):
            self._hopeless.add(shapes)
        return result

    def _worth_it(self, signature: tuple[Any, ...]) -> bool:
        """Whether to make a plan for what has none: the last one was of use, or it comes again."""
        if self._useful or signature in self._seen:
            return True
        if len(self._seen) >= MOST_PLANS:
            self._seen.clear()
        self._seen.add(signature)
        return False


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    """Of the first two arguments, if they are tensors: those of products tell how they are done."""
    try:
        return args[0].shape, args[1].shape
    except (AttributeError, IndexError):
        return ()


def is_traced(first: Any) -> bool:
    """Whether somebody else looks on, or a call's first argument is no plain tensor: such calls go
    through the dispatcher."""
    return type(first) not in PLAIN_TENSORS or _is_compiling() or _active_modes() > 0
