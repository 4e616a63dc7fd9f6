"""Kernels of compressed attention."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous


@triton.jit
def rotated_tail(
    x, angles, DIM: tl.constexpr, ROTATED: tl.constexpr, INVERSE: tl.constexpr
):  # fmt: skip
    """Rows [LINES, DP] with elements DIM - ROTATED .. DIM - 1 rotated by the angles [cos | sin] at
    `angles`; element 2i is paired with 2i + 1."""
    lines: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x, (lines, half, 2)))
    pair = tl.arange(0, half) - (DIM - ROTATED) // 2
    inside = (pair >= 0) & (pair < ROTATED // 2)
    cos = tl.load(angles + pair, mask=inside, other=1.0)[None, :]
    sin = tl.load(angles + ROTATED // 2 + pair, mask=inside, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    first = even * cos - odd * sin
    second = odd * cos + even * sin
    return tl.reshape(tl.join(first, second), (lines, 2 * half))


@triton.jit(early=())
def norm_rope_tail_kernel(
    x, cos_sin, weight, out, x_stride, head_stride, angle_stride, heads, eps,
    DIM: tl.constexpr, DP: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, NORMED: tl.constexpr, INVERSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`norm_rope_tail` for HEADS heads of one token, one of its GROUPS groups of heads.

    Args:
        weight: [DIM], or None.
        DP: DIM, padded. NORMED: there is a norm.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    token, group = row_and_part(GROUPS)
    head, column = group * HEADS + tl.arange(0, HEADS), tl.arange(0, DP)
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    at = x + token * x_stride + head[:, None] * head_stride + column[None, :]
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        y *= tl.rsqrt(tl.sum(y * y, 1) / DIM + eps)[:, None]
    if weight is not None:
        factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
        y *= factor[None, :]
    y = rotated_tail(y, cos_sin + token * angle_stride, DIM, ROTATED, INVERSE)
    to = out + (token * heads + head)[:, None] * DIM + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def compress_kernel(
    inputs, table, rows, slots, bias, norm, cos_sin, out, eps, page_stride, slot_stride,
    table_stride, angle_stride,
    DIM: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr, RATE: tl.constexpr,
    ITEMS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the entry of the window that ends with a token, or 0 if none does; see
    `compress_windows`.

    Args:
        DP: DIM, padded. WIDE: values per token.
        ITEMS: tokens that contribute to an entry. AT_ONCE: tokens per iteration.
        SIZE: page size.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DP)
    within = column < DIM
    slot = tl.load(slots + token).to(tl.int32)
    to = out + token * DIM + column
    if (slot < 0) | ((slot + 1) % RATE != 0):
        tl.store(to, tl.zeros([DP], out.dtype.element_ty), mask=within)
        return
    own = table + tl.load(rows + token) * table_stride
    best = tl.full([DP], float("-inf"), tl.float32)
    total = tl.zeros([DP], tl.float32)
    entry = tl.zeros([DP], tl.float32)
    for begin in range(0, ITEMS, AT_ONCE):
        item = begin + tl.arange(0, AT_ONCE)
        position = slot + 1 - ITEMS + item
        there = (item < ITEMS) & (position >= 0)
        position = tl.where(there, position, 0)
        page = tl.load(own + position // SIZE, mask=there, other=0).to(tl.int64)
        line = page * page_stride + (position % SIZE).to(tl.int64) * slot_stride
        # Tokens of the previous window contribute their first DIM columns, those of the entry's own
        # window their last.
        first = tl.where(item < ITEMS - RATE, 0, WIDE - DIM)
        shown = there[:, None] & within[None, :]
        at = inputs + (line + first)[:, None] + column[None, :]
        of_bias = bias + (item % RATE * WIDE + first)[:, None] + column[None, :]
        value = tl.load(at, mask=shown, other=0.0)
        logit = tl.load(at + WIDE, mask=shown, other=0.0)
        logit += tl.load(of_bias, mask=shown, other=0.0)
        logit = tl.where(shown, logit, float("-inf"))
        higher = tl.maximum(best, tl.max(logit, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(logit - base[None, :])
        decay = tl.exp(best - base)
        total = total * decay + tl.sum(weight, 0)
        entry = entry * decay + tl.sum(weight * value, 0)
        best = higher
    entry = tl.where(within, entry / tl.where(total == 0.0, 1.0, total), 0.0)
    entry *= tl.rsqrt(tl.sum(entry * entry, 0) / DIM + eps)
    entry *= tl.load(norm + column, mask=within, other=0.0).to(tl.float32)
    lines = rotated_tail(entry[None, :], cos_sin + token * angle_stride, DIM, ROTATED, False)
    made = tl.reshape(lines, (DP,))
    tl.store(to, made.to(out.dtype.element_ty), mask=within)
