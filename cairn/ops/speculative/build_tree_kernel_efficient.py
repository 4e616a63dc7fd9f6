"""A tree of drafted tokens, from the draft model's expansions and the tokens selected among
them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import build_kernel
from cairn.ops.speculative.trees import (
    ALIASES,
    FLAGS,
    WIDEST,
    expect_positions,
    expect_room,
    expect_tree,
    links,
)

FULL_MASK, DRAFT_MASK, PACKED_MASK = 0, 1, 2
_CHANGED = ("tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")


@op(mutates=_CHANGED, aliases=ALIASES)
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the nodes of every request's tree, and write their positions and attention mask.

    Node 0 is the last verified token; node i >= 1 is the drafted token selected_index[i - 1]. With
    t = selected_index[i - 1] // topk its parent is node 0 for t = 0, else the node whose drafted
    number is parent_list[t]; a node whose parent was not selected gets no links, and its chain of
    ancestors ends there.

    As keywords, names that begin with retrive_ may also begin with retrieve_.

    Args:
        parent_list: [B, topk * (depth - 1) + 1] int64, drafted number of every expansion; or
            [B, 0] of any dtype, for depth 1.
        selected_index: [B, n - 1] int64, numbers in the flat list of all drafted tokens.
        verified_seq_len: [B] int64 or int32, tokens before node 0.
        tree_mask: written. Mode 0: bool or uint8 (1 and 0), flat; n rows of verified_seq_len + n
            for each request, end to end; the first verified_seq_len of a row are not written. Mode
            1: bool or uint8 [B * n * n], the last n columns alone. Mode 2: those n bits, lowest
            first, in 1, 2 or 4 bytes (n <= 8, 16, 32). Row i has node i, its ancestors and node 0.
            Bytes after the last row are not written.
        positions: [B * n] or [B, n] int64, written: verified_seq_len + number of ancestors.
        retrive_index: [B, n] int64, written: b * n + i.
        retrive_next_token, retrive_next_sibling: [B, n] int64, written: the first child of a node,
            and the next child of its parent, in ascending order; -1: none.
        topk: tokens that each expansion drafts.
        depth: levels below node 0.
        draft_token_num: n.
        tree_mask_mode: 0, 1 or 2.
    Raises:
        BadArgument: for another shape, dtype or device, a mode that does not exist.
    """
    nodes = draft_token_num
    parent = _parents(parent_list, selected_index, topk)
    index = torch.arange(nodes, device=parent.device)
    reach = (parent.unsqueeze(2) == index) | (index == index.unsqueeze(1))
    reach[:, :, :1] = True
    for _ in range(math.ceil(math.log2(max(nodes, 2)))):
        reach = torch.bmm(reach.float(), reach.float()) > 0
    lengths = verified_seq_len.long()
    positions.view(-1).copy_((lengths.unsqueeze(1) + reach.sum(-1) - 1).flatten())
    retrive_index.copy_(torch.arange(retrive_index.numel(), device=parent.device).view(-1, nodes))
    next_token, next_sibling = links(parent)
    retrive_next_token.copy_(next_token)
    retrive_next_sibling.copy_(next_sibling)
    if tree_mask_mode == PACKED_MASK:
        byte, bit = index // 8, index % 8
        room = tree_mask.view(-1).view(torch.uint8)[: len(parent) * nodes * row_bytes(nodes)]
        packed = room.view(-1, nodes, row_bytes(nodes))
        packed.zero_().index_add_(2, byte, (reach * (1 << bit)).to(torch.uint8))
    elif tree_mask_mode == DRAFT_MASK:
        tree_mask.view(-1)[: reach.numel()] = reach.flatten().to(tree_mask.dtype)
    else:
        width = (lengths + nodes).view(-1, 1, 1)
        begin = (width * nodes).cumsum(0) - width * nodes
        columns = begin + index.view(-1, 1) * width + width - nodes + index
        tree_mask.view(-1)[columns.flatten()] = reach.flatten().to(tree_mask.dtype)


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """[B, n] int64: number of every node's parent, -1 for node 0 and for those without."""
    if parent_list.shape[1] == 0:
        parent_list = selected_index.new_zeros(parent_list.shape[0], 1)
    expansion = selected_index // topk
    known = (expansion >= 0) & (expansion < parent_list.shape[1])
    drafted = parent_list.gather(1, torch.where(known, expansion, 0))
    same = selected_index.unsqueeze(1) == drafted.unsqueeze(2)
    nodes = torch.arange(1, selected_index.shape[1] + 1, device=same.device)
    found = torch.where(same, nodes, nodes.numel() + 1).amin(-1) if nodes.numel() else expansion
    parent = torch.where(known & (found <= nodes.numel()), found, -1)
    return torch.nn.functional.pad(torch.where(expansion == 0, 0, parent), (1, 0), value=-1)


