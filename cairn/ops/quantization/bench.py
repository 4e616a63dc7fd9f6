"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.quantization.codes import E4M3
from cairn.ops.quantization.per_token_quant_int8 import per_token_quant_int8
from cairn.ops.quantization.scaled_fp4_experts_quant import scaled_fp4_experts_quant
from cairn.ops.quantization.scaled_fp4_grouped_quant import (
    scaled_fp4_grouped_quant,
    silu_and_mul_scaled_fp4_grouped_quant,
)
from cairn.ops.quantization.scaled_fp4_quant import scaled_fp4_quant, suggest_nvfp4_global_scale
from cairn.ops.quantization.sgl_per_tensor_quant_fp8 import sgl_per_tensor_quant_fp8
from cairn.ops.quantization.sgl_per_token_group_quant_8bit import sgl_per_token_group_quant_8bit
from cairn.ops.quantization.sgl_per_token_quant_fp8 import sgl_per_token_quant_fp8
from cairn.ops.registry import Op


@per_token_quant_int8.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}",
            draw.args(x),
            moved(x) + x.numel() + 4 * rows,
            definition=True,
        )


@scaled_fp4_experts_quant.bench
def _(draw: Draw) -> Points:
    for layer, tokens in draw.rows():
        rows = min(tokens, 2048)
        x, scale = draw.randn(8 * rows, layer.hidden), draw.rand(8) + 1.0
        offsets = torch.arange(9, dtype=torch.int32, device=draw.device) * rows
        starts = torch.arange(9, dtype=torch.int32, device=draw.device) * (-(-rows // 128) * 128)
        yield Point(
            f"{layer.name}: 8 x {rows} x {layer.hidden}",
            draw.args(x, scale, offsets, starts, 1),
            moved(x) + x.numel() * 9 // 16,
            definition=True,
        )


def _points(draw: Draw, entry: Op[..., tuple[Tensor, Tensor]], factor: int) -> Points:
    """Groups of which half the rows are in use."""
    for layer, tokens in draw.rows():
        rows = min(tokens, 4096)
        x = draw.randn(4, rows, factor * layer.hidden)
        scale, mask = draw.rand(4) + 1.0, torch.full((4,), rows // 2, device=draw.device)
        yield Point(
            f"{layer.name}: 4 x {rows} x {layer.hidden}",
            draw.args(x, scale, mask.to(torch.int32)),
            moved(x) // 2 + x.numel() // factor * 9 // 16,
            definition=True,
        )


@scaled_fp4_grouped_quant.bench
def _(draw: Draw) -> Points:
    return _points(draw, scaled_fp4_grouped_quant, 1)


@silu_and_mul_scaled_fp4_grouped_quant.bench
def _(draw: Draw) -> Points:
    return _points(draw, silu_and_mul_scaled_fp4_grouped_quant, 2)


@scaled_fp4_quant.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}",
            draw.args(x, suggest_nvfp4_global_scale(x)),
            moved(x) + x.numel() * 9 // 16,
            definition=True,
        )


@suggest_nvfp4_global_scale.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}", draw.args(x), moved(x), definition=True
        )


@sgl_per_tensor_quant_fp8.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden)
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(1, dtype=torch.float32)
        size = f"{layer.name}: {rows} x {layer.hidden}"
        for static, read in ((True, moved(x)), (False, 2 * moved(x))):
            yield Point(
                f"{size}, {'static' if static else 'dynamic'}",
                draw.args(x, codes, scale.fill_(0.1), static),
                read + moved(codes),
                definition=True,
            )


@sgl_per_token_group_quant_8bit.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        group = 128 if layer.hidden % 128 == 0 else 32
        x = draw.randn(rows, layer.hidden)
        codes = torch.empty_like(x, dtype=E4M3)
        scale = x.new_empty(rows, layer.hidden // group, dtype=torch.float32)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}, groups of {group}",
            draw.args(x, codes, scale, group),
            moved(x, codes, scale),
            definition=True,
        )


@sgl_per_token_quant_fp8.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden)
        codes, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(rows, 1, dtype=torch.float32)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden}",
            draw.args(x, codes, scale),
            moved(x, codes, scale),
            definition=True,
        )
