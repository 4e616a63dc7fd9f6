"""Padded groups of rows in NVFP4: the rows of every expert, each expert with its global scale."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation.silu_and_mul import silu_and_mul
from cairn.ops.call import Call
from cairn.ops.checks import expect
from cairn.ops.quantization import nvfp4, nvfp4_launch
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op


@op
def scaled_fp4_grouped_quant(
    input_tensor: Tensor, input_global_scale: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of the first mask[l] rows of every group; 0 for the others.

    Args:
        input_tensor: [L, M, K] float32, bfloat16 or float16, K a multiple of 16.
        input_global_scale: [L] float32.
        mask: [L] int32.
    Returns:
        codes (M, K / 2, L) uint8, a view of storage [L, M, K / 2]; scales (32, 4, M' / 128, 4,
        S' / 4, L) float8_e4m3fn, a view of storage [L, M' / 128, S' / 4, 32, 4, 4], tiles as in
        `cairn.ops.quantization.nvfp4`.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return _grouped(input_tensor, input_global_scale, mask)


@op
def silu_and_mul_scaled_fp4_grouped_quant(
    input_tensor: Tensor, input_global_scale: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`scaled_fp4_grouped_quant` of silu(gate) * up, rounded to the input's dtype before.

    Args:
        input_tensor: [L, M, 2K], [gate | up].
        input_global_scale, mask: as in `scaled_fp4_grouped_quant`.
    Returns:
        As there.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    gate, up = input_tensor.float().chunk(2, dim=-1)
    x = (torch.nn.functional.silu(gate) * up).to(input_tensor.dtype)
    return _grouped(x, input_global_scale, mask)


def _grouped(x: Tensor, global_scale: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    used = (torch.arange(x.shape[1], device=x.device) < mask[:, None]).unsqueeze(-1)
    codes, scales = nvfp4.quantize(x, global_scale.view(-1, 1, 1))
    kept = torch.where(used, scales.view(torch.uint8), 0).view(E4M3)
    return _views(torch.where(used, codes, 0), nvfp4.tiled(kept))


def _views(codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The returned views of codes [L, M, K / 2] and scales [L, M', S']."""
    groups, rows, columns = stored.shape
    tiles = stored.view(groups, rows // 128, columns // 4, 32, 4, 4)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def _expect(name: str, x: Tensor, global_scale: Tensor, mask: Tensor, factor: int) -> None:
    nvfp4.expect_input(name, "input_tensor", x, 3, factor)
    groups = x.shape[:1]
    expect(name, "input_global_scale", global_scale, groups, (torch.float32,), like=x)
    expect(name, "mask", mask, groups, (torch.int32,), like=x)


@scaled_fp4_grouped_quant.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    groups, rows, _ = call.input_tensor.shape
    return _views(*nvfp4.blank(call.input_tensor, rows, rows, groups))


@silu_and_mul_scaled_fp4_grouped_quant.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    groups, rows, _ = call.input_tensor.shape
    return _views(*nvfp4.blank(call.input_tensor.chunk(2, dim=-1)[0], rows, rows, groups))


@scaled_fp4_grouped_quant.check
def _(call: Call) -> None:
    _expect("scaled_fp4_grouped_quant", call.input_tensor, call.input_global_scale, call.mask, 1)


@silu_and_mul_scaled_fp4_grouped_quant.check
def _(call: Call) -> None:
    _expect(
        "silu_and_mul_scaled_fp4_grouped_quant",
        call.input_tensor,
        call.input_global_scale,
        call.mask,
        2,
    )


def _in_rows(call: Call) -> bool:
    groups = call.input_tensor.shape[0]
    return nvfp4_launch.in_rows(call.input_tensor, groups, call.input_global_scale, call.mask)


@scaled_fp4_grouped_quant.implementation("triton", devices=gpu.DEVICES, when=_in_rows)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return _views(*nvfp4_launch.quantize(call.input_tensor, call.input_global_scale, call.mask))


@silu_and_mul_scaled_fp4_grouped_quant.implementation("triton", devices=gpu.DEVICES, when=_in_rows)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return _views(
        *nvfp4_launch.quantize(call.input_tensor, call.input_global_scale, call.mask, gated=True)
    )


@silu_and_mul_scaled_fp4_grouped_quant.implementation("composed", devices=("cpu",))
def _(call: Call) -> tuple[Tensor, Tensor]:
    """The two ops: the same codes as theirs, whichever implementation rounds the numbers."""
    return scaled_fp4_grouped_quant(
        silu_and_mul(call.input_tensor), call.input_global_scale, call.mask
    )