def row_bytes(nodes: int) -> int:
    """Bytes of a packed row of the mask."""
    return 1 if nodes <= 8 else 2 if nodes <= 16 else 4


@build_tree_kernel_efficient.check
def _(call: Call) -> None:
    name, n, long = "build_tree_kernel_efficient", call.draft_token_num, (torch.int64,)
    for what, number in (("topk", call.topk), ("depth", call.depth), ("draft_token_num", n)):
        if number < 1:
            refuse(name, what, f"is {number}, not at least 1")
    if call.tree_mask_mode not in (FULL_MASK, DRAFT_MASK, PACKED_MASK):
        refuse(name, "tree_mask_mode", f"is {call.tree_mask_mode}, not 0, 1 or 2")
    if call.tree_mask_mode == PACKED_MASK and n > 32:
        refuse(name, "draft_token_num", f"is {n}: a packed mask has at most 32 bits")
    expect(name, "selected_index", call.selected_index, (None, n - 1), long, dense=-1)
    batch = call.selected_index.shape[0]
    # SGLang makes the empty list with torch.empty, which is float32.
    empty = call.depth == 1 and call.parent_list.shape[1:] == (0,)
    width, dtypes = (0, None) if empty else (call.topk * (call.depth - 1) + 1, long)
    expect(
        name, "parent_list", call.parent_list, (batch, width), dtypes, call.selected_index, dense=-1
    )
    lengths = (torch.int64, torch.int32)
    expect(
        name,
        "verified_seq_len",
        call.verified_seq_len,
        (batch,),
        lengths,
        call.selected_index,
        dense=-1,
    )
    expect_positions(name, call.positions, batch, n, call.selected_index)
    expect_tree(
        name, call.retrive_index, call.retrive_next_token, call.retrive_next_sibling, (batch, n)
    )
    expect(name, "retrive_index", call.retrive_index, like=call.selected_index)
    expect(name, "tree_mask", call.tree_mask, like=call.selected_index, dense=-1)
    if call.tree_mask_mode == PACKED_MASK:
        expect_room(name, "tree_mask", call.tree_mask.nbytes, batch * n * row_bytes(n))
    else:
        # The length of a full mask depends on sequence lengths, which only the device knows.
        expect(name, "tree_mask", call.tree_mask, dtypes=FLAGS)
        expect_room(name, "tree_mask", call.tree_mask.numel(), batch * n * n)


@build_tree_kernel_efficient.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    nodes = call.draft_token_num
    if nodes > WIDEST:
        build_tree_kernel_efficient.using("reference")(**call.asdict())
    elif call.retrive_index.numel():
        padded = max(16, gpu.next_power_of_2(nodes))
        # The first expansion is that of node 0, with or without a list. An empty list is not read;
        # its placeholder has the dtype that the kernel is compiled for.
        width = call.parent_list.shape[1]
        build_kernel[(call.retrive_index.shape[0],)](
            parent_list=call.parent_list if width else call.selected_index,
            selected_index=call.selected_index,
            verified_seq_len=call.verified_seq_len,
            tree_mask=call.tree_mask.view(torch.uint8),
            positions=call.positions,
            retrive_index=call.retrive_index,
            retrive_next_token=call.retrive_next_token,
            retrive_next_sibling=call.retrive_next_sibling,
            topk=call.topk,
            width=max(1, width),
            nodes=nodes,
            MODE=call.tree_mask_mode,
            BYTES=row_bytes(nodes),
            NP=padded,
            ROUNDS=padded.bit_length() - 1,
            num_warps=max(1, min(8, padded * padded // 1024)),
        )
