"""Attention inside the selected pages, with a softmax per page."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, paging, tiles
from cairn.ops.cache import quantized
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INT32, check_caches, check_queries, check_rows, expect
from cairn.ops.cpu import amx
from cairn.ops.landmark import page_cpu, page_launch, tile_loops
from cairn.ops.landmark.checks import check_keys
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.registry import op

_BLOCK_NUMBERS = 256 * 64
"""Largest tokens * d of a block: with eight heads, 512 KiB of accumulators."""


@op
def page_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    """o = sum over selected pages j of w_j A_j, A_j the softmax attention inside page j.

    The last slot of a page is no key.

    Args:
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized; query head h reads KV head
            h // (h_q // h_kv).
        row: [T] int64.
        page_table: [rows, max_pages] int32, logical to physical page.
        indices: [T, h_kv, K] int32, logical pages; a negative one is no page.
        weights: [T, h_q, K] float32, in the order of `indices`.
        scale: softmax scale; None: d ** -0.5.
    Returns:
        [T, h_q, d] float32.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    (heads, size), dim = k_cache.shape[1:3], q.shape[2]
    topk = indices.shape[-1]
    factor = dim**-0.5 if scale is None else scale
    head = torch.arange(heads, device=q.device).unsqueeze(1)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    block = paging.tokens_per_block(16 * heads * topk * size * dim, q.shape[0])
    for begin in range(0, q.shape[0], block):
        at = slice(begin, begin + block)
        logical = indices[at]
        none = logical < 0
        pages = page_table[row[at, None, None], logical.clamp(min=0).long()].long()
        k = _gather(k_cache, pages, head).view(-1, topk * size, dim)
        v = _gather(v_cache, pages, head)
        query = (q[at].float() * factor).view(k.shape[0], -1, dim)
        scores = torch.bmm(query, k.float().transpose(1, 2)).unflatten(-1, (topk, size))
        scores[..., -1] = -torch.inf
        v[:, :, -1] = 0
        p = torch.softmax(scores, dim=-1)
        p *= weights[at].view(*p.shape[:3], 1)
        if bool(none.any()):
            none = none.view(-1, 1, topk, 1)
            p.masked_fill_(none, 0)
            v.masked_fill_(none.view(-1, topk, 1, 1), 0)
        out[at] = torch.bmm(p.flatten(2), v.view_as(k).float()).view(-1, *q.shape[1:])
    return out


@page_attention.check
def _(call: Call) -> None:
    name = "page_attention"
    _, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    check_keys(name, call.k_cache)
    tokens, heads = check_queries(name, "q", call.q, kv_heads, dim)
    check_rows(name, tokens, call.row, call.page_table, call.q)
    expect(name, "indices", call.indices, (tokens, kv_heads, None), INT32, call.q)
    expect(name, "weights", call.weights, (tokens, heads, call.indices.shape[2]), FLOAT32, call.q)


@page_attention.fake
def _(call: Call) -> Tensor:
    return call.q.new_empty(call.q.shape, dtype=torch.float32)


def _gather(cache: Tensor, pages: Tensor, head: Tensor) -> Tensor:
    """Gather the selected pages of each KV head: pages [T, h_kv, K] -> [T * h_kv, K, S, d]."""
    _, heads, size, dim = cache.shape
    if quantized.is_quantized(cache):
        return quantized.take(cache, pages, head).flatten(0, 1)
    if not cache.is_contiguous():
        return cache[pages, head].contiguous().flatten(0, 1)
    lines = cache.view(-1, size * dim).index_select(0, (pages * heads + head).view(-1))
    return lines.view(-1, pages.shape[-1], size, dim)


def _shared(call: Call) -> bool:
    """Whether pages are likely to be selected by several tokens."""
    return (
        call.q.shape[0] > 32
        and call.k_cache.shape[2] > 1
        and call.k_cache.is_contiguous()
        and call.v_cache.is_contiguous()
        and call.q.dtype == call.k_cache.dtype
    )


def _by_amx(call: Call) -> bool:
    given = (call.row, call.page_table, call.indices, call.weights)
    return call.q.shape[0] > 32 and tiles.amx_takes(
        call.q, call.k_cache, call.v_cache, call.scale, *given
    )


@page_attention.implementation(
    "amx", devices=("cpu",), dtypes=(torch.bfloat16,), missing=amx.MISSING, when=_by_amx
)
def _(call: Call) -> Tensor:
    """Page by page, with the tokens of a block that select it."""
    out = call.q.new_empty(call.q.shape, dtype=torch.float32)
    tile_loops.attend_pages(
        cpu.as_array(call.q.contiguous().view(torch.float32)),
        *map(
            cpu.as_array,
            (call.k_cache, call.v_cache, call.row, call.page_table, call.indices, call.weights),
        ),
        np.float32(call.q.shape[2] ** -0.5 if call.scale is None else call.scale),
        _block(call.q, call.k_cache.shape[1]),
        amx.shapes(),
        cpu.as_array(out),
    )
    return out


def _block(q: Tensor, kv_heads: int) -> int:
    """Tokens per block, such that every thread has a block and the accumulators stay in a core's
    cache."""
    tokens, _, dim = q.shape
    share = -(-tokens * kv_heads // torch.get_num_threads())
    return max(32, min(share, _BLOCK_NUMBERS // dim))


@page_attention.implementation("page_major", devices=cpu.DEVICES, when=_shared)
def _(call: Call) -> Tensor:
    """Spans of tokens that select nearly the same pages together, all other tokens page by page."""
    return page_cpu.attend(*call.astuple())


page_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 1e-2)},
    "amx and page_major round probabilities, page_major A_j too, to bfloat16; the definition stays "
    "in float32",
)


def _on_gpu(call: Call) -> bool:
    return (
        launch.accepts(call.q, call.k_cache, call.v_cache)
        and call.indices.is_contiguous()
        and call.weights.is_contiguous()
        and call.k_cache.shape[2] > 1
    )


def _sorted_on_gpu(call: Call) -> bool:
    return call.q.shape[0] >= TUNING.page_sharing_tokens and _on_gpu(call)


def _pages(call: Call) -> page_launch.Pages:
    factor = call.q.shape[2] ** -0.5 if call.scale is None else call.scale
    where = (call.row, call.page_table, call.indices, call.weights, factor)
    return page_launch.Pages(call.q, call.k_cache, call.v_cache, *where)


@page_attention.implementation(
    "triton_sorted", devices=gpu.DEVICES, when=_sorted_on_gpu, replayed=True
)
def _(call: Call) -> Tensor:
    """Page by page, with the tokens that selected it."""
    job = _pages(call)
    return page_launch.attend_sorted(job)


@page_attention.implementation("triton_few", devices=gpu.DEVICES, when=_on_gpu, replayed=True)
def _(call: Call) -> Tensor:
    """Every token reads its own pages; with few tokens, several programs share a token's pages."""
    job = _pages(call)
    return page_launch.attend_few(job)
