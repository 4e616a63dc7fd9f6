"""Grouped products with MXFP8, NVFP4 and 4-bit weights against float64, with independent
packers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
COUNTS = (3, 0, 130)


def blocked(scales: Tensor) -> Tensor:
    """Scales [M, S] uint8 in the tiled layout, element by element."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    for m in range(scales.shape[0]):
        for s in range(scales.shape[1]):
            tile = m // 128 * (columns // 4) * 512 + s // 4 * 512
            out[tile + m % 32 * 16 + m % 128 // 32 * 4 + s % 4] = scales[m, s]
    return out.view(rows, columns)


def sizes_of(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = torch.tensor([(m, n, k) for m in COUNTS], dtype=torch.int32)
    return sizes, torch.tensor([0, 3, 3], dtype=torch.int32), torch.tensor([0, 128, 128]).int()


def test_mxfp8_of_sorted_rows() -> None:
    torch.manual_seed(0)
    k, n, rows = 96, 40, sum(COUNTS)
    sizes, begins, places = sizes_of(n, k)
    x = torch.randn(rows, k, dtype=torch.bfloat16) * torch.logspace(-6, 6, rows)[:, None]
    x = x.bfloat16()
    x[1, 32:64] = 0
    codes, scales = torch.empty(rows, k).to(E4M3), torch.zeros(384, 4, dtype=torch.uint8)
    ops.es_sm100_mxfp8_blockscaled_grouped_quant(x, sizes, begins, places, codes, scales)
    exponents = torch.zeros(rows, 3, dtype=torch.uint8)
    for row in range(rows):
        for block in range(3):
            numbers = x[row, 32 * block : 32 * block + 32].float()
            amax = float(numbers.abs().max())
            if not amax:
                continue
            mantissa, exponent = math.frexp(amax / 448)
            e = exponent - (mantissa == 0.5)
            exponents[row, block] = e + 127
            wanted = (numbers * 2.0**-e).to(E4M3)
            assert torch.equal(codes[row, 32 * block : 32 * block + 32].float(), wanted.float())
    used = exponents.clone()
    used[1, 1] = scales.view(-1)[16 + 1]  # of zeros: any
    assert torch.equal(scales[:128], blocked(used[:3]))
    assert torch.equal(scales[128:], blocked(used[3:]))
    weight = torch.randn(3, n, k).to(E4M3)
    of_weight = torch.randint(120, 130, (3, n, 3), dtype=torch.uint8)
    stored = torch.stack([blocked(one) for one in of_weight])
    out = torch.full((rows, n), torch.nan)
    ops.es_sm100_mxfp8_blockscaled_grouped_mm(
        out, codes, weight.transpose(1, 2), scales, stored.transpose(1, 2), sizes, begins, places
    )
    a = codes.double() * (2.0 ** (used.double() - 127)).repeat_interleave(32, 1)
    w = weight.double() * (2.0 ** (of_weight.double() - 127)).repeat_interleave(32, 2)
    wanted = torch.cat([a[:3] @ w[0].T, a[3:] @ w[2].T])
    difference = 1 - 2 * (out * wanted).sum() / (out.double().square() + wanted.square()).sum()
    assert abs(float(difference)) < 1e-9


def fp4(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of codes, block scales, and the numbers they stand for."""
    codes, scale = torch.randint(0, 16, (rows, k)), torch.rand(rows, k // 16).to(E4M3)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    numbers = E2M1[codes] * scale.double().repeat_interleave(16, 1)
    return pairs, scale.view(torch.uint8), numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_fp4_mm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    (a, a_scale, x), (b, b_scale, w) = fp4(130, 80), fp4(24, 80)
    stored = [blocked(scale).view(E4M3) for scale in (a_scale, b_scale)]
    got = ops.cutlass_scaled_fp4_mm(a, b, *stored, torch.tensor([0.25]), dtype)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), 0.25 * x @ w.T, rtol=unit, atol=1e-5)


def test_fp4_of_sorted_rows() -> None:
    torch.manual_seed(0)
    sizes, begins, places = sizes_of(24, 80)
    a, a_scale, x = fp4(sum(COUNTS), 80)
    experts = [fp4(24, 80) for _ in COUNTS]
    stored = torch.cat([blocked(a_scale[:3]), blocked(a_scale[3:])]).view(E4M3)
    matrices = torch.stack([one[0] for one in experts])
    scales = torch.stack([blocked(one[1]) for one in experts]).view(E4M3)
    alphas = torch.tensor([0.5, 1.0, 2.0])
    params = {"problem_sizes": sizes, "expert_offsets": begins, "blockscale_offsets": places}
    got = ops.cutlass_fp4_group_mm(a, matrices, stored, scales, alphas, torch.float32, params)
    wanted = torch.cat([0.5 * x[:3] @ experts[0][2].T, 2 * x[3:] @ experts[2][2].T])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadArgument, match="`params` lacks expert_offsets"):
        del params["expert_offsets"]
        ops.cutlass_fp4_group_mm(a, matrices, stored, scales, alphas, torch.float32, params)


@pytest.mark.parametrize("k", [128, 512])
def test_w4a8_of_sorted_rows(k: int) -> None:
    torch.manual_seed(0)
    n, groups = 24, k // 128
    ids = torch.tensor([[0, 2], [2, -1], [2, 0], [0, 2]], dtype=torch.int32)
    offsets, first, second = torch.empty(4).int(), torch.empty(3, 3).int(), torch.empty(3, 3).int()
    rows, place = torch.full((8,), -1).int(), torch.full((8,), -1).int()
    ops.get_cutlass_w4a8_moe_mm_data(ids, offsets, first, second, rows, place, 3, n, k)
    assert offsets.tolist() == [0, 3, 3, 7]
    assert first.tolist() == [[2 * n, m, k] for m in (3, 0, 4)]
    assert second.tolist() == [[k, m, n] for m in (3, 0, 4)]
    assert rows[:7].tolist() == [0, 2, 3, 0, 1, 2, 3]
    assert place.tolist() == [0, 3, 4, -1, 5, 1, 2, 6]
    codes = torch.randint(-8, 8, (3, n, k))
    pairs = (codes[..., ::2] & 15 | (codes[..., 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    scale, x = torch.rand(3, n, groups).bfloat16(), torch.randn(7, k).to(E4M3)
    together = 4 if groups % 4 == 0 else 1
    stored = torch.empty(3, groups // together, n * together, dtype=torch.bfloat16)
    for row in range(n):
        for group in range(groups):
            at = group // together, row * together + group % together
            stored[:, at[0], at[1]] = scale[:, row, group]
    out, none = torch.full((7, n), torch.nan), (None,) * 4
    ops.cutlass_w4a8_moe_mm(out, x, pairs, torch.tensor([0.5]), stored, offsets, first, *none)
    w = codes.double() * scale.double().repeat_interleave(128, 2) * 0.5
    wanted = torch.cat([x[:3].double() @ w[0].T, x[3:].double() @ w[2].T])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)
