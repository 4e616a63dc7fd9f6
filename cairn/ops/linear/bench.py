"""What `cairn bench ops` times of this family."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.linear.gated_linear import gated_linear
from cairn.ops.linear.linear import linear
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.linear.linear_add_rmsnorm import linear_add_rmsnorm


def _by_torch(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    normed = torch.nn.functional.rms_norm(x, norm.shape, norm, 1e-6)
    gate, up = torch.nn.functional.linear(normed, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@gated_linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        x, norm = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
        weight = draw.randn(2 * layer.intermediate, layer.hidden, scale=layer.hidden**-0.5)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden} x 2 x {layer.intermediate}",
            draw.args(x, weight, norm),
            moved(x, weight, norm) + rows * layer.intermediate * x.element_size(),
            2.0 * rows * weight.numel(),
            draw.by_torch(_by_torch, "rms_norm, linear, silu"),
        )


def _linear_by_torch(x: Tensor, weight: Tensor, _: None, norm: Tensor) -> Tensor:
    return torch.nn.functional.linear(
        torch.nn.functional.rms_norm(x, norm.shape, norm, 1e-6), weight
    )


@linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        shapes = [("qkv", rows, 2 * (layer.heads + layer.kv_heads) * layer.head_dim)]
        if rows == 1:
            shapes += [("head", count, layer.vocabulary) for count in (1, 8, 64)]
        for name, rows, numbers in shapes:
            x, norm = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
            weight = draw.randn(numbers, layer.hidden, scale=layer.hidden**-0.5)
            yield Point(
                f"{layer.name} {name}: {rows} x {layer.hidden} x {numbers}",
                draw.args(x, weight, None, norm),
                moved(x, weight, norm) + rows * numbers * x.element_size(),
                2.0 * rows * weight.numel(),
                draw.by_torch(_linear_by_torch, "rms_norm, linear"),
            )


def _add_by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.addmm_(x, weight.t())


@linear_add.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        for name, width in (("out", layer.heads * layer.head_dim), ("down", layer.intermediate)):
            x, residual = draw.randn(rows, width), draw.randn(rows, layer.hidden)
            weight = draw.randn(layer.hidden, width, scale=width**-0.5)
            yield Point(
                f"{layer.name} {name}: {rows} x {width} x {layer.hidden}",
                draw.args(x, residual, weight),
                moved(x, weight, residual, residual),
                2.0 * rows * weight.numel(),
                draw.by_torch(_add_by_torch, "addmm_"),
            )


def _add_rmsnorm_by_torch(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    residual.addmm_(x, weight.t())
    return torch.nn.functional.rms_norm(residual, norm.shape, norm, 1e-6)


@linear_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        for name, width in (("out", layer.heads * layer.head_dim), ("down", layer.intermediate)):
            x, residual = draw.randn(rows, width), draw.randn(rows, layer.hidden)
            weight = draw.randn(layer.hidden, width, scale=width**-0.5)
            norm = draw.randn(layer.hidden)
            yield Point(
                f"{layer.name} {name}: {rows} x {width} x {layer.hidden}",
                draw.args(x, residual, weight, norm),
                moved(x, weight, residual, residual, residual, norm),
                2.0 * rows * weight.numel(),
                draw.by_torch(_add_rmsnorm_by_torch, "addmm_, rms_norm"),
            )
