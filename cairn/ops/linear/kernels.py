"""Kernels of the products of few tokens with a weight: as fast as the weight is read.

A program of `rows_kernel` and `tile_kernel` loads its rows of the weight before it waits for the
previous kernel (PDL), so that the weight is read while that one ends. If `norm` is not None the
tokens go through rmsnorm with that weight first: their elements are multiplied by it before the
product, and the sums are divided by the root mean square after it. `bias` may be None too.
`panel_kernel` is for more tokens. Sums are float32.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next, prefetch_l2


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit(early=("norm", "weight", "bias"), do_not_specialize=["tokens", "outputs"])
def rows_kernel(
    x, norm, weight, bias, out, tokens, outputs, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x W^T, for ROWS rows of W [outputs, WIDTH], token by token.

    Args:
        WP: WIDTH, padded to a power of two.
        TOKENS: tokens, padded to a power of two.
        GATED: W is [2 outputs, WIDTH]; out is silu of the first half's product, times the second's.
        ADD: the product is added to out.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WP)
    inside = (n < outputs)[:, None]
    if WP != WIDTH:
        inside = inside & (k < WIDTH)[None, :]
    at = weight + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    rows = tl.load(at, mask=inside, other=0.0)
    second = rows
    if GATED:
        second = tl.load(at + outputs.to(tl.int64) * WIDTH, mask=inside, other=0.0)
    factor = tl.full([WP], 1.0, tl.float32)
    if norm is not None:
        factor = tl.load(norm + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    offset = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        offset = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    await_previous(PDL)
    for t in tl.static_range(TOKENS):
        alive = t < tokens
        value = tl.load(x + t * x_stride + k, mask=(k < WIDTH) & alive, other=0.0).to(tl.float32)
        scale = 1.0
        if norm is not None:
            scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
            value = value * factor
        result = tl.sum(rows.to(tl.float32) * value[None, :], 1) * scale + offset
        if GATED:
            result = silu(result) * (tl.sum(second.to(tl.float32) * value[None, :], 1) * scale)
        to = out + t * out_stride + n
        shown = (n < outputs) & alive
        if ADD:
            result += tl.load(to, mask=shown, other=0.0).to(tl.float32)
        tl.store(to, result.to(out.dtype.element_ty), mask=shown)


@triton.jit
def load_padded(at, inside, PADDED: tl.constexpr):
    """The values at the addresses `at`; with PADDED 0 where not inside."""
    if PADDED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def held(x, PURE: tl.constexpr = True):
    """x, copied by an instruction that the compiler cannot see through; if not PURE, the load stays
    where it is instead of being moved to its use."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], x.dtype, PURE, 32 // x.dtype.primitive_bitwidth
    )


@triton.jit
def along(k, FIRST: tl.constexpr):
    """[PARTS, PART] elements along K, reshaped for the FIRST operand [PARTS, lines, PART] of
    batched products, or for the second [PARTS, PART, lines]."""
    return k[:, None, :] if FIRST else k[:, :, None]


@triton.jit
def across(line, FIRST: tl.constexpr):
    """[lines] elements, reshaped for the same operand."""
    return line[None, :, None] if FIRST else line[None, None, :]


@triton.jit
def beside(line, FIRST: tl.constexpr):
    """[lines] elements of the same operand, reshaped for the products [lines, other lines] or
    [other lines, lines]."""
    return line[:, None] if FIRST else line[None, :]


@triton.jit
def tile_product(value, rows, TALL: tl.constexpr):
    """Products of tokens with rows of the weight, summed over the parts of K. TALL: the rows are
    the first operand, which needs 16 lines at least."""
    if TALL:
        product = tl.dot(rows, value, input_precision="ieee")
    else:
        product = tl.dot(value, rows, input_precision="ieee")
    return tl.sum(product, 0)


