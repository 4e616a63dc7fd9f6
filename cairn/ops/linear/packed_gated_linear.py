"""The first half of a SwiGLU block with weights that oneDNN has reordered for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.checks import expect
from cairn.ops.linear import packed
from cairn.ops.linear.looks import check_product
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def packed_gated_linear(
    input: Tensor, gate: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x = rmsnorm(input), rounded to input's dtype step by step.

    Args:
        input: [..., K].
        gate, up: [N, K] of input's dtype, from pack_weight; plain weights are accepted too.
        norm: [K] of input's dtype or float32, weight of the norm; None: input as it is.
        eps: of the norm.
    Returns:
        [..., N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input if norm is None else rmsnorm.reference(input, norm, eps)
    both = [torch.nn.functional.linear(x, packed.unpacked(weight)) for weight in (gate, up)]
    return silu_and_mul.reference(torch.cat(both, dim=-1))


@packed_gated_linear.check
def _(
    input: Tensor, gate: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> None:
    check_product("packed_gated_linear", input, "gate", gate, None, norm)
    expect("packed_gated_linear", "up", up, gate.shape, (input.dtype,), input)


@packed_gated_linear.fake
def _(
    input: Tensor, gate: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return input.new_empty((*input.shape[:-1], gate.shape[0]))


def _accepts(
    input: Tensor, gate: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> bool:
    return packed.is_packed(input, gate) and up.is_mkldnn


def _onednn(
    input: Tensor, gate: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """silu and the product with it are done where the sums are still in float32."""
    x = packed.filled_rows(input, norm, eps)
    multiply = torch.ops.mkldnn._linear_pointwise
    gated = multiply(x, gate, None, "swish", [], "")
    product: Tensor = multiply.binary(x, gated, up, None, "mul")
    rows = input.shape[:-1].numel()
    return product[:rows].view(*input.shape[:-1], gate.shape[0])


if packed.HAS_ONEDNN:
    packed_gated_linear.implementation("onednn", devices=("cpu",), when=_accepts)(_onednn)


packed_gated_linear.tolerance(
    {torch.bfloat16: (2e-2, 3e-2)}, "normed tokens and products are rounded in between, or are not"
)


@packed_gated_linear.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 4, 7):
            plain = [make.randn(33, 48, dtype=dtype, scale=48**-0.5) for _ in range(2)]
            known = [packed.pack_weight(weight) for weight in plain]
            weights = [p if k is None else k for p, k in zip(plain, known, strict=True)]
            x = make.randn(rows, 48, dtype=dtype)
            yield make.args(x, *weights)
            yield make.args(x, *weights, make.randn(48, dtype=dtype), 1e-5)
            yield make.args(x, *plain)
    yield make.args(make.randn(2, 3, 128)[..., :64], make.randn(9, 64), make.randn(9, 64))
    yield make.args(make.randn(0, 64), make.randn(9, 64), make.randn(9, 64))


def _apart(input: Tensor, gate: Tensor, up: Tensor, norm: Tensor, eps: float = 1e-6) -> Tensor:
    """The norm, two products and the gate, one after the other."""
    both = [packed.packed_linear(input, weight, None, norm, eps) for weight in (gate, up)]
    return silu_and_mul(torch.cat(both, dim=-1))


@packed_gated_linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        shape = (layer.intermediate, layer.hidden)
        x, norm = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
        plain = [draw.randn(*shape, scale=layer.hidden**-0.5) for _ in range(2)]
        known = [packed.pack_weight(weight) for weight in plain]
        weights = [p if k is None else k for p, k in zip(plain, known, strict=True)]
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden} x 2 x {layer.intermediate}",
            draw.args(x, *weights, norm),
            moved(x, *plain, norm) + rows * layer.intermediate * x.element_size(),
            4.0 * rows * plain[0].numel(),
            (Alternative("apart", _apart),),
        )
