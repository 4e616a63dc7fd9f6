"""The backend of latent attention against explicit softmax, with NaN in unowned pages."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.batch import Batch, PagePlace
from cairn.attention.inputs import IndexInputs, MlaInputs
from cairn.attention.mla import MlaBackend
from cairn.attention.registry import Backends, cache_schema
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import LINEAR, PRESHUFFLED, PageFormat
from cairn.errors import BadConfig
from cairn.specs.kv_format import FP8_E4M3
from cairn.specs.mla import IndexerSpec, MlaSpec
from cairn.specs.rotary import RotarySpec

SIZE, HEADS, LATENT, ROPE, TOPK = 4, 3, 8, 4, 5
ROTARY = RotarySpec("standard", ROPE, 100.0)
FULL = MlaSpec(
    num_heads=HEADS,
    q_lora_rank=1,
    kv_lora_rank=LATENT,
    nope_dim=6,
    rope_dim=ROPE,
    value_dim=5,
    rotary=ROTARY,
    scale=0.3,
    topk=TOPK,
    indexer=IndexerSpec(2, 6, ROTARY),
)
SHARED, DENSE = replace(FULL, indexer=None), replace(FULL, indexer=None, topk=None)


def pools_of(mixers, pages: int = 12) -> CachePools:
    schema = cache_schema(mixers, PageFormat(SIZE, torch.float32))
    pools = CachePools(schema, PoolSizes((pages,)), "cpu")
    for tensor in pools.tensors():
        tensor.fill_(torch.nan)
    return pools


def step(counts: list[int], padding: int = 0, size: int = SIZE) -> Batch:
    """All tokens of several rows, followed by padding slots."""
    columns = -(-max(counts) // size)
    pages = max(4, 48 // size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(2)).int()
    # Entries after the end of a row refer to pages that nobody owns.
    table = torch.full((len(counts), columns), pages - 1, dtype=torch.int32)
    taken = iter(order[order != pages - 1].tolist())
    for row, count in enumerate(counts):
        for column in range(-(-count // size)):
            table[row, column] = next(taken)
    row = torch.tensor([r for r, n in enumerate(counts) for _ in range(n)] + padding * [0])
    slot = torch.tensor([s for n in counts for s in range(n)] + padding * [-1])
    location = table[row, (slot // size).clamp(min=0)].long() * size + slot % size
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=slot.clone(),
        positions=slot,
        row=row,
        slot=slot,
        places=(PagePlace(table, location.where(slot >= 0, -1)),),
        completed=none,
        completed_pages=none,
        max_slot=int(slot.max()),
    )


def drawn(tokens: int, indexer: bool) -> MlaInputs:
    index = None
    if indexer:
        index = IndexInputs(
            torch.randn(tokens, 2, 6), torch.randn(tokens, 6), torch.randn(tokens, 2)
        )
    q, latent = torch.randn(tokens, HEADS, LATENT + ROPE), torch.randn(tokens, LATENT)
    return MlaInputs(q, latent, torch.randn(tokens, ROPE), index)


def expected(inputs: MlaInputs, batch: Batch, index: IndexInputs | None) -> Tensor:
    """The expected output, token by token. `index`: scores that select tokens; None selects all."""
    o = torch.zeros(len(batch.slot), HEADS, LATENT)
    keys = torch.cat((inputs.latent, inputs.k_pe), dim=-1)
    for t, (row, slot) in enumerate(zip(batch.row, batch.slot, strict=True)):
        seen = ((batch.row == row) & (batch.slot <= slot) & (batch.slot >= 0)).nonzero().flatten()
        if index is not None and len(seen) > TOPK:
            dots = torch.einsum("hd,sd->hs", index.q[t], index.k[seen]).relu()
            # With two heads many scores are 0: equal scores are selected in order of position.
            best = (index.weights[t] @ dots).sort(descending=True, stable=True).indices
            seen = seen[best[:TOPK]]
        if len(seen):
            p = (torch.einsum("hd,sd->hs", inputs.q[t], keys[seen]) * FULL.scale).softmax(-1)
            o[t] = p @ inputs.latent[seen]
    return o


@pytest.mark.parametrize("block_bytes", [64 << 20, 1])
@pytest.mark.parametrize("padding", [0, 3])
def test_selecting_sharing_and_dense_layers(block_bytes, padding):
    torch.manual_seed(5)
    mixers = [FULL, SHARED, DENSE, FULL, SHARED]
    pools, batch = pools_of(mixers), step([17, 4, 9], padding)
    backends, index = Backends(mixers, pools), None
    run = backends.step(batch)
    for layer, mixer in zip(run.layers, mixers, strict=True):
        inputs = drawn(len(batch.slot), mixer.indexer is not None)
        index = inputs.index or index
        with patch("cairn.attention.index_selection.BLOCK_BYTES", block_bytes):
            o = layer.run(inputs)
        wanted = expected(inputs, batch, None if mixer.topk is None else index)
        torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-5)
        assert padding == 0 or not o[-padding:].any()


def test_short_rows_are_not_scored():
    mixers = [FULL, SHARED]
    pools, batch = pools_of(mixers), step([TOPK, 3])
    run = Backends(mixers, pools).step(batch)
    with patch.object(ops, "paged_mqa_logits", side_effect=AssertionError):
        for layer, mixer in zip(run.layers, mixers, strict=True):
            inputs = drawn(len(batch.slot), mixer.indexer is not None)
            o = layer.run(inputs)
            torch.testing.assert_close(o, expected(inputs, batch, None), rtol=1e-4, atol=1e-5)
    # Keys are stored for later queries.
    keys = pools.pages[0]["index_key"].flatten(0, 1)
    assert keys[batch.places[0].location].isfinite().all()


def test_cache_fields_of_layers():
    schema = cache_schema([FULL, SHARED], PageFormat(SIZE, torch.bfloat16))
    shapes = [{f.name: (f.shape, f.dtype) for f in layer.pages} for layer in schema.layers]
    record = {"record": ((SIZE, LATENT + ROPE), torch.bfloat16)}
    assert shapes == [record | {"index_key": ((SIZE, 6), torch.bfloat16)}, record]


def test_formats_that_do_not_hold_them_are_refused():
    with pytest.raises(BadConfig, match=r"fp8_e4m3.*--kv-cache-dtype fp8_ds, or auto"):
        MlaBackend.needs(FULL, PageFormat(SIZE, torch.bfloat16, FP8_E4M3))
    small = PageFormat(SIZE, torch.bfloat16, small_records=True)
    with pytest.raises(BadConfig, match="tiles of 128 numbers.*, not 8 and 4"):
        MlaBackend.needs(FULL, small)
    with pytest.raises(BadConfig, match="keys and values of heads.*fp8_e4m3 or fp4_e2m1, or"):
        small.keys_and_values(2, 64)


def test_cache_fields_of_layers_in_8_bits():
    spec = replace(FULL, kv_lora_rank=512, rope_dim=64, indexer=IndexerSpec(2, 128, ROTARY))
    for layout in (LINEAR, PRESHUFFLED):
        form = PageFormat(64, torch.bfloat16, small_records=True, index_layout=layout)
        record, key = MlaBackend.needs(spec, form).pages
        assert (record.shape, record.dtype) == ((64, 656), torch.uint8)
        assert (key.shape, key.dtype, key.layout) == ((64 * 132,), torch.uint8, layout)


def test_a_layout_that_readers_do_not_know_refuses_to_start():
    spec = replace(FULL, kv_lora_rank=128, rope_dim=16, indexer=IndexerSpec(2, 32, ROTARY))
    with pytest.raises(BadConfig, match="tiles of 16 tokens by 16.*pages of 8 keys"):
        MlaBackend.needs(spec, PageFormat(8, torch.float32, None, True, PRESHUFFLED))
    schema = cache_schema([spec], PageFormat(16, torch.float32, None, True, "swizzled"))
    with pytest.raises(BadConfig, match="'swizzled'. Known: linear, preshuffled"):
        Backends([spec], CachePools(schema, PoolSizes((2,)), "cpu"))


@pytest.mark.parametrize("layout", [LINEAR, PRESHUFFLED])
def test_records_and_keys_in_8_bits_are_near_those_in_32(layout):
    """A small top-k of well separated scores: both paths select the same tokens."""
    torch.manual_seed(7)
    spec = replace(FULL, kv_lora_rank=128, rope_dim=16, indexer=IndexerSpec(4, 32, ROTARY))
    found = []
    for small in (False, True):
        form = PageFormat(16, torch.float32, small_records=small, index_layout=layout)
        pools = CachePools(cache_schema([spec], form), PoolSizes((4,)), "cpu")
        batch = step([17, 4], size=16)
        torch.manual_seed(8)
        tokens = len(batch.slot)
        index = IndexInputs(
            torch.randn(tokens, 4, 32) * 3, torch.randn(tokens, 32), torch.randn(tokens, 4).abs()
        )
        q, latent = torch.randn(tokens, HEADS, 144), torch.randn(tokens, 128)
        inputs = MlaInputs(q, latent, torch.randn(tokens, 16), index)
        found.append(Backends([spec], pools).step(batch).layers[0].run(inputs))
    # Adjacent tokens in the order of scores may be swapped.
    off = (found[1] - found[0]).flatten(1).norm(dim=1) / found[0].flatten(1).norm(dim=1)
    assert 0 < float(off.median()) < 0.1
