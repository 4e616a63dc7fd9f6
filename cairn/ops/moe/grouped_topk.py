"""The experts of routers that choose groups of experts first, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.moe import routing, routing_launch
from cairn.ops.moe.moe_fused_gate import BEST, expect_scoring, scored
from cairn.ops.registry import op

FLOOR = 1e-20
"""Added to a sum that weights are divided by."""


@op
def grouped_topk(
    scores: Tensor,
    bias: Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    scaling_factor: float,
    *,
    scoring_func: str = "sigmoid",
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best experts of the best groups by sigmoid(scores) + bias, lower index first among
    equals; their weights are without the bias, times scaling_factor.

    A group is ranked by the sum of its two best.

    Args:
        scores: [T, E] float32, bfloat16 or float16, the router's output.
        bias: [E] of any of these.
        num_expert_group: number of groups of consecutive experts, all of one size.
        topk_group: number of groups to choose from.
        topk: experts per token.
        renormalize: weights are divided by their sum + 1e-20.
        scaling_factor: weights are multiplied by it.
        scoring_func: "sigmoid", or "sqrtsoftplus": sqrt(log(1 + e^x)) instead of the sigmoid.
        shared: number of shared experts, appended with ids E, E + 1, ...
        shared_gate: [T, 1] of scores' dtype; its sigmoid is the weight of shared experts. None:
            their weight is 1.
    Returns:
        Weights [T, topk + shared] float32, and ids [T, topk + shared] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or inconsistent sizes.
    """
    s, groups = scored(scores, scoring_func), (num_expert_group, topk_group)
    weights, ids = _biased(s, bias, *groups, topk, renormalize, scaling_factor, FLOOR)
    return routing.with_shared(weights, ids, scores.shape[1], shared, shared_gate)


@op
def biased_grouped_topk(
    gating: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    routed_scaling_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`grouped_topk` with the arguments of sgl-kernel's CPU back end.

    Args:
        gating: [T, E], `scores` of grouped_topk.
        correction_bias: [E], `bias` of grouped_topk.
        topk, renormalize, num_expert_group, topk_group: as in grouped_topk, but nothing is added to
            the sum.
        routed_scaling_factor: weights are multiplied by it; None: 1.
    Returns:
        Weights [T, topk] float32, and ids [T, topk] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or inconsistent sizes.
    """
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    scores, groups = scored(gating, "sigmoid"), (num_expert_group, topk_group)
    return _biased(scores, correction_bias, *groups, topk, renormalize, factor, 0.0)


@op
def grouped_topk_softmax(
    gating: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """The best experts of the best groups by softmax(gating) over all experts, lower index first
    among equals, in float32. A group is ranked by its best expert.

    Args:
        gating: [T, E] float32, bfloat16 or float16.
        topk, renormalize, num_expert_group, topk_group: as in `biased_grouped_topk`.
    Returns:
        Weights [T, topk] float32, and ids [T, topk] int32.
    Raises:
        BadArgument: for another shape or dtype, or inconsistent sizes.
    """
    weights = torch.softmax(gating.float(), dim=-1)
    ids = routing.largest(routing.in_best_groups(weights, num_expert_group, topk_group, 1), topk)
    chosen = weights.gather(1, ids)
    return routing.divided(chosen) if renormalize else chosen, ids.to(torch.int32)


def _biased(
    scores: Tensor,
    bias: Tensor,
    groups: int,
    kept: int,
    topk: int,
    renormalize: bool,
    factor: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """The same of scores [T, E] float32."""
    ranks = routing.in_best_groups(scores + bias.float(), groups, kept, BEST)
    ids = routing.largest(ranks, topk)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = routing.divided(weights, floor)
    return weights * factor, ids.to(torch.int32)


@grouped_topk.check
def _(call: Call) -> None:
    name = "grouped_topk"
    routing.expect_choice(
        name, ("scores", call.scores), call.num_expert_group, call.topk_group, call.topk
    )
    routing.expect_bias(name, "bias", call.bias, call.scores)
    routing.expect_shared(name, call.shared, call.shared_gate, call.scores)
    expect_scoring(name, call.scoring_func)


@biased_grouped_topk.check
def _(call: Call) -> None:
    name = "biased_grouped_topk"
    routing.expect_choice(
        name, ("gating", call.gating), call.num_expert_group, call.topk_group, call.topk
    )
    routing.expect_bias(name, "correction_bias", call.correction_bias, call.gating)


@grouped_topk_softmax.check
def _(call: Call) -> None:
    name = "grouped_topk_softmax"
    routing.expect_choice(
        name, ("gating", call.gating), call.num_expert_group, call.topk_group, call.topk
    )


@grouped_topk.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.accepts(call.scores, call.bias, topk=call.topk + call.shared),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    rule = routing_launch.Rule(
        call.scoring_func,
        groups=call.num_expert_group,
        kept=call.topk_group,
        best=BEST,
        shared=call.shared,
        renormalize=call.renormalize,
        floor=FLOOR,
        factor=call.scaling_factor,
    )
    slots = call.topk + call.shared
    return routing_launch.chosen(call.scores, call.bias, slots, rule, call.shared_gate)


@biased_grouped_topk.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.accepts(call.gating, call.correction_bias, topk=call.topk),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    factor = call.routed_scaling_factor
    rule = routing_launch.Rule(
        "sigmoid",
        groups=call.num_expert_group,
        kept=call.topk_group,
        best=BEST,
        renormalize=call.renormalize,
        factor=1.0 if factor is None else factor,
    )
    return routing_launch.chosen(call.gating, call.correction_bias, call.topk, rule)


@grouped_topk_softmax.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.accepts(call.gating, topk=call.topk),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    rule = routing_launch.Rule(
        "softmax",
        groups=call.num_expert_group,
        kept=call.topk_group,
        best=1,
        renormalize=call.renormalize,
    )
    return routing_launch.chosen(call.gating, None, call.topk, rule)
