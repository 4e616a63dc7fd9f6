"""Sum of page attention and window attention: the output of a HiLS layer."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, check_dtype, expect
from cairn.ops.landmark import loops
from cairn.ops.landmark.kernels.summary import blend_window_kernel
from cairn.ops.registry import op

AT_ONCE, WARPS = 512, 4
"""Elements and warps per program."""


@op
def blend_window(
    o_pages: Tensor, o_window: Tensor, window_weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """o_pages + window_weight * o_window, rounded once.

    Args:
        o_pages, o_window: [T, h_q, d] float32.
        window_weight: [T, h_q] float32.
        dtype: dtype of the result.
    Returns:
        [T, h_q, d].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return torch.addcmul(o_pages, window_weight.unsqueeze(-1), o_window).to(dtype)


@blend_window.check
def _(call: Call) -> None:
    name = "blend_window"
    expect(name, "o_pages", call.o_pages, 3, FLOAT32)
    expect(name, "o_window", call.o_window, call.o_pages.shape, FLOAT32, call.o_pages)
    expect(name, "window_weight", call.window_weight, call.o_pages.shape[:2], FLOAT32, call.o_pages)
    check_dtype(name, call.dtype)


def _dense(call: Call) -> bool:
    return (
        call.o_pages.is_contiguous()
        and call.o_window.is_contiguous()
        and call.window_weight.is_contiguous()
    )


@blend_window.implementation("triton", devices=gpu.DEVICES, when=_dense, replayed=True)
def _(call: Call) -> Tensor:
    out = gpu.empty(call.o_pages.shape, call.dtype, call.o_pages.device)
    if out.numel():
        lines, dim = call.window_weight.numel(), out.shape[-1]
        width = gpu.next_power_of_2(dim)
        at_once = max(1, AT_ONCE // width)
        blend_window_kernel[(-(-lines // at_once),)](
            o_pages=call.o_pages,
            o_window=call.o_window,
            window_weight=call.window_weight,
            out=out,
            lines=lines,
            DIM=dim,
            DP=width,
            LINES=at_once,
            num_warps=WARPS,
        )
    return out


@blend_window.implementation("numba", devices=cpu.DEVICES, when=_dense)
def _(call: Call) -> Tensor:
    out = call.o_pages.new_empty(call.o_pages.shape, dtype=call.dtype)
    lines = (x.flatten(0, 1) for x in (call.o_pages, call.o_window))
    loops.blend_window(
        *map(cpu.as_array, (*lines, call.window_weight.flatten(), out.flatten(0, 1)))
    )
    return out
