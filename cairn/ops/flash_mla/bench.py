"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.flash_mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from cairn.ops.flash_mla.flash_mla_with_kvcache import flash_mla
from cairn.ops.sparse_mla.samples import is_tiny, sizes_of


@flash_mla.bench
def _(draw: Draw) -> Points:
    sizes, tiny = sizes_of(draw), is_tiny(draw)
    width = sizes.latent + sizes.rope
    for batch, length, heads in ((2, 64, 4),) if tiny else ((64, 4096, 128), (64, 4096, 16)):
        pages = batch * length // sizes.page
        cache = draw.randn(pages, sizes.page, 1, width)
        table = draw.rand(pages).argsort().view(batch, -1).int()
        q = draw.randn(batch, 1, heads, width)
        lengths = draw.full((batch,), length, torch.int32)
        yield Point(
            f"{batch} x {length}, {heads} heads",
            draw.args(q, cache, table, lengths, sizes.latent, 0.1, True),
            moved(q, cache),
            2.0 * batch * length * heads * (width + sizes.latent),
        )


@flash_mla_sparse_fwd.bench
def _(draw: Draw) -> Points:
    sizes, tiny = sizes_of(draw), is_tiny(draw)
    width = sizes.latent + sizes.rope
    tokens, length, heads = (5, 64, 4) if tiny else (4096, 32768, 128)
    q, kv = draw.randn(tokens, heads, width), draw.randn(length, 1, width)
    indices = draw.randint(0, length, tokens, 1, sizes.topk, dtype=torch.int32)
    yield Point(
        f"{tokens} x {sizes.topk}, {heads} heads",
        draw.args(q, kv, indices, 0.1, sizes.latent),
        moved(q, kv, indices),
        2.0 * tokens * sizes.topk * heads * (width + sizes.latent),
    )
