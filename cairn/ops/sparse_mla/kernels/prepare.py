"""Kernels between the matrix products of latent attention: norms and rotations of latents, keys and
queries."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.norm.kernels import norm_row, scaled
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def partners(column, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For columns below ROTATED: the column of the pair's other element, the index of the pair, and
    whether the column is its second element."""
    if INTERLEAVED:
        return column ^ 1, column // 2, (column & 1) == 1
    half: tl.constexpr = ROTATED // 2
    second = column >= half
    pair = tl.where(second, column - half, column)
    return tl.where(second, column - half, column + half), pair, second


@triton.jit
def apply_rope(value, other, angles, column, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """value [.., N] with the columns below ROTATED rotated; other: the other element of each pair.

    Args:
        angles: address of the token's [cos | sin], ROTATED elements.
    """
    _other, pair, second = partners(column, ROTATED, INTERLEAVED)
    inside = column < ROTATED
    cos = tl.load(angles + pair, mask=inside, other=1.0)
    sin = tl.load(angles + ROTATED // 2 + pair, mask=inside, other=0.0)
    return value * cos + tl.where(second, other, -other) * sin


@triton.jit
def key_row(
    x, weight, bias, angles, out, eps, WIDTH: tl.constexpr, WP: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write one index key: layer norm, rounded, then rotation of its first ROTATED elements."""
    column = tl.arange(0, WP)
    inside = column < WIDTH
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / WIDTH
    apart = tl.where(inside, value - mean, 0.0)
    scale, factor = scaled(apart, weight + column, inside, WIDTH, eps, 0, False)
    kind = x.dtype.element_ty
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    normed = (apart * scale * factor + shift).to(kind).to(tl.float32)
    # The other element of each pair is loaded again and normed with the statistics computed above.
    other, _pair, _second = partners(column, ROTATED, INTERLEAVED)
    paired = column < ROTATED
    beside = tl.load(x + other, mask=paired, other=0.0).to(tl.float32) - mean
    factor = tl.load(weight + other, mask=paired, other=0.0).to(tl.float32)
    shift = tl.load(bias + other, mask=paired, other=0.0).to(tl.float32)
    beside = (beside * scale * factor + shift).to(kind).to(tl.float32)
    result = apply_rope(normed, beside, angles, column, ROTATED, INTERLEAVED)
    tl.store(out + column, result.to(kind), mask=inside)


@triton.jit
def turn_row(x, angles, out, ROPE: tl.constexpr, RP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write out [ROPE]: the row at x, rotated."""
    column = tl.arange(0, RP)
    inside = column < ROPE
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    other, _pair, _second = partners(column, ROPE, INTERLEAVED)
    beside = tl.load(x + other, mask=inside, other=0.0).to(tl.float32)
    result = apply_rope(value, beside, angles, column, ROPE, INTERLEAVED)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turn_heads(
    x, angles, out, x_head, out_head, heads,
    WIDTH: tl.constexpr, WP: tl.constexpr, HP: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write out [heads, WIDTH]: heads of a token with their first ROPE elements rotated."""
    head = tl.arange(0, HP)[:, None]
    column = tl.arange(0, WP)[None, :]
    inside = (head < heads) & (column < WIDTH)
    value = tl.load(x + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
    other, _pair, _second = partners(column, ROPE, INTERLEAVED)
    paired = inside & (column < ROPE)
    beside = tl.load(x + head * x_head + other, mask=paired, other=0.0).to(tl.float32)
    result = apply_rope(value, beside, angles, column, ROPE, INTERLEAVED)
    tl.store(out + head * out_head + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(early=())
def latent_kernel(
    x, key, q_weight, kv_weight, k_weight, k_bias, cos_sin, index_cos_sin,
    q_out, latent_out, pe_out, key_out, x_stride, key_stride, eps, key_eps,
    QUERY: tl.constexpr, QP: tl.constexpr, LATENT: tl.constexpr, LP: tl.constexpr,
    ROPE: tl.constexpr, RP: tl.constexpr, WIDTH: tl.constexpr, WP: tl.constexpr,
    INTERLEAVED: tl.constexpr, INDEX_INTERLEAVED: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm both latents of a row [QUERY | LATENT | ROPE] of x and rotate its rotary key; norm and
    rotate the index key, a row of key [WIDTH]. PDL: as in `await_previous`.

    Args:
        key: None, with PARTS = 2, where the layer has no indexer.
    """
    launch_next(PDL)
    await_previous(PDL)
    token, part = row_and_part(PARTS)
    row = x + token * x_stride
    if part == 0:
        norm_row(row, q_weight, q_out + token * QUERY, QUERY, eps, QP, False, False)
    elif part == 1:
        out = latent_out + token * LATENT
        norm_row(row + QUERY, kv_weight, out, LATENT, eps, LP, False, False)
        turn_row(
            row + QUERY + LATENT, cos_sin + token * ROPE, pe_out + token * ROPE,
            ROPE, RP, INTERLEAVED,
        )  # fmt: skip
    elif key is not None:
        key_row(
            key + token * key_stride, k_weight, k_bias, index_cos_sin + token * ROPE,
            key_out + token * WIDTH, key_eps, WIDTH, WP, ROPE, INDEX_INTERLEAVED,
        )  # fmt: skip


@triton.jit(early=())
def query_kernel(
    x, q, weights, cos_sin, index_cos_sin, index_out, weights_out,
    x_stride, q_token, q_head, factor,
    HEADS: tl.constexpr, HP: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, RP: tl.constexpr, INDEX_HEADS: tl.constexpr, IP: tl.constexpr,
    WIDTH: tl.constexpr, WP: tl.constexpr, INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of x has HEADS heads [NOPE | ROPE], then INDEX_HEADS heads [WIDTH] of the indexer. The
    rotary parts of the heads are rotated and written to q after its LATENT elements; the indexer's
    heads are rotated, and their weights multiplied by a factor. PDL: as in `await_previous`.

    Args:
        weights: None, with PARTS = 1, where the layer has no indexer.
    """
    launch_next(PDL)
    await_previous(PDL)
    token, part = row_and_part(PARTS)
    row = x + token * x_stride
    if part == 0:
        turn_heads(
            row + NOPE, cos_sin + token * ROPE, q + token * q_token + LATENT,
            NOPE + ROPE, q_head, HEADS, ROPE, RP, HP, ROPE, INTERLEAVED,
        )  # fmt: skip
    elif weights is not None:
        turn_heads(
            row + HEADS * (NOPE + ROPE), index_cos_sin + token * ROPE,
            index_out + token * INDEX_HEADS * WIDTH,
            WIDTH, WIDTH, INDEX_HEADS, WIDTH, WP, IP, ROPE, INDEX_INTERLEAVED,
        )  # fmt: skip
        own = tl.arange(0, IP)
        place = token * INDEX_HEADS + own
        weight = tl.load(weights + place, mask=own < INDEX_HEADS, other=0.0)
        tl.store(weights_out + place, weight * factor, mask=own < INDEX_HEADS)
