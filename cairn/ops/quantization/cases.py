"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

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
from cairn.ops.testing import Cases, Make


@per_token_quant_int8.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = make.randn(5, 1000, dtype=dtype, scale=3.0)
        x[3] = 0.0
        yield make.args(x)
        yield make.args(make.randn(2, 3, 63, dtype=dtype))
    # Midpoints, which round to even.
    yield make.args((make.arange(255) - 127).float().repeat(2, 1) * make.tensor([[1.0], [0.5]]))
    yield make.args(make.randn(4, 128, dtype=torch.bfloat16)[:, :64])
    yield make.args(make.randn(0, 7))


@scaled_fp4_experts_quant.cases
def _(make: Make) -> Cases:
    offsets = make.tensor([0, 3, 3, 133], dtype=torch.int32)
    starts = make.tensor([0, 128, 128, 384], dtype=torch.int32)
    scales = make.tensor([1.0, 20.0, 300.0])
    for dtype in (torch.bfloat16, torch.float32):
        yield make.args(make.randn(136, 80, dtype=dtype), scales, offsets, starts, 1)
    order = make.randint(0, 68, 136, dtype=torch.int32)
    yield make.args(make.randn(68, 16), scales, offsets, starts, 2, order)
    # Experts in any order, and rows after the last expert's that belong to none.
    ends = make.tensor([0, 2, 2, 5], dtype=torch.int32)
    anywhere = make.tensor([256, 0, 128, 0], dtype=torch.int32)
    for index in (torch.int32, torch.int64):
        order = make.randint(0, 3, 6, dtype=index)
        yield make.args(make.randn(3, 70)[:, :64], scales, ends, anywhere, 2, order)
    yield make.args(make.randn(0, 16), scales, offsets * 0, starts * 0, 8)


