"""Kernels of hyper-connections."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous


@triton.jit
def products_kernel(
    streams, fn, part, tokens, width, stride,
    ROWS: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """part [splits, tokens, NP] = products of BT tokens with the ROWS rows of fn, and in the next
    column the tokens' sums of squares, over one split of SPAN elements.

    Args:
        width: elements of a token, contiguous.
        stride: elements from token to token.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    row, column = tl.arange(0, NP), tl.arange(0, BK)
    alive = token < tokens
    at = streams + token.to(tl.int64)[:, None] * stride
    total = tl.zeros([BT, NP], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for begin in range(0, SPAN, BK):
        place = split * SPAN + begin + column
        shown = place < width
        x = tl.load(at + place[None, :], mask=alive[:, None] & shown[None, :], other=0.0)
        x = x.to(tl.float32)
        matrix = tl.load(
            fn + row[None, :] * width + place[:, None],
            mask=(row < ROWS)[None, :] & shown[:, None],
            other=0.0,
        )
        total = tl.dot(x, matrix, total, input_precision=PRECISION)
        squares += tl.sum(x * x, 1)
    total = tl.where((row == ROWS)[None, :], squares[:, None], total)
    to = part + (split * tokens + token).to(tl.int64)[:, None] * NP + row[None, :]
    tl.store(to, total, mask=alive[:, None] & (row <= ROWS)[None, :])


@triton.jit
def picked(y, column, wanted):
    """y [NP] gathered at the columns wanted [N]; 0 where there is no such column."""
    return tl.sum(tl.where(column[None, :] == wanted[:, None], y[None, :], 0.0), 1)


@triton.jit
def mixing(logits, eps, iterations):
    """softmax of the rows of logits [CP, CP], which are -inf in the padding, then rows and columns
    divided by their sums in turn (Sinkhorn): [CP, CP]."""
    best = tl.max(logits, 1)
    best = tl.where(best == float("-inf"), 0.0, best)
    power = tl.exp(logits - best[:, None])
    total = tl.sum(power, 1)
    share = power / tl.where(total == 0.0, 1.0, total)[:, None] + eps
    mix = tl.where(logits == float("-inf"), 0.0, share)
    mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    for _ in range(iterations - 1):
        mix = mix / (tl.sum(mix, 1) + eps)[:, None]
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    return mix


@triton.jit
def gather_kernel(
    streams, part, scale, base, x, post, mix, tokens, splits, hidden, stride, norm_eps, eps,
    iterations,
    COUNT: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr, NP: tl.constexpr,
    SP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of a token's weighted sum of COUNT streams; the first program of a token also
    writes post and mix (None: only the sum is wanted). See `mhc_pre` and `mhc_head`.

    Args:
        part: from `products_kernel`, [splits, tokens, NP], sums of squares in column ROWS.
        stride: elements of `streams` from token to token.
        CP, SP: COUNT and splits, padded.
        PARTS: programs per token.
    """
    token, piece = row_and_part(PARTS)
    column, number, split = tl.arange(0, NP), tl.arange(0, CP), tl.arange(0, SP)
    at = part + (split * tokens + token)[:, None] * NP + column[None, :]
    y = tl.load(at, mask=(split < splits)[:, None] & (column <= ROWS)[None, :], other=0.0)
    y = tl.sum(y, 0)
    squares = tl.sum(tl.where(column == ROWS, y, 0.0), 0)
    y *= tl.rsqrt(squares / (COUNT * hidden) + norm_eps)
    alive = number < COUNT
    share = picked(y, column, number) * tl.load(scale)
    share += tl.load(base + number, mask=alive, other=0.0)
    weight = tl.where(alive, 1.0 / (1.0 + tl.exp(-share)) + eps, 0.0)
    place = piece * BLOCK + tl.arange(0, BLOCK)
    shown = alive[:, None] & (place < hidden)[None, :]
    at = streams + token * stride + number[:, None] * hidden + place[None, :]
    taken = tl.load(at, mask=shown, other=0.0).to(tl.float32)
    total = tl.sum(taken * weight[:, None], 0)
    tl.store(x + token * hidden + place, total.to(x.dtype.element_ty), mask=place < hidden)
    if post is not None:  # noqa: SIM102 - known when it is compiled
        if piece == 0:
            entering = picked(y, column, COUNT + number) * tl.load(scale + 1)
            entering += tl.load(base + COUNT + number, mask=alive, other=0.0)
            entering = 2.0 / (1.0 + tl.exp(-entering))
            tl.store(post + token * COUNT + number, entering, mask=alive)
            cell = tl.arange(0, CP * CP)
            element = cell // CP * COUNT + cell % CP
            logits = picked(y, column, 2 * COUNT + element) * tl.load(scale + 2)
            inside = (cell // CP < COUNT) & (cell % CP < COUNT)
            logits += tl.load(base + 2 * COUNT + element, mask=inside, other=0.0)
            logits = tl.where(inside, logits, float("-inf"))
            made = mixing(tl.reshape(logits, (CP, CP)), eps, iterations)
            to = mix + token * COUNT * COUNT + number[:, None] * COUNT + number[None, :]
            tl.store(to, made, mask=alive[:, None] & alive[None, :])


@triton.jit(early=())
def post_kernel(
    streams, delta, post, mix, hidden, stride, delta_stride,
    COUNT: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of each of a token's COUNT streams in place; see `mhc_post`. CP: COUNT,
    padded. PARTS: programs per token. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, piece = row_and_part(PARTS)
    number = tl.arange(0, CP)
    alive = number < COUNT
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    at = streams + token * stride + number[:, None] * hidden + column[None, :]
    before = tl.load(at, mask=alive[:, None] & inside[None, :], other=0.0).to(tl.float32)
    added = tl.load(delta + token * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(COUNT):
        weight = tl.load(mix + (token * COUNT + number) * COUNT + k, mask=alive, other=0.0)
        total = added * tl.load(post + token * COUNT + k) + tl.sum(before * weight[:, None], 0)
        to = streams + token * stride + k * hidden + column
        tl.store(to, total.to(streams.dtype.element_ty), mask=inside)
