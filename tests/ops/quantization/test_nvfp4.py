"""NVFP4 against a table of e2m1 values and the address formula of its scales."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import (
    scaled_fp4_experts_quant,
    scaled_fp4_grouped_quant,
    scaled_fp4_quant,
    silu_and_mul,
    silu_and_mul_scaled_fp4_grouped_quant,
    suggest_nvfp4_global_scale,
)
from tests.ops.quantization.test_quant_8bit import MAGNITUDES
from tests.ops.sampling.variants import runnable_on

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def agree(got: Tensor, x: Tensor) -> bool:
    """Whether each x was rounded to the nearest e2m1 value; near midpoints either neighbour is
    accepted."""
    least = (LEVELS - x.abs()[:, None]).abs().amin(dim=1)
    return bool((((got - x).abs() - least).abs() <= x.abs() / (1 << 20)).all())


def values(codes: Tensor) -> Tensor:
    """Unpacked values of codes in float64, without scales."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long().cpu()
    return LEVELS[nibbles & 7] * (1 - (nibbles >> 3) * 2)


def scale_at(stored: Tensor, row: int, block: int) -> float:
    """Address of a block's scale in the tiled layout."""
    tiles = stored.shape[1] // 4
    at = row // 128 * tiles * 512 + block // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4
    return float(stored.reshape(-1)[at + block % 4].float())


def check_row(x: Tensor, got: Tensor, scale: list[float], g: float) -> None:
    """A row of x against its codes and the scales of its blocks."""
    for block, own in enumerate(scale):
        at = slice(16 * block, 16 * block + 16)
        part = x[at].double()
        wanted = torch.tensor(g * float(part.abs().max()) / 6).float().clamp(max=448)
        assert own == float(wanted.to(torch.float8_e4m3fn)), block
        exact = part * g / own if own else torch.zeros_like(part)
        assert agree(got[at], exact.clamp(-6, 6)), (block, part, got[at])


