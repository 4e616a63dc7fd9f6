"""Kernels of the rotary embedding and of the heads' norms."""

from __future__ import annotations

from cairn.ops.attention.kernels import await_previous, launch_next
from cairn.ops.gpu import tl, triton


@triton.jit(do_not_specialize=["numbers"])
def cos_sin_kernel(positions, inv_freq, out, numbers, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = [cos | sin] of positions[t] * inv_freq, the product in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    token, pair = at // HALF, at % HALF
    position = tl.load(positions + token, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + pair, mask=inside, other=0.0)
    tl.store(out + token * 2 * HALF + pair, tl.cos(angle), mask=inside)
    tl.store(out + token * 2 * HALF + HALF + pair, tl.sin(angle), mask=inside)


@triton.jit
def head_norm_rope_kernel(
    x, weight, cos_sin, out, x_stride, head_stride, heads, eps,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: rmsnorm of each, then the rotation of its two halves."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HP)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    at = token * x_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)
    of_weight = head[:, None] * 2 * HALF + pair[None, :]
    first *= scale[:, None] * tl.load(weight + of_weight, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + of_weight + HALF, mask=inside, other=0.0).to(tl.float32)
    second *= scale[:, None] * factor
    if ROTATED:
        angle = cos_sin + token * 2 * HALF + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    to = (token * heads + head)[:, None] * 2 * HALF + pair[None, :]
    tl.store(out + to, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    x, positions, cos_sin, token_stride, head_stride, row_stride, heads,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 HALF numbers of HEADS heads of one token, in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HP)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * row_stride + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    base = x + token * token_stride + head[:, None] * head_stride
    first_at = base + (pair if NEOX else 2 * pair)[None, :]
    second_at = base + (pair + HALF if NEOX else 2 * pair + 1)[None, :]
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_at, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(second_at, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)


@triton.jit
def normed_heads(
    projected, added, weight, cos_sin, token, head, row_stride, added_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, ADDED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """The two halves [HEADS, HP] float32 of some of a token's heads, those of q, k and z in a row:
    normed, then rotated."""
    pair = tl.arange(0, HP)
    inside = (head < ALL_HEADS)[:, None] & (pair < HALF)[None, :]
    of_z = head >= Q_HEADS + KV_HEADS
    # With a sum, z begins as q's projection.
    source = tl.where(of_z, head - Q_HEADS - KV_HEADS, head) if ADDED else head
    at = projected + token * row_stride + source[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        more = added + token * added_stride + source[:, None] * (2 * HALF) + pair[None, :]
        summed = inside & of_z[:, None]
        kind = projected.dtype.element_ty
        first += tl.load(more, mask=summed, other=0.0).to(tl.float32)
        second += tl.load(more + HALF, mask=summed, other=0.0).to(tl.float32)
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)
    of_weight = weight + head[:, None] * (2 * HALF) + pair[None, :]
    first *= scale[:, None] * tl.load(of_weight, mask=inside, other=0.0).to(tl.float32)
    second *= scale[:, None] * tl.load(of_weight + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        angle = cos_sin + token * 2 * HALF + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    return first, second


@triton.jit
def store_halves(to, head, own, first, second, stride, HALF: tl.constexpr, HP: tl.constexpr):
    """Write the two halves [HEADS, HP] of the heads `own`, `stride` numbers from head to head."""
    pair = tl.arange(0, HP)
    inside = own[:, None] & (pair < HALF)[None, :]
    at = to + head[:, None] * stride + pair[None, :]
    tl.store(at, first.to(to.dtype.element_ty), mask=inside)
    tl.store(at + HALF, second.to(to.dtype.element_ty), mask=inside)


@triton.jit
def split_norm_rope_kernel(
    projected, added, weight, cos_sin, q, k, z, row_stride, added_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr,
    ADDED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, those of q, k and z in a row: each into its own tensor."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first, second = normed_heads(
        projected, added, weight, cos_sin, token, head, row_stride, added_stride, eps,
        Q_HEADS, KV_HEADS, ALL_HEADS, HALF, HP, ADDED, ROTATED,
    )  # fmt: skip
    width: tl.constexpr = 2 * HALF
    before: tl.constexpr = Q_HEADS + KV_HEADS
    own = head < Q_HEADS
    store_halves(q + token * Q_HEADS * width, head, own, first, second, width, HALF, HP)
    own = (head >= Q_HEADS) & (head < before)
    to_k = k + token * KV_HEADS * width
    store_halves(to_k, head - Q_HEADS, own, first, second, width, HALF, HP)
    own = (head >= before) & (head < ALL_HEADS)
    store_halves(z + token * Q_HEADS * width, head - before, own, first, second, width, HALF, HP)


@triton.jit
def heads_into_cache_kernel(
    projected, added, weight, cos_sin, q, z, k_cache, v_cache, location,
    row_stride, added_stride, page_stride, head_stride, size, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, V_HEAD: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, KVP: tl.constexpr,
    ADDED: tl.constexpr, ROTATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same with k in its place in the cache; the last program of a token copies v there.

    Args:
        V_HEAD: v's first head in a row of `projected`.
        KVP: KV_HEADS, padded to a power of two.
        EARLY: as in `await_previous`.
    """
    launch_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(location + token)
    to = (at // size) * page_stride + (at % size) * (2 * HALF)
    await_previous(EARLY)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        if at >= 0:
            head = tl.arange(0, KVP)
            pair = tl.arange(0, HP)
            own = head < KV_HEADS
            inside = own[:, None] & (pair < HALF)[None, :]
            v = projected + token * row_stride + (V_HEAD + head)[:, None] * (2 * HALF)
            first = tl.load(v + pair[None, :], mask=inside)
            second = tl.load(v + HALF + pair[None, :], mask=inside)
            store_halves(v_cache + to, head, own, first, second, head_stride, HALF, HP)
    else:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        first, second = normed_heads(
            projected, added, weight, cos_sin, token, head, row_stride, added_stride, eps,
            Q_HEADS, KV_HEADS, ALL_HEADS, HALF, HP, ADDED, ROTATED,
        )  # fmt: skip
        width: tl.constexpr = 2 * HALF
        before: tl.constexpr = Q_HEADS + KV_HEADS
        own = head < Q_HEADS
        store_halves(q + token * Q_HEADS * width, head, own, first, second, width, HALF, HP)
        own = (head >= Q_HEADS) & (head < before) & (at >= 0)
        store_halves(k_cache + to, head - Q_HEADS, own, first, second, head_stride, HALF, HP)
        own = (head >= before) & (head < ALL_HEADS)
        to_z = z + token * Q_HEADS * width
        store_halves(to_z, head - before, own, first, second, width, HALF, HP)
