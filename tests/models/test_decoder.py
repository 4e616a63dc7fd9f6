"""The decoder's code paths for few, several and many tokens, compared with the plain
definitions."""

from __future__ import annotations

import pytest
import torch

from cairn.ops.linear import skinny_gemm_panel
from cairn.ops.linear.tuning import TUNING as LINEAR_TUNING
from cairn.ops.registry import force


@pytest.mark.parametrize("tokens", [1, 2, 10, 20, 70, 140])
def test_the_ways_of_the_products_agree(tiny, drawn, plain, tokens):
    """Few tokens; several tokens, for which a norm is fused with the sum before it; and many. In
    between, only the norm after a product of many columns is fused."""

    def run(model):
        for number, block in enumerate(model.layers):  # no norm is like another
            block.mixer_norm.weight.mul_(0.5 + number)
            block.ffn_norm.weight.mul_(3.0 + number)
        return plain(model, torch.arange(tokens) * 7 % 40)

    with force("reference"):
        wanted, batch = run(drawn(tiny))
    assert (skinny_gemm_panel.FEWEST <= len(batch.input_ids) <= skinny_gemm_panel.MOST) == (
        tokens in (20, 70)
    )
    model = drawn(tiny)
    down = [block.ffn.down.weight for block in model.layers]
    with LINEAR_TUNING.replaced(skinny_span=down[0].shape[1] // 2):
        given = torch.empty(len(batch.input_ids), down[0].shape[1])
        assert skinny_gemm_panel.linear_fuses_norm(given, down[0], None) == (tokens in (10, 20, 70))
        torch.testing.assert_close(run(model)[0], wanted, rtol=1e-4, atol=1e-4)
