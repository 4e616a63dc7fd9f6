"""Every backend tells its op whether a step's slots are chunks of rows: a hint how to cut them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn import ops
from cairn.attention.base import AttentionLayer, Batch, LandmarkRule
from cairn.attention.registry import assign, cache_specs
from cairn.cache.pools import CachePools, PageFormat

SIZE, PAGES, TOKENS = 8, 4, 20
PLAIN = AttentionLayer(0, "dense", num_heads=4, num_kv_heads=2, head_dim=16)
LANDMARK = LandmarkRule(topk=2, window=9, softmax1=True, summary="mean", bias=False)
LAYERS = {
    "dense_attention": PLAIN,
    "window_attention": replace(PLAIN, backend="window", window=9),
    "landmark_attention": replace(PLAIN, backend="hsa", landmark=LANDMARK),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_hint_reaches_the_op(name: str, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    op, heard = getattr(ops, name), []

    def hear(*args, chunked: bool, **kwargs):
        heard.append(chunked)
        return op(*args, chunked=chunked, **kwargs)

    monkeypatch.setattr(ops, name, hear)
    layer = LAYERS[name]
    pools = CachePools(cache_specs([layer]), PAGES, PageFormat(SIZE, torch.float32), "cpu")
    slot, table = torch.arange(TOKENS), torch.arange(PAGES).int().unsqueeze(0)
    done = (slot % SIZE == SIZE - 1).nonzero()[:, 0]
    batch = Batch(
        *(slot, slot, slot * 0, slot, slot, table, done, done // SIZE),
        max_slot=TOKENS - 1,
        backends=assign([layer], pools),
        chunked=chunked,
    )
    q = torch.randn(TOKENS, layer.num_heads, layer.head_dim)
    k = torch.randn(TOKENS, layer.num_kv_heads, layer.head_dim)
    out = batch.attend(0, q, k, k, q)
    assert heard == [chunked]
    assert out.shape == q.shape and bool(out.isfinite().all())
