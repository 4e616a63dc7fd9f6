"""The largest scores of a row, as slots of a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.registry import op
from cairn.ops.top_k import launch, selection
from cairn.ops.top_k.selection import NONE, Rows


@op
def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
    page_size: int = 1,
) -> Tensor:
    """`fast_topk_v2`, with each position replaced by its slot in the cache.

    Row r belongs to the request q with cu_seqlens_q[q] <= r < cu_seqlens_q[q + 1]; position p is in
    page page_table_size_1[q, p // P], so its slot is that page * P + p % P. Rows that belong to no
    request are filled with -1.

    Args:
        score, lengths, topk, row_starts: as in `fast_topk_v2`.
        page_table_size_1: [Bq, n] int32, rows of any stride.
        cu_seqlens_q: [Bq + 1] int32, ascending.
        page_size: P, positions per entry of the table.
    Returns:
        [B, topk] int32, in the order of the positions, padded with -1.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    place = selection.select(Rows(score, lengths, row_starts, topk)).long()
    row = torch.arange(score.shape[0], device=score.device, dtype=torch.int32)
    request = torch.searchsorted(cu_seqlens_q, row, right=True).long() - 1
    owned = (request >= 0) & (request < page_table_size_1.shape[0])
    taken = owned[:, None] & (place >= 0)
    page = page_table_size_1[
        torch.where(owned, request, 0)[:, None], torch.where(taken, place // page_size, 0)
    ]
    return torch.where(taken, page * page_size + place % page_size, NONE).to(torch.int32)


@fast_topk_transform_fused.fake
def _(call: Call) -> Tensor:
    return selection.blank(call.score, call.topk)


@fast_topk_transform_fused.check
def _(call: Call) -> None:
    name = "fast_topk_transform_fused"
    selection.check(name, Rows(call.score, call.lengths, call.row_starts, call.topk))
    word = (torch.int32,)
    expect(name, "page_table_size_1", call.page_table_size_1, (None, None), word, like=call.score)
    bounds = (call.page_table_size_1.shape[0] + 1,)
    expect(name, "cu_seqlens_q", call.cu_seqlens_q, bounds, word, like=call.score)
    if call.page_size < 1:
        refuse(name, "page_size", f"is {call.page_size}")
    if call.score.shape[0] and not call.page_table_size_1.numel():
        refuse(name, "page_table_size_1", "is empty")


def _lines(call: Call) -> bool:
    near = call.page_table_size_1.stride(1) == 1 and call.cu_seqlens_q.is_contiguous()
    return near and launch.accepts(Rows(call.score, call.lengths, call.row_starts, call.topk))


@fast_topk_transform_fused.implementation("triton", devices=gpu.DEVICES, when=_lines, replayed=True)
def _(call: Call) -> Tensor:
    pages = launch.Pages(call.page_table_size_1, call.cu_seqlens_q, call.page_size)
    return launch.select(Rows(call.score, call.lengths, call.row_starts, call.topk), pages=pages)
