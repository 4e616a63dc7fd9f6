"""The landmark backend against the reference's intermediate tensors, without a model."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.attention.base import Batch
from cairn.attention.registry import assign, cache_specs
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools, PageFormat
from cairn.config import EngineOptions, Machine, resolve
from cairn.engine.build import attention_layers, model_facts
from cairn.models.registry import load_spec
from tests.engine.harness import CASES, GOLDENS, lengths, vectors


def batch_of(slots: torch.Tensor, size: int, table: torch.Tensor, layer, backend) -> Batch:
    """One row's slots as a batch."""
    page = table[slots // size].long()
    completed = torch.nonzero(slots % size == size - 1).flatten()
    return Batch(
        input_ids=torch.zeros_like(slots),
        positions=slots - slots // size,
        row=torch.zeros_like(slots),
        slot=slots,
        location=page * size + slots % size,
        page_table=table[None].int(),
        completed=completed,
        completed_pages=page[completed],
        max_slot=int(slots.max()),
        backends={layer.index: (backend, layer)},
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_intermediate_tensors(case: str, chunk: int):
    spec = load_spec(GOLDENS / case)
    config = resolve(
        EngineOptions(dtype="float32", device="cpu"),
        model_facts(spec),
        Machine(False, False, 1 << 30),
    )
    length = max(lengths(case))
    golden = {
        name.split(".", 1)[1]: value
        for name, value in vectors(case).items()
        if name.startswith(f"n{length}.")
    }
    layer = attention_layers(spec, config)[spec.hils_layers[-1]]
    size = config.page_size
    total = golden["q"].shape[0]
    pages = -(-total // size)
    pools = CachePools(
        cache_specs([layer] * spec.num_layers), pages + 9, PageFormat(size, torch.float32), "cpu"
    )
    for tensor in pools.tensors():
        tensor.fill_(float("nan"))
    (backend, _) = assign([layer], pools)[layer.index]
    table = torch.randperm(pages + 9, generator=torch.Generator().manual_seed(1))[:pages]
    slots = SlotMap(size, spec.landmarks)
    assert slots.slots_for(length) == total

    shared = load_shared_query(case, layer.index) if spec.hils.shared_query else None
    outputs = []
    for part in torch.arange(total).split(chunk):
        batch = batch_of(part, size, table, layer, backend)
        z = golden["lmk_q"][part]
        query = z[batch.completed] if spec.hils.needs_summary_query else None
        if shared is not None:
            query = shared(batch.positions[batch.completed])
        outputs.append(
            batch.attend(
                layer.index, golden["q"][part], golden["k"][part], golden["v"][part], z, query
            )
        )
    torch.testing.assert_close(torch.cat(outputs), golden["o"], rtol=1e-4, atol=1e-5)
    check_summaries(golden, pools, layer, table, total // size)
    check_selection(
        golden, pools, layer, batch_of(torch.arange(total), size, table, layer, backend)
    )


def load_shared_query(case: str, layer: int):
    """The learned prior query, rotated at given positions."""
    from safetensors.torch import load_file

    from cairn.layers.rotary import rotate
    from cairn.models.decoder import build_rotary

    constant = load_file(GOLDENS / case / "model.safetensors")[
        f"model.layers.{layer}.self_attn.q_c"
    ]
    rotary = build_rotary(load_spec(GOLDENS / case).layers[layer].rotary)

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        query = constant.expand(len(positions), -1, -1).clone()
        table = rotary.cos_sin(positions, torch.float32)
        rotate(torch.arange(len(positions)), query, None, table)
        return query

    return rotated


def check_summaries(golden, pools, layer, table, complete: int) -> None:
    """Stored summaries of the complete pages."""
    pages = table[:complete]
    key = pools.summary_key[layer.index]
    stored = pools.k[layer.index][:, :, -1] if key is None else key
    torch.testing.assert_close(stored[pages], golden["lmk_k"], rtol=1e-4, atol=1e-5)
    if "prior_b" in golden:
        bias = pools.summary_bias[layer.index]
        torch.testing.assert_close(bias[pages], golden["prior_b"], rtol=1e-4, atol=1e-5)


def check_selection(golden, pools, layer, batch: Batch) -> None:
    """Window branch, selected pages, scores and weights of every query at once."""
    rule, index = layer.landmark, layer.index
    k, v = pools.k[index], pools.v[index]
    where = (batch.row, batch.slot, batch.page_table)
    o, lse = ops.window_attention(
        golden["q"], k, v, *where, rule.window, aligned=True, mask_landmarks=True
    )
    torch.testing.assert_close(o, golden["swa_o"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, golden["lse"], rtol=1e-4, atol=1e-5)
    key, bias = pools.summary_key[index], pools.summary_bias[index]
    page_size = k.shape[2]
    indices, scores = ops.select_pages(
        golden["lmk_q"], k[:, :, -1] if key is None else key, bias, lse, *where,
        page_size, rule.window, rule.topk, num_kv_heads=layer.num_kv_heads,
    )  # fmt: skip
    assert torch.equal(indices.int(), golden["indices"].int())
    weights, window_weight = ops.page_weights(scores, lse, rule.softmax1)
    torch.testing.assert_close(
        weights, golden["chunk_weights"][..., : rule.topk], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        window_weight, golden["chunk_weights"][..., rule.topk], rtol=1e-4, atol=1e-5
    )
    if bias is not None:
        table = batch.page_table[0].long()
        group = layer.num_heads // layer.num_kv_heads
        picked = bias[table[indices.clamp(min=0).long()]]  # [T, h_kv, K, h_q]
        own = torch.arange(layer.num_heads).view(layer.num_kv_heads, 1, group)
        own = own.expand(picked.shape[0], -1, picked.shape[2], -1)
        picked = picked.gather(-1, own).permute(0, 1, 3, 2).flatten(1, 2)
        scores = scores - picked.masked_fill(torch.isinf(scores), 0)
    torch.testing.assert_close(scores, golden["scores"], rtol=1e-4, atol=1e-5)
