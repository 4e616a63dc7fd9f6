"""Residual addition and layer normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm

from cairn.ops.call import Call
from cairn.ops.norm.launch import check_sum, check_weight
from cairn.ops.registry import op


@op(mutates=("input", "residual"))
def fused_add_layernorm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6
) -> None:
    """residual becomes s = input + residual; input becomes layernorm(s). Both in place.

    The sum is taken in float32 and the norm sees it before it is rounded to residual's dtype.

    Args:
        input, residual: [..., H], same dtype, float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        bias: as weight, or None.
        eps: added to the variance.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    total = input.float() + residual.float()
    residual.copy_(total)
    shift = None if bias is None else bias.float()
    input.copy_(layer_norm(total, weight.shape, weight.float(), shift, eps))


@fused_add_layernorm.check
def _(call: Call) -> None:
    check_sum("fused_add_layernorm", call.input, call.residual, call.weight)
    if call.bias is not None:
        check_weight("fused_add_layernorm", "bias", call.bias, call.input)
