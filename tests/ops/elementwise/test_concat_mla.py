"""concat_mla_k and concat_mla_absorb_q against loops over heads."""

from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import concat_mla_absorb_q, concat_mla_k
from cairn.ops.elementwise.fp8 import E4M3, E5M2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize("tokens, heads, nope, rope", [(0, 3, 8, 4), (1, 1, 1, 1), (7, 63, 100, 5)])
def test_keys(tokens: int, heads: int, nope: int, rope: int, dtype: torch.dtype) -> None:
    joint = torch.randn(tokens, heads, nope + 3).to(dtype)
    k_nope, k_rope = joint[..., 3:], torch.randn(tokens, 1, rope).to(dtype)
    k = torch.empty(tokens, heads, nope + rope, dtype=dtype)
    assert concat_mla_k(k, k_nope, k_rope) is None
    for token in range(tokens):
        for head in range(heads):
            assert k[token, head, :nope].tolist() == k_nope[token, head].tolist()
            assert k[token, head, nope:].tolist() == k_rope[token, 0].tolist()


def test_queries() -> None:
    a, b = torch.randn(7, 3, 512), torch.randn(3, 7, 64).transpose(0, 1)
    got = concat_mla_absorb_q(a, b)
    assert got.shape == (7, 3, 576)
    assert torch.equal(got[..., :512], a) and torch.equal(got[..., 512:], b)
    out = torch.empty(7, 3, 576)
    assert concat_mla_absorb_q(a, b, out=out) is out
    assert torch.equal(out, got)


def test_wrong_arguments_are_named() -> None:
    k, nope, rope = torch.empty(5, 3, 12), torch.empty(5, 3, 8), torch.empty(5, 1, 4)
    with pytest.raises(BadArgument, match=r"`k_rope` has shape \[5, 2, 4\]"):
        concat_mla_k(k, nope, rope.expand(-1, 2, -1))
    with pytest.raises(BadArgument, match="`k` has 12 numbers a head, not 8 [+] 3"):
        concat_mla_k(k, nope, rope[..., :3])
    with pytest.raises(BadArgument, match="`b` is float16"):
        concat_mla_absorb_q(nope, nope.half())
