"""Kernel of the activations."""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.linear.kernels import silu
from cairn.ops.pdl import await_previous

PTX = gpu.constant(gpu.WRITES_PTX)


@triton.jit
def reciprocal(x):
    """1 / x for x >= 1, with a relative error of 1e-7; very small results are 0."""
    if PTX:
        asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def power_of_2(x):
    """2 ** x to 2e-7 of it; 0 where that is no normal number."""
    if PTX:
        asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def gelu(x):
    """x * erfc(-x / sqrt(2)) / 2, within 8e-6 of itself wherever it is a normal number.

    erfc(z) = exp(-z^2) t q(t), t = 1 / (1 + 0.35 z), z >= 0: q is a polynomial fitted to within
    6.4e-8 of itself for all z; exp alone makes the error grow with z.
    """
    t = reciprocal(1.0 + tl.abs(x) * 0.24748737341529164)
    q = 0.0402960676 * t - 0.171731686
    q = q * t + 0.217444273
    q = q * t - 0.0833302559
    q = q * t + 0.139304946
    q = q * t + 0.115026268
    q = q * t + 0.16279147
    q = q * t + 0.185263389
    q = q * t + 0.197469176
    q = q * t + 0.197466341
    tail = power_of_2(x * x * -0.7213475204444817) * (t * q)
    return 0.5 * x * tl.where(x < 0, tail, 2.0 - tail)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, exact gelu, gelu by tanh, or x * sigmoid(1.702 x), of float32 numbers."""
    if KIND == "silu":
        return silu(x)
    if KIND == "gelu":
        return gelu(x)
    if KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the logistic function of 2y, and here z = -2y / ln 2.
        z = x * (-2.302208198144325 - 0.1029432397 * x * x)
    else:
        z = -2.455466960 * x
    return x * reciprocal(1.0 + power_of_2(z))


@triton.jit(early=())
def activation_kernel(
    x, out, expert_ids, x_stride, out_stride, width, step, limit,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = act(x[row, :width]), GATED: * x[row, width:]. A row has BLOCKS programs.

    CLAMPED: the first half is at most `limit`, the second between -limit and limit.

    expert_ids: None, or row r is written where expert_ids[r // step] is not -1.
    PDL: as in `await_previous`.
    """
    await_previous(PDL)
    row, block = row_and_part(BLOCKS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if expert_ids is not None:
        inside = inside & (tl.load(expert_ids + row // step) != -1)
    at = x + row * x_stride + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        value = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)
    value = activated(value, KIND)
    if GATED:
        factor = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            factor = tl.clamp(factor, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        value *= factor
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(early=())
def sigmoid_gate_kernel(
    x, gate, out, x_token, x_head, gate_token, gate_head, width,
    DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x * sigmoid(gate), of heads of DIM elements. A token has `width` elements and BLOCKS
    programs. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, block = row_and_part(BLOCKS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    head, number = column // DIM, column % DIM
    at = token * x_token + head * x_head + number
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    at = token * gate_token + head * gate_head + number
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    value = value / (1.0 + tl.exp(-z))
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=inside)
