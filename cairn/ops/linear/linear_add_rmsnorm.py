"""Linear layer whose output is added to a residual stream, and the stream's next norm."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect
from cairn.ops.linear import skinny_gemm, skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.checks import check_product
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.norm.launch import check_weight
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.registry import op


@op(mutates=("residual",))
def linear_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """residual becomes s = residual + input @ weight.T + bias; the result is rmsnorm(s).

    The sum is taken in float32 and the norm sees it before it is rounded to residual's dtype.

    Args:
        input: [T, K].
        residual: [T, N], input's dtype, changed.
        weight: [N, K], input's dtype.
        norm: [N], weight of the norm, input's dtype or float32.
        bias: [N], input's dtype, or None.
        eps: of the norm.
    Returns:
        [T, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    offset = None if bias is None else bias.float()
    product = torch.nn.functional.linear(input.float(), weight.float(), offset)
    total = residual.float() + product
    residual.copy_(total)
    return rmsnorm.reference(total, norm.float(), eps).to(residual.dtype)


@linear_add_rmsnorm.check
def _(call: Call) -> None:
    expect("linear_add_rmsnorm", "input", call.input, (None, None))
    check_product("linear_add_rmsnorm", call.input, "weight", call.weight, call.bias)
    shape = (call.input.shape[0], call.weight.shape[0])
    expect("linear_add_rmsnorm", "residual", call.residual, shape, (call.input.dtype,), call.input)
    check_weight("linear_add_rmsnorm", "norm", call.norm, call.residual)


def _split(name: str, launch: ModuleType, **options: Any) -> None:
    @linear_add_rmsnorm.implementation(
        name,
        devices=gpu.DEVICES,
        when=lambda call: (
            call.bias is None
            and call.residual.stride(1) == 1
            and launch.accepts_split(call.input, call.weight)
        ),
        replayed=True,
        **options,
    )
    def _(call: Call) -> Tensor:
        """The norm's kernel sums the split-K parts of the product."""
        parts = launch.multiply_parts(call.input, call.weight)
        return skinny_gemm_panel.add_and_norm(parts, call.residual, call.norm, call.eps)


_split("gluon", wgmma_launch, **wgmma_launch.OPTIONS)
_split("triton_panel", skinny_gemm_panel)
_split("triton_few", skinny_gemm)


@linear_add_rmsnorm.implementation("composed")
def _(call: Call) -> Tensor:
    """Two ops: the norm is that of the rounded sum."""
    linear_add(call.input, call.residual, call.weight, call.bias)
    return rmsnorm(call.residual, call.norm, call.eps)


linear_add_rmsnorm.tolerance(
    {torch.bfloat16: (2e-2, 3e-2)}, "sums are rounded in between and before the norm, or are not"
)