@triton.jit(early=("norm", "weight", "bias"), do_not_specialize=["tokens", "outputs"])
def tile_kernel(
    x, norm, weight, bias, out, tokens, outputs, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, WP: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TALL: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`rows_kernel` for TOKENS tokens at once.

    Rows and tokens past the end repeat the last ones and are not stored: masked loads would not
    all be issued at once.

    Args:
        SPAN: columns of a program. If fewer than WIDTH (split-K), other programs take the other
            spans, and out is [spans, tokens, outputs], the sums of the spans.
        WP: SPAN, padded to a power of two.
        PARTS: parts of K, multiplied separately, so that every warp has one.
        TALL: as in `tile_product`.
    """
    launch_next(PDL)
    PART: tl.constexpr = WP // PARTS
    PADDED: tl.constexpr = WP != SPAN
    WIDE: tl.constexpr = not TALL
    span = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, outputs - 1)
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = k < SPAN
    k += span * SPAN
    at = weight + across(row.to(tl.int64), TALL) * WIDTH + along(k, TALL)
    rows = load_padded(at, along(inside, TALL), PADDED)
    if GATED:
        at += outputs.to(tl.int64) * WIDTH
        second = load_padded(at, along(inside, TALL), PADDED)
    if norm is not None:
        factor = load_padded(norm + k, inside, PADDED).to(tl.float32)
    if bias is not None:
        offset = tl.load(bias + row).to(tl.float32)
    t = tl.arange(0, TOKENS)
    token = tl.minimum(t, tokens - 1)
    await_previous(PDL)
    at = x + across(token, WIDE) * x_stride + along(k, WIDE)
    value = load_padded(at, along(inside, WIDE), PADDED)
    if ADD:
        at = out + beside(token, WIDE) * out_stride + beside(row, TALL)
        before = tl.load(at).to(tl.float32)
    if PDL:
        # Without this barrier, the compiler stores the first weight tiles to shared memory before
        # it issues the last loads.
        tl.debug_barrier()
        rows, value = held(rows), held(value)
        if GATED:
            second = held(second)
        if ADD:
            before = held(before, False)
    scale = tl.full([TOKENS], 1.0, tl.float32)
    if norm is not None:
        wide = value.to(tl.float32)
        squares = tl.sum(tl.sum(wide * wide, 1 if TALL else 2), 0)
        scale = tl.rsqrt(squares / WIDTH + eps)
        value = (wide * along(factor, WIDE)).to(value.dtype)
    result = tile_product(value, rows, TALL) * beside(scale, WIDE)
    if bias is not None:
        result += beside(offset, TALL)
    if GATED:
        result = silu(result) * (tile_product(value, second, TALL) * beside(scale, WIDE))
    if ADD:
        result += before
    to = out + span.to(tl.int64) * tokens * out_stride
    to += beside(t, WIDE) * out_stride + beside(n, TALL)
    shown = beside(t < tokens, WIDE) & beside(n < outputs, TALL)
    tl.store(to, result.to(out.dtype.element_ty), mask=shown)


@triton.jit(early=(), do_not_specialize=["tokens", "outputs"])
def panel_kernel(
    x, weight, out, tokens, outputs, x_stride, out_stride,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x W^T for all tokens and ROWS rows of W, PART of its columns at a
    time. The rest of the weight is prefetched before the wait for the previous kernel.

    Args:
        SPAN: columns per program.
        LINES: cache lines in a span of a row, padded to a power of two.
        TOKENS: tokens, padded to a power of two.
        GATED: as in `rows_kernel`; rows of both halves are interleaved.
        SPLIT: out is [spans, tokens, outputs], the sums of the spans.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    span = tl.program_id(1)
    r = tl.arange(0, ROWS)
    if GATED:
        pair = tl.program_id(0) * (ROWS // 2) + r // 2
        row = pair.to(tl.int64) + (r % 2).to(tl.int64) * outputs
    else:
        row = (tl.program_id(0) * ROWS + r).to(tl.int64)
    base = weight + row * WIDTH + span * SPAN
    if PDL:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, LINES) * LINE, SPAN - LINE)
        prefetch_l2(base[:, None] + line[None, :])
    await_previous(PDL)
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, PART)
    alive = (t < tokens)[:, None]
    rows = base[None, :] + k[:, None]
    columns = x + span * SPAN + t[:, None] * x_stride + k[None, :]
    result = tl.zeros([TOKENS, ROWS], tl.float32)
    for _ in range(0, SPAN, PART):
        value = tl.load(columns, mask=alive, other=0.0)
        own = tl.load(rows, eviction_policy="evict_first")
        result = tl.dot(value, own, result, input_precision=PRECISION)
        columns += PART
        rows += PART
    if GATED:
        first, second = tl.split(tl.reshape(result, [TOKENS, ROWS // 2, 2]))
        result = silu(first) * second
        n = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        n = tl.program_id(0) * ROWS + r
    to = out + t.to(tl.int64)[:, None] * out_stride + n[None, :]
    if SPLIT:
        to += span.to(tl.int64) * tokens * out_stride
    tl.store(to, result.to(out.dtype.element_ty), mask=alive)


@triton.jit(early=("norm",), do_not_specialize=["tokens"])
def sum_norm_kernel(
    parts, residual, norm, out, tokens, residual_stride, out_stride, width, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: residual += the sum of its parts [PARTS, tokens, width], in their order; with a
    norm, out = the norm of that sum before rounding.

    Args:
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if norm is not None:
        # Load before the PDL wait: a weight does not depend on the previous kernel.
        factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    residual_at = residual + token * residual_stride + column
    before = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    at = parts + token * width + column
    total = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + tokens.to(tl.int64) * part * width, mask=inside, other=0.0)
    total += before
    tl.store(residual_at, total.to(residual.dtype.element_ty), mask=inside)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
        tl.store(
            out + token * out_stride + column,
            (total * scale * factor).to(out.dtype.element_ty),
            mask=inside,
        )
