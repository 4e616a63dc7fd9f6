"""Retrieval of a distant key, in all formats of index keys and records."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import index_q_quantize, paged_mqa_logits, select_topk, sparse_mla
from cairn.ops.sparse_mla import index_cache, records

SIZE, DIM, LATENT, ROPE, TOPK, CONTEXT = 64, 64, 128, 16, 32, 1024
NEEDLES = (5, TOPK, TOPK + 7, CONTEXT // 2, CONTEXT - 70, CONTEXT - 1)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "linear", "preshuffled"])
def test_a_needle_is_selected_and_read_wherever_it_is(form: str, device: str) -> None:
    """Query t asks for the key in slot NEEDLES[t]; its record outweighs all others."""
    g = torch.Generator().manual_seed(2)
    columns, queries = CONTEXT // SIZE, len(NEEDLES)
    table = torch.randperm(columns, generator=g).int().view(1, -1)
    keys = torch.randn(columns, SIZE, DIM, generator=g)
    cache = torch.randn(columns, SIZE, LATENT + ROPE, generator=g) * 0.1
    q = torch.randn(queries, 8, DIM, generator=g)
    query = torch.randn(queries, 4, LATENT + ROPE, generator=g)
    cells = [int(table[0, slot // SIZE]) * SIZE + slot % SIZE for slot in NEEDLES]
    for t, cell in enumerate(cells):
        keys.flatten(0, 1)[cell] = q[t].mean(0) * 8
        cache.flatten(0, 1)[cell] = query[t].mean(0) * 8
    weights = torch.rand(queries, 8, generator=g).to(device)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    keys, cache, q, query = (x.to(device, dtype) for x in (keys, cache, q, query))
    small, preshuffled = form in ("linear", "preshuffled"), form == "preshuffled"
    if small:
        keys = index_cache.pack(keys, preshuffled, scale_ue8m0=True)
        parts = cache.flatten(0, 1).split((LATENT, ROPE), dim=-1)
        cache = records.quantize(*parts).view(columns, SIZE, -1)
        q, weights = index_q_quantize(q, weights)
    row = torch.zeros(queries, dtype=torch.int64, device=device)
    seen = torch.full((queries,), CONTEXT, dtype=torch.int32, device=device)
    table = table.to(device)
    logits = paged_mqa_logits(q, weights, keys, table, row, seen, preshuffled=preshuffled)
    selected = select_topk(logits, seen, TOPK, None, table, row, SIZE)
    o, _ = sparse_mla(query, cache, selected, seen, 1.0, LATENT)
    for t, cell in enumerate(cells):
        assert cell in selected[t].tolist()
        record = query[t].float().mean(0)[:LATENT] * 8
        near = torch.nn.functional.cosine_similarity(o[t].float(), record.expand(4, -1), dim=-1)
        assert near.min() > 0.9
