"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.moe.apply_shuffle_mul_sum import apply_shuffle_mul_sum
from cairn.ops.moe.cutlass_w4a8 import cutlass_w4a8_moe_mm, get_cutlass_w4a8_moe_mm_data
from cairn.ops.moe.expert_specialization import (
    es_fp8_blockwise_scaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_mm,
    es_sm100_mxfp8_blockscaled_grouped_quant,
)
from cairn.ops.moe.fp4_mm import cutlass_scaled_fp4_mm, fp4_group_mm
from cairn.ops.moe.fp8_blockwise_scaled_grouped_mm import fp8_blockwise_scaled_grouped_mm
from cairn.ops.moe.fused_experts import fused_experts
from cairn.ops.moe.grouped_topk import biased_grouped_topk, grouped_topk, grouped_topk_softmax
from cairn.ops.moe.hash_topk import hash_topk
from cairn.ops.moe.kimi_k2_moe_fused_gate import kimi_k2_moe_fused_gate
from cairn.ops.moe.moe_align_block_size import moe_align_block_size
from cairn.ops.moe.moe_fused_gate import moe_fused_gate
from cairn.ops.moe.moe_sum import moe_sum, moe_sum_reduce
from cairn.ops.moe.prepare_moe_input import prepare_moe_input
from cairn.ops.moe.shuffle_rows import shuffle_rows
from cairn.ops.moe.topk_sigmoid import topk_sigmoid
from cairn.ops.moe.topk_softmax import topk_softmax
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.testing import Arguments, Cases, Make


@apply_shuffle_mul_sum.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        x, out = make.randn(15, 24, dtype=dtype), make.empty(5, 24, dtype=dtype)
        order = make.randint(0, 15, 15, dtype=torch.int32)
        yield make.args(x, out, order, make.randn(15, dtype=dtype))
        yield make.args(x, out, order, None)
    yield make.args(make.randn(6, 8), make.empty(3, 8), make.randint(0, 6, 6), make.randn(3, 2))
    yield make.args(make.randn(0, 8), make.empty(0, 8), make.randint(0, 1, 0), None)


@fused_experts.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        w1, w2 = make.randn(6, 32, 24, dtype=dtype), make.randn(6, 24, 16, dtype=dtype)
        w1, w2 = w1 / 5, w2 / 4
        x, ids = make.randn(9, 24, dtype=dtype), make.randint(-1, 6, 9, 3, dtype=torch.int32)
        yield make.args(x, w1, w2, make.rand(9, 3), ids)
        yield make.args(x[:1], w1, w2, make.rand(1, 2), ids[:1, :2].long(), "gelu_tanh", True, 2.5)
        yield make.args(x[:3], w1, w2, make.rand(3, 3), ids[:3].abs(), swiglu_limit=0.5)
    yield make.args(x[:2], w1, w2, make.rand(2, 2), make.full((2, 2), -1, torch.int32), "gelu")
    none = make.randint(0, 6, 0, 2)
    yield make.args(x[:0], w1, w2, make.rand(0, 2), none)
    for tokens, width, inner, dtype in (
        (9, 128, 128, torch.float32),
        (2, 256, 384, torch.float32),
        (2, 160, 192, torch.float32),
        (40, 256, 128, torch.bfloat16),
        (200, 384, 256, torch.bfloat16),
    ):
        w1, first = codes_in_blocks(make, 2, 2, inner, width)
        w2, second = codes_in_blocks(make, 2, 1, width, inner)
        x, ids = make.randn(tokens, width, dtype=dtype), make.randint(0, 2, tokens, 2)
        given = {"w1_scale": first, "w2_scale": second}
        yield make.args(x, w1, w2, make.rand(tokens, 2), ids, **given)
    if make.device != "cpu":
        # As many rows per expert as large tiles have.
        x, ids = make.randn(500, 256, dtype=torch.bfloat16), make.randint(0, 3, 500, 2)
        w1 = make.randn(3, 2 * 136, 256, dtype=torch.bfloat16, scale=0.06)
        w2 = make.randn(3, 256, 136, dtype=torch.bfloat16, scale=0.08)
        yield make.args(x, w1, w2, make.rand(500, 2), ids)


