"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.moe.apply_shuffle_mul_sum import apply_shuffle_mul_sum
from cairn.ops.moe.cases import aligned_inputs, grouped_mm_args, prepared_inputs
from cairn.ops.moe.cutlass_w4a8 import cutlass_w4a8_moe_mm, get_cutlass_w4a8_moe_mm_data
from cairn.ops.moe.expert_specialization import (
    es_fp8_blockwise_scaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_quant,
)
from cairn.ops.moe.fp4_mm import cutlass_scaled_fp4_mm, fp4_group_mm
from cairn.ops.moe.fp8_blockwise_scaled_grouped_mm import fp8_blockwise_scaled_grouped_mm
from cairn.ops.moe.fused_experts import fused_experts
from cairn.ops.moe.grouped_topk import biased_grouped_topk, grouped_topk, grouped_topk_softmax
from cairn.ops.moe.hash_topk import hash_topk
from cairn.ops.moe.kimi_k2_moe_fused_gate import kimi_k2_moe_fused_gate
from cairn.ops.moe.moe_align_block_size import moe_align_block_size
from cairn.ops.moe.moe_fused_gate import moe_fused_gate
from cairn.ops.moe.moe_sum import moe_sum, moe_sum_reduce
from cairn.ops.moe.prepare_moe_input import prepare_moe_input
from cairn.ops.moe.shuffle_rows import shuffle_rows
from cairn.ops.moe.topk_sigmoid import topk_sigmoid
from cairn.ops.moe.topk_softmax import topk_softmax
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import Op
from cairn.ops.testing import cases_of

ROUTERS = {"full": ((1, 256, 8), (64, 256, 8), (8192, 256, 8)), "tiny": ((1, 16, 2), (5, 16, 2))}
"""(tokens, experts, experts per token) of router benchmarks."""
WIDTH = 2048
"""Hidden size in these benchmarks."""


def routers_of(draw: Draw) -> tuple[tuple[int, int, int], ...]:
    """The routers of the drawn size."""
    return ROUTERS[draw.sizes]


@apply_shuffle_mul_sum.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routers_of(draw):
        x, out = draw.randn(tokens * topk, WIDTH), draw.randn(tokens, WIDTH)
        order, factors = draw.rand(tokens * topk).argsort(), draw.randn(tokens * topk)
        yield Point(f"{tokens} x {topk}", draw.args(x, out, order, factors), moved(x, out, order))


LAYERS = {
    "full": ((2048, 512, 256, 8), (2048, 1408, 64, 6)),
    "tiny": ((32, 16, 8, 2),),
}
"""(hidden size, intermediate size, experts, experts per token) of a layer."""
BATCHES = {"full": (1, 64, 8192), "tiny": (1, 5)}
"""Tokens."""


def layers_of(draw: Draw) -> list[tuple[int, int, int, int, int]]:
    """(layer, tokens) of the benchmarks of grouped products."""
    return [(*layer, tokens) for layer in LAYERS[draw.sizes] for tokens in BATCHES[draw.sizes]]


@fused_experts.bench
def _(draw: Draw) -> Points:
    for width, inner, experts, topk, tokens in layers_of(draw):
        outputs = draw.randn(experts, 2 * inner, width), draw.randn(experts, width, inner)
        codes = tuple(w.to(E4M3) for w in outputs)
        scales = {
            "w1_scale": draw.rand(experts, 2 * blocks.count(inner), blocks.count(width)),
            "w2_scale": draw.rand(experts, blocks.count(width), blocks.count(inner)),
        }
        x, weights = draw.randn(tokens, width), draw.rand(tokens, topk)
        ids = draw.rand(tokens, experts).argsort(dim=1)[:, :topk].int()
        hit = int(ids.unique().numel())
        for (w1, w2), given in ((outputs, {}), (codes, scales)):
            yield Point(
                f"{tokens} x {width} x {inner}, {topk} of {experts}{', float8' if given else ''}",
                draw.args(x, w1, w2, weights, ids, **given),
                moved(x, x) + hit * moved(w1[0], w2[0]),
                6.0 * tokens * topk * width * inner,
            )


@grouped_topk.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating, bias = draw.randn(tokens, experts), draw.randn(experts)
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        given, size = (
            draw.args(gating, bias, 8, 4, topk, True, 2.5),
            f"{tokens}: {topk} of {experts}",
        )
        yield Point(size, given, moved(gating, weights, weights))


@biased_grouped_topk.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating, bias = draw.randn(tokens, experts), draw.randn(experts)
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        given, size = draw.args(gating, bias, topk, True, 8, 4), f"{tokens}: {topk} of {experts}"
        yield Point(size, given, moved(gating, weights, weights))


