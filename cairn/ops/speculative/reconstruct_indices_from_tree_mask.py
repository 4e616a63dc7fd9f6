"""Links and positions of trees, computed from their attention masks."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import reconstruct_kernel
from cairn.ops.speculative.trees import (
    ALIASES,
    FLAGS,
    WIDEST,
    expect_positions,
    expect_tree,
    first,
    links,
)

_CHANGED = ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")


@op(mutates=_CHANGED, aliases=ALIASES)
def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Node j < i is an ancestor of node i where tree_mask[b, i, j]; the nearest is its parent.

    As keywords, names that begin with retrive_ may also begin with retrieve_.

    Args:
        tree_mask: [B * n * n] bool, or uint8, of which any but 0 is true; B = batch_size,
            n = draft_token_num.
        verified_seq_len: [B] int64 or int32, tokens before node 0.
        positions: [B * n] or [B, n] int64, written: verified_seq_len + number of ancestors.
        retrive_index: [B, n] int64, written: b * n + i.
        retrive_next_token: [B, n] int64, written: the lowest j > i of which i is an ancestor.
        retrive_next_sibling: [B, n] int64, written: the next j > i with the same parent.
        batch_size, draft_token_num: B and n.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    nodes = draft_token_num
    above = tree_mask.bool().view(batch_size, nodes, nodes).tril(-1)
    index = torch.arange(nodes, device=above.device)
    positions.view(-1).copy_((verified_seq_len.long().unsqueeze(1) + above.sum(-1)).flatten())
    retrive_index.copy_(torch.arange(retrive_index.numel(), device=above.device).view(-1, nodes))
    retrive_next_token.copy_(first(above.transpose(1, 2)))
    retrive_next_sibling.copy_(links(torch.where(above, index, -1).amax(-1))[1])


@reconstruct_indices_from_tree_mask.check
def _(call: Call) -> None:
    name = "reconstruct_indices_from_tree_mask"
    if call.batch_size < 0:
        refuse(name, "batch_size", f"is {call.batch_size}, not at least 0")
    if call.draft_token_num < 1:
        refuse(name, "draft_token_num", f"is {call.draft_token_num}, not at least 1")
    size = (call.batch_size, call.draft_token_num)
    cells, lengths = call.batch_size * call.draft_token_num**2, (torch.int64, torch.int32)
    if call.tree_mask.numel() != cells:
        refuse(name, "tree_mask", f"has {call.tree_mask.numel()} elements, not {cells}")
    expect(name, "tree_mask", call.tree_mask, dtypes=FLAGS, dense=-1)
    expect(
        name,
        "verified_seq_len",
        call.verified_seq_len,
        (call.batch_size,),
        lengths,
        call.tree_mask,
        dense=-1,
    )
    expect_positions(name, call.positions, *size, call.tree_mask)
    expect_tree(name, call.retrive_index, call.retrive_next_token, call.retrive_next_sibling, size)
    expect(name, "retrive_index", call.retrive_index, like=call.tree_mask)


@reconstruct_indices_from_tree_mask.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    nodes = call.draft_token_num
    if nodes > WIDEST:
        reconstruct_indices_from_tree_mask.using("reference")(**call.asdict())
    elif call.batch_size:
        reconstruct_kernel[(call.batch_size,)](
            tree_mask=call.tree_mask.view(torch.uint8),
            verified_seq_len=call.verified_seq_len,
            positions=call.positions,
            retrive_index=call.retrive_index,
            retrive_next_token=call.retrive_next_token,
            retrive_next_sibling=call.retrive_next_sibling,
            nodes=nodes,
            NP=max(16, gpu.next_power_of_2(nodes)),
            num_warps=1 if nodes <= 16 else 4,
        )
