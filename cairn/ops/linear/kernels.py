"""Kernels of the products of few tokens with a weight: as fast as the weight is read.

A program of `rows_kernel` and `tile_kernel` holds the rows of the weight that it multiplies, whole,
before it waits for the kernel in front: while that one ends, the weight is on its way. With NORM
the tokens are normed on the way (rmsnorm with the weight `norm`): what all numbers of a token are
divided by comes after the product. `block_kernel` is for more tokens and very many numbers. Sums
are float32.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import await_previous, launch_next
from cairn.ops.gpu import tl, triton


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["tokens", "numbers"])
def rows_kernel(
    x, norm, weight, bias, out, tokens, numbers, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, numbers] = x W^T, for ROWS rows of W [numbers, WIDTH], token by token.

    Args:
        WP: WIDTH, padded to a power of two.
        TOKENS: tokens, padded to a power of two.
        GATED: W is [2 numbers, WIDTH]; out is silu of the first half's product, times the second's.
        ADD: out holds what the product is added to.
        EARLY: as in `await_previous`.
    """
    launch_next(EARLY)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WP)
    inside = (n < numbers)[:, None]
    if WP != WIDTH:
        inside = inside & (k < WIDTH)[None, :]
    at = weight + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    rows = tl.load(at, mask=inside, other=0.0)
    second = rows
    if GATED:
        second = tl.load(at + numbers.to(tl.int64) * WIDTH, mask=inside, other=0.0)
    factor = tl.full([WP], 1.0, tl.float32)
    if NORM:
        factor = tl.load(norm + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    offset = tl.zeros([ROWS], tl.float32)
    if BIAS:
        offset = tl.load(bias + n, mask=n < numbers, other=0.0).to(tl.float32)
    await_previous(EARLY)
    for t in tl.static_range(TOKENS):
        alive = t < tokens
        value = tl.load(x + t * x_stride + k, mask=(k < WIDTH) & alive, other=0.0).to(tl.float32)
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
            value = value * factor
        result = tl.sum(rows.to(tl.float32) * value[None, :], 1) * scale + offset
        if GATED:
            result = silu(result) * (tl.sum(second.to(tl.float32) * value[None, :], 1) * scale)
        to = out + t * out_stride + n
        shown = (n < numbers) & alive
        if ADD:
            result += tl.load(to, mask=shown, other=0.0).to(tl.float32)
        tl.store(to, result.to(out.dtype.element_ty), mask=shown)


@triton.jit(do_not_specialize=["tokens", "numbers"])
def tile_kernel(
    x, norm, weight, bias, out, tokens, numbers, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, WP: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for TOKENS tokens at once; PARTS stretches of the sums are products of their own,
    so that every warp has one."""
    launch_next(EARLY)
    PART: tl.constexpr = WP // PARTS
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = (n < numbers)[None, None, :]
    if WP != WIDTH:
        inside = inside & (k < WIDTH)[:, :, None]
    at = weight + n.to(tl.int64)[None, None, :] * WIDTH + k[:, :, None]
    rows = tl.load(at, mask=inside, other=0.0)
    second = rows
    if GATED:
        second = tl.load(at + numbers.to(tl.int64) * WIDTH, mask=inside, other=0.0)
    factor = tl.full([PARTS, PART], 1.0, tl.float32)
    if NORM:
        factor = tl.load(norm + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    await_previous(EARLY)
    t = tl.arange(0, TOKENS)
    alive = (t < tokens)[None, :, None]
    if WP != WIDTH:
        alive = alive & (k < WIDTH)[:, None, :]
    value = tl.load(x + t[None, :, None] * x_stride + k[:, None, :], mask=alive, other=0.0)
    scale = tl.full([TOKENS], 1.0, tl.float32)
    if NORM:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 0) / WIDTH + eps)
        value = (wide * factor[:, None, :]).to(value.dtype)
    result = tl.sum(tl.dot(value, rows, input_precision="ieee"), 0) * scale[:, None]
    if BIAS:
        result += tl.load(bias + n, mask=n < numbers, other=0.0).to(tl.float32)[None, :]
    if GATED:
        linear = tl.sum(tl.dot(value, second, input_precision="ieee"), 0) * scale[:, None]
        result = silu(result) * linear
    to = out + t[:, None] * out_stride + n[None, :]
    shown = (n < numbers)[None, :] & (t < tokens)[:, None]
    if ADD:
        result += tl.load(to, mask=shown, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=shown)


@triton.jit(do_not_specialize=["tokens", "numbers"])
def block_kernel(
    x, weight, bias, out, tokens, numbers, width, x_stride, out_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [tokens, numbers] = x W^T for all tokens and ROWS rows of W [numbers, width], PART of its
    columns at a time.

    Args:
        TOKENS: tokens, padded to a power of two.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, PART)
    inside, alive = n < numbers, t < tokens
    rows = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    columns = x + t[None, :] * x_stride + k[:, None]
    result = tl.zeros([ROWS, TOKENS], tl.float32)
    for _ in range(0, width, PART):
        own = tl.load(rows, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        value = tl.load(columns, mask=alive[None, :], other=0.0)
        result = tl.dot(own, value, result, input_precision=PRECISION)
        rows += PART
        columns += PART
    if BIAS:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + t.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None] & alive[None, :])
