"""Router with sigmoid scores."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32
from cairn.ops.moe import routing, routing_launch
from cairn.ops.registry import op

NAME = "topk_sigmoid"


@op(mutates=("topk_weights", "topk_ids"))
def topk_sigmoid(
    topk_weights: Tensor,
    topk_ids: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
) -> None:
    """The k experts with the largest sigmoid(gating_output) + bias, descending, lower index first
    among equals; their weights are without the bias. In float32.

    Args:
        topk_weights: [T, k] float32, written.
        topk_ids: [T, k] int32, written.
        gating_output: [T, E] float32, bfloat16 or float16.
        renormalize: weights are divided by their sum.
        correction_bias: [E] float32, or None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    scores = gating_output.float().sigmoid()
    ranks = scores if correction_bias is None else scores + correction_bias
    ids = routing.largest(ranks, topk_ids.shape[1])
    chosen = scores.gather(1, ids)
    topk_weights.copy_(routing.divided(chosen) if renormalize else chosen)
    topk_ids.copy_(ids)


@topk_sigmoid.check
def _(call: Call) -> None:
    routing.expect_outputs(NAME, call.topk_weights, call.topk_ids, call.gating_output)
    if call.correction_bias is not None:
        routing.expect_bias(
            NAME, "correction_bias", call.correction_bias, call.gating_output, FLOAT32
        )


@topk_sigmoid.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: routing_launch.takes_outputs(
        call.gating_output, call.correction_bias, call.topk_weights, call.topk_ids
    ),
    replayed=True,
)
def _(call: Call) -> None:
    rule = routing_launch.Rule("sigmoid", renormalize=call.renormalize)
    routing_launch.route(
        call.gating_output, call.correction_bias, call.topk_weights, call.topk_ids, rule
    )
