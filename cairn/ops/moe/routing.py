"""Definitions and argument checks shared by the routers.

Ties go to the lower index; NaN ranks as -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOAT32, FLOATS, INT32, expect, refuse


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] int64 of the largest of scores [..., E], descending."""
    known = scores.masked_fill(scores.isnan(), -torch.inf)
    return known.argsort(dim=-1, descending=True, stable=True)[..., :count]


def in_best_groups(scores: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """scores [T, E] float32, set to -inf outside of the `kept` best of `groups` groups of
    consecutive experts; a group is ranked by the sum of its `best` largest scores."""
    grouped: Tensor = scores.unflatten(1, (groups, scores.shape[1] // groups))
    first = largest(grouped, min(best, grouped.shape[2]))
    rank = grouped.gather(2, first).sum(dim=-1)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(1, largest(rank, kept), True)
    return grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(1)


def divided(weights: Tensor, floor: float = 0.0) -> Tensor:
    """Weights [T, k] divided by their sum + floor."""
    return weights / (weights.sum(dim=-1, keepdim=True) + floor)


def with_shared(
    weights: Tensor, ids: Tensor, experts: int, shared: int, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights and int32 ids [T, k + shared]: the chosen experts followed by the shared experts,
    with ids from `experts` on and weight 1, or sigmoid(gate) of gate [T, 1]."""
    tokens, ids = len(ids), ids.to(torch.int32)
    if not shared:
        return weights, ids
    own = weights.new_ones(tokens, 1) if gate is None else gate.float().sigmoid()
    shared_ids = torch.arange(experts, experts + shared, dtype=torch.int32, device=ids.device)
    return (
        torch.cat((weights, own.expand(tokens, shared)), dim=1),
        torch.cat((ids, shared_ids.expand(tokens, shared)), dim=1),
    )


def expect_shared(op: str, shared: int, gate: Tensor | None, gating: Tensor) -> None:
    """Raise BadArgument unless `shared` and the shared gate are valid for gating [T, E]."""
    if shared < 0:
        refuse(op, "shared", f"is {shared}, not a number of experts")
    if gate is not None:
        expect(op, "shared_gate", gate, (len(gating), 1), (gating.dtype,), gating)


def expect_outputs(op: str, weights: Tensor, ids: Tensor, gating: Tensor, shared: int = 0) -> None:
    """Raise BadArgument unless weights [T, k] float32 and ids [T, k] int32 have the right shape for
    gating [T, E] and the shared experts, k <= E + shared."""
    expect(op, "gating_output", gating, 2, FLOATS)
    tokens, experts = gating.shape
    expect(op, "topk_weights", weights, (tokens, None), FLOAT32, gating)
    expect(op, "topk_ids", ids, weights.shape, INT32, gating)
    if not shared <= weights.shape[1] <= experts + shared:
        of = f"{experts} experts" + (f" and {shared} shared ones" if shared else "")
        refuse(op, "topk_weights", f"has shape {list(weights.shape)}: there are {of}")


def expect_bias(
    op: str, name: str, bias: Tensor, gating: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Raise BadArgument unless a bias is [E] for gating [T, E]."""
    expect(op, name, bias, gating.shape[1:], dtypes, gating)


def expect_choice(op: str, gating: tuple[str, Tensor], groups: int, kept: int, topk: int) -> None:
    """Raise BadArgument unless E divides into `groups` groups, and `kept` of them have at least
    `topk` experts."""
    name, x = gating
    expect(op, name, x, 2, FLOATS)
    experts = x.shape[1]
    if groups < 1 or experts % groups:
        refuse(op, "num_expert_group", f"is {groups}: {experts} experts do not fall into so many")
    if not 1 <= kept <= groups:
        refuse(op, "topk_group", f"is {kept}, not a number from 1 to {groups}")
    most = experts // groups * kept
    if not 0 <= topk <= most:
        refuse(op, "topk", f"is {topk}, not a number from 0 to {most}")
