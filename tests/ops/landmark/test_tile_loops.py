"""AMX loops of attention over selected pages: all geometries, pages selected by few, many or no
tokens."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import page_attention
from cairn.ops.cpu import amx
from cairn.ops.testing import Arguments, Make, check

pytestmark = pytest.mark.skipif(not amx.AVAILABLE, reason="this CPU has no AMX for bfloat16")


def step(
    make: Make, group: int, size: int, dim: int, tokens: int = 130, topk: int = 5
) -> Arguments:
    """Tokens of two rows that select 0 to `topk` pages; keys of landmarks are NaN."""
    paged = make.paged((9 * size + 3, 4 * size), 2, size, dim, dtype=torch.bfloat16)
    for cache in (paged.k_cache, paged.v_cache):
        cache[:, :, -1] = torch.nan
    row = make.randint(0, 2, tokens)
    indices = torch.full((tokens, 2, topk), -1, dtype=torch.int32)
    for token in range(tokens):
        held = 9 if row[token] == 0 else 4
        chosen = min(held, token % (topk + 1))
        for head in range(2):
            indices[token, head, :chosen] = make.rand(held).argsort()[:chosen].sort().values
    q = make.randn(tokens, 2 * group, dim, dtype=torch.bfloat16)
    weights = make.rand(tokens, 2 * group, topk)
    caches = (paged.k_cache, paged.v_cache)
    return make.args(q, *caches, row, paged.page_table, indices, weights)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_groups(group: int) -> None:
    arguments = step(Make(seed=group), group, 64, 64)
    assert page_attention.choice(*arguments.args) == "amx"
    check(page_attention, "amx", arguments)


@pytest.mark.parametrize(("size", "dim"), [(128, 64), (64, 128), (128, 256)])
def test_pages_and_widths(size: int, dim: int) -> None:
    arguments = step(Make(seed=dim), 4, size, dim)
    assert page_attention.choice(*arguments.args) == "amx"
    check(page_attention, "amx", arguments)


def test_a_token_is_the_same_in_every_step() -> None:
    make = Make(seed=3)
    arguments = step(make, 4, 64, 64, tokens=700)
    q, k_cache, v_cache, row, table, indices, weights = arguments.args
    whole = page_attention.using("amx")(*arguments.args)
    order = make.rand(700).argsort()
    for some in (order, order[:50], order[:1], order[:0]):
        given = (q[some], k_cache, v_cache, row[some], table, indices[some], weights[some])
        assert torch.equal(page_attention.using("amx")(*given), whole[some])
