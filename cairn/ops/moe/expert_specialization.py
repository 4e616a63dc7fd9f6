"""Grouped products under the names of sgl-kernel's expert specialization: block-wise fp8, and MXFP8
(OCP microscaling formats: e4m3 with a power-of-two scale per 32 elements)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.moe.fp8_blockwise_scaled_grouped_mm import fp8_blockwise_scaled_grouped_mm
from cairn.ops.moe.sorted_rows import owners, products
from cairn.ops.quantization import e8m0, nvfp4
from cairn.ops.quantization.codes import E4M3, E4M3_MAX, e4m3
from cairn.ops.registry import op

BLOCK = 32
SCALES = (torch.uint8, torch.float8_e8m0fnu)
READ = ("output", "a", "b", "scales_a", "scales_b", "problem_sizes", "expert_offsets")
WITHOUT_EFFECT: dict[str, Any] = dict.fromkeys(
    (
        *("a_ptrs", "b_ptrs", "out_ptrs", "a_scales_ptrs", "b_scales_ptrs", "stride_a", "stride_b"),
        *("stride_c", "layout_sfa", "layout_sfb", "workspace"),
    )
)
"""Arguments of `fp8_blockwise_scaled_grouped_mm` that it reads, and those that it ignores."""


@op(mutates=("output",))
def es_fp8_blockwise_scaled_grouped_mm(
    output: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    stride_a: Tensor | None,
    stride_b: Tensor | None,
    stride_d: Tensor | None,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    workspace: Tensor | None,
) -> None:
    """`fp8_blockwise_scaled_grouped_mm` with fewer arguments.

    Args:
        output, a, b, scales_a, scales_b, problem_sizes, expert_offsets: as in
            `fp8_blockwise_scaled_grouped_mm`.
        stride_a, stride_b, stride_d, workspace: ignored; may be None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    fp8_blockwise_scaled_grouped_mm.reference(
        output=output,
        a=a,
        b=b,
        scales_a=scales_a,
        scales_b=scales_b,
        problem_sizes=problem_sizes,
        expert_offsets=expert_offsets,
        **WITHOUT_EFFECT,
    )


def _given(call: Call) -> dict[str, Any]:
    """Arguments for `fp8_blockwise_scaled_grouped_mm`."""
    return WITHOUT_EFFECT | {name: getattr(call, name) for name in READ}


@es_fp8_blockwise_scaled_grouped_mm.fake
def _(call: Call) -> None:
    return None


@es_fp8_blockwise_scaled_grouped_mm.check
def _(call: Call) -> None:
    check, whole = fp8_blockwise_scaled_grouped_mm._check, fp8_blockwise_scaled_grouped_mm.bind
    assert check is not None
    check(whole(**_given(call)))


@es_fp8_blockwise_scaled_grouped_mm.implementation(
    "grouped", devices=("cuda",) if gpu.AVAILABLE else (), replayed=True
)
def _(call: Call) -> None:
    fp8_blockwise_scaled_grouped_mm(**_given(call))


