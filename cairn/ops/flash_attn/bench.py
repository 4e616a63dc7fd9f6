"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.flash_attn.append_kv import append_kv
from cairn.ops.flash_attn.flash_attention import flash_attention

SEQUENCES = 16
"""Sequences per call."""


@append_kv.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, size, dim = layer.kv_heads, layer.page_size, layer.head_dim
        batch = min(rows, SEQUENCES)
        new = rows // batch
        k, v = (draw.randn(batch, new, heads, dim) for _ in range(2))
        # One page of each sequence is full already.
        pages = batch * (1 + -(-new // size))
        caches = [draw.randn(pages, size, heads, dim) for _ in range(2)]
        table = draw.rand(pages).argsort().view(batch, -1).int()
        lengths = draw.full((batch,), size, torch.int32)
        given = draw.args(k, v, *caches, lengths, None, table, None)
        size_of = f"{layer.name}: {batch} x {new} x {heads} x {dim}"
        others = draw.by_torch(append_kv.reference)
        yield Point(size_of, given, moved(k, k, v, v), alternatives=others)


@flash_attention.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        layer, step = job.layer, job.step
        shape = (-1, layer.page_size, layer.kv_heads, layer.head_dim)
        q = job.q.view(step.batch, step.tokens, layer.heads, layer.head_dim)
        used = draw.full((step.batch,), step.context, torch.int32)
        given = draw.args(
            q,
            job.k_cache.view(shape),
            job.v_cache.view(shape),
            torch.empty_like(q),
            draw.full((step.batch, layer.heads, step.tokens), 0.0),
            job.page_table,
            None,
            None,
            None,
            None,
            None,
            used,
            None,
            None,
            None,
            None,
            None,
            layer.head_dim**-0.5,
            -1,
            0,
            0,
            0.0,
            step.tokens,
        )
        keys = step.batch * step.context * job.slot_bytes
        flops = job.attend_flops(job.pairs())
        yield Point(str(job), given, keys + moved(q, q), flops, job.dense())