@scaled_fp4_grouped_quant.cases
def _(make: Make) -> Cases:
    mask = make.tensor([5, 0, 3], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        x = make.randn(3, 5, 64, dtype=dtype)
        yield make.args(x, make.tensor([1.0, 50.0, 300.0]), mask)
    strided = make.randn(3, 9, 160)[:, 1:6, :80]
    yield make.args(strided, make.tensor([1.0, -50.0, float("inf")]), mask)
    yield make.args(make.randn(1, 0, 16), make.tensor([1.0]), mask[1:2])
    yield make.args(make.randn(0, 5, 16), make.empty(0), mask[:0])


@silu_and_mul_scaled_fp4_grouped_quant.cases
def _(make: Make) -> Cases:
    mask = make.tensor([2, 130], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        x = make.randn(2, 130, 2 * 32, dtype=dtype)
        yield make.args(x, make.tensor([1.0, 50.0]), mask)
    few = make.tensor([9, -1], dtype=torch.int32)
    for dtype in (torch.float16, torch.float32):
        yield make.args(make.randn(2, 3, 2 * 80, dtype=dtype), make.tensor([20.0, 1.0]), few)
    yield make.args(make.randn(1, 0, 32), make.tensor([1.0]), mask[:1] * 0)


@scaled_fp4_quant.cases
def _(make: Make) -> Cases:
    for dtype in (torch.bfloat16, torch.float32):
        yield make.args(make.randn(7, 48, dtype=dtype, scale=3.0), make.tensor([100.0]))
    yield make.args(make.randn(2, 65, 16, dtype=torch.float16), make.tensor([7.0]))
    yield make.args(make.full((2, 32), 0.0), make.tensor([1.0]))
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    yield make.args(make.tensor([*halves, *(-half for half in halves)]), make.tensor([1.0]))
    beyond = make.tensor([[float("inf"), -1e30, 0.0, -0.0] * 8, [1e-30] * 32])
    yield make.args(beyond, make.tensor([1e6]))
    yield make.args(make.randn(3, 5000, dtype=torch.bfloat16)[:, :4112], make.tensor([600.0]))
    yield make.args(make.randn(0, 64), make.tensor([1.0]))


@suggest_nvfp4_global_scale.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(3, 100, dtype=dtype))
        yield make.args(make.randn(5, 70, 100, dtype=dtype, scale=30.0))
    yield make.args(make.tensor([1.0, -float("inf")]))
    yield make.args(make.full((4,), 0.0))
    yield make.args(make.randn(0))


@sgl_per_tensor_quant_fp8.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((7, 63), (3, 7, 1000)):
            x = make.randn(*shape, dtype=dtype, scale=30.0)
            codes = make.empty(*shape, dtype=E4M3)
            yield make.args(x, codes, make.empty(1), False)
            yield make.args(x, codes, make.tensor([0.07]), True)
    yield make.args(make.full((9,), 0.0), make.empty(9, dtype=E4M3), make.empty(1), False)
    yield make.args(make.randn(0, 4), make.empty(0, 4, dtype=E4M3), make.empty(1), False)
    yield make.args(make.randn(5, 8)[:, ::2], make.empty(5, 4, dtype=E4M3), make.empty(1), False)


def column_major(make: Make, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A column-major [rows, columns] tensor whose columns are padded to a multiple of 4 rows."""
    return make.empty(columns, -(-rows // 4) * 4, dtype=dtype).t()[:rows]


@sgl_per_token_group_quant_8bit.cases
def _(make: Make) -> Cases:
    words = torch.int32
    for dtype, codes in (
        (torch.float32, E4M3),
        (torch.bfloat16, E4M3),
        (torch.float32, torch.int8),
        (torch.float16, torch.int8),
    ):
        x = make.randn(7, 6 * 32, dtype=dtype, scale=5.0)
        x[2, 32:64] = 0.0
        into = make.empty(7, 6 * 32, dtype=codes)
        yield make.args(x, into, make.empty(7, 6), 32)
        yield make.args(x, into, column_major(make, 7, 4, torch.float32), 48, 1e-4, -100.0, 100.0)
        yield make.args(x, into, column_major(make, 7, 2, words), 32, scale_ue8m0=True)
    wide = make.randn(3, 2 * 256, dtype=torch.bfloat16)
    power = {"scale_ue8m0": True}
    yield make.args(wide[:, :256], make.empty(3, 256, dtype=E4M3), make.empty(3, 2), 128, **power)
    experts = make.randn(3, 5, 2 * 96)
    used = make.tensor([5, 0, 2], dtype=words)
    own = {"masked_m": used, "fuse_silu_and_mul": True}
    zeros = torch.zeros_like(experts[..., :96], dtype=E4M3)
    yield make.args(experts, zeros, make.full((3, 5, 3), 0.0), 32, **own)
    exponents = make.full((3, 1, 8), 0.0, dtype=words).transpose(1, 2)[:, :5]
    yield make.args(experts, zeros, exponents, 32, **own, scale_ue8m0=True)
    gate = make.randn(5, 2 * 63)
    fused = {"fuse_silu_and_mul": True}
    yield make.args(gate, make.empty(5, 63, dtype=E4M3), make.empty(5, 3), 21, **fused)
    yield make.args(make.randn(0, 64), make.empty(0, 64, dtype=E4M3), make.empty(0, 1), 64)


@sgl_per_token_quant_fp8.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, width in ((7, 63), (5, 1000), (1, 4100)):
            x = make.randn(rows, width, dtype=dtype, scale=3.0)
            x[0] = 0.0
            yield make.args(x, make.empty(rows, width, dtype=E4M3), make.empty(rows, 1))
    x = make.randn(6, 200, dtype=torch.bfloat16)[:, :100]
    yield make.args(x, make.empty(6, 100, dtype=E4M3), make.empty(6))
    spare = make.full((8, 100), 0, torch.uint8).view(E4M3), make.full((9, 1), -1.0)
    yield make.args(make.randn(6, 100), *spare)
    yield make.args(make.randn(0, 16), make.empty(0, 16, dtype=E4M3), make.empty(0))
