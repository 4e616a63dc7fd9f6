"""The product with a weight that oneDNN has reordered for the CPU.

With few rows a product is as fast as its weight is read. Two cores of a machine that reads 37 GB/s
read it at 5 to 20 GB/s in torch.nn.functional.linear and at 20 to 40 in its packed form.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.linear.looks import check_product
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

# Rows below this number are filled up (one row with itself, more with zeros): oneDNN's kernel for 4
# rows reads the weight 10 to 60 % faster than those for 1 and 2 (no slower than for 3), and a row's
# result does not depend on the number of rows.
FULL_ROWS = 4
_TYPICAL_ROWS = 256
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_weight(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, for packed_linear; None where that does not exist.

    Args:
        weight: [N, K]; float32 or bfloat16 on the CPU are packed, if this torch and machine can.
    Returns:
        An opaque [N, K] tensor (`is_mkldnn`) in its own memory, as large as the weight.
    """
    if weight.device.type != "cpu" or not HAS_ONEDNN:
        return None
    if weight.dtype == torch.bfloat16:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    else:
        supported = weight.dtype == torch.float32
    if not supported or weight.numel() == 0:
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
    return packed


@op
def packed_linear(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """rmsnorm(input) @ packed.T + bias; the norm and the product are rounded to input's dtype.

    Args:
        input: [..., K].
        packed: [N, K] of input's dtype, from pack_weight; a plain weight is accepted too.
        bias: [N] of input's dtype, or None.
        norm: [K] of input's dtype or float32, weight of the norm; None: input as it is.
        eps: of the norm.
    Returns:
        [..., N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input if norm is None else rmsnorm.reference(input, norm, eps)
    return torch.nn.functional.linear(x, unpacked(packed), bias)


def unpacked(packed: Tensor) -> Tensor:
    """The plain weight."""
    return packed.to_dense() if packed.is_mkldnn else packed


@packed_linear.check
def _(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    check_product("packed_linear", input, "packed", packed, bias, norm)


@packed_linear.fake
def _(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], packed.shape[0]))


def is_packed(input: Tensor, packed: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Something to multiply, with a weight that oneDNN knows."""
    return packed.is_mkldnn and input.numel() > 0


def filled_rows(input: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """input [..., K] after its norm, if it has one, as rows, at least FULL_ROWS of them."""
    rows, width = input.shape[:-1].numel(), input.shape[-1]
    if rows == 1:
        row = input.view(width) if norm is None else _normed_row(input.view(width), norm, eps)
        return input.new_empty(FULL_ROWS, width).copy_(row)
    x = input
    if norm is not None:
        x = torch.nn.functional.rms_norm(input, norm.shape, norm, eps)
    x = x.reshape(rows, width)
    return torch.nn.functional.pad(x, (0, 0, 0, FULL_ROWS - rows)) if rows < FULL_ROWS else x


def _normed_row(input: Tensor, norm: Tensor, eps: float) -> Tensor:
    """One row [K] after its norm, before it is rounded, in a third of the calls: [K] float32.

    Zeros without an eps become NaN, as in `rmsnorm`.
    """
    x = input.float()
    square = torch.dot(x, x).item() / x.numel() + eps
    factor = square**-0.5 if square else math.inf
    return torch.mul(x, norm).mul_(factor)


def _onednn(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    x = filled_rows(input, norm, eps)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    rows = input.shape[:-1].numel()
    return product[:rows].view(*input.shape[:-1], packed.shape[0])


if HAS_ONEDNN:
    packed_linear.implementation("onednn", devices=("cpu",), when=is_packed)(_onednn)


packed_linear.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)}, "a norm that is rounded another way in front of the product"
)


@packed_linear.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 3, 4, 7):
            weight = make.randn(33, 48, dtype=dtype, scale=48**-0.5)
            packed = pack_weight(weight)
            given = weight if packed is None else packed
            x, norm = make.randn(rows, 48, dtype=dtype), make.randn(48, dtype=dtype)
            yield make.args(x, given, make.randn(33, dtype=dtype))
            yield make.args(x, given, None, norm, 1e-5)
    plain = make.randn(16, 64)
    packed = pack_weight(plain)
    weight = plain if packed is None else packed
    yield make.args(make.randn(2, 3, 64), weight)
    yield make.args(make.randn(2, 3, 128)[..., :64], weight)
    yield make.args(make.randn(0, 64), weight)
    yield make.args(make.randn(3, 64), plain)


@packed_linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        wide = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
        shapes = {
            "qkv": (wide, layer.hidden),
            "out": (layer.hidden, layer.heads * layer.head_dim),
            "gate_up": (2 * layer.intermediate, layer.hidden),
            "down": (layer.hidden, layer.intermediate),
        }
        if rows <= 64:
            shapes["head"] = (layer.vocabulary, layer.hidden)
        for name, shape in shapes.items():
            x, weight = draw.randn(rows, shape[1]), draw.randn(*shape, scale=shape[1] ** -0.5)
            packed = pack_weight(weight)
            plain = Alternative("linear", torch.nn.functional.linear, draw.args(x, weight))
            yield Point(
                f"{layer.name} {name}: {rows} x {shape[1]} x {shape[0]}",
                draw.args(x, weight if packed is None else packed),
                moved(x, weight) + rows * shape[0] * x.element_size(),
                2.0 * rows * shape[0] * shape[1],
                (plain,),
            )
