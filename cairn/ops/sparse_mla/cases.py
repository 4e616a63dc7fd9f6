"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.sparse_mla import index_cache, records
from cairn.ops.sparse_mla.fused_store_index_k_cache import fused_store_index_k_cache
from cairn.ops.sparse_mla.index_k_gather import index_k_gather
from cairn.ops.sparse_mla.index_k_store import index_k_store
from cairn.ops.sparse_mla.index_q_quantize import index_q_quantize
from cairn.ops.sparse_mla.latent_norm_rope import latent_norm_rope
from cairn.ops.sparse_mla.latent_query_rope import latent_query_rope
from cairn.ops.sparse_mla.mla_kv_store import mla_kv_store
from cairn.ops.sparse_mla.paged_mla import paged_mla
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits_into
from cairn.ops.sparse_mla.ragged_mqa_logits import ragged_mqa_logits_into
from cairn.ops.sparse_mla.select_topk import select_topk
from cairn.ops.sparse_mla.set_mla_kv_buffer import set_mla_kv_buffer
from cairn.ops.sparse_mla.sparse_mla import sparse_mla
from cairn.ops.testing import Cases, Make
from cairn.ops.top_k.samples import rows_of


@index_k_gather.cases
def _(make: Make) -> Cases:
    for dtype, size, dim in ((torch.float32, 4, 24), (torch.bfloat16, 32, 48)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7, 3], torch.int64)
        cache = make.randn(5, size, dim, dtype=dtype)
        yield make.args(cache, spot, dim)
        yield make.args(cache, spot[:0], dim)
        yield make.args(cache[:0], spot[3:4], dim)
        yield make.args(make.randn(5, size, 2 * dim, dtype=dtype)[..., :dim], spot, dim)
        # 127 is NaN.
        small = make.randint(0, 127, 5, size * (dim + 4), dtype=torch.uint8)
        yield make.args(small, spot, dim)
        yield make.args(small, spot[:0], dim)
        yield make.args(small[:0], spot[3:4], dim)
        if size == 32:
            yield make.args(small, spot, dim, preshuffled=True)


@index_k_store.cases
def _(make: Make) -> Cases:
    for dtype, size, dim in ((torch.float32, 4, 24), (torch.bfloat16, 32, 48)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7], torch.int64)
        k = make.randn(7, dim, dtype=dtype)
        k[2] = 0.0
        cache = make.randn(5, size, dim, dtype=dtype)
        yield make.args(k, cache, spot)
        yield make.args(k[3:4], cache, spot[3:4])
        yield make.args(k[:0], cache, spot[:0])
        yield make.args(k, make.randn(5, size, 2 * dim, dtype=dtype)[..., :dim], spot)
        small = make.randint(0, 256, 5, size * (dim + 4), dtype=torch.uint8)
        for power in (False, True):
            yield make.args(k, small, spot, scale_ue8m0=power)
            if size == 32:
                yield make.args(k, small, spot, preshuffled=True, scale_ue8m0=power)
        yield make.args(k[3:4], small, spot[3:4])
        yield make.args(k[:0], small, spot[:0])
        part = small.flatten()[: 5 * size * 20].view(5, -1)
        yield make.args(k[:, :16], part, spot, scale_ue8m0=True, hadamard=True)


@fused_store_index_k_cache.cases
def _(make: Make) -> Cases:
    for dtype, size, dim in ((torch.float32, 4, 24), (torch.bfloat16, 32, 48)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7], torch.int64)
        k = make.randn(7, dim, dtype=dtype)
        cache = make.randint(0, 256, 5, size * (dim + 4), dtype=torch.uint8)
        yield make.args(k, cache, spot, size)
        yield make.args(k[::2], cache, spot[::2].int(), size)
        yield make.args(k[:0], cache, spot[:0], size)


@index_q_quantize.cases
def _(make: Make) -> Cases:
    for dtype, heads, dim in ((torch.float32, 3, 24), (torch.bfloat16, 4, 32)):
        q, weights = make.randn(5, heads, dim, dtype=dtype), make.randn(5, heads)
        q[2, 1] = 0.0
        yield make.args(q, weights)
        yield make.args(q[:0], weights[:0])
        yield make.args(q[..., :16].contiguous(), weights, hadamard=True)


@latent_norm_rope.cases
def _(make: Make) -> Cases:
    for dtype, first, interleaved in ((torch.float32, 24, True), (torch.bfloat16, 96, False)):
        tokens, latent, rope, dim = 5, 32, 8, 20
        projected = make.randn(tokens, first + latent + rope, dtype=dtype)
        key = make.randn(tokens, 2 * dim, dtype=dtype)[:, :dim]
        weights = [make.randn(size, dtype=dtype) for size in (first, latent, dim, dim)]
        angles, others = make.randn(tokens, rope), make.randn(tokens, rope)
        given = (*weights, angles, others, 1e-6, 1e-5, interleaved)
        yield make.args(projected, key, *given, not interleaved)
        yield make.args(projected, key, *given, interleaved)
        yield make.args(projected, None, *weights[:2], None, None, angles, None)
        none = (*weights, angles[:0], others[:0])
        yield make.args(projected[:0], key[:0], *none)