@op(mutates=("quant_output", "scale_factor"))
def es_sm100_mxfp8_blockscaled_grouped_quant(
    input: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    quant_output: Tensor,
    scale_factor: Tensor,
) -> None:
    """Quantise rows, sorted by expert, to MXFP8: every 32 elements share a scale 2^e, max |x| / 448
    rounded up to a power of two, and codes are e4m3(x / 2^e). Rows of no expert are not changed.

    Args:
        input: [R, K] float32, bfloat16 or float16, K a multiple of 32.
        problem_sizes: [E, 3] int32: (m, n, k) of each expert; only m is read.
        expert_offsets: [E] int32, or [E + 1]: the first row of each expert.
        blockscale_offsets: [E] int32, or [E + 1]: the row of its first scale, a multiple of 128.
        quant_output: [R, K] float8_e4m3fn, written.
        scale_factor: [R', S'] uint8, written: e + 127 in the tiles of
            `cairn.ops.quantization.nvfp4`; R' is a multiple of 128, S' is K / 32 rounded up to a
            multiple of 4.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    rows, width = input.shape
    groups = input.float().unflatten(1, (width // BLOCK, BLOCK))
    scale = e8m0.encode(groups.abs().amax(dim=-1) / E4M3_MAX)
    codes = e4m3(groups / e8m0.decode(scale).unsqueeze(-1)).flatten(1)
    owner = owners(expert_offsets, problem_sizes[:, 0], rows)
    owned, at = owner >= 0, owner.clamp(min=0)
    kept = torch.where(owned.unsqueeze(1), codes.view(torch.uint8), quant_output.view(torch.uint8))
    quant_output.view(torch.uint8).copy_(kept)
    height, scale_columns = scale_factor.shape
    place = torch.arange(rows, device=input.device) - expert_offsets.long()[at]
    place = torch.where(owned, place + blockscale_offsets.long()[at], height)
    laid = nvfp4.untiled(scale_factor, height, scale_columns)
    # One extra row collects writes of rows without an expert.
    laid = torch.nn.functional.pad(laid, (0, 0, 0, 1))
    columns = torch.nn.functional.pad(scale, (0, scale_columns - scale.shape[1]))
    laid = laid.index_copy(0, place, columns)
    scale_factor.copy_(nvfp4.tiled(laid[:-1].view(E4M3)).view(torch.uint8))


@op(mutates=("output",))
def es_sm100_mxfp8_blockscaled_grouped_mm(
    output: Tensor,
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
) -> None:
    """Products of rows in MXFP8, sorted by expert, with the matrices of their experts, in float32,
    rounded once. Rows of no expert are not changed.

    Args:
        output: [R, N] float32, bfloat16 or float16, written.
        a: [R, K] float8_e4m3fn, K a multiple of 32.
        b: [E, K, N] float8_e4m3fn.
        sfa: [R', S'] uint8 or float8_e8m0fnu, as written by
            `es_sm100_mxfp8_blockscaled_grouped_quant`.
        sfb: [E, S', N'], a view of tiles [E, N', S'] of the matrices' scales.
        problem_sizes, expert_offsets, blockscale_offsets: as in
            `es_sm100_mxfp8_blockscaled_grouped_quant`.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    rows, width = a.shape
    scale_columns, outputs = width // BLOCK, b.shape[2]
    owner = owners(expert_offsets, problem_sizes[:, 0], rows)
    at = owner.clamp(min=0)
    place = torch.arange(rows, device=a.device) - expert_offsets.long()[at]
    place = (place + blockscale_offsets.long()[at]).clamp(0, max(sfa.shape[0] - 1, 0))
    own = nvfp4.untiled(sfa.view(torch.uint8), sfa.shape[0], scale_columns)[place]
    x = a.float() * e8m0.decode(own).repeat_interleave(BLOCK, dim=1)
    scales = nvfp4.untiled(
        sfb.view(torch.uint8).transpose(1, 2).contiguous(), outputs, scale_columns
    )

    def matrix(expert: int) -> Tensor:
        factor = e8m0.decode(scales[expert]).repeat_interleave(BLOCK, dim=1)
        return b[expert].float() * factor.t()

    output.copy_(products(output, x, owner, matrix, b.shape[0]))


def _check_experts(name: str, call: Call, like: Tensor) -> int:
    expect(name, "problem_sizes", call.problem_sizes, (None, 3), INT32, like)
    experts = call.problem_sizes.shape[0]
    for argument in ("expert_offsets", "blockscale_offsets"):
        offsets = getattr(call, argument)
        expect(name, argument, offsets, 1, INT32, like)
        if offsets.shape[0] != experts:
            expect(name, argument, offsets, (experts + 1,), INT32, like)
    return experts


def _expect_blocks(name: str, argument: str, x: Tensor) -> tuple[int, int]:
    """(R, S') of rows [R, K]."""
    if not x.shape[1] or x.shape[1] % BLOCK:
        refuse(name, argument, f"has shape {list(x.shape)}, no rows of blocks of {BLOCK}")
    return x.shape[0], nvfp4.padded(0, x.shape[1] // BLOCK)[1]


def _expect_tiles(name: str, argument: str, rows: int) -> None:
    if rows % nvfp4.TILE_ROWS:
        refuse(name, argument, f"has {rows} rows of scales, not a multiple of {nvfp4.TILE_ROWS}")


@es_sm100_mxfp8_blockscaled_grouped_quant.check
def _(call: Call) -> None:
    name, x = "es_sm100_mxfp8_blockscaled_grouped_quant", call.input
    expect(name, "input", x, 2, FLOATS)
    _, scale_columns = _expect_blocks(name, "input", x)
    _check_experts(name, call, x)
    expect(name, "quant_output", call.quant_output, x.shape, (E4M3,), x)
    expect(name, "scale_factor", call.scale_factor, (None, scale_columns), (torch.uint8,), x, -1)
    _expect_tiles(name, "scale_factor", call.scale_factor.shape[0])


@es_sm100_mxfp8_blockscaled_grouped_mm.check
def _(call: Call) -> None:
    name, a = "es_sm100_mxfp8_blockscaled_grouped_mm", call.a
    expect(name, "a", a, 2, (E4M3,))
    rows, scale_columns = _expect_blocks(name, "a", a)
    experts = _check_experts(name, call, a)
    expect(name, "b", call.b, (experts, a.shape[1], None), (E4M3,), a)
    outputs = call.b.shape[2]
    expect(name, "output", call.output, (rows, outputs), FLOATS, a)
    expect(name, "sfa", call.sfa, (None, scale_columns), SCALES, a, -1)
    _expect_tiles(name, "sfa", call.sfa.shape[0])
    scale_rows = nvfp4.padded(outputs, 0)[0]
    expect(name, "sfb", call.sfb, (experts, scale_columns, scale_rows), SCALES, a)