def codes_in_blocks(
    make: Make, experts: int, parts: int, rows: int, width: int
) -> tuple[Tensor, Tensor]:
    """e4m3 matrices [experts, parts * rows, width] and their block scales, such that products with
    standard normal rows have a variance of about 1."""
    codes = make.randn(experts, parts * rows, width, scale=60.0).to(E4M3)
    shape = (experts, parts * blocks.count(rows), blocks.count(width))
    return codes, (0.5 + make.rand(*shape)) / 60.0 * width**-0.5


@grouped_topk.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(9, 32, dtype=dtype), make.randn(32), 8, 3, 6, True, 2.5)
    yield make.args(make.randint(0, 2, 9, 12).float(), make.full((12,), 0.5), 1, 1, 4, False, 1.0)
    x, rule = make.randn(9, 13), (1, 1, 4, True, 2.5)
    yield make.args(x[:, :12], make.randn(12), *rule, shared=2, scoring_func="sqrtsoftplus")
    yield make.args(x[:, :12], make.randn(12), *rule, shared=1, shared_gate=x[:, 12:])


@biased_grouped_topk.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(9, 32, dtype=dtype), make.randn(32), 6, True, 8, 3)
    yield make.args(make.randn(9, 12), make.randn(12), 4, False, 12, 5, 2.5)


@grouped_topk_softmax.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(9, 32, dtype=dtype), 6, True, 8, 3)
    yield make.args(make.randint(0, 2, 9, 12).float(), 4, False, 6, 2)


@kimi_k2_moe_fused_gate.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 384, dtype=dtype), make.randn(384), 8, True, 2.8, True)
        yield make.args(make.randn(7, 12, dtype=dtype), make.randn(12), 3, False, 2.8, True)
    yield make.args(make.randn(0, 12), make.randn(12), 3)


def aligned_inputs(make: Make, ids: Tensor, experts: int, block: int, pad: bool) -> Arguments:
    """Arguments of `moe_align_block_size`, with outputs of the smallest allowed size."""
    most = ids.numel() + (experts + 1) * (block - 1)
    return make.args(
        ids,
        experts + 1,
        block,
        make.empty(most, dtype=torch.int32),
        make.empty(-(-most // block), dtype=torch.int32),
        make.empty(1, dtype=torch.int32),
        make.empty(experts + 2, dtype=torch.int32),
        pad,
    )


@moe_align_block_size.cases
def _(make: Make) -> Cases:
    yield aligned_inputs(make, make.randint(-1, 8, 13, 3, dtype=torch.int32), 8, 4, True)
    yield aligned_inputs(make, make.randint(0, 5, 40, 2), 5, 16, False)
    yield aligned_inputs(make, make.full((3, 2), -1, torch.int32), 4, 8, True)
    yield aligned_inputs(make, make.randint(0, 64, 1, 8, dtype=torch.int32), 64, 1, False)
    yield aligned_inputs(make, make.randint(0, 4, 0, 2), 4, 8, True)


@moe_fused_gate.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        x, bias = make.randn(9, 32, dtype=dtype), make.randn(32, dtype=dtype)
        yield make.args(x, bias, 4, 2, 6)
        yield make.args(x, bias, 8, 3, 6, 2, 2.5, True)
    yield make.args(x, bias, 1, 1, 4, scoring_func="sqrtsoftplus", renormalize=False)
    yield make.args(make.randint(0, 2, 9, 12).float(), make.full((12,), 0.5), 6, 3, 4)
    yield make.args(make.randn(0, 8), make.randn(8), 4, 2, 3)


@moe_sum.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 3, 33, dtype=dtype), make.empty(5, 33, dtype=dtype))
    yield make.args(make.randn(0, 3, 8), make.empty(0, 8))
    yield make.args(make.randn(2, 0, 8), make.empty(2, 8))


@moe_sum_reduce.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 3, 33, dtype=dtype), make.empty(5, 33, dtype=dtype), 2.5)
    yield make.args(make.randn(4, 1, 8), make.empty(4, 8))


def prepared_inputs(make: Make, ids: Tensor, experts: int, scales: bool) -> Arguments:
    """Arguments of `prepare_moe_input`; `scales`: with offsets of block scales."""

    def words(*shape: int) -> Tensor:
        return make.empty(*shape, dtype=torch.int32)

    return make.args(
        ids,
        words(experts + 1),
        words(experts, 3),
        words(experts, 3),
        words(ids.numel()),
        words(ids.numel()),
        experts,
        96,
        64,
        words(experts + 1) if scales else None,
    )