@grouped_topk_softmax.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating = draw.randn(tokens, experts)
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        given, size = draw.args(gating, topk, True, 8, 4), f"{tokens}: {topk} of {experts}"
        yield Point(size, given, moved(gating, weights, weights))


@kimi_k2_moe_fused_gate.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating, bias = draw.randn(tokens, experts), draw.randn(experts)
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        yield Point(
            f"{tokens}: {topk} of {experts}",
            draw.args(gating, bias, topk, True, 2.8, True),
            moved(gating, weights, weights),
        )


@moe_align_block_size.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        given = aligned_inputs(draw, ids, experts, 16, True)
        yield Point(f"{tokens}: {topk} of {experts}", given, moved(ids, *given.args[3:6]))


@moe_fused_gate.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating, bias = draw.randn(tokens, experts), draw.randn(experts)
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        yield Point(
            f"{tokens}: {topk} of {experts}",
            draw.args(gating, bias, 8, 4, topk, 0, 2.5, True),
            moved(gating, weights, weights),
        )


@moe_sum.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routers_of(draw):
        x, out = draw.randn(tokens, topk, WIDTH), draw.randn(tokens, WIDTH)
        yield Point(f"{tokens} x {topk}", draw.args(x, out), moved(x, out))


@moe_sum_reduce.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routers_of(draw):
        x, out = draw.randn(tokens, topk, WIDTH), draw.randn(tokens, WIDTH)
        yield Point(f"{tokens} x {topk}", draw.args(x, out, 2.5), moved(x, out))


@prepare_moe_input.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        given = prepared_inputs(draw, ids, experts, True)
        yield Point(f"{tokens}: {topk} of {experts}", given, moved(*given.args[:6]))


@shuffle_rows.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routers_of(draw):
        x, order = draw.randn(tokens, WIDTH), draw.randint(0, tokens, tokens * topk)
        shape = [tokens * topk, WIDTH]
        least = moved(x, order) + tokens * topk * WIDTH * x.element_size()
        yield Point(f"{tokens} x {topk}", draw.args(x, order, shape), least)


@topk_sigmoid.bench
@topk_softmax.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        weights = draw.randn(tokens, topk, dtype=torch.float32)
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        gating = draw.randn(tokens, experts)
        yield Point(
            f"{tokens}: {topk} of {experts}",
            draw.args(weights, ids, gating, True),
            moved(weights, ids, gating),
        )


@fp8_blockwise_scaled_grouped_mm.bench
def _(draw: Draw) -> Points:
    for width, inner, experts, topk, tokens in layers_of(draw):
        weight = draw.randn(experts, 2 * inner, width, dtype=torch.float32).to(E4M3)
        scale = draw.rand(experts, blocks.count(2 * inner), blocks.count(width))
        rows = tokens * topk
        x, own = blocks.quantized(draw.randn(rows, width))
        counts = draw.rand(experts, rows).argsort(dim=0)[0].bincount(minlength=experts).int()
        sizes = torch.stack((counts, counts * 0 + 2 * inner, counts * 0 + width), dim=1)
        offsets = counts.cumsum(0, dtype=torch.int32) - counts
        out = draw.randn(rows, 2 * inner)
        hit = int((counts > 0).sum())
        given = draw.args(*grouped_mm_args(out, (x, own), (weight, scale), (sizes, offsets)))
        least = moved(x, own, out) + hit * moved(weight[0], scale[0])
        size = f"{rows} rows of {experts} x {2 * inner} x {width}"
        yield Point(size, given, least, 4.0 * rows * width * inner)


def _on_a_case(op: Op[..., Any]) -> None:
    """Register a benchmark of an op that no supported model uses: its first test case."""

    @op.bench
    def _(draw: Draw) -> Points:
        given = cases_of(op, draw.device)[0]
        tensors = [x for x in (*given.args, *given.kwargs.values()) if isinstance(x, Tensor)]
        yield Point("a case", given, moved(*tensors))


for emulated in (
    *(cutlass_w4a8_moe_mm, get_cutlass_w4a8_moe_mm_data, cutlass_scaled_fp4_mm, fp4_group_mm),
    *(es_fp8_blockwise_scaled_grouped_mm, es_sm100_mxfp8_blockscaled_grouped_mm),
    es_sm100_mxfp8_blockscaled_grouped_quant,
):
    _on_a_case(emulated)


@hash_topk.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routers_of(draw):
        gating, ids = draw.randn(tokens, experts, dtype=torch.float32), draw.randint(0, 999, tokens)
        table = draw.randint(0, experts, 1000, topk, dtype=torch.int32)
        given = draw.args(gating, table, ids, 1.5)
        yield Point(f"{tokens} x {experts}, {topk}", given, moved(gating[:, :topk]) * 2)
