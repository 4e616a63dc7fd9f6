"""Tokens in the order of their experts, in whole blocks of a grouped product."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import INDICES, INT32, check_least, expect, expect_within, refuse
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Arguments, Cases, Make

NAME = "moe_align_block_size"


@op(mutates=("sorted_token_ids", "experts_ids", "num_tokens_post_pad", "cumsum_buffer"))
def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    cumsum_buffer: Tensor,
    pad_sorted_token_ids: bool = False,
) -> None:
    """Sort the flat places t * k + j of topk_ids by expert, in their order within an expert, and
    begin every expert at a multiple of block_size.

    Bucket 0 is of those with id -1, which another device has, bucket e + 1 of expert e.

    Args:
        topk_ids: [T, k] int32 or int64, -1 .. num_experts - 2.
        num_experts: buckets: experts and one.
        block_size: rows of a block.
        sorted_token_ids: [S] int32, written: places, bucket after bucket; S is at least T * k +
            num_experts * (block_size - 1), or block_size times T * k if that is less.
        experts_ids: [blocks] int32, written: the expert of each block, -1 for bucket 0. Those
            behind the last block are left as they are.
        num_tokens_post_pad: [1] int32, written: places with padding.
        cumsum_buffer: [num_experts + 1] int32, written: where each bucket begins, and the end.
        pad_sorted_token_ids: what is no place is T * k; False: it is left as it is.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for ids that there are not.
    """
    bucket = topk_ids.flatten().long() + 1
    order = bucket.argsort(stable=True)
    ordered = bucket[order]
    count = torch.zeros(num_experts, dtype=torch.int64, device=bucket.device)
    count.scatter_add_(0, bucket, torch.ones_like(bucket))
    padded = (count + block_size - 1).div(block_size, rounding_mode="floor") * block_size
    ends = padded.cumsum(0)
    begin = ends - padded
    within = torch.arange(bucket.numel(), device=bucket.device) - (count.cumsum(0) - count)[ordered]
    if pad_sorted_token_ids:
        sorted_token_ids.fill_(bucket.numel())
    sorted_token_ids[begin[ordered] + within] = order.to(torch.int32)
    blocks = torch.arange(experts_ids.shape[0], device=bucket.device) * block_size
    owner = torch.searchsorted(ends, blocks, right=True) - 1
    experts_ids.copy_(torch.where(blocks < ends[-1], owner, experts_ids))
    num_tokens_post_pad.copy_(ends[-1:])
    cumsum_buffer[0] = 0
    cumsum_buffer[1:] = ends


@moe_align_block_size.check
def _(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    cumsum_buffer: Tensor,
    pad_sorted_token_ids: bool = False,
) -> None:
    expect(NAME, "topk_ids", topk_ids, 2, INDICES)
    check_least(NAME, "num_experts", num_experts, 1)
    check_least(NAME, "block_size", block_size, 1)
    expect_within(NAME, "topk_ids", topk_ids, num_experts - 1, -1)
    expect(NAME, "sorted_token_ids", sorted_token_ids, 1, INT32, topk_ids)
    expect(NAME, "experts_ids", experts_ids, 1, INT32, topk_ids)
    expect(NAME, "num_tokens_post_pad", num_tokens_post_pad, (1,), INT32, topk_ids)
    expect(NAME, "cumsum_buffer", cumsum_buffer, (num_experts + 1,), INT32, topk_ids)
    places = topk_ids.numel()
    most = min(places + num_experts * (block_size - 1), places * block_size)
    if sorted_token_ids.shape[0] < most:
        refuse(NAME, "sorted_token_ids", f"has room for {sorted_token_ids.shape[0]}, not {most}")
    if experts_ids.shape[0] < most // block_size:
        refuse(NAME, "experts_ids", f"has {experts_ids.shape[0]} of {most // block_size} blocks")


def _given(make: Make, ids: Tensor, experts: int, block: int, pad: bool) -> Arguments:
    most = ids.numel() + (experts + 1) * (block - 1)
    return make.args(
        *(ids, experts + 1, block),
        make.empty(most, dtype=torch.int32),
        make.empty(-(-most // block), dtype=torch.int32),
        make.empty(1, dtype=torch.int32),
        make.empty(experts + 2, dtype=torch.int32),
        pad,
    )


@moe_align_block_size.cases
def _(make: Make) -> Cases:
    yield _given(make, make.randint(-1, 8, 13, 3, dtype=torch.int32), 8, 4, True)
    yield _given(make, make.randint(0, 5, 40, 2), 5, 16, False)
    yield _given(make, make.full((3, 2), -1, torch.int32), 4, 8, True)
    yield _given(make, make.randint(0, 64, 1, 8, dtype=torch.int32), 64, 1, False)
    yield _given(make, make.randint(0, 4, 0, 2), 4, 8, True)


@moe_align_block_size.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routing.routers_of(draw):
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        given = _given(draw, ids, experts, 16, True)
        yield Point(f"{tokens}: {topk} of {experts}", given, moved(ids, *given.args[3:6]))
