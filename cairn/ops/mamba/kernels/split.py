"""Kernels that split projections, and the kernel of the gates."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.mamba.kernels.recurrent import log_decay, sigmoid


@triton.jit
def gates_kernel(
    a_log, a, b, dt_bias, g, strength, elements, heads, a_token, b_token, beta, threshold,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """g and strength [T, heads] of `log_decay` and `sigmoid`, BLOCK elements of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    token, head = at // heads, at % heads
    x = tl.load(a + token * a_token + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(g + at, log_decay(rate, x, beta, threshold), mask=inside)
    x = tl.load(b + token * b_token + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(strength + at, sigmoid(x).to(strength.dtype.element_ty), mask=inside)


@triton.jit
def split_kernel(
    qkvz, ba, qkv, z, b, a, qkvz_stride, ba_stride, KEYS: tl.constexpr, EACH: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, GROUPED: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK columns of a token, of [q | k | v | z] and then of [b | a]. GROUPED: input columns
    are grouped by key head; otherwise they are in that order."""
    token, part = row_and_part(PROGRAMS)
    heads: tl.constexpr = KEYS * EACH
    wide: tl.constexpr = 2 * KEYS * K + heads * V
    columns: tl.constexpr = wide + heads * V
    at = part * BLOCK + tl.arange(0, BLOCK)
    source = at
    if GROUPED:
        group: tl.constexpr = 2 * K + 2 * EACH * V
        # Offset within a group's queries, keys, values and gates.
        value = at - 2 * KEYS * K
        gate = at - wide
        source = tl.where(at < KEYS * K, at // K * group + at % K, 0)
        key = at - KEYS * K
        own = key // K * group + K + key % K
        source = tl.where((key >= 0) & (value < 0), own, source)
        own = value // (EACH * V) * group + 2 * K + value % (EACH * V)
        source = tl.where((value >= 0) & (gate < 0), own, source)
        own = gate // (EACH * V) * group + 2 * K + EACH * V + gate % (EACH * V)
        source = tl.where(gate >= 0, own, source)
    number = tl.load(qkvz + token * qkvz_stride + source, mask=at < columns, other=0.0)
    tl.store(qkv + token * wide + at, number, mask=at < wide)
    tl.store(z + token * (heads * V) + at - wide, number, mask=(at >= wide) & (at < columns))
    head = at - columns
    second = head - heads
    source = head
    if GROUPED:
        source = tl.where(
            second < 0,
            head // EACH * (2 * EACH) + head % EACH,
            second // EACH * (2 * EACH) + EACH + second % EACH,
        )
    inside = (head >= 0) & (head < 2 * heads)
    number = tl.load(ba + token * ba_stride + source, mask=inside, other=0.0)
    tl.store(b + token * heads + head, number, mask=inside & (second < 0))
    tl.store(a + token * heads + second, number, mask=inside & (second >= 0))
