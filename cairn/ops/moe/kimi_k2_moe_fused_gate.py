"""Kimi K2's router: one group of experts, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.moe import routing, routing_launch
from cairn.ops.registry import op

NAME = "kimi_k2_moe_fused_gate"


@op
def kimi_k2_moe_fused_gate(
    input_tensor: Tensor,
    bias: Tensor,
    topk: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """The topk experts with the largest sigmoid(input_tensor) + bias, lower index first among
    equals; their weights are without the bias. In float32.

    Args:
        input_tensor: [T, E] float32, bfloat16 or float16.
        bias: [E] of any of these dtypes.
        topk: experts per token.
        renormalize: weights are divided by their sum.
        routed_scaling_factor: weights are multiplied by it if `renormalize` and the next argument
            are set.
        apply_routed_scaling_factor_on_output: see `routed_scaling_factor`.
    Returns:
        Weights [T, topk] float32, and ids [T, topk] int32.
    Raises:
        BadArgument: for another shape, dtype or device, or a topk out of range.
    """
    scores = input_tensor.float().sigmoid()
    ids = routing.largest(scores + bias.float(), topk)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = routing.divided(weights)
        if apply_routed_scaling_factor_on_output:
            weights = weights * routed_scaling_factor
    return weights, ids.to(torch.int32)


@kimi_k2_moe_fused_gate.check
def _(call: Call) -> None:
    routing.expect_choice(NAME, ("input_tensor", call.input_tensor), 1, 1, call.topk)
    routing.expect_bias(NAME, "bias", call.bias, call.input_tensor)


@kimi_k2_moe_fused_gate.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.accepts(call.input_tensor, call.bias, topk=call.topk),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    scaled = call.renormalize and call.apply_routed_scaling_factor_on_output
    rule = routing_launch.Rule(
        "sigmoid",
        renormalize=call.renormalize,
        factor=call.routed_scaling_factor if scaled else 1.0,
    )
    return routing_launch.chosen(call.input_tensor, call.bias, call.topk, rule)
