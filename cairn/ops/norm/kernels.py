"""Kernels of the norms: one program a row, statistics in float32."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def rmsnorm_kernel(x, weight, out, x_stride, out_stride, width, eps, BLOCK: tl.constexpr):
    """out[row] = x[row] * rsqrt(mean(x[row]^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = (value * scale * factor).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, result, mask=inside)


@triton.jit
def fused_add_rmsnorm_kernel(
    x, residual, weight, x_stride, residual_stride, width, eps, BLOCK: tl.constexpr
):
    """residual[row] += x[row]; x[row] = rmsnorm(the sum before it was rounded)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x_at = x + row * x_stride + column
    residual_at = residual + row * residual_stride + column
    total = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_at, total.to(residual.dtype.element_ty), mask=inside)
    tl.store(x_at, (total * scale * factor).to(x.dtype.element_ty), mask=inside)
