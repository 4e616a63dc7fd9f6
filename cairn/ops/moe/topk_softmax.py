"""Router with softmax scores."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32
from cairn.ops.moe import routing, routing_launch
from cairn.ops.registry import op

NAME = "topk_softmax"


@op(mutates=("topk_weights", "topk_ids"))
def topk_softmax(
    topk_weights: Tensor,
    topk_ids: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: Tensor | None = None,
    *,
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> None:
    """The k largest of softmax(x) over all experts, descending, lower index first among equals.

    In float32; x is gating_output, capped to c * tanh(x / c) where c = moe_softcapping is not 0,
    plus the bias.

    Args:
        topk_weights: [T, k + shared] float32, written.
        topk_ids: [T, k + shared] int32, written.
        gating_output: [T, E] float32, bfloat16 or float16.
        renormalize: weights are divided by their sum.
        moe_softcapping: c.
        correction_bias: [E] float32, or None.
        shared: number of shared experts, appended with ids E, E + 1, ...
        shared_gate: [T, 1] of gating_output's dtype; its sigmoid is the weight of shared experts.
            None: their weight is 1.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = gating_output.float()
    if moe_softcapping:
        x = moe_softcapping * torch.tanh(x / moe_softcapping)
    if correction_bias is not None:
        x = x + correction_bias
    weights = torch.softmax(x, dim=-1)
    ids = routing.largest(weights, topk_ids.shape[1] - shared)
    chosen = weights.gather(1, ids)
    if renormalize:
        chosen = routing.divided(chosen)
    chosen, ids = routing.with_shared(chosen, ids, x.shape[1], shared, shared_gate)
    topk_weights.copy_(chosen)
    topk_ids.copy_(ids)


@topk_softmax.check
def _(call: Call) -> None:
    gating = call.gating_output
    routing.expect_outputs(NAME, call.topk_weights, call.topk_ids, gating, call.shared)
    routing.expect_shared(NAME, call.shared, call.shared_gate, gating)
    if call.correction_bias is not None:
        routing.expect_bias(NAME, "correction_bias", call.correction_bias, gating, FLOAT32)


@topk_softmax.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.takes_outputs(
        call.gating_output, call.correction_bias, call.topk_weights, call.topk_ids
    ),
    replayed=True,
)
def _(call: Call) -> None:
    rule = routing_launch.Rule(
        "softmax", call.moe_softcapping, shared=call.shared, renormalize=call.renormalize
    )
    routing_launch.route(
        call.gating_output,
        call.correction_bias,
        call.topk_weights,
        call.topk_ids,
        rule,
        call.shared_gate,
    )
