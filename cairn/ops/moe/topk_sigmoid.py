"""The experts of a router that scores by sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOAT32
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

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
def _(
    topk_weights: Tensor,
    topk_ids: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
) -> None:
    routing.expect_outputs(NAME, topk_weights, topk_ids, gating_output)
    if correction_bias is not None:
        routing.expect_bias(NAME, "correction_bias", correction_bias, gating_output, FLOAT32)


@topk_sigmoid.cases
def _(make: Make) -> Cases:
    def outputs(tokens: int, topk: int) -> tuple[Tensor, Tensor]:
        return make.empty(tokens, topk), make.empty(tokens, topk, dtype=torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(*outputs(7, 3), make.randn(7, 12, dtype=dtype))
        yield make.args(*outputs(5, 8), make.randn(5, 60, dtype=dtype), True, make.randn(60))
    yield make.args(*outputs(9, 4), make.randint(0, 3, 9, 16).float(), True)
    yield make.args(*outputs(0, 2), make.randn(0, 8))


@topk_sigmoid.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routing.routers_of(draw):
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        gating = draw.randn(tokens, experts)
        yield Point(
            f"{tokens}: {topk} of {experts}",
            draw.args(weights, ids, gating, True),
            moved(weights, ids, gating),
        )
