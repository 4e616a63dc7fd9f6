"""Rows sorted by expert in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, expect, refuse
from cairn.ops.quantization import nvfp4
from cairn.ops.quantization.codes import E4M3
from cairn.ops.quantization.kernels import nvfp4_experts_kernel
from cairn.ops.quantization.nvfp4_launch import EXPERTS_A_WARP, in_rows, programs_of
from cairn.ops.registry import op


@op
def scaled_fp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of rows; those of expert e are expert_offsets[e] .. expert_offsets[e +
    1].

    Args:
        input_tensor: [n, K] float32, bfloat16 or float16, K a multiple of 16.
        input_global_scale: [E] float32, of the experts.
        expert_offsets: [E + 1] int32, ascending from 0. Rows after the last expert's are 0.
        blockscale_offsets: [E + 1] int32: the scales of expert e start in row
            blockscale_offsets[e], a multiple of 128 not above M'.
        topk: experts per token: with an expert_map there are n * topk rows.
        expert_map: [n * topk] int32 or int64, the row of input_tensor that each row is taken from.
    Returns:
        codes [rows, K / 2] uint8, and scales [M', S'] float8_e4m3fn in tiles, zero in between; M'
        is rows + 128 * E rounded up to a multiple of 128, S' is K / 16 to one of 4.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input_tensor if expert_map is None else input_tensor[expert_map.long()]
    rows, experts = x.shape[0], input_global_scale.shape[0]
    row = torch.arange(rows, device=x.device, dtype=expert_offsets.dtype)
    expert = torch.searchsorted(expert_offsets, row, right=True) - 1
    owned = ((expert >= 0) & (expert < experts)).unsqueeze(1)
    expert = expert.clamp(0, max(experts - 1, 0))
    codes, scales = nvfp4.quantize(x, input_global_scale[expert, None])
    height, _ = nvfp4.padded(rows + nvfp4.TILE_ROWS * experts, scales.shape[1])
    # One extra row takes the scales of rows that belong to no expert.
    laid = torch.zeros(height + 1, scales.shape[1], dtype=torch.uint8, device=x.device)
    place = blockscale_offsets.long()[expert] + row - expert_offsets.long()[expert]
    place = torch.where(owned[:, 0], place, height).unsqueeze(1).expand_as(scales)
    laid.scatter_(0, place, scales.view(torch.uint8))
    return torch.where(owned, codes, 0), nvfp4.tiled(laid[:-1].view(E4M3))


@scaled_fp4_experts_quant.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.input_tensor.shape[0] if call.expert_map is None else call.expert_map.shape[0]
    experts = call.input_global_scale.shape[0]
    return nvfp4.blank(call.input_tensor, rows, rows + nvfp4.TILE_ROWS * experts)


@scaled_fp4_experts_quant.check
def _(call: Call) -> None:
    name, x = "scaled_fp4_experts_quant", call.input_tensor
    nvfp4.expect_input(name, "input_tensor", x, 2)
    expect(name, "input_global_scale", call.input_global_scale, (None,), (torch.float32,), like=x)
    experts = call.input_global_scale.shape[0]
    if not experts:
        refuse(name, "input_global_scale", "names no expert")
    bounds = (experts + 1,)
    expect(name, "expert_offsets", call.expert_offsets, bounds, (torch.int32,), like=x)
    expect(name, "blockscale_offsets", call.blockscale_offsets, bounds, (torch.int32,), like=x)
    if call.topk < 1:
        refuse(name, "topk", f"is {call.topk}")
    if call.expert_map is not None:
        expect(name, "expert_map", call.expert_map, (x.shape[0] * call.topk,), INDICES, like=x)


def _in_rows(call: Call) -> bool:
    others = [call.input_global_scale, call.expert_offsets, call.blockscale_offsets]
    if call.expert_map is not None:
        others.append(call.expert_map)
    return in_rows(call.input_tensor, 1, *others)


@scaled_fp4_experts_quant.implementation(
    "triton", devices=gpu.DEVICES, when=_in_rows, replayed=True
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    x, experts = call.input_tensor, call.input_global_scale.shape[0]
    rows = x.shape[0] if call.expert_map is None else call.expert_map.shape[0]
    blocks = x.shape[1] // nvfp4.BLOCK
    padded_rows, padded_columns = nvfp4.padded(rows + nvfp4.TILE_ROWS * experts, blocks)
    codes = gpu.empty((rows, x.shape[1] // 2), torch.uint8, x.device)
    scales = gpu.empty((padded_rows, padded_columns), E4M3, x.device)
    own, warps, programs = programs_of(padded_columns, EXPERTS_A_WARP)
    nvfp4_experts_kernel[(padded_rows, programs)](
        x=x,
        codes=codes.view(torch.int32),
        scales=scales.view(torch.uint8),
        global_scale=call.input_global_scale,
        offsets=call.expert_offsets,
        starts=call.blockscale_offsets,
        order=call.expert_map,
        rows=rows,
        blocks=blocks,
        tiles=padded_columns // nvfp4.TILE_COLUMNS,
        experts=experts,
        x_row=x.stride(0),
        T=own,
        EP=gpu.next_power_of_2(experts),
        num_warps=warps,
    )
    return codes, scales
