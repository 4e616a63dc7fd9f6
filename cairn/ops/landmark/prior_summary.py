"""The summary of a page, pooled by its landmark's query."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.cache import quantized
from cairn.ops.call import Call
from cairn.ops.landmark.checks import check_pooling
from cairn.ops.landmark.kernels.summary import prior_summary_kernel
from cairn.ops.registry import op

A_WARP = 4096
"""Elements of a page's keys per warp."""


@op
def prior_summary(
    query: Tensor, k_cache: Tensor, pages: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Pool the keys of complete pages, except slot S - 1 (HiLS-Attention, the prior query).

    p = softmax over slots of scale * query . k;  key = sum p k;  bias = -sum p ln p.

    Args:
        query: [N, h_q, d], one query per page and head.
        k_cache: [pages, h_kv, S, d], or quantized.
        pages: [N] int64, physical ids.
        scale: None: d ** -0.5.
    Returns:
        (key [N, h_q, d] in the query's dtype, bias [N, h_q] float32, in [0, ln(S - 1)]).
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    (heads, size), dim = k_cache.shape[1:3], query.shape[2]
    key = torch.empty_like(query)
    bias = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    block = paging.tokens_per_block(4 * heads * size * dim, pages.numel())
    for begin in range(0, pages.numel(), block):
        at = slice(begin, begin + block)
        k = paging.gather_pages(k_cache, pages[at].unsqueeze(1))[:, :, :-1].float()
        k = k.reshape(-1, size - 1, dim)
        wanted = query[at].float() * (dim**-0.5 if scale is None else scale)
        scores = torch.bmm(wanted.reshape(k.shape[0], -1, dim), k.transpose(1, 2))
        logs = torch.log_softmax(scores, dim=-1)
        p = logs.exp()
        key[at] = torch.bmm(p, k).view_as(wanted)
        bias[at] = -p.mul_(logs).sum(dim=-1).view(wanted.shape[:2])
    return key, bias


@prior_summary.check
def _(call: Call) -> None:
    check_pooling("prior_summary", call.query, call.k_cache, call.pages)


def launch(call: Call, key: Tensor | None, bias: Tensor | None, by_page: bool) -> None:
    """Pool the call's pages for every head of its query, into key [n, h_q, d] and bias [n, h_q];
    by_page: entries are indexed by page id, and negative ids are skipped."""
    (count, heads, dim), (kv_heads, size) = call.query.shape, call.k_cache.shape[1:3]
    if count == 0 or (key is None and bias is None):
        return
    width, keys = gpu.next_power_of_2(dim), gpu.next_power_of_2(size)
    prior_summary_kernel[(count * heads,)](
        query=call.query,
        k_cache=call.k_cache,
        pages=call.pages,
        key=call.query if key is None else key,
        bias=call.query if bias is None else bias,
        scale=dim**-0.5 if call.scale is None else call.scale,
        page_stride=call.k_cache.stride(0),
        head_stride=call.k_cache.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        SIZE=size,
        DP=width,
        KEYS=keys,
        WITH_KEY=key is not None,
        WITH_BIAS=bias is not None,
        BY_PAGE=by_page,
        num_warps=min(8, max(1, width * keys // A_WARP)),
        **gpu.NO_FP_FUSION,
    )


@prior_summary.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.query.is_contiguous() and quantized.fits(call.query, call.k_cache),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    key = gpu.empty(call.query.shape, call.query.dtype, call.query.device)
    bias = gpu.empty(call.query.shape[:2], torch.float32, call.query.device)
    launch(call, key, bias, by_page=False)
    return key, bias
