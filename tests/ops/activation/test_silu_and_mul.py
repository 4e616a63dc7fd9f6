"""silu_and_mul against math.exp."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 64, 101])
def test_against_scalars(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (3 * torch.randn(2, 3, 2 * width)).to(dtype)
    expected = torch.tensor(
        [
            [
                [g / (1 + math.exp(-g)) * u for g, u in zip(r[:width], r[width:], strict=True)]
                for r in b
            ]
            for b in x.tolist()
        ]
    )
    got = silu_and_mul(x)
    assert got.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.float(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


def test_extremes_are_finite_and_input_is_kept() -> None:
    x = torch.tensor([[-200.0, 200.0, 2.0, 3.0]])
    before = x.clone()
    assert torch.equal(silu_and_mul(x), torch.tensor([[-0.0, 600.0]]))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_experts_are_those_of_a_call_without(dtype: torch.dtype) -> None:
    x = torch.randn(9, 2 * 96, dtype=dtype)
    ids = torch.tensor([2, -1, 0, -1, 7], dtype=torch.int32)
    kept = ids.repeat_interleave(2)[:9] >= 0
    whole = silu_and_mul(x)
    assert torch.equal(silu_and_mul(x, expert_ids=ids, expert_step=2), whole * kept[:, None])
    out = torch.full_like(whole, 3)
    assert silu_and_mul(x, out, expert_ids=ids, expert_step=2) is out
    assert torch.equal(out[kept], whole[kept])
    assert (out[~kept] == 3).all()
