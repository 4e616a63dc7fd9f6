"""Kernels that gather rows, and that sum the rows of a token."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous


@triton.jit(early=())
def gather_rows_kernel(
    x, rows, out, x_stride, width, parts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[i] = x[rows[i]], BLOCK elements per program. PDL: as in `await_previous`."""
    await_previous(PDL)
    row, part = row_and_part(parts)
    column = part * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    value = tl.load(x + source * x_stride + column, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit(early=())
def sum_rows_kernel(
    x, rows, weights, ids, out, x_stride, out_stride, topk, width, parts, factor,
    KP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = factor * sum over j < topk of weights[p] * x[rows[p]], p = t * topk + j, in float32.

    Args:
        rows: None: x[p].
        weights: None: 1.
        ids: pairs with a negative ids[p] are skipped, whatever x holds there; None: none is
            skipped.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    token, part = row_and_part(parts)
    column = part * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, KP)
    pair, there = token * topk + number, number < topk
    if ids is not None:
        there = there & (tl.load(ids + pair, mask=there, other=-1) >= 0)
    source = pair
    if rows is not None:
        source = tl.load(rows + pair, mask=there, other=0).to(tl.int64)
    at = x + source[:, None] * x_stride + column[None, :]
    value = tl.load(at, mask=there[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    if weights is not None:
        value *= tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
    total = tl.sum(value, 0) * factor
    at = out + token * out_stride + column
    tl.store(at, total.to(out.dtype.element_ty), mask=column < width)
