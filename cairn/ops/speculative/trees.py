"""Trees of drafted tokens: n nodes a request, node 0 the last verified token.

A tree is held by three int64 tensors [B, n]: `retrive_index` (number of a node among all nodes of
the batch), `retrive_next_token` (its first child) and `retrive_next_sibling` (the next child of the
same parent); -1 stands for none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.ops.checks import INDICES, expect, expect_within, refuse
from cairn.ops.testing import Make

ALIASES = {f"retrieve_{end}": f"retrive_{end}" for end in ("index", "next_token", "next_sibling")}
"""Other libraries use both names."""
FLAGS = (torch.bool, torch.uint8)
"""Dtypes of masks; a byte other than 0 is true."""
WIDEST = 128
"""Most nodes of a tree that the kernels support: they hold a square matrix of them."""


def links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First children and next siblings, in ascending order.

    Args:
        parent: [B, n] int64; -1: none.
    Returns:
        (next_token, next_sibling) [B, n] int64, -1 for none.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    child = parent.unsqueeze(1) == nodes.unsqueeze(1)
    later = nodes > nodes.unsqueeze(1)
    sibling = later & (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent >= 0).unsqueeze(2)
    return first(child), first(sibling)


def first(hits: Tensor) -> Tensor:
    """Lowest index along the last dim where hits is True; -1 where it never is."""
    return torch.where(hits.any(-1), hits.int().argmax(-1), -1)


def expect_tree(
    op: str, index: Tensor, next_token: Tensor, next_sibling: Tensor, size: Sequence[int]
) -> None:
    """Raise BadArgument unless the three tensors of a tree are contiguous int64 [B, n]."""
    named = (
        ("retrive_index", index),
        ("retrive_next_token", next_token),
        ("retrive_next_sibling", next_sibling),
    )
    for name, tensor in named:
        expect(op, name, tensor, size, (torch.int64,), index, dense=-1)


def expect_links(op: str, index: Tensor, next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Raise BadArgument, on the CPU, for links out of range in the tensors of `expect_tree`, and
    for linked nodes whose index is out of range.

    Returns:
        [B, n] bool: the nodes that links lead to. Values at other nodes are not read.
    """
    batch, nodes = index.shape
    # Links that end a walk point to an extra column before the first node.
    led = torch.zeros(batch, nodes + 1, dtype=torch.bool, device=index.device)
    for name, tensor in (
        ("retrive_next_token", next_token),
        ("retrive_next_sibling", next_sibling),
    ):
        expect_within(op, name, tensor, nodes, None)
        led.scatter_(1, tensor.clamp(min=-1) + 1, True)
    led[:, 1:2] = True
    expect_within(op, "retrive_index", index[led[:, 1:]], index.numel())
    return led[:, 1:]


def expect_positions(op: str, positions: Tensor, batch: int, nodes: int, like: Tensor) -> None:
    """Raise BadArgument unless positions are contiguous int64 [B * n] or [B, n]."""
    shape = (batch * nodes,) if positions.dim() == 1 else (batch, nodes)
    expect(op, "positions", positions, shape, (torch.int64,), like, dense=-1)


def expect_room(op: str, name: str, elements: int, needed: int) -> None:
    """Raise BadArgument unless a flat argument has enough elements; buffers of CUDA graphs may have
    more."""
    if elements < needed:
        refuse(op, name, f"has {elements} elements, not at least {needed}")


def expect_outcome(
    op: str, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor
) -> None:
    """Raise BadArgument unless the outputs of a verification are contiguous int32 of the documented
    shapes."""
    size = candidates.shape
    expect(op, "candidates", candidates, (None, None), INDICES, dense=-1)
    for name, tensor, shape in (
        ("predicts", predicts, (None,)),
        ("accept_index", accept_index, (size[0], None)),
        ("accept_token_num", accept_token_num, (size[0],)),
    ):
        expect(op, name, tensor, shape, (torch.int32,), candidates, dense=-1)
    for name, tensor in (("candidates", candidates), ("accept_index", accept_index)):
        if tensor.shape[1] == 0:
            refuse(op, name, f"has shape {list(tensor.shape)}: node 0 needs a place")
    expect_room(op, "predicts", predicts.numel(), size.numel())


def random_tree(make: Make, batch: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """retrive_index, retrive_next_token, retrive_next_sibling of random trees, for cases."""
    parent = [[-1] + [int(make.randint(0, i, 1)) for i in range(1, nodes)] for _ in range(batch)]
    grown = torch.tensor(parent, dtype=torch.int64).view(batch, nodes)
    index = torch.arange(batch * nodes).view(batch, nodes)
    tree = (index, *links(grown))
    return tree[0].to(make.device), tree[1].to(make.device), tree[2].to(make.device)
