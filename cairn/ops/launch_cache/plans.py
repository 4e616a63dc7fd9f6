"""Decides which calls are recorded and replayed; recording.py explains how, and why that is exact.

Recording a call takes the host two to three times as long as a plain call, replaying it a fifth to
a half. So signatures that do not recur should not be recorded, such as calls made once per step
whose number of tokens differs in every prefill. And the arguments of calls that cannot be replayed,
such as matrix products by a library, should not all be inspected on each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cairn.ops import gpu
from cairn.ops.launch_cache.recording import PLAIN_TENSORS, Plan, Recording, call_of

MAX_PLANS = 64
"""Most signatures kept per op. All layers of a step have the same signature; steps differ in their
number of tokens."""
_is_compiling = torch.compiler.is_compiling
_active_modes = torch._C._len_torch_dispatch_stack


class Plans:
    """The recorded plans of an op, by signature."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        # Shapes of calls that could not be recorded; calls with these shapes are not tried again.
        self._unrecordable: set[tuple[Any, ...]] = set()
        # Signatures seen once, and whether the last plan was ever replayed: where every call has a
        # new number of tokens, recording does not pay.
        self._seen: set[tuple[Any, ...]] = set()
        self._useful = True

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that calls whose first argument is a CUDA tensor are replayed where
        possible."""

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
        """Drop all plans: the choice of implementations has changed, or there are too many."""
        self._plans.clear()
        self._unrecordable.clear()
        self._seen.clear()

    def run(
        self,
        plainly: Callable[[Sequence[Any], dict[str, Any]], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of plainly(args, kwargs), replayed if possible; tensors are on one CUDA
        device."""
        if self._unrecordable and _shapes(args) in self._unrecordable:
            return plainly(args, kwargs)
        if gpu.watch.observer is not None or gpu.watch.order is not None or gpu.has_launch_hooks():
            return plainly(args, kwargs)
        call = call_of(args, kwargs)
        if call is None or not gpu.is_current(call.device):
            return plainly(args, kwargs)
        try:
            plan = self._plans.get(call.signature)
        except TypeError:  # unhashable, as a list in a tuple: the call itself raises what is due
            return plainly(args, kwargs)
        if plan is not None:
            self._useful = True
            return plan.run(call, gpu.stream_of(call.device))
        if call.signature in self._plans or not self._worth_it(call.signature):
            return plainly(args, kwargs)
        gpu.watch.observer = recording = Recording(call)
        try:
            result = plainly(args, kwargs)
        finally:
            gpu.watch.observer = None
        if len(self._plans) >= MAX_PLANS:
            self.forget()
        self._useful = False
        plan = self._plans[call.signature] = recording.plan(result)
        if plan is None and (shapes := _shapes(args)):
            self._unrecordable.add(shapes)
        return result

    def _worth_it(self, signature: tuple[Any, ...]) -> bool:
        """Whether to record a new signature: the last plan was replayed, or this signature was seen
        before."""
        if self._useful or signature in self._seen:
            return True
        if len(self._seen) >= MAX_PLANS:
            self._seen.clear()
        self._seen.add(signature)
        return False


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes of the first two arguments, if they are tensors."""
    try:
        return args[0].shape, args[1].shape
    except (AttributeError, IndexError):
        return ()


def is_traced(first: Any) -> bool:
    """Whether a call goes through the dispatcher: under torch.compile or a dispatch mode, or if its
    first argument is not a plain tensor."""
    return type(first) not in PLAIN_TENSORS or _is_compiling() or _active_modes() > 0
