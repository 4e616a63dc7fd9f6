"""The landmark backend against intermediate tensors of the reference, without a model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from cairn import ops
from cairn.attention.batch import Batch, PagePlace
from cairn.attention.inputs import HilsInputs
from cairn.attention.registry import Backends, cache_schema
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import PageFormat
from cairn.config import EngineOptions, Machine, resolve
from cairn.layers.rotary import Rotary
from cairn.models.registry import load_spec
from cairn.specs.hils import HilsSpec
from tests.engine.harness import GOLDENS, TRACED, lengths, vectors


def batch_of(slots: torch.Tensor, size: int, table: torch.Tensor) -> Batch:
    """The slots of one row as a batch."""
    page = table[slots // size].long()
    completed = torch.nonzero(slots % size == size - 1).flatten()
    return Batch(
        input_ids=torch.zeros_like(slots),
        positions=slots - slots // size,
        row=torch.zeros_like(slots),
        slot=slots,
        places=(PagePlace(table[None].int(), page * size + slots % size),),
        completed=completed,
        completed_pages=page[completed],
        max_slot=int(slots.max()),
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("case", TRACED)
def test_intermediate_tensors(case: str, chunk: int):
    options = EngineOptions(dtype="float32", device="cpu")
    config = resolve(options, load_spec(GOLDENS / case), Machine(False, False, 1 << 30))
    model = config.model
    length = max(lengths(case))
    golden = {
        name.split(".", 1)[1]: value
        for name, value in vectors(case).items()
        if name.startswith(f"n{length}.")
    }
    number = model.selecting_layers[-1]
    spec = model.mixers[number]
    assert isinstance(spec, HilsSpec)
    size = config.page_size
    total = golden["q"].shape[0]
    pages = -(-total // size)
    schema = cache_schema([spec], PageFormat(size, torch.float32))
    pools = CachePools(schema, PoolSizes((pages + 9,)), "cpu")
    for tensor in pools.tensors():
        tensor.fill_(float("nan"))
    backends = Backends([spec], pools)
    table = torch.randperm(pages + 9, generator=torch.Generator().manual_seed(1))[:pages]
    assert SlotMap(size, model.landmarks).slots_for(length) == total

    shared = load_shared_query(case, number) if spec.shared_query else None
    outputs = []
    for part in torch.arange(total).split(chunk):
        batch = batch_of(part, size, table)
        z = golden["lmk_q"][part]
        query = z[batch.completed] if spec.needs_summary_query else None
        if shared is not None:
            query = shared(batch.positions[batch.completed])
        q, k, v = (golden[name][part] for name in "qkv")
        (layer,) = backends.step(batch).layers
        outputs.append(layer.run(HilsInputs(q, k, v, z, query)))
    torch.testing.assert_close(torch.cat(outputs), golden["o"], rtol=1e-4, atol=1e-5)
    check_summaries(golden, pools.pages[0], table[: total // size])
    check_selection(golden, pools.pages[0], spec, batch_of(torch.arange(total), size, table))


def load_shared_query(case: str, layer: int):
    """The learned prior query, rotated at the given positions."""
    path = GOLDENS / case / "model.safetensors"
    constant = load_file(path)[f"model.layers.{layer}.self_attn.q_c"]
    spec = load_spec(GOLDENS / case).mixers[layer].rotary
    rotary = Rotary(spec)

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        query = constant.repeat(len(positions), 1, 1)
        table = rotary.cos_sin(positions, torch.float32)
        rotary.rotate(torch.arange(len(positions)), query, None, table)
        return query

    return rotated


def check_summaries(golden, fields, pages: torch.Tensor) -> None:
    """Stored summaries of the complete pages."""
    stored = fields.get("summary_key", fields["k"][:, :, -1])
    torch.testing.assert_close(stored[pages], golden["lmk_k"], rtol=1e-4, atol=1e-5)
    if "prior_b" in golden:
        bias = fields["summary_bias"]
        torch.testing.assert_close(bias[pages], golden["prior_b"], rtol=1e-4, atol=1e-5)


def check_selection(golden, fields, spec: HilsSpec, batch: Batch) -> None:
    """Window branch, selected pages, scores and weights of all queries in one step."""
    k, v, page_table = fields["k"], fields["v"], batch.places[0].page_table
    where = (batch.row, batch.slot, page_table)
    o, lse = ops.window_attention(
        golden["q"], k, v, *where, spec.window, aligned=True, mask_landmarks=True
    )
    torch.testing.assert_close(o, golden["swa_o"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, golden["lse"], rtol=1e-4, atol=1e-5)
    key, bias = fields.get("summary_key", k[:, :, -1]), fields.get("summary_bias")
    indices, scores = ops.select_pages(
        golden["lmk_q"], key, bias, lse, *where,
        k.shape[2], spec.window, spec.topk, num_kv_heads=spec.num_kv_heads,
    )  # fmt: skip
    assert torch.equal(indices.int(), golden["indices"].int())
    weights, window_weight = ops.page_weights(scores, lse, spec.softmax1)
    torch.testing.assert_close(
        weights, golden["chunk_weights"][..., : spec.topk], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        window_weight, golden["chunk_weights"][..., spec.topk], rtol=1e-4, atol=1e-5
    )
    if bias is not None:
        group = spec.num_heads // spec.num_kv_heads
        picked = bias[page_table[0].long()[indices.clamp(min=0).long()]]  # [T, h_kv, K, h_q]
        own = torch.arange(spec.num_heads).view(spec.num_kv_heads, 1, group)
        own = own.expand(picked.shape[0], -1, picked.shape[2], -1)
        picked = picked.gather(-1, own).permute(0, 1, 3, 2).flatten(1, 2)
        scores = scores - picked.masked_fill(torch.isinf(scores), 0)
    torch.testing.assert_close(scores, golden["scores"], rtol=1e-4, atol=1e-5)