FORMATS = (torch.bfloat16, torch.float16, torch.float32)
FEW_OF_A_TILE = {0, 1, 2, 9, 30, 31}
"""Rows of each 32 whose codes are looked at one by one; of the others the scales are."""


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *itertools.product([(1, 16), (7, 48), (2, 3, 32)], FORMATS),
        ((130, 80), torch.bfloat16),
        ((1, 4160), torch.float32),
    ],
    ids=str,
)
def test_codes_scales_and_tiles(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if x.numel() > 16:
        x[0, ..., :16] = 0
    rows, blocks = x.numel() // shape[-1], shape[-1] // 16
    flat = x.reshape(rows, -1)
    for name in runnable_on(scaled_fp4_quant, device):
        scale = suggest_nvfp4_global_scale.using(name)(x.to(device))
        assert float(scale) == pytest.approx(448 * 6 / float(x.abs().max()))
        codes, stored = (y.cpu() for y in scaled_fp4_quant.using(name)(x.to(device), scale))
        assert codes.shape == (rows, shape[-1] // 2)
        assert stored.dtype == torch.float8_e4m3fn
        assert stored.shape == (-(-rows // 128) * 128, -(-blocks // 4) * 4)
        found = values(codes)
        for row in range(rows):
            if row % 32 in FEW_OF_A_TILE:
                own = [scale_at(stored, row, block) for block in range(blocks)]
                check_row(flat[row], found[row], own, float(scale))
        used = sum(scale_at(stored, r, b) for r in range(rows) for b in range(blocks))
        assert float(stored.float().sum()) == pytest.approx(used), "what is added must be zero"


def test_ties_go_to_the_even_code_and_beyond_six_is_six(device: str) -> None:
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2], device=device)
    for name in runnable_on(scaled_fp4_quant, device):
        call = scaled_fp4_quant.using(name)
        codes, stored = call(x, torch.ones(1, device=device))
        assert scale_at(stored, 0, 0) == 1.0
        assert values(codes)[0].tolist() == [0, 1, 1, 2, 2, 4, 4, 6] * 2, name
        # A global scale that is too large: block scales are clamped to 448 and values to 6.
        codes, stored = call(-x, torch.full((1,), 1e6, device=device))
        assert scale_at(stored, 0, 0) == 448.0
        assert set(values(codes)[0].tolist()) == {-6}, name


def test_numbers_just_beside_the_middles(device: str) -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = (torch.nextafter(middles, torch.tensor(end)) for end in (0.0, 9.0))
    x = torch.cat([below, above, torch.tensor([6.0, -0.0])]).view(1, 16).to(device)
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 0.5, 1, 1.5, 2, 3, 4, 6, 6, 0]
    for name in runnable_on(scaled_fp4_quant, device):
        codes, _ = scaled_fp4_quant.using(name)(x, torch.ones(1, device=device))
        assert values(codes)[0].tolist() == wanted, name
        assert int(codes[0, 7]) == 0x87, "zero keeps its sign"


def test_every_scale_and_every_middle(device: str) -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
    near = [m * (1 + sign / 1024) for m in middles for sign in (-1, 1)]
    sizes = torch.tensor([float(size) for size in (*MAGNITUDES, *middles, *near, 460, 10**6)])
    x = torch.zeros(sizes.numel(), 16)
    x[:, 5] = -6 * sizes
    wanted = sizes.clamp(max=448).to(torch.float8_e4m3fn)
    for name in runnable_on(scaled_fp4_quant, device):
        for g in (1.0, -1.0):
            one = torch.full((1,), g, device=device)
            _, stored = scaled_fp4_quant.using(name)(x.view(1, -1).to(device), one)
            tiles = stored.cpu().view(torch.uint8).view(-1, 512)[:, :4].flatten()[: sizes.numel()]
            assert torch.equal(tiles, wanted.view(torch.uint8) + 128 * (g < 0)), name


@pytest.mark.parametrize(
    "g, dtype",
    [
        *(
            (g, torch.float32)
            for g in (1e6, 1e-38, 1e-42, 0.0, -3.0, math.inf, -math.inf, math.nan)
        ),
        *((1.0, dtype) for dtype in FORMATS),
    ],
    ids=str,
)
def test_extremes_are_those_of_the_definition(g: float, dtype: torch.dtype, device: str) -> None:
    odd = [math.nan, -math.nan, math.inf, -math.inf, 1e-45, 3e38, -0.0]
    x = torch.randn(len(odd) + 1, 32, generator=torch.Generator().manual_seed(3))
    x[: len(odd), 3] = torch.tensor(odd)
    x[len(odd)] = 0.0
    x[len(odd) - 3, 16:] = 1e-44
    x, scale = x.to(device, dtype), torch.full((1,), g, device=device)
    reference, *others = runnable_on(scaled_fp4_quant, device)
    codes, stored = scaled_fp4_quant.using(reference)(x, scale)
    for name in others:
        got, tiles = scaled_fp4_quant.using(name)(x, scale)
        assert torch.equal(got, codes), name
        torch.testing.assert_close(tiles.float(), stored.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_are_those_of_the_definition(dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(64, 512, generator=g) * torch.logspace(-6, 4, 64).unsqueeze(1)
    x, scale = x.to(device, dtype), torch.full((1,), 30.0, device=device)
    reference, *others = runnable_on(scaled_fp4_quant, device)
    codes, stored = scaled_fp4_quant.using(reference)(x, scale)
    for name in others:
        got, tiles = scaled_fp4_quant.using(name)(x, scale)
        assert torch.equal(got, codes), name
        assert torch.equal(tiles.view(torch.uint8), stored.view(torch.uint8)), name


def test_suggested_scales(device: str) -> None:
    given: list[tuple[list[float], float]] = [
        ([], 1.0),
        ([0.0, -0.0], 1.0),
        ([-2.0, 1.0], 1344.0),
        ([1e-40], math.inf),
        ([math.inf, 1.0], 0.0),
        ([1.0, math.nan, math.inf], math.nan),
    ]
    for name in runnable_on(suggest_nvfp4_global_scale, device):
        call = suggest_nvfp4_global_scale.using(name)
        for numbers, wanted in given:
            got = call(torch.tensor(numbers, device=device))
            assert got.tolist() == pytest.approx([wanted], nan_ok=True), (name, numbers)
        # By more than one program; a GPU's by as many as there are at most, some with two blocks.
        for count in (16385, 70000) if device == "cpu" else (16385, 3 * 10**6):
            for place in (0, count // 2, count - 1):
                x = torch.full((count,), -0.5, device=device)
                x[place] = -4.0
                assert call(x).tolist() == [672.0], (name, count, place)


@pytest.mark.parametrize("gated", [False, True])
def test_groups(gated: bool, device: str) -> None:
    groups, rows, width = 3, 5, 32
    g = torch.Generator().manual_seed(1)
    x = torch.randn(groups, rows, width * (1 + gated), generator=g).half()
    scale, mask = torch.tensor([1.0, 30.0, 200.0]), torch.tensor([5, 0, 2], dtype=torch.int32)
    numbers = x
    if gated:
        gate, up = x.double().chunk(2, -1)
        numbers = (gate / (1 + torch.exp(-gate)) * up).half()
    op = silu_and_mul_scaled_fp4_grouped_quant if gated else scaled_fp4_grouped_quant
    for name in runnable_on(op, device):
        results = op.using(name)(x.to(device), scale.to(device), mask.to(device))
        codes, stored = (y.cpu() for y in results)
        assert codes.shape == (rows, width // 2, groups)
        assert stored.shape == (32, 4, 1, 4, 1, groups)
        assert results[0].permute(2, 0, 1).is_contiguous()
        assert results[1].permute(5, 2, 4, 0, 1, 3).is_contiguous()
        for group in range(groups):
            tiles = stored[..., group].permute(2, 4, 0, 1, 3).reshape(128, 4)
            for row, got in enumerate(values(codes[..., group])):
                own = [scale_at(tiles, row, block) for block in range(width // 16)]
                if row < int(mask[group]):
                    check_row(numbers[group, row], got, own, float(scale[group]))
                else:
                    assert set(got.tolist()) == {0} and set(own) == {0.0}, name


def test_gated_groups_have_the_codes_of_both_ops_one_after_the_other(device: str) -> None:
    """With enough elements that some are rounded differently from the definition."""
    g = torch.Generator().manual_seed(42)
    groups = 4 if device == "cpu" else 32
    x = torch.randn(groups, 100, 4096, generator=g).bfloat16().to(device)
    mask = torch.randint(1, 50, (groups,), generator=g).int().to(device)
    numbers = silu_and_mul(x)
    scale = 448 * 6 / numbers.abs().amax((1, 2)).float()
    codes, scales = silu_and_mul_scaled_fp4_grouped_quant(x, scale, mask)
    expected = scaled_fp4_grouped_quant(numbers, scale, mask)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("mapped", [False, True])
def test_experts(mapped: bool, device: str) -> None:
    g = torch.Generator().manual_seed(2)
    offsets = torch.tensor([0, 3, 3, 140], dtype=torch.int32)
    starts = torch.tensor([256, 128, 0, 384], dtype=torch.int32)
    scale = torch.tensor([1.0, 9.0, 200.0])
    x = torch.randn(71 if mapped else 142, 48, generator=g).bfloat16()
    order = torch.randint(0, 71, (142,), generator=g) if mapped else None
    rows = x if order is None else x[order]
    for name in runnable_on(scaled_fp4_experts_quant, device):
        call = scaled_fp4_experts_quant.using(name)
        given = (y.to(device) for y in (x, scale, offsets, starts))
        results = call(*given, 1 + mapped, None if order is None else order.to(device))
        codes, stored = (y.cpu() for y in results)
        assert codes.shape == (142, 24)
        assert stored.shape == (640, 4)
        found = 0.0
        for row, got in enumerate(values(codes)):
            expert = 0 if row < 3 else 2
            if row >= 140:
                assert set(got.tolist()) == {0}, name
                continue
            place = 256 + row if row < 3 else row - 3
            own = [scale_at(stored, place, block) for block in range(3)]
            if row % 32 in FEW_OF_A_TILE:
                check_row(rows[row], got, own, float(scale[expert]))
            found += sum(own)
        assert float(stored.float().sum()) == pytest.approx(found), "in between must be zero"


def test_refuses() -> None:
    one, x = torch.ones(1), torch.zeros(4, 32)
    with pytest.raises(BadArgument, match="`input`"):
        scaled_fp4_quant(torch.zeros(4, 24), one)
    with pytest.raises(BadArgument, match="`input_global_scale`"):
        scaled_fp4_quant(x, torch.ones(2))
    with pytest.raises(BadArgument, match="`input_tensor`"):
        scaled_fp4_grouped_quant(x, one, one.int())
    with pytest.raises(BadArgument, match="`mask`"):
        scaled_fp4_grouped_quant(x[None], one, one)
    with pytest.raises(BadArgument, match="`expert_map`"):
        scaled_fp4_experts_quant(x, one, *[torch.zeros(2).int()] * 2, 2, torch.zeros(4).int())
    with pytest.raises(BadArgument, match="`x`"):
        suggest_nvfp4_global_scale(x.int())
