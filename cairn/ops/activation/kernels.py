"""Kernel of the gated activation."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr):
    """out[row] = silu(x[row, :width]) * x[row, width:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x + row * x_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
