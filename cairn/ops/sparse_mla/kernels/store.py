"""Kernels that write index keys and latent records to their caches, and that quantise index
queries.

Codes and scales are those of `cairn.ops.quantization`: a float32 division, rounded once.
"""

from __future__ import annotations

from cairn.ops.elementwise.kernels import by_signs, hadamard_signs
from cairn.ops.gpu import tl, triton
from cairn.ops.quantization.kernels import code_of, largest_bits, power_of_two


@triton.jit
def quantised(
    number, least: tl.constexpr, POWER: tl.constexpr, FLOOR: tl.constexpr, HARDWARE: tl.constexpr
):
    """Rows [N, D] float32 as e4m3 bytes, their scales [N] and, with POWER, the e8m0 bytes of the
    scales.

    Args:
        least: lower bound of the largest magnitude or, with FLOOR, of the scale.
        POWER: scales are rounded up to powers of two.
        HARDWARE: as in `code_of`.
    """
    # NaN compares as the largest magnitude, so that the scale of its row is NaN.
    amax = largest_bits(number, 1).to(tl.float32, bitcast=True)
    if not FLOOR:
        amax = tl.where(amax < least, least, amax)
    scale = tl.div_rn(amax, 448.0)
    if FLOOR:
        scale = tl.where(scale < least, least, scale)
    exponent = scale.to(tl.int32)
    if POWER:
        exponent, scale = power_of_two(scale)
    ratio = tl.div_rn(number, tl.broadcast_to(scale[:, None], number.shape))
    return code_of(ratio, -448.0, 448.0, "e4m3", True, HARDWARE), scale, exponent


@triton.jit
def rotated(number, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Rows [N, DIM] of DTYPE times the Hadamard matrix of DIM, which is orthogonal; float32."""
    return by_signs(number.to(DTYPE), hadamard_signs(DIM)) * (DIM**-0.5)


@triton.jit(do_not_specialize=["tokens", "capacity"])
def index_store_kernel(
    k, cache, scales, location, tokens, capacity, k_token, page_stride, scale_stride,
    DIM: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    PRESHUFFLED: tl.constexpr, POWER: tl.constexpr, HADAMARD: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """cache[location[t]] = k[t] [DIM], unquantised, or in float8 with scales; locations out of
    range are skipped."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cell = tl.load(location + t, mask=t < tokens, other=-1).to(tl.int64)
    kept = (cell >= 0) & (cell < capacity)
    cell = tl.where(kept, cell, 0)
    page = cell // SIZE
    slot = (cell % SIZE)[:, None]
    column = tl.arange(0, DP)[None, :]
    shown = kept[:, None] & (column < DIM)
    number = tl.load(k + t.to(tl.int64)[:, None] * k_token + column, mask=shown, other=0.0)
    if HADAMARD:
        number = rotated(number, DIM, k.dtype.element_ty)
    if PRESHUFFLED:
        tile = slot // 16 * (16 * DIM) + column // 16 * 256
        inner = tile + slot % 16 * 16 + column % 16
    else:
        inner = slot * DIM + column
    to = cache + page[:, None] * page_stride + inner
    if scales is None:
        tl.store(to, number.to(cache.dtype.element_ty), mask=shown)
    else:
        code, scale, _exponent = quantised(number.to(tl.float32), 1e-4, POWER, False, HARDWARE)
        tl.store(to, code, mask=shown)
        tl.store(scales + page * scale_stride + cell % SIZE, scale, mask=kept)


@triton.jit(do_not_specialize=["rows"])
def index_query_kernel(
    q, weights, codes, scaled, rows,
    DIM: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HADAMARD: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """codes [rows, DIM] e4m3 of q, and scaled [rows] = weights * scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    column = tl.arange(0, DP)[None, :]
    shown = alive[:, None] & (column < DIM)
    at = row.to(tl.int64)[:, None] * DIM + column
    number = tl.load(q + at, mask=shown, other=0.0)
    if HADAMARD:
        number = rotated(number, DIM, q.dtype.element_ty)
    code, scale, _exponent = quantised(number.to(tl.float32), 1e-4, False, False, HARDWARE)
    tl.store(codes + at, code, mask=shown)
    weight = tl.load(weights + row, mask=alive, other=0.0)
    tl.store(scaled + row, weight * scale, mask=alive)


@triton.jit(do_not_specialize=["tokens", "capacity"])
def record_store_kernel(
    latent, k_pe, cache, scales, ropes, location, tokens, capacity,
    latent_token, pe_token, page_stride, slot_stride,
    LATENT: tl.constexpr, LP: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """cache[location[t]] = latent[t] [LATENT] | k_pe[t] [ROPE], unquantised, or the latent in
    float8 with scales; locations out of range are skipped.

    Args:
        scales, ropes: the cache viewed as float32 and in the dtype of the rotary keys, or None.
        TILE: elements that share a scale: 128, or 64 in records whose value is the whole record.
    """
    t = tl.program_id(0).to(tl.int64)
    cell = tl.load(location + t).to(tl.int64)
    if (cell >= 0) & (cell < capacity):
        line = cell // SIZE * page_stride + cell % SIZE * slot_stride
        r = tl.arange(0, RP)
        rope = tl.load(k_pe + t * pe_token + r, mask=r < ROPE, other=0.0)
        if scales is None:
            column = tl.arange(0, LP)
            shown = column < LATENT
            number = tl.load(latent + t * latent_token + column, mask=shown, other=0.0)
            tl.store(cache + line + column, number, mask=shown)
            tl.store(cache + line + LATENT + r, rope, mask=r < ROPE)
        else:
            tile = tl.arange(0, LP // TILE)
            column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            shown = column < LATENT
            number = tl.load(latent + t * latent_token + column, mask=shown, other=0.0)
            number = number.to(tl.float32)
            code, scale, exponent = quantised(number, 1e-4, True, TILE == 128, HARDWARE)
            tl.store(cache + line + column, code, mask=shown)
            behind: tl.constexpr = LATENT // 32 if TILE == 128 else (LATENT // 64 + 7) // 8 * 8
            if TILE == 128:
                to = scales + line // 4 + LATENT // 4 + tile
                tl.store(to, scale, mask=tile * 128 < LATENT)
            else:
                to = cache + line + LATENT
                tl.store(to + tile, exponent.to(tl.uint8), mask=tile * 64 < LATENT)
                padding = LATENT // 64 + tl.arange(0, 8)
                tl.store(to + padding, tl.zeros([8], tl.uint8), mask=padding < behind)
            to = ropes + (line + LATENT + behind) // 2 + r
            tl.store(to, rope.to(tl.bfloat16), mask=r < ROPE)
