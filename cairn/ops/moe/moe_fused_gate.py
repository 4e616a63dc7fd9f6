"""Routers that first choose groups of experts, with scores in the dtype of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import refuse
from cairn.ops.moe import routing, routing_launch
from cairn.ops.registry import op

NAME = "moe_fused_gate"
BEST = 2
"""A group is ranked by the sum of this many of its best experts."""


@op
def moe_fused_gate(
    input_tensor: Tensor,
    bias: Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 0,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    scoring_func: str = "sigmoid",
    renormalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """The best experts of the best groups by s + bias, lower index first among equals.

    s is the score in float32, rounded to the input's dtype, in which the bias is added. A group is
    ranked by the sum of its two best. Weights are the chosen experts' s divided by their sum, in
    float32.

    Args:
        input_tensor: [T, E] float32, bfloat16 or float16.
        bias: [E] of its dtype.
        num_expert_group: number of groups of consecutive experts, all of one size.
        topk_group: number of groups to choose from.
        topk: experts per token, the shared ones included.
        num_fused_shared_experts: number of shared experts, appended with ids E, E + 1, ...; their
            weight, before normalisation, is the sum of the others divided by routed_scaling_factor.
        routed_scaling_factor: see the arguments before and after; not 0 where it is used.
        apply_routed_scaling_factor_on_output: all weights are multiplied by it.
        scoring_func: "sigmoid", or "sqrtsoftplus": sqrt(log(1 + e^x)).
        renormalize: False: weights are not divided by their sum.
    Returns:
        Weights [T, topk] float32, and ids [T, topk] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or inconsistent sizes.
    """
    scores = scored(input_tensor, scoring_func).to(input_tensor.dtype)
    ranks = routing.in_best_groups((scores + bias).float(), num_expert_group, topk_group, BEST)
    ids = routing.largest(ranks, topk - num_fused_shared_experts)
    weights = scores.float().gather(1, ids)
    total = weights.sum(dim=-1, keepdim=True)
    if num_fused_shared_experts:
        shape = (ids.shape[0], num_fused_shared_experts)
        experts = torch.arange(num_fused_shared_experts, device=ids.device) + scores.shape[1]
        ids = torch.cat((ids, experts.expand(shape)), dim=1)
        weights = torch.cat((weights, (total / routed_scaling_factor).expand(shape)), dim=1)
    if renormalize:
        weights = weights / total
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights, ids.to(torch.int32)


def scored(x: Tensor, scoring_func: str) -> Tensor:
    """Scores of experts, float32, from a router's output."""
    x = x.float()
    return x.sigmoid() if scoring_func == "sigmoid" else torch.nn.functional.softplus(x).sqrt()


def expect_scoring(op: str, scoring_func: str) -> None:
    """Raise BadArgument for an unknown scoring_func."""
    if scoring_func not in ("sigmoid", "sqrtsoftplus"):
        refuse(op, "scoring_func", f"is {scoring_func!r}, not 'sigmoid' or 'sqrtsoftplus'")


@moe_fused_gate.check
def _(call: Call) -> None:
    shared = call.num_fused_shared_experts
    if not 0 <= shared <= call.topk:
        refuse(NAME, "num_fused_shared_experts", f"is {shared}, not a number from 0 to {call.topk}")
    given = ("input_tensor", call.input_tensor)
    routing.expect_choice(NAME, given, call.num_expert_group, call.topk_group, call.topk - shared)
    routing.expect_bias(NAME, "bias", call.bias, call.input_tensor, (call.input_tensor.dtype,))
    if (shared or call.apply_routed_scaling_factor_on_output) and not call.routed_scaling_factor:
        refuse(NAME, "routed_scaling_factor", f"is {call.routed_scaling_factor}, but it is used")
    expect_scoring(NAME, call.scoring_func)


@moe_fused_gate.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.accepts(call.input_tensor, call.bias, topk=call.topk),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    rule = routing_launch.Rule(
        call.scoring_func,
        rounded=True,
        groups=call.num_expert_group,
        kept=call.topk_group,
        best=BEST,
        shared=call.num_fused_shared_experts,
        share=call.routed_scaling_factor,
        renormalize=call.renormalize,
        factor=call.routed_scaling_factor if call.apply_routed_scaling_factor_on_output else 1.0,
    )
    return routing_launch.chosen(call.input_tensor, call.bias, call.topk, rule)