@latent_query_rope.cases
def _(make: Make) -> Cases:
    for dtype, heads, interleaved in ((torch.float32, 3, True), (torch.bfloat16, 4, False)):
        tokens, nope, latent, rope, own, dim = 5, 6, 12, 8, 2, 20
        projected = make.randn(tokens, heads * (nope + rope) + own * dim, dtype=dtype)
        q, weights = make.randn(tokens, heads, latent + rope, dtype=dtype), make.randn(tokens, own)
        angles, others = make.randn(tokens, rope), make.randn(tokens, rope)
        given = (q, weights, angles, others, nope, 0.3, interleaved)
        yield make.args(projected, *given, not interleaved)
        yield make.args(projected, *given, interleaved)
        alone = projected[:, : heads * (nope + rope)]
        yield make.args(alone, q, None, angles, None, nope)
        none = (q[:0], weights[:0], angles[:0], others[:0], nope)
        yield make.args(projected[:0], *none)


@mla_kv_store.cases
def _(make: Make) -> Cases:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 32)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7], torch.int64)
        latent, k_pe = make.randn(7, 256, dtype=dtype), make.randn(7, 16, dtype=dtype)
        latent[2] = 0.0
        cache = make.randn(5, size, 272, dtype=dtype)
        yield make.args(latent, k_pe, cache, spot)
        yield make.args(latent[:0], k_pe[:0], cache, spot[:0])
        both = make.randn(7, 300, dtype=dtype)
        yield make.args(both[:, :256], both[:, 256:272], cache, spot)
        small = make.randint(0, 256, 5, size, 296, dtype=torch.uint8)
        yield make.args(latent, k_pe, small, spot)
        yield make.args(both[:, :256], both[:, 256:272], small, spot)
        yield make.args(latent[3:4], k_pe[3:4], small, spot[3:4])
        # 192 elements in float8, 3 bytes of scales, 5 of padding, 16 elements in bfloat16, which
        # hold them exactly: Triton's interpreter does not round to it.
        whole = make.randint(0, 256, 5, size, 232, dtype=torch.uint8)
        yield make.args(latent[:, :192], k_pe.bfloat16().to(dtype), whole, spot)


