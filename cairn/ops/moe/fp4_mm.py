"""Products in NVFP4 (`cairn.ops.quantization.nvfp4`), computed from dequantised operands: only
Blackwell has tensor cores for NVFP4."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.moe.sorted_rows import owners, products
from cairn.ops.quantization import nvfp4
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op

BYTES = (torch.uint8,)
PARAMS = ("problem_sizes", "expert_offsets", "blockscale_offsets")


@op
def cutlass_scaled_fp4_mm(
    a: Tensor,
    b: Tensor,
    block_scale_a: Tensor,
    block_scale_b: Tensor,
    alpha: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """alpha * x @ w.T in float32, rounded once, where x and w are the dequantised a and b.

    Args:
        a: [M, K / 2] uint8, pairs of codes; K a multiple of 16.
        b: [N, K / 2] uint8.
        block_scale_a, block_scale_b: [M', S'], [N', S'] float8_e4m3fn in tiles, as from
            `scaled_fp4_quant`.
        alpha: one float32, usually the inverse of the product of both global scales.
        out_dtype: float32, bfloat16 or float16.
    Returns:
        [M, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x, w = _values(a, block_scale_a), _values(b, block_scale_b)
    return (x @ w.t() * alpha.reshape(())).to(out_dtype)


@op
def fp4_group_mm(
    a_fp4: Tensor,
    b_fp4: Tensor,
    a_blockscale: Tensor,
    b_blockscale: Tensor,
    alphas: Tensor,
    out_dtype: torch.dtype,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
) -> Tensor:
    """`cutlass_scaled_fp4_mm` of each expert's rows; see `cutlass_fp4_group_mm`."""
    rows, half = a_fp4.shape
    blocks = 2 * half // nvfp4.BLOCK
    owner = owners(expert_offsets, problem_sizes[:, 0], rows)
    at = owner.clamp(min=0)
    place = torch.arange(rows, device=a_fp4.device) - expert_offsets.long()[at]
    place = (place + blockscale_offsets.long()[at]).clamp(0, max(a_blockscale.shape[0] - 1, 0))
    scale = nvfp4.untiled(a_blockscale, a_blockscale.shape[0], blocks).float()[place]
    x = nvfp4.unpacked(a_fp4) * scale.repeat_interleave(nvfp4.BLOCK, dim=1)

    def matrix(expert: int) -> Tensor:
        return _values(b_fp4[expert], b_blockscale[expert]).t() * alphas[expert]

    out = torch.zeros(rows, b_fp4.shape[1], dtype=out_dtype, device=a_fp4.device)
    return products(out, x, owner, matrix, b_fp4.shape[0])


@fp4_group_mm.front
def cutlass_fp4_group_mm(
    a_fp4: Tensor,
    b_fp4: Tensor,
    a_blockscale: Tensor,
    b_blockscale: Tensor,
    alphas: Tensor,
    out_dtype: torch.dtype,
    params: Mapping[str, Tensor],
) -> Tensor:
    """`cutlass_scaled_fp4_mm` of the rows of each expert with its matrix and its alpha.

    Args:
        a_fp4: [R, K / 2] uint8, rows sorted by expert.
        b_fp4: [E, N, K / 2] uint8.
        a_blockscale: [R', S'] float8_e4m3fn in tiles, as from `scaled_fp4_experts_quant`.
        b_blockscale: [E, N', S'] float8_e4m3fn in tiles.
        alphas: [E] float32.
        out_dtype: float32, bfloat16 or float16.
        params: "problem_sizes" [E, 3] int32, of which only the first column is read,
            "expert_offsets" and "blockscale_offsets" [E] or [E + 1] int32; other entries are
            ignored.
    Returns:
        [R, N]; rows of no expert are 0.
    Raises:
        BadArgument: for another shape, dtype or device, or a missing parameter.
    """
    name = "cutlass_fp4_group_mm"
    if not isinstance(params, Mapping):
        refuse(name, "params", f"is {type(params).__name__} {params!r}, not a mapping")
    missing = [one for one in PARAMS if one not in params]
    if missing:
        refuse(name, "params", f"lacks {', '.join(missing)}")
    sizes = [params[one] for one in PARAMS]
    return fp4_group_mm(a_fp4, b_fp4, a_blockscale, b_blockscale, alphas, out_dtype, *sizes)


def _values(pairs: Tensor, stored: Tensor) -> Tensor:
    """float32 [M, K] of codes [M, K / 2] and scales in tiles."""
    rows, half = pairs.shape
    scale = nvfp4.untiled(stored, rows, 2 * half // nvfp4.BLOCK).float()
    return nvfp4.unpacked(pairs) * scale.repeat_interleave(nvfp4.BLOCK, dim=1)


def _expect_codes(name: str, argument: str, pairs: Tensor, shape: tuple[int | None, ...]) -> None:
    expect(name, argument, pairs, shape, BYTES)
    half = pairs.shape[-1]
    if not half or 2 * half % nvfp4.BLOCK:
        refuse(name, argument, f"has shape {list(pairs.shape)}, no rows of blocks of 16 codes")


def _expect_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        refuse(name, "out_dtype", f"is {dtype}, not float32, bfloat16 or float16")


@cutlass_scaled_fp4_mm.check
def _(call: Call) -> None:
    name, a, b = "cutlass_scaled_fp4_mm", call.a, call.b
    _expect_codes(name, "a", a, (None, None))
    expect(name, "b", b, (None, a.shape[1]), BYTES, a)
    for argument, stored, pairs in (
        ("block_scale_a", call.block_scale_a, a),
        ("block_scale_b", call.block_scale_b, b),
    ):
        shape = nvfp4.padded(pairs.shape[0], 2 * a.shape[1] // nvfp4.BLOCK)
        expect(name, argument, stored, shape, (E4M3,), a, -1)
    expect(name, "alpha", call.alpha, dtypes=(torch.float32,), like=a)
    if call.alpha.numel() != 1:
        refuse(name, "alpha", f"has shape {list(call.alpha.shape)}, not one number")
    _expect_dtype(name, call.out_dtype)


@fp4_group_mm.check
def _(call: Call) -> None:
    name, a, b = "cutlass_fp4_group_mm", call.a_fp4, call.b_fp4
    _expect_codes(name, "a_fp4", a, (None, None))
    expect(name, "b_fp4", b, (None, None, a.shape[1]), BYTES, a)
    experts, outputs, _ = b.shape
    scale_rows, scale_columns = nvfp4.padded(outputs, 2 * a.shape[1] // nvfp4.BLOCK)
    expect(name, "a_blockscale", call.a_blockscale, (None, scale_columns), (E4M3,), a, -1)
    if call.a_blockscale.shape[0] % nvfp4.TILE_ROWS:
        refuse(name, "a_blockscale", f"has shape {list(call.a_blockscale.shape)}, no whole tiles")
    expect(
        name,
        "b_blockscale",
        call.b_blockscale,
        (experts, scale_rows, scale_columns),
        (E4M3,),
        a,
        -1,
    )
    expect(name, "alphas", call.alphas, (experts,), (torch.float32,), a)
    _expect_dtype(name, call.out_dtype)
    expect(name, "problem_sizes", call.problem_sizes, (experts, 3), INT32, a)
    for argument in PARAMS[1:]:
        offsets = getattr(call, argument)
        expect(name, argument, offsets, 1, INT32, a)
        if offsets.shape[0] != experts:
            expect(name, argument, offsets, (experts + 1,), INT32, a)
