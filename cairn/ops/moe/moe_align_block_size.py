"""Sort of (token, expert) pairs by expert, padded to whole blocks of a grouped product."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, INT32, check_min, expect, expect_within, refuse
from cairn.ops.moe import align_launch
from cairn.ops.registry import op

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
    """Sort the pairs t * k + j of topk_ids by expert (stable), and begin every expert at a multiple
    of block_size.

    Bucket 0 holds pairs with id -1 (experts of other devices), bucket e + 1 those of expert e.

    Args:
        topk_ids: [T, k] int32 or int64, -1 .. num_experts - 2.
        num_experts: number of buckets: number of experts + 1.
        block_size: rows per block.
        sorted_token_ids: [S] int32, written: pairs, bucket after bucket; S is at least T * k +
            num_experts * (block_size - 1), or block_size times T * k if that is less.
        experts_ids: [blocks] int32, written: the expert of each block, -1 for bucket 0. Entries
            after the last block are not changed.
        num_tokens_post_pad: [1] int32, written: number of rows including padding.
        cumsum_buffer: [num_experts + 1] int32, written: first row of each bucket, and the end.
        pad_sorted_token_ids: padding rows are set to T * k; False: they are not changed.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for ids out of range.
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
def _(call: Call) -> None:
    expect(NAME, "topk_ids", call.topk_ids, 2, INDICES)
    check_min(NAME, "num_experts", call.num_experts, 1)
    check_min(NAME, "block_size", call.block_size, 1)
    expect_within(NAME, "topk_ids", call.topk_ids, call.num_experts - 1, -1)
    expect(NAME, "sorted_token_ids", call.sorted_token_ids, 1, INT32, call.topk_ids)
    expect(NAME, "experts_ids", call.experts_ids, 1, INT32, call.topk_ids)
    expect(NAME, "num_tokens_post_pad", call.num_tokens_post_pad, (1,), INT32, call.topk_ids)
    expect(NAME, "cumsum_buffer", call.cumsum_buffer, (call.num_experts + 1,), INT32, call.topk_ids)
    pairs = call.topk_ids.numel()
    most = min(pairs + call.num_experts * (call.block_size - 1), pairs * call.block_size)
    if call.sorted_token_ids.shape[0] < most:
        refuse(
            NAME, "sorted_token_ids", f"has room for {call.sorted_token_ids.shape[0]}, not {most}"
        )
    if call.experts_ids.shape[0] < most // call.block_size:
        refuse(
            NAME,
            "experts_ids",
            f"has {call.experts_ids.shape[0]} of {most // call.block_size} blocks",
        )


@moe_align_block_size.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: align_launch.accepts(
        call.topk_ids,
        call.num_experts,
        call.sorted_token_ids,
        call.experts_ids,
        call.num_tokens_post_pad,
        call.cumsum_buffer,
    ),
    replayed=True,
)
def _(call: Call) -> None:
    into = align_launch.Sorted(
        call.sorted_token_ids, call.cumsum_buffer, call.num_tokens_post_pad, call.experts_ids
    )
    filled = call.pad_sorted_token_ids
    align_launch.sort(
        call.topk_ids, call.num_experts, into, first=1, block=call.block_size, filled=filled
    )