@set_mla_kv_buffer.cases
def _(make: Make) -> Cases:
    spot = make.tensor([4, 0, 9, -1, 7], torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        parts = [make.randn(5, width).to(dtype) for width in (24, 8)]
        buffer = make.randn(12, 32).to(dtype)
        yield make.args(buffer, spot, *parts)
        heads = [part.unsqueeze(1) for part in parts]
        yield make.args(buffer.unsqueeze(1), spot.int(), *heads, num_warps=4)
        both = make.randn(5, 40).to(dtype)
        yield make.args(buffer, spot, both[:, :24], both[:, 24:32])
        yield make.args(buffer, spot[:0], *(part[:0] for part in parts))


@paged_mqa_logits_into.cases
def _(make: Make) -> Cases:
    half = torch.bfloat16
    for dtype, size, heads, dim in (
        (torch.float32, 4, 3, 24),
        (half, 16, 4, 32),
        (half, 64, 4, 32),
    ):
        paged = make.paged((70, 3, 0, 41), 1, size, dim, dtype=dtype)
        keys, table = paged.k_cache[:, 0], paged.page_table
        row, slot, _ = paged.queries((20, 1, 0, 3))
        q = make.randn(len(row), heads, dim, dtype=dtype)
        weights = make.randn(len(row), heads)
        context = (slot + 1).to(torch.int32)
        context[5] = 0
        context[7] = -1
        logits = make.randn(len(row), table.shape[1] * size)
        yield make.args(q, weights, keys, table, row, context, logits)
        part = logits[:, :70]
        yield make.args(q, weights, keys, table, row, context.long(), part, least=60, chunked=True)
        yield make.args(q[:0], weights[:0], keys, table, row[:0], context[:0], logits[:0])
        small = index_cache.pack(keys, preshuffled=False, scale_ue8m0=True)
        yield make.args(q, weights, small, table, row, context, part)
        yield make.args(q, weights, small, table, row, context, part, chunked=True)
        if size % index_cache.TILE == 0:
            own, factor = index_cache.quantize(q, scale_ue8m0=False)
            tiles = index_cache.pack(keys, preshuffled=True, scale_ue8m0=False)
            for chunked in (False, True):
                yield make.args(
                    own,
                    weights * factor,
                    tiles,
                    table,
                    row,
                    context,
                    logits,
                    preshuffled=True,
                    chunked=chunked,
                )


@ragged_mqa_logits_into.cases
def _(make: Make) -> Cases:
    for dtype, heads, dim in ((torch.float32, 3, 24), (torch.bfloat16, 4, 32)):
        q, k = make.randn(9, heads, dim, dtype=dtype), make.randn(50, dim, dtype=dtype)
        weights, scale = make.randn(9, heads), make.rand(50)
        start = make.tensor([0, 0, 0, 7, 7, 49, 50, 9, 3], torch.int32)
        end = make.tensor([1, 2, 50, 8, 30, 50, 50, 0, -1], torch.int32)
        logits = make.randn(9, 50)
        yield make.args(q, weights, k, scale, start, end, logits)
        yield make.args(q, weights, k, None, start.long(), end.long(), logits, compact=True)
        yield make.args(q[:0], weights[:0], k, scale, start[:0], end[:0], logits[:0])
        none = (k[:0], scale[:0], start[8:], end[8:], logits[8:, :3])
        yield make.args(q[8:], weights[8:], *none, compact=True)
        numbers, scales = index_cache.quantize(k, scale_ue8m0=False)
        own, factor = index_cache.quantize(q, scale_ue8m0=False)
        yield make.args(own, weights * factor, numbers, scales, start, end, logits)


@select_topk.cases
def _(make: Make) -> Cases:
    for number, (logits, count, start, topk) in enumerate(rows_of(make)):
        tokens, width = logits.shape
        yield make.args(logits, count, topk, start)
        size = (1, 7)[number % 2]
        table = make.randint(0, 1 << 20, 3, width // size + 1, dtype=torch.int32)
        row = make.randint(0, 3, tokens)
        paged = {"page_table": table, "row": row, "page_size": size}
        yield make.args(logits, count.long(), topk, start, **paged)
        yield make.args(logits[:, :width], count.clamp(max=width), topk, **paged)
    yield make.args(make.randn(2, 0), make.tensor([0, 3], torch.int32), 5)


@sparse_mla.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, latent, rope in (
        (torch.float32, 4, 3, 128, 16),
        (torch.bfloat16, 16, 8, 256, 32),
    ):
        cache = make.randn(9, size, latent + rope, dtype=dtype)
        cache[7:] = torch.nan
        small = records.quantize(
            *(part.flatten(0, 1) for part in cache.split((latent, rope), dim=-1))
        ).view(9, size, -1)
        q = make.randn(6, heads, latent + rope, dtype=dtype)
        cells = make.randint(0, 7 * size, 6, 20, dtype=torch.int32)
        length = make.tensor([20, 0, 1, 19, 7, 20], torch.int32)
        # Invalid entries: beyond the length, and outside of the cache.
        cells[2, 1:], cells[4, 7:] = 8 * size, 7 * size + 1
        cells[0, ::3], cells[3, 5], cells[3, 6] = -1, 1 << 30, -(1 << 31)
        cells[5] = make.tensor([9 * size, -2] * 10, torch.int32)
        sink = make.randn(heads)
        sink[0], sink[1] = torch.inf, -torch.inf
        for records_of in (cache, small):
            given = (q, records_of, cells, length, 0.1, latent)
            yield make.args(*given)
            yield make.args(*given[:3], length.long(), *given[4:], sink=sink, dtype=dtype)
            yield make.args(q[:0], records_of, cells[:0], length[:0], *given[4:])
        yield make.args(q, cache, cells[:, :0], length, 0.1, latent)
        further = make.randint(-2, 5 * size, 6, 9, dtype=torch.int32)
        count = make.tensor([9, 4, 0, 12, -1, 5], torch.int32)
        for both in ((cache, cache[:4].clone()), (small, small[2:6].clone())):
            more = {"extra_cache": both[1], "extra_cells": further, "extra_length": count}
            yield make.args(q, both[0], *given[2:], sink=sink, **more)
        wide = make.randn(6, 2 * heads, latent + rope, dtype=dtype)[:, ::2]
        yield make.args(wide, cache, cells, length, 0.1, latent, sink)
        # The value is the whole record.
        yield make.args(q, cache, cells, length, 0.1, latent + rope, sink)
        parts = (part.flatten(0, 1) for part in cache[..., :80].split((64, 16), dim=-1))
        whole = records.quantize(*parts).view(9, size, -1)
        yield make.args(q[..., :80], whole, cells, length, 0.1, 80, sink)


@paged_mla.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, latent, rope in (
        (torch.float32, 4, 3, 128, 16),
        (torch.bfloat16, 16, 8, 256, 32),
    ):
        paged = make.paged((70, 3, 0, 41), 1, size, latent + rope, dtype=dtype)
        cache, table = paged.k_cache[:, 0].contiguous(), paged.page_table
        row, slot, _ = paged.queries((5, 1, 0, 3))
        q = make.randn(len(row), heads, latent + rope, dtype=dtype)
        end = (slot + 1).to(torch.int32)
        end[1], end[3] = 0, -5
        sink = make.randn(heads)
        given = (q, cache, table, row, end, 0.1, latent)
        yield make.args(*given)
        begin = (end - 9).long()
        yield make.args(*given, begin=begin, sink=sink, dtype=dtype, width=70)
        parts = (part.flatten(0, 1) for part in cache.split((latent, rope), dim=-1))
        small = records.quantize(*parts).view(len(cache), size, -1)
        yield make.args(q, small, table, row, end, 0.1, latent)
        yield make.args(*given[:5], 0.1, latent + rope, sink=sink)
        none = (q[:0], cache, table, row[:0], end[:0], 0.1, latent)
        yield make.args(*none)
