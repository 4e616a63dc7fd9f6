"""The decoder with plain weights, as GPUs run it, against the same one with packed weights."""

from __future__ import annotations

import pytest
import torch

from cairn.layers import linear
from cairn.ops.linear import few, panel


@pytest.mark.parametrize("tokens", [2, 10, 20, 70, 140])
def test_weights_may_be_plain(tiny, drawn, plain, monkeypatch, tokens):
    """Of few tokens, of some, for which a norm is done with the sum before it, and of many. In
    between only the norm behind a product of many columns is, as if so few were many."""

    def run(model):
        for number, block in enumerate(model.layers):  # no norm is like another
            block.attention_norm.weight.mul_(0.5 + number)
            block.mlp_norm.weight.mul_(3.0 + number)
        return plain(model, torch.arange(tokens) * 7 % 40)

    packed, batch = run(drawn(tiny))
    assert (panel.FEWEST <= len(batch.input_ids) <= panel.MOST) == (tokens in (20, 70))
    monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    model = drawn(tiny)
    down = [block.mlp.down.weight for block in model.layers]
    assert all(weight is not None for weight in down)
    monkeypatch.setattr(few, "SPAN", down[0].shape[1] // 2)
    given = torch.empty(len(batch.input_ids), down[0].shape[1])
    assert panel.sums_in_norm(given, down[0]) == (tokens in (10, 20, 70))
    torch.testing.assert_close(run(model)[0], packed, rtol=1e-4, atol=1e-4)
