"""NVFP4 against a table of its codes and the address formula of its scales."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import (
    scaled_fp4_experts_quant,
    scaled_fp4_grouped_quant,
    scaled_fp4_quant,
    silu_and_mul_scaled_fp4_grouped_quant,
    suggest_nvfp4_global_scale,
)

LEVELS = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(x: Fraction) -> Fraction:
    """x rounded to e2m1, ties to the even code."""
    best = min(range(8), key=lambda code: (abs(LEVELS[code] - abs(x)), code % 2))
    return LEVELS[best] if x >= 0 else -LEVELS[best]


def agrees(got: Fraction, x: Fraction) -> bool:
    """Whether x was rounded to `got`, or lies so near the middle that float32 may go either way."""
    return abs(abs(got - x) - abs(nearest(x) - x)) <= abs(x) * Fraction(1, 1 << 20)


def values(codes: Tensor) -> list[list[Fraction]]:
    """What rows of packed codes stand for, scales apart."""
    rows = []
    for row in codes.tolist():
        nibbles = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        rows.append([LEVELS[n & 7] * (-1 if n & 8 else 1) for n in nibbles])
    return rows


def scale_at(stored: Tensor, row: int, block: int) -> float:
    """A block's scale among the tiles."""
    tiles = stored.shape[1] // 4
    at = row // 128 * tiles * 512 + block // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4
    return float(stored.reshape(-1)[at + block % 4].float())


def check_row(x: Tensor, got: list[Fraction], scale: list[float], g: float) -> None:
    """A row of x against its codes and the scales of its blocks."""
    for block, own in enumerate(scale):
        part = x[16 * block : 16 * block + 16].double()
        wanted = torch.tensor(g * float(part.abs().max()) / 6).float().clamp(max=448)
        assert own == float(wanted.to(torch.float8_e4m3fn)), block
        for i, value in enumerate(part.tolist()):
            exact = Fraction(value) * Fraction(g) / Fraction(own) if own else Fraction(0)
            size = max(min(exact, LEVELS[-1]), -LEVELS[-1])
            assert agrees(got[16 * block + i], size), (block, i, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (130, 80), (2, 3, 32)])
def test_codes_scales_and_tiles(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if x.numel() > 16:
        x[0, ..., :16] = 0
    scale = suggest_nvfp4_global_scale(x)
    assert float(scale) == pytest.approx(448 * 6 / float(x.abs().max()))
    codes, stored = scaled_fp4_quant(x, scale)
    rows, blocks = x.numel() // shape[-1], shape[-1] // 16
    assert codes.shape == (rows, shape[-1] // 2)
    assert stored.dtype == torch.float8_e4m3fn
    assert stored.shape == (-(-rows // 128) * 128, -(-blocks // 4) * 4)
    flat = x.reshape(rows, -1)
    for row, got in enumerate(values(codes)):
        own = [scale_at(stored, row, block) for block in range(blocks)]
        check_row(flat[row], got, own, float(scale))
    used = sum(scale_at(stored, r, b) for r in range(rows) for b in range(blocks))
    assert float(stored.float().sum()) == pytest.approx(used), "what is added must be zero"


def test_ties_go_to_the_even_code_and_beyond_six_is_six() -> None:
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2], dtype=torch.float32)
    codes, stored = scaled_fp4_quant(x, torch.ones(1))
    assert scale_at(stored, 0, 0) == 1.0
    assert [float(v) for v in values(codes)[0]] == [0, 1, 1, 2, 2, 4, 4, 6] * 2
    # A global scale far too large: the block's scale ends at 448, the codes at 6.
    codes, stored = scaled_fp4_quant(-x, torch.full((1,), 1e6))
    assert scale_at(stored, 0, 0) == 448.0
    assert set(values(codes)[0]) == {Fraction(-6)}


@pytest.mark.parametrize("gated", [False, True])
def test_groups(gated: bool) -> None:
    groups, rows, width = 3, 5, 32
    g = torch.Generator().manual_seed(1)
    x = torch.randn(groups, rows, width * (1 + gated), generator=g).bfloat16()
    scale, mask = torch.tensor([1.0, 30.0, 200.0]), torch.tensor([5, 0, 2], dtype=torch.int32)
    call = silu_and_mul_scaled_fp4_grouped_quant if gated else scaled_fp4_grouped_quant
    codes, stored = call(x, scale, mask)
    assert codes.shape == (rows, width // 2, groups)
    assert stored.shape == (32, 4, 1, 4, 1, groups)
    assert codes.permute(2, 0, 1).is_contiguous()
    assert stored.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    if gated:
        gate, up = x.double().chunk(2, -1)
        x = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    for group in range(groups):
        tiles = stored[..., group].permute(2, 4, 0, 1, 3).reshape(128, 4)
        for row, got in enumerate(values(codes[..., group])):
            own = [scale_at(tiles, row, block) for block in range(width // 16)]
            if row < int(mask[group]):
                check_row(x[group, row], got, own, float(scale[group]))
            else:
                assert set(got) == {0} and set(own) == {0.0}


@pytest.mark.parametrize("mapped", [False, True])
def test_experts(mapped: bool) -> None:
    g = torch.Generator().manual_seed(2)
    offsets = torch.tensor([0, 3, 3, 140], dtype=torch.int32)
    starts = torch.tensor([0, 128, 128, 384], dtype=torch.int32)
    scale = torch.tensor([1.0, 9.0, 200.0])
    x = torch.randn(71 if mapped else 142, 48, generator=g).bfloat16()
    order = torch.randint(0, 71, (142,), generator=g) if mapped else None
    codes, stored = scaled_fp4_experts_quant(x, scale, offsets, starts, 2 if mapped else 1, order)
    rows = x if order is None else x[order]
    assert codes.shape == (142, 24)
    assert stored.shape[0] % 128 == 0 and stored.shape[0] >= 384 and stored.shape[1] == 4
    for row, got in enumerate(values(codes)):
        expert = 0 if row < 3 else 2
        if row >= 140:
            assert set(got) == {0}
            continue
        place = row if row < 3 else 128 + row - 3
        own = [scale_at(stored, place, block) for block in range(3)]
        check_row(rows[row], got, own, float(scale[expert]))


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
