"""Kernels of page summaries, page weights and the blend with the window."""

from __future__ import annotations

from cairn.ops.attention.kernels import load_values
from cairn.ops.cache.kernels import slot_start
from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part


@triton.jit
def again(x):
    """x, hidden from the compiler's common-subexpression elimination, so that conversions of x are
    recomputed instead of kept in registers. 32-bit values are returned unchanged: they need no
    conversion."""
    if x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    return x


@triton.jit
def store_summary(
    query, k_cache, page, to, head, key, bias, scale,
    page_stride, head_stride, key_page_stride, key_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    DP: tl.constexpr, KEYS: tl.constexpr, WITH_KEY: tl.constexpr, WITH_BIAS: tl.constexpr,
):  # fmt: skip
    """prior_summary of `page` with query [HEADS, DIM], for one head, into entry `to` of key [n,
    HEADS, DIM] and bias [n, HEADS]."""
    t = tl.arange(0, KEYS)
    d = tl.arange(0, DP)
    inside = t < SIZE - 1
    kv = (head // (HEADS // KV_HEADS)).to(tl.int64)
    at = page * page_stride + kv * head_stride + slot_start(k_cache, t, DIM)
    keys = load_values(k_cache, at, t, inside, tl.float32, DIM, SIZE, DP)
    wanted = tl.load(query + head * DIM + d, mask=d < DIM, other=0.0)
    logits = tl.sum(keys.to(tl.float32) * (wanted.to(tl.float32) * scale)[None, :], 1)
    logits = tl.where(inside, logits, float("-inf"))
    shifted = logits - tl.max(logits, 0)
    e = tl.exp(shifted)
    total = tl.sum(e, 0)
    if WITH_KEY:
        # Keys stay in half precision until used: half the registers.
        pooled = tl.sum(again(keys).to(tl.float32) * (e / total)[:, None], 0)
        place = to * key_page_stride + head * key_head_stride + d
        tl.store(key + place, pooled.to(key.dtype.element_ty), mask=d < DIM)
    if WITH_BIAS:
        # -sum p ln p with ln p = shifted - ln total
        spread = tl.sum(tl.where(inside, e * shifted, 0.0), 0) / total
        tl.store(bias + to * HEADS + head, tl.log(total) - spread)


@triton.jit
def prior_summary_kernel(
    query, k_cache, pages, key, bias, scale, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    DP: tl.constexpr, KEYS: tl.constexpr,
    WITH_KEY: tl.constexpr, WITH_BIAS: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """Write key [N, HEADS, DIM] and bias [N, HEADS] of one page for one head; BY_PAGE: to the entry
    of pools with the page's id, skipping negative ids."""
    n, head = row_and_part(HEADS)
    page = tl.load(pages + n).to(tl.int64)
    if BY_PAGE and page < 0:
        return
    store_summary(
        query + n * HEADS * DIM, k_cache, page, page if BY_PAGE else n, head, key, bias,
        scale, page_stride, head_stride, HEADS * DIM, DIM,
        HEADS, KV_HEADS, DIM, SIZE, DP, KEYS, WITH_KEY, WITH_BIAS,
    )  # fmt: skip


@triton.jit
def mean_summary_kernel(
    k_cache, pages, key, page_stride, head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    DP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """key [N, KV_HEADS, DIM]: mean of one page's keys, all SIZE slots."""
    n, kv = row_and_part(KV_HEADS)
    t = tl.arange(0, KEYS)
    d = tl.arange(0, DP)
    page = tl.load(pages + n).to(tl.int64)
    at = page * page_stride + kv.to(tl.int64) * head_stride + slot_start(k_cache, t, DIM)
    keys = load_values(k_cache, at, t, t < SIZE, tl.float32, DIM, SIZE, DP)
    mean = tl.sum(keys.to(tl.float32), 0) / SIZE
    place = (n * KV_HEADS + kv) * DIM + d
    tl.store(key + place, mean.to(key.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["lines"])
def page_weights_kernel(
    scores, lse, weights, window_weight, lines, topk,
    SOFTMAX1: tl.constexpr, LINES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Softmax of LINES (token, head) pairs over their pages' scores, the window and a zero."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    k = tl.arange(0, K)
    alive = line < lines
    inside = alive[:, None] & (k < topk)[None, :]
    at = line[:, None] * topk + k[None, :]
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    window = tl.load(lse + line, mask=alive, other=float("-inf"))
    best = tl.maximum(tl.max(score, 1), window)
    if SOFTMAX1:
        best = tl.maximum(best, 0.0)
    best = tl.where(best == float("-inf"), 0.0, best)
    e = tl.exp(score - best[:, None])
    e_window = tl.exp(window - best)
    total = tl.sum(e, 1) + e_window
    if SOFTMAX1:
        total += tl.exp(-best)
    total = tl.where(total > 0, total, 1.0)
    tl.store(weights + at, e / total[:, None], mask=inside)
    tl.store(window_weight + line, e_window / total, mask=alive)


@triton.jit(do_not_specialize=["lines"])
def blend_window_kernel(
    o_pages, o_window, window_weight, out, lines,
    DIM: tl.constexpr, DP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """out = o_pages + window_weight * o_window of LINES (token, head) pairs, rounded once."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    alive = line < lines
    d = tl.arange(0, DP)[None, :]
    at = line[:, None] * DIM + d
    inside = alive[:, None]
    if DIM < DP:
        inside = inside & (d < DIM)
    weight = tl.load(window_weight + line, mask=alive, other=0.0)[:, None]
    value = tl.load(o_window + at, mask=inside, other=0.0) * weight
    value += tl.load(o_pages + at, mask=inside, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