@prepare_moe_input.cases
def _(make: Make) -> Cases:
    yield prepared_inputs(make, make.randint(0, 8, 13, 3, dtype=torch.int32), 8, True)
    yield prepared_inputs(make, make.randint(-1, 6, 200, 2), 5, False)
    yield prepared_inputs(make, make.randint(0, 4, 0, 2), 4, True)


@shuffle_rows.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        order = make.randint(0, 5, 9, dtype=torch.int32)
        yield make.args(make.randn(5, 24, dtype=dtype), order, [9, 24])
    codes = make.randint(0, 255, 4, 16, dtype=torch.int32).to(torch.uint8)
    yield make.args(codes, make.randint(0, 4, 6), [6, 16])
    yield make.args(make.randn(5, 8), make.randint(0, 5, 0), [0, 8])


@topk_sigmoid.cases
def _(make: Make) -> Cases:
    def outputs(tokens: int, topk: int) -> tuple[Tensor, Tensor]:
        return make.empty(tokens, topk), make.empty(tokens, topk, dtype=torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(*outputs(7, 3), make.randn(7, 12, dtype=dtype))
        yield make.args(*outputs(5, 8), make.randn(5, 60, dtype=dtype), True, make.randn(60))
    yield make.args(*outputs(9, 4), make.randint(0, 3, 9, 16).float(), True)
    yield make.args(*outputs(0, 2), make.randn(0, 8))


@topk_softmax.cases
def _(make: Make) -> Cases:
    def outputs(tokens: int, topk: int) -> tuple[Tensor, Tensor]:
        return make.empty(tokens, topk), make.empty(tokens, topk, dtype=torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(*outputs(7, 3), make.randn(7, 12, dtype=dtype))
        yield make.args(*outputs(5, 8), make.randn(5, 60, dtype=dtype), True, 5.0, make.randn(60))
    # Many ties.
    yield make.args(*outputs(9, 4), make.randint(0, 3, 9, 16).float(), True)
    yield make.args(*outputs(0, 2), make.randn(0, 8))
    x = make.randn(5, 13)
    yield make.args(*outputs(5, 6), x[:, :12], True, shared=2)
    yield make.args(*outputs(5, 4), x[:, :12], shared=1, shared_gate=x[:, 12:])


def grouped_mm_args(
    out: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    problems: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """Arguments of `fp8_blockwise_scaled_grouped_mm`, of which pointers and strides are None.

    Args:
        out: [M, N].
        a: codes [M, K] and scales.
        b: codes [E, N, K] and scales.
        problems: sizes [E, 3] and offsets [E] of the groups.
    """
    (x, x_scale), (weight, weight_scale) = a, b
    columns = weight.transpose(1, 2), x_scale, weight_scale.transpose(1, 2)
    return out, *(None,) * 5, x, *columns, *(None,) * 5, *problems, None


@fp8_blockwise_scaled_grouped_mm.cases
def _(make: Make) -> Cases:
    for counts, width, outputs, dtype in (
        ((3, 0, 5), 128, 48, torch.float32),
        ((1, 20), 160, 136, torch.float32),
        ((150, 0, 90, 130), 256, 144, torch.bfloat16),
    ):
        experts, rows = len(counts), sum(counts) + 2
        weight, scale = codes_in_blocks(make, experts, 1, outputs, width)
        x, own = blocks.quantized(make.randn(rows, width))
        sizes = make.tensor([(m, outputs, width) for m in counts], dtype=torch.int32)
        ends = make.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        out = make.empty(rows, outputs, dtype=dtype)
        problems = sizes, ends - sizes[:, 0]
        yield make.args(*grouped_mm_args(out, (x, own), (weight, scale), problems))


@es_fp8_blockwise_scaled_grouped_mm.cases
def _(make: Make) -> Cases:
    for counts, dtype in (((3, 0, 5), torch.float32), ((20, 40, 3), torch.bfloat16)):
        rows = sum(counts) + 2
        weight, scale = codes_in_blocks(make, 3, 1, 48, 128)
        x, own = blocks.quantized(make.randn(rows, 128))
        sizes, begins = _sizes(make, counts, 48, 128)
        out = make.empty(rows, 48, dtype=dtype)
        given = (out, x, weight.transpose(1, 2), own, scale.transpose(1, 2), None, None, None)
        yield make.args(*given, sizes, begins, None)


def _sizes(make: Make, counts: tuple[int, ...], n: int, k: int) -> tuple[Tensor, Tensor]:
    """problem_sizes [E, 3] and first rows [E] of experts with `counts` rows."""
    sizes = make.tensor([(m, n, k) for m in counts], dtype=torch.int32)
    ends = make.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sizes, ends - sizes[:, 0]


@es_sm100_mxfp8_blockscaled_grouped_quant.cases
def _(make: Make) -> Cases:
    places = make.tensor([0, 128, 128], torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        sizes, begins = _sizes(make, (3, 0, 5), 48, 160)
        x = make.randn(10, 160, dtype=dtype)
        x[1, 32:64] = 0
        codes = make.randint(0, 99, 10, 160, dtype=torch.uint8).view(E4M3)
        scales = make.randint(0, 255, 384, 8, dtype=torch.uint8)
        yield make.args(x, sizes, begins, places, codes, scales)


@es_sm100_mxfp8_blockscaled_grouped_mm.cases
def _(make: Make) -> Cases:
    places = make.tensor([0, 128, 128], torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        sizes, begins = _sizes(make, (3, 0, 5), 24, 160)
        x, weight = make.randn(10, 160).to(E4M3), make.randn(3, 24, 160).to(E4M3)
        of_x = make.randint(122, 126, 384, 8, dtype=torch.uint8)
        of_weight = make.randint(122, 126, 3, 128, 8, dtype=torch.uint8)
        given = (make.randn(10, 24, dtype=dtype), x, weight.transpose(1, 2), of_x)
        yield make.args(*given, of_weight.transpose(1, 2), sizes, begins, places)


@get_cutlass_w4a8_moe_mm_data.cases
def _(make: Make) -> Cases:
    for ids, experts in ((make.randint(-1, 6, 20, 2), 5), (make.randint(0, 4, 0, 2), 4)):
        yield make.args(*prepared_inputs(make, ids, experts, False).args[:9])


@cutlass_w4a8_moe_mm.cases
def _(make: Make) -> Cases:
    for dtype, width in ((torch.float32, 128), (torch.bfloat16, 512)):
        sizes, begins = _sizes(make, (3, 0, 5), 24, width)
        swapped = torch.stack((sizes[:, 1], sizes[:, 0], sizes[:, 2]), dim=1)
        together = 4 if width % 512 == 0 else 1
        scales = make.rand(3, width // 128 // together, 24 * together, dtype=torch.bfloat16) / 50
        weight = make.randint(-128, 128, 3, 24, width // 2, dtype=torch.int8)
        x, out = make.randn(10, width).to(E4M3), make.randn(10, 24, dtype=dtype)
        given = (out, x, weight, make.tensor([0.5]), scales, begins, swapped)
        yield make.args(*given, None, None, None, None)


def _fp4(make: Make, *shape: int) -> Tensor:
    return make.randint(0, 256, *shape, dtype=torch.uint8)


@cutlass_scaled_fp4_mm.cases
def _(make: Make) -> Cases:
    of_x, of_weight = make.rand(128, 4).to(E4M3), make.rand(256, 4).to(E4M3)
    for dtype in (torch.float32, torch.bfloat16):
        given = (_fp4(make, 5, 24), _fp4(make, 130, 24), of_x, of_weight, make.tensor([0.25]))
        yield make.args(*given, dtype)


@fp4_group_mm.cases
def _(make: Make) -> Cases:
    places = make.tensor([0, 128, 128, 256], torch.int32)
    of_x, of_weight = make.rand(512, 4).to(E4M3), make.rand(3, 128, 4).to(E4M3)
    for dtype in (torch.float32, torch.bfloat16):
        sizes, begins = _sizes(make, (3, 0, 5), 24, 48)
        given = (_fp4(make, 10, 24), _fp4(make, 3, 24, 24), of_x, of_weight, make.rand(3))
        yield make.args(*given, dtype, sizes, begins, places)


@hash_topk.cases
def _(make: Make) -> Cases:
    table = make.randint(0, 12, 30, 3, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(7, 12, dtype=dtype, scale=5), table, make.randint(0, 30, 7), 1.5)
    yield make.args(make.randn(0, 12), table, make.randint(0, 30, 0))
    x, tokens = make.randn(7, 13), make.randint(0, 30, 7)
    yield make.args(x[:, :12], table, tokens, 2.5, shared=2)
    yield make.args(x[:, :12], table, tokens, shared=1, shared_gate=x[:, 12:])
