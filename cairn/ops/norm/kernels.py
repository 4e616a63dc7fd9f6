"""Kernels of the norms: statistics in float32, one rounding."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def scaled(value, at, inside, width, eps, axis: tl.constexpr, SHIFTED: tl.constexpr):
    """rsqrt(mean of squares along the axis + eps), and the weights at an address, float32."""
    # Loaded before the reduction, so that the two latencies overlap.
    factor = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(value * value, axis) / width + eps)
    return scale, factor


@triton.jit
def norm_row(
    x, weight, out, width, eps,
    BLOCK: tl.constexpr, SHIFTED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """One row at an address: out = x * rsqrt(mean(x^2) + eps) * weight."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    scale, factor = scaled(value, weight + column, inside, width, eps, 0, SHIFTED)
    value *= scale
    if ROUNDED:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + column, (value * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(early=())
def rmsnorm_kernel(
    x, weight, out, x_stride, out_stride, width, eps,
    BLOCK: tl.constexpr, SHIFTED: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row] * rsqrt(mean(x[row]^2) + eps) * weight.

    SHIFTED: by 1 + weight; ROUNDED: to x's dtype before the weight too; PDL: as in
    `await_previous`.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    norm_row(
        x + row * x_stride, weight, out + row * out_stride, width, eps, BLOCK, SHIFTED, ROUNDED
    )


@triton.jit(early=())
def layernorm_kernel(
    x, weight, bias, out, x_stride, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[row] = (x[row] - mean) * rsqrt(variance + eps) * weight + bias, or without bias. PDL: as
    in `await_previous`."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    apart = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scale, factor = scaled(apart, weight + column, inside, width, eps, 0, False)
    result = apart * scale * factor
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(early=())
def fused_add_rmsnorm_kernel(
    x, residual, weight, x_stride, residual_stride, width, eps,
    BLOCK: tl.constexpr, SHIFTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += x[row]; x[row] = rmsnorm(the sum before it was rounded). PDL: as in
    `await_previous`."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x_at = x + row * x_stride + column
    residual_at = residual + row * residual_stride + column
    total = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    scale, factor = scaled(total, weight + column, inside, width, eps, 0, SHIFTED)
    tl.store(residual_at, total.to(residual.dtype.element_ty), mask=inside)
    tl.store(x_at, (total * scale * factor).to(x.dtype.element_ty), mask=inside)


@triton.jit(early=("weight",))
def rmsnorm_add_kernel(
    x, residual, weight, x_stride, residual_stride, width, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += rmsnorm(x[row]). PDL: as in `await_previous`."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = residual + row * residual_stride + column
    before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(at, (before + value * scale * factor).to(residual.dtype.element_ty), mask=inside)


@triton.jit
def norm_heads(x, weight, head, heads, head_stride, width, eps, DIM: tl.constexpr):
    """Some heads [N] of one token, in place: rmsnorm of each by the same weight [width]."""
    column = tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (column < width)[None, :]
    at = x + head[:, None] * head_stride + column[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale, factor = scaled(value, weight + column, column < width, width, eps, 1, False)
    tl.store(at, (value * scale[:, None] * factor[None, :]).to(x.dtype.element_ty), mask=inside)


@triton.jit(early=())
def qknorm_kernel(
    q, k, q_weight, k_weight, q_stride, q_head_stride, k_stride, k_head_stride,
    q_heads, k_heads, width, eps, PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, in place: first those of q, then those of k. A token has
    PROGRAMS of them. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, group = row_and_part(PROGRAMS)
    before = (q_heads + HEADS - 1) // HEADS
    if group < before:
        head = group * HEADS + tl.arange(0, HEADS)
        norm_heads(q + token * q_stride, q_weight, head, q_heads, q_head_stride, width, eps, DIM)
    else:
        head = (group - before) * HEADS + tl.arange(0, HEADS)
        norm_heads(k + token * k_stride, k_weight, head, k_heads, k_head_stride, width, eps, DIM)


@triton.jit(early=())
def qknorm_rows_kernel(
    q, k, q_weight, k_weight, q_stride, k_stride, q_width, k_width, eps,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of q or of k, in place. PDL: as in `await_previous`."""
    await_previous(PDL)
    row, part = row_and_part(2)
    if part == 0:
        q += row * q_stride
        norm_row(q, q_weight, q, q_width, eps, Q_BLOCK, False, False)
    else:
        k += row * k_stride
        norm_row(k, k_weight, k, k_width, eps, K_BLOCK, False, False)


@triton.jit(early=())
def lengths_kernel(
    x, weight, gate, out, rows, heads, x_token, x_head, gate_token, gate_head, width, divisor, eps,
    shift, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows [width] a program, `heads` rows a token: out = x * rsqrt(sum(x^2) / divisor + eps),
    times (weight + shift) and silu(gate) where these are given. PDL: as in `await_previous`."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    token, head = (row // heads)[:, None], (row % heads)[:, None]
    at = x + token * x_token + head * x_head + column[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / divisor + eps)[:, None]
    if weight is not None:
        factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + shift
        value *= factor[None, :]
    if gate is not None:
        at = gate + token * gate_token + head * gate_head + column[None, :]
        z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value *= z / (1 + tl.exp(-z))
    at = out + row[:, None] * width + column[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)
