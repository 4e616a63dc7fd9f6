"""Replays of recorded launches under the interpreter: a "compiled" kernel takes addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.launch_cache.plans import Plans


def in_order(
    kernel: Any, args: Sequence[Any], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A kernel's arguments in the order of its parameters, and the other options of its launch."""
    names = kernel.arg_names[len(args) :]
    named = tuple(options[name] for name in names if name in options)
    return (*args, *named), {name: x for name, x in options.items() if name not in names}


class Compiled:
    """Runs an interpreted kernel on addresses."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, interpret: Callable[..., Any], args: Sequence[Any], options: Any) -> None:
        self._interpret, self._options = interpret, options
        self._dtypes = [getattr(getattr(arg, "base", arg), "dtype", None) for arg in args]

    def run(self, x: int, y: int, z: int, *given: Any) -> None:
        assert given[:6] == ("stream", "function", "metadata", None, None, None)
        args = [
            arg if dtype is None else located(arg, dtype)
            for arg, dtype in zip(given[6:], self._dtypes, strict=True)
        ]
        self._interpret(*args, grid=(x, y, z), warmup=False, **self._options)


def located(arg: Any, dtype: torch.dtype) -> Any:
    """The interpreter's form of an address, or of a descriptor with only an address."""
    if isinstance(arg, int):
        return tensor_at(arg, dtype)
    return gpu.tensor_descriptor(
        tensor_at(arg.base.data_ptr(), dtype), arg.shape, arg.strides, arg.block_shape
    )


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    if address == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_byte * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Calls:
    """Calls of a function with its own plans."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.plans, self.plain = function, Plans(), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plans.run(self._plainly, args, kwargs)

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        self.plain += 1
        return self.function(*args, **kwargs)


@triton.jit  # type: ignore[untyped-decorator]
def scaled_sum_kernel(x, y, out, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = (x + y) * factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    both = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, both * factor, mask=at < n)


def scaled_sum(
    x: Tensor, y: Tensor, factor: float, make: Callable[..., Tensor] = gpu.empty
) -> Tensor:
    """(x + y) * factor, with a temporary tensor."""
    n = x.numel()
    between, out = (make((n,), dtype=x.dtype, device=x.device) for _ in range(2))
    scaled_sum_kernel[(-(-n // 16),)](x, y, between, factor, n, 16)
    scaled_sum_kernel[(-(-n // 16),)](between, gpu.zeros((n,), x.dtype, x.device), out, 1, n, 16)
    return out


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)
