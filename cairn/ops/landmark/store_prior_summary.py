"""Store of the summaries of pages that a step completes."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache import quantized
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, expect
from cairn.ops.landmark.checks import check_pooling
from cairn.ops.landmark.prior_summary import launch, prior_summary
from cairn.ops.registry import op


def completed_pages(row: Tensor, slot: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """[T] int64, the physical page whose last slot a token is in, -1 for the others."""
    last = (slot >= 0) & (slot % page_size == page_size - 1)
    logical = slot.clamp(min=0) // page_size
    return torch.where(last, page_table[row, logical].long(), -1)


@op(mutates=("key_pool", "bias_pool"))
def store_prior_summary(
    query: Tensor,
    k_cache: Tensor,
    pages: Tensor,
    key_pool: Tensor | None,
    bias_pool: Tensor | None,
    scale: float | None = None,
) -> None:
    """prior_summary of every page, stored by page id.

    Args:
        query: [N, h_q, d], one query per page and head.
        k_cache: [pages, h_kv, S, d], or quantized.
        pages: [N] int64, physical ids, all different; negative ids are skipped.
        key_pool: [pages, h_q, d] of the query's dtype, changed; None: keys are not stored.
        bias_pool: [pages, h_q] float32, changed; None: biases are not stored.
        scale: None: d ** -0.5.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    real = pages >= 0
    key, bias = prior_summary.reference(query[real], k_cache, pages[real], scale)
    if key_pool is not None:
        key_pool[pages[real]] = key
    if bias_pool is not None:
        bias_pool[pages[real]] = bias


@store_prior_summary.check
def _(call: Call) -> None:
    name = "store_prior_summary"
    check_pooling(name, call.query, call.k_cache, call.pages)
    total, (_, heads, dim) = call.k_cache.shape[0], call.query.shape
    if call.key_pool is not None:
        expect(
            name, "key_pool", call.key_pool, (total, heads, dim), (call.query.dtype,), call.query
        )
    if call.bias_pool is not None:
        expect(name, "bias_pool", call.bias_pool, (total, heads), FLOAT32, call.query)


@store_prior_summary.implementation(
    "composed",
    devices=("cpu",),
    when=lambda call: bool((call.pages >= 0).all()),
)
def _(call: Call) -> None:
    key, bias = prior_summary(call.query, call.k_cache, call.pages, call.scale)
    if call.key_pool is not None:
        call.key_pool[call.pages] = key
    if call.bias_pool is not None:
        call.bias_pool[call.pages] = bias


def _accepts(call: Call) -> bool:
    pools = [pool for pool in (call.key_pool, call.bias_pool) if pool is not None]
    return (
        call.query.is_contiguous()
        and quantized.fits(call.query, call.k_cache)
        and all(pool.is_contiguous() for pool in pools)
    )


@store_prior_summary.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> None:
    launch(call, call.key_pool, call.bias_pool, by_page=True)


def store_completed(
    query: Tensor,
    k_cache: Tensor,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    key_pool: Tensor,
    bias_pool: Tensor | None,
    scale: float | None,
) -> None:
    """store_prior_summary for every token in the last slot of a page, with its own query."""
    pages = completed_pages(row, slot, page_table, k_cache.shape[2])
    store_prior_summary(query, k_cache, pages, key_pool, bias_pool, scale)
